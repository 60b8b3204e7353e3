"""The largest curvature of the losses of clients, from which step sizes come."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.losses import curvature
from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.engine.routing import where_rows_are
from pfedme.engine.store import Store


@partial(jax.jit, static_argnames="rows")
def largest_curvature(
    model: Model, store: Store, key: jax.Array, w: Params, who: jax.Array, home: jax.Array | None, rows: int
) -> jax.Array:
    """The largest curvature at w of the losses on mini-batches of `rows` rows of clients `who`, one of each;
    `home` has the host of each client if several share the rows."""

    def of_batch(shared: Any, i: jax.Array, k: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        store, model, key, w = shared
        problem = store.with_rows(x, y).problem(model, i)
        return curvature(problem.sample(jax.random.fold_in(key, k), rows), w)

    shared = store.without_rows(), model, key, w
    if home is not None:
        return jnp.max(where_rows_are(of_batch, shared, who, home, (store.x, store.y)))
    batches = who, jnp.arange(len(who))
    return jnp.max(lax.map(lambda ik: of_batch(shared, ik[0], ik[1], store.x, store.y), batches))
