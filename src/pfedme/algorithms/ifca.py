"""IFCA: several shared models, of which each client uses the one that fits its training rows best (iterative
federated clustering, Ghosh et al., 2020; HypCluster, Mansour et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.algorithms.kmeans import STARTS, directions
from pfedme.core.models import Model
from pfedme.core.problem import Problem
from pfedme.core.spec import Count, Index
from pfedme.core.tree import Params, record
from pfedme.errors import InputError


@record
class IFCA(Algorithm):
    """Client i takes R steps from w_j, where j = argmin f_i(w_j); w_j moves by the mean of its clients."""

    name: ClassVar[str] = "ifca"
    idea: ClassVar = "several shared"
    reference: ClassVar[str] = "Ghosh et al., 2020; Mansour et al., 2020"
    sends: ClassVar[str] = "w_i − w_j, and which model w_j it has chosen"
    personal: ClassVar[str] = "the shared model with the least loss on the client's training rows"
    newcomer: ClassVar[str] = "the shared model with the least loss on its training rows"
    has_global: ClassVar[bool] = False

    clusters: Count = 4
    """k: how many shared models there are."""
    start: Literal["directions", "random"] = "directions"
    """How models begin: after rounds with one model (warmup), each from a group of clients whose uploads have
    similar directions; or at random, as in the paper."""
    warmup: Index = 30
    """Rounds with one model before the clients of the next round are grouped, if start is directions."""

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error if there are fewer clients than models."""
        if self.clusters > clients:
            raise InputError(
                f"{self.name} trains {self.clusters} models, more than there are clients ({clients}); use "
                f"--clusters {clients} or fewer, or more clients."
            )

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """Minus the rounds until models are independent, and the models, stacked."""
        alike = self.start == "directions"
        models = [first(0 if alike else j) for j in range(self.clusters)]
        left = jnp.int32(-1 - self.warmup if alike else 0)
        return left, jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps from the best model; their sum, and which model it was, are sent."""
        (_, w), info = self.answer(key, problem, sent, state)
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        chosen = (jnp.arange(self.clusters) == info["cluster"]).astype(w.dtype)
        return Update((chosen, w_i - w), state, Models(local=w_i, personal=w), info)

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """Each model moves by the mean of the clients that chose it; one that nobody chose stays."""
        (left, models), (chosen, delta) = server, uploads
        if self.start == "directions":
            now = left == -1  # not as a condition, of which vmap would compute both branches in every round
            found = directions(cohort.key, delta, cohort.rows > 0, self.clusters, jnp.where(now, STARTS, 0))
            chosen = jnp.where(now, found, chosen)

        def moved(w: Params, weights: jax.Array) -> Params:
            total = jnp.sum(weights)
            step = self.combine(delta, weights / jnp.where(total > 0, total, 1), cohort.key)
            return w + self.beta * step.map(lambda a: jnp.where(total > 0, a, 0))

        after = jax.vmap(moved)(models, self.weights(cohort) * chosen.T)
        return jnp.minimum(left + 1, 0), after.map(lambda a: jnp.where(left < -1, a[:1], a))

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Any:
        """The best model as it was received."""
        best = jnp.argmin(jax.vmap(problem.mean_loss)(sent[1]))
        return Models(personal=sent[1][best]), {"cluster": best}


@record
class HypCluster(IFCA):
    """Another name for ifca."""

    name: ClassVar[str] = "hypcluster"
