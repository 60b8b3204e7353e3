"""The proximal step: θ ≈ argmin_θ f(θ) + λ/2 ‖θ − w‖².

The objective h(θ) = f(θ) + λ/2 ‖θ − w‖² is (λ + μ)-strongly convex for a μ-strongly convex f, and
(λ − L)-strongly convex for a nonconvex L-smooth f if λ > L. Gradient steps contract for α < 2/(L + λ).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.tree import Params

Solver = Literal["gradient", "nesterov"]

MOST_STEPS = 10_000
"""Where a search for ‖∇h‖² ≤ ν gives up, as when ν is below what float32 can reach."""


class Smooth(Protocol):
    """A differentiable function of parameters."""

    def grad(self, theta: Params) -> Params:
        """∇f(θ)."""
        ...


class Proximal(NamedTuple):
    """An approximate minimiser of h, and how many gradients of h it took."""

    theta: Params
    steps: jax.Array


def prox(
    f: Smooth,
    w: Params,
    start: Params,
    *,
    lam: float,
    alpha: float,
    K: int,
    nu: float | None = None,
    solver: Solver = "gradient",
) -> Proximal:
    """argmin_θ f(θ) + λ/2 ‖θ − w‖², by K steps of size α, or by steps until ‖∇h(θ)‖² ≤ ν.

        gradient:  θ ← θ − α ∇h(θ)
        nesterov:  θ⁺ = y − α ∇h(y),   y = θ⁺ + q (θ⁺ − θ),   q = (1 − √(αλ)) / (1 + √(αλ))

    The prox of f(θ) = ½‖θ‖² is λ/(1 + λ) w:

    >>> class Half:
    ...     def grad(self, theta): return theta
    >>> w = Params(jnp.array([3.0]))
    >>> prox(Half(), w, w, lam=2.0, alpha=0.3, K=20).theta.tree
    Array([2.], dtype=float32)
    """
    q = 0.0 if solver == "gradient" else _momentum(alpha * lam)

    def step(theta: Params, y: Params, gradient: Params) -> tuple[Params, Params]:
        following = y - alpha * gradient
        return following, following if solver == "gradient" else following + q * (following - theta)

    if nu is None:

        def one(_: jax.Array, at: tuple[Params, Params]) -> tuple[Params, Params]:
            theta, y = at
            return step(theta, y, envelope_grad(f, y, w, lam))

        theta, _ = lax.fori_loop(0, K, one, (start, start))
        return Proximal(theta, jnp.int32(K))

    def unfinished(at: tuple[Params, Params, Params, jax.Array]) -> jax.Array:
        _, _, gradient, steps = at
        return (gradient @ gradient > nu) & (steps < MOST_STEPS)

    def advance(
        at: tuple[Params, Params, Params, jax.Array],
    ) -> tuple[Params, Params, Params, jax.Array]:
        theta, y, gradient, steps = at
        theta, y = step(theta, y, gradient)
        return theta, y, envelope_grad(f, y, w, lam), steps + 1

    first = envelope_grad(f, start, w, lam)
    _, y, _, steps = lax.while_loop(unfinished, advance, (start, start, first, jnp.int32(1)))
    return Proximal(y, steps)


def envelope_grad(f: Smooth, theta: Params, w: Params, lam: float) -> Params:
    """∇h(θ) = ∇f(θ) + λ (θ − w); its squared norm is the paper's inner accuracy ν."""
    return f.grad(theta) + lam * (theta - w)


def _momentum(alpha_lam: jax.typing.ArrayLike) -> jax.Array:
    """Nesterov's constant for an objective of condition number 1/(αλ)."""
    root = jnp.sqrt(jnp.minimum(jnp.asarray(alpha_lam), 1.0))
    return (1 - root) / (1 + root)
