"""The private mean of clients' uploads: each is clipped, and noise is added to their sum.

    Δ = (1/S) (Σ_i clip_C(Δ_i) + N(0, z²C²I)),   clip_C(v) = v min(1, C/‖v‖)

S is fixed, however many clients have sent something. Adding or removing one client changes the sum by at
most C. An upload is one long vector here, whatever arrays it consists of.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from pfedme.core.noise import normal_like, words_of
from pfedme.core.private import ROUNDING
from pfedme.core.tree import Params

T = TypeVar("T")

PACE, QUANTILE = 0.2, 0.5
"""How fast a clipping length adapts, and to which quantile γ of the lengths of uploads (Andrew et al.,
2021)."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["clip", "noise", "count_noise"],
    meta_fields=["size", "adapts"],
)
@dataclasses.dataclass(frozen=True)
class PrivateMean:
    """What makes the mean of uploads private."""

    clip: jax.Array
    """C: the longest upload; infinite for no clipping. The first C if it adapts."""
    noise: jax.Array
    """z: the noise on the sum is N(0, z²C²I); 0 for none."""
    size: int
    """S: the fixed number by which the sum is divided."""
    adapts: bool = False
    """Whether C adapts: C ← C exp(−0.2 (b̄ − γ)), where b̄ is the noisy share of uploads that were not
    clipped."""
    count_noise: jax.Array | float = 0.0
    """σ_b: the noise on the number of those uploads."""

    def start(self) -> Any:
        """What the server keeps for the next round besides its models: C if it adapts, otherwise nothing."""
        return self.clip if self.adapts else ()

    def __call__(self, key: jax.Array, uploads: T, present: jax.Array, kept: Any) -> tuple[T, Any]:
        """The private mean of stacked uploads, and what to keep.

        Arguments:
            key: the random key of the noise.
            uploads: the clients' uploads, each leaf with a leading axis over clients.
            present: whether each of them counts.
            kept: what was kept after the round before, or what `start` returned.
        """
        clip = kept if self.adapts else self.clip
        short, whole = jax.vmap(clipped, in_axes=(0, None))(uploads, clip)
        # Each client counts for ±1/2, so that one more or less changes the number by only 1/2.
        votes = jnp.where(whole, 0.5, -0.5).astype(jnp.float32)
        total, number = jax.tree.map(partial(_sum_of, present), (short, votes))
        noise, of_number = normal_like(words_of(key), Params((total, number))).tree
        deviation = jnp.where(self.noise > 0, self.noise * clip, 0)

        def released(a: jax.Array, e: jax.Array) -> jax.Array:
            return (a + deviation.astype(a.dtype) * e) / self.size

        mean = jax.tree.map(released, total, noise)
        if not self.adapts:
            return mean, kept
        return mean, adapted(clip, 0.5 + (number + self.count_noise * of_number) / self.size)


def adapted(clip: jax.Array, share: jax.Array) -> jax.Array:
    """The next C, if a `share` of uploads was not clipped: smaller if that is more than wanted.

    >>> C, all, none = jnp.float32(1.0), jnp.float32(1.0), jnp.float32(0.0)
    >>> float(adapted(C, all)) < 1 < float(adapted(C, none))
    True
    """
    return (clip * jnp.exp(-PACE * (share - QUANTILE))).astype(jnp.float32)


def clipped(upload: T, clip: jax.typing.ArrayLike) -> tuple[T, jax.Array]:
    """An upload shortened to at most C, and whether that left it unchanged.

    An upload that is not finite counts as zero: it must not reveal its client by what it does to the sum.
    """
    length, longest = length_of(upload), jnp.asarray(clip) * (1 - ROUNDING)
    fine = jnp.isfinite(length)
    whole = fine & (length <= longest)
    scale = jnp.where(whole, 1, longest / jnp.where(whole, 1, length))
    return jax.tree.map(lambda a: jnp.where(fine, scale.astype(a.dtype) * a, 0), upload), whole


def length_of(upload: Any) -> jax.Array:
    """The length of an upload, as one long vector."""
    leaves = jax.tree.leaves(upload)
    # Divided by the largest number first, because its square may be too large for float32.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(a), initial=0.0) for a in leaves]))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.sqrt(sum(jnp.sum(jnp.square(a / unit)) for a in leaves))


def _sum_of(present: jax.Array, a: jax.Array) -> jax.Array:
    """The sum over those that are present."""
    return jnp.sum(jnp.where(present.reshape(-1, *[1] * (a.ndim - 1)), a, 0), axis=0)
