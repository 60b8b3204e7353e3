"""Advice: methods that are tried, clients that choose, and the folder with the result."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_stopped import wait_for

from pfedme import export
from pfedme.advice import trials as searching
from pfedme.advice.advise import advise
from pfedme.advice.trials import Trial, Trials, methods_for, search
from pfedme.algorithms import IFCA, FedAvg
from pfedme.algorithms.alone import STRENGTHS
from pfedme.cli import main
from pfedme.core.models import DNN, MLR, Network, NormalisedDNN
from pfedme.data import parse_data
from pfedme.data.federation import Federation
from pfedme.data.table import Table
from pfedme.engine.choices import choose, row_score
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.personalization.lines import Clusters, Recipe, alone_recipe, cluster_line, global_line
from pfedme.runs.run import Run
from pfedme.training.pilot import CAUTION, FEW

DATA = "synthetic:clients=4,rows=24,features=3,classes=2"


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Few methods, and few rounds for each."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch.setattr)
        yield


def shorten(setting: Callable[[Any, str, Any], None] = setattr) -> None:
    """Few methods, and few rounds for each."""
    setting(searching, "RELATIVES", ("ditto",))
    setting(searching, "CLUSTERS", (2,))
    setting(searching, "WARMUP", 2)
    setting(searching, "BUDGETS", (6, 9))


def asked(data: str = DATA, **options: Any) -> Run:
    return Run(algorithm=FedAvg(), data=parse_data(data), model=MLR(), budget=9, **options)


# --- the choice, with the scores of all clients


def brute_force(score: np.ndarray, owner: np.ndarray, clients: int, caution: float, m: float) -> list[int]:
    """`choose`, client by client."""
    own = {i: score[owner == i] for i in range(clients)}
    means = np.array([rows.mean(axis=0) for rows in own.values() if len(rows)])
    weights = np.array([len(rows) / (len(rows) + m) for rows in own.values() if len(rows)])
    weights /= weights.sum()
    shared = np.average(means, axis=0, weights=weights)
    for_all = []
    for k in range(score.shape[1]):
        apart = means[:, np.argmax(shared)] - means[:, k]
        far = np.average(apart, weights=weights)
        error = math.sqrt(sum(w**2 * (a - far) ** 2 for w, a in zip(weights, apart, strict=True)))
        for_all.append(far <= caution * error / math.sqrt(1 - sum(weights**2)) + 1e-12)
    chosen = []
    for rows in own.values():
        n = len(rows)
        good = [True] * score.shape[1]
        if n:
            mean = (rows.sum(axis=0) + m * shared) / (n + m)
            best = int(np.argmax(mean))
            behind = rows[:, [best]] - rows
            noise = behind.std(axis=0) / math.sqrt(n) if n > 1 else np.ones(len(mean))
            good = (mean[best] - mean <= caution * noise * n / (n + m) + 1e-12).tolist()
        allowed = [k for k, fine in enumerate(good) if fine]
        both = [k for k in allowed if for_all[k]]
        best_for_all = max(allowed, key=lambda k: shared[k])
        chosen.append(allowed[0] if m == 0 else both[0] if both else best_for_all)
    return chosen


@pytest.mark.parametrize("m", [0.0, 3.0, 20.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_that_of_brute_force(seed: int, m: float):
    rng = np.random.default_rng(seed)
    owner = np.sort(rng.integers(0, 6, 40))
    owner = owner[owner != 3]  # a client without rows
    score = rng.normal(size=(len(owner), 5)) + rng.normal(size=(6, 5))[owner]
    for caution in (0.0, 0.5):
        assert choose(score, owner, 6, caution, m).tolist() == brute_force(score, owner, 6, caution, m)


def test_with_infinitely_many_pooled_rows_all_clients_with_rows_choose_alike():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(5), 8)
    score = rng.normal(size=(40, 4))
    means = score.reshape(5, 8, 4).mean(axis=(0, 1))
    assert set(choose(score, owner, 5, 0.5, 1e9).tolist()) == {int(np.argmax(means))}


# --- clusters on the menu


def two_kinds(rows: int = 60) -> Federation:
    """Six clients; three label the same points the other way round."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6 * rows, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    y[3 * rows :] = 1 - y[3 * rows :]
    return Federation.split([rows] * 6, x, y, classes=2)


