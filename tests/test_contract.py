"""What every algorithm in the list promises, whatever it does, and those of another package. A new algorithm
is tested by being listed."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from laws import (
    RAGGED,
    assert_close,
    assert_same_bits,
    differs,
    federation,
    fitting,
    flat,
    problem,
    tiny,
    trajectory,
    with_test_rows,
)
from outside import OUTSIDE

from pfedme.algorithms import AFL, ALGORITHMS, Algorithm, Alone, FedAdam, FedAvg, Mapper, Models, Pooled
from pfedme.algorithms.base import Cohort
from pfedme.core.spec import check, field_docs, field_types
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.exchange import server_key
from pfedme.engine.simulate import Simulation, State
from pfedme.training.timing import compilation

N = len(RAGGED)
EVERY = {**ALGORITHMS, **OUTSIDE}
QUICK = (
    "pfedme", "fedavg", "per-fedavg", "alone", "fedavg-ft", "pooled", "head",
    "scaffold", "fedadam", "feddyn", "ditto", "l2gd", "apfl", "label-prior", "fedbn", "ifca", "mocha", "afl",
)  # fmt: skip
"""The algorithms whose laws the default tests check: one for each way to use the contract."""


def over(classes: dict[str, type[Algorithm]]) -> pytest.MarkDecorator:
    """A test of each of these."""
    marked = [
        pytest.param(cls, marks=[pytest.mark.slow] * (name not in QUICK)) for name, cls in classes.items()
    ]
    return pytest.mark.parametrize("cls", marked, ids=classes)


every_algorithm = over(EVERY)
with_clients = over({name: cls for name, cls in EVERY.items() if not cls.pools})
"""Those whose clients train apart."""
with_newcomers = over({name: cls for name, cls in EVERY.items() if cls.idea != "between clients"})
"""Those whose server does not keep something for each client that the client then needs."""
BY_CLIENT = {AFL, *(cls for cls in EVERY.values() if cls.idea == "between clients")}
"""Those whose server keeps something for each client."""
every_cohort = pytest.mark.parametrize("cohort", [pytest.param(N, marks=pytest.mark.slow), 3])


def simulation(
    cls: type[Algorithm], fed: Federation, cohort: int = 3, seed: int = 0, **given: Any
) -> Simulation:
    return Simulation(tiny(cls, **given), fitting(cls), fed, cohort=cohort, seed=seed)


@cache
def three_rounds(cls: type[Algorithm], cohort: int = 3) -> tuple[Simulation, list[State], Models, dict]:
    """A simulation, its states over three rounds, and all clients' answers to the last."""
    sim = simulation(cls, federation(), cohort)
    states = trajectory(sim, sim.start(), 3)
    return sim, states, *sim.answer(states[-1])


def own(tree: Any, who: Any) -> Any:
    """The part of stacked arrays that belongs to some clients."""
    return jax.tree.map(lambda a: a[np.asarray(who)], tree)


# --- the form of an algorithm


@every_algorithm
def test_an_algorithm_is_frozen_listed_by_name_and_documented_field_by_field(cls):
    algorithm = cls()
    assert EVERY[algorithm.name] is cls
    assert cls.__doc__
    assert set(field_docs(cls)) >= set(field_types(cls))
    check(algorithm, algorithm.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.__setattr__("eta", 1.0)


@every_algorithm
def test_a_clients_part_of_a_round_has_the_promised_form(cls):
    algorithm, model, key = tiny(cls), fitting(cls), jax.random.key(0)
    own_problem = problem(federation(), model, 0)
    w = jax.eval_shape(model.init, key)
    server = jax.eval_shape(lambda: algorithm.begin(key, lambda _: model.init(key), N))
    sent = jax.eval_shape(algorithm.send, server, jnp.int32(0))
    state = jax.eval_shape(lambda sent: algorithm.init(sent, lambda _: model.init(key)), sent)
    update = jax.eval_shape(algorithm.client_update, key, own_problem, sent, state)
    models, info = jax.eval_shape(algorithm.answer, key, own_problem, sent, state)

    def form(tree: Any) -> Any:
        return jax.tree.structure(tree), [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]

    if algorithm.federated:
        uploads = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), update.upload)
        cohort = Cohort(key, jnp.arange(3), jnp.array([1, 7, 2]), N)
        after = jax.eval_shape(lambda *got: algorithm.server_update(*got, cohort), server, uploads)
        assert form(after) == form(server)
    assert form(update.state) == form(state)
    for given_models in (update.models, models):
        held = [m for m in given_models if m is not None]
        assert held, "a client has at least one model"
        assert all(form(m) == form(w) for m in held)
    assert all(number.shape == () for number in (*update.info.values(), *info.values()))


