"""How uploads are combined and encoded: parts that work with any algorithm.

An upload is a tree of arrays. A model is uploaded as its difference from what the client received, so that
lengths, means and bounds have the same meaning for every algorithm.
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
    """How the server combines the uploads of a cohort into one."""

    def __call__(self, uploads: T, weights: jax.Array, key: jax.Array) -> T:
        """One upload from stacked uploads.

        Arguments:
            uploads: the clients' uploads, each leaf with a leading axis over clients.
            weights: weights of the clients, summing to one; zero marks an absent client.
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
