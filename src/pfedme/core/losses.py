"""Losses of scores, and the curvature of a loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.tree import Params


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """−log softmax(logits)[y], column by column."""
    top = lax.stop_gradient(jnp.max(logits, axis=0))
    return top + jnp.log(jnp.sum(jnp.exp(logits - top), axis=0)) - of_label(logits, y)


def of_label(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The logit of the label in each column."""
    # A masked sum, because gathers, and the scatters in their gradients, are slow on CPUs.
    return jnp.sum(jnp.where(jnp.arange(len(logits))[:, None] == y, logits, 0), axis=0)


def is_first_largest(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Whether argmax would choose the label, column by column: the first of the largest logits.

    >>> is_first_largest(jnp.zeros((3, 3)), jnp.arange(3))
    Array([ True, False, False], dtype=bool)
    """
    own, before = of_label(logits, y), jnp.arange(len(logits))[:, None] < y
    return ~jnp.any(jnp.where(before, logits >= own, logits > own), axis=0) & ~jnp.isnan(own)


def curvature(loss: Callable[[Params], jax.Array], theta: Params, steps: int = 30) -> jax.Array:
    """The largest eigenvalue of ∇²f(θ), by power iteration: an estimate of the smoothness L at θ.

    >>> f = lambda p: 0.5 * (p @ Params(jnp.array([1.0, 3.0]) * p.tree))
    >>> round(float(curvature(f, Params(jnp.ones(2)))), 3)
    3.0
    """
    grad = jax.grad(loss)

    def step(v: Params, _: None) -> tuple[Params, jax.Array]:
        Hv = jax.jvp(grad, (theta,), (v,))[1]
        size = jnp.sqrt(Hv @ Hv)
        return Hv * (1 / jnp.maximum(size, 1e-30)), size

    # A random start: a regular one, such as all ones, can lie in the null space of the Hessian.
    flat = theta.ravel()
    first = theta.like(jax.random.normal(jax.random.key(0), flat.shape, flat.dtype))
    return lax.scan(step, first, length=steps)[1][-1]
