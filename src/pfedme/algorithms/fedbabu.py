"""FedBABU: a shared body under a head that is only trained at the end (Oh et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Cohort, Models, Update, sgd
from pfedme.algorithms.partly import FedPer
from pfedme.core.problem import Problem
from pfedme.core.spec import Count
from pfedme.core.tree import Params, record


@record
class FedBABU(FedPer):
    """FedAvg of the body, while the head stays as it was initialised; clients then fine-tune both."""

    name: ClassVar[str] = "fedbabu"
    reference: ClassVar[str] = "Oh et al., 2022"
    personal: ClassVar[str] = "w after F steps on all layers"
    newcomer: ClassVar[str] = "w, to be fine-tuned"
    has_global: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    private: Count = 1
    """How many layers belong to the head."""
    F: Count = 500
    """Fine-tuning steps, of size eta on batches of B rows."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Params:
        """The initial model; its head never changes."""
        return first(0)

    def init(self, sent: Params, first: Callable[[int], Params]) -> Any:
        """Nothing is kept."""
        return ()

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps on the body, whose change is sent."""
        head = self.kept(w)
        body = w.without(head)
        after = sgd(key, problem, body, eta=self.eta, steps=self.R, B=self.B, fixed=head)
        return Update(upload=after - body, state=state, models=Models(local=after | head), info={})

    def server_update(self, w: Params, uploads: Params, cohort: Cohort) -> Params:
        """The mean of the bodies, with the same head."""
        head = self.kept(w)
        return w.without(head) + self.beta * self.combined(uploads, cohort) | head

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The local model, and w after F steps on all layers."""
        update = self.client_update(key, problem, w, state)
        tune = jax.random.split(key)[0]  # key itself was used for the local model
        theta = sgd(tune, problem, w, eta=self.eta, steps=self.F, B=self.B)
        return update.models._replace(personal=theta), update.info
