"""Convolutions as matrix products, for clients that each have their own weights.

XLA's convolutions take one set of weights. Mapped over clients they become grouped convolutions, which are
several times slower on CPUs than the products here: seven times for the gradient of two stages and ten
clients.

Images are stored as channels × height × width × rows. The rows of a batch, which never mix, are innermost.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def stage(W: jax.Array, b: jax.Array, z: jax.Array) -> jax.Array:
    """ReLU(b + 2×2 sums of W ∗ z): a convolution with zeros around the image, pooling and ReLU.

        y[o, p, q] = max(0, b_o + Σ_(a, e) Σ_(i, j, c) W[o, i, j, c] z[c, 2p + a + i − r, 2q + e + j − r])

    for a, e in {0, 1} and i, j in 0 ... 2r. The output has half the height and width; the last row or column
    of an odd size is dropped. The four values are added rather than averaged, which preserves the scale of
    the input.

    >>> stage(jnp.ones((1, 1, 1, 1)), jnp.zeros(1), jnp.arange(16.0).reshape(1, 4, 4, 1)).reshape(2, 2)
    Array([[10., 18.],
           [42., 50.]], dtype=float32)
    """
    n, k, _, channels = W.shape
    _, height, width, rows = z.shape
    m, h, w = (k + 1) // 2, height // 2, width // 2
    # Convolution and sum are one convolution with k + 1 taps in steps of two pixels ...
    V = sum(jnp.pad(W, ((0, 0), (a, 1 - a), (e, 1 - e), (0, 0))) for a in (0, 1) for e in (0, 1))
    V = jnp.reshape(V, (n, m, 2, m, 2, channels)).transpose(0, 1, 3, 2, 4, 5)
    # ... which equals one with m taps in steps of one, once each 2×2 block of pixels becomes channels.
    r, tall, wide = k // 2, h + m - 1, w + m - 1
    around = ((0, 0, 0), (r, 2 * tall - r - height, 0), (r, 2 * wide - r - width, 0), (0, 0, 0))
    z = lax.pad(z, jnp.zeros((), z.dtype), around)
    z = z.reshape(channels, tall, 2, wide, 2, rows).transpose(2, 4, 0, 1, 3, 5)
    z = z.reshape(4 * channels, tall, wide, rows)
    # Each column of the right factor is the neighbourhood of one pixel.
    near = jnp.concatenate([z[:, i : i + h, j : j + w] for i in range(m) for j in range(m)])
    y = V.reshape(n, -1) @ near.reshape(-1, h * w * rows) + b[:, None]
    return jax.nn.relu(y).reshape(n, h, w, rows)
