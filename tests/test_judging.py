"""What models are judged by: the metrics of a run, the baseline, weights of classes, thresholds."""

import csv
import dataclasses
import json
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import federation, point
from oracles import softmax

import pfedme
from pfedme.algorithms import FedAvg
from pfedme.cli import main
from pfedme.core.models import Network
from pfedme.core.problem import Loss
from pfedme.data.federation import Federation
from pfedme.engine.baseline import baseline
from pfedme.engine.measure import MEASURES, measure_of, metric_for
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.export import Predictor, Threshold
from pfedme.report.tables import clearly_best, comparison_csv, rows
from pfedme.runs.run import Run, balanced_weights

SIZES = ((40, 20), (30, 0), (25, 9), (60, 33))


def two_classes(share: float = 0.3, sizes=SIZES) -> Federation:
    """A federation in which about this share of the rows is of class 0, which x tells something of."""
    fed = federation(sizes)
    rng = np.random.default_rng(1)
    y = (rng.random(len(fed.y)) >= share).astype(np.int32)
    x = (fed.x + y[:, None]).astype(np.float32)
    return dataclasses.replace(fed, x=x, y=y, classes=2)


def quantities() -> Federation:
    fed = federation(SIZES)
    return dataclasses.replace(fed, y=fed.x.sum(axis=1).astype(np.float32), classes=0)


def part(fed: Federation, i: int, of: str) -> slice:
    start, count = (a[i] for a in fed.rows(of))  # type: ignore[arg-type]
    return slice(start, start + count)


# --- In the record ------------------------------------------------------------------------------------


def test_metrics_of_an_evaluation_are_those_of_the_rows():
    """AUC over all pairs, Brier and recall by definition, of a global and of personal models."""
    fed, model = two_classes(), Network(features=3, classes=2)
    simulation = Simulation(FedAvg(eta=0.1, R=3), model, fed, cohort=4)
    state, _ = simulation.advance(simulation.start(), 3)
    evaluation, models = simulation.evaluate(state, rows=True)
    entry = evaluation.entry("auc", full=True)
    assert fed.positive == 0
    assert models.local is not None
    for kind, thetas in (("global", [state.server] * 4), ("local", [models.local[i] for i in range(4)])):
        p, y, own = [], [], []
        for i, theta in enumerate(thetas):
            here = part(fed, i, "test")
            (W, b), *_ = theta.tree
            p.append(softmax(fed.x[here] @ np.asarray(W, np.float64).T + np.asarray(b))[:, 0])
            y.append(fed.y[here] == 0)
            pairs = p[-1][y[-1]][:, None] - p[-1][~y[-1]]
            own.append(np.mean(pairs > 0) if pairs.size else np.nan)
        p, y = np.concatenate(p), np.concatenate(y)
        found = entry[kind]
        assert found["auc"] == pytest.approx(np.mean(p[y][:, None] > p[~y]))
        assert found["by_client"]["auc"]["mean"] == pytest.approx(np.nanmean(own))
        assert found["brier"] == pytest.approx(np.mean((p - y) ** 2), rel=1e-5)
        assert found["recall"] == pytest.approx(np.mean(p[y] > 0.5))
        assert found["log_loss"] == found["loss"]
        assert sum(bin["rows"] for bin in found["calibration"]) == len(y)
        np.testing.assert_allclose(evaluation.test[kind].of("auc"), own)


def test_keeping_rows_changes_no_score():
    fed = two_classes()
    simulation = Simulation(FedAvg(), Network(features=3, classes=2), fed, cohort=4)
    one, other = (simulation.evaluate(simulation.start(), rows=rows)[0] for rows in (True, False))
    for kind, test in one.test.items():
        np.testing.assert_array_equal(test.correct, other.test[kind].correct)
        np.testing.assert_allclose(test.loss, other.test[kind].loss, rtol=1e-6)
    assert "auc" not in other.entry("auc")["global"]


def test_auc_of_several_classes_is_computed_at_the_end_or_where_it_was_asked_for():
    fed = federation(SIZES)
    simulation = Simulation(FedAvg(), Network(features=3, classes=3), fed, cohort=4)
    evaluation, _ = simulation.evaluate(simulation.start(), rows=True)
    assert "auc" not in evaluation.entry("accuracy")["global"]
    assert "auc" in evaluation.entry("auc")["global"]
    assert evaluation.entry("accuracy", full=True)["global"]["auc"] == pytest.approx(
        evaluation.entry("auc")["global"]["auc"]
    )


