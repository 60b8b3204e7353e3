"""Each client's own model: what it is made of, how it is chosen, and that nothing is chosen by test rows."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import RAGGED, federation, softmax_regression, with_test_rows

from pfedme.algorithms import PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR, Network
from pfedme.core.tree import Params
from pfedme.data import parse_data
from pfedme.data.federation import Federation, Part
from pfedme.engine.choices import (
    TEMPERATURES,
    Line,
    Personalize,
    Start,
    calibrated,
    candidates,
    choose,
    for_all,
    personalize,
    rounds_to_choice,
    row_score,
    with_own_lambdas,
)
from pfedme.engine.devices import padded
from pfedme.engine.metrics import Blocks, Outcomes, outcomes, over_clients
from pfedme.engine.path import _descend, lambda_path
from pfedme.engine.personalized import Candidate, Personalized, paired
from pfedme.engine.simulate import Simulation
from pfedme.engine.store import Store
from pfedme.errors import InputError, Interrupted
from pfedme.personalization.finished import FinishedRun, newcomer_curve, summary
from pfedme.runs.run import Run
from pfedme.training.execute import execute, resume
from pfedme.training.execution import Progress

HOW = Personalize(steps=3, eta=0.03, folds=3, B=4)
SMALL = "synthetic:clients=6,rows=16,features=4,classes=3"
TINY = f"--data {SMALL} --rounds 3 --budget 6 --cohort 2 --R 2 --B 5 --eta 0.05"


def shared(seed: int = 1) -> Params:
    return softmax_regression().init(jax.random.key(seed))


def apart(fed: Federation) -> Params:
    """A model of its own for each client."""
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(2), i))(fed.ids)
    return jax.vmap(softmax_regression().init)(keys)


def as_global(train: Callable[[Federation], Params]) -> Line:
    return Line("global", lambda fed: Start(for_all(train(fed), fed.clients)))


def found(fed: Federation, how: Personalize = HOW) -> Personalized:
    return personalize(how, softmax_regression(), fed, [as_global(lambda _: shared())], apart)


# --- rows to choose by


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=5), st.integers(2, 6))
def test_the_folds_of_a_client_are_its_training_rows(sizes: list[tuple[int, int]], folds: int):
    counts = [a + b for a, b in sizes]
    x = np.arange(sum(counts), dtype=np.float32)[:, None]
    fed = Federation(
        x=x, y=np.zeros(len(x), np.int32), n_train=np.array([a for a, _ in sizes]),
        n_test=np.array([b for _, b in sizes]), classes=1, ids=np.arange(len(sizes), dtype=np.uint32),
    )  # fmt: skip

    def rows(part: Federation, kind: Part, i: int) -> list[float]:
        start, count = part.rows(kind)
        return sorted(part.x[start[i] : start[i] + count[i], 0].tolist())

    parts = [fed.hold_out(fold, folds) for fold in range(folds)]
    for i, (n, _) in enumerate(sizes):
        own = rows(fed, "train", i)
        kept = [rows(part, "validation", i) for part in parts]
        assert sorted(row for part in kept for row in part) == (own if n > 1 else [])
        assert max(map(len, kept)) - min(map(len, kept)) <= 1
        for part in parts:
            assert sorted(rows(part, "train", i) + rows(part, "validation", i)) == own
            assert rows(part, "test", i) == rows(fed, "test", i)
            assert part.n_train[i] >= 1


def test_a_limited_federation_has_the_first_rows_and_all_test_rows():
    fed = federation(RAGGED)
    few = fed.limit(5)
    assert few.ids.tolist() == [0, 1, 3, 4]
    assert (few.n_train == 5).all()
    for k, i in enumerate(few.ids):
        a, b = few.start[k], fed.start[i]
        np.testing.assert_array_equal(few.x[a : a + 5], fed.x[b : b + 5])
        np.testing.assert_array_equal(
            few.x[a + 5 : a + 5 + few.n_test[k]], fed.x[b + fed.n_train[i] : b + fed.count[i]]
        )


def test_outcomes_of_single_rows():
    fed, theta = federation(((7, 3), (12, 0), (2, 1), (20, 40))), shared()
    store = Store.of(fed)
    blocks = Blocks.cut(*fed.rows("test"))
    got = outcomes(softmax_regression(), theta, store.x, store.y, blocks)
    (W, b), owner = theta.tree[0], blocks.owner()
    assert np.bincount(owner, minlength=4).tolist() == fed.n_test.tolist()
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(*fed.rows("test"), strict=True)])
    scores = fed.x[rows] @ np.asarray(W).T + np.asarray(b)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got.likely, p[np.arange(len(rows)), fed.y[rows]], rtol=1e-5)
    np.testing.assert_array_equal(got.right, scores.argmax(axis=1) == fed.y[rows])


# --- the path


def test_the_path_leads_from_the_shared_model_to_the_clients_own():
    offered = candidates(HOW, given=15.0)
    assert [c.name for c in offered][:1] == ["global"]
    assert [c.name for c in offered][-2:] == ["fine-tuned", "alone"]
    lams = [c.lam for c in offered]
    assert lams == sorted(lams, reverse=True)
    assert [c.name for c in offered].count("given") == 1
    assert len(candidates(HOW, given=10.0)) == len(candidates(HOW))  # 10 is on the path already


def test_a_point_of_the_path_is_stationary():
    """∇f(θ) + λ (θ − w) = 0, for clients whose rows are all the same, so that every batch is the whole."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(3, 3)), 6, axis=0).astype(np.float32)
    y = np.repeat([0, 1, 2], 6).astype(np.int32)
    fed = Federation.split([6, 6, 6], x, y, classes=3)
    model, w, how = softmax_regression(l2=0.01), shared(), Personalize(steps=1500, eta=0.2, B=4)
    lams = (3.0, 0.3)
    offered = [Candidate("personal", lam, how.steps) for lam in lams]
    walked = lambda_path(
        model,
        fed,
        {"global": for_all(w, 3)},
        offered,
        jax.random.key(0),
        np.arange(3),
        Blocks.cut(*fed.rows("test")),
        np.full(3, how.eta, np.float32),
        how.B,
    )
    far = []
    for lam, (_, theta) in zip(lams, walked, strict=True):
        W, b = (np.asarray(leaf, np.float64) for leaf in theta.tree[0])
        W_w, b_w = (np.asarray(leaf, np.float64) for leaf in w.tree[0])
        for i in range(3):
            row = x[6 * i].astype(np.float64)
            z = W[i] @ row + b[i]
            g = np.exp(z - z.max()) / np.exp(z - z.max()).sum() - np.eye(3)[i]
            slope = np.outer(g, row) + 0.01 * W[i] + lam * (W[i] - W_w)
            np.testing.assert_allclose(slope, 0, atol=2e-5)
            np.testing.assert_allclose(g + 0.01 * b[i] + lam * (b[i] - b_w), 0, atol=2e-5)
        far.append(np.linalg.norm(W - W_w))
    assert far[0] < far[1]


