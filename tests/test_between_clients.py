"""MOCHA, FedAMP, gossip and cooperative SGD against NumPy, the laws that they obey, and public mistakes.

Their servers keep a model of every client. A check is a function of a class, and fails for one that makes a
mistake."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import flat, point
from relatives import (
    BETA,
    COHORTS,
    FED,
    LAM,
    LINE,
    MODEL,
    PLAIN,
    STEPS,
    N,
    alone,
    answers,
    assert_exact,
    at,
    best_models,
    descended,
    lines,
    rounds_of,
    stacked,
    w0,
)  # fmt: skip

from pfedme.algorithms import CooperativeSGD, FedAMP, FedAvg, Gossip, Mocha, Models, Update
from pfedme.algorithms.base import Cohort, sgd
from pfedme.algorithms.gossip import _graph
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record
from pfedme.engine.simulate import State

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

ALONE = np.array([alone(0, 1), alone(1, 1), alone(2, 2), w0])
"""The models after the two rounds, if clients trained on their own."""
apart = w0 + np.random.default_rng(2).normal(size=(N, len(w0)))
"""A model of each client, to begin with."""


def moved(models: np.ndarray, ends: dict[int, np.ndarray]) -> np.ndarray:
    """The models, where those of the cohort have moved by β times the way to their ends."""
    after = models.copy()
    for i, end in ends.items():
        after[i] = models[i] + BETA * (end - models[i])
    return after


# --- MOCHA


def relations(models: np.ndarray, omega: str) -> np.ndarray:
    """Ω: I − 11ᵀ/N, or (I + Σ)⁻¹ with Σ = (WᵀW)^½ scaled to trace N, from the singular values of W."""
    if omega == "mean":
        return np.eye(N) - np.ones((N, N)) / N
    _, values, rows = np.linalg.svd(models.T, full_matrices=False)
    sigma = rows.T @ np.diag(values) @ rows
    return np.linalg.inv(np.eye(N) + N * sigma / np.trace(sigma))


def check_mocha(cls: type[Mocha], omega: Any = "learned", lam: float = 0.7) -> None:
    """Two rounds, in which each client's steps hold the other models fixed; then Ω from all models."""
    algorithm = cls(lam=lam, omega=omega, **STEPS)
    start = State(0, (point(MODEL, apart), jnp.asarray(relations(apart, omega))), ())
    states = rounds_of(algorithm, start=start)
    models = apart

    def trained(i: int) -> np.ndarray:
        row = relations(models, omega)[i]
        others = sum(row[j] * models[j] for j in range(N) if j != i)
        return descended(models[i], i, lambda w: lam * (row[i] * w + others))

    for state, cohort in zip(states[1:], COHORTS, strict=True):
        models = moved(models, {i: trained(i) for i in cohort})
        assert_exact(stacked(state.server[0]), models)
        assert_exact(state.server[1], relations(models, omega))
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), [trained(i) for i in range(N)])


@pytest.mark.parametrize("omega", ["learned", "mean"])
def test_mocha_is_the_oracles(omega):
    check_mocha(Mocha, omega)


@pytest.mark.parametrize("omega", ["learned", "mean"])
def test_mocha_begins_with_equal_models_and_their_relations(omega):
    (start,) = rounds_of(Mocha(omega=omega, **STEPS), cohorts=())
    assert_exact(stacked(start.server[0]), [w0] * N)
    np.testing.assert_allclose(start.server[1], relations(np.tile(w0, (N, 1)), omega), atol=1e-7)


def test_with_lambda_zero_mochas_models_are_alone():
    states = rounds_of(Mocha(lam=0.0, **PLAIN))
    assert_exact(stacked(states[-1].server[0]), ALONE)


def test_mochas_omega_is_the_inverse_of_one_plus_the_root_of_the_models_products():
    """Σ = Ω⁻¹ − I has Σ² in proportion to WᵀW, and trace N; so Ω is never larger than I."""
    states = rounds_of(Mocha(**STEPS))
    models, omega = stacked(states[-1].server[0]), np.asarray(states[-1].server[1])
    sigma, products = np.linalg.inv(omega) - np.eye(N), models @ models.T
    np.testing.assert_allclose(np.trace(sigma), N)
    np.testing.assert_allclose(
        sigma @ sigma, products * np.trace(sigma @ sigma) / np.trace(products), atol=1e-8
    )
    assert np.linalg.eigvalsh(omega).max() <= 1 + 1e-12


def test_with_omega_mean_mocha_stays_at_pfedmes_minimiser_on_quadratics():
    fed, own = lines()
    want = best_models(own, LAM)
    start = State(0, (at(want), jnp.asarray(relations(want, "mean"))), ())
    algorithm = Mocha(omega="mean", lam=LAM, **PLAIN)
    after = rounds_of(algorithm, model=LINE, fed=fed, cohorts=[range(N)], start=start)[-1]
    assert_exact(stacked(after.server[0]), want)