def test_the_baseline_is_what_the_training_labels_alone_give():
    fed = two_classes()
    train, test = (np.concatenate([fed.y[part(fed, i, p)] for i in range(4)]) for p in ("train", "test"))
    share = np.bincount(train) / len(train)
    entry = baseline(fed)
    assert entry["label"] == str(np.argmax(share))
    assert entry["accuracy"] == pytest.approx(np.mean(test == np.argmax(share)))
    assert entry["log_loss"] == pytest.approx(-np.mean(np.log(share[test])))
    assert entry["brier"] == pytest.approx(np.mean((share[0] - (test == 0)) ** 2))
    assert entry["train_loss"] == pytest.approx(-np.sum(share * np.log(share)))
    assert entry["auc"] == 0.5
    assert entry["recall"] == 0
    assert entry["precision"] is None
    numbers = quantities()
    train, test = (
        np.concatenate([numbers.y[part(numbers, i, p)] for i in range(4)]) for p in ("train", "test")
    )
    entry = baseline(numbers)
    assert entry["label"] == pytest.approx(train.mean())
    assert entry["mae"] == pytest.approx(np.abs(test - train.mean()).mean())
    assert entry["r2"] == pytest.approx(1 - np.mean((test - train.mean()) ** 2) / np.var(test), abs=1e-6)


def test_a_class_that_nobody_trains_on_leaves_the_baseline_finite():
    fed = dataclasses.replace(two_classes(), classes=3)
    assert np.isfinite(baseline(fed)["log_loss"])


# --- The metric that is shown first -------------------------------------------------------------------


def test_a_rare_class_makes_auc_the_default_and_says_why():
    fed = two_classes(0.05, ((400, 40), (300, 40)))
    measure, why = metric_for(fed)
    share = 100 * fed.train_labels.min() / fed.train_labels.sum()
    assert measure.key == "auc"
    assert why == (
        f"Only {share:.1f} % of the rows have '0', so accuracy says little ({100 - share:.1f} % without "
        "learning anything); models are judged by AUC."
    )
    assert metric_for(fed, "f1") == (MEASURES["f1"], "")
    assert metric_for(two_classes())[0].key == metric_for(federation())[0].key == "accuracy"
    assert metric_for(quantities())[0].key == "r2"


@pytest.mark.parametrize("metric", ["auc", "accuracy", "mae", "r2", "nonsense"])
def test_a_metric_that_does_not_fit_is_refused_with_those_that_do(metric: str):
    fed = quantities() if metric in ("auc", "accuracy", "nonsense") else two_classes()
    with pytest.raises(InputError, match=f"--metric {metric} does not fit .*choose one of ") as refused:
        metric_for(fed, metric)
    fitting = str(refused.value).rpartition(" of ")[2].rstrip(".").split(", ")
    assert all(metric_for(fed, name)[0].key == name for name in fitting)


def final(metric: str, alone: float, joined: float) -> dict[str, list[dict]]:
    def entry(value: float) -> dict:
        by_client = {"mean": value, "std": 0.1, "worst_decile": value, "max": value, "min": value}
        usual = {"accuracy": 0.5, "rmse": 1.0, "clients": by_client, "by_client": {metric: by_client}}
        return usual | {metric: value}

    return {
        "alone": [{"round": 1, "metric": metric, "personal": entry(alone)}],
        "fedavg": [{"round": 1, "metric": metric, "global": entry(joined)}],
    }


@pytest.mark.parametrize("metric", list(MEASURES))
def test_every_metric_goes_through_the_tables(metric: str):
    results = final(metric, 0.25, 0.5)
    what = measure_of(results["alone"][0])
    assert what.key == metric
    assert rows(results)[1][1] == what.text(what.scale * 0.5)
    (alone, fedavg) = csv.DictReader(comparison_csv(results).splitlines())
    assert (alone["mean"], fedavg["mean"], alone["metric"]) == ("0.250000", "0.500000", metric)
    assert what.gain(0.5, 0.25) * (-1 if what.lower else 1) == 0.25


def test_a_mark_needs_a_difference_beyond_noise():
    rng = np.random.default_rng(0)
    base = rng.normal(size=50)
    better, same = base + 0.1 + rng.normal(0, 0.01, 50), base + rng.normal(0, 1, 50)
    assert clearly_best({"a": base, "b": better}) == "b"
    assert clearly_best({"a": base, "b": better}, lower=True) == "a"
    assert clearly_best({"a": base, "b": same}) is None
    assert clearly_best({"a": base}) is clearly_best({"a": base, "b": np.full(50, np.nan)}) is None


# --- Weights of classes -------------------------------------------------------------------------------


def test_the_weight_of_a_class_is_how_often_its_rows_are_repeated():
    """Loss and gradient with weights 3 and 1 (in the mean over the rows 1) are those with rows repeated."""
    fed = two_classes()
    theta = point(Network(features=3, classes=2), np.random.default_rng(0).normal(size=8).astype(np.float32))
    x, y = jnp.asarray(fed.x), jnp.asarray(fed.y)
    repeats = np.where(fed.y == 0, 3, 1)
    mean = repeats.mean()
    weighted = Network(features=3, classes=2, l2=0.1, class_weights=(3 / mean, 1 / mean))
    plain = Network(features=3, classes=2, l2=0.1)
    again = np.repeat(np.arange(len(fed.y)), repeats)
    one, other = Loss(weighted, x, y), Loss(plain, x[again], y[again])
    (loss, gradient), (want, slope) = (
        jax.jit(jax.value_and_grad(lambda theta, f=f: f(theta)))(theta) for f in (one, other)
    )
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(gradient.ravel(), slope.ravel(), rtol=1e-4, atol=1e-6)