@pytest.mark.parametrize("hidden", [(), (3,)])
def test_steps_in_the_span_of_a_clients_rows_are_the_steps(hidden: tuple[int, ...]):
    """θ ← (θ − η ∇f̃(θ) + ηλ w) / (1 + ηλ), step by step with the gradients of the model itself."""
    rng = np.random.default_rng(0)
    fed = Federation.split(
        [9, 5],
        rng.normal(size=(14, 40)).astype(np.float32),
        rng.integers(0, 3, 14).astype(np.int32),
        classes=3,
    )
    model = Network(features=40, classes=3, hidden=hidden, l2=0.01)
    how = Personalize(steps=10, B=4)
    assert fed.n_train.max() ** 2 <= how.B * fed.features  # so that the span is used
    w, first = (model.init(jax.random.key(k)) for k in (1, 2))
    store, key, lam = Store.of(fed), jax.random.key(0), 0.7
    who = padded(np.arange(2, dtype=np.int32))
    centre, begun = (for_all(point, len(who)) for point in (w, first))
    eta = np.array([0.2, 0.1], np.float32)[who]
    got = _descend(store, model, key, centre, begun, who, eta, lam, how.steps, B=how.B)
    for i in range(2):
        problem, own, theta = store.problem(model, i), jax.random.fold_in(key, store.ids[i]), first
        for k in range(how.steps):
            size = eta[i] * (1.0 if k < 6 else 0.25 if k < 8 else 0.0625)
            slope = problem.sample(jax.random.fold_in(own, k), how.B).grad(theta)
            theta = (1 / (1 + size * lam)) * (theta - size * slope + (size * lam) * w)
        np.testing.assert_allclose(got[i].ravel(), theta.ravel(), atol=2e-6)


