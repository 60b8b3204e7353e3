"""Private gradients: their batches, their clipping and their noise."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pfedme.core import private_prox
from pfedme.core.models import Convolutional, Model, Network
from pfedme.core.noise import normal, words_of
from pfedme.core.private import Batch, Private, PrivateLoss, poisson_thresholds
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.prox import descend, prox
from pfedme.core.tree import Params
from pfedme.errors import InputError
from pfedme.privacy.rows import picks, rate, room

MODELS = {
    "mlr": Network(features=6, classes=3),
    "dnn": Network(features=6, classes=3, hidden=(5, 4)),
    "regression": Network(features=6, classes=0, hidden=(4,)),
    "weighted": Network(features=6, classes=3, hidden=(4,), class_weights=(0.5, 1.0, 3.0)),
    "cnn": Convolutional(shape=(2, 3), classes=3, channels=(2,), hidden=(3,)),
    "functions": Model(
        init_fn=lambda key: {"W": jax.random.normal(key, (6, 3))},
        apply_fn=lambda tree, x: jnp.tanh(x @ tree["W"]),
    ),
}


def private(clip: float, noise: float, B: int, n: int, most: int | None = None) -> Private:
    most = most or room(B, n, 10, 1.0, 1e-5)
    return Private(
        jnp.float32(clip), jnp.float32(noise), jnp.asarray(poisson_thresholds(picks(B, n), most)), B
    )


def problem(model: Model, n: int, own: Private | None, seed: int = 0, scale: float = 1.0) -> Problem:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(scale * rng.normal(size=(n, getattr(model, "features", 6))), jnp.float32)
    y = rng.normal(size=n).astype(np.float32) if model.classes == 0 else rng.integers(0, 3, n)
    zero = jnp.int32(0)
    return Problem(model, x, jnp.asarray(y), zero, jnp.int32(n), zero, zero, n, "random", own)


@jax.jit
def summed(p: Problem, batch: Batch, theta: Params) -> jax.Array:
    """The sum of clipped gradients."""
    return p.loss(batch).clipped_sum(theta).ravel()


@jax.jit
def gradient(p: Problem, batch: Batch, theta: Params) -> jax.Array:
    """The private gradient."""
    return p.loss(batch).grad(theta).ravel()


def row_gradients(model: Model, theta: Params, x: jax.Array, y: jax.Array) -> np.ndarray:
    """The gradient of every row's loss, by brute force."""

    @jax.jit
    def slope(theta: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(theta: Params) -> jax.Array:
            return jnp.sum(model.weighted(model.losses(model.scores(theta, x), y), y))

        return jax.grad(loss)(theta).ravel()

    return np.stack([np.asarray(slope(theta, x[j : j + 1], y[j : j + 1]), np.float64) for j in range(len(y))])


def clipped(gradients: np.ndarray, c: float) -> np.ndarray:
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients * np.minimum(1, c / np.maximum(lengths, 1e-300))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("c", [0.05, 1.0, np.inf])
def test_the_sum_is_that_of_clipped_gradients_of_the_rows_in_use(name, c):
    model = MODELS[name]
    p = problem(model, 40, private(c, 0.0, 12, 40))
    theta = model.init(jax.random.key(3))
    batch = p.draw(jax.random.key(1), 4, 12)[2]
    rows = np.asarray(batch.rows)[np.asarray(batch.used)]
    assert 0 < len(rows) == len(set(rows))
    want = clipped(row_gradients(model, theta, p.x[rows], p.y[rows]), c).sum(axis=0)
    got = summed(p, batch, theta)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_several_clients_at_once_are_the_same_as_one_by_one():
    model, B = MODELS["dnn"], 12
    p = problem(model, 60, private(0.3, 1.0, B, 60))
    thetas = [model.init(jax.random.key(k)) for k in range(5)]
    keys = jax.random.split(jax.random.key(9), 5)

    stacked = jax.tree.map(lambda *a: jnp.stack(a), *thetas)
    batches = jax.vmap(lambda key: p.draw(key, B))(keys)
    together = jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0)))(p, batches, stacked)
    for k, theta in enumerate(thetas):
        alone = gradient(p, p.draw(keys[k], B), theta)
        np.testing.assert_allclose(together[k], alone, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["mlr", "dnn", "regression"]),
    c=st.floats(1e-3, 100),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e6]),
    row=st.integers(0, 14),
    seed=st.integers(0, 2**16),
)
def test_one_row_changes_the_sum_by_at_most_the_clipping_length(name, c, scale, row, seed):
    model = MODELS[name]
    p = problem(model, 15, private(c, 0.0, 15, 15), seed, scale)
    theta = model.init(jax.random.key(seed))
    batch = p.draw(jax.random.key(0), 15)
    assert np.asarray(batch.used).all()
    without = dataclasses.replace(batch, used=batch.used.at[row].set(False))
    sums = [np.asarray(summed(p, b, theta), np.float64) for b in (batch, without)]
    rounding = 1e-6 * (1 + np.linalg.norm(sums[0]))
    assert np.linalg.norm(sums[0] - sums[1]) <= c + rounding


