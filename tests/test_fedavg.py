"""FedAvg against NumPy, and what it is in the simplest cases."""

import numpy as np
import oracles
import pytest
from laws import EXACT, SIZE, federation, flat, softmax_regression, start_at, train_rows, trajectory

from pfedme.algorithms import FedAvg
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2 = 0.05
w0 = np.random.default_rng(0).normal(size=SIZE)


def run(algorithm: FedAvg, fed, cohort: int, rounds: int, l2: float = L2) -> tuple[Simulation, list]:
    simulation = Simulation(algorithm, softmax_regression(l2), fed, cohort=cohort, seed=2)
    return simulation, trajectory(simulation, start_at(simulation, w0), rounds)


@pytest.mark.parametrize(
    ("R", "cohort", "aggregation"),
    [(1, 4, "uniform"), (5, 4, "samples"), (3, 2, "uniform")],
)
def test_rounds_and_local_models_are_the_oracles(R, cohort, aggregation):
    fed = federation(EXACT, dtype=np.float64)
    for beta in (0.5, 1.0, 2.0):
        algorithm = FedAvg(R=R, B=0, eta=0.2, beta=beta, aggregation=aggregation)
        simulation, states = run(algorithm, fed, cohort, 5)

        def client(w: np.ndarray, rows: oracles.Rows) -> np.ndarray:
            return oracles.fedavg_client(w, rows, eta=0.2, R=R, l2=L2)

        cohorts = [simulation.cohort_of(t).tolist() for t in range(5)]
        want = oracles.rounds(
            w0, train_rows(fed), cohorts, client, beta=beta, by_samples=aggregation == "samples"
        )
        for state, w in zip(states, want, strict=True):
            np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
        models, info = simulation.answer(states[-1])
        assert models.personal is None
        assert info == {}
        for i, rows in enumerate(train_rows(fed)):
            np.testing.assert_allclose(
                flat(models.local, True)[i], client(want[-1], rows), rtol=1e-10, atol=1e-12
            )


def test_one_step_weighted_by_rows_is_a_gradient_step_on_all_rows_together():
    fed = federation(EXACT, dtype=np.float64)
    _, states = run(FedAvg(R=1, B=0, eta=0.3, aggregation="samples"), fed, fed.clients, 4)
    clients, w = train_rows(fed), w0
    pooled = oracles.Rows(np.concatenate([c.x for c in clients]), np.concatenate([c.y for c in clients]))
    for state in states:
        np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
        w = w - 0.3 * oracles.gradient(w, pooled, L2)


def test_one_step_weighted_alike_is_a_gradient_step_on_the_mean_of_the_clients_losses():
    fed = federation(EXACT, dtype=np.float64)
    _, states = run(FedAvg(R=1, B=0, eta=0.3, aggregation="uniform"), fed, fed.clients, 4)
    w = w0
    for state in states:
        np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
        w = w - 0.3 * np.mean([oracles.gradient(w, rows, L2) for rows in train_rows(fed)], axis=0)


def test_a_single_client_comes_to_its_own_minimiser():
    fed = federation(((8, 2),), dtype=np.float64)
    (rows,) = train_rows(fed)
    simulation = Simulation(FedAvg(R=50, B=0, eta=0.3), softmax_regression(0.3), fed, cohort=1)
    state, finite = simulation.advance(start_at(simulation, w0), 20)
    assert finite
    np.testing.assert_allclose(flat(state.server), oracles.prox(w0, rows, 0.0, 0.3), atol=1e-8)


def test_local_steps_on_mini_batches_are_unbiased():
    """One step on a random batch is w − η ∇f(w) in the mean, within five standard errors."""
    fed, eta, rounds, B = federation(((12, 0),), dtype=np.float64), 0.5, 600, 3
    (rows,) = train_rows(fed)
    simulation = Simulation(FedAvg(R=1, B=B, eta=eta), softmax_regression(L2), fed, cohort=1)
    start = start_at(simulation, w0)
    steps = (
        np.array([flat(simulation.answer(start._replace(t=t))[0].local, True)[0] for t in range(rounds)]) - w0
    )
    row_steps = -eta * oracles.row_gradients(w0, rows, L2)
    error = row_steps.std(axis=0) / np.sqrt(B * rounds)
    assert (np.abs(steps.mean(axis=0) - row_steps.mean(axis=0)) <= 5 * error + 1e-12).all()
    np.testing.assert_allclose(steps.var(axis=0), row_steps.var(axis=0) / B, rtol=0.5)


def test_cycled_batches_are_consecutive_rows_of_each_client():
    fed, eta, R, B = federation(EXACT, dtype=np.float64), 0.2, 2, 4
    algorithm = FedAvg(R=R, B=B, eta=eta, batches="cycled", aggregation="uniform")
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=fed.clients)
    states = trajectory(simulation, start_at(simulation, w0), 3)
    w = w0
    for t, state in enumerate(states[1:]):
        uploads = []
        for rows in train_rows(fed):
            local = w
            for r in range(R):
                at = (B * (R * t + r) + np.arange(B)) % len(rows.y)
                local = local - eta * oracles.gradient(local, oracles.Rows(rows.x[at], rows.y[at]), L2)
            uploads.append(local)
        w = np.mean(uploads, axis=0)
        np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
