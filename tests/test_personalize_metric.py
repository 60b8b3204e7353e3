"""Clients' own models by another metric than accuracy: numbers against NumPy, and what is made of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from scipy import stats

from pfedme.cli import main
from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.choices import Line, Personalize, Start, for_all, personalize
from pfedme.engine.measure import ACCURACY, AUC, MEASURES, R2
from pfedme.engine.personalized import Personalized
from pfedme.personalization.finished import FinishedRun, clients_csv, document, methods, newcomer_curve
from pfedme.report.gain import gain_figure
from pfedme.report.tables import offer_sentences

FEATURES = 3
HOW = Personalize(steps=20, eta=0.1, folds=2, B=4)
SIZES = ((30, 20), (24, 0), (40, 25), (20, 8), (16, 12), (30, 10))
"""Training and test rows; the second client has nothing to test."""
OTHERS = ["auc", "balanced_accuracy", "f1", "recall", "precision", "log_loss", "brier"]


def federation(classes: int = 2) -> Federation:
    """Clients with tasks of their own: a rare class 0, several classes, or (0) a quantity. The last client's
    test rows are all of one class."""
    rng = np.random.default_rng(3)
    n_train, n_test = np.array(SIZES).T
    owner = np.repeat(np.arange(len(SIZES)), n_train + n_test)
    x = rng.normal(size=(len(owner), FEATURES))
    weights = rng.normal(size=(1, FEATURES)) + 0.7 * rng.normal(size=(len(SIZES), FEATURES))
    z = (weights[owner] * x).sum(axis=1) + 0.3 * rng.normal(size=len(owner))
    y = z if classes == 0 else np.digitize(z, [-1.5] if classes == 2 else [-1, 1])
    fed = Federation(
        x=x.astype(np.float32), y=y.astype(np.float32 if classes == 0 else np.int32), n_train=n_train,
        n_test=n_test, classes=classes, ids=np.arange(len(SIZES), dtype=np.uint32),
    ).checked()  # fmt: skip
    if classes:
        fed.y[fed.start[-1] + fed.n_train[-1] :] = 1
    return fed


def found(fed: Federation, key: str | None, **options: Any) -> Personalized:
    model = Network(features=FEATURES, classes=fed.classes)
    w = model.init(jax.random.key(1))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(2), i))(fed.ids)
    return personalize(
        HOW, model, fed, [Line("global", lambda _: Start(for_all(w, fed.clients)))],
        lambda _: jax.vmap(model.init)(keys),
        measure=MEASURES[key] if key else None, **options,
    )  # fmt: skip


def scores_of(theta: Params, fed: Federation) -> list[np.ndarray]:
    """What stacked linear models make of each client's test rows."""
    W, b = (np.asarray(leaf, np.float64) for leaf in theta.tree[0])
    rows = [fed.x[s : s + n].astype(np.float64) for s, n in zip(*fed.rows("test"), strict=True)]
    return [x @ W[i].T + b[i] for i, x in enumerate(rows)]


def labels_of(fed: Federation) -> list[np.ndarray]:
    return [fed.y[s : s + n] for s, n in zip(*fed.rows("test"), strict=True)]


# --- the metrics, once more


def over(a: float, b: float) -> float:
    return a / b if b else math.nan


def pairs(score: np.ndarray, positive: np.ndarray) -> float:
    """AUC by looking at every pair."""
    ahead = [1.0 if p > q else 0.5 if p == q else 0.0 for p in score[positive] for q in score[~positive]]
    return over(sum(ahead), len(ahead))


def metric(key: str, z: np.ndarray, y: np.ndarray, positive: int) -> float:
    """A metric of logits, of one client or of all rows."""
    if not len(y):
        return math.nan
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    if z.shape[1] > 2:
        assert key == "auc"
        each = [pairs(z[:, k] - np.log(np.exp(z).sum(axis=1)), y == k) for k in range(z.shape[1])]
        return float(np.mean([v for v in each if not math.isnan(v)] or [math.nan]))
    yes, called, q = y == positive, p.argmax(axis=1) == positive, p[:, positive]
    tp, fp, fn = (called & yes).sum(), (called & ~yes).sum(), (~called & yes).sum()
    recall, other = over(tp, tp + fn), over((~called & ~yes).sum(), (~yes).sum())
    return {
        "auc": pairs(z[:, positive] - z[:, 1 - positive], yes),
        "balanced_accuracy": (recall + other) / 2,
        "recall": recall,
        "precision": over(tp, tp + fp),
        "f1": over(2 * tp, 2 * tp + fp + fn),
        "log_loss": float(-np.mean(np.log(p[np.arange(len(y)), y]))),
        "brier": float(np.mean((q - yes) ** 2)),
    }[key]


