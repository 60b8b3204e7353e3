"""The proximal step with private gradients, in the space of the mini-batch.

K steps θ ← θ − α (g_k + λ (θ − w)) use one batch X, where g_k has noise N(0, (zc/B)² I) of its own. Noise
leaves the span of w, the starting point and the rows of X, but only its part in that span matters before
the end. With ρ = 1 − α(λ + l2), σ = αzc/B, noise E_k in step k, and a column of ones in X, the first layer is

    A_k = p_k A_w + s_k A_0 + C_k X − σ Σ_{l<k} ρ^{k−1−l} E_l,

and scores need A_k Xᵀ alone. So what has to be drawn is S = Σ_k a_k E_k with a_k = ρ^{K−1−k}, which is ‖a‖
times one standard normal array, and F_k = E_k Xᵀ for k < K − 1, given S Xᵀ. Given F_0 ... F_{k−1}, each row
of F_k is normal with

    mean        (a_k / r_k) (S Xᵀ − Σ_{l<k} a_l F_l),       r_k = Σ_{l≥k} a_l²,
    covariance  (1 − a_k² / r_k) X Xᵀ.

This is the same distribution as that of K separate arrays of noise, for the price of one. X Xᵀ can be
singular; so that it has a Cholesky factor, each row's score gets further noise of its own, a hundredth as
large. That is independent of the other rows and of the E_k: whatever it is, a row adds at most c to each
sum, and what is promised does not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.model import Model
from pfedme.core.models import Network
from pfedme.core.noise import normal_like
from pfedme.core.private import (
    Batch,
    Private,
    PrivateLoss,
    capacities,
    clipped_slopes,
    first_rows,
    key_of_use,
    sized,
)
from pfedme.core.tree import Params

RIDGE = 1e-4
"""The variance of the further noise of a row's score, as a share of that of its noise."""


def covers(f: Any) -> bool:
    """Whether it takes the steps on f: for networks, if a batch usually has fewer rows than features."""
    if not isinstance(f, PrivateLoss) or not isinstance(f.model, Network):
        return False
    sizes = capacities(f.private.B, f.private.most)
    return sizes[max(0, len(sizes) - 2)] <= f.model.features


def steps(f: PrivateLoss, w: Params, start: Params, lam: float, alpha: float, K: int) -> Params:
    """θ after K steps of size α from `start` on f(θ) + λ/2 ‖θ − w‖²."""
    call = sized(capacities(f.private.B, f.private.most), _steps, K)
    return call(f.batch.number, f.model, f.x, f.y, w, start, f.batch, f.private, lam, alpha)


def _steps(
    size: int, K: int, model: Model, x: jax.Array, y: jax.Array, w: Params, start: Params, batch: Batch,
    private: Private, lam: jax.Array, alpha: jax.Array,
) -> Params:  # fmt: skip
    """The same with the first `size` rows of the batch."""
    assert isinstance(model, Network)
    x, y, used = first_rows(size, x, y, batch.rows, batch.used)
    dtype = w.dtype
    share = (1 / batch.size).astype(dtype)
    deviation = private.deviation.astype(dtype)
    (W, b), *w_rest = w.tree
    (W_0, b_0), *rest = start.tree
    gram = x @ x.T + 1
    z_w, z_0 = W @ x.T + b[:, None], W_0 @ x.T + b_0[:, None]
    norms = jnp.diagonal(gram)

    rho = jnp.asarray(1 - alpha * (lam + model.l2), dtype)
    a = jnp.cumprod(jnp.ones(K, dtype).at[1:].set(rho))[::-1]
    tail = jnp.cumsum((a**2)[::-1])[::-1]
    mean, spread = a / tail, jnp.sqrt(jnp.maximum(1 - a**2 / tail, 0))
    # Noise is made in loops of its own: XLA does not vectorise it together with other arithmetic.
    keys = jax.vmap(partial(key_of_use, batch.key))(jnp.arange(K))
    every = lax.optimization_barrier(normal_like(key_of_use(batch.key, K), Params([(W, b)])))
    E, e = every.tree[0]
    noise = lax.optimization_barrier(jax.vmap(lambda key: normal_like(key, Params([z_w, *w_rest])))(keys))
    total = jnp.sqrt(tail[0]) * (E @ x.T + e[:, None])  # S Xᵀ
    length = jnp.sqrt(norms)
    correlation = gram / (length[:, None] * length)
    factor = length[:, None] * cholesky(correlation + RIDGE * jnp.eye(size, dtype=dtype))
    drawn, *others = noise.tree
    drawn = spread[:, None, None] * jnp.einsum("khm,nm->khn", drawn, factor)
    each = share * deviation * Params(others)

    def step(at: Any, now: Any) -> tuple[Any, None]:
        p, s, C, noise, rest = at
        a, mean, drawn, e = now
        z = p * z_w + s * z_0 + C @ gram - alpha * share * deviation * noise
        G, sums = clipped_slopes(model, rest.tree, z, norms, y, used, private.clip)
        # Σ_{l<k} a_l F_l is ρ a_k times `noise`, which is Σ_{l<k} ρ^{k−1−l} F_l.
        F = mean * (total - rho * a * noise) + drawn
        rest = rho * rest - alpha * (share * Params(sums) + e) + alpha * lam * Params(w_rest)
        return (rho * p + alpha * lam, rho * s, rho * C - alpha * share * G, rho * noise + F, rest), None

    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    begin = (zero, one, jnp.zeros_like(z_0), jnp.zeros_like(z_0), Params(rest))
    (p, s, C, _, rest), _ = lax.scan(step, begin, (a, mean, drawn, each))
    scale = alpha * share * deviation * jnp.sqrt(tail[0])
    first = (
        p * W + s * W_0 + C @ x - scale * E,
        p * b + s * b_0 + jnp.sum(C, axis=1) - scale * e,
    )
    return Params([first, *rest.tree])


def cholesky(A: jax.Array) -> jax.Array:
    """L with L Lᵀ = A, column by column. For such small matrices it is about as fast as LAPACK's, and the
    program calls nothing outside of itself.

    >>> cholesky(jnp.array([[4.0, 2.0], [2.0, 10.0]]))
    Array([[2., 0.],
           [1., 3.]], dtype=float32)
    """
    at = jnp.arange(len(A))

    def column(j: jax.Array, L: jax.Array) -> jax.Array:
        rest = A[:, j] - L @ L[j]
        return L.at[:, j].set(jnp.where(at >= j, rest, 0) / jnp.sqrt(rest[j]))

    return lax.fori_loop(0, len(A), column, jnp.zeros_like(A))
