"""Random bits and normal numbers for private gradients, in one pass over memory.

Private training needs a normal number for every parameter and step, which takes longer than the gradients
themselves with `jax.random.normal`. This is the same generator, Threefry-2x32 with 20 rounds (Salmon et al.,
2011), with 64 random bits for each number, and a form of Box and Muller's method that XLA compiles into a
single loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.core.tree import Params

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
BATCHES, USES, NUMBERS = 2**31, 2**31 + 1, 2**31 + 2
"""Second words of counters, for mini-batches, for further keys, and for normal numbers in the first array of
a point; further arrays follow. `jax.random` uses other counters with the same key."""


def _sine() -> tuple[np.float32, ...]:
    """Coefficients of sin(π s/2)/s for |s| ≤ 1, in powers of s²; the error is below float32's precision."""
    squares = np.linspace(1e-9, 1, 4001)
    values = np.sin(np.pi / 2 * np.sqrt(squares)) / np.sqrt(squares)
    fitted = np.polynomial.Chebyshev.fit(squares, values, 5, domain=[0, 1])
    powers = fitted.convert(kind=np.polynomial.Polynomial)
    return tuple(np.float32(c) for c in powers.coef)


SINE = _sine()


def words_of(key: jax.Array) -> jax.Array:
    """The two words of a random key; for a key of another generator than Threefry, two that it draws."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    words = jax.random.key_data(key)
    return words if words.shape[-1] == 2 else jax.random.bits(key, (2,), jnp.uint32)


def threefry(words: jax.Array, first: jax.Array, second: int) -> tuple[jax.Array, jax.Array]:
    """Two random words for every counter (first, second).

    >>> key = jax.random.key(0)
    >>> a, b = threefry(words_of(key), jnp.zeros(1, jnp.uint32), 7)
    >>> bool(jnp.all(jax.random.key_data(jax.random.fold_in(key, 7)) == jnp.stack([a[0], b[0]])))
    True
    """
    k0, k1 = words[..., 0], words[..., 1]
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    a, b = first + k0, jnp.zeros_like(first) + (np.uint32(second) + k1)
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            a = a + b
            b = ((b << np.uint32(turn)) | (b >> np.uint32(32 - turn))) ^ a
        a, b = a + keys[(block + 1) % 3], b + keys[(block + 2) % 3] + np.uint32(block + 1)
    return a, b


def bits(words: jax.Array, shape: tuple[int, ...], second: int) -> tuple[jax.Array, jax.Array]:
    """Two arrays of random words."""
    return threefry(words, jnp.reshape(jnp.arange(np.prod(shape), dtype=jnp.uint32), shape), second)


def normal(words: jax.Array, shape: tuple[int, ...], second: int = NUMBERS) -> jax.Array:
    """Independent standard normal numbers: √(−2 log v) sin(π s/2) for uniform v in (0, 1) and s in (−1, 1).

    32 bits each for v and s give the tails up to 6.7 standard deviations.
    """
    a, b = bits(words, shape, second)
    v = a.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    s = lax.bitcast_convert_type(b, jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)
    square, sine = s * s, jnp.full_like(s, SINE[-1])
    for coefficient in SINE[-2::-1]:
        sine = sine * square + coefficient
    return jnp.sqrt(-2 * jnp.log(v)) * (s * sine)


def normal_like(words: jax.Array, like: Params) -> Params:
    """Independent standard normal numbers in the shape of a point."""
    leaves, structure = jax.tree.flatten(like.tree)
    made = [normal(words, a.shape, NUMBERS + k).astype(a.dtype) for k, a in enumerate(leaves)]
    return Params(jax.tree.unflatten(structure, made))
