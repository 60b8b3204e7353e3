"""Gossip: models trained alone are smoothed over a graph of clients (Vanhaesebrouck et al., 2017).

Model propagation, the first of the paper's two methods:

    θ_i ← (α Σ_j P_ij θ_j + ᾱ c_i θ_i^sol) / (α + ᾱ c_i),   ᾱ = 1 − α,

where P_ij are the normalised weights of the graph and c_i is the confidence in θ_i^sol, here n_i/max n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.algorithms.stacked import mixed, moved, products, repeated
from pfedme.core.problem import Problem
from pfedme.core.spec import Bound, Count, NonNegative
from pfedme.core.tree import Params, record


@record
class Gossip(Algorithm):
    """R steps per round on θ_i^sol, alone; then M synchronous steps of model propagation among all clients.

    With α = 0, clients are alone. Edges between all clients have weights exp((cos(θ_i^sol, θ_j^sol) − 1)/σ).
    """

    name: ClassVar[str] = "gossip"
    idea: ClassVar = "between clients"
    reference: ClassVar[str] = "Vanhaesebrouck et al., 2017"
    sends: ClassVar[str] = "the change of its own solution"
    personal: ClassVar[str] = "θ_i, the client's own solution smoothed over the graph"
    newcomer: ClassVar[str] = "nothing: it has no place in the graph yet"
    simulated: ClassVar[str] = "clients talk to each other, without a server"
    has_global: ClassVar[bool] = False
    tuned: ClassVar = {"alpha": (0.1, 0.5, 0.9)}

    alpha: Annotated[float, Bound(least=0, below=1)] = 0.5
    """α: how much the neighbours count."""
    sigma: NonNegative = 0.1
    """σ: how fast the weight of an edge falls with the angle between two solutions; 0 for equal weights."""
    M: Count = 10
    """Steps of propagation in a round."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """θ^sol, θ and the numbers of rows, of all clients."""
        models = repeated(first(0), total)
        return models, models, jnp.ones(total, models.dtype)

    def send(self, server: Any, i: jax.Array) -> Any:
        """θ_i^sol and θ_i."""
        return server[0][i], server[1][i]

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps on θ_i^sol, whose change is sent."""
        after = sgd(key, problem, sent[0], eta=self.eta, steps=self.R, B=self.B)
        return Update(after - sent[0], state, Models(local=after, personal=sent[1]), {})

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """The clients' new solutions, and M steps in which each model moves towards its neighbours'."""
        solved, theta, rows = server
        solved = moved(solved, uploads, cohort, self.beta)
        rows = rows.at[cohort.clients].max(cohort.rows.astype(rows.dtype))
        P, c = _graph(solved, self.sigma), rows / jnp.max(rows)
        total = self.alpha + (1 - self.alpha) * c
        near, own = self.alpha / total, (1 - self.alpha) * c / total
        anchor = mixed(jnp.diag(own), solved)
        theta = lax.fori_loop(0, self.M, lambda _, theta: mixed(near[:, None] * P, theta) + anchor, theta)
        return solved, theta, rows

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> tuple[Models, dict]:
        """θ_i^sol and θ_i as they are."""
        return Models(local=sent[0], personal=sent[1]), {}


def _graph(models: Params, sigma: float) -> jax.Array:
    """P: the weight of each neighbour, whose sum is one for every client; no client is its own neighbour."""
    inner = products(models)
    size = jnp.sqrt(jnp.maximum(jnp.diag(inner), 1e-30))
    near = (inner / (size[:, None] * size) - 1) / jnp.maximum(sigma, 1e-30)
    near = jnp.where(jnp.eye(len(inner), dtype=bool), -jnp.inf, jnp.where(sigma > 0, near, 0))
    return jax.nn.softmax(near, axis=1) if len(inner) > 1 else jnp.ones_like(inner)