# --- the server


uploads_ = arrays(np.float32, (4, 3), elements=st.integers(-50, 50).map(lambda n: n / 10))
counts_ = arrays(np.int32, 4, elements=st.integers(0, 9)).filter(lambda c: c.any())


def cohort_with(rows: Any) -> Cohort:
    """Clients with so many rows."""
    return Cohort(jax.random.key(0), jnp.arange(len(rows)), jnp.asarray(rows), len(rows))


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(uploads_, counts_, st.floats(0.125, 4, width=32))
def test_the_server_mixes_w_with_the_mean_of_those_present(aggregation, uploads, counts, beta):
    """w ← (1 − β) w + β Σ p_i w_i, where w_i − w is sent; a count of zero marks an absent client."""
    w, present = np.array([1.0, -2.0, 0.5]), counts > 0
    got = jax.jit(FedAvg.server_update)(
        FedAvg(beta=beta, aggregation=aggregation),
        Params(jnp.asarray(w, jnp.float32)),
        Params(uploads - w.astype(np.float32)),
        cohort_with(counts),
    )
    want = oracles.server(
        w,
        uploads[present].astype(float),
        counts[present].tolist(),
        beta=beta,
        by_samples=aggregation == "samples",
    )
    np.testing.assert_allclose(flat(got), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_what_an_absent_client_would_have_sent_does_not_matter(aggregation):
    algorithm, w = FedAvg(beta=1.5, aggregation=aggregation), Params(jnp.ones(3))
    sent = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    counts = jnp.array([3, 0, 5, 0])
    ends = []
    for garbage in (0.0, 1e20):
        sent[[1, 3]] = garbage
        ends.append(algorithm.server_update(w, Params(jnp.asarray(sent)), cohort_with(counts)))
    assert_close(*ends)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_uploads_of_nothing_leave_w_where_it_is(aggregation):
    w = Params(jnp.array([1.0, -2.0, 0.5]))
    algorithm = FedAvg(beta=2.0, aggregation=aggregation)
    after = algorithm.server_update(w, Params(jnp.zeros((4, 3))), cohort_with([1, 7, 2, 9]))
    assert_same_bits(after, w)


# --- training sees training rows only


@every_algorithm
@pytest.mark.parametrize(("value", "label"), [(np.nan, 0), pytest.param(123.0, 2, marks=pytest.mark.slow)])
def test_test_rows_change_nothing_in_training_nor_in_any_model(cls, value, label):
    sim, states, models, info = three_rounds(cls)
    other = simulation(cls, with_test_rows(federation(), value, label))
    again = trajectory(other, other.start(), 3)
    assert_same_bits(states, again)
    assert_same_bits((models, info), other.answer(again[-1]))
    mine, theirs = sim.evaluate(states[-1])[0].train, other.evaluate(again[-1])[0].train
    for kind in mine:
        np.testing.assert_array_equal(mine[kind].loss, theirs[kind].loss)
        np.testing.assert_array_equal(mine[kind].correct, theirs[kind].correct)


# --- randomness is addressed


@with_clients
@every_cohort
def test_permuting_the_clients_permutes_the_results(cls, cohort):
    sim, states, models, info = three_rounds(cls, cohort)
    order = np.array([3, 0, 4, 2, 1])
    other = simulation(cls, federation().take(order), cohort)
    again = trajectory(other, other.start(), 3)
    for t, (state, twin) in enumerate(zip(states, again, strict=True)):
        np.testing.assert_array_equal(
            sim.federation.ids[sim.cohort_of(t)], other.federation.ids[other.cohort_of(t)]
        )
        if cls in BY_CLIENT:  # the server's sums have another order
            assert_close(sim.shared(state), other.shared(twin))
            assert_close(own(state.clients, order), twin.clients)
        else:
            assert_same_bits(state.server, twin.server)
            assert_same_bits(own(state.clients, order), twin.clients)
    assert_close(own((models, info), order), other.answer(again[-1]), rtol=1e-6, atol=1e-7)


def test_pooled_is_alone_with_the_rows_of_all_clients_in_whatever_order_they_come():
    fed = federation()
    sim, states, *_ = three_rounds(Pooled)
    alone = simulation(Alone, fed.pooled(), 1)
    assert_same_bits(sim.shared(states[-1]), trajectory(alone, alone.start(), 3)[-1].clients[0][0])
    other = simulation(Pooled, fed.take([3, 0, 4, 2, 1]))
    assert_same_bits(states[-1].clients, trajectory(other, other.start(), 3)[-1].clients)


@with_newcomers
@pytest.mark.parametrize("newcomer", [[0, 1, 2, 3, 4], [4, 0, 1, 2, 3]], ids=["last", "first"])
def test_a_newcomer_disturbs_nobody(cls, newcomer):
    """Who was there before answers the same w with the same models."""
    fed, old = federation(), np.arange(N - 1)
    before, after = simulation(cls, fed.take(old), N - 1), simulation(cls, fed.take(newcomer), N)
    _, states, *_ = three_rounds(cls, N)
    state = states[-1]
    answers = before.answer(state._replace(clients=own(state.clients, old)))
    where = np.array([newcomer.index(i) for i in old])
    with_newcomer = after.answer(state._replace(clients=own(state.clients, newcomer)))
    assert_close(answers, own(with_newcomer, where), rtol=1e-6, atol=1e-7)
    assert_close(before.shared(before.start()), after.shared(after.start()))


@with_clients
def test_training_the_cohort_only_is_training_everyone_and_averaging_the_cohort(cls):
    """Everyone trains one by one, with keys from (seed, round, id); the cohort's uploads go to the server."""
    sim, states, models, _ = three_rounds(cls)
    algorithm, fed = sim.algorithm, sim.federation
    update_of = jax.jit(algorithm.client_update)
    server, kept, updates = states[0].server, [own(states[0].clients, i) for i in range(N)], []
    for t, state in enumerate(states):
        assert_close(server, state.server)
        assert_close(kept, [own(state.clients, i) for i in range(N)])
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), int(i)) for i in fed.ids]
        updates = [
            update_of(keys[i], problem(fed, sim.model, i), algorithm.send(server, jnp.int32(i)), kept[i])
            for i in range(N)
        ]
        cohort = sim.cohort_of(t).tolist()
        if algorithm.federated:
            uploads = jax.tree.map(lambda *all: jnp.stack(all), *(updates[i].upload for i in cohort))
            who = Cohort(
                server_key(jax.random.key(0), t), jnp.array(cohort), jnp.asarray(fed.n_train[cohort]), N
            )
            server = algorithm.server_update(server, uploads, who)
        kept = [updates[i].state if i in cohort else kept[i] for i in range(N)]
    if cls.answer is Algorithm.answer:
        for i in range(N):
            assert_close(updates[i].models, own(models, i))