def test_the_length_of_one_clipped_row_is_at_most_the_clipping_length():
    model = MODELS["dnn"]
    for seed in range(50):
        p = problem(model, 1, private(0.7, 0.0, 1, 1), seed, scale=100.0)
        found = summed(p, p.draw(jax.random.key(0), 1), model.init(jax.random.key(seed)))
        assert np.linalg.norm(np.asarray(found, np.float64)) <= 0.7


@pytest.mark.parametrize(("n", "B"), [(200, 10), (25, 20), (30, 27)])
def test_batches_are_poisson_samples(n, B):
    draws = 8_000
    p = problem(MODELS["mlr"], n, private(1.0, 1.0, B, n))
    batch = jax.jit(lambda key: p.draw(key, draws, B))(jax.random.key(5))
    rows, used = np.asarray(batch.rows), np.asarray(batch.used)
    there = np.zeros((draws, n), bool)
    at, place = np.nonzero(used)
    there[at, rows[at, place]] = True
    assert there.sum() == used.sum()  # no row twice
    q = B / n
    assert rate(B, n) == pytest.approx(q, rel=1e-6)
    assert rate(B, n) >= q
    # Each row's frequency, with a chi-squared test over rows.
    z = (there.mean(axis=0) - q) / np.sqrt(q * (1 - q) / draws)
    assert stats.chi2.sf(z @ z, n) > 1e-4
    # Pairs of rows are uncorrelated.
    first = there[:, :20] - q
    correlations = (first.T @ first / draws / (q * (1 - q)))[np.triu_indices(20, 1)]
    assert stats.chi2.sf(draws * correlations @ correlations, len(correlations)) > 1e-4
    # Sizes are binomial.
    sizes = np.bincount(there.sum(axis=1), minlength=n + 1)
    expected = draws * stats.binom.pmf(np.arange(n + 1), n, q)
    common = expected > 5
    statistic = ((sizes - expected)[common] ** 2 / expected[common]).sum()
    assert stats.chi2.sf(statistic, common.sum()) > 1e-4


def test_a_batch_of_all_rows_has_each_of_them():
    for B in (0, 30):
        own = Private(jnp.float32(1), jnp.float32(1), jnp.asarray(poisson_thresholds(np.inf, 30)), B)
        batch = problem(MODELS["mlr"], 30, own).draw(jax.random.key(0), 3, B)
        assert sorted(np.asarray(batch.rows)[1]) == list(range(30))
        assert np.asarray(batch.used).all()
        assert np.asarray(batch.size).tolist() == [30.0] * 3


def test_room_for_picks_is_exceeded_with_a_negligible_probability():
    B, n, steps, eps, delta = 20, 3000, 2000, 3.0, 1e-5
    most = room(B, n, steps, eps, delta)
    share = steps * (1 + np.exp(eps)) * stats.poisson.sf(most, picks(B, n))
    assert share <= 0.01 * delta < share * 20


