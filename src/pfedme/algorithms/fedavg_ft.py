"""FedAvg with fine-tuning: the personal model is the shared one after more steps on the client's rows."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Accesses, Models, sgd
from pfedme.algorithms.fedavg import FedAvg
from pfedme.core.problem import Problem
from pfedme.core.spec import Count
from pfedme.core.tree import Params, record


@record
class FedAvgFT(FedAvg):
    """FedAvg; when models are requested, each client fine-tunes w with F further SGD steps."""

    name: ClassVar[str] = "fedavg-ft"
    personal: ClassVar[str] = "w after F steps on the client's rows"
    accesses: ClassVar = Accesses(round=("R",), answer=("F",), repeats=True)
    newcomer: ClassVar[str] = "the shared model, to be fine-tuned"

    F: Count = 500
    """Fine-tuning steps, of size eta on batches of B rows."""

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """FedAvg's local model, and θ_i = w after F local steps."""
        models, info = super().answer(key, problem, w, state)
        tune = jax.random.split(key)[0]  # key itself was used for the local model
        theta = sgd(tune, problem, w, eta=self.eta, steps=self.F, B=self.B)
        return models._replace(personal=theta), info
