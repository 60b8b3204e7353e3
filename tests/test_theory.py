"""The theorems' measurement: its federations, its rounds and its fits, against closed forms and NumPy."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import double_precision, single_precision

from pfedme.algorithms.pfedme import PFedMe
from pfedme.core.prox import prox
from pfedme.core.tree import Params
from pfedme.experiments import theory
from pfedme.experiments.theory import Measured, clients
from pfedme.experiments.theory.clients import CONVEX, DIMENSION, KINDS, MOST, NONCONVEX, Federation
from pfedme.experiments.theory.convex import decay
from pfedme.experiments.theory.measured import power, series
from pfedme.experiments.theory.picture import PANELS

LAMS = {CONVEX: 2.0, NONCONVEX: 1.5}


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    """All findings, from programs that are compiled to be fast, as the command has them."""
    with single_precision():
        return theory.measure(quick=True)


@pytest.fixture
def double() -> Iterator[None]:
    """float64."""
    with double_precision():
        yield


def slope(family: clients.Family, u: np.ndarray) -> np.ndarray:
    """φ' in NumPy."""
    return u if family is CONVEX else np.sin(u)


def envelope(fed: Federation, i: int, w: np.ndarray) -> float:
    """F_i(w) of a strongly convex client at its closed-form θ̂_i(w) = (a c + λ w)/(a + λ)."""
    a, c, lam = fed.a[i], fed.c[i], fed.lam
    theta = (a * c + lam * w) / (a + lam)
    return float(np.sum(a * (theta - c) ** 2) / 2 + lam / 2 * np.sum((theta - w) ** 2))


@pytest.fixture
def fed() -> Federation:
    return clients.federation(CONVEX, 2.0, seed=3)


@pytest.fixture
def point() -> np.ndarray:
    return np.random.default_rng(0).normal(size=DIMENSION)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("B", [1, 4, 25])
def test_a_mini_batch_has_the_variance_that_it_says(fed, B):
    """E ‖ξ̄‖² = γ_f²/|D|, and E ξ̄ = 0; of 40,000 coordinates each is within a few standard errors."""
    gamma, draws = 3.0, 4000
    client = jax.tree.map(lambda leaf: leaf[0], fed.clients(gamma=gamma))
    rows = client.draw(clients.keys(1, 0)[0], draws, B)
    noise = np.array(jax.vmap(lambda own: client.loss(own).noise)(rows))
    assert noise.shape == (draws, DIMENSION)
    assert np.mean(np.sum(noise**2, axis=1)) == pytest.approx(gamma**2 / B, rel=0.04)
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=5 * gamma / math.sqrt(DIMENSION * B * draws))