def test_noise_has_the_moments_and_the_distribution_of_a_normal():
    x = np.asarray(normal(words_of(jax.random.key(7)), (1000, 1000)), np.float64).ravel()
    m = len(x)
    assert abs(x.mean()) < 4.5 / np.sqrt(m)
    assert abs(x.var() - 1) < 4.5 * np.sqrt(2 / m)
    assert abs(stats.skew(x)) < 4.5 * np.sqrt(6 / m)
    assert abs(stats.kurtosis(x)) < 4.5 * np.sqrt(24 / m)
    assert stats.kstest(x, "norm").pvalue > 1e-4
    tails = np.abs(x) > 4
    assert abs(tails.sum() - m * 2 * stats.norm.sf(4)) < 4.5 * np.sqrt(m * 2 * stats.norm.sf(4))
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4.5 / np.sqrt(m)


def test_the_gradient_is_the_clipped_mean_plus_noise_of_the_right_size():
    """Over many batches of all rows: the mean is the mean of clipped gradients, the deviation z c/B."""
    model, n, c, z = MODELS["dnn"], 30, 0.4, 1.7
    p = problem(dataclasses.replace(model, l2=0.1), n, private(c, z, n, n))
    theta = model.init(jax.random.key(0))
    draws = 4000
    made = jax.jit(jax.vmap(lambda key: p.loss(p.draw(key, n)).grad(theta).ravel()))(
        jax.random.split(jax.random.key(1), draws)
    )
    made = np.asarray(made, np.float64)
    mean = clipped(row_gradients(model, theta, p.x, p.y), c).sum(axis=0) / n + 0.1 * theta.ravel()
    noise = (made - mean) / (z * c / n)
    d = noise.shape[1]
    assert stats.chi2.sf(draws * (noise.mean(axis=0) ** 2).sum(), d) > 1e-4
    assert abs(noise.var() - 1) < 4.5 * np.sqrt(2 / noise.size)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    correlations = np.corrcoef(noise.T)[np.triu_indices(d, 1)]
    assert stats.chi2.sf(draws * correlations @ correlations, len(correlations)) > 1e-4


def test_every_use_of_a_batch_has_noise_of_its_own():
    model = MODELS["mlr"]
    p = problem(model, 30, private(1.0, 2.0, 10, 30))
    theta = model.init(jax.random.key(0))
    batch = p.draw(jax.random.key(0), 10)
    clean = summed(p, batch, theta)
    made = jax.jit(jax.vmap(lambda k: p.loss(batch).at(k).grad(theta).ravel()))(jnp.arange(200))
    noise = np.asarray(10 * made - clean)
    together = np.corrcoef(noise)[np.triu_indices(200, 1)]
    assert np.abs(together).max() < 0.99
    assert abs(together.mean()) < 4.5 / np.sqrt(len(together) * len(noise[0]))


def test_inner_steps_of_the_prox_use_fresh_noise_each():
    """K steps with λ = 0, each of whose gradients is z c/B times noise, add up to √K times that."""
    model, K = Network(features=6, classes=0), 4
    p = problem(model, 30, private(1e-3, 1e3, 30, 30))
    w = 0 * model.init(jax.random.key(0))

    def moved(key: jax.Array) -> jax.Array:
        return prox(p.loss(p.draw(key, 30)), w, w, lam=0.0, alpha=1.0, K=K).theta.ravel()

    made = np.asarray(jax.jit(jax.vmap(moved))(jax.random.split(jax.random.key(2), 4000)), np.float64)
    assert made.var() == pytest.approx(K / 30**2, rel=0.05)


