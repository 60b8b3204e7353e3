"""The ways to combine what clients send, and how it travels: parts that go with any algorithm.

An upload is a tree of arrays. As far as it is about a model it is a difference, what a client adds to what it
was sent, so that a length, a mean and a bound have one meaning.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from pfedme.core.spec import Part
from pfedme.core.tree import record

T = TypeVar("T")


@record
class Combine(Part):
    """How the server makes one upload of those of a cohort."""

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """One upload, of stacked ones.

        Arguments:
            uploads: the clients' uploads, each leaf with a leading axis over clients.
            weights: of the clients, adding up to one; zero marks an absent client.
            key: randomness of the server's own in this round.
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
class Codec(Part):
    """How an upload travels. What arrives is `decode(encode(key, upload))`."""

    def encode(self, key: jax.Array, upload: Any) -> Any:
        """What is sent: a tree of arrays. The key is the client's own in this round."""
        raise NotImplementedError

    def decode(self, message: Any) -> Any:
        """The upload that the server makes of it."""
        raise NotImplementedError


@record
class Plain(Codec):
    """As it is."""

    name: ClassVar[str] = "none"

    def encode(self, key: jax.Array, upload: Any) -> Any:
        """The upload."""
        return upload

    def decode(self, message: Any) -> Any:
        """The upload."""
        return message
