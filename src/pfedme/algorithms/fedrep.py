"""FedRep: a shared representation and private heads, trained in turn (Collins et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import jax

from pfedme.algorithms.base import Models, Update, sgd
from pfedme.algorithms.partly import FedPer
from pfedme.core.problem import Problem
from pfedme.core.spec import Count
from pfedme.core.tree import Params, record


@record
class FedRep(FedPer):
    """H steps on the private last layers with the others fixed, then R steps on the others."""

    name: ClassVar[str] = "fedrep"
    reference: ClassVar[str] = "Collins et al., 2021"

    H: Count = 10
    """Steps on the private layers at the beginning of a round."""

    @property
    def gradients(self) -> int:
        """H of the private layers, and R of the shared ones."""
        return self.H + self.R

    def client_update(self, key: jax.Array, problem: Problem, body: Params, head: Params) -> Update:
        """The head first, then the body; the change of the body is sent."""
        first, then = jax.random.split(key)
        head = sgd(first, problem, head, eta=self.eta, steps=self.H, B=self.B, fixed=body)
        after = sgd(then, problem, body, eta=self.eta, steps=self.R, B=self.B, fixed=head)
        return Update(upload=after - body, state=head, models=Models(personal=after | head), info={})
