"""FedMeta: a shared model and step sizes with which one step personalizes (Meta-SGD, Chen et al., 2018).

The server learns w and a step size a for each coordinate, by gradients of f_i(w − a ∇f_i(w; D); D′) in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update
from pfedme.core.problem import Loss, Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record


@record
class FedMeta(Algorithm):
    """R steps of (w, a) ← (w, a) − η ∇f̃_i(w − a ∇f̃_i(w; D); D′), then a mean of both. With R = 1 it is the
    paper's; with R = 1 and a fixed, it is Per-FedAvg with R = 1."""

    name: ClassVar[str] = "fedmeta"
    reference: ClassVar[str] = "Chen et al., 2018"
    sends: ClassVar[str] = "the changes of the shared model and of its step sizes"
    personal: ClassVar[str] = "w after one step of the learned sizes"
    newcomer: ClassVar[str] = "w and the step sizes, for one step"
    steps: ClassVar[tuple[str, ...]] = ("eta", "alpha")
    tuned: ClassVar = {}
    averages: ClassVar[bool] = True

    eta: NonNegative = 0.0
    """η: step size of w and of a (β in the paper); 0 for 1/(L (1 + αL)²)."""
    alpha: NonNegative = 0.0
    """α: the first value of every step size a; 0 for 1/(2L)."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """As for Per-FedAvg, while a is near α."""
        alpha = self.alpha or 1 / (2 * L)
        return {"alpha": alpha, "eta": 1 / (L * (1 + alpha * L) ** 2)}

    @property
    def gradients(self) -> int:
        """Two gradients and a Hessian-vector product in each step."""
        return 4 * self.R

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w and a."""
        w = first(0)
        return w, w.map(lambda leaf: jnp.full_like(leaf, self.alpha))

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps on w and a, whose changes are sent."""

        def step(carry: tuple[Params, Params], rows: jax.Array) -> tuple[Any, None]:
            adapt, judge = map(problem.loss, rows)
            slopes = jax.grad(lambda both: judge(_adapted(both, adapt)))(carry)
            w, a = (part - self.eta * slope for part, slope in zip(carry, slopes, strict=True))
            return (w, a), None

        batches = problem.draw(key, self.R + 1, 2, self.B)
        (w, a), _ = lax.scan(step, sent, batches[:-1])
        theta = _adapted(sent, problem.loss(batches[-1, 0]))
        return Update((w - sent[0], a - sent[1]), state, Models(local=w, personal=theta), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """w and a move by β times the mean of their changes."""
        mean = self.combined(uploads, cohort)
        w, a = (part + self.beta * change for part, change in zip(server, mean, strict=True))
        return w, a

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]


def _adapted(both: tuple[Params, Params], f: Loss) -> Params:
    """w − a ∇f(w), coordinate by coordinate."""
    w, a = both
    return w - a.map(jnp.multiply, f.grad(w))
