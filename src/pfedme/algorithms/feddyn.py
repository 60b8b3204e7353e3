"""FedDyn: local losses that are bent so that all clients agree on the minimiser (Acar et al., 2021).

Client i minimises f_i(y) − ⟨g_i, y⟩ + λ/2 ‖y − w‖², where g_i is ∇f_i at its previous solution. The server
keeps h, the mean of all g_i, and h → 0 as w approaches the minimiser of the mean loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.spec import Positive
from pfedme.core.tree import Params, record


@record
class FedDyn(Algorithm):
    """R steps of y ← y − η (∇f̃_i(y) − g_i + λ (y − w)) from w, g_i ← g_i − λ (y − w), w ← mean y − h/λ."""

    name: ClassVar[str] = "feddyn"
    reference: ClassVar[str] = "Acar et al., 2021"
    sends: ClassVar[str] = "y − w, the change of the shared model"
    tuned: ClassVar = {"lam": (0.01, 0.1, 1.0)}

    lam: Positive = 0.1
    """λ (α in the paper): how strongly y is pulled towards w."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w, and h = 0."""
        w = first(0)
        return w, 0 * w

    def send(self, server: Any, i: jax.Array) -> Params:
        """w."""
        return server[0]

    def init(self, w: Params, first: Callable[[int], Params]) -> Params:
        """g_i = 0."""
        return 0 * w

    def client_update(self, key: jax.Array, problem: Problem, w: Params, g_i: Params) -> Update:
        """R steps to y; y − w is sent."""

        def bend(y: Params) -> Params:
            return self.lam * (y - w) - g_i

        y = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B, extra=bend)
        moved = self.received(key, y - w)  # so that h stays the mean of the g_i with any codec
        return Update(upload=y - w, state=g_i - self.lam * moved, models=Models(local=y), info={})

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """h ← h − λ |S|/N mean Δ, and w ← w + β (mean Δ − h/λ)."""
        w, h = server
        h = h - self.lam * self.change_of_mean(uploads, cohort)
        return w + self.beta * (self.combined(uploads, cohort) - 1 / self.lam * h), h

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]