# --- the choice


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_choice_is_the_most_shared_of_the_best(seed: int):
    rng = np.random.default_rng(seed)
    n, clients = 30, 4
    likely, owner = rng.random((n, 5)), rng.integers(0, clients - 1, n)
    means = np.array(
        [likely[owner == i].mean(axis=0) if (owner == i).any() else np.zeros(5) for i in range(clients)]
    )
    bold, shy = choose(likely, owner, clients, 0.0), choose(likely, owner, clients, 1e9)
    np.testing.assert_array_equal(bold, means.argmax(axis=1))
    assert bold[-1] == 0  # the last client has no rows to choose by
    order = rng.permutation(n)
    np.testing.assert_array_equal(
        choose(likely[order], owner[order], clients, 0.5), choose(likely, owner, clients, 0.5)
    )
    middle = choose(likely, owner, clients, 0.5)
    assert (shy <= middle).all()
    assert (middle <= bold).all()


def test_a_model_that_diverged_is_never_chosen():
    likely = [np.full(2, 0.4), np.full(2, 0.9), np.full(2, np.nan)]
    score = np.stack([row_score(Outcomes(p > 0.5, p)) for p in likely], axis=1)
    assert choose(score, np.zeros(2, int), 1, 0.5).tolist() == [1]


def test_the_score_of_a_row_is_best_in_the_mean_for_the_true_probability():
    """Unlike the probability itself, which is best for 0 or 1; and a single row cannot outweigh hundreds."""
    p, q = 0.1, np.linspace(0.02, 0.98, 97)
    of = [row_score(Outcomes(np.ones(97, bool), likely)) for likely in (q, 1 - q)]
    assert q[np.argmax(p * of[0] + (1 - p) * of[1])] == pytest.approx(p)
    assert row_score(Outcomes(np.zeros(1, bool), np.zeros(1)))[0] == pytest.approx(np.log(0.01))


def test_outcomes_at_temperatures_are_those_of_divided_scores():
    model, fed = softmax_regression(), federation(RAGGED)
    theta, store = shared(), Store.of(fed)
    blocks = Blocks.cut(*fed.rows("train"))
    found = outcomes(model, 30 * theta, store.x, store.y, blocks, (1.0, 0.5, 3.0))
    assert found.tempered is not None
    np.testing.assert_allclose(found.tempered[:, 0], found.likely, rtol=1e-5)
    for column, T in zip(found.tempered.T, (1.0, 0.5, 3.0), strict=True):
        divided = outcomes(model, (30 / T) * theta, store.x, store.y, blocks)
        np.testing.assert_allclose(column, divided.likely, rtol=1e-4, atol=1e-9)


def test_a_model_that_is_too_certain_or_too_uncertain_is_judged_like_the_calibrated_one():
    """Dividing all scores of a model by a temperature changes no decision, and no judgement."""
    rng = np.random.default_rng(3)
    z, owner = rng.normal(size=(400, 3)), rng.integers(0, 5, 400)
    label = np.array([rng.choice(3, p=p) for p in np.exp(z) / np.exp(z).sum(1, keepdims=True)])

    def at_temperatures(z: np.ndarray) -> np.ndarray:
        each = z[:, None, :] / np.array(TEMPERATURES)[:, None]
        each = np.exp(each) / np.exp(each).sum(axis=2, keepdims=True)
        return row_score(Outcomes(np.ones(400, bool), each[:, 0, 0], tempered=each[np.arange(400), :, label]))

    wrong = [factor * z for factor in (1.0, 2 ** (4 / 3), 2 ** (-5 / 3))]
    judged = calibrated(np.stack([at_temperatures(z) for z in wrong], axis=1), owner, 5, pooled=100.0)
    np.testing.assert_allclose(judged[:, 1], judged[:, 0], rtol=1e-9)
    np.testing.assert_allclose(judged[:, 2], judged[:, 0], rtol=1e-9)
    least = np.log(np.maximum(np.exp(z) / np.exp(z).sum(1, keepdims=True), 0.01))[np.arange(400), label]
    assert judged[:, 0].mean() >= least.mean() - 1e-12  # temperature 1 is among them


