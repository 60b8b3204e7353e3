"""FedAvg: local SGD and averaging (McMahan et al., 2017)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Accesses, Aggregation, Algorithm, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record


@record
class FedAvg(Algorithm):
    """R steps of w_i ← w_i − η ∇f̃_i(w_i) from w on each client, then a mean over the cohort."""

    name: ClassVar[str] = "fedavg"
    reference: ClassVar[str] = "McMahan et al., 2017"
    sends: ClassVar[str] = "w_i − w, the change of the shared model"
    accesses: ClassVar = Accesses(round=("R",), repeats=True)

    aggregation: Aggregation = "samples"
    """Weights of the uploads: proportional to the training rows, as in McMahan et al., or equal."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R local steps to w_i; w_i − w is sent. There is no personal model."""
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        return Update(upload=w_i - w, state=state, models=Models(local=w_i), info={})
