"""The proximal step: θ ≈ argmin_θ f(θ) + λ/2 ‖θ − w‖².

The objective h(θ) = f(θ) + λ/2 ‖θ − w‖² is (λ + μ)-strongly convex for a μ-strongly convex f, and
(λ − L)-strongly convex for a nonconvex L-smooth f if λ > L. Gradient steps contract for α < 2/(L + λ).

All steps use one mini-batch X. Where the first layer A is linear in the input, its gradient is G X and A
never leaves the span of A_w, A_0 and the rows of X: `Span` takes the same steps there, in few coordinates.
Noise of private gradients leaves that span; see `private_prox`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core import native, private_prox
from pfedme.core.models import Layer, Network
from pfedme.core.private import PrivateLoss
from pfedme.core.problem import Loss
from pfedme.core.tree import Params

Solver = Literal["gradient", "nesterov"]

MOST_STEPS = 10_000
"""Limit on the steps of a search for ‖∇h‖² ≤ ν, for example when float32 cannot reach ν."""


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
    if isinstance(f, Loss) and nu is None and solver == "gradient" and native.covers(f, w):
        return Proximal(native.steps(f, w, start, lam, alpha, K), jnp.int32(K))
    if isinstance(f, PrivateLoss) and nu is None and solver == "gradient" and private_prox.covers(f):
        return Proximal(private_prox.steps(f, w, start, lam, alpha, K), jnp.int32(K))
    if isinstance(f, Loss) and isinstance(f.model, Network):
        span = Span.of(f, w, start)
        found = descend(span, span.w, span.start, lam, alpha, K, nu, solver, span.square)
        return found._replace(theta=span.point(found.theta))
    return descend(f, w, start, lam, alpha, K, nu, solver)


def descend(
    f: Smooth,
    w: Params,
    start: Params,
    lam: float,
    alpha: float,
    K: int,
    nu: float | None,
    solver: Solver,
    square: Callable[[Params], jax.Array] = lambda v: v @ v,
) -> Proximal:
    """The steps of `prox`, in the coordinates of f, w and start; `square` is ‖·‖² in them."""
    q = 0.0 if solver == "gradient" else _momentum(alpha * lam)

    def step(theta: Params, y: Params, gradient: Params) -> tuple[Params, Params]:
        following = y - alpha * gradient
        return following, following if solver == "gradient" else following + q * (following - theta)

    if nu is None:

        def one(k: jax.Array, at: tuple[Params, Params]) -> tuple[Params, Params]:
            theta, y = at
            f_k = f.at(k) if isinstance(f, PrivateLoss) else f  # every use of a batch has its own noise
            return step(theta, y, envelope_grad(f_k, y, w, lam))

        theta, _ = lax.fori_loop(0, K, one, (start, start), unroll=min(K, 5))
        return Proximal(theta, jnp.int32(K))

    assert not isinstance(f, PrivateLoss)  # the number of steps, and with it ε, would be unknown

    def unfinished(at: tuple[Params, Params, Params, jax.Array]) -> jax.Array:
        _, _, gradient, steps = at
        return (square(gradient) > nu) & (steps < MOST_STEPS)

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


def inner_accuracy(f: Smooth, theta: Params, w: Params, lam: float, steps: jax.Array) -> dict[str, jax.Array]:
    """‖∇h(θ)‖² and the mean number of steps, for the record; nothing if the gradients of f are private,
    because the residual would reveal more about the rows."""
    if isinstance(f, PrivateLoss):
        return {}
    residual = envelope_grad(f, theta, w, lam)
    return {"inner_residual": residual @ residual, "inner_steps": jnp.mean(steps.astype(jnp.float32))}


def _momentum(alpha_lam: jax.typing.ArrayLike) -> jax.Array:
    """Nesterov's constant for an objective of condition number 1/(αλ)."""
    root = jnp.sqrt(jnp.minimum(jnp.asarray(alpha_lam), 1.0))
    return (1 - root) / (1 + root)


@dataclasses.dataclass(frozen=True)
class Span:
    """The loss of a network in coordinates (p, s, C, rest) for its first layer A = p A_w + s A_0 + C X.

    A is the layer (W, b) with b as one more column, and X the batch with a column of ones. With
    z = A Xᵀ = p A_w Xᵀ + s A_0 Xᵀ + C X Xᵀ and G = ∂f/∂z, the gradient of f in A is G X + l2 A: it has
    the coordinates (l2 p, l2 s, G + l2 C). A step costs O(|D|²) per unit instead of O(|D| d), and is the same
    step: `descend` does not know which coordinates it works in. The other layers are unchanged.
    """

    f: Loss
    w_layers: list[Layer]
    start_layers: list[Layer]
    z_w: jax.Array
    z_0: jax.Array
    gram: jax.Array

    @classmethod
    def of(cls, f: Loss, w: Params, start: Params) -> Span:
        """The span of w, start and the batch of f."""
        (W, b), (W_0, b_0), x = w.tree[0], start.tree[0], f.x
        return cls(f, w.tree, start.tree, W @ x.T + b[:, None], W_0 @ x.T + b_0[:, None], x @ x.T + 1)

    def on(self, drawn: jax.Array) -> Span:
        """The same for a mini-batch of these rows of X, some possibly repeated, in the same coordinates."""
        times = jnp.sum(drawn[:, None] == jnp.arange(len(self.gram)), axis=0)
        weight = times.astype(self.gram.dtype) / len(drawn)
        return dataclasses.replace(self, f=dataclasses.replace(self.f, weight=weight))

    @property
    def w(self) -> Params:
        """The coordinates of w."""
        one = jnp.ones((), self.z_w.dtype)
        return Params((one, 0 * one, jnp.zeros_like(self.z_w), self.w_layers[1:]))

    @property
    def start(self) -> Params:
        """The coordinates of the point to start from."""
        one = jnp.ones((), self.z_w.dtype)
        return Params((0 * one, one, jnp.zeros_like(self.z_w), self.start_layers[1:]))

    def grad(self, theta: Params) -> Params:
        """The coordinates of ∇f."""
        p, s, C, rest = theta.tree
        l2 = self.f.model.l2
        z = p * self.z_w + s * self.z_0 + C @ self.gram
        assert isinstance(self.f.model, Network)
        G, g_rest = self.f.model.head_grad(rest, z, self.f.mean_loss)
        return Params((0 * p, 0 * s, G, g_rest)) + l2 * theta

    def square(self, v: Params) -> jax.Array:
        """‖v‖² of a vector in these coordinates."""
        p, s, C, rest = v.tree
        w, start = Params(self.w_layers[0]), Params(self.start_layers[0])
        known = p * p * (w @ w) + 2 * p * s * (w @ start) + s * s * (start @ start)
        mixed = 2 * jnp.sum(C * (p * self.z_w + s * self.z_0)) + jnp.sum((C @ self.gram) * C)
        return known + mixed + Params(rest) @ Params(rest)

    def point(self, theta: Params) -> Params:
        """The parameters that have the coordinates θ."""
        p, s, C, rest = theta.tree
        (W, b), (W_0, b_0) = self.w_layers[0], self.start_layers[0]
        first = (p * W + s * W_0 + C @ self.f.x, p * b + s * b_0 + jnp.sum(C, axis=1))
        return Params([first, *rest])