@every_algorithm
def test_answering_some_clients_is_answering_all_and_picking_them(cls):
    sim, states, models, info = three_rounds(cls)
    who = np.array([4, 1, 1, 0, 2])
    assert_close(sim.answer(states[-1], who), own((models, info), who), rtol=1e-6, atol=1e-7)


@every_algorithm
def test_six_rounds_in_one_call_are_six_calls_of_one_to_the_bit(cls):
    sim, states, *_ = three_rounds(cls)
    together, finite = sim.advance(sim.start(), 6)
    assert finite
    assert_same_bits(together, trajectory(sim, states[-1], 3)[-1])


@every_algorithm
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(cls):
    _, states, models, info = three_rounds(cls)
    again = simulation(cls, federation())
    repeated = trajectory(again, again.start(), 3)
    assert_same_bits((states, models, info), (repeated, *again.answer(repeated[-1])))
    other = simulation(cls, federation(), seed=1)
    assert differs(other.start().server, states[0].server), "another seed starts elsewhere"
    after, same_start = other.advance(states[0], 1)[0], states[1]
    assert differs((after.server, after.clients), (same_start.server, same_start.clients)), (
        "and draws other rows"
    )


@every_algorithm
def test_training_moves_the_models(cls):
    sim, states, models, _ = three_rounds(cls)
    assert differs(states[0].server, states[-1].server) == sim.algorithm.federated
    first, _ = sim.answer(states[0])
    for kind in Models._fields:
        if getattr(models, kind) is not None:
            assert differs(getattr(first, kind), getattr(models, kind))


