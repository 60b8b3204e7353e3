"""Private gradients: sums of clipped gradients of a Poisson sample of a client's rows, plus noise.

    g = (1/B) (Σ_{j ∈ D} clip_c(∇ℓ_j(θ)) + N(0, z²c²I)) + l2 θ,   clip_c(v) = v min(1, c/‖v‖)

D contains each row with probability q = B/n, independently of the others, and B is fixed, whatever the size
of D. Adding or removing one row changes the sum by at most c.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pfedme.core.model import Model
from pfedme.core.models import Network
from pfedme.core.tree import Params

ROUNDING = 2.0**-20
"""Rows are clipped to c (1 − this), so that rounding does not make them longer than c."""
CHUNK = 8
"""Rows whose gradients are held in memory at a time, for models other than `Network`."""


@partial(jax.tree_util.register_dataclass, data_fields=["clip", "noise", "thresholds"], meta_fields=["B"])
@dataclasses.dataclass(frozen=True)
class Private:
    """What makes a client's gradients private; stacked, that of several clients."""

    clip: jax.Array
    """c: the longest gradient of a row; infinite for no clipping."""
    noise: jax.Array
    """z: the noise is N(0, z²c²I); 0 for none."""
    thresholds: jax.Array
    """The distribution of the number of rows to pick, as 64-bit numbers in pairs of 32 bits: P(N ≤ k) for
    k = 0 ... M − 1. At most M rows are picked."""
    B: int
    """|D|: the expected size of a batch, or 0 for all rows in every batch."""

    @property
    def most(self) -> int:
        """M: the largest number of rows that are picked for a batch."""
        return self.thresholds.shape[-2]

    def draw(self, key: jax.Array, start: jax.Array, count: jax.Array, shape: tuple[int, ...]) -> Batch:
        """Poisson samples of `count` rows from `start` on, as many as `shape` says.

        N ~ Poisson(−n log(1 − q)) picks with replacement, without those that repeat an earlier one, contain
        each row with probability q, independently of the others.
        """
        picks_key, count_key, noise_key = jax.random.split(key, 3)
        bits = jax.random.bits(picks_key, (*shape, self.most), jnp.uint32)
        place = scaled(bits, count)
        number = self._number(jax.random.bits(count_key, (*shape, 2), jnp.uint32))
        at = jnp.arange(self.most, dtype=jnp.int32)
        everything = (self.B == 0) | (count <= self.B)
        place = jnp.where(everything, jnp.minimum(at, count - 1), place)
        number = jnp.where(everything, count, number)
        repeated = (place[..., :, None] == place[..., None, :]) & (at[:, None] > at)
        used = (at < number[..., None]) & ~jnp.any(repeated, axis=-1)
        size = jnp.where(everything, count, self.B).astype(jnp.float32)
        keys = jax.random.split(noise_key, shape) if shape else noise_key
        return Batch(start + place, used, number, jnp.broadcast_to(size, shape), keys)

    def _number(self, bits: jax.Array) -> jax.Array:
        """The number whose place in the distribution the 64 random bits give."""
        high, low = bits[..., None, 0], bits[..., None, 1]
        t_high, t_low = self.thresholds[..., 0], self.thresholds[..., 1]
        return jnp.sum((high > t_high) | ((high == t_high) & (low >= t_low)), axis=-1, dtype=jnp.int32)


@partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "used", "number", "size", "key"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """A Poisson sample of rows, or a stack of them; those that are not `used` are padding."""

    rows: jax.Array
    used: jax.Array
    number: jax.Array
    """How many of the rows, from the first on, may be used."""
    size: jax.Array
    """B: the fixed number by which the sum over the batch is divided."""
    key: jax.Array
    """The random key of its noise."""

    def __getitem__(self, index: Any) -> Batch:
        """The batch, or batches, at `index` of a stack of them."""
        return jax.tree.map(lambda a: a[index], self)