@pytest.mark.parametrize(("key", "classes"), [*((key, 2) for key in OTHERS), ("auc", 3)])
def test_a_metric_of_the_chosen_models_is_numpys(key: str, classes: int):
    fed = federation(classes)
    result, y = found(fed, key), labels_of(fed)
    assert result.measure.key == key
    z = scores_of(result.theta, fed)
    want = [metric(key, a, b, fed.positive) for a, b in zip(z, y, strict=True)]
    np.testing.assert_allclose(result.own("recommended"), want, rtol=1e-4)
    assert math.isnan(want[1])  # it has no test rows
    if key in ("auc", "balanced_accuracy", "recall"):
        assert math.isnan(want[-1])  # its test rows are of one class
    whole = metric(key, np.concatenate(z), np.concatenate(y), fed.positive)
    entry = methods(result)["recommended"]
    assert entry[key] == pytest.approx(whole, rel=1e-4)
    known = np.sort(np.array(want)[~np.isnan(want)])
    assert entry["mean"] == pytest.approx(known.mean(), rel=1e-4)
    assert entry["worst_decile"] == pytest.approx(known[-1 if MEASURES[key].lower else 0], rel=1e-4)
    right = np.concatenate(z).argmax(axis=1) == np.concatenate(y)
    assert entry["accuracy"] == pytest.approx(right.mean())


@pytest.mark.parametrize("key", ["rmse", "mae"])
def test_an_error_of_the_chosen_models_is_numpys(key: str):
    fed = federation(0)
    result = found(fed, key)
    away = [z[:, 0] - y for z, y in zip(scores_of(result.theta, fed), labels_of(fed), strict=True)]

    def error(values: np.ndarray) -> float:
        if not len(values):
            return math.nan
        return float(np.sqrt(np.mean(values**2)) if key == "rmse" else np.mean(np.abs(values)))

    np.testing.assert_allclose(result.own("recommended"), [error(a) for a in away], rtol=1e-4)
    assert methods(result)["recommended"][key] == pytest.approx(error(np.concatenate(away)), rel=1e-4)
    verdict = result.verdict()
    gain = result.own("alone") - result.own("recommended")
    assert verdict.metric == key
    assert verdict.gain == pytest.approx(np.nanmean(gain))
    assert np.nanmean(gain) > 0  # alone's models are random here
    assert verdict.gaining is None  # an error has no interval of single clients


def test_every_method_is_judged_by_its_own_models():
    fed = federation()
    result, y = found(fed, "auc"), labels_of(fed)
    model = Network(features=FEATURES, classes=2)
    w = model.init(jax.random.key(1))
    everywhere = w.map(lambda leaf: jnp.broadcast_to(leaf, (fed.clients, *leaf.shape)))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(2), i))(fed.ids)
    for name, theta in (("global", everywhere), ("alone", jax.vmap(model.init)(keys))):
        want = [metric("auc", z, labels, 0) for z, labels in zip(scores_of(theta, fed), y, strict=True)]
        np.testing.assert_allclose(result.own(name), want, rtol=1e-6)
    same = result.joined == result.choice
    assert same.any()
    np.testing.assert_array_equal(result.own("own-lambda")[same], result.own("recommended")[same])
    assert set(methods(result)) == {"alone", "global", "fine-tuned", "own-lambda", "recommended"}
    with_given = found(fed, "auc", given=15.0)
    assert "given" in methods(with_given)


def test_the_verdict_is_by_the_metric():
    result = found(federation(), "auc")
    mine, alone = result.own("recommended"), result.own("alone")
    known = ~np.isnan(mine)
    gain, n = (mine - alone)[known], np.array([b for _, b in SIZES])[known]
    t = stats.t.ppf(0.99, len(gain) - 1) * gain.std(ddof=1) / math.sqrt(len(gain))
    rows = stats.norm.ppf(0.99) * math.sqrt((((np.sqrt(np.abs(gain) * n + 1)) / n) ** 2).sum()) / len(gain)
    verdict = result.verdict()
    assert (verdict.metric, verdict.clients) == ("auc", known.sum())
    assert known.sum() == len(SIZES) - 2  # one has no test rows, one only a single class
    assert verdict.gain == pytest.approx(gain.mean())
    assert verdict.high == pytest.approx(gain.mean() + max(t, rows))
    shares = [(n * p[known] + 1) / (n + 2) for p in (mine, alone)]
    reach = stats.norm.ppf(0.975) * np.sqrt(sum(p * (1 - p) for p in shares) / n)
    assert (verdict.gaining, verdict.losing) == ((gain > reach).sum(), (gain < -reach).sum())
    told = document(result, HOW)
    assert told["verdict"]["metric"] == "auc"
    assert told["gain"]["alone"]["mean"] == pytest.approx(gain.mean())
    assert "in AUC" in verdict.sentence
    (harmed,) = [line for line in offer_sentences(result) if line.startswith("Harmed")]
    assert "one point of accuracy" in harmed


