"""MOCHA: models of related tasks, and how they are related (Smith et al., 2017), in primal form.

It minimises Σ f_i(w_i) + λ/2 tr(W Ω Wᵀ), where the columns of W are the models. For given models the best Ω
is the inverse of Σ = (WᵀW)^½, scaled here to trace N; I is added to Σ, so that Ω is never larger than I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.algorithms.stacked import mixed, moved, products, repeated
from pfedme.core.models import Model
from pfedme.core.problem import Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record
from pfedme.errors import InputError


@record
class Mocha(Algorithm):
    """R steps of w_i ← w_i − η (∇f̃_i(w_i) + λ Σ_j Ω_ij w_j) with the other w_j fixed; then Ω from all models.

    With Ω = I − 11ᵀ/N (omega=mean) the objective is pFedMe's. With λ = 0, clients train alone.
    """

    name: ClassVar[str] = "mocha"
    idea: ClassVar = "between clients"
    reference: ClassVar[str] = "Smith et al., 2017"
    sends: ClassVar[str] = "the change of its personal model w_i, which the server keeps"
    personal: ClassVar[str] = "w_i, after R steps from the model that the server keeps for the client"
    newcomer: ClassVar[str] = "nothing: Ω does not include it"
    has_global: ClassVar[bool] = False
    tuned: ClassVar = {"lam": (0.01, 0.1, 1.0)}

    lam: NonNegative = 0.1
    """λ: how strongly the relations between clients count."""
    omega: Literal["learned", "mean"] = "learned"
    """Ω: learned from the models, or I − 11ᵀ/N, which pulls each model towards the mean."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error if the model has hidden layers."""
        if len(jax.eval_shape(model.init, jax.random.key(0)).layers) > 1:
            raise InputError("mocha is for convex models, and this one has hidden layers; use --model mlr.")

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """All clients' models, and Ω."""
        models = repeated(first(0), total)
        return models, self._relations(models, total)

    def _relations(self, models: Params, total: int) -> jax.Array:
        one = jnp.eye(total, dtype=models.dtype)
        if self.omega == "mean":
            return one - 1 / total
        values, vectors = jnp.linalg.eigh(products(models))
        roots = jnp.sqrt(jnp.maximum(values, 0))
        roots = roots * (total / jnp.maximum(jnp.sum(roots), 1e-30))
        return (vectors / (1 + roots)) @ vectors.T

    def send(self, server: Any, i: jax.Array) -> Any:
        """w_i, Ω_ii and Σ_{j≠i} Ω_ij w_j."""
        models, omega = server
        return models[i], omega[i, i], mixed(omega[i].at[i].set(0), models)

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps on w_i, whose change is sent."""
        w, own, others = sent

        def pull(w_i: Params) -> Params:
            return self.lam * (own * w_i + others)

        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B, extra=pull)
        return Update(upload=w_i - w, state=state, models=Models(personal=w_i), info={})

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """The models of the cohort move, and Ω follows."""
        models = moved(server[0], uploads, cohort, self.beta)
        return models, self._relations(models, cohort.total)
