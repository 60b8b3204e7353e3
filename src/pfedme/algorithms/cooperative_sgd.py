"""Cooperative SGD: clients average with their neighbours (Wang and Joshi, 2019).

X ← (X − η G) M,   with a column of X for each client and a mixing matrix M whose rows and columns sum to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.algorithms.stacked import mixed, moved, repeated
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record


@record
class CooperativeSGD(Algorithm):
    """R steps of SGD from each client's own x_i, then x_i ← Σ_j M_ij x_j; w is the mean of all x_i.

    With graph=none (M = I) clients are alone. With graph=full (M = 11ᵀ/N), and all clients in every round, it
    is FedAvg with equal weights.
    """

    name: ClassVar[str] = "cooperative-sgd"
    idea: ClassVar = "between clients"
    reference: ClassVar[str] = "Wang and Joshi, 2019"
    sends: ClassVar[str] = "the change of its model x_i"
    personal: ClassVar[str] = "x_i, the client's model after averaging with its neighbours"
    newcomer: ClassVar[str] = "the mean of all clients' models"
    simulated: ClassVar[str] = "clients talk to each other, without a server"

    graph: Literal["ring", "full", "none"] = "ring"
    """With whom a client averages: itself and its two neighbours in a ring, all clients, or nobody."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Params:
        """The models of all clients."""
        return repeated(first(0), total)

    def send(self, server: Params, i: jax.Array) -> Params:
        """x_i."""
        return server[i]

    def client_update(self, key: jax.Array, problem: Problem, x: Params, state: tuple) -> Update:
        """R steps on x_i, whose change is sent."""
        after = sgd(key, problem, x, eta=self.eta, steps=self.R, B=self.B)
        return Update(upload=after - x, state=state, models=Models(local=after, personal=x), info={})

    def server_update(self, server: Params, uploads: Params, cohort: Cohort) -> Params:
        """The new models, averaged over neighbours."""
        one = jnp.eye(cohort.total, dtype=server.dtype)
        mixing = {
            "ring": (one + jnp.roll(one, 1, axis=0) + jnp.roll(one, -1, axis=0)) / 3,
            "full": jnp.full_like(one, 1 / cohort.total),
            "none": one,
        }[self.graph]
        return mixed(mixing, moved(server, uploads, cohort, self.beta))

    def shared(self, server: Params, clients: tuple) -> Params:
        """The mean of all clients' models."""
        return server.map(lambda a: jnp.mean(a, axis=0))

    def answer(self, key: jax.Array, problem: Problem, x: Params, state: tuple) -> tuple[Models, dict]:
        """x_i as it is."""
        return Models(personal=x), {}