@dataclasses.dataclass(frozen=True)
class PrivateLoss:
    """The loss on a private batch; only its noisy gradient can be had."""

    model: Model
    x: jax.Array
    y: jax.Array
    batch: Batch
    private: Private

    def at(self, k: jax.typing.ArrayLike) -> PrivateLoss:
        """The same loss for use number k of the batch, with noise of its own."""
        key = jax.random.fold_in(self.batch.key, k)
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, key=key))

    def grad(self, theta: Params) -> Params:
        """(1/B) (Σ clip_c(∇ℓ_j(θ)) + N(0, z²c²I)) + l2 θ."""
        total = self.clipped_sum(theta)
        private, share = self.private, (1 / self.batch.size).astype(theta.dtype)
        deviation = jnp.where(private.noise > 0, private.noise * private.clip, 0).astype(theta.dtype)
        noise = normal_like(self.batch.key, total)
        return total.map(lambda g, e, t: share * (g + deviation * e) + self.model.l2 * t, noise, theta)

    def clipped_sum(self, theta: Params) -> Params:
        """Σ clip_c(∇ℓ_j(θ)) over the batch."""
        b = self.batch
        return _sum_of_clipped(self.model, self.x, self.y, theta, b.rows, b.used, b.number, self.private.clip)


def normal_like(key: jax.Array, like: Params) -> Params:
    """Independent standard normal numbers in the shape of a point."""
    leaves, structure = jax.tree.flatten(like.tree)
    keys = jax.random.split(key, len(leaves))
    made = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return Params(jax.tree.unflatten(structure, made))


def capacities(most: int) -> tuple[int, ...]:
    """Sizes for which programs are compiled; a batch is padded to the next one."""
    steps = {min(most, max(1, round(share * most))) for share in (0.4, 0.5, 0.6, 0.75)}
    return (*sorted(steps - {most}), most)


@custom_vmap
def _sum_of_clipped(
    model: Model, x: jax.Array, y: jax.Array, theta: Params, rows: jax.Array, used: jax.Array,
    number: jax.Array, clip: jax.Array,
) -> Params:  # fmt: skip
    """Σ clip_c(∇ℓ_j(θ)) over the rows in use; only the first `number` are looked at."""
    sizes = capacities(rows.shape[-1])
    branches = [partial(_sum_of_first, size) for size in sizes]
    place = jnp.sum(number > jnp.array(sizes[:-1], jnp.int32))
    return lax.switch(place, branches, model, x, y, theta, rows, used, clip)


@_sum_of_clipped.def_vmap
def _for_several(
    axis_size: int, in_batched: Any, model: Model, x: jax.Array, y: jax.Array, theta: Params,
    rows: jax.Array, used: jax.Array, number: jax.Array, clip: jax.Array,
) -> tuple[Params, Any]:  # fmt: skip
    """The same for several clients at once: all are padded to the size that the largest batch needs."""
    sizes = capacities(rows.shape[-1])
    axes = [jax.tree.map(lambda own: 0 if own else None, part) for part in in_batched]
    del axes[6]  # that of `number`

    def branch(size: int) -> Any:
        return jax.vmap(partial(_sum_of_first, size), in_axes=tuple(axes), axis_size=axis_size)

    place = jnp.sum(jnp.max(number) > jnp.array(sizes[:-1], jnp.int32))
    made = lax.switch(place, [branch(size) for size in sizes], model, x, y, theta, rows, used, clip)
    return made, jax.tree.map(lambda _: True, made)


def _sum_of_first(
    size: int, model: Model, x: jax.Array, y: jax.Array, theta: Params, rows: jax.Array, used: jax.Array,
    clip: jax.Array,
) -> Params:  # fmt: skip
    """Σ clip_c(∇ℓ_j(θ)) over the first `size` rows."""
    rows, used = rows[:size], used[:size]
    x, y = (a.at[rows].get(mode="promise_in_bounds") for a in (x, y))
    sum_of = _sum_of_network if isinstance(model, Network) else _sum_of_any
    return sum_of(model, theta, x, y, used, clip)


