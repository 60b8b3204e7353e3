"""Private gradients: sums of clipped gradients of a Poisson sample of a client's rows, plus noise.

    g = (1/B) (Σ_{j ∈ D} clip_c(∇ℓ_j(θ)) + N(0, z²c²I)) + l2 θ,   clip_c(v) = v min(1, c/‖v‖)

D contains each row with probability q = B/n, independently of the others, and B is fixed, whatever the size
of D. Adding or removing one row changes the sum by at most c.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pfedme.core.model import Layer, Model
from pfedme.core.models import Network
from pfedme.core.noise import BATCHES, USES, bits, normal_like, threefry, words_of
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

    @property
    def deviation(self) -> jax.Array:
        """zc: the standard deviation of the noise in a sum; 0 without noise, even if c is infinite."""
        return jnp.where(self.noise > 0, self.noise * self.clip, 0)

    def draw(self, key: jax.Array, start: jax.Array, count: jax.Array, shape: tuple[int, ...]) -> Batch:
        """Poisson samples of `count` rows from `start` on, as many as `shape` says.

        N ~ Poisson(−n log(1 − q)) picks with replacement, without those that repeat an earlier one, contain
        each row with probability q, independently of the others.
        """
        most = self.most
        # A word for each pick, and then two words each for the number of picks and for the key of the noise.
        a, b = bits(words_of(key), (*shape, most + 2), BATCHES)
        at = jnp.arange(most, dtype=jnp.int32)
        everything = (self.B == 0) | (count <= self.B)
        place = jnp.where(everything, jnp.minimum(at, count - 1), scaled(a[..., :most], count))
        number = jnp.where(everything, count, self._number(a[..., most], b[..., most]))
        repeats = (place[..., :, None] == place[..., None, :]) & (at[:, None] < at)  # of an earlier pick
        used = (at < number[..., None]) & ~jnp.any(repeats, axis=-2)
        place = jnp.where(used, place, place[..., :1])  # so that padding reads no rows from memory
        size = jnp.where(everything, count, self.B).astype(jnp.float32)
        keys = jnp.stack([a[..., most + 1], b[..., most + 1]], axis=-1)
        return Batch(start + place, used, number, jnp.broadcast_to(size, shape), keys)

    def _number(self, high: jax.Array, low: jax.Array) -> jax.Array:
        """The number whose place in the distribution 64 random bits give."""
        high, low = high[..., None], low[..., None]
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
    """The random key of its noise, as two words."""

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
        return dataclasses.replace(
            self, batch=dataclasses.replace(self.batch, key=key_of_use(self.batch.key, k))
        )

    def grad(self, theta: Params) -> Params:
        """(1/B) (Σ clip_c(∇ℓ_j(θ)) + N(0, z²c²I)) + l2 θ."""
        # Noise is made in a loop of its own: XLA does not vectorise it together with other arithmetic.
        noise = lax.optimization_barrier(normal_like(self.batch.key, theta))
        total = self.clipped_sum(theta)
        share, deviation = (
            (1 / self.batch.size).astype(theta.dtype),
            self.private.deviation.astype(theta.dtype),
        )
        return total.map(lambda g, e, t: share * (g + deviation * e) + self.model.l2 * t, noise, theta)

    def clipped_sum(self, theta: Params) -> Params:
        """Σ clip_c(∇ℓ_j(θ)) over the batch."""
        b, private = self.batch, self.private
        return sized(capacities(private.B, private.most), _sum_of_first)(
            b.number, self.model, self.x, self.y, theta, b.rows, b.used, private.clip
        )


def key_of_use(key: jax.Array, k: jax.typing.ArrayLike) -> jax.Array:
    """The key of the noise in use number k of a batch with this key."""
    return jnp.stack(threefry(key, jnp.asarray(k).astype(jnp.uint32), USES), axis=-1)


def capacities(B: int, most: int) -> tuple[int, ...]:
    """Numbers of picks for which programs are compiled; batches are padded to the next one.

    The largest of ten batches has about B + 1.5 √B picks, and seldom more than B + 2.8 √B.

    >>> capacities(20, 58), capacities(0, 150)
    ((26, 29, 33, 58), (150,))
    """
    usual = [B + round(deviations * math.sqrt(B)) for deviations in (1.3, 2.0, 2.9)]
    return (*(size for size in usual if B and size < most), most)


@cache
def sized(sizes: tuple[int, ...], work: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """A function of (number, *args) that calls work(size, *static, *args) with the least of `sizes` that is
    not below `number`; for several clients at once, below the largest of their numbers."""

    def choose(form: Callable[[int], Any], number: jax.Array, args: tuple[Any, ...]) -> Any:
        place = jnp.sum(number > jnp.array(sizes[:-1], jnp.int32))
        return lax.switch(place, [form(size) for size in sizes], *args)

    @custom_vmap
    def call(number: jax.Array, *args: Any) -> Any:
        return choose(lambda size: partial(work, size, *static), number, args)

    @call.def_vmap
    def call_several(clients: int, mapped: Any, number: jax.Array, *args: Any) -> tuple[Any, Any]:
        axes = [jax.tree.map(lambda own: 0 if own else None, part) for part in mapped[1:]]

        def form(size: int) -> Any:
            return jax.vmap(partial(work, size, *static), in_axes=axes, axis_size=clients)

        made = choose(form, jnp.max(number), args)
        return made, jax.tree.map(lambda _: True, made)

    return call


def _sum_of_first(
    size: int, model: Model, x: jax.Array, y: jax.Array, theta: Params, rows: jax.Array, used: jax.Array,
    clip: jax.Array,
) -> Params:  # fmt: skip
    """Σ clip_c(∇ℓ_j(θ)) over the first `size` rows."""
    x, y, used = first_rows(size, x, y, rows, used)
    if not isinstance(model, Network):
        return _sum_of_any(model, theta, x, y, used, clip)
    (W, b), *rest = theta.tree
    G, sums = clipped_slopes(model, rest, W @ x.T + b[:, None], jnp.sum(x * x, axis=1) + 1, y, used, clip)
    return Params([(G @ x, jnp.sum(G, axis=1)), *sums])


def first_rows(
    size: int, x: jax.Array, y: jax.Array, rows: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first `size` rows of a batch, their labels, and whether they are used."""
    x, y = (a.at[rows[:size]].get(mode="promise_in_bounds") for a in (x, y))
    return x, y, used[:size]


