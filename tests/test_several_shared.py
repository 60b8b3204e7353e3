"""IFCA against NumPy, the laws that it obeys, how it groups clients, and public mistakes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import assert_same_bits, flat, with_test_rows
from relatives import (
    BETA,
    COHORTS,
    FED,
    L2,
    MODEL,
    ROWS,
    STEPS,
    N,
    answers,
    assert_exact,
    averaged,
    descended,
    rounds_of,
    stacked,
    w0,
    w1,
)

from pfedme.algorithms import IFCA, FedAvg, HypCluster, Models
from pfedme.algorithms.aggregate import RFA, Combine, Mean
from pfedme.algorithms.kmeans import directions
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.tree import record
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

TWO: dict[str, Any] = {"clusters": 2, "start": "random", **STEPS}


def nearest(models: np.ndarray, i: int) -> int:
    """argmin_j f_i(w_j), on training rows."""
    return int(np.argmin([oracles.loss(w, ROWS[i], L2) for w in models]))


def with_choices(models: np.ndarray, chosen: dict[int, int], *, by_samples: bool) -> np.ndarray:
    """The models after a round in which these clients have chosen these models."""
    after = models.copy()
    for j in set(chosen.values()):
        ends = {i: descended(models[j], i) for i, own in chosen.items() if own == j}
        after[j] = averaged(models[j], ends, by_samples=by_samples)
    return after


def check_ifca(cls: type[IFCA], *, by_samples: bool = False) -> None:
    """Two rounds of the paper's Algorithm 1 with model averaging."""
    algorithm = cls(aggregation="samples" if by_samples else "uniform", **TWO)
    states = rounds_of(algorithm, w0, w1)
    models, used = np.stack([w0, w1]), set()
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        chosen = {i: nearest(models, i) for i in cohort}
        used |= {*chosen.values()}
        models = with_choices(models, chosen, by_samples=by_samples)
        assert_exact(stacked(state.server[1]), models)
        assert int(state.server[0]) == 0
    assert used == {0, 1}, "both models are used here"
    found, info = answers(algorithm, states[-1])
    best = [nearest(models, i) for i in range(N)]
    assert_exact(info["cluster"], best)
    assert_exact(stacked(found.personal), models[best])


@pytest.mark.parametrize("by_samples", [False, True])
def test_ifca_is_the_oracles(by_samples):
    check_ifca(IFCA, by_samples=by_samples)


def test_hypcluster_is_another_name_for_it():
    assert issubclass(HypCluster, IFCA)
    assert {*vars(HypCluster)} & {
        "begin",
        "send",
        "init",
        "client_update",
        "server_update",
        "answer",
    } == set()


@pytest.mark.parametrize("start", ["random", pytest.param("directions", marks=pytest.mark.slow)])
def test_with_one_cluster_it_is_fedavg(start):
    states = rounds_of(IFCA(clusters=1, start=start, warmup=1, **STEPS))
    plain = rounds_of(FedAvg(aggregation="uniform", **STEPS))
    for state, fedavg in zip(states, plain, strict=True):
        assert_exact(stacked(state.server[1])[0], flat(fedavg.server))


def test_a_client_on_its_own_has_models_for_all_clients():
    """As a deployed one does."""
    one, algorithm = FED.take([0]), IFCA(**TWO)
    Simulation(algorithm, MODEL, one, cohort=1, total=N)
    with pytest.raises(InputError, match="trains 2 models, more than there are clients"):
        Simulation(algorithm, MODEL, one, cohort=1)


def test_permuting_the_clusters_permutes_the_results():
    one, other = rounds_of(IFCA(**TWO), w0, w1), rounds_of(IFCA(**TWO), w1, w0)
    for state, twin in zip(one, other, strict=True):
        assert_exact(stacked(state.server[1]), stacked(twin.server[1])[::-1])
    assert_same_bits(answers(IFCA(**TWO), one[-1])[0], answers(IFCA(**TWO), other[-1])[0])


@pytest.mark.parametrize("combine", [Mean(), RFA()])
def test_a_model_that_nobody_chooses_stays(combine: Combine):
    """With the geometric median, too, although there is none of no points."""
    algorithm = IFCA(**TWO, combine=combine)
    states = rounds_of(algorithm, w0, w0 + 100)
    assert_exact(stacked(states[-1].server[1])[1], w0 + 100)
    assert np.abs(stacked(states[-1].server[1])[0] - w0).max() > 1e-2
    assert np.isfinite(stacked(states[-1].server[1])).all()


