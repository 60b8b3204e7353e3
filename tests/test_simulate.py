"""Rounds: who takes part, what addresses its randomness, and what an evaluation says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import (
    RAGGED,
    assert_same_bits,
    differs,
    federation,
    flat,
    held_out,
    network,
    problem,
    softmax_regression,
    there,
    tiny,
    train_rows,
    trajectory,
)

from pfedme.algorithms import Algorithm, Alone, FedAvg, PFedMe
from pfedme.algorithms.base import Update
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.engine.simulate import MOST_ROUNDS, Simulation, State
from pfedme.errors import InputError

N = len(RAGGED)


def simulation(
    cls: type[Algorithm] = FedAvg, cohort: int = 3, seed: int = 0, fed: Federation | None = None
) -> Simulation:
    return Simulation(tiny(cls), network(), fed or federation(), cohort=cohort, seed=seed)


# --- cohorts


@pytest.mark.parametrize("cohort", [0, -1, N + 1])
def test_a_cohort_that_cannot_be_drawn_is_refused(cohort):
    with pytest.raises(InputError, match=f"cohort of {cohort} cannot be drawn from {N} clients"):
        simulation(cohort=cohort)


@pytest.mark.parametrize("cohort", [1, 3, N])
def test_a_cohort_is_so_many_different_clients(cohort):
    sim = simulation(cohort=cohort)
    for t in range(30):
        members = sim.cohort_of(t)
        assert len(members) == len(set(members.tolist())) == cohort
        assert set(members.tolist()) <= set(range(N))
        np.testing.assert_array_equal(np.sort(sim.federation.ids[members]), sim.federation.ids[members])


def test_everyone_and_every_pair_is_drawn_alike_often():
    rounds, S = 4000, 3
    sim = simulation(cohort=S)
    member = np.array([np.isin(np.arange(N), sim.cohort_of(t)) for t in range(rounds)], float)
    together = member.T @ member / rounds
    single, pair = S / N, S * (S - 1) / (N * (N - 1))
    for i in range(N):
        for j in range(N):
            p = single if i == j else pair
            assert abs(together[i, j] - p) <= 5 * np.sqrt(p * (1 - p) / rounds)


def test_a_cohort_depends_on_seed_and_round_only():
    one, same, other = simulation(PFedMe), simulation(FedAvg), simulation(FedAvg, seed=1)
    drawn = [[tuple(sim.cohort_of(t)) for t in range(20)] for sim in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 1


def test_alone_everyone_trains_whatever_the_cohort():
    np.testing.assert_array_equal(simulation(Alone, cohort=1).cohort_of(0), np.arange(N))


# --- randomness


def test_a_clients_mini_batches_follow_from_its_id():
    """Another id changes that client's answer and nobody else's; the place in the list does not matter."""
    fed = federation()
    renamed = dataclasses.replace(fed, ids=np.array([0, 1, 2, 77, 4], np.uint32))
    one, other = (
        flat(sim.answer(sim.start())[0].local, True) for sim in (simulation(fed=f) for f in (fed, renamed))
    )
    np.testing.assert_array_equal((one != other).any(axis=1), [False, False, False, True, False])


def test_clients_with_the_same_rows_draw_different_mini_batches():
    """One client, asked under three ids."""
    fed = federation()
    ids = [dataclasses.replace(fed, ids=np.full(N, i, np.uint32)) for i in (0, 1, 2**32 - 1)]
    a, b, c = (flat(sim.answer(sim.start())[0].local, True)[3] for sim in (simulation(fed=f) for f in ids))
    for left, right in ((a, b), (a, c), (b, c)):
        assert np.abs(left - right).max() > 1e-4


def test_another_round_draws_other_mini_batches():
    sim = simulation()
    start = sim.start()
    assert differs(sim.answer(start)[0], sim.answer(start._replace(t=1))[0])


def test_the_state_is_all_that_a_run_needs_to_go_on():
    """A state that went through plain arrays continues to the same bits in a new simulation."""
    for cls in (FedAvg, Alone):
        first = simulation(cls)
        half, _ = first.advance(first.start(), 3)
        stored = [np.array(leaf) for leaf in jax.tree.leaves((half.server, half.clients))]
        structure = jax.tree.structure((half.server, half.clients))
        w, clients = jax.tree.unflatten(structure, [jnp.asarray(a) for a in stored])
        second = simulation(cls)
        assert_same_bits(second.advance(State(half.t, w, clients), 3)[0], first.advance(first.start(), 6)[0])


def test_no_rounds_change_nothing():
    sim = simulation()
    state, finite = sim.advance(sim.start(), 0)
    assert finite
    assert_same_bits(state, sim.start())


def test_a_call_does_all_rounds_that_it_is_asked_for():
    sim = simulation()
    state, finite = sim.advance(sim.start(), MOST_ROUNDS + 7)
    assert finite
    assert state.t == MOST_ROUNDS + 7
    assert_same_bits(state, trajectory(sim, sim.start(), MOST_ROUNDS + 7)[-1])


def test_every_client_starts_from_the_same_model():
    sim = simulation(Alone)
    start = sim.start()
    assert start.t == 0
    theta, l2 = start.clients
    np.testing.assert_array_equal(flat(theta, True), np.tile(flat(start.server), (N, 1)))
    np.testing.assert_array_equal(l2, np.zeros(N))


# --- evaluation


def test_an_evaluation_scores_each_model_on_each_clients_rows():
    sim = simulation(PFedMe)
    state, _ = sim.advance(sim.start(), 2)
    evaluation, models = sim.evaluate(state)
    thetas = {
        "global": [state.server] * N,
        "local": [there(models.local)[i] for i in range(N)],
        "personal": [there(models.personal)[i] for i in range(N)],
    }
    assert evaluation.round == 2
    for part, rows in (
        (evaluation.test, held_out(sim.federation)),
        (evaluation.train, train_rows(sim.federation)),
    ):
        for kind, points in thetas.items():
            for i in range(N):
                correct, loss = oracles.score(oracles.network_logits(points[i].tree, rows[i].x), rows[i].y)
                assert part[kind].correct[i] == correct
                np.testing.assert_allclose(part[kind].loss[i], loss, rtol=1e-5, atol=1e-5)
    entry = evaluation.entry()
    assert entry["round"] == 2
    for kind in thetas:
        test = evaluation.test[kind]
        assert entry[kind]["accuracy"] == test.correct.sum() / test.count.sum()
    residual, steps = evaluation.info["inner_residual"], evaluation.info["inner_steps"]
    np.testing.assert_allclose(entry["inner"]["residual"], residual.mean(dtype=float), rtol=1e-6)
    np.testing.assert_allclose(entry["inner"]["residual_max"], residual.max(), rtol=1e-6)
    assert entry["inner"]["steps"] == steps.mean() == 2


def test_evaluating_does_not_disturb_training():
    sim = simulation(PFedMe)
    plain = trajectory(sim, sim.start(), 3)
    state = sim.start()
    for _ in range(3):
        sim.evaluate(state)
        state, _ = sim.advance(state, 1)
    assert_same_bits(state, plain[-1])


def test_an_evaluation_of_a_broken_model_is_not_finite():
    sim = simulation()
    start = sim.start()
    assert sim.evaluate(start)[0].finite
    assert not sim.evaluate(start._replace(server=float("nan") * start.server))[0].finite


def test_smoothness_is_the_largest_curvature_of_any_client():
    """Estimated on 256 rows drawn from each client's own, so to a few standard errors of 1/16."""
    fed, l2 = federation(), 0.01
    sim = Simulation(tiny(FedAvg), softmax_regression(l2), fed, cohort=1)
    w = flat(sim.start().server)
    want = max(np.linalg.eigvalsh(oracles.hessian(w, rows, l2))[-1] for rows in train_rows(fed))
    np.testing.assert_allclose(sim.smoothness(), want, rtol=0.25)