def clipped_slopes(
    model: Network, rest: list[Layer], z: jax.Array, norms: jax.Array, y: jax.Array, used: jax.Array,
    clip: jax.Array,
) -> tuple[jax.Array, list[Layer]]:  # fmt: skip
    """G with G (X, 1) = Σ clip_c(∇ℓ_j) in the first layer, whose outputs are z, and the sums in the others.

    The gradient of row j in a layer's (W, b) is δ_j (a_j, 1)ᵀ, where a_j is the layer's input and δ_j the
    gradient in its output. Its squared length is ‖δ_j‖² (‖a_j‖² + 1), which is given as `norms` for the first
    layer, so no row's gradient is ever formed.
    """
    outputs = [z]
    for W, b in rest:
        outputs.append(W @ jax.nn.relu(outputs[-1]) + b[:, None])
    inputs = [jax.nn.relu(z) for z in outputs[:-1]]  # of all layers but the first

    def total(scores: jax.Array) -> jax.Array:
        return jnp.sum(model.weighted(model.losses(scores, y), y))

    slopes = [jax.grad(total)(outputs[-1])]
    for (W, _), z in zip(reversed(rest), reversed(outputs[:-1]), strict=True):
        # Wᵀ δ as an explicit sum, which is faster on CPUs than the product; see `Network.head_grad`.
        back = jnp.sum(W[:, :, None] * slopes[-1][:, None, :], axis=0)
        slopes.append(jnp.where(z > 0, back, 0))
    first, *others = reversed(slopes)
    square = jnp.sum(first * first, axis=0) * norms
    for d, a in zip(others, inputs, strict=True):
        square += jnp.sum(d * d, axis=0) * (jnp.sum(a * a, axis=0) + 1)
    scale = _shrinking(square, used, clip)
    sums = [(d @ a.T, jnp.sum(d, axis=1)) for d, a in zip((d * scale for d in others), inputs, strict=True)]
    return first * scale, sums


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
