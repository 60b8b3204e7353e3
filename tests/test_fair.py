"""The fair relatives, AFL and q-FFL: rounds against NumPy, where they lead on quadratic losses, and mistakes
that the same checks find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles_shared
import pytest
from laws import differs, flat
from shared_laws import L2, Quadratic, assert_equal, check_rounds, check_same_model, each, on_quadratics

from pfedme.algorithms import AFL, QFFL, Algorithm, FedAvg
from pfedme.algorithms.afl import onto_simplex
from pfedme.algorithms.base import Cohort, Update
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.tree import Params, record

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

STEPS: dict[str, Any] = {"R": 3, "eta": 0.2}
CLIENT: dict[str, Any] = {**STEPS, "B": 0}
"""Of clients that use all their rows."""
TWO = [Quadratic(np.eye(1), np.zeros(1)), Quadratic(4 * np.eye(1), np.ones(1))]
"""½ x² and 2 (x − 1)², whose larger one is least where they meet, at x = ⅔."""


# --- AFL


def check_afl(cls: type[AFL]) -> None:
    check_rounds(cls(**CLIENT, gamma=0.3, beta=1.5), oracles_shared.afl(gamma=0.3, beta=1.5, **STEPS, l2=L2))


def check_saddle(cls: type[AFL]) -> None:
    """min_x max_λ λ₁ x²/2 + λ₂ 2 (x − 1)² has x = ⅔ and λ = (⅔, ⅓)."""
    simulation, state = on_quadratics(cls(R=1, B=0, eta=0.2, gamma=0.2), TWO, 1000)
    _, w, weights, mean = state.server
    np.testing.assert_allclose(flat(w), 2 / 3, atol=1e-12)
    np.testing.assert_allclose(weights, [2 / 3, 1 / 3], atol=1e-12)
    before = flat(mean)
    np.testing.assert_allclose(before, 2 / 3, atol=0.01)
    np.testing.assert_array_equal(flat(simulation.shared(state)), before)


def test_afl_is_the_oracle():
    check_afl(AFL)


def test_afl_finds_the_saddle():
    check_saddle(AFL)


@pytest.mark.slow
def test_afl_finds_the_saddle_on_average_if_one_client_takes_part_at_a_time():
    simulation, state = on_quadratics(AFL(R=1, B=0, eta=0.02, gamma=0.02), TWO, 4000, cohort=1)
    np.testing.assert_allclose(flat(simulation.shared(state)), 2 / 3, atol=0.03)


def test_afl_with_one_client_is_fedavg_and_reports_the_mean_of_its_models():
    one = TWO[1:]
    _, state = on_quadratics(AFL(R=2, B=0, eta=0.05, gamma=0.3), one, 3, cohort=1)
    _, w, weights, mean = state.server
    # Each round multiplies the distance to the minimiser by (1 − 4η)² = 0.64.
    assert_equal(flat(w), 1 - 0.64**3)
    assert_equal(weights, [1.0])
    assert_equal(flat(mean), np.mean([1 - 0.64**t for t in (1, 2, 3)]))


def test_the_projection_onto_probabilities_is_the_nearest_point():
    rng = np.random.default_rng(0)
    for size, scale in ((1, 1.0), (2, 1.0), (5, 0.1), (5, 10.0), (200, 1e3)):
        v = scale * rng.normal(size=size)
        np.testing.assert_allclose(onto_simplex(jnp.asarray(v)), oracles_shared.onto_simplex(v), atol=1e-11)
    inside = np.array([0.5, 0.2, 0.3])
    np.testing.assert_allclose(onto_simplex(jnp.asarray(inside)), inside, atol=1e-15)


# --- q-FFL


def check_q_ffl(cls: type[QFFL]) -> None:
    for q, by_rows in ((2.0, False), (0.5, True)):
        algorithm = cls(**CLIENT, q=q, beta=1.5, aggregation="samples" if by_rows else "uniform")
        check_rounds(algorithm, oracles_shared.q_ffl(q=q, beta=1.5, by_rows=by_rows, **STEPS, l2=L2))


def test_q_ffl_is_the_oracle():
    check_q_ffl(QFFL)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_q_ffl_with_q_zero_is_fedavg(aggregation):
    settings: dict[str, Any] = {**CLIENT, "beta": 1.5, "aggregation": aggregation}
    check_same_model(QFFL(q=0.0, **settings), FedAvg(**settings))


@pytest.mark.slow
def test_q_ffl_minimises_the_sum_of_powers_of_the_losses():
    """Σ f^q f′ = 0 for f₁ = x²/2 and f₂ = 2 (x − 1)²: a root between 0 and 1, which goes to ⅔."""
    found = []
    for q in (0.0, 1.0, 5.0, 40.0):
        _, state = on_quadratics(QFFL(R=1, B=0, eta=0.2, q=q), TWO, 800)
        low, high = 0.0, 1.0
        for _ in range(100):
            x = (low + high) / 2
            f, slope = np.array([x**2 / 2, 2 * (x - 1) ** 2]), np.array([x, 4 * (x - 1)])
            low, high = (low, x) if (f / f.max()) ** q @ slope > 0 else (x, high)
        np.testing.assert_allclose(flat(state.server), low, atol=1e-9)
        found.append(low)
    away = np.abs(np.array(found) - 2 / 3)
    assert (np.diff(away) < 0).all()
    assert away[-1] < 0.01


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_for_large_q_only_the_worst_client_counts(dtype):
    """Its step is β Δ/(1 + q ‖Δ‖²/(η f)); no power overflows."""
    delta, loss = np.array([[3.0, 1.0], [0.5, -2.0], [1.0, 1.0]], dtype), np.array([4.0, 7.0, 6.0], dtype)
    q, eta = 300.0, 0.1
    got = served(QFFL(q=q, eta=eta, beta=2.0), delta, loss, [5, 5, 5])
    want = 2 * delta[1] / (1 + q / eta * (delta[1] @ delta[1]) / loss[1])
    np.testing.assert_allclose(got, want, rtol=1e-5)


# --- both


def served(algorithm: AFL | QFFL, delta: np.ndarray, loss: np.ndarray, rows: list[int]) -> np.ndarray:
    """w after a round from zero with these uploads."""
    first = Params(jnp.zeros(delta.shape[1], delta.dtype))
    server = algorithm.begin(jax.random.key(0), lambda _: first, len(rows))
    cohort = Cohort(jax.random.key(0), jnp.arange(len(rows)), jnp.asarray(rows), len(rows))
    uploads = Params(jnp.asarray(delta)), jnp.asarray(loss)
    return flat(algorithm.shared(algorithm.server_update(server, uploads, cohort), ()))


@pytest.mark.parametrize("algorithm", [AFL(gamma=0.1), QFFL(q=2.0, eta=0.1)], ids=["afl", "q-ffl"])
def test_what_an_absent_client_would_have_sent_does_not_matter(algorithm):
    delta, loss = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)
    ends = []
    for garbage in (0.0, 1e25):
        delta[[1, 3]], loss[[1, 3]] = garbage, garbage
        ends.append(served(algorithm, delta, loss, [3, 0, 5, 0]))
    np.testing.assert_allclose(*ends, rtol=1e-6)
    assert differs(ends[0], np.zeros(3))


# --- mistakes


@record
class NotProjected(AFL):
    """λ is only divided by its sum."""

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        t, w, _, mean = super().server_update(server, uploads, cohort)
        ascent = self.gamma * cohort.total / len(cohort.rows) * uploads[1]
        weights = server[2].at[cohort.clients].add(ascent)
        return t, w, weights / jnp.sum(weights), mean


@record
class CohortForAll(AFL):
    """Without N/|S|."""

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        share = jnp.sum(cohort.rows > 0) / cohort.total
        scaled = jax.tree.map(lambda a: share * a, uploads)
        return super().server_update(server, scaled, cohort)


@record
class LastModel(AFL):
    """The last w in place of the mean."""

    def shared(self, server: Any, clients: Any) -> Params:
        return server[1]


@record
class LossAfterwards(AFL):
    """f_i of the local model in place of f_i(w)."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        update = super().client_update(key, problem, w, state)
        return update._replace(upload=(update.upload[0], problem.loss(ALL_ROWS)(w + update.upload[0])))


@record
class QLossAfterwards(QFFL):
    """The same mistake in q-FFL."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        update = super().client_update(key, problem, w, state)
        return update._replace(upload=(update.upload[0], problem.loss(ALL_ROWS)(w + update.upload[0])))


@record
class NotNormalised(QFFL):
    """The mean of f_i^q Δ_i, without the estimate of the curvature."""

    def server_update(self, w: Params, uploads: Any, cohort: Cohort) -> Params:
        delta, loss = uploads
        powers = loss**self.q
        return w + self.beta * self.combined(
            delta.map(lambda d: jnp.einsum("n,n...->n...", powers, d)), cohort
        )


MUTANTS: dict[type[Algorithm], Callable[[Any], None]] = {
    NotProjected: check_saddle,
    CohortForAll: check_afl,
    LastModel: check_saddle,
    LossAfterwards: check_afl,
    QLossAfterwards: check_q_ffl,
    NotNormalised: check_q_ffl,
}


@each(MUTANTS, slow=(CohortForAll, QLossAfterwards))
def test_a_mistake_is_found(mutant):
    with pytest.raises(AssertionError):
        MUTANTS[mutant](mutant)
