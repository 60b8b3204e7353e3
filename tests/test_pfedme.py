"""pFedMe against Algorithm 1 written in NumPy, and against what the paper says of its limits."""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import oracles
import pytest
from laws import (
    EXACT,
    RAGGED,
    SIZE,
    assert_close,
    differs,
    federation,
    flat,
    single_precision,
    softmax_regression,
    start_at,
    train_rows,
    trajectory,
)

from pfedme.algorithms import FedAvg, PFedMe
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2 = 0.05


def w0(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SIZE)


def oracle_client(a: PFedMe) -> Callable[[np.ndarray, oracles.Rows], oracles.Answer]:
    """The oracle's client with an algorithm's hyperparameters."""
    return partial(
        oracles.pfedme_client,
        lam=a.lam, eta=a.eta, alpha=a.alpha, R=a.R, K=a.K, l2=L2, restart=a.theta_start == "w",
    )  # fmt: skip


def oracle_rounds(simulation: Simulation, a: PFedMe, w: np.ndarray, rounds: int) -> list[np.ndarray]:
    """The oracle's w in each round, with the cohorts of the simulation."""
    client = oracle_client(a)
    return oracles.rounds(
        w, train_rows(simulation.federation), [simulation.cohort_of(t).tolist() for t in range(rounds)],
        lambda w, rows: client(w, rows).local, beta=a.beta, by_samples=a.aggregation == "samples",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("R", "K", "cohort", "theta_start", "aggregation"),
    [
        (1, 1, 4, "carry", "uniform"),
        (4, 3, 4, "carry", "samples"),
        (2, 7, 2, "carry", "uniform"),
        (7, 2, 2, "carry", "uniform"),
        (4, 3, 2, "w", "samples"),
        (3, 2, 1, "w", "uniform"),
    ],
)
def test_rounds_and_models_are_those_of_algorithm_1(R, K, cohort, theta_start, aggregation):
    fed = federation(EXACT, dtype=np.float64)
    for beta in (0.5, 1.0, 2.0):
        algorithm = PFedMe(
            B=0, R=R, K=K, lam=4.0, eta=0.08, alpha=0.06, beta=beta, theta_start=theta_start,
            aggregation=aggregation,
        )  # fmt: skip
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=cohort, seed=3)
        states = trajectory(simulation, start_at(simulation, w0()), 5)
        want = oracle_rounds(simulation, algorithm, w0(), 5)
        for state, w in zip(states, want, strict=True):
            np.testing.assert_allclose(flat(state.server), w, rtol=1e-10, atol=1e-12)
        models, info = simulation.answer(states[-1])
        for i, own in enumerate(train_rows(fed)):
            answer = oracle_client(algorithm)(want[-1], own)
            np.testing.assert_allclose(flat(models.local, True)[i], answer.local, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(
                flat(models.personal, True)[i], answer.personal, rtol=1e-10, atol=1e-12
            )
            np.testing.assert_allclose(info["inner_residual"][i], answer.residual, rtol=1e-8)
            assert info["inner_steps"][i] == K


def test_rounds_in_single_precision_on_clients_of_any_size_are_those_of_algorithm_1():
    algorithm = PFedMe(B=0, R=5, K=5, lam=15.0, eta=0.01, alpha=0.03, beta=2.0)
    with single_precision():
        fed = federation(RAGGED)
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=3, seed=1)
        start = simulation.start()
        states = trajectory(simulation, start, 6)
        models, _ = simulation.answer(states[-1])
    want = oracle_rounds(simulation, algorithm, flat(start.server), 6)
    np.testing.assert_allclose(flat(states[-1].server), want[-1], rtol=1e-4, atol=1e-5)
    for i, own in enumerate(train_rows(fed)):
        answer = oracle_client(algorithm)(want[-1], own)
        np.testing.assert_allclose(flat(models.local, True)[i], answer.local, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(flat(models.personal, True)[i], answer.personal, rtol=1e-4, atol=1e-5)


def test_a_round_with_exact_inner_solutions_is_a_gradient_step_on_the_mean_envelope():
    """R = 1, S = N, β = 1: w ← w − η/N Σ ∇F_i(w)."""
    fed, lam, eta = federation(EXACT, dtype=np.float64), 2.0, 0.3
    algorithm = PFedMe(B=0, R=1, nu=1e-24, lam=lam, eta=eta, alpha=0.1, solver="nesterov")
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=fed.clients)
    _, after = trajectory(simulation, start_at(simulation, w0()), 1)
    gradients = [lam * (w0() - oracles.prox(w0(), rows, lam, L2)) for rows in train_rows(fed)]
    np.testing.assert_allclose(
        flat(after.server), w0() - eta * np.mean(gradients, axis=0), rtol=1e-9, atol=1e-11
    )


