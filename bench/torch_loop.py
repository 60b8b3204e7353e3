"""The same algorithms as they are usually run: PyTorch, one client after another in a Python loop.

Competent rather than naive: tensors stay in memory, batches are drawn with one index operation, updates use
torch's fused foreach operations, and there is no optimizer object or data loader in between.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import cross_entropy


def network(features: int, hidden: tuple[int, ...], classes: int) -> torch.nn.Sequential:
    """Linear layers with ReLU between them."""
    sizes, layers = (features, *hidden, classes), []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Loop:
    """Clients' rows, a shared model, and a round of each algorithm over the clients in `who`."""

    def __init__(self, federation, hidden: tuple[int, ...], *, R: int = 20, B: int = 20) -> None:
        self.R, self.B = R, B
        x, y = torch.from_numpy(federation.x), torch.from_numpy(federation.y).long()
        ends = federation.start + federation.n_train
        self.rows = [(x[a:b], y[a:b]) for a, b in zip(federation.start, ends, strict=True)]
        self.model = network(federation.features, hidden, federation.classes)
        self.parameters = list(self.model.parameters())
        self.w = [p.detach().clone() for p in self.parameters]

    def gradient(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradient of the mean loss at the model's parameters."""
        return torch.autograd.grad(cross_entropy(self.model(x), y), self.parameters)

    def batch(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """B training rows, drawn with replacement."""
        x, y = self.rows[client]
        at = torch.randint(len(y), (self.B,))
        return x[at], y[at]

    def put(self, values: list[torch.Tensor]) -> None:
        """Sets the model's parameters."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, values)

    def mean(self, uploads: list[list[torch.Tensor]]) -> None:
        """The shared model becomes the mean of the uploads."""
        self.w = [torch.stack(layer).mean(0) for layer in zip(*uploads, strict=True)]

    def pfedme(self, who, *, lam=15.0, alpha=0.01, eta=0.01, K=5) -> None:
        """A round of Algorithm 1."""
        uploads = []
        for client in who:
            w = [p.clone() for p in self.w]
            self.put(w)
            for _ in range(self.R):
                x, y = self.batch(client)
                for _ in range(K):
                    step = self.gradient(x, y)
                    with torch.no_grad():
                        pull = torch._foreach_sub(self.parameters, w)
                        torch._foreach_add_(step, pull, alpha=lam)
                        torch._foreach_add_(self.parameters, step, alpha=-alpha)
                with torch.no_grad():
                    torch._foreach_add_(w, torch._foreach_sub(w, self.parameters), alpha=-eta * lam)
            uploads.append(w)
        self.mean(uploads)

    def fedavg(self, who, *, eta=0.01) -> None:
        """A round of FedAvg."""
        uploads = []
        for client in who:
            self.put(self.w)
            for _ in range(self.R):
                step = self.gradient(*self.batch(client))
                with torch.no_grad():
                    torch._foreach_add_(self.parameters, step, alpha=-eta)
            uploads.append([p.detach().clone() for p in self.parameters])
        self.mean(uploads)

    def per_fedavg(self, who, *, alpha=0.01, eta=0.001) -> None:
        """A round of Per-FedAvg with exact Hessian-vector products."""
        uploads = []
        for client in who:
            w = [p.clone() for p in self.w]
            for _ in range(self.R):
                self.put(w)
                self.put(torch._foreach_add(w, self.gradient(*self.batch(client)), alpha=-alpha))
                v = self.gradient(*self.batch(client))
                self.put(w)
                x, y = self.batch(client)
                g = torch.autograd.grad(cross_entropy(self.model(x), y), self.parameters, create_graph=True)
                Hv = torch.autograd.grad(g, self.parameters, grad_outputs=v)
                torch._foreach_add_(w, torch._foreach_add(v, Hv, alpha=-alpha), alpha=-eta)
            uploads.append(w)
        self.mean(uploads)
