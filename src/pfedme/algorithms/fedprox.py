"""FedProx: local SGD with a pull towards the shared model (Li et al., 2020)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Models, Update, sgd
from pfedme.algorithms.fedavg import FedAvg
from pfedme.core.problem import Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record


@record
class FedProx(FedAvg):
    """R steps of w_i ← w_i − η (∇f̃_i(w_i) + λ (w_i − w)) from w on each client, then a mean.

    With λ = 0 this is FedAvg.
    """

    name: ClassVar[str] = "fedprox"
    reference: ClassVar[str] = "Li et al., 2020"
    tuned: ClassVar = {"lam": (0.01, 0.1, 1.0)}

    lam: NonNegative = 1.0
    """λ (μ in the paper): how strongly w_i is pulled towards w."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps near w to w_i; w_i − w is sent."""

        def pull(w_i: Params) -> Params:
            return self.lam * (w_i - w)

        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B, extra=pull)
        return Update(upload=w_i - w, state=state, models=Models(local=w_i), info={})