def test_with_exact_inner_solutions_w_comes_to_the_minimiser_of_the_mean_envelope():
    """Steps of 1/L_F = 1/λ on a μ_F-strongly convex F shrink ‖∇F‖ by 1 − μ_F/λ a round or more."""
    fed, lam, l2 = federation(EXACT, dtype=np.float64), 2.0, 0.5
    algorithm = PFedMe(B=0, R=1, nu=1e-24, lam=lam, eta=1 / lam, alpha=0.1, solver="nesterov")
    simulation = Simulation(algorithm, softmax_regression(l2), fed, cohort=fed.clients)

    def size_of_gradient(w: np.ndarray) -> float:
        return float(
            np.linalg.norm(np.mean([lam * (w - oracles.prox(w, r, lam, l2)) for r in train_rows(fed)], 0))
        )

    rate = 1 - l2 / (lam + l2)
    sizes = [size_of_gradient(flat(s.server)) for s in trajectory(simulation, start_at(simulation, w0()), 20)]
    for before, after in itertools.pairwise(sizes):
        assert after <= rate * before + 1e-10
    assert sizes[-1] <= rate**20 * sizes[0] + 1e-9


def test_the_recorded_residual_meets_nu_and_is_that_of_the_last_inner_problem():
    """θ of round R solves the problem around w_{i,R−1}, which is what R − 1 local rounds return."""
    fed, nu, answers = federation(EXACT, dtype=np.float64), 1e-5, []
    for R in (2, 3):
        algorithm = PFedMe(B=0, R=R, nu=nu, lam=2.0, eta=0.1, alpha=0.1, solver="nesterov")
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=fed.clients)
        answers.append(simulation.answer(start_at(simulation, w0())))
    (before, _), (models, info) = answers
    for i, rows in enumerate(train_rows(fed)):
        theta, w = flat(models.personal, True)[i], flat(before.local, True)[i]
        rest = oracles.gradient(theta, rows, L2) + 2.0 * (theta - w)
        np.testing.assert_allclose(info["inner_residual"][i], rest @ rest, rtol=1e-8)
        assert 0 < info["inner_residual"][i] <= nu
        assert info["inner_steps"][i] >= 1


def test_the_recorded_residual_is_on_the_mini_batch_that_was_solved():
    """On any other batch it would be of the order of the gradient's noise."""
    algorithm = PFedMe(B=5, R=2, nu=1e-8, lam=2.0, alpha=0.05)
    fed = federation(EXACT, dtype=np.float64)
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=1)
    _, info = simulation.answer(start_at(simulation, w0()))
    assert (info["inner_residual"] <= 1e-8).all()


@pytest.mark.parametrize("B", [0, 5])
def test_one_inner_step_from_w_is_fedavg_with_step_eta_lam_alpha(B):
    """θ = w − α ∇f̃(w), so w − ηλ (w − θ) = w − ηλα ∇f̃(w), on the very same mini-batches."""
    fed, ends = federation(EXACT, dtype=np.float64), []
    for algorithm in (
        PFedMe(K=1, theta_start="w", R=4, B=B, lam=3.0, eta=0.4, alpha=0.25, beta=1.5),
        FedAvg(eta=0.4 * 3.0 * 0.25, R=4, B=B, beta=1.5, aggregation="uniform"),
    ):
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=2, seed=7)
        ends.append([s.server for s in trajectory(simulation, start_at(simulation, w0()), 4)])
    assert_close(*ends, rtol=1e-10, atol=1e-12)
    assert differs(ends[0][0], ends[0][-1])


