"""The Moreau envelope F(w) = min_θ f(θ) + λ/2 ‖θ − w‖²: Proposition 1 and Lemma 1 of the paper."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import (
    EXACT,
    SIZE,
    assert_smooth_and_strongly_convex,
    federation,
    flat,
    point,
    problem,
    softmax_regression,
    train_rows,
)

from pfedme.core.problem import Problem
from pfedme.core.prox import Smooth, prox
from pfedme.core.tree import Params

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

ACCURACY = 1e-22
"""‖∇h‖² at the returned points: gradients of the envelope are then exact to λ/(λ + μ) · 1e-11."""
SLACK = 1e-10


@partial(jax.tree_util.register_dataclass, data_fields=["A"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Quadratic:
    """f(θ) = ½ θᵀ A θ."""

    A: np.ndarray

    def grad(self, theta: Params) -> Params:
        return Params(jnp.asarray(self.A) @ theta.tree)


@jax.jit
def envelope_gradients_of(f: Smooth, points: Params, lam: float, alpha: float) -> Params:
    def one(w: Params) -> Params:
        return lam * (w - prox(f, w, w, lam=lam, alpha=alpha, K=1, nu=ACCURACY, solver="nesterov").theta)

    return jax.vmap(one)(points)


def envelope_gradients(f: Smooth, points: Params, lam: float, alpha: float) -> np.ndarray:
    """λ (w − prox(w)) at each of many points."""
    return flat(envelope_gradients_of(f, points, lam, alpha), stacked=True)


@partial(jax.jit, static_argnames="B")
def approximations(
    keys: jax.Array, own: Problem, w: Params, lam: float, alpha: float, nu: float, B: int
) -> Params:
    """θ̃(w) for the mini-batch of each key."""
    return jax.vmap(lambda key: prox(own.sample(key, B), w, w, lam=lam, alpha=alpha, K=1, nu=nu).theta)(keys)


def rotated(eigenvalues: list[float]) -> np.ndarray:
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(len(eigenvalues),) * 2))
    return Q @ np.diag(eigenvalues) @ Q.T


@pytest.mark.parametrize("lam", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("client", [0, 2])
def test_lam_times_w_minus_prox_is_the_slope_of_the_envelope(lam, client):
    """Proposition 1: ∇F(w) = λ (w − θ̂(w)). The envelope is the oracle's, the prox is ours."""
    l2, fed = 0.05, federation(EXACT, dtype=np.float64)
    model, rows = softmax_regression(l2), train_rows(fed)[client]
    w = np.random.default_rng(client).normal(size=(1, SIZE))
    got = envelope_gradients(
        problem(fed, model, client).sample(jax.random.key(0), 0),
        point(model, w),
        lam,
        1 / (oracles.smoothness(rows, l2) + lam),
    )
    want = oracles.slope(lambda p: oracles.envelope(p, rows, lam, l2), w[0])
    np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("lam", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("eigenvalues", [[0.2, 1.0, 5.0], [0.0, 0.1, 9.0]])
def test_the_envelope_of_a_convex_quadratic_is_as_smooth_and_convex_as_proposition_1_says(eigenvalues, lam):
    points = np.random.default_rng(3).normal(size=(12, 3)) * 5
    got = envelope_gradients(
        Quadratic(rotated(eigenvalues)), Params(jnp.asarray(points)), lam, 1 / (max(eigenvalues) + lam)
    )
    mu = min(eigenvalues)
    assert_smooth_and_strongly_convex(got, points, smooth=lam, convex=lam * mu / (lam + mu), slack=SLACK)


def test_the_bound_on_strong_convexity_is_attained_along_the_flattest_direction():
    A, lam = rotated([0.2, 1.0, 5.0]), 2.0
    flattest = np.linalg.eigh(A)[1][:, 0]
    got = envelope_gradients(Quadratic(A), Params(jnp.asarray(flattest[None])), lam, 1 / (5 + lam))
    np.testing.assert_allclose(got[0], lam * 0.2 / (lam + 0.2) * flattest, atol=SLACK)


@pytest.mark.parametrize("lam", [10.1, 50.0])
def test_the_envelope_of_a_nonconvex_function_is_lam_smooth_if_lam_exceeds_2l(lam):
    points = np.random.default_rng(3).normal(size=(12, 3))
    got = envelope_gradients(
        Quadratic(rotated([-5.0, 0.0, 5.0])), Params(jnp.asarray(points)), lam, 1 / (5 + lam)
    )
    assert_smooth_and_strongly_convex(got, points, smooth=lam, convex=None, slack=SLACK)


@pytest.mark.parametrize("lam", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("l2", [0.01, 0.5])
def test_the_envelope_of_softmax_regression_is_as_smooth_and_convex_as_proposition_1_says(l2, lam):
    fed, model = federation(EXACT, dtype=np.float64), softmax_regression(l2)
    rows, points = train_rows(fed)[0], 3 * np.random.default_rng(4).normal(size=(12, SIZE))
    got = envelope_gradients(
        problem(fed, model, 0).sample(jax.random.key(0), 0),
        point(model, points),
        lam,
        1 / (oracles.smoothness(rows, l2) + lam),
    )
    assert_smooth_and_strongly_convex(got, points, smooth=lam, convex=lam * l2 / (lam + l2), slack=SLACK)


@pytest.mark.parametrize("nu", [1e-12, 1e-2])
@pytest.mark.parametrize("B", [2, 8])
@pytest.mark.parametrize("lam", [1.0, 15.0])
def test_the_personal_model_is_as_near_to_the_prox_as_lemma_1_says(lam, B, nu):
    """E ‖θ̃ − θ̂‖² ≤ 2/(λ + μ)² (γ_f²/|D| + ν), with γ_f² the largest variance at any point visited."""
    l2, batches = 0.1, 400
    fed, model = federation(((24, 0),), dtype=np.float64), softmax_regression(l2)
    own, rows = problem(fed, model, 0), train_rows(fed)[0]
    w = np.random.default_rng(5).normal(size=SIZE)
    longest = 1 / (np.max(np.sum(oracles.with_one(rows.x) ** 2, axis=1)) / 2 + l2 + lam)

    keys = jax.random.split(jax.random.key(6), batches)
    thetas = flat(approximations(keys, own, point(model, w), lam, longest, nu, B), stacked=True)
    exact = oracles.prox(w, rows, lam, l2)

    def variance(theta: np.ndarray) -> float:
        noise = oracles.row_gradients(theta, rows, l2) - oracles.gradient(theta, rows, l2)
        return float(np.mean(np.sum(noise**2, axis=1)))

    gamma2 = max(map(variance, [w, exact, *thetas]))
    delta2 = np.mean(np.sum((thetas - exact) ** 2, axis=1))
    assert delta2 <= 2 / (lam + l2) ** 2 * (gamma2 / B + nu)
    if nu < 1e-6:
        # And no nearer than the noise allows: ‖θ̃ − θ̂‖ ≥ ‖noise at θ̂‖/(L + λ). The mean square of 400
        # norms is within a half of its expectation.
        assert delta2 >= 0.5 * variance(exact) / B * longest**2
