"""Per-FedAvg: the meta gradient in its three forms, and rounds against NumPy."""

import jax
import numpy as np
import oracles
import pytest
from laws import (
    EXACT,
    SIZE,
    assert_same_bits,
    differs,
    federation,
    flat,
    held_out,
    point,
    problem,
    softmax_regression,
    start_at,
    train_rows,
    trajectory,
)

from pfedme.algorithms import PerFedAvg
from pfedme.core.problem import Loss
from pfedme.core.tree import Params
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2 = 0.05
w0 = np.random.default_rng(0).normal(size=SIZE)


def at(w: np.ndarray) -> Params:
    return point(softmax_regression(), w)


def full(client: int) -> tuple[Loss, oracles.Rows]:
    """A client's loss on all its rows, and the rows."""
    fed = federation(EXACT, dtype=np.float64)
    own = problem(fed, softmax_regression(L2), client)
    return own.sample(jax.random.key(0), 0), train_rows(fed)[client]


@jax.jit
def meta_gradient(algorithm: PerFedAvg, w: Params, f: Loss) -> Params:
    return algorithm.meta_gradient(w, f, f, f)


@pytest.mark.parametrize("alpha", [0.01, 0.5])
@pytest.mark.parametrize("client", [0, 2])
def test_the_exact_meta_gradient_is_the_slope_of_the_loss_after_a_step(alpha, client):
    f, rows = full(client)

    def loss_after_a_step(w: np.ndarray) -> float:
        return oracles.loss(w - alpha * oracles.gradient(w, rows, L2), rows, L2)

    got = flat(meta_gradient(PerFedAvg(alpha=alpha), at(w0), f))
    np.testing.assert_allclose(got, oracles.slope(loss_after_a_step, w0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got, oracles.meta_gradient(w0, rows, alpha, L2), rtol=1e-10, atol=1e-13)


def test_the_difference_form_comes_to_the_exact_one_with_the_square_of_delta():
    f, _ = full(0)
    exact = flat(meta_gradient(PerFedAvg(alpha=0.5), at(w0), f))
    errors = [
        np.linalg.norm(
            flat(meta_gradient(PerFedAvg(alpha=0.5, hessian="difference", delta=d), at(w0), f)) - exact
        )
        for d in (1e-1, 1e-2, 1e-3)
    ]
    assert errors[2] < 1e-6
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], 100, rtol=0.1)


def test_the_first_order_form_leaves_out_exactly_the_hessian():
    f, rows = full(0)
    for alpha in (0.5, 1e-2, 1e-6):
        exact = flat(meta_gradient(PerFedAvg(alpha=alpha), at(w0), f))
        first = flat(meta_gradient(PerFedAvg(alpha=alpha, hessian="first-order"), at(w0), f))
        np.testing.assert_allclose(
            first - exact, alpha * oracles.hessian(w0, rows, L2) @ first, rtol=1e-8, atol=1e-14
        )
        assert np.linalg.norm(first - exact) <= alpha * oracles.smoothness(rows, L2) * np.linalg.norm(first)


@pytest.mark.parametrize(
    ("hessian", "cohort", "aggregation"), [("exact", 4, "samples"), ("first-order", 2, "uniform")]
)
def test_rounds_and_models_are_the_oracles(hessian, cohort, aggregation):
    fed, alpha, eta, R, beta = federation(EXACT, dtype=np.float64), 0.3, 0.1, 3, 1.5
    algorithm = PerFedAvg(R=R, B=0, alpha=alpha, eta=eta, beta=beta, hessian=hessian, aggregation=aggregation)
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=cohort, seed=4)
    states = trajectory(simulation, start_at(simulation, w0), 4)

    def client(w: np.ndarray, rows: oracles.Rows) -> np.ndarray:
        return oracles.per_fedavg_client(
            w, rows, alpha=alpha, eta=eta, R=R, l2=L2, first_order=hessian == "first-order"
        )

    cohorts = [simulation.cohort_of(t).tolist() for t in range(4)]
    want = oracles.rounds(
        w0, train_rows(fed), cohorts, client, beta=beta, by_samples=aggregation == "samples"
    )
    for state, w in zip(states, want, strict=True):
        np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
    models, _ = simulation.answer(states[-1])
    for i, rows in enumerate(train_rows(fed)):
        np.testing.assert_allclose(
            flat(models.local, True)[i], client(want[-1], rows), rtol=1e-10, atol=1e-12
        )
        one_step = want[-1] - alpha * oracles.gradient(want[-1], rows, L2)
        np.testing.assert_allclose(flat(models.personal, True)[i], one_step, rtol=1e-10, atol=1e-12)


def test_the_three_factors_of_a_meta_step_use_three_mini_batches():
    """With batches of one row, which rows a step was made of can be read off its result."""
    fed = federation(((12, 0),), dtype=np.float64)
    (rows,), alpha, eta = train_rows(fed), 0.5, 0.3
    algorithm = PerFedAvg(R=1, B=1, alpha=alpha, eta=eta)
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=1)
    start = start_at(simulation, w0)
    one_row = [oracles.Rows(rows.x[i : i + 1], rows.y[i : i + 1]) for i in range(12)]
    expected = {
        (i, j, k): w0 - eta * (v - alpha * oracles.hessian(w0, one_row[k], L2) @ v)
        for i in range(12)
        for j in range(12)
        for v in [oracles.gradient(w0 - alpha * oracles.gradient(w0, one_row[i], L2), one_row[j], L2)]
        for k in range(12)
    }
    triples, points = np.array(list(expected)), np.array(list(expected.values()))
    seen = []
    for t in range(40):
        got = flat(simulation.answer(start._replace(t=t))[0].local, True)[0]
        distance = np.abs(points - got).max(axis=1)
        assert distance.min() < 1e-10
        seen.append(triples[distance.argmin()])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        # Two independent rows of twelve agree once in twelve times: over 12 of 40 is beyond four deviations.
        assert sum(s[a] == s[b] for s in seen) <= 12


def test_the_personal_model_starts_from_the_w_received_and_not_from_the_local_model():
    fed = federation(EXACT, dtype=np.float64)
    few, many = (
        Simulation(PerFedAvg(R=R, B=0, eta=0.1), softmax_regression(L2), fed, cohort=1) for R in (1, 3)
    )
    one, other = (s.answer(start_at(s, w0))[0] for s in (few, many))
    assert_same_bits(one.personal, other.personal)
    assert differs(one.local, other.local)


def test_adapted_on_test_rows_it_takes_two_steps_there():
    sizes = ((8, 1), (4, 1), (16, 1))  # every batch of test rows is copies of the only one
    fed, alpha, eta = federation(sizes, dtype=np.float64), 0.3, 0.1
    algorithm = PerFedAvg(R=1, B=4, alpha=alpha, eta=eta, adapt_on="test")
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=1)
    models, _ = simulation.answer(start_at(simulation, w0))
    for theta, rows in zip(flat(models.personal, True), held_out(fed), strict=True):
        first = w0 - alpha * oracles.gradient(w0, rows, L2)
        want = first - eta * oracles.gradient(first, rows, L2)
        np.testing.assert_allclose(theta, want, rtol=1e-10, atol=1e-12)