def test_a_large_lam_keeps_theta_at_w():
    """‖θ_k − w‖ ≤ 2 ‖θ̂ − w‖ ≤ 2 ‖∇f(w)‖/λ for gradient steps from w with α ≤ 1/(L + λ)."""
    fed, model, before = federation(EXACT, dtype=np.float64), softmax_regression(L2), np.inf
    smooth = max(oracles.smoothness(rows, L2) for rows in train_rows(fed))
    steepest = max(np.linalg.norm(oracles.gradient(w0(), rows, L2)) for rows in train_rows(fed))
    for lam in (1e1, 1e3, 1e6):
        algorithm = PFedMe(R=1, K=20, B=0, lam=lam, alpha=1 / (smooth + lam))
        simulation = Simulation(algorithm, model, fed, cohort=1)
        models, _ = simulation.answer(start_at(simulation, w0()))
        away = np.linalg.norm(flat(models.personal, True) - w0(), axis=1).max()
        assert 0 < away <= 2 * steepest / lam
        assert away < before
        before = away


def test_a_lam_of_almost_nothing_gives_each_client_its_own_minimiser():
    fed, l2 = federation(EXACT, dtype=np.float64), 0.3
    alpha = 1 / max(oracles.smoothness(rows, l2) for rows in train_rows(fed))
    algorithm = PFedMe(R=1, K=2000, B=0, lam=1e-9, alpha=alpha)
    simulation = Simulation(algorithm, softmax_regression(l2), fed, cohort=1)
    models, _ = simulation.answer(start_at(simulation, w0()))
    for theta, rows in zip(flat(models.personal, True), train_rows(fed), strict=True):
        np.testing.assert_allclose(theta, oracles.prox(w0(), rows, 0.0, l2), atol=1e-7)


def test_enough_inner_steps_give_the_prox_from_either_start():
    """The personal model is θ̂(w_{i,R−1}), whatever θ started from."""
    fed, lam, eta, R = federation(EXACT, dtype=np.float64), 3.0, 0.1, 3
    for theta_start in ("w", "carry"):
        algorithm = PFedMe(R=R, K=400, B=0, lam=lam, eta=eta, alpha=0.08, theta_start=theta_start)
        simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=1)
        models, _ = simulation.answer(start_at(simulation, w0()))
        for i, rows in enumerate(train_rows(fed)):
            w, theta = w0(), w0()
            for _ in range(R):
                theta = oracles.prox(w, rows, lam, L2)
                w = w - eta * lam * (w - theta)
            np.testing.assert_allclose(flat(models.personal, True)[i], theta, atol=1e-9)
            np.testing.assert_allclose(flat(models.local, True)[i], w, atol=1e-9)


def test_nesterov_as_inner_solver_runs_algorithm_1_with_accelerated_steps():
    fed, lam, eta, alpha, R, K = federation(EXACT, dtype=np.float64), 1.0, 0.2, 0.05, 3, 6
    algorithm = PFedMe(R=R, K=K, B=0, lam=lam, eta=eta, alpha=alpha, solver="nesterov")
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=1)
    models, _ = simulation.answer(start_at(simulation, w0()))
    for i, rows in enumerate(train_rows(fed)):
        w, theta = w0(), w0()
        for _ in range(R):
            theta = oracles.accelerate(lambda p, r=rows: oracles.gradient(p, r, L2), w, theta, lam, alpha, K)
            w = w - eta * lam * (w - theta)
        np.testing.assert_allclose(flat(models.personal, True)[i], theta, rtol=1e-10, atol=1e-12)