def test_balanced_weights_give_each_class_the_same_say():
    fed = two_classes()
    weights, counts = np.array(balanced_weights(fed)), fed.train_labels
    assert weights[0] * counts[0] == pytest.approx(weights[1] * counts[1])
    assert (weights * counts).sum() == pytest.approx(counts.sum())
    with pytest.raises(InputError, match="--class-weights balanced is for classes"):
        balanced_weights(quantities())


def test_weights_are_for_training_and_not_for_judging():
    fed = two_classes()
    plain = Network(features=3, classes=2)
    weighted = dataclasses.replace(plain, class_weights=balanced_weights(fed))
    one, other = (Simulation(FedAvg(eta=0.1), m, fed, cohort=4) for m in (plain, weighted))
    start = one.start()
    assert one.evaluate(start)[0].entry()["global"] == other.evaluate(start)[0].entry()["global"]
    (w, _), (v, _) = one.advance(start, 3), other.advance(start, 3)
    assert float(jnp.abs(w.server.ravel() - v.server.ravel()).max()) > 1e-3


# --- A threshold, from validation rows to predictions -------------------------------------------------


def test_a_threshold_is_kept_in_the_export_and_used_to_predict(tmp_path: Path):
    model = Network(features=1, classes=2)
    theta = model.init(jax.random.key(0)).like(jnp.array([-1.0, 1.0, 0.0, 0.0]))
    predictor = Predictor(model, theta, threshold=Threshold("1", 0.2))
    x = np.array([[-2.0], [-0.6], [0.0], [1.0]])
    p = predictor.probabilities(x)[:, 1]
    assert predictor.predict(x).tolist() == ["1" if v >= 0.2 else "0" for v in p] == ["0", "1", "1", "1"]
    predictor.save(tmp_path / "model")
    again = pfedme.load(tmp_path / "model")
    assert again.threshold == predictor.threshold
    assert again.predict(x).tolist() == predictor.predict(x).tolist()
    np.testing.assert_array_equal(again.probabilities(x), predictor.probabilities(x))
    document = json.loads((tmp_path / "model/model.json").read_text())
    assert document["threshold"] == {"class": "1", "value": 0.2}
    (tmp_path / "model/model.json").write_text(
        json.dumps(document | {"threshold": {"class": "x", "value": 0.2}})
    )
    with pytest.raises(InputError, match=r"damaged .*does not fit the labels"):
        pfedme.load(tmp_path / "model")


def test_thresholds_come_from_the_rows_of_an_evaluation():
    fed = two_classes().hold_out(0, 4)
    simulation = Simulation(FedAvg(eta=0.1), Network(features=3, classes=2), fed, cohort=4)
    state, _ = simulation.advance(simulation.start(), 5)
    judged, _ = simulation.evaluate(state, on="validation", train=False, rows=True)
    thresholds = judged.thresholds()
    rows = judged.test["global"].rows
    assert rows is not None
    at = judged.entry(thresholds=thresholds)["global"]["at_threshold"]
    assert at["threshold"] == thresholds["global"]
    assert at["f1"] >= (rows.value("f1").overall or 0)


# --- From the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals in which one of sixteen patients has the outcome."""
    rng = np.random.default_rng(0)
    lines = ["hospital,age,pressure,outcome"]
    for name in ("north", "south", "west"):
        for k in range(96):
            sick = k % 16 == 0
            age, pressure = rng.normal(50 + 20 * sick, 10), rng.normal(120, 10)
            lines.append(f"{name},{age:.1f},{pressure:.0f},{'yes' if sick else 'no'}")
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_run_on_a_rare_outcome_says_so_and_keeps_every_metric(
    patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    line = f"run fedavg --data {patients} --client hospital --label outcome --rounds 2 --out {out}"
    assert main(shlex.split(line + " --class-weights balanced")) == 0
    assert "have 'yes', so accuracy says little" in capsys.readouterr().out.replace("\n", " ")
    record = json.loads((out / "record.json").read_text())
    assert record["metric"]["key"] == "auc"
    assert record["metric"]["positive"] == "yes"
    assert record["config"]["class_weights"] == "balanced"
    assert "metric" not in record["config"]
    assert "--class-weights balanced" in record["command"]
    assert Run.from_json(record["config"]).to_json() == record["config"]
    final = record["final"]
    assert final["baseline"]["label"] == "no"
    assert final["baseline"]["auc"] == 0.5
    assert {"auc", "recall", "precision", "f1", "brier", "balanced_accuracy"} <= set(final["global"])
    with (out / "clients.csv").open(newline="") as file:
        own = [float(row["global_auc"]) for row in csv.DictReader(file)]
    assert final["global"]["by_client"]["auc"]["mean"] == pytest.approx(np.mean(own))
    assert main(shlex.split(line + "2 --metric rmse")) == 2
    assert "choose one of accuracy, balanced_accuracy, auc" in capsys.readouterr().err