def test_a_single_row_decides_nothing():
    assert choose(np.array([[0.5, 0.49, 0.6]]), np.zeros(1, int), 1, 0.5).tolist() == [0]


def test_validation_rows_are_kept_apart_once():
    apart = federation().hold_out(0, 5)
    for again in (lambda: apart.hold_out(1, 5), lambda: apart.limit(2)):
        with pytest.raises(ValueError, match="kept apart already"):
            again()


def test_a_difference_is_paired_row_by_row():
    rng = np.random.default_rng(0)
    mine, theirs, owner = rng.random(60) < 0.7, rng.random(60) < 0.5, rng.integers(0, 3, 60)
    gap, half = paired(mine, theirs, owner, 3)
    for i in range(3):
        d = mine[owner == i].astype(float) - theirs[owner == i]
        assert gap[i] == pytest.approx(d.mean())
        assert half[i] == pytest.approx(1.96 * np.sqrt((d**2).sum() + 1) / len(d))


def test_test_rows_decide_nothing():
    fed = federation()
    other = with_test_rows(fed, 3.0, 1)
    a, b = found(fed), found(other)
    np.testing.assert_array_equal(a.choice, b.choice)
    np.testing.assert_array_equal(a.score, b.score)
    np.testing.assert_array_equal(np.asarray(a.theta.ravel(1)), np.asarray(b.theta.ravel(1)))


def test_the_order_of_clients_does_not_matter():
    fed = federation()
    order = np.array([3, 0, 4, 2, 1])
    a, b = found(fed), found(fed.take(order))
    np.testing.assert_array_equal(a.choice[order], b.choice)
    np.testing.assert_allclose(
        np.asarray(a.theta.ravel(1))[order], np.asarray(b.theta.ravel(1)), rtol=1e-5, atol=1e-6
    )


def test_the_model_that_judges_has_not_seen_the_rows_it_is_judged_by():
    fed = federation(((9, 3), (12, 2)))
    seen: list[Federation] = []

    def without(part: Federation) -> Params:
        seen.append(part)
        return shared()

    personalize(HOW, softmax_regression(), fed, [as_global(without)], apart)
    assert seen.pop() is fed  # for the final models
    assert len(seen) == HOW.folds
    kept = [part.x[s : s + n] for part in seen for s, n in zip(*part.rows("validation"), strict=True)]
    mine = np.concatenate(kept)
    own = np.concatenate([fed.x[s : s + n] for s, n in zip(fed.start, fed.n_train, strict=True)])
    assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, own.tolist()))
    for part in seen:
        trained = {
            tuple(row) for s, n in zip(*part.rows("train"), strict=True) for row in part.x[s : s + n].tolist()
        }
        judged = {
            tuple(row)
            for s, n in zip(*part.rows("validation"), strict=True)
            for row in part.x[s : s + n].tolist()
        }
        assert not trained & judged


def test_clients_with_many_rows_choose_by_one_part():
    fed = federation(((9, 3), (12, 2)))
    seen = []
    personalize(
        dataclasses.replace(HOW, small=5), softmax_regression(), fed,
        [as_global(lambda part: seen.append(part) or shared())], apart,
    )  # fmt: skip
    assert len(seen) == 2  # the last time for the final models


def test_a_client_with_a_single_row_takes_the_global_model():
    fed = federation(((1, 3), (12, 2)))
    result = found(fed)
    assert result.candidates[result.choice[0]].name == "global"
    assert np.isnan(result.score[0]).all()
    np.testing.assert_array_equal(np.asarray(result.theta.ravel(1))[0], np.asarray(shared().ravel()))


def test_the_recommended_model_is_the_one_that_was_chosen():
    result = found(federation())
    for i in range(result.clients):
        own = result.owner == i
        np.testing.assert_array_equal(result.recommended[own], result.right[own, result.choice[i]])
    assert (result.joined < len(result.candidates) - 1).all()
    accuracy = result.accuracy(result.recommended)
    assert np.isnan(accuracy[1])  # it has no test rows
    s = summary(result, result.recommended)
    own = over_clients(accuracy)
    assert own is not None
    assert s["mean"] == own["mean"] == pytest.approx(np.nanmean(accuracy))
    assert 0 <= s["harmed"] <= 1