def test_the_metric_changes_no_choice_and_no_model():
    fed = federation()
    usual, other = found(fed, None), found(fed, "auc")
    np.testing.assert_array_equal(usual.choice, other.choice)
    np.testing.assert_array_equal(np.asarray(usual.theta.ravel(1)), np.asarray(other.theta.ravel(1)))
    np.testing.assert_array_equal(usual.right, other.right)
    assert [found(fed, "accuracy").measure, found(federation(0), "r2").measure] == [ACCURACY, R2]
    assert found(fed, "accuracy").verdict() == usual.verdict()
    assert document(found(fed, "accuracy"), HOW) == document(usual, HOW)


def test_the_class_that_counts_can_be_anothers():
    """Newcomers among whom the rare class is frequent are judged as the run's clients are."""
    fed = federation()
    recall = found(fed, "recall", positive=1)
    want = [
        metric("recall", z, y, 1)
        for z, y in zip(scores_of(recall.theta, fed), labels_of(fed), strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose(recall.own("recommended"), want)


def test_where_no_client_has_the_metric_nothing_is_claimed():
    fed = federation()
    for s, n in zip(*fed.rows("test"), strict=True):
        fed.y[s : s + n] = 1
    result = found(fed, "auc")
    verdict = result.verdict()
    assert (verdict.verdict, verdict.metric, verdict.gain) == ("cannot tell", "auc", None)
    told = document(result, HOW)
    json.dumps(told, allow_nan=False)
    assert told["gain"] == {"alone": None, "global": None}
    entry = told["methods"]["recommended"]
    assert (entry["auc"], entry["mean"], entry["worst_decile"]) == (None, None, None)
    assert entry["accuracy"] is not None
    assert "above" not in " ".join(offer_sentences(result))
    assert gain_figure(result, fed).startswith(b"\x89PNG")
    assert "nan" not in clients_csv(result, fed)


@pytest.mark.parametrize(("key", "classes"), [("mae", 0), ("auc", 2)])
def test_a_metric_of_one_client_says_nothing_about_the_mean(key: str, classes: int):
    """Of accuracy and R² its own rows tell how sure the gain is."""
    fed = federation(classes).take([0])
    result = found(fed, key)
    json.dumps(document(result, HOW), allow_nan=False)
    assert result.gains("alone").mean() is None
    assert "interval" not in " ".join(offer_sentences(result)[:-1])
    assert found(fed, None).gains("alone").mean() is not None


def test_an_evaluation_too_large_for_the_metric_is_by_accuracy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pfedme.engine.metrics.MOST_SCORES", 1)
    result = found(federation(), "auc")
    assert result.verdict().metric == "accuracy"
    assert "auc" not in methods(result)["recommended"]


# --- a run


def write_table(path: Path, seed: int, each: int = 120) -> None:
    """Wards with a rare outcome; in ward `none` nobody has it, and ward `later` is small."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["ward", "age", "dose", "dead"])
        for place, ward in enumerate(["a", "b", "c", "d", "none", "later"]):
            n = 24 if ward == "later" else each
            x = rng.normal(size=(n, 2))
            risk = x @ [1.0, 0.5 * (place - 1)] + 0.3 * rng.normal(size=n)
            dead = (risk >= np.sort(risk)[-7]) & (ward != "none")
            table.writerows([ward, *row, "yes" if d else "no"] for row, d in zip(x, dead, strict=True))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rare")
    write_table(folder / "wards.csv", 0)
    line = (
        f"run fedavg --data {folder / 'wards.csv'} --client ward --label dead --rounds 4 --budget 6 --R 3 "
        f"--eta 0.2 --personalize auto:steps=5,folds=2 --holdout-clients later --out {folder / 'run'}"
    )
    assert main(line.split()) == 0
    return folder / "run"


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page_of(path: Path) -> Any:
    return json.loads(path.read_text().split('id="document">')[1].split("</script>")[0])


def test_a_rare_outcome_is_judged_by_auc(ran: Path):
    told = json.loads((ran / "personalized.json").read_text())
    assert told["verdict"]["metric"] == "auc"
    finished = FinishedRun.open(ran)
    fed = finished.simulation.federation
    assert fed.label_name(fed.positive) == "yes"
    models = safetensors.numpy.load_file(ran / "personalized.safetensors")["theta"]
    table = table_of(ran / "personalized.csv")
    assert [row["client"] for row in table] == [fed.name(i) for i in range(fed.clients)]
    theta = jax.vmap(finished.w.like)(jnp.asarray(models))
    z, y = scores_of(theta, fed), labels_of(fed)
    own = {row["client"]: metric("auc", a, b, fed.positive) for row, a, b in zip(table, z, y, strict=True)}
    for row in table:
        if row["client"] == "none":
            assert row["recommended_auc"] == row["gain_over_alone_auc"] == ""
            assert float(row["recommended_accuracy"]) <= 1
            continue
        assert float(row["recommended_auc"]) == pytest.approx(own[row["client"]], abs=1e-6)
        for other in ("alone", "global"):
            gain = float(row["recommended_auc"]) - float(row[f"{other}_auc"])
            assert float(row[f"gain_over_{other}_auc"]) == pytest.approx(gain, abs=2e-6)
    entry = told["methods"]["recommended"]
    assert entry["auc"] == pytest.approx(metric("auc", np.concatenate(z), np.concatenate(y), fed.positive))
    assert entry["mean"] == pytest.approx(np.nanmean(list(own.values())))
    assert told["verdict"]["clients"] == len(table) - 1
    gains = [float(row["gain_over_alone_auc"]) for row in table if row["gain_over_alone_auc"]]
    assert told["verdict"]["gain"] == pytest.approx(np.mean(gains), abs=1e-6)


def test_the_page_shows_the_metric(ran: Path):
    page, told = page_of(ran / "report.html"), json.loads((ran / "personalized.json").read_text())
    (shown,), (gains,), (newcomers,) = page["methods"], page["gains"], page["newcomers"]
    assert (shown["measure"], shown["usual"], shown["methods"]) == ("auc", "accuracy", told["methods"])
    (verdict,) = page["headline"][0]["verdicts"]
    assert verdict["metric"] == "auc"
    assert (gains["measure"], gains["paired"], gains["clients"]["of"]) == ("auc", False, 4)
    row = {row["client"]: row for row in table_of(ran / "personalized.csv")}[gains["clients"]["client"][0]]
    assert gains["clients"]["gain"][0] == pytest.approx(float(row["gain_over_alone_auc"]), rel=1e-5)
    levels = table_of(ran / "newcomers.csv")
    assert {row["metric"] for row in levels} == {newcomers["measure"]} == {"auc"}
    assert page["baselines"][0]["mean"] == 0.5


@pytest.mark.slow
def test_the_terminal_shows_the_metric_first(ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_table(tmp_path / "new.csv", 1, each=60)
    line = f"personalize {ran} --data {tmp_path / 'new.csv'} --out {tmp_path / 'new'}"
    assert main([*line.split(), "--personalize", "auto:steps=5,folds=2"]) == 0
    shown = capsys.readouterr().out
    for words in ("test AUC of each client's model", "client mean AUC", "accuracy %", "in AUC"):
        assert words in shown
    told = json.loads((tmp_path / "new" / "personalized.json").read_text())
    assert told["verdict"]["metric"] == "auc"
    page = page_of(tmp_path / "new" / "report.html")
    (group,) = page["groups"]
    for kind, method in (("global", "global"), ("personal", "recommended")):
        entry = told["methods"][method]
        assert group["final"][kind]["value"] == pytest.approx(entry["auc"], rel=1e-5)
        assert group["final"][kind]["worst"] == pytest.approx(entry["worst_decile"], rel=1e-5)


@pytest.mark.slow
def test_newcomers_levels_are_by_the_metric(ran: Path):
    finished = FinishedRun.open(ran)
    later = finished.run.parties()[1]
    assert later is not None
    levels = newcomer_curve(finished, later, HOW)
    assert {level.measure for level in levels} == {AUC}
    json.dumps([dataclasses.asdict(level) for level in levels], allow_nan=False)


def test_files_that_name_no_metric_there_is_are_refused(ran: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("newcomers.csv", "personalized.json"):
        file = ran / name
        before = file.read_text()
        file.write_text(before.replace("auc\n", "luck\n").replace('"metric": "auc"', '"metric": "luck"'))
        assert main(["report", str(ran), "-o", str(ran / "again.html")]) == 2
        assert "there is no metric 'luck'" in capsys.readouterr().err
        file.write_text(before)