def recipe(clusters: int) -> Recipe:
    algorithm = IFCA(clusters=clusters, warmup=2, eta=0.5, R=10, B=10)
    return Recipe(algorithm, Network(features=3, classes=2), cohort=6, seed=0, rounds=8)


def test_clients_of_two_kinds_get_the_model_of_their_kind():
    fed = two_kinds()
    _, which = Clusters.of(recipe(2), fed).chosen(fed)
    assert len(set(which[:3])) == len(set(which[3:])) == 1
    assert which[0] != which[3]
    start = cluster_line(recipe(2)).start(fed)
    scores = np.asarray(start.models[np.arange(6)].tree[0][0])
    np.testing.assert_allclose(scores[0], scores[1])
    assert np.abs(scores[0] - scores[3]).max() > 0.5


def test_the_prior_of_a_cluster_is_the_mean_of_its_clients():
    fed = two_kinds()
    fed = dataclasses.replace(fed, y=np.where(np.arange(len(fed.y)) % 7 == 0, 0, fed.y).astype(np.int32))
    clusters = Clusters.of(recipe(2), fed)
    _, which = clusters.chosen(fed)
    start, count = fed.rows("train")
    shares = np.array([np.mean(fed.y[s : s + n] == 1) for s, n in zip(start, count, strict=True)])
    prior = clusters.start(fed).prior
    assert prior is not None
    for i in range(6):
        assert prior[i, 1] == pytest.approx(shares[which == which[i]].mean(), abs=1e-6)


def test_with_one_cluster_its_model_is_fedavgs():
    fed, one = two_kinds(), recipe(1)
    fedavg = dataclasses.replace(one, algorithm=FedAvg(eta=0.5, R=10, B=10, aggregation="uniform"))
    a, b = cluster_line(one).start(fed), global_line(fedavg.shared, fedavg).start(fed)
    mine, other = (start.models[np.arange(6)].ravel(1) for start in (a, b))
    np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    assert a.prior is not None
    np.testing.assert_allclose(a.prior, np.tile(np.asarray(b.prior), (6, 1)))


def test_a_newcomer_gets_the_cluster_that_fits_its_rows():
    fed = two_kinds()
    clusters = Clusters.of(recipe(2), fed)
    later = two_kinds(20).take(np.array([4, 1]))
    _, which = clusters.chosen(fed)
    assert clusters.chosen(later)[1].tolist() == [which[4], which[1]]


# --- alone


def test_alone_is_judged_with_l2_that_was_chosen_on_other_rows():
    rng = np.random.default_rng(0)
    clients, rows = 8, 25
    x = rng.normal(size=(clients * rows, 3)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=len(x)) > 0).astype(np.int32)
    fed = Federation.split([rows] * clients, x, y, classes=2, train=0.8)
    model = Network(features=3, classes=2)
    recipe, _ = alone_recipe(model, fed, seed=0, budget=6)
    scores, owners = [], []
    parts = [fed.hold_out(fold, 5) for fold in range(5)]
    for part in parts:
        blocks, found = Blocks.cut(*part.rows("validation")), []
        for l2 in STRENGTHS:
            one = dataclasses.replace(recipe, l2=np.full(clients, l2), l2_without=None)
            made = outcomes(model, one.personal(part), jnp.asarray(part.x), jnp.asarray(part.y), blocks)
            found.append(row_score(made))
        scores.append(np.stack(found, axis=1))
        owners.append(blocks.owner())
    caution = CAUTION * math.sqrt(1 + FEW / 20)
    for fold, part in enumerate(parts):
        others = [k for k in range(5) if k != fold]
        score, owner = (np.concatenate([values[k] for k in others]) for values in (scores, owners))
        want = np.array(STRENGTHS)[brute_force(score, owner, clients, caution, 0.0)]
        l2 = recipe.l2_for(part)
        assert l2 is not None
        np.testing.assert_allclose(l2, want, rtol=1e-6)
    assert recipe.l2_without is not None
    assert np.ptp(recipe.l2_without, axis=0).any()
    assert recipe.l2_for(fed) is recipe.l2


# --- methods


def test_methods_suit_the_model_and_the_number_of_clients():
    fed = two_kinds()
    linear, deep, normal = (
        methods_for(description.build(3, 2), fed, None)
        for description in (MLR(), DNN(hidden=(4,)), NormalisedDNN(hidden=(4,)))
    )
    assert linear[:2] == ["alone", "fedavg"]
    assert "fedper" not in linear
    assert "fedper" in deep
    assert "fedbn" not in deep
    assert "fedbn" in normal
    assert [name for name in linear if name.startswith("ifca:")] == ["ifca:clusters=2,warmup=10"]