def test_mochas_check_finds_sigma_in_the_place_of_its_inverse():
    """Bug of a public implementation."""

    @record
    class Mutant(Mocha):
        def _relations(self, models: Params, total: int) -> jax.Array:
            return jnp.linalg.inv(super()._relations(models, total))

    with pytest.raises(AssertionError):
        check_mocha(Mutant)


def test_mochas_check_finds_a_regulariser_without_gradient():
    """Bug of PFLlib's FedMTL, which trains as alone."""

    @record
    class Mutant(Mocha):
        def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
            w_i = sgd(key, problem, sent[0], eta=self.eta, steps=self.R, B=self.B)
            return Update(w_i - sent[0], state, Models(personal=w_i), {})

    with pytest.raises(AssertionError):
        check_mocha(Mutant)


# --- FedAMP

SIGMA, MIX = 20.0, 0.6


def mixtures(models: np.ndarray) -> np.ndarray:
    """u_i = (1 − α Σ_j A′(‖w_i − w_j‖²)) w_i + α Σ_j A′(‖w_i − w_j‖²) w_j, with A′(x) = exp(−x/σ)/σ."""
    alpha, after = MIX * SIGMA / (N - 1), models.copy()
    for i in range(N):
        for j in range(N):
            pull = alpha * np.exp(-((models[i] - models[j]) ** 2).sum() / SIGMA) / SIGMA
            after[i] = after[i] + pull * (models[j] - models[i])
    return after


def check_fedamp(cls: type[FedAMP], lam: float = 0.7) -> None:
    """Two rounds of the paper's Algorithm 1, with R gradient steps for the proximal one."""
    algorithm = cls(lam=lam, mix=MIX, sigma=SIGMA, **STEPS)
    states = rounds_of(algorithm, start=State(0, point(MODEL, apart), ()))
    models = apart

    def trained(i: int) -> np.ndarray:
        u = mixtures(models)[i]
        return descended(u, i, lambda w: lam * (w - u))

    for state, cohort in zip(states[1:], COHORTS, strict=True):
        us, ends = mixtures(models), {i: trained(i) for i in cohort}
        models = np.array([us[i] + BETA * (ends[i] - us[i]) if i in ends else models[i] for i in range(N)])
        assert_exact(stacked(state.server), models)
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), [trained(i) for i in range(N)])


def test_fedamp_is_the_oracles():
    check_fedamp(FedAMP)


def test_with_no_mixing_and_lambda_zero_fedamps_models_are_alone():
    states = rounds_of(FedAMP(mix=0.0, lam=0.0, **PLAIN))
    assert_exact(stacked(states[-1].server), ALONE)


def test_fedamps_mixtures_are_means_in_which_others_count_at_most_mix():
    algorithm = FedAMP(mix=MIX, sigma=SIGMA)
    for models in (apart, np.tile(w0, (N, 1)), apart + 1e3 * np.arange(N)[:, None]):
        xi = np.asarray(algorithm.attention(point(MODEL, models)))
        assert_exact(xi.sum(axis=1), np.ones(N))
        assert xi.min() >= 0
        assert (1 - np.diag(xi)).max() <= MIX + 1e-12
    xi = np.asarray(algorithm.attention(point(MODEL, np.tile(w0, (N, 1)))))
    assert_exact(1 - np.diag(xi), np.full(N, MIX))


def test_fedamps_check_finds_a_regulariser_without_gradient():
    """Bug of PFLlib, whose FedAMP trains from its own model as alone."""

    @record
    class Mutant(FedAMP):
        def client_update(self, key: jax.Array, problem: Problem, u: Params, state: Any) -> Update:
            w = sgd(key, problem, u, eta=self.eta, steps=self.R, B=self.B)
            return Update(w - u, state, Models(personal=w), {})

    with pytest.raises(AssertionError):
        check_fedamp(Mutant)


# --- gossip


def neighbours(models: np.ndarray, sigma: float) -> np.ndarray:
    """P: exp((cos − 1)/σ) between different clients, normalised by rows."""
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    weights = np.exp((unit @ unit.T - 1) / sigma) if sigma else np.ones((N, N))
    weights = weights * (1 - np.eye(N))
    return weights / weights.sum(axis=1, keepdims=True)