# --- which rows choose


def check_that_test_rows_do_not_choose(cls: type[IFCA]) -> None:
    algorithm = cls(**TWO)
    (state,) = rounds_of(algorithm, w0, w1, cohorts=())
    found = [
        answers(algorithm, state, fed=with_test_rows(FED, value, label))
        for value, label in ((9.0, 0), (9.0, 1), (9.0, 2))
    ]
    for other in found[1:]:
        assert_same_bits(found[0], other)


def test_clients_choose_by_training_rows():
    check_that_test_rows_do_not_choose(IFCA)


def test_the_checks_find_a_choice_by_test_labels():
    """Bug of the authors' code."""

    @record
    class Mutant(IFCA):
        def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Any:
            test = dataclasses.replace(problem, start=problem.start + problem.count, count=problem.n_test)
            best = jnp.argmin(jax.vmap(test.loss(ALL_ROWS))(sent[1]))
            return Models(personal=sent[1][best]), {"cluster": best}

    for check in (check_ifca, check_that_test_rows_do_not_choose):
        with pytest.raises(AssertionError):
            check(Mutant)


@pytest.mark.slow
def test_the_check_finds_a_mean_over_clients_of_other_clusters():
    @record
    class Mutant(IFCA):
        def server_update(self, server: Any, uploads: Any, cohort: Any) -> Any:
            chosen, delta = uploads
            return super().server_update(server, (jnp.ones_like(chosen), delta), cohort)

    with pytest.raises(AssertionError):
        check_ifca(Mutant)


# --- groups of clients with similar directions


def cost_of(points: np.ndarray, groups: Any) -> float:
    """Σ ‖x − centre of its group‖², for directions x."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    groups = np.asarray(groups)
    return sum(
        float(((points[groups == j] - points[groups == j].mean(axis=0)) ** 2).sum())
        for j in set(groups.tolist())
    )


def best_groups(points: np.ndarray, k: int) -> tuple[int, ...]:
    """The partition with the least cost, of all."""
    return min(itertools.product(range(k), repeat=len(points)), key=lambda groups: cost_of(points, groups))


def test_k_means_finds_the_best_of_all_partitions_of_those_who_are_there():
    present = np.array([True, True, False, True, True, True, False, True])
    grouped = jax.jit(lambda points: directions(jax.random.key(0), points, jnp.asarray(present), 3))
    for seed in range(3):
        points = np.random.default_rng(seed).normal(size=(8, 4)) * np.exp(np.arange(8))[:, None]
        points[~present] = 1e30  # what those who are absent would have sent does not matter
        found = np.asarray(grouped(jnp.asarray(points)))
        np.testing.assert_array_equal(found.sum(axis=1), present)
        assert set(found.ravel().tolist()) == {0.0, 1.0}
        there = points[present]
        want = cost_of(there, best_groups(there, 3))
        np.testing.assert_allclose(cost_of(there, found[present].argmax(axis=1)), want, rtol=1e-9)


def test_uploads_that_are_not_finite_do_not_pass_unnoticed():
    points = jnp.array([[1.0, 0.0], [0.0, jnp.nan]])
    assert np.asarray(directions(jax.random.key(0), points, jnp.ones(2, bool), 1)).any()


def test_after_the_warm_up_each_model_begins_with_a_group_of_similar_clients():
    algorithm = IFCA(clusters=2, start="directions", warmup=1, **STEPS)
    everyone = range(N)
    states = rounds_of(algorithm, cohorts=[(0, 2), everyone, everyone])
    w = averaged(w0, {i: descended(w0, i) for i in (0, 2)}, by_samples=False)
    assert_exact(stacked(states[1].server[1]), [w, w])
    ends = np.array([descended(w, i) for i in everyone])
    groups = np.array(best_groups(ends - w, 2))
    assert 0 < groups.sum() < N
    models = np.array([w + BETA * (ends[groups == j] - w).mean(axis=0) for j in (0, 1)])
    found = stacked(states[2].server[1])
    if np.abs(found - models).max() > 1e-6:
        models = models[::-1].copy()
    assert_exact(found, models)
    chosen = {i: nearest(models, i) for i in everyone}
    assert_exact(stacked(states[3].server[1]), with_choices(models, chosen, by_samples=False))
    assert [int(state.server[0]) for state in states] == [-2, -1, 0, 0]