def test_a_problem_of_the_store_holds_the_clients_training_rows():
    fed = federation()
    for i, rows in enumerate(train_rows(fed)):
        own = problem(fed, network(), i)
        begin, count = int(own.start), int(own.count)
        np.testing.assert_array_equal(own.x[begin : begin + count], rows.x)
        np.testing.assert_array_equal(own.y[begin : begin + count], rows.y)


def test_evaluating_some_clients_gives_what_evaluating_all_gives_them():
    sim = simulation(PFedMe)
    state, _ = sim.advance(sim.start(), 2)
    who = np.array([3, 0])
    (every, models), (some, own) = sim.evaluate(state), sim.evaluate(state, who)
    for part in ("test", "train"):
        for kind, scores in getattr(some, part).items():
            whole = getattr(every, part)[kind]
            assert scores.correct.tolist() == whole.correct[who].tolist()
            assert scores.count.tolist() == whole.count[who].tolist()
            np.testing.assert_allclose(scores.loss, whole.loss[who], rtol=1e-5)
    np.testing.assert_allclose(
        flat(own.personal, True), flat(models.personal, True)[who], rtol=1e-5, atol=1e-6
    )


def test_the_clients_to_evaluate_are_drawn_once_for_a_run():
    sim = simulation()
    assert sim.evaluated(sim.federation.clients).tolist() == list(range(sim.federation.clients))
    some = sim.evaluated(2)
    assert some.tolist() == sorted(set(some.tolist())) == sim.evaluated(2).tolist()


@record
class Counted(FedAvg):
    """FedAvg that tells how many rows a client has."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: object) -> Update:
        update = super().client_update(key, problem, w, state)
        return update._replace(info={"rows": problem.count})


def test_what_any_algorithm_tells_of_its_computation_is_in_the_record():
    sim = simulation(Counted)
    entry = sim.evaluate(sim.start())[0].entry()
    rows = sim.federation.n_train
    assert entry["info"] == {"rows": {"mean": pytest.approx(rows.mean()), "max": rows.max()}}