def test_alone_is_never_harmed():
    result = found(federation())
    assert not result.harmed(result.of("alone")).any()


# --- a λ of its own, inside pFedMe


def test_until_the_first_choice_every_client_has_the_given_lambda():
    fed = federation().hold_out(0, 5)
    given, own = (
        Simulation(
            PFedMe(lam=4.0, R=2, B=3, eta=0.005, alpha=0.05, rechoose=k), softmax_regression(), fed, cohort=3
        )
        for k in (0, 50)
    )
    a, b = given.advance(given.start(), 3)[0], own.advance(own.start(), 3)[0]
    np.testing.assert_allclose(
        np.asarray(a.server.ravel()), np.asarray(b.server.ravel()), rtol=1e-5, atol=1e-7
    )
    np.testing.assert_array_equal(np.asarray(b.clients), np.full(5, 4.0, np.float32))


def test_a_choice_of_lambda_is_made_in_its_rounds_and_not_by_test_rows():
    fed = federation().hold_out(0, 5)
    other = with_test_rows_after(fed)
    algorithm = PFedMe(lam=4.0, R=2, B=3, eta=0.005, alpha=0.05, rechoose=2)
    states = []
    for one in (fed, other):
        sim = Simulation(algorithm, softmax_regression(), one, cohort=3)
        before = sim.advance(sim.start(), 2)[0]
        assert with_own_lambdas(sim, before._replace(t=3)) == before._replace(t=3)
        after = with_own_lambdas(sim, before, HOW)
        again = with_own_lambdas(sim, after, HOW)
        np.testing.assert_array_equal(np.asarray(after.clients), np.asarray(again.clients))
        states.append(np.asarray(after.clients))
    np.testing.assert_array_equal(*states)
    assert set(states[0].tolist()) <= {4.0, 3.0, 1.0, *np.array([0.3, 0.1, 0.03, 0.01], np.float32).tolist()}
    assert (rounds_to_choice(algorithm, 0), rounds_to_choice(algorithm, 3)) == (2, 1)
    assert rounds_to_choice(PFedMe(), 3) > 10**6


def with_test_rows_after(fed: Federation) -> Federation:
    """The same federation with other test rows."""
    x, y = fed.x.copy(), fed.y.copy()
    for s, n in zip(*fed.rows("test"), strict=True):
        x[s : s + n], y[s : s + n] = 3.0, 1
    return dataclasses.replace(fed, x=x, y=y)


def test_a_smaller_lambda_lets_the_personal_model_go_further():
    """Three times the same client, with the same batches, but for its λ_i."""
    fed = federation().take([3, 3, 3])
    sim = Simulation(
        PFedMe(lam=4.0, R=2, B=3, eta=0.005, alpha=0.05, rechoose=9), softmax_regression(), fed, cohort=3
    )
    start = sim.start()
    models, _ = sim.answer(start._replace(clients=np.array([4, 1, 1e-6], np.float32)))
    given, _ = Simulation(
        PFedMe(lam=4.0, R=2, B=3, eta=0.005, alpha=0.05), softmax_regression(), fed, cohort=3
    ).answer(start)
    assert models.personal is not None
    assert given.personal is not None
    theta, w = np.asarray(models.personal.ravel(1)), np.asarray(start.server.ravel())
    far = np.linalg.norm(theta - w, axis=1)
    assert far[0] < far[1] < far[2]
    np.testing.assert_allclose(theta[0], np.asarray(given.personal.ravel(1))[0], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_an_interrupted_run_with_own_lambdas_ends_the_same(tmp_path: Path):
    line = f"run pfedme {TINY} --rounds 6 --rechoose 2 --lam 5 --eval-every 3".split()
    run = Run(
        algorithm=PFedMe(lam=5.0, R=2, B=5, eta=0.05, rechoose=2), data=parse_data(SMALL), model=MLR(),
        rounds=6, budget=6, cohort=2, eval_every=3,
    )  # fmt: skip
    stops = iter([4])

    def stop(progress: Progress) -> None:
        if progress.round == 4 and next(stops, None):
            raise KeyboardInterrupt

    assert main([*line, "--out", str(tmp_path / "whole")]) == 0
    with pytest.raises(Interrupted):
        execute(run, tmp_path / "parts", watch=stop)
    resume(tmp_path / "parts")
    whole, parts = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("whole", "parts"))
    assert whole["history"] == parts["history"]
    assert whole["final"] == parts["final"]


