"""FedAdam, FedYogi and FedAdagrad: adaptive steps on the server (Reddi et al., 2021, Algorithm 2).

The server treats Δ, the combined upload, as a gradient. There is no bias correction, and v starts at τ².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Cohort
from pfedme.algorithms.fedavg import FedAvg
from pfedme.core.spec import Bound, Positive
from pfedme.core.tree import Params, record

Decay = Annotated[float, Bound(least=0, most=1)]


@record
class FedAdagrad(FedAvg):
    """FedAdam with v ← v + Δ², so that steps become smaller and smaller, and by default with m = Δ."""

    name: ClassVar[str] = "fedadagrad"
    reference: ClassVar[str] = "Reddi et al., 2021"
    tuned: ClassVar = {"beta": (0.003, 0.01, 0.03)}
    averages: ClassVar[bool] = True

    beta: Positive = 0.01
    """β (η in the paper): step size of the server."""
    beta1: Decay = 0.0
    """β₁: decay of m, the mean of the combined uploads Δ."""
    tau: Positive = 0.001
    """τ: added to √v, and the square root of the first v; large values adapt less."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w, m = 0 and v = τ²."""
        w = first(0)
        return w, 0 * w, w.map(lambda leaf: jnp.full_like(leaf, self.tau**2))

    def send(self, server: Any, i: jax.Array) -> Params:
        """w."""
        return server[0]

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        """The next v, from v and Δ²."""
        return v + square

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """An adaptive step along m."""
        w, m, v = server
        delta = self.combined(uploads, cohort)
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = v.map(lambda v, d: self.second_moment(v, d**2), delta)
        return w + self.beta * m.map(lambda m, v: m / (jnp.sqrt(v) + self.tau), v), m, v

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]


@record
class FedAdam(FedAdagrad):
    """FedAvg's clients; m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², w ← w + β m/(√v + τ), coordinatewise.

    With β₁ = 0, β₂ = 1 and β = 2τ this is FedAvg.
    """

    name: ClassVar[str] = "fedadam"

    beta1: Decay = 0.9
    """β₁: decay of m, the mean of the combined uploads Δ."""
    beta2: Decay = 0.99
    """β₂: decay of v, the mean of their squares."""

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        """The next v, from v and Δ²."""
        return self.beta2 * v + (1 - self.beta2) * square


@record
class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β₂) Δ² sign(v − Δ²), which forgets a large v more slowly."""

    name: ClassVar[str] = "fedyogi"

    def second_moment(self, v: jax.Array, square: jax.Array) -> jax.Array:
        """The next v, from v and Δ²."""
        return v - (1 - self.beta2) * square * jnp.sign(v - square)