# --- compilation and divergence


def test_compilations_are_seen():
    with compilation() as seconds:
        jax.jit(lambda x: x + 1)(3.0)
    assert seconds


@every_algorithm
def test_changing_a_float_does_not_compile_again(cls):
    sim, states, *_ = three_rounds(cls)
    floats = [name for name, value in vars(sim.algorithm).items() if isinstance(value, float)]
    assert "eta" in floats
    changed = tiny(cls, **{name: 0.5 * getattr(sim.algorithm, name) for name in floats})
    other, unchanged = (
        Simulation(algorithm, fitting(cls, l2=0.3), federation(), cohort=3, seed=9)
        for algorithm in (changed, sim.algorithm)
    )
    with compilation() as seconds:
        after, _ = other.advance(states[-1], 1)
        other.answer(after)
    assert not seconds
    before, _ = unchanged.advance(states[-1], 1)
    assert differs((after.server, after.clients), (before.server, before.clients)), "and yet it matters"


@every_algorithm
def test_a_run_that_diverges_stops_at_its_last_finite_state(cls):
    """η l2 is far above 2, so every step multiplies the model's size until it overflows."""
    unlimited = {"beta": 1e30} if issubclass(cls, FedAdam) else {"q": 0.0}  # whose steps are bounded
    sim = Simulation(tiny(cls, eta=40.0, **unlimited), fitting(cls, l2=1.0), federation(), cohort=3)
    state, finite = sim.advance(sim.start(), 60)
    assert not finite
    assert 0 < state.t < 60
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.clients)))
    until, still_finite = sim.advance(sim.start(), state.t)
    assert still_finite
    assert_same_bits(state, until)
    again, finite = sim.advance(state, 5)
    assert not finite
    assert_same_bits(again, state)


@every_algorithm
def test_an_absurd_step_diverges_in_the_first_round_and_returns_the_beginning(cls):
    absurd = {"eta": 1e38, "alpha": 1e38}
    sim = Simulation(tiny(cls, **absurd), fitting(cls, l2=1.0), federation(), cohort=3)
    state, finite = sim.advance(sim.start(), 4)
    assert not finite
    assert_same_bits(state, sim.start())


@every_algorithm
def test_scores_exist_for_exactly_the_models_that_exist(cls):
    sim, states, models, _ = three_rounds(cls)
    evaluation, evaluated = sim.evaluate(states[-1])
    kinds = {kind for kind in Models._fields if getattr(models, kind) is not None}
    shared = {"global"} if sim.shared(states[-1]) is not None else set()
    assert set(evaluation.test) == set(evaluation.train) == kinds | shared
    assert shared == ({"global"} if cls.has_global or cls.pools else set())
    assert_same_bits(evaluated, models)
    assert evaluation.finite


@every_algorithm
def test_sixty_rounds_lower_the_training_loss_of_every_model(cls):
    sim, states, *_ = three_rounds(cls, N)
    later, finite = sim.advance(states[0], 60)
    assert finite
    start, end = (sim.evaluate(state)[0].train for state in (states[0], later))
    for kind in start:
        if (cls, kind) != (Mapper, "global"):  # w hardly moves where clients choose their own model
            assert end[kind].mean_loss < start[kind].mean_loss
