"""Groups of clients whose uploads point in similar directions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

STARTS, STEPS = 16, 20
"""How often k-means starts anew, and its steps each time."""


def directions(
    key: jax.Array, uploads: Any, present: jax.Array, k: int, starts: jax.typing.ArrayLike = STARTS
) -> jax.Array:
    """k-means of the uploads, each scaled to length one: a matrix with a row for each upload and a one in the
    column of its group. Rows of clients that are not `present` are zero, and all are if it never `starts`.

    Only inner products are needed, because every centre is a mean of uploads.

    >>> points = jnp.array([[1.0, 0.0], [0.0, 5.0], [3.0, 0.1], [0.1, 1.0]])
    >>> group = directions(jax.random.key(0), points, jnp.ones(4, bool), 2)
    >>> jnp.argmax(group, axis=1) == jnp.argmax(group[0])
    Array([ True, False,  True, False], dtype=bool)
    """
    flat = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(uploads)], axis=1)
    flat = jnp.where(present[:, None], flat, 0)
    flat = flat / jnp.maximum(jnp.linalg.norm(flat, axis=1, keepdims=True), 1e-30)
    products = flat @ flat.T
    own = jnp.diag(products)

    def distances(group: jax.Array) -> jax.Array:
        """Squared distances from the centres of the groups; infinite from an empty group."""
        size = jnp.sum(group, axis=0)
        centre = group / jnp.maximum(size, 1)
        far = own[:, None] - 2 * products @ centre + jnp.sum(centre * (products @ centre), axis=0)
        return jnp.where(size > 0, far, jnp.inf)

    def nearest(far: jax.Array) -> jax.Array:
        return jax.nn.one_hot(jnp.argmin(far, axis=1), k, dtype=flat.dtype) * present[:, None]

    def tried(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A group for each, from random first centres that are far apart, and the sum of its distances."""
        first = jnp.zeros((len(flat), k), flat.dtype)

        def chosen(j: jax.Array, seeds: jax.Array) -> jax.Array:
            gap = jnp.min(distances(seeds), axis=1)
            chance = jnp.where(jnp.isfinite(gap), jnp.maximum(gap, 0), 1.0) + 1e-12
            logits = jnp.where(present, jnp.log(chance), -jnp.inf)
            return seeds.at[jax.random.categorical(jax.random.fold_in(key, j), logits), j].set(1)

        seeds = lax.fori_loop(0, k, chosen, first)
        group = lax.fori_loop(0, STEPS, lambda _, g: nearest(distances(g)), nearest(distances(seeds)))
        return group, jnp.sum(jnp.min(distances(group), axis=1) * present)

    def better(j: jax.Array, best: tuple[jax.Array, jax.Array]) -> Any:
        group, cost = tried(jax.random.fold_in(key, j))
        # Not `cost < best[1]`: groups of uploads that are not finite must show in what becomes of them.
        return jnp.where(cost >= best[1], best[0], group), jnp.minimum(cost, best[1])

    nothing = jnp.zeros((len(flat), k), flat.dtype), jnp.array(jnp.inf, flat.dtype)
    return lax.fori_loop(0, starts, better, nothing)[0]
