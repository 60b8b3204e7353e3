"""Alone: each client trains by itself. What joining a federation has to beat."""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Algorithm, Models, Update, sgd
from pfedme.problem import Problem
from pfedme.tree import Params, record


@record
class Alone(Algorithm):
    """R steps of θ_i ← θ_i − η ∇f̃_i(θ_i) a round, on every client, with nothing sent or received.

    After T rounds a client has taken T·R steps, as many as a FedAvg client that joins every round.
    """

    name: ClassVar[str] = "alone"
    has_global: ClassVar[bool] = False

    def init(self, w: Params) -> Params:
        """θ_i starts where the shared model would."""
        return w

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Params) -> Update:
        """R steps on the client's own model; w comes back as it was."""
        theta = sgd(key, problem, state, eta=self.eta, steps=self.R, B=self.B)
        return Update(upload=w, state=theta, models=Models(personal=theta), info={})

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The client's own model as it stands."""
        return Models(personal=state), {}
