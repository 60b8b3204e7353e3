"""Differential privacy of clients: sensitivity, noise, cohorts, laws, records and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    EXACT,
    assert_close,
    assert_same_bits,
    differs,
    federation,
    fitting,
    flat,
    tiny,
)
from scipy import stats
from stops import stop_at

from pfedme.algorithms import ALGORITHMS, Algorithm, Ditto, FedAvg, FedAvgM, FedMeta, PFedMe
from pfedme.algorithms.base import Cohort
from pfedme.audits.mechanism import clipping_adapts
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.core.private_mean import PrivateMean, clipped, length_of
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.data.synthetic import Synthetic
from pfedme.engine.cohorts import draw_poisson
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.privacy.clients import (
    FIRST_CLIP,
    ClientPlan,
    beside_votes,
    plan_clients,
    private_step,
    room,
    supported,
)
from pfedme.privacy.units import Clients, Privacy
from pfedme.report.html.page import report
from pfedme.runs.run import Run
from pfedme.training.execute import begin, execute, resume

KEY = jax.random.key(0)
SETTINGS = settings(max_examples=40, deadline=None)
EPSILON = 5.0


def mean_of(clip: float = 1.0, noise: float = 0.0, size: int = 1, **more: Any) -> PrivateMean:
    return PrivateMean(jnp.float32(clip), jnp.float32(noise), size, **more)


def plan(
    clients: int = 5, cohort: int = 5, clip: float = 1.0, noise: float = 0.0, most: int | None = None
) -> ClientPlan:
    """A plan with some noise, whatever it is worth."""
    spec = Clients(epsilon=EPSILON, clip=clip)
    return ClientPlan(spec, clients, cohort, 10, 1, noise, EPSILON, most or clients)


def uniform(algorithm: Algorithm) -> Algorithm:
    return dataclasses.replace(algorithm, aggregation="uniform")


def simulation(
    algorithm: Algorithm, privacy: ClientPlan | None, fed: Federation | None = None, seed: int = 0
) -> Simulation:
    fed = fed or federation()
    model = fitting(type(algorithm))
    cohort = privacy.cohort if privacy else fed.clients
    return Simulation(algorithm, model, fed, cohort=cohort, seed=seed, privacy=privacy)


# --- the sum


numbers = st.floats(-1e30, 1e30, allow_subnormal=False) | st.floats(-3, 3) | st.just(math.nan)
summed = jax.jit(lambda C, uploads, who: mean_of(clip=C)(KEY, uploads, who, ())[0].ravel())
shortened = jax.jit(clipped)


@SETTINGS
@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 3),
    st.floats(1e-3, 1e3),
)
def test_one_client_more_changes_the_sum_by_at_most_C(values, there, one, C):
    sent = jnp.asarray(values, jnp.float32)
    sums = []
    for is_there in (True, False):
        there[one] = is_there
        sums.append(summed(jnp.float32(C), Params([sent[:, :1], sent[:, 1:]]), jnp.asarray(there)))
    assert np.linalg.norm(np.subtract(*sums, dtype=float)) <= C * (1 + 4e-6)


@SETTINGS
@given(st.lists(st.floats(-1e4, 1e4, allow_subnormal=False), min_size=4, max_size=4), st.floats(1e-3, 1e5))
def test_an_upload_is_shortened_to_C(values, C):
    """Against NumPy in double precision."""
    v = np.asarray(values, np.float32)
    short, whole = shortened((jnp.asarray(v[:1]), jnp.asarray(v[1:])), jnp.float32(C))
    length = np.linalg.norm(v.astype(float))
    want = v * min(1.0, C / length) if length else v
    np.testing.assert_allclose(np.concatenate(short), want, rtol=3e-6, atol=1e-30)
    assert np.linalg.norm(np.concatenate(short).astype(float)) <= C * (1 + 1e-7)
    if abs(length - C) > 1e-5 * C:
        assert bool(whole) == (length < C)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_upload_that_is_not_finite_counts_as_zero(bad):
    uploads = jnp.array([[1.0, 0.0], [bad, 1.0], [0.0, 2.0]])
    total, _ = mean_of(clip=10.0)(KEY, uploads, jnp.ones(3, bool), ())
    np.testing.assert_allclose(total, [1.0, 2.0])


def test_a_length_whose_square_is_too_large_for_float32():
    assert float(length_of(jnp.array([3e30, 4e30]))) == pytest.approx(5e30)
    assert float(length_of(jnp.zeros(3))) == 0.0


@pytest.mark.parametrize("present", [[True] * 4, [True, False, True, False], [False] * 4])
def test_the_divisor_is_fixed_whoever_answers(present):
    uploads = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    got, _ = mean_of(clip=np.inf, size=7)(KEY, uploads, jnp.asarray(present), ())
    np.testing.assert_allclose(got, np.asarray(uploads)[present].sum(axis=0) / 7, rtol=1e-6)


# --- the noise


def test_the_noise_is_normal_with_deviation_zC_over_S():
    zero = jnp.zeros((1, 100_000))
    got, _ = mean_of(clip=0.5, noise=3.0, size=4)(KEY, (zero, zero), jnp.ones(1, bool), ())
    values = np.concatenate(got).astype(float) / (3.0 * 0.5 / 4)
    n = len(values)
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(stats.kurtosis(values)) < 4 * math.sqrt(24 / n)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(values[: n // 2], values[n // 2 :])[0, 1]) < 4 / math.sqrt(n / 2)


def test_rounds_and_seeds_have_noise_of_their_own():
    found = []
    for seed in (0, 1):
        s = simulation(FedAvg(eta=1e-9, B=0, aggregation="uniform"), plan(noise=1.0), seed=seed)
        states = [s.advance(s.start()._replace(t=t), 1)[0] for t in (0, 1)]
        found += [flat(state.server) - flat(s.start().server) for state in states]
    assert np.abs(np.corrcoef(found) - np.eye(4)).max() < 0.5
    assert np.std(found) == pytest.approx(1 / 5, rel=0.3)


def test_the_noise_is_nothing_that_the_algorithm_draws_with_the_same_key():
    noise, _ = mean_of(noise=1.0)(KEY, jnp.zeros((1, 5000)), jnp.ones(1, bool), ())
    others = [jax.random.normal(k, (5000,)) for k in (KEY, *(jax.random.fold_in(KEY, i) for i in range(3)))]
    assert np.abs(np.corrcoef([noise, *others])[0, 1:]).max() < 0.08


def test_beta_multiplies_the_noise_on_w():
    moved = []
    for beta in (1.0, 2.0):
        s = simulation(FedAvg(eta=1e-9, beta=beta, aggregation="uniform"), plan(noise=1.0))
        moved.append(flat(s.advance(s.start(), 1)[0].server) - flat(s.start().server))
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-5)


# --- what a private run is


QUICK = ("pfedme", "fedavgm", "fedbabu")
COVERED = [name for name, cls in ALGORITHMS.own.items() if cls.averages and cls.federated]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COVERED],
)
def test_without_noise_and_clipping_a_run_with_everyone_is_the_plain_run(name):
    algorithm = uniform(tiny(ALGORITHMS[name], B=0))
    plain, private = (simulation(algorithm, p) for p in (None, plan(clip=np.inf)))
    a, b = (s.advance(s.start(), 3)[0] for s in (plain, private))
    assert_close((a.server, a.clients), (b.server, b.clients), rtol=1e-4, atol=1e-5)
    assert differs(a.server, plain.start().server)


def test_the_server_sees_nothing_but_the_mean():
    """Even an algorithm that looks at single uploads gets only their private mean."""

    @record
    class Curious(FedAvg):
        averages = True

        def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
            return uploads, cohort.rows, cohort.clients

    uploads = jnp.array([[3.0], [4.0], [5.0]])
    cohort = Cohort(KEY, jnp.arange(3), jnp.array([10, 0, 30]), 3)
    (seen, rows, who), kept = private_step(Curious(), mean_of(np.inf, size=2), None, uploads, cohort, ())
    np.testing.assert_allclose(seen, [[4.0]])
    assert (rows.tolist(), who.tolist(), kept) == ([1], [0], ())


def test_what_is_covered():
    """Of algorithms in this package; others are asked in the same way."""
    assert set(supported()) == {
        "fedavg", "fedprox", "pfedme", "per-fedavg", "reptile", "fedavgm", "fedadam", "fedyogi", "fedadagrad",
        "ditto", "fedavg-ft", "apfl", "mapper", "fedper", "fedrep", "lg-fedavg", "fedbabu", "fedbn",
        "fedmeta",
    }  # fmt: skip


@pytest.mark.slow
def test_steps_and_choices_that_use_rows_only_at_their_own_client_are_allowed(tmp_path: Path):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    given = {"nu": 1e-2, "rechoose": 2, "batches": "cycled"}
    run = private_run()
    run = dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, **given))
    assert execute(run).record["status"] == "finished"


def test_a_subclass_with_a_server_of_its_own_is_not_covered_by_its_parent():
    class Mine(FedAvg):
        """It may use uploads in other ways."""

        def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
            return server

    assert FedAvg.averages
    assert not Mine.averages
    assert FedAvgM.averages


# --- cohorts


def test_each_client_is_drawn_with_its_own_coin():
    ids = np.random.default_rng(0).permutation(40).astype(np.uint32)
    by_id, rounds, rate = np.argsort(ids), 2000, 0.3
    drawn = np.zeros((rounds, 40))
    for t in range(rounds):
        who = draw_poisson(by_id, ids, rate, 0, t)
        assert (np.diff(ids[who].astype(int)) > 0).all()
        drawn[t, who] = 1
    counts = drawn.sum(axis=0)
    assert abs(counts.sum() - rounds * 40 * rate) < 4 * math.sqrt(rounds * 40 * rate * (1 - rate))
    deviation = math.sqrt(rounds * rate * (1 - rate))
    assert stats.kstest((counts - rounds * rate) / deviation, "norm").pvalue > 1e-3
    sizes = drawn.sum(axis=1)
    assert sizes.var() == pytest.approx(40 * rate * (1 - rate), rel=4 * math.sqrt(2 / rounds))
    correlations = np.atleast_2d(np.corrcoef(drawn.T))[np.triu_indices(40, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(rounds)
    after = np.atleast_2d(np.corrcoef(np.stack([drawn[:-1].ravel(), drawn[1:].ravel()])))
    assert abs(after[0, 1]) < 4 / math.sqrt(rounds * 40)


def test_a_clients_coin_does_not_depend_on_the_others():
    ids = np.arange(100, dtype=np.uint32)
    order, among_all = np.random.default_rng(1).permutation(100)[:60], set[int]()
    for t in range(20):
        among_all = set(draw_poisson(np.arange(100), ids, 0.2, 5, t).tolist())
        some = ids[order]
        among_some = {int(some[i]) for i in draw_poisson(np.argsort(some), some, 0.2, 5, t)}
        assert among_some == among_all & set(order.tolist())
    assert set(draw_poisson(np.arange(100), ids, 0.2, 5, 0).tolist()) != among_all


def test_room_is_the_least_whose_overflow_is_a_hundredth_of_delta():
    N, S, T, eps, delta = 1000, 100, 100, 2.0, 1e-5

    def overflow(most: int) -> float:
        each = stats.binom.pmf(np.arange(most + 1, N + 1), N, S / N).sum()
        return T * (1 + math.exp(eps)) * each

    most = room(N, S, T, eps, delta)
    assert overflow(most) <= 0.01 * delta < overflow(most - 1)
    assert room(7, 7, T, eps, 1e-2) == 7
    assert room(4, 3, T, 50.0, 1e-2) == 4


def test_absent_clients_change_nothing_and_those_that_do_not_fit_are_left_out():
    fed = federation(EXACT)
    algorithm = Ditto(eta=0.05, R=2, B=4, aggregation="uniform")
    s = simulation(algorithm, plan(4, 2, clip=np.inf, most=3), fed)
    before = state = s.start()
    sizes = set()
    for t in range(8):
        who = s.cohort_of(t)
        sizes.add(len(who))
        assert len(s.seated(t)) == 3
        updates = s.update(state, np.arange(4)).upload
        want = flat(state.server) + flat(updates, stacked=True)[who].sum(axis=0) / 2
        after, fine = s.advance(state, 1)
        assert fine
        np.testing.assert_allclose(flat(after.server), want, rtol=1e-4, atol=1e-5)
        for i in range(4):
            own = [jax.tree.map(lambda a, i=i: a[i], x.clients) for x in (state, after)]
            assert differs(*own, least=1e-7) == (i in who)
        state = after
    assert len(sizes) > 1
    assert differs(before.clients, state.clients)


def test_a_round_that_nobody_is_drawn_for_is_noise():
    s = simulation(FedAvg(eta=0.1, aggregation="uniform"), plan(5, 1, noise=1.0))
    t = next(t for t in range(100) if not len(s.cohort_of(t)))
    state = s.start()._replace(t=t)
    moved = flat(s.advance(state, 1)[0].server) - flat(state.server)
    assert np.isfinite(moved).all()
    assert np.std(moved) == pytest.approx(1.0, rel=0.5)


def test_permuting_the_clients_permutes_the_results():
    fed, order = federation(), np.array([3, 0, 4, 2, 1])
    algorithm = tiny(PFedMe)
    a, b = (simulation(algorithm, plan(5, 3, noise=0.1, most=4), f) for f in (fed, fed.take(order)))
    first, second = (s.advance(s.start(), 4)[0] for s in (a, b))
    assert_same_bits(first.server, second.server)


# --- adaptive clipping


def rule(sign: float = 1.0, noise: float = 0.0, cohort: int = 100) -> Any:
    """The next C, from C and the lengths of the uploads of a round."""
    rounds = iter(range(10**6))
    made = mean_of(noise=noise, size=cohort, adapts=True, count_noise=jnp.float32(cohort / 20))

    @jax.jit
    def step(t: Any, lengths: jax.Array, C: Any) -> jax.Array:
        uploads = (jnp.zeros_like(lengths), lengths)
        return made(jax.random.fold_in(KEY, t), uploads, jnp.ones(len(lengths), bool), C)[1]

    def next_clip(C: float, lengths: np.ndarray) -> float:
        after = float(step(next(rounds), jnp.asarray(lengths, jnp.float32), np.float32(C)))
        return C * (after / C) ** sign if C > 0 and math.isfinite(C) else C

    return next_clip


def test_an_adaptive_length_settles_at_the_median_and_an_inverted_one_runs_away():
    right = clipping_adapts(rule(), 0.5)
    assert right.passed
    assert right.value < 0.3
    wrong = clipping_adapts(rule(sign=-1.0), 0.5)
    assert not wrong.passed
    assert wrong.value > 10


@pytest.mark.parametrize("first", [0.1, 100.0])
def test_an_adaptive_length_finds_the_median_from_far_away(first):
    rng, next_clip, C = np.random.default_rng(0), rule(noise=1.0), first
    path = []
    for _ in range(200):
        C = next_clip(C, 3 * np.exp(0.5 * rng.normal(size=100)))
        path.append(C)
    assert np.median(path[-60:]) == pytest.approx(3.0, rel=0.1)


def test_the_sum_and_the_votes_together_cost_as_much_as_planned():
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    from pfedme.privacy.accounting import Event, spent

    z, S, T = 2.5, 100, 50
    parts = [Event(1.0, beside_votes(z, S), T), Event(1.0, 2 * S / 20, T)]
    assert spent(parts, 1e-5) == pytest.approx(spent([Event(1.0, z, T)], 1e-5), rel=1e-9)
    assert beside_votes(10.0, 100) == math.inf
    made = plan(1000, 100, clip=0.0, noise=z).mean()
    assert float(made.noise) == pytest.approx(1 / math.sqrt(1 / z**2 - 1 / 100))
    assert (float(made.count_noise), made.adapts) == (5.0, True)


def test_an_adaptive_run_starts_low_and_follows_its_uploads():
    algorithm = FedAvg(eta=0.5, R=5, B=0, aggregation="uniform")
    fed = federation(((5, 0),) * 40)
    s = simulation(algorithm, plan(40, 40, clip=0.0, noise=1e-3), fed)
    state = s.start()
    assert float(state.clip) == pytest.approx(FIRST_CLIP)
    for _ in range(60):
        state, _ = s.advance(state, 1)
    lengths = np.linalg.norm(flat(s.update(state, np.arange(40)).upload, stacked=True), axis=1)
    assert float(state.clip) == pytest.approx(np.median(lengths), rel=0.4)


# --- plans


def test_a_plan_meets_its_epsilon_and_says_what_it_does():
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    from pfedme.privacy.accounting import epsilon, gaussian_epsilon

    found = plan_clients(Clients(epsilon=2.0, delta=1e-6), uniform(FedAvg()), 500, 50, 40, 30)
    assert epsilon(0.1, found.noise, 40, 0.99e-6) <= 2.0 < epsilon(0.1, 0.998 * found.noise, 40, 0.99e-6)
    every = plan_clients(Clients(epsilon=2.0, delta=1e-6), uniform(FedAvg()), 50, 50, 40, 30)
    assert gaussian_epsilon(every.noise, 40, 1e-6) == pytest.approx(every.epsilon)
    assert every.epsilon <= 2.0
    assert every.most == 50
    assert "closed form" in every.to_json()["accountant"]
    assert "all 50 clients in every round" in every.to_json()["sampling"]


def test_ten_clients_are_warned_and_as_many_as_the_warning_names_are_enough():
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")

    def planned(clients: int) -> ClientPlan:
        return plan_clients(Clients(epsilon=3.0, delta=1e-6), uniform(FedAvg()), clients, clients, 100, 7850)

    few = planned(10)
    assert few.in_round > 50
    assert few.in_all == pytest.approx(few.in_round / 10)
    assert "Noise drowns the signal" in few.warning
    enough = math.ceil(100 * few.in_all)
    assert f"{enough:,} clients" in few.warning
    assert planned(enough).in_all == pytest.approx(0.1, rel=1e-3)
    assert not planned(enough).warning
    # The definition: the length of the noise in the mean, over the furthest that clients can move it.
    noise, _ = few.mean()(KEY, jnp.zeros((1, 7850)), jnp.ones(1, bool), ())
    assert np.linalg.norm(noise) / few.spec.clip == pytest.approx(few.in_round, rel=0.05)


# --- runs


WORDS = "--data synthetic:clients=12,rows=20 --rounds 6 --eta 0.1 --R 2 --B 8 --cohort 6"
DP = "--dp clients --epsilon 20 --delta 1e-3"


def test_a_run_its_record_its_report_its_command_and_its_repetition(tmp_path: Path, capsys):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    out = tmp_path / "a"
    words = f"{WORDS} {DP} --dp-clip 0.5 --aggregation uniform --out"
    assert main(["run", "fedavg", *shlex.split(words), str(out)]) == 0
    told = json.loads((out / "record.json").read_text())
    claim = told["privacy"]
    assert (claim["unit"], claim["simulated"], claim["clip"]) == ("clients", True, 0.5)
    assert claim["relation"] == "add or remove one client with all its rows"
    assert claim["sampling"] == "Poisson, 6 of 12 clients expected in a round"
    assert 0 < claim["spent"] <= 20
    assert any("results of clients" in line for line in claim["not_covered"])
    assert "furthest that 6 clients can move" in capsys.readouterr().err
    page = (out / "report.html").read_text()
    assert "Differential privacy of clients" in page
    assert "Poisson, 6 of 12 clients" in page
    assert main([*shlex.split(told["command"])[1:], "--out", str(tmp_path / "b")]) == 0
    again = json.loads((tmp_path / "b" / "record.json").read_text())
    assert (again["config"], again["final"]) == (told["config"], told["final"])
    assert Run.from_json(told["config"]).privacy == Clients(epsilon=20.0, delta=1e-3, clip=0.5)
    assert main(["audit", str(out)]) == 2
    assert "claims privacy of clients, and an audit looks for single rows" in capsys.readouterr().err
    del told["privacy"]["delta"]
    (out / "record.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="is damaged"):
        report([out], tmp_path / "page.html")


def private_run(clip: float = 1.0, **more: Any) -> Run:
    algorithm = PFedMe(eta=0.1, alpha=0.05, lam=5.0, R=2, K=2, B=5)
    return Run(
        algorithm=algorithm, data=Synthetic(clients=40, rows=10), model=MLR(), rounds=6,
        cohort=20, eval_every=2, privacy=Clients(epsilon=30.0, delta=1e-3, clip=clip), **more,
    )  # fmt: skip


@pytest.mark.parametrize("clip", [pytest.param(1.0, marks=pytest.mark.slow), 0.0])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path, clip: float):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    whole = execute(private_run(clip), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(private_run(clip), tmp_path / "part", watch=stop_at(4, evaluated=True))
    again = resume(tmp_path / "part")
    assert_same_bits((whole.w, whole.theta), (again.w, again.theta))
    assert whole.record["final"] == again.record["final"]
    assert whole.record["privacy"] == again.record["privacy"]
    assert ("last_clip" in whole.record["privacy"]) == (clip == 0)


def test_a_private_run_that_diverges_is_not_started_again(tmp_path: Path):
    """A second run would spend a second budget; one without privacy would be worse."""
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    run = private_run()
    run = dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, eta=0.0))
    execution = begin(run, tmp_path / "a")
    assert not execution.slower()
    assert execution.simulation.privacy is not None


REFUSED = {
    "fedavg --rounds 3 --dp clients": "needs the largest privacy loss",
    "fedavg --rounds 3 --dp clients --epsilon 0": "epsilon of --dp clients must be positive",
    "fedavg --rounds 3 --dp clients --epsilon -1": "epsilon of --dp clients must be positive",
    "fedavg --rounds 3 --dp clients --epsilon nan": "epsilon of --dp clients must be a finite number",
    "pfedme --rounds 3 --dp clients --epsilon 3 --delta 0.2": "choose --delta below 0.2",
    "pfedme --rounds 3 --dp clients --epsilon 3 --delta nan": "delta of --dp clients must be a finite number",
    "pfedme --rounds 3 --dp clients --epsilon 3 --cohort 6": "choose --cohort between 1 and 5",
    "pfedme --rounds 3 --dp clients --epsilon 3 --dp-clip -1": "clip of --dp clients must be at least 0",
    "pfedme --rounds 3 --dp clients --epsilon 3 --dp-clip nan": "clip of --dp clients must be a finite",
    "pfedme --rounds 3 --dp clients --epsilon 3 --dp-clip large": "must be a finite number, not 'large'",
    "pfedme --rounds 3 --dp clients --epsilon 3 --dp-clip adaptive": "give a length, such as --dp-clip 1",
    "pfedme --rounds 3 --dp rows --epsilon 3 --dp-clip adaptive": "is for --dp clients",
    "pfedme --dp clients --epsilon 3": "give --rounds",
    "fedavg --rounds 3 --dp clients --epsilon 3": "use --aggregation uniform",
    "scaffold --rounds 3 --dp clients --epsilon 3": "more than the mean of what clients send; choose one of",
    "mr-mtl --rounds 3 --dp clients --epsilon 3": "does not cover mr-mtl",
    "alone --rounds 3 --dp clients --epsilon 3": "no rounds in which clients send something",
    "pfedme --rounds 3 --dp clients --epsilon 3 --combine rfa": "--combine rfa cannot be used",
    "pfedme --rounds 3 --dp clients --epsilon 3 --model dnn-bn": "variances of a batch normalisation",
    "pfedme --rounds 3 --dp clients --epsilon 3 --class-weights balanced": "computed from the rows",
    "pfedme --rounds 3 --dp clients --epsilon 3 --personalize auto": "cannot be combined with --dp",
    "pfedme --rounds 3 --dp clients --epsilon 3 --holdout-clients 0.3": "cannot be combined with --dp",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_private_is_refused(words, tmp_path: Path, capsys):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    argv = ["run", *shlex.split(words), "--data", "synthetic:clients=5,rows=60", "--out", str(tmp_path / "r")]
    assert main(argv) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_privacy_as_a_text():
    asked = Clients(epsilon=3.0, delta=1e-6, clip=0.0)
    assert Privacy.from_text(str(asked), "privacy") == asked


@pytest.mark.slow
def test_fedmeta_clips_both_of_its_parts_together():
    s = simulation(tiny(FedMeta), plan(clip=1e-3))
    before = s.start()
    after, _ = s.advance(before, 1)
    moved = jax.tree.map(jnp.subtract, after.server, before.server)
    assert float(length_of(moved)) <= 1e-3 * 1.01
