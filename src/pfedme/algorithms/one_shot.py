"""One-shot averaging: clients train alone, and send their models once, at the end (Guha et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record


@record
class OneShot(Algorithm):
    """R steps of θ_i ← θ_i − η ∇f̃_i(θ_i) per round on every client; w is the mean of the θ_i.

    It is FedAvg with a single round of T·R local steps of all clients, and equal weights. The paper's
    ensembles, which keep all θ_i and average their probabilities, are `pfedme.Ensemble`.
    """

    name: ClassVar[str] = "one-shot"
    reference: ClassVar[str] = "Guha et al., 2019"
    simulated: ClassVar[str] = "it is fedavg with --rounds 1, which can be"
    federated: ClassVar[bool] = False

    def init(self, sent: Params, first: Callable[[int], Params]) -> Params:
        """θ_i, which starts at the initial model."""
        return sent

    def client_update(self, key: jax.Array, problem: Problem, w: Params, theta: Params) -> Update:
        """R steps on θ_i; nothing is sent yet."""
        theta = sgd(key, problem, theta, eta=self.eta, steps=self.R, B=self.B)
        return Update(upload=(), state=theta, models=Models(local=theta), info={})

    def shared(self, server: Any, clients: Any) -> Params:
        """The mean of the clients' models."""
        return clients.map(lambda a: jnp.mean(a, axis=0))

    def answer(self, key: jax.Array, problem: Problem, w: Params, theta: Params) -> tuple[Models, dict]:
        """The client's current model."""
        return Models(local=theta), {}
