"""FedAMP: each client's model is pulled towards a mixture of models like its own (Huang et al., 2021).

The server makes u_i = Σ_j ξ_ij w_j, a gradient step on a penalty that only nearby models feel:

    ξ_ij = α A′(‖w_i − w_j‖²) for j ≠ i,   A(x) = 1 − exp(−x/σ),   ξ_ii = 1 − Σ_{j≠i} ξ_ij.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.algorithms.stacked import mixed, moved, repeated, squared_distances
from pfedme.core.problem import Problem
from pfedme.core.spec import Bound, NonNegative, Positive
from pfedme.core.tree import Params, record


@record
class FedAMP(Algorithm):
    """R steps of w_i ← w_i − η (∇f̃_i(w_i) + λ (w_i − u_i)) from u_i.

    λ is λ/α in the paper. `mix` is α A′(0) (N − 1) = α (N − 1)/σ, the most that others can count in u_i. With
    mix = 0 and λ = 0, clients are alone.
    """

    name: ClassVar[str] = "fedamp"
    idea: ClassVar = "between clients"
    reference: ClassVar[str] = "Huang et al., 2021"
    sends: ClassVar[str] = "how far its personal model w_i is from u_i; the server keeps w_i"
    personal: ClassVar[str] = "w_i, after R steps from a mixture of models like the client's own"
    newcomer: ClassVar[str] = "nothing: it has no place among the models yet"
    has_global: ClassVar[bool] = False
    tuned: ClassVar = {"lam": (0.01, 0.1, 1.0)}

    lam: NonNegative = 0.1
    """λ: how strongly w_i is pulled towards u_i."""
    mix: Annotated[float, Bound(least=0, most=1)] = 0.5
    """The weight in u_i of all other models together, if they were equal to w_i."""
    sigma: Positive = 1.0
    """σ: the squared distance at which the weight of another model has fallen to 1/e."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Params:
        """The models of all clients."""
        return repeated(first(0), total)

    def attention(self, models: Params) -> jax.Array:
        """ξ."""
        far = squared_distances(models)
        others = jnp.exp(-far / self.sigma) * (1 - jnp.eye(len(far), dtype=far.dtype))
        others = others * (self.mix / max(1, len(far) - 1))
        return others + jnp.diag(1 - jnp.sum(others, axis=1))

    def send(self, server: Params, i: jax.Array) -> Params:
        """u_i."""
        return mixed(self.attention(server)[i], server)

    def client_update(self, key: jax.Array, problem: Problem, u: Params, state: tuple) -> Update:
        """R steps near u_i to w_i; w_i − u_i is sent."""

        def pull(w: Params) -> Params:
            return self.lam * (w - u)

        w = sgd(key, problem, u, eta=self.eta, steps=self.R, B=self.B, extra=pull)
        return Update(upload=w - u, state=state, models=Models(personal=w), info={})

    def server_update(self, server: Params, uploads: Params, cohort: Cohort) -> Params:
        """w_i ← u_i + β Δ_i for the clients of the cohort; the others' models stay."""
        mixtures = mixed(self.attention(server)[cohort.clients], server)
        return moved(server, mixtures - server[cohort.clients] + self.beta * uploads, cohort, 1.0)