WIDE = {
    "mlr": Network(features=30, classes=3, l2=0.1),
    "dnn": Network(features=30, classes=3, hidden=(5, 4), l2=0.1),
    "regression": Network(features=30, classes=0),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize(("alpha", "K"), [(0.1, 1), (0.1, 5), (1 / 2.1, 3)])
def test_inner_steps_in_the_space_of_the_batch_are_the_plain_ones(name: str, alpha: float, K: int):
    """Without noise, with clipping, also where 1 − α(λ + l2) is 0."""
    model = WIDE[name]
    p = problem(model, 40, private(0.5, 0.0, 8, 40))
    w, start = (model.init(jax.random.key(k)) for k in range(2))
    for key in jax.random.split(jax.random.key(5), 4):
        loss = p.loss(p.draw(key, 8))
        assert private_prox.covers(loss)
        want = descend(loss, w, start, 2.0, alpha, K, None, "gradient").theta.ravel()
        got = prox(loss, w, start, lam=2.0, alpha=alpha, K=K).theta.ravel()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_noise_of_inner_steps_has_the_closed_form_of_a_quadratic():
    """θ ← M θ + α λ w + α Xᵀy/B − α (zc/B) E_k with M = (1 − αλ) I − (α/B) XᵀX, so that θ_K is normal, with
    covariance (α zc/B)² Σ_k M^{2(K−1−k)}. Two of the rows are alike, so that X Xᵀ is singular."""
    model, n, K, alpha, lam, z = Network(features=12, classes=0), 10, 5, 0.4, 0.5, 1.5
    p = problem(model, n, private(100.0, z, n, n), scale=0.5)
    p = dataclasses.replace(p, x=p.x.at[3].set(p.x[7]))
    w = model.init(jax.random.key(0))
    loss = p.loss(p.draw(jax.random.key(1), n))
    assert private_prox.covers(loss)

    @jax.jit
    @jax.vmap
    def steps(words: jax.Array) -> jax.Array:
        own = dataclasses.replace(loss, batch=dataclasses.replace(loss.batch, key=words))
        return prox(own, w, w, lam=lam, alpha=alpha, K=K).theta.ravel()

    draws = 40_000
    keys = jax.vmap(words_of)(jax.random.split(jax.random.key(2), draws))
    made = np.asarray(steps(keys), np.float64)

    x = np.column_stack([np.asarray(p.x, np.float64), np.ones(n)])
    M = (1 - alpha * lam) * np.eye(13) - alpha / n * x.T @ x
    centre = np.asarray(w.ravel(), np.float64)
    mean = centre
    for _ in range(K):
        mean = M @ mean + alpha * lam * centre + alpha / n * x.T @ np.asarray(p.y, np.float64)
    powers = [np.linalg.matrix_power(M, 2 * k) for k in range(K)]
    covariance = (alpha * z * 100.0 / n) ** 2 * np.sum(powers, axis=0)
    error = np.sqrt(np.diag(covariance) / draws)
    assert np.abs((made.mean(axis=0) - mean) / error).max() < 4.5
    found, of = np.cov(made.T), np.sqrt(np.diag(covariance))
    scaled = (found - covariance) / np.outer(of, of)
    assert np.abs(scaled).max() < 4.5 * np.sqrt(2 / draws)


def test_without_noise_and_clipping_all_rows_give_the_plain_gradient():
    for model in (MODELS["mlr"], MODELS["dnn"], MODELS["functions"]):
        model = dataclasses.replace(model, l2=0.3)
        p = problem(model, 25, private(np.inf, 0.0, 25, 25))
        theta = model.init(jax.random.key(4))
        plain = dataclasses.replace(p, private=None).loss(ALL_ROWS).grad(theta)
        got = gradient(p, p.draw(jax.random.key(0), 25), theta)
        np.testing.assert_allclose(got, plain.ravel(), rtol=1e-4, atol=1e-6)


def test_rows_of_a_private_problem_cannot_be_used_in_other_ways():
    p = problem(MODELS["mlr"], 25, private(1.0, 1.0, 10, 25))
    theta = MODELS["mlr"].init(jax.random.key(0))
    uses = [
        partial(p.loss, ALL_ROWS),
        partial(p.loss, jnp.arange(3)),
        partial(p.mean_loss, theta),
        partial(p.label_counts, 3),
        partial(p.draw_test, jax.random.key(0), 4),
    ]
    for use in uses:
        with pytest.raises(InputError, match="differential privacy of rows"):
            use()


def test_types():
    p = problem(MODELS["mlr"], 25, private(1.0, 1.0, 10, 25))
    batch = p.draw(jax.random.key(0), 10)
    assert isinstance(batch, Batch)
    assert isinstance(p.loss(batch), PrivateLoss)
