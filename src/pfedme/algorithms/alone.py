"""Alone: each client trains on its own. This is the baseline that joining a federation has to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Accesses, Algorithm, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record

STRENGTHS = (3.0, 0.6, 0.12, 0.025, 0.005, 0.001, 0.0)
"""The l2 strengths that a client tries, strongest first."""


@record
class Alone(Algorithm):
    """R steps of θ_i ← (θ_i − η ∇f̃_i(θ_i))/(1 + η l2_i) per round on every client; nothing is sent.

    After T rounds a client has taken T·R steps, as many as a FedAvg client that joins every round. l2_i
    shrinks weights, not biases: in the limit, a client predicts the frequencies of its own labels.
    """

    name: ClassVar[str] = "alone"
    idea: ClassVar = "not federated"
    personal: ClassVar[str] = "θ_i, trained on the client's rows"
    newcomer: ClassVar[str] = "nothing: it trains on its own"
    simulated: ClassVar[str] = "nothing is shared"
    federated: ClassVar[bool] = False
    accesses: ClassVar = Accesses(round=("R",))
    has_global: ClassVar[bool] = False

    l2: Literal["own", "model"] = "own"
    """own: each client chooses its own l2 strength on validation rows; model: all use the model's."""

    def init(self, sent: Params, first: Callable[[int], Params]) -> Any:
        """θ_i, which starts where the shared model would, and l2_i."""
        return (sent, jnp.zeros(())) if self.l2 == "own" else sent

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps on the client's own model; nothing is sent.

        Where l2_i is a vector, there is a model for each of its strengths, and all train on the same rows.
        """
        theta, l2 = state if self.l2 == "own" else (state, None)

        def train(theta: Params, l2: jax.Array | None) -> Params:
            return sgd(key, problem, theta, eta=self.eta, steps=self.R, B=self.B, l2=l2)

        theta = train(theta, l2) if l2 is None or l2.ndim == 0 else jax.vmap(train)(theta, l2)
        kept = (theta, l2) if self.l2 == "own" else theta
        return Update(upload=(), state=kept, models=Models(personal=theta), info={})

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The client's current model."""
        return Models(personal=state[0] if self.l2 == "own" else state), {}


@record
class Pooled(Alone):
    """Trains one model on the rows of all clients, as if they were a single client's: what would be possible
    if data could be shared. For simulations only."""

    name: ClassVar[str] = "pooled"
    personal: ClassVar[str] = ""
    newcomer: ClassVar[str] = "the shared model"
    simulated: ClassVar[str] = "it needs the rows of all clients in one place"
    pools: ClassVar[bool] = True

    def shared(self, server: Any, clients: Any) -> Params:
        """The only client's model."""
        return (clients[0] if self.l2 == "own" else clients)[0]
