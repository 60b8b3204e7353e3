"""Models of all clients that the server keeps, stacked."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Cohort
from pfedme.core.tree import Params

T = TypeVar("T")


def repeated(thing: T, total: int) -> T:
    """The same for every client."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (total, *a.shape)), thing)


def moved(models: Params, uploads: Params, cohort: Cohort, beta: float) -> Params:
    """The models, where those of the cohort have moved by β times their uploads."""

    def add(all: jax.Array, some: jax.Array) -> jax.Array:
        present = (cohort.rows > 0).reshape(-1, *[1] * (some.ndim - 1))
        return all.at[cohort.clients].add(beta * jnp.where(present, some, 0))

    return models.map(add, uploads)


def mixed(weights: jax.Array, models: Params) -> Params:
    """Σ_j weights[…, j] θ_j: one model, or one for each row of a matrix of weights."""
    return models.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, 1))


def products(models: Params) -> jax.Array:
    """The inner products ⟨θ_i, θ_j⟩ of all pairs."""
    flat = models.ravel(1)
    return flat @ flat.T


def squared_distances(models: Params) -> jax.Array:
    """‖θ_i − θ_j‖² of all pairs."""
    flat = models.ravel(1)
    flat = flat - jnp.mean(flat, axis=0)  # for precision
    inner = flat @ flat.T
    own = jnp.diag(inner)
    return jnp.maximum(own[:, None] + own - 2 * inner, 0)
