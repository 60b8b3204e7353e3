"""Ditto: a personal model near FedAvg's (Li et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Accesses, Models, Update, sgd
from pfedme.algorithms.fedavg import FedAvg
from pfedme.core.problem import Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record


@record
class Ditto(FedAvg):
    """FedAvg for w, and R steps of v ← v − η (∇f̃_i(v) + λ (v − w)) for the personal model.

    With λ = 0, v is trained alone.
    """

    name: ClassVar[str] = "ditto"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Li et al., 2021"
    personal: ClassVar[str] = "v, which the client keeps and trains in its rounds, pulled towards w"
    accesses: ClassVar = Accesses(round=("R", "R"))
    tuned: ClassVar = {"lam": (0.05, 0.5, 2.0)}

    lam: NonNegative = 0.5
    """λ: how strongly v is pulled towards w."""

    @property
    def gradients(self) -> int:
        """One of w_i and one of v in each step."""
        return 2 * self.R

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def init(self, w: Params, first: Callable[[int], Params]) -> Params:
        """v, which starts at the initial w."""
        return first(0)

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps on w_i, and R steps on v with batches of its own; w_i − w is sent."""
        update = super().client_update(key, problem, w, state)

        def pull(v: Params) -> Params:
            return self.lam * (v - w)

        own = jax.random.split(key)[0]  # key itself was used for w_i
        v = sgd(own, problem, state, eta=self.eta, steps=self.R, B=self.B, extra=pull)
        return update._replace(state=v, models=update.models._replace(personal=v))

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """v as the client keeps it."""
        return Models(personal=state), {}
