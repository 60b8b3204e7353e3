"""The proximal step with private gradients, in the space of the mini-batch.

K steps θ ← θ − α (g_k + λ (θ − w)) use one batch X, where g_k has noise N(0, (zc/B)² I) of its own. Noise leaves
the span of w, the starting point and the rows of X, but only its part in that span matters before the end. With
ρ = 1 − α(λ + l2), σ = αzc/B, the noise E_k of step k, and a column of ones in X, the first layer is

    A_k = p_k A_w + s_k A_0 + C_k X − σ Σ_{l<k} ρ^{k−1−l} E_l,    and the scores need A_k Xᵀ alone.

So what has to be drawn is S = Σ_k a_k E_k with a_k = ρ^{K−1−k}, which is ‖a‖ times one standard normal array,
and F_k = E_k Xᵀ for k < K − 1, given S Xᵀ. Given F_0 ... F_{k−1}, F_k is normal with

    mean  (a_k / r_k) (S Xᵀ − Σ_{l<k} a_l F_l),  covariance  (1 − a_k²/r_k) X Xᵀ in each row,   r_k = Σ_{l≥k} a_l².

This is the same distribution as that of K separate arrays of noise, for the price of one. X Xᵀ can be singular;
so that it has a Cholesky factor, each row's score gets further noise of its own, which is a hundredth as large.
It is independent of the other rows and of the E_k, so for any value of it a row adds at most c to each sum, and
what is promised does not change.
"""

from __future__ import annotations

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
    deviation = jnp.where(private.noise > 0, private.noise * private.clip, 0).astype(dtype)
    (W, b), *w_rest = w.tree
    (W_0, b_0), *rest = start.tree
    gram = x @ x.T + 1
    z_w, z_0 = W @ x.T + b[:, None], W_0 @ x.T + b_0[:, None]
    norms = jnp.diagonal(gram)

    rho = jnp.asarray(1 - alpha * (lam + model.l2), dtype)
    a = jnp.cumprod(jnp.ones(K, dtype).at[1:].set(rho))[::-1]
    tail = jnp.cumsum((a**2)[::-1])[::-1]
    first_of = jnp.sqrt(tail[0])
    # Noise is made in a loop of its own: XLA does not vectorise it together with other arithmetic.
    E, e = lax.optimization_barrier(normal_like(key_of_use(batch.key, K), Params([(W, b)]))).tree[0]
    total = first_of * (E @ x.T + e[:, None])  # S Xᵀ
    length = jnp.sqrt(norms)
    factor = jnp.linalg.cholesky(gram / (length[:, None] * length) + RIDGE * jnp.eye(size, dtype=dtype))
    factor = length[:, None] * factor

    def step(k: jax.Array, at: Any) -> Any:
        p, s, C, noise, rest = at
        z = p * z_w + s * z_0 + C @ gram - alpha * share * deviation * noise
        G, sums = clipped_slopes(model, rest.tree, z, norms, y, used, private.clip)
        drawn, *others = normal_like(key_of_use(batch.key, k), Params([z, *w_rest])).tree
        drawn = drawn @ factor.T
        before = rho * a[k] * noise  # Σ_{l<k} a_l F_l, as noise is Σ_{l<k} ρ^{k−1−l} F_l
        F = a[k] / tail[k] * (total - before) + jnp.sqrt(jnp.maximum(1 - a[k] ** 2 / tail[k], 0)) * drawn
        slope = share * (Params(sums) + deviation * Params(others))
        rest = rho * rest - alpha * slope + alpha * lam * Params(w_rest)
        return rho * p + alpha * lam, rho * s, rho * C - alpha * share * G, rho * noise + F, rest

    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    begin = (zero, one, jnp.zeros_like(z_0), jnp.zeros_like(z_0), Params(rest))
    p, s, C, _, rest = lax.fori_loop(0, K, step, begin, unroll=min(K, 5))
    scale = alpha * share * deviation * first_of
    first = (
        p * W + s * W_0 + C @ x - scale * E,
        p * b + s * b_0 + jnp.sum(C, axis=1) - scale * e,
    )
    return Params([first, *rest.tree])