# --- a finished run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with newcomers and models for all."""
    out = tmp_path_factory.mktemp("runs") / "run"
    line = f"run fedavg {TINY} --personalize auto:steps=3,folds=3 --holdout-clients 0.34 --out {out}"
    assert main(line.split()) == 0
    return out


def test_a_run_leaves_its_clients_models(run: Path):
    table = list(csv.DictReader(io.StringIO((run / "personalized.csv").read_text())))
    assert len(table) == 4
    for row in table:
        assert row["choice"] in {c.name for c in candidates(HOW, shifted=True)}
        gap = float(row["recommended_accuracy"]) - float(row["alone_accuracy"])
        assert float(row["gain_over_alone"]) == pytest.approx(gap, abs=1e-5)
    said = json.loads((run / "personalized.json").read_text())
    assert sum(said["chosen"].values()) == 4
    assert (run / "personalized.png").read_bytes().startswith(b"\x89PNG")


def test_newcomers_are_not_in_the_federation(run: Path):
    finished = FinishedRun.open(run)
    members, newcomers = finished.run.parties()
    assert newcomers is not None
    assert set(members.ids) | set(newcomers.ids) == set(range(6))
    assert not set(members.ids) & set(newcomers.ids)
    np.testing.assert_array_equal(finished.simulation.federation.ids, members.ids)
    table = list(csv.DictReader(io.StringIO((run / "newcomers.csv").read_text())))
    assert sorted({int(row["rows"]) for row in table}) == [5, 10]
    methods = {"alone", "global", "label-prior", "fine-tuned", "own-lambda", "recommended"}
    assert {row["method"] for row in table} == methods


def test_named_clients_are_held_out():
    named = Run(
        algorithm=PFedMe(), data=parse_data("synthetic:clients=6,rows=30"), model=MLR(),
        holdout_clients=("4", "1"),
    )  # fmt: skip
    members, newcomers = named.parties()
    assert newcomers is not None
    assert (members.ids.tolist(), newcomers.ids.tolist()) == ([0, 2, 3, 5], [1, 4])
    assert Run.from_json(json.loads(json.dumps(named.to_json()))) == named
    assert "--holdout-clients 4,1" in named.command()
    other = dataclasses.replace(named, holdout_clients=0.2)
    assert len({run.digest() for run in (named, other)}) == 2
    assert named.program() != other.program()


OFFERED = [
    "personalized.csv", "personalized.json", "personalized.safetensors", "newcomers.csv", "report.html",
]  # fmt: skip


