"""Code shared by the peers that use PyTorch: one thread, the clients' tensors, and a count of steps."""

from __future__ import annotations

import torch
from common import Task
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

torch.set_num_threads(1)


def tensors(task: Task) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Features and labels of each client."""
    return [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in task.rows()]


class Steps:
    """Counts the steps of all optimizers but those in `aside`."""

    def __init__(self, *aside: Optimizer) -> None:
        self.count = 0
        self.aside = aside
        self.handle = register_optimizer_step_post_hook(self.add)

    def add(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Called after each step."""
        self.count += all(optimizer is not other for other in self.aside)

    def stop(self) -> int:
        """The steps so far; no more are counted, and nothing is called any more."""
        self.handle.remove()
        return self.count