@pytest.mark.usefixtures("double")
def test_repetitions_and_clients_draw_noise_of_their_own(fed):
    at = clients.setting(fed, 0.1, clients.BLOCKS, gamma=1.0)
    last = clients.simulate(at, 5, seed=0).w[:, -1]
    assert len(np.unique(last.round(12), axis=0)) == 5
    algorithm = PFedMe(lam=2.0, R=1, B=1, K=20, alpha=fed.alpha)
    same = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * 3), fed.clients(gamma=1.0))
    thetas = np.array(clients.answers(algorithm, same, jnp.zeros(DIMENSION), clients.keys(4, 0)))
    assert len(np.unique(thetas.reshape(12, -1).round(12), axis=0)) == 12


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", [CONVEX, NONCONVEX])
def test_the_gradient_is_the_slope_of_the_loss_plus_the_mean_row(family, point):
    fed = clients.federation(family, LAMS[family])
    client = jax.tree.map(lambda leaf: leaf[1], fed.clients())
    rows = np.random.default_rng(1).normal(size=(3, DIMENSION))
    got = client.loss(jnp.asarray(rows)).grad(Params(jnp.asarray(point))).tree
    want = fed.a[1] * slope(family, point - fed.c[1]) + rows.mean(axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    value = oracles.slope(lambda u: float(np.sum(family.value(jnp.asarray(u)))), point)
    np.testing.assert_allclose(slope(family, point), value, atol=1e-9)


@pytest.mark.usefixtures("double")
def test_the_closed_form_prox_is_what_the_solver_finds(fed, point):
    w = Params(jnp.asarray(point))
    for i in range(KINDS):
        client = jax.tree.map(lambda leaf, i=i: leaf[i], fed.clients())
        got = prox(client.exact(), w, w, lam=fed.lam, alpha=fed.alpha, K=1, nu=1e-26).theta.tree
        np.testing.assert_allclose(got, (fed.a[i] * fed.c[i] + 2 * point) / (fed.a[i] + 2), atol=1e-12)
    np.testing.assert_allclose(
        clients.envelopes(fed, point[None]).gradient[0], fed.m * (point - fed.c), atol=1e-12
    )


@pytest.mark.usefixtures("double")
def test_the_nonconvex_prox_has_no_gradient_left(point):
    fed = clients.federation(NONCONVEX, 1.5)
    theta = clients.envelopes(fed, point[None]).theta[0]
    np.testing.assert_allclose(fed.a * np.sin(theta - fed.c) + 1.5 * (theta - point), 0, atol=1e-14)


def test_the_error_of_w_and_the_optimum_follow_from_the_envelopes(fed, point):
    """F − F* is a difference of the clients' mean envelopes, and w* is where its slope is zero."""

    def F(w: np.ndarray) -> float:
        return float(np.mean([envelope(fed, i, w) for i in range(KINDS)]))

    assert fed.excess(point) == pytest.approx(F(point) - F(fed.optimum), rel=1e-12)
    np.testing.assert_allclose(oracles.slope(F, fed.optimum), 0, atol=1e-8)
    slopes = [oracles.slope(lambda w, i=i: envelope(fed, i, w), fed.optimum) for i in range(KINDS)]
    assert fed.sigma2 == pytest.approx(np.mean(np.sum(np.square(slopes), axis=1)), rel=1e-8)


def test_the_diversity_of_the_nonconvex_gradients_is_attained_and_not_exceeded():
    """σ_f² is a supremum over w: a search over each coordinate for itself comes up to it."""
    fed = clients.federation(NONCONVEX, 1.5)
    g = fed.a * np.sin(np.linspace(-np.pi, np.pi, 20001)[:, None, None] - fed.c)
    most = np.max((g - g.mean(axis=1, keepdims=True)) ** 2, axis=0).sum(axis=1).max()
    assert most == pytest.approx(fed.sigma_f2, rel=1e-6)
    assert most <= fed.sigma_f2 * (1 + 1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", [CONVEX, NONCONVEX])
@pytest.mark.parametrize(("N", "S"), [(16, 16), (8, 3)])
def test_a_round_is_algorithm_1_in_numpy(family, N, S, point):
    fed = clients.federation(family, LAMS[family])
    at = clients.setting(fed, 0.4, clients.BLOCKS, beta=2.0, R=3, N=N, S=S)
    eta, alpha, key = 0.4 / 6, fed.alpha, clients.keys(1, 5)[0]
    chosen = np.flatnonzero(clients.cohort(jax.random.split(key)[1], N, S))
    assert len(chosen) == S
    assert chosen.max() < N
    uploads = []
    for i in chosen % KINDS:
        w_i = theta = point
        for _ in range(3):
            theta = oracles.descend(
                lambda p, i=i: fed.a[i] * slope(family, p - fed.c[i]), w_i, theta, fed.lam, alpha, 15
            )
            w_i = w_i - eta * fed.lam * (w_i - theta)
        uploads.append(w_i)
    want = oracles.server(point, uploads, [1] * S, beta=2.0, by_samples=False)
    np.testing.assert_allclose(clients.advance(at, key, jnp.asarray(point)), want, rtol=1e-12)


@pytest.mark.usefixtures("double")
def test_a_run_averages_as_the_proof_does(fed):
    """w̄_T and the sum of ‖∇F(w_t)‖² from the single rounds, which chance does not touch here."""
    at = clients.setting(fed, 0.2, 2 * clients.BLOCKS, beta=3.0)
    trace = clients.simulate(at, 1, seed=0, gradients=True)
    round_ = jax.jit(lambda w: clients.advance(at, clients.keys(1, 0)[0], w))
    ws = [at.w]
    for _ in range(at.rounds):
        ws.append(round_(ws[-1]))
    path = np.array(ws)
    weights = (1 - 0.2 * fed.mu_F / 2) ** -(np.arange(at.rounds) + 1.0)
    gradients = fed.m.mean(axis=0) * (path[:-1] - fed.optimum)
    np.testing.assert_allclose(trace.w[0], path[2::2], rtol=1e-12)
    np.testing.assert_allclose(trace.average[0, -1], weights @ path[:-1] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(trace.squares[0, -1], np.sum(gradients**2), rtol=1e-9)


def test_cohorts_are_uniform():
    """2000 cohorts of 3 out of 8: each client is in 750 of them, give or take five standard deviations."""
    marks = np.array(jax.vmap(lambda key: clients.cohort(key, 8, 3))(clients.keys(2000, 1)))
    assert marks.shape == (2000, MOST)
    assert (marks.sum(axis=1) == 3).all()
    assert not marks[:, 8:].any()
    np.testing.assert_allclose(marks[:, :8].sum(axis=0), 750, atol=5 * math.sqrt(2000 * 3 / 8 * 5 / 8))


@pytest.mark.parametrize("exponent", [-2.0, -2 / 3, 1.0])
@pytest.mark.parametrize("repetitions", [1, 6])
def test_the_exponent_of_a_power_law_is_found_exactly(exponent, repetitions):
    x = np.array([1.0, 3.0, 7.0, 50.0])
    scale = np.random.default_rng(0).uniform(1, 2, repetitions)
    fitted = power(x.tolist(), x[:, None] ** exponent * scale)
    np.testing.assert_allclose(fitted, exponent, rtol=1e-12)
    assert fitted.equals(exponent)
    assert fitted.reaches(exponent)
    assert fitted.reaches(exponent + 1)
    assert not fitted.reaches(exponent - 0.2)
    assert not fitted.equals(exponent + 0.2)


def test_the_interval_of_an_exponent_covers_the_truth_of_noisy_samples():
    x = np.array([1.0, 2.0, 4.0, 8.0])
    samples = x[:, None] ** -1.0 * np.random.default_rng(2).exponential(size=(4, 200))
    fitted = power(x.tolist(), samples)
    assert fitted.low < -1 < fitted.high
    assert fitted.high - fitted.low < 0.4


def test_the_decay_of_an_exponential_is_its_rate():
    times = np.arange(1.0, clients.BLOCKS + 1)
    assert decay(times, np.exp(-0.8 * times) + 1e-7) == pytest.approx(0.8, rel=1e-2)


def test_rows_hold_means_and_two_standard_errors():
    (row,) = series("c", "q", [2.0], np.array([[1.0, 3.0, 5.0]]), [9.0])
    assert row[:4] == ("c", "q", 2.0, 3.0)
    np.testing.assert_allclose(row[4:], [3 - 4 / math.sqrt(3), 3 + 4 / math.sqrt(3), 9])


@pytest.mark.slow
def test_every_claim_is_measured_in_finite_numbers(measured):
    assert [m.claim for m in measured] == [
        "Proposition 1", "Lemma 1", "Lemma 2", "Theorem 1 (a)", "Theorem 1 (b)", "Corollary 1", "Theorem 2",
        "Corollary 2",
    ]  # fmt: skip
    for m in measured:
        assert m.rows
        assert all(text.endswith(".") for text in (m.statement, m.experiment, m.numbers, m.explanation))
        for row in m.rows:
            assert row.claim == m.claim
            assert np.isfinite([row.x, row.value, row.low, row.high, row.bound]).all()
            assert row.low <= row.value <= row.high


@pytest.mark.slow
def test_what_is_a_theorem_is_not_refuted(measured):
    """Proposition 1 and the lemmas are proved for these very federations."""
    verdicts = {m.claim: m.verdict for m in measured}
    assert verdicts["Proposition 1"] == verdicts["Lemma 1"] == verdicts["Lemma 2"] == "holds"
    for claim in ("Theorem 1 (b)", "Corollary 1", "Theorem 2"):
        for row in next(m for m in measured if m.claim == claim).rows:
            assert row.value <= row.bound


@pytest.mark.slow
def test_the_figure_draws_every_series_that_it_names(measured):
    quantities = {row.quantity for m in measured for row in m.rows}
    named = {line.quantity for panel in PANELS for line in panel.lines}
    assert named - quantities <= {"noise against R, β = N√R"}
    assert theory.figure(measured).startswith(b"\x89PNG")