@pytest.mark.parametrize(
    "gone",
    [
        ["personalized.json", "personalized.safetensors", "newcomers.csv", "newcomers.png"],
        ["newcomers.png"],
        ["report.html"],
    ],
)
def test_a_run_stopped_while_its_clients_choose_is_resumed(
    gone: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    for name in gone:
        (out / name).unlink()
    assert main(["resume", str(out), "--json"]) == 0
    for name in OFFERED:
        assert (out / name).read_bytes() == (run / name).read_bytes(), name
    capsys.readouterr()
    assert main(["resume", str(out)]) == 2
    assert "is finished; there is nothing to resume" in capsys.readouterr().err


@pytest.mark.slow
def test_newcomers_get_a_page(run: Path, tmp_path: Path):
    data = "synthetic:clients=3,rows=16,features=4,classes=3,seed=1"
    assert main(["personalize", str(run), "--data", data, "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "report.html").read_text()
    shown = json.loads(page.split('id="document">')[1].split("</script>")[0])
    told = json.loads((tmp_path / "new" / "personalized.json").read_text())["methods"]
    table = list(csv.DictReader(io.StringIO((tmp_path / "new" / "personalized.csv").read_text())))
    assert shown["title"] == "Newcomers from synthetic"
    assert "3 clients of synthetic, which took no part in training" in shown["about"][0]
    (group,), (gains,) = shown["groups"], shown["gains"]
    for kind, method in (("global", "global"), ("personal", "recommended")):
        assert group["final"][kind]["value"] == pytest.approx(told[method]["accuracy"], rel=1e-5)
    gain = {row["client"]: float(row["gain_over_alone"]) for row in table}
    assert dict(zip(gains["clients"]["client"], gains["clients"]["gain"], strict=True)) == pytest.approx(gain)
    assert sum(choice["clients"] for choice in shown["chosen"][0]["counts"]) == 3
    assert shown["newcomers"] == []


def test_the_run_says_how_it_is_made_again(run: Path):
    record = json.loads((run / "record.json").read_text())
    assert "--personalize auto:folds=3,steps=3" in record["command"]
    assert "--holdout-clients 0.34" in record["command"]


def test_a_shared_model_trained_again_is_the_same(run: Path):
    finished = FinishedRun.open(run)
    again = finished.again(finished.simulation.federation)
    np.testing.assert_allclose(
        np.asarray(again.ravel()), np.asarray(finished.w.ravel()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_newcomers_from_elsewhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = "synthetic:clients=3,rows=16,features=4,classes=3,seed=5"
    status = main(["personalize", str(run), "--data", data, "--out", str(tmp_path), "--json"])
    assert status == 0
    said = json.loads(capsys.readouterr().out)
    assert sum(said["personalized"]["chosen"].values()) == 3
    assert len((tmp_path / "personalized.csv").read_text().splitlines()) == 4


def test_what_newcomers_cannot_be(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def refused(data: str) -> str:
        assert main(["personalize", str(run), "--data", data, "--out", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "5 features, those of the run 4" in refused("synthetic:clients=3,rows=16,features=5,classes=3")
    assert "a label that the federation has never seen" in refused(
        "synthetic:clients=3,rows=16,features=4,classes=4"
    )
    assert main(["personalize", str(run), "--data", "synthetic"]) == 2
    assert "give --out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["alone"])
def test_without_a_shared_model_there_is_nothing_to_personalize(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["run", algorithm, *TINY.split(), "--out", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert main(["personalize", str(tmp_path / "a")]) == 2
    assert "trains no shared model" in capsys.readouterr().err


def test_an_unfinished_or_missing_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["personalize", str(tmp_path / "nowhere")]) == 2
    assert "There is no run in" in capsys.readouterr().err
    record = json.loads((run / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps(record | {"status": "running"}))
    assert main(["personalize", str(tmp_path)]) == 2
    assert "has not finished (running); 'pfedme resume" in capsys.readouterr().err
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert main(["personalize", str(tmp_path)]) == 2
    assert "model.safetensors cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--personalize soon", "There is no personalization 'soon'"),
        ("--personalize auto:folds=1", "folds of personalization 'auto' must be at least 2"),
        ("--holdout-clients 1.5", "holdout_clients of the run must be below 1"),
        ("--holdout-clients 0.01", "leaves 0 newcomers"),
        ("--holdout-clients 0,1,2,3,4,5", "leaves 6 newcomers and 0 to train with"),
        ("--holdout-clients 7", "There is no client '7'. Known: 0, 1, 2, 3, 4, 5. A share"),
        ("--holdout-clients 0,1x", "There is no client '1x'; did you mean '1'?"),
        ("--personalize auto --algorithm-is-alone", "trains no shared model"),
        ("--personalize auto --rechoose 2 --algorithm-is-pfedme", "personalize a run without it"),
    ],
)
def test_wrong_options_of_a_run(options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options, _, algorithm = options.partition(" --algorithm-is-")
    assert main(f"run {algorithm or 'fedavg'} {TINY} {options} --out {tmp_path / 'x'}".split()) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_newcomer_without_test_rows_cannot_be_judged():
    fed = federation(((30, 0), (30, 0)))
    with pytest.raises(InputError, match="No client has test rows"):
        summary(found(fed), np.zeros(0, bool))


def test_newcomers_with_more_rows_than_there_are_are_left_out(run: Path):
    finished = FinishedRun.open(run)
    assert newcomer_curve(finished, federation_like(finished, 4), HOW) == []


def federation_like(finished: FinishedRun, rows: int) -> Federation:
    """Clients with so many training rows, who fit the run."""
    own = finished.simulation.federation
    return own.limit(rows)