def test_the_search_spends_more_on_what_looks_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fed, tried = two_kinds(), []

    def pretended(method: str, _: Simulation, budget: int) -> Trial:
        tried.append((method, budget))
        loss = 9.0 if method in ("alone", "fedavg") else float(method[1:])
        return Trial(method, budget, 1.0, loss=loss, rounds=budget)

    monkeypatch.setattr(searching, "_tried", pretended)
    monkeypatch.setattr(searching, "BUDGETS", (10, 20, 40))
    simulation = Simulation(FedAvg(eta=0.1), Network(features=3, classes=2), fed, cohort=6)
    methods = ["alone", "fedavg", *(f"m{k}" for k in (7, 6, 5, 4, 3, 2, 1, 0))]
    kept = Trials(tmp_path / "t.json", {})
    assert search(methods, kept, simulation, budget=40, seconds=1e9) == []
    assert [m for m, b in tried if b == 10] == methods
    assert [m for m, b in tried if b == 20] == ["alone", "fedavg", "m0", "m1", "m2", "m3"]
    assert [m for m, b in tried if b == 40] == ["alone", "fedavg", "m0", "m1", "m2"]
    again = Trials(tmp_path / "t.json", {})
    assert again.trials == kept.trials
    before = len(tried)
    search(methods, again, simulation, budget=40, seconds=1e9)
    assert len(tried) == before  # nothing is tried twice
    short = Trials(tmp_path / "short.json", {})
    left = search(methods, short, simulation, budget=40, seconds=4.5)
    assert len(short.trials) == 5  # the fifth began in time
    assert "m0 with up to 10 rounds" in left


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_stops_after_any_trial_continues_as_if_it_had_not(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the losses are: methods may look worse with more rounds, converge, or diverge."""
    methods = ["alone", "fedavg", *(f"m{k}" for k in range(8))]
    left = 0

    def pretended(method: str, _: Simulation, budget: int) -> Trial:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        rng = np.random.default_rng([seed, methods.index(method), budget])
        loss = None if rng.random() < 0.1 else rng.random()
        return Trial(method, budget, 1.0, loss=loss, rounds=budget, converged=rng.random() < 0.2)

    monkeypatch.setattr(searching, "_tried", pretended)
    monkeypatch.setattr(searching, "BUDGETS", (10, 20, 40))
    simulation = Simulation(FedAvg(eta=0.1), Network(features=3, classes=2), two_kinds(), cohort=6)

    def go_on(path: Path, most: int) -> list[Trial]:
        nonlocal left
        left, kept = most, Trials(path, {})
        search(methods, kept, simulation, budget=40, seconds=1e9)
        return kept.trials

    want = go_on(tmp_path / "whole.json", -1)
    for stop in range(len(want)):
        path = tmp_path / f"{stop}.json"
        with pytest.raises(KeyboardInterrupt):
            go_on(path, stop)
        assert go_on(path, -1) == want


# --- the whole


def advised(out: Path, **options: Any) -> dict[str, Any]:
    advise(asked(), out, minutes=100, **options)
    return json.loads((out / "advice.json").read_text())


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    return document | {"seconds": 0, "tried": [{**t, "seconds": 0} for t in document["tried"]]}


@pytest.fixture(scope="module")
def whole(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with advice."""
    out = tmp_path_factory.mktemp("advice") / "out"
    advised(out)
    return out


def test_the_advice_has_what_others_rely_on(whole: Path):
    document = json.loads((whole / "advice.json").read_text())
    assert isinstance(document["join"], bool)
    assert document["join"] == (document["verdict"] == "yes")
    assert {"method", "metric", "command", "tried", "clients"} <= document.keys()
    assert all(t.keys() == {"method", "score", "seconds"} for t in document["tried"])
    assert {t["method"] for t in document["tried"]} >= {"alone", "fedavg", "ditto"}
    assert len(document["clients"]) == 4
    for client in document["clients"]:
        assert client.keys() == {"client", "choice", "score", "alone", "global", "gain", "low", "high"}
        assert client["gain"] == pytest.approx(client["score"] - client["alone"], abs=1e-6)
        assert client["low"] <= client["gain"] <= client["high"]
    page = (whole / "report.html").read_text()
    assert document["sentence"].replace("'", "&#x27;") in page
    assert "<script" not in page


def test_every_client_has_a_model_that_predicts(whole: Path):
    folders = sorted((whole / "models").iterdir())
    assert len(folders) == 4
    for folder in folders:
        model = export.load(folder)
        assert set(model.predict(np.zeros((3, 3), np.float32))) <= {"0", "1"}
        assert model.origin["client"] == folder.name


def test_stopped_three_times_and_continued_the_advice_is_the_same(quick: None, whole: Path, tmp_path: Path):
    calls = 0

    def stop(at: int) -> Any:
        def watch(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        return watch

    for at in (3, 6, 12):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            advise(asked(), tmp_path / "out", minutes=100, watch=stop(at))
        assert not (tmp_path / "out" / "advice.json").exists()
    found = advised(tmp_path / "out")
    assert without_times(found) == without_times(json.loads((whole / "advice.json").read_text()))
    a, b = ((path / "personalized.safetensors").read_bytes() for path in (tmp_path / "out", whole))
    assert a == b


CHILD = """
import sys
from pathlib import Path
from test_advise import asked, shorten
from pfedme.advice.advise import advise
shorten()
advise(asked(), Path(sys.argv[1]), minutes=100)
"""


def everything(out: Path) -> dict[str, Any]:
    """All that advice leaves behind, but for what tells of time."""
    found: dict[str, Any] = {}
    for path in out.rglob("*"):
        if path.is_file() and path.name not in ("report.html", "trials.json", "advice.json"):
            found[str(path.relative_to(out))] = path.read_bytes()
    trials = json.loads((out / "trials.json").read_text())["trials"]
    found["trials"] = [{**trial, "seconds": 0} for trial in trials]
    return found | {"advice": without_times(json.loads((out / "advice.json").read_text()))}


def tried(out: Path) -> int:
    """How many trials have been kept."""
    path = out / "trials.json"
    return len(json.loads(path.read_text())["trials"]) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((2,), id="once"),
        pytest.param((0, 1, 3, 4, "choice", "models"), id="at every stage", marks=pytest.mark.slow),
    ],
)
def test_killed_and_continued_the_advice_is_the_same(
    stages: tuple[int | str, ...], quick: None, whole: Path, tmp_path: Path
):
    """By `kill -9`, after so many trials, when clients choose, and when models are written."""
    out = tmp_path / "out"
    every, words = tried(whole), [sys.executable, "-c", CHILD, str(out)]

    def reached(stage: int | str) -> bool:
        done = (out / "models").exists() if stage == "models" else tried(out) == every
        return done if isinstance(stage, str) else tried(out) >= stage

    for stage in stages:
        with subprocess.Popen(words, cwd=Path(__file__).parent, text=True) as process:
            wait_for(process, partial(reached, stage))
            process.send_signal(signal.SIGKILL)
        assert not (out / "advice.json").exists()
    advised(out)
    assert everything(out) == everything(whole)