def check_gossip(cls: type[Gossip], alpha: float = 0.4, sigma: float = 0.3, M: int = 3) -> None:
    """Two rounds: R steps on θ^sol, then M steps of the paper's equation (5) from the last θ."""
    algorithm = cls(alpha=alpha, sigma=sigma, M=M, **STEPS)
    start = State(0, (point(MODEL, apart), point(MODEL, apart), jnp.ones(N)), ())
    states = rounds_of(algorithm, start=start)
    solved, theta, rows = apart, apart, np.ones(N)
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        solved = moved(solved, {i: descended(solved[i], i) for i in cohort})
        rows[[*cohort]] = FED.n_train[[*cohort]]
        c, P = rows / rows.max(), neighbours(solved, sigma)
        for _ in range(M):
            theta = np.array([
                (alpha * P[i] @ theta + (1 - alpha) * c[i] * solved[i]) / (alpha + (1 - alpha) * c[i])
                for i in range(N)
            ])  # fmt: skip
        assert_exact(stacked(state.server[0]), solved)
        assert_exact(stacked(state.server[1]), theta)
        assert_exact(state.server[2], rows)
    models, _ = answers(algorithm, states[-1])
    assert_exact(stacked(models.local), solved)
    assert_exact(stacked(models.personal), theta)


@pytest.mark.parametrize("sigma", [0.3, 0.0])
def test_gossip_is_the_oracles(sigma):
    check_gossip(Gossip, sigma=sigma)


def test_gossip_comes_to_its_closed_form():
    """Θ = ᾱ (I − ᾱ (I − C) − α P)⁻¹ C Θ^sol."""
    alpha, sigma, eye = 0.7, 0.3, np.eye(N)
    states = rounds_of(Gossip(alpha=alpha, sigma=sigma, M=400, **STEPS))
    solved, rows = stacked(states[-1].server[0]), np.asarray(states[-1].server[2])
    C, P = np.diag(rows / rows.max()), neighbours(solved, sigma)
    inverse = np.linalg.inv(eye - (1 - alpha) * (eye - C) - alpha * P)
    assert_exact(stacked(states[-1].server[1]), (1 - alpha) * inverse @ C @ solved)


def test_with_alpha_zero_gossips_models_are_alone():
    states = rounds_of(Gossip(alpha=0.0, **PLAIN))
    for models in states[-1].server[:2]:
        assert_exact(stacked(models), ALONE)


def test_no_client_is_its_own_neighbour_unless_it_is_the_only_one():
    P = np.asarray(_graph(point(MODEL, apart), 0.1))
    assert_exact(P.sum(axis=1), np.ones(N))
    assert_exact(np.diag(P), np.zeros(N))
    assert_exact(_graph(point(MODEL, apart[:1]), 0.1), [[1.0]])


# --- cooperative SGD


def mixing(graph: str) -> np.ndarray:
    """M of four clients."""
    ring = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3
    return {"ring": ring, "full": np.full((4, 4), 1 / 4), "none": np.eye(4)}[graph]


def check_cooperative(cls: type[CooperativeSGD], graph: Any) -> None:
    """Two rounds of X ← (X − η G) M."""
    algorithm = cls(graph=graph, **STEPS)
    states = rounds_of(algorithm, start=State(0, point(MODEL, apart), ()))
    models = apart
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        models = mixing(graph) @ moved(models, {i: descended(models[i], i) for i in cohort})
        assert_exact(stacked(state.server), models)
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), models)
    assert_exact(flat(algorithm.shared(states[-1].server, ())), models.mean(axis=0))


@pytest.mark.parametrize("graph", ["ring", "full", "none"])
def test_cooperative_sgd_is_the_oracles(graph):
    check_cooperative(CooperativeSGD, graph)


def test_without_a_graph_cooperative_sgd_is_alone_and_with_a_full_one_it_is_fedavg():
    states = rounds_of(CooperativeSGD(graph="none", **PLAIN))
    assert_exact(stacked(states[-1].server), ALONE)
    everyone = [range(N)] * 2
    states = rounds_of(CooperativeSGD(graph="full", **STEPS), cohorts=everyone)
    plain = rounds_of(FedAvg(aggregation="uniform", **STEPS), cohorts=everyone)
    for state, fedavg in zip(states, plain, strict=True):
        assert_exact(stacked(state.server), [flat(fedavg.server)] * N)


@pytest.mark.parametrize("total", [1, 2])
def test_the_ring_keeps_the_mean_for_any_number_of_clients(total):
    """Rows and columns of M sum to one."""
    models = np.random.default_rng(0).normal(size=(total, 3))
    algorithm, cohort = CooperativeSGD(graph="ring"), _nobody(total)
    after = stacked(algorithm.server_update(at(models), at(np.zeros((1, 3))), cohort))
    assert_exact(after.mean(axis=0), models.mean(axis=0))
    same = stacked(algorithm.server_update(at(np.ones((total, 3))), at(np.zeros((1, 3))), cohort))
    assert_exact(same, np.ones((total, 3)))


def _nobody(total: int) -> Cohort:
    return Cohort(jax.random.key(0), jnp.arange(1), jnp.zeros(1, jnp.int32), total)