def _sum_of_network(
    model: Any, theta: Params, x: jax.Array, y: jax.Array, used: jax.Array, clip: jax.Array
) -> Params:
    """By one backward pass for all rows.

    The gradient of row j in a layer's (W, b) is δ_j (a_j, 1)ᵀ, where a_j is the layer's input and δ_j the
    gradient in its output. Its squared length is ‖δ_j‖² (‖a_j‖² + 1), so no row's gradient is ever formed.
    """
    inputs, outputs = [x.T], []
    for W, b in theta.tree:
        outputs.append(W @ inputs[-1] + b[:, None])
        inputs.append(jax.nn.relu(outputs[-1]))

    def total(scores: jax.Array) -> jax.Array:
        return jnp.sum(model.weighted(model.losses(scores, y), y))

    slopes = [jax.grad(total)(outputs[-1])]
    for (W, _), z in zip(reversed(theta.tree[1:]), reversed(outputs[:-1]), strict=True):
        slopes.append(jnp.where(z > 0, W.T @ slopes[-1], 0))
    slopes.reverse()
    squares = [
        jnp.sum(d * d, axis=0) * (jnp.sum(a * a, axis=0) + 1) for d, a in zip(slopes, inputs, strict=False)
    ]
    scale = _shrinking(sum(squares[1:], squares[0]), used, clip)
    scaled = [d * scale for d in slopes]
    return Params([(d @ a.T, jnp.sum(d, axis=1)) for d, a in zip(scaled, inputs, strict=False)])


def _sum_of_any(
    model: Model, theta: Params, x: jax.Array, y: jax.Array, used: jax.Array, clip: jax.Array
) -> Params:
    """Row by row, a few of them at a time."""

    def of_row(x: jax.Array, y: jax.Array) -> Params:
        def loss(theta: Params) -> jax.Array:
            return jnp.sum(model.weighted(model.losses(model.scores(theta, x[None]), y[None]), y[None]))

        return jax.grad(loss)(theta)

    def add(total: Params, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Params, None]:
        x, y, used = chunk
        each = jax.vmap(of_row)(x, y)
        scale = _shrinking(jax.vmap(lambda g: g @ g)(each), used, clip)
        return total + each.map(lambda g: jnp.tensordot(scale, g, 1)), None

    def chunks(a: jax.Array) -> jax.Array:
        padding = [(0, -len(a) % CHUNK)] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding).reshape(-1, CHUNK, *a.shape[1:])

    return lax.scan(add, 0 * theta, (chunks(x), chunks(y), chunks(used)))[0]


def _shrinking(squares: jax.Array, used: jax.Array, clip: jax.Array) -> jax.Array:
    """min(1, c/‖g_j‖) for the rows in use, and 0 for the others."""
    longest = (clip * (1 - ROUNDING)).astype(squares.dtype)
    lengths = jnp.maximum(jnp.sqrt(squares), jnp.finfo(squares.dtype).tiny)
    return jnp.where(used, jnp.minimum(1, longest / lengths), 0)


def scaled(bits: jax.Array, count: jax.Array) -> jax.Array:
    """⌊bits · count / 2³²⌋: random bits as numbers 0 ... count − 1, without 64-bit arithmetic.

    >>> scaled(jnp.array([0, 2**31, 2**32 - 1], jnp.uint32), jnp.int32(1000))
    Array([  0, 500, 999], dtype=int32)
    """
    n = count.astype(jnp.uint32)
    high, low, n_high, n_low = bits >> 16, bits & 0xFFFF, n >> 16, n & 0xFFFF
    middle = high * n_low + ((low * n_low) >> 16)
    carry = (low * n_high + (middle & 0xFFFF)) >> 16
    return (high * n_high + (middle >> 16) + carry).astype(jnp.int32)


def poisson_thresholds(mean: float, most: int) -> np.ndarray:
    """P(N ≤ k) of a Poisson number for k = 0 ... most − 1, as `Private.thresholds` has them."""
    from scipy.stats import poisson

    shares = poisson.cdf(np.arange(most), mean) if np.isfinite(mean) else np.zeros(most)
    high = np.floor(shares * 2.0**32)
    low = np.floor((shares * 2.0**32 - high) * 2.0**32)
    over = high >= 2.0**32
    parts = np.where(over, 2.0**32 - 1, high), np.where(over, 2.0**32 - 1, low)
    return np.stack([part.astype(np.uint32) for part in parts], axis=-1)
