"""The baselines: each client alone, and FedAvg with fine-tuning."""

import numpy as np
import oracles
import pytest
from laws import (
    EXACT,
    SIZE,
    assert_close,
    assert_same_bits,
    federation,
    flat,
    softmax_regression,
    start_at,
    train_rows,
    trajectory,
)

from pfedme.algorithms import Alone, FedAvg, FedAvgFT
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2 = 0.05
w0 = np.random.default_rng(0).normal(size=SIZE)


def test_alone_each_client_takes_its_own_gradient_steps_every_round():
    fed, T, R = federation(EXACT, dtype=np.float64), 4, 3
    simulation = Simulation(Alone(R=R, B=0, eta=0.2), softmax_regression(L2), fed, cohort=2)
    states = trajectory(simulation, start_at(simulation, w0), T)
    for t, state in enumerate(states):
        models, _ = simulation.answer(state)
        assert models.local is None
        for i, rows in enumerate(train_rows(fed)):
            want = oracles.fedavg_client(w0, rows, eta=0.2, R=t * R, l2=L2)
            np.testing.assert_allclose(flat(models.personal, True)[i], want, rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(flat(state.server), w0)


def test_alone_comes_to_each_clients_own_minimiser():
    fed = federation(EXACT, dtype=np.float64)
    simulation = Simulation(Alone(R=50, B=0, eta=0.2), softmax_regression(0.3), fed, cohort=1)
    state, finite = simulation.advance(start_at(simulation, w0), 20)
    assert finite
    for theta, rows in zip(flat(simulation.answer(state)[0].personal, True), train_rows(fed), strict=True):
        np.testing.assert_allclose(theta, oracles.prox(w0, rows, 0.0, 0.3), atol=1e-6)


@pytest.mark.slow
def test_a_federation_of_one_client_is_that_client_alone():
    fed = federation(((9, 3),), dtype=np.float64)
    together, alone = (
        Simulation(algorithm, softmax_regression(L2), fed, cohort=1, seed=5)
        for algorithm in (FedAvg(R=3, B=4, eta=0.1), Alone(R=3, B=4, eta=0.1))
    )
    one = trajectory(together, start_at(together, w0), 4)[-1]
    other = trajectory(alone, start_at(alone, w0), 4)[-1]
    np.testing.assert_allclose(flat(one.server), flat(alone.answer(other)[0].personal, True)[0], rtol=1e-12)


def test_fine_tuning_takes_f_steps_from_w_on_the_clients_rows():
    fed = federation(EXACT, dtype=np.float64)
    algorithm = FedAvgFT(R=2, F=7, B=0, eta=0.2)
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=2)
    state = trajectory(simulation, start_at(simulation, w0), 3)[-1]
    models, _ = simulation.answer(state)
    for i, rows in enumerate(train_rows(fed)):
        for kind, steps in ((models.local, 2), (models.personal, 7)):
            want = oracles.fedavg_client(flat(state.server), rows, eta=0.2, R=steps, l2=L2)
            np.testing.assert_allclose(flat(kind, True)[i], want, rtol=1e-10, atol=1e-12)


def test_fine_tuning_leaves_the_training_of_fedavg_as_it_is():
    fed, ends = federation(EXACT, dtype=np.float64), []
    for algorithm in (FedAvg(R=2, B=0, eta=0.2), FedAvgFT(R=2, F=7, B=0, eta=0.2)):
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=2, seed=1)
        state = trajectory(simulation, start_at(simulation, w0), 4)[-1]
        ends.append((state.server, simulation.answer(state)[0].local))
    assert_same_bits(ends[0][0], ends[1][0])
    assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_fine_tuning_draws_mini_batches_of_its_own():
    """As many steps on the batches of the local model would give the local model again."""
    fed = federation(dtype=np.float64)
    simulation = Simulation(FedAvgFT(R=4, F=4, B=2, eta=0.3), softmax_regression(L2), fed, cohort=1)
    models, _ = simulation.answer(start_at(simulation, w0))
    for i in (0, 1, 3, 4):  # client 2 has two rows only
        assert np.abs(flat(models.local, True)[i] - flat(models.personal, True)[i]).max() > 1e-3