@pytest.mark.slow
def test_with_more_time_clients_choose_by_all_their_rows(quick: None, whole: Path, tmp_path: Path):
    """Even if a choice with less time was stopped before."""
    out, choosing = tmp_path / "out", "choosing by all training rows in turn instead of a fifth of them"
    out.mkdir()
    document = json.loads((whole / "trials.json").read_text())
    document["trials"] = [{**trial, "seconds": 60.0} for trial in document["trials"]]
    document["notes"] = {}
    (out / "trials.json").write_text(json.dumps(document))
    few = len(document["trials"]) + 4  # enough to try all and to choose once, not five times
    assert choosing in advise(asked(), out, minutes=few).left
    found = advised(out)
    assert found["left"] == []
    want = json.loads((whole / "advice.json").read_text())
    assert found["clients"] == want["clients"]


# --- bad input


@pytest.mark.parametrize(
    ("data", "minutes", "options", "says"),
    [
        ("synthetic:clients=1,rows=20,features=3,classes=2", 1.0, {}, "nobody to join"),
        (DATA, 0.0, {}, "--minutes must be positive"),
        (DATA, math.nan, {}, "--minutes must be positive"),
        (DATA, 1.0, {"metric": "rmse"}, "rmse"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    data: str, minutes: float, options: dict[str, Any], says: str, tmp_path: Path
):
    with pytest.raises(InputError, match=says):
        advise(asked(data, **options), tmp_path / "out", minutes=minutes)
    assert not (tmp_path / "out").exists()


def test_with_too_little_time_the_error_says_how_much_is_needed(quick: None, tmp_path: Path):
    with pytest.raises(InputError, match=r"No time is left.*--minutes \d+ continues"):
        advise(asked(), tmp_path / "out", minutes=1e-6)
    kept = json.loads((tmp_path / "out" / "trials.json").read_text())["trials"]
    assert [trial["method"] for trial in kept] == ["alone", "fedavg"]


def test_a_folder_of_another_question_is_left_alone(quick: None, whole: Path, tmp_path: Path):
    before = (whole / "advice.json").read_bytes()
    with pytest.raises(InputError, match="another question"):
        advise(asked(seed=1), whole, minutes=100)
    assert (whole / "advice.json").read_bytes() == before
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(InputError, match="holds no advice"):
        advise(asked(), tmp_path, minutes=100)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "trials.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        advise(asked(), tmp_path / "damaged", minutes=100)


def test_the_command_refuses_with_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["advise", "--data", "synthetic:clients=1,rows=20", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "nobody to join" in capsys.readouterr().err


def advice_on(rows: list[str], folder: Path, **options: Any) -> dict[str, Any]:
    """The advice on a table of sites."""
    table, out = folder / "sites.csv", folder / "out"
    table.write_text("\n".join(["site,x,z,outcome", *rows]) + "\n")
    data = Table(path=str(table), client="site", label="outcome")
    advise(dataclasses.replace(asked(), data=data, **options), out, minutes=100)
    return json.loads((out / "advice.json").read_text())


def site(name: str, rows: int, rule: Callable[[float, float], str], seed: int = 0) -> list[str]:
    """Rows of a site whose outcome follows a rule."""
    points = np.random.default_rng([seed, ord(name)]).normal(size=(rows, 2)).round(3).tolist()
    return [f"{name},{x},{z},{rule(x, z)}" for x, z in points]


def ill(x: float, z: float) -> str:
    return "ill" if x > 0 else "well"


@pytest.mark.slow
def test_clients_without_test_rows_get_a_model_but_no_gain(quick: None, tmp_path: Path):
    rows = [row for name in "abc" for row in site(name, 16, ill)] + site("d", 1, ill)
    found = {client["client"]: client for client in advice_on(rows, tmp_path)["clients"]}
    assert found["d"]["gain"] is found["d"]["score"] is None
    assert found["a"]["gain"] is not None
    assert (tmp_path / "out" / "models" / "d").is_dir()


def test_without_any_test_rows_the_error_names_the_cure(tmp_path: Path):
    with pytest.raises(InputError, match=r"No client has test rows.*; clients need more rows"):
        advice_on(["a,1,0,ill", "b,2,0,well", "c,0,1,ill"], tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_label_that_one_client_alone_has_is_predicted_there(quick: None, tmp_path: Path):
    def rare(x: float, z: float) -> str:
        return "rare" if z > 0 else ill(x, z)

    rows = [row for name in "abc" for row in site(name, 24, ill)] + site("d", 40, rare)
    found = advice_on(rows, tmp_path)
    assert len(found["clients"]) == 4
    model = export.load(tmp_path / "out" / "models" / "d")
    assert "rare" in set(model.predict(np.array([[0.0, 3.0], [0.0, -3.0]], np.float32)))


def test_a_metric_that_does_not_fit_is_refused_with_those_that_do(tmp_path: Path):
    says = "--metric rmse does not fit a label that is a class; choose one of accuracy, "
    with pytest.raises(InputError, match=says):
        advice_on([row for name in "ab" for row in site(name, 16, ill)], tmp_path, metric="rmse")
    assert not (tmp_path / "out").exists()


def test_where_nothing_helps_the_answer_is_to_train_alone(quick: None, tmp_path: Path):
    """Every site has a rule of its own, the opposite of another's, and rows enough to learn it."""

    def turned(quarters: int) -> Callable[[float, float], str]:
        return lambda x, z: "ill" if (x, z, -x, -z)[quarters] > 0 else "well"

    rows = [row for k, name in enumerate("abcd") for row in site(name, 80, turned(k))]
    found = advice_on(rows, tmp_path)
    assert found["sentence"].startswith(("Train alone: ", "Do not join: "))
    assert found["method"] == "alone"
    assert not found["join"]
    assert found["deployed"] == []
    assert found["command"].startswith("pfedme run alone")
