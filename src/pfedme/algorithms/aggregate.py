"""How uploads are combined and encoded: parts that work with any algorithm.

An upload is a tree of arrays. A model is uploaded as its difference from what the client received, so that
lengths, means and bounds have the same meaning for every algorithm.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.spec import Bound, Count, Part, Positive
from pfedme.core.tree import record

T = TypeVar("T")


@record
class Combine(Part):
    """How the server combines the uploads of a cohort into one."""

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """One upload from stacked uploads.

        Arguments:
            uploads: the clients' uploads, each leaf with a leading axis over clients.
            weights: weights of the clients, summing to one; zero marks an absent client. If all are zero, the
                result is zero.
            key: the server's random key for this round.
        """
        raise NotImplementedError


@record
class Mean(Combine):
    """Σ_i p_i Δ_i, with the algorithm's weights p_i."""

    name: ClassVar[str] = "mean"

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """The weighted mean of each array."""

        def mean(a: jax.Array) -> jax.Array:
            kind = a.dtype if jnp.issubdtype(a.dtype, jnp.floating) else weights.dtype
            return jnp.tensordot(weights.astype(kind), a.astype(kind), 1)

        return jax.tree.map(mean, uploads)


@record
class RFA(Combine):
    """The geometric median, argmin_v Σ_i p_i ‖v − Δ_i‖, of the uploads (Pillutla et al., 2019).

    Fewer than half of the weight, wherever it lies, moves it only by a bounded distance. Weiszfeld's steps
    v ← Σ β_i Δ_i/Σ β_i, with β_i = p_i/‖v − Δ_i‖, start at the most central upload and are modified by Vardi
    and Zhang (2000) to leave it if it is not the median.
    """

    name: ClassVar[str] = "rfa"

    nu: Positive = 1e-6
    """ν: uploads that are closer to v than this count as equal to it."""
    M: Count = 32
    """Weiszfeld steps."""

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """The geometric median of the uploads, each as one long vector."""
        there = weights > 0
        uploads = jax.tree.map(lambda a: jnp.where(there.reshape(-1, *[1] * (a.ndim - 1)), a, 0), uploads)

        def distances(v: T) -> jax.Array:
            return _lengths(jax.tree.map(jnp.subtract, uploads, v), 1)

        def step(_: Any, v: T) -> T:
            far = distances(v)
            here = far <= self.nu
            pull = jnp.where(here, 0, weights / jnp.maximum(far, self.nu))
            total = jnp.sum(pull)
            towards = jax.tree.map(jnp.subtract, Mean()(uploads, pull / _positive(total), key), v)
            # Uploads at v itself hold it there by their weight, against the force of the others.
            held = jnp.sum(jnp.where(here, weights, 0)) / _positive(total * _lengths(towards, 0))
            share = jnp.maximum(0, 1 - held)
            return jax.tree.map(lambda a, b: a + share.astype(a.dtype) * b, v, towards)

        # The upload with the least sum of distances is a start that no minority can move away.
        sums = lax.map(lambda v: jnp.sum(weights * distances(v)), uploads)
        start = jnp.arange(len(weights)) == jnp.argmin(jnp.where(there, sums, jnp.inf))
        return lax.fori_loop(0, self.M, step, Mean()(uploads, start.astype(weights.dtype), key))


def _lengths(tree: Any, stacked: int) -> jax.Array:
    """The length of a tree as one long vector, or with `stacked` = 1 of each of several."""
    squares = [jnp.sum(jnp.square(a), axis=range(stacked, a.ndim)) for a in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares))


def _positive(divisor: jax.Array) -> jax.Array:
    """A divisor that is at least the least number above zero."""
    return jnp.maximum(divisor, jnp.finfo(divisor.dtype).tiny)


@record
class Codec(Part):
    """How an upload is encoded for sending. The server receives `decode(encode(key, upload))`."""

    def encode(self, key: jax.Array, upload: Any) -> Any:
        """The message that is sent: a tree of arrays. The key is the client's own for this round."""
        raise NotImplementedError

    def decode(self, message: Any) -> Any:
        """The upload that the server reads from the message."""
        raise NotImplementedError


@record
class Plain(Codec):
    """Uploads are sent unchanged."""

    name: ClassVar[str] = "none"

    def encode(self, key: jax.Array, upload: Any) -> Any:
        """The upload."""
        return upload

    def decode(self, message: Any) -> Any:
        """The upload."""
        return message


@record
class FedPAQ(Codec):
    """Quantised uploads (Reisizadeh et al., 2020): each array a becomes ‖a‖ sign(a) ξ/s with whole numbers ξ.

    ξ is |a| s/‖a‖, rounded up or down at random so that the mean is right: the server receives the upload
    plus noise of mean 0 and variance at most min(d/s², √d/s) ‖a‖². A number takes one byte if s < 128, and
    two otherwise. Arrays of one number, and whole numbers, are sent unchanged.
    """

    name: ClassVar[str] = "fedpaq"

    levels: Annotated[int, Bound(least=1, below=2**15)] = 64
    """s: how many levels there are between 0 and ‖a‖."""

    def encode(self, key: jax.Array, upload: Any) -> Any:
        """For each array its length and its levels with signs."""
        leaves, structure = jax.tree.flatten(upload)
        return jax.tree.unflatten(
            structure, [self._packed(jax.random.fold_in(key, k), a) for k, a in enumerate(leaves)]
        )

    def _packed(self, key: jax.Array, a: jax.Array) -> Any:
        if a.size <= 1 or not jnp.issubdtype(a.dtype, jnp.floating):
            return Packed(None, a)
        length = jnp.sqrt(jnp.sum(a**2))
        scaled = jnp.abs(a) * (self.levels / jnp.where(length > 0, length, 1))
        level = jnp.floor(scaled + jax.random.uniform(key, a.shape, a.dtype))
        kind = jnp.int8 if self.levels < 2**7 else jnp.int16
        return Packed(length, (jnp.sign(a) * jnp.minimum(level, self.levels)).astype(kind))

    def decode(self, message: Any) -> Any:
        """The upload, with noise."""

        def plain(one: Packed) -> jax.Array:
            if one.length is None:
                return one.numbers
            return (one.length / self.levels) * one.numbers.astype(one.length.dtype)

        return jax.tree.map(plain, message, is_leaf=lambda node: isinstance(node, Packed))


class Packed(NamedTuple):
    """An array as `FedPAQ` sends it."""

    length: jax.Array | None
    """‖a‖; None for an array that is sent unchanged."""
    numbers: jax.Array
