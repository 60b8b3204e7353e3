"""Clients' work on the hosts that have their rows.

In one process, each device works on an equal part of a cohort, in the order of the cohort. A cohort's members
may have their rows elsewhere, and more of them on one host than on another. A device then works through the
members of its host in as many passes as it needs, each as large as its equal part would have been, because
the last bits of a result depend on how many clients are mapped over together. Which ones does not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.algorithms import Algorithm
from pfedme.algorithms.aggregate import Combine, Mean
from pfedme.core.tree import record
from pfedme.engine.devices import (
    as_shared_out,
    from_its_device,
    hosts,
    lanes,
    on_host,
    over_devices,
    replicate,
)

T = TypeVar("T")


class Route(NamedTuple):
    """Where each member of a cohort is worked on."""

    lanes: Any
    """For each device, indices of members, and then −1: a row for each round."""
    home: Any
    """The host of every client of the federation."""

    @classmethod
    def of(cls, home: np.ndarray, who: np.ndarray) -> Route | None:
        """The route of clients `who`, one row for each round; None if all are where equal parts put them."""
        size = -(-who.shape[1] // jax.device_count())
        parts = np.arange(who.shape[1]) // (size * jax.device_count() // hosts())
        if (home[who] == parts).all():
            return None
        dealt = [lanes(own, size) for own in home[who]]
        length = max(map(len, dealt)) // jax.device_count()
        rows = [np.reshape(own, (jax.device_count(), -1)) for own in dealt]
        rows = [np.pad(own, ((0, 0), (0, length - own.shape[1])), constant_values=-1) for own in rows]
        return cls(np.stack(rows).reshape(len(who), -1).astype(np.int32), home.astype(np.int32))

    def at(self, k: Any) -> Route:
        """The route of round k of the given ones."""
        return self._replace(lanes=self.lanes[k])


@record
class MeanInOrder:
    """`Mean` as one process computes it: a sum on each device, and their sum in the order of the devices.

    Several hosts add up in an order of their own, and with more than two devices that changes the last bits.
    It is not among the ways to combine that have a name, because it is `Mean`.
    """

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """The weighted mean of each array."""
        devices = jax.device_count()

        def part(_: Any, own: tuple[jax.Array, jax.Array]) -> jax.Array:
            weights, a = own
            return jnp.tensordot(weights, a, 1)[None]

        def mean(a: jax.Array) -> jax.Array:
            kind = a.dtype if jnp.issubdtype(a.dtype, jnp.floating) else weights.dtype
            missing = -len(a) % devices
            work = jnp.pad(weights.astype(kind), (0, missing)), _with_zeros(a.astype(kind), missing)
            sums = replicate(over_devices(part, (), work))
            return functools.reduce(operator.add, [sums[k] for k in range(devices)])

        return jax.tree.map(mean, uploads)


def _with_zeros(a: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(a, [(0, rows)] + [(0, 0)] * (a.ndim - 1))


def in_order(algorithm: Algorithm) -> Algorithm:
    """The algorithm as several hosts carry it out."""
    if hosts() == 1 or jax.device_count() == 2 or type(algorithm.combine) is not Mean:
        return algorithm
    return dataclasses.replace(algorithm, combine=cast(Combine, MeanInOrder()))


def routed(
    part: Callable[..., Any], shared: Any, run: jax.Array, who: jax.Array, rows: Any, route: Route
) -> Any:
    """`over_devices(part, shared, (run, who), rows)` on devices that have the clients' rows."""
    size = len(who) // jax.device_count()

    def on_device(shared: Any, mine: jax.Array, *rows: jax.Array) -> Any:
        shared, run, who, home = shared
        any_own = jnp.argmax(home == on_host()).astype(who.dtype)

        def made(at: jax.Array) -> Any:
            return part(shared, (run[at], jnp.where(at < 0, any_own, who[at])), *rows)

        def one_pass(k: jax.Array, found: Any) -> Any:
            at = lax.dynamic_slice_in_dim(mine, k * size, size)
            place = jnp.where(at < 0, len(who), at)
            return jax.tree.map(lambda a, new: a.at[place].set(new, mode="drop"), found, made(at))

        shapes = jax.eval_shape(made, mine[:size])
        nothing = jax.tree.map(lambda a: jnp.zeros((len(who), *a.shape[1:]), a.dtype), shapes)
        passes = -(-jnp.sum(mine >= 0) // size)
        return jax.tree.map(from_its_device, lax.fori_loop(0, passes, one_pass, nothing))

    shared = shared, run, who, route.home
    found = over_devices(on_device, shared, route.lanes, rows, everywhere=True)
    # What follows, such as a mean over the cohort, is then computed as it would be in one process.
    return as_shared_out(found)


def where_rows_are(
    f: Callable[..., jax.Array], shared: Any, who: jax.Array, home: jax.Array, rows: Any
) -> jax.Array:
    """f(shared, i, k, *rows) for each i = who[k], computed on its host; the numbers must be at least 0."""

    def on_device(shared: Any, _: jax.Array, *rows: jax.Array) -> jax.Array:
        shared, who, home = shared
        here = home[who] == on_host()
        i = jnp.where(here, who, jnp.argmax(home == on_host()).astype(who.dtype))
        found = lax.map(lambda ik: f(shared, *ik, *rows), (i, jnp.arange(len(who))))
        return jnp.where(here, found, 0)[None]

    devices = np.arange(jax.device_count())
    return jnp.max(over_devices(on_device, (shared, who, home), devices, rows), axis=0)
