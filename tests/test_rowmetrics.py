"""Metrics of single predictions against loops over all pairs and over all rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedme.engine.rowmetrics import CLASS_KEYS, ClassRows, NumberRows, auc, best_threshold

few = settings(derandomize=True, deadline=None, max_examples=60)
KEYS = ("accuracy", "log_loss", *CLASS_KEYS)


def softmax(scores):
    odds = np.exp(scores - scores.max())
    return odds / odds.sum()


def area(score, positive):
    """AUC over all pairs; None without one."""
    pairs = list(itertools.product(score[positive], score[~positive]))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else None


def mean(values):
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def by_definition(scores, y, positive):
    """Every metric, by its definition, a row at a time."""
    classes = scores.shape[1]
    judged = [positive] if classes == 2 else range(classes)
    p = [softmax(row) for row in scores.astype(np.float64)]
    guess = [int(np.argmax(row)) for row in scores]
    one = {"recall": {}, "precision": {}, "f1": {}, "auc": {}}
    for k in range(classes):
        tp = sum(g == k and t == k for g, t in zip(guess, y, strict=True))
        said, there = guess.count(k), int((y == k).sum())
        one["recall"][k] = tp / there if there else None
        one["precision"][k] = tp / said if said else None
        one["f1"][k] = 2 * tp / (said + there) if said + there else None
        one["auc"][k] = area(np.array([row[k] for row in p]), y == k)
    found = {name: mean([values[k] for k in judged]) for name, values in one.items()}
    occurring = len(set(y.tolist()))
    found["balanced_accuracy"] = mean(one["recall"].values()) if occurring > 1 else None
    squares = [
        (row[positive] - (t == positive)) ** 2
        if classes == 2
        else sum((row[k] - (t == k)) ** 2 for k in range(classes))
        for row, t in zip(p, y, strict=True)
    ]
    found["brier"] = mean(squares)
    found["accuracy"] = mean([float(g == t) for g, t in zip(guess, y, strict=True)])
    found["log_loss"] = mean([-np.log(row[t]) for row, t in zip(p, y, strict=True)])
    return found


def drawn(seed, classes, clients, rows):
    """Rows of clients, in the order of no client, with the scores of a few, so that many are tied."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(6, classes)).astype(np.float32)[rng.integers(0, 6, rows)]
    return ClassRows(
        scores, rng.integers(0, classes, rows), owner=rng.integers(0, clients, rows), clients=clients,
        positive=int(rng.integers(0, 2)),
    )  # fmt: skip


@few
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4]), st.integers(1, 6), st.integers(0, 25))
def test_every_metric_is_what_its_definition_says_over_all_rows_and_for_each_client(seed, classes, n, rows):
    drawn_rows = drawn(seed, classes, n, rows)
    for key in KEYS:
        got = drawn_rows.value(key)
        groups = [(got.overall, np.ones(rows, bool))]
        groups += [(got.own[i], drawn_rows.owner == i) for i in range(n)]
        for number, mask in groups:
            want = by_definition(drawn_rows.scores[mask], drawn_rows.y[mask], drawn_rows.positive)[key]
            if want is None:
                assert number is None or np.isnan(number), key
            else:
                assert number == pytest.approx(want, rel=1e-6, abs=1e-9), key


@few
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_auc_does_not_change_with_any_increasing_function_of_the_scores(seed, rows):
    rng = np.random.default_rng(seed)
    score, positive, owner = rng.normal(size=rows), rng.random(rows) < 0.4, rng.integers(0, 3, rows)
    one, other = (auc(f(score), positive, owner, 3)[0] for f in (np.exp, lambda s: 5 * s - 1))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("key", KEYS)
def test_the_interval_is_as_wide_as_the_metric_varies_over_samples(key, classes):
    """1.96 standard deviations over 400 samples of rows, to a fifth."""
    rng, rows = np.random.default_rng(0), 400
    found, widths = [], []
    for _ in range(400):
        y = np.minimum((rng.random(rows) * 4).astype(int), classes - 1)
        scores = rng.normal(size=(rows, classes)) + 1.2 * np.eye(classes)[y]
        value = ClassRows(scores, y, np.zeros(rows, int), 1, positive=0).value(key)
        found.append(value.overall)
        widths.append(value.half_width)
    np.testing.assert_allclose(np.mean(widths), 1.96 * np.std(found), rtol=0.2)


def test_rows_that_were_predicted_by_their_true_probability_are_calibrated():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.01, 0.4, 40_000)
    rows = ClassRows(
        np.stack([np.log(1 - p), np.log(p)], axis=1), (rng.random(len(p)) < p).astype(int),
        np.zeros(len(p), int), 1, positive=1,
    )  # fmt: skip
    curve = rows.calibration()
    assert len(curve) == 10
    assert sum(bin["rows"] for bin in curve) == len(p)
    assert [bin["predicted"] for bin in curve] == sorted(bin["predicted"] for bin in curve)
    for bin in curve:
        assert abs(bin["observed"] - bin["predicted"]) < 4 * np.sqrt(0.25 / bin["rows"])
    alike = ClassRows(np.zeros((7, 2)), np.array([1, 0, 0, 0, 0, 0, 0]), np.zeros(7, int), 1, positive=1)
    assert alike.calibration() == [{"predicted": 0.5, "observed": 1 / 7, "rows": 7}]


@few
@given(st.integers(0, 10**6), st.integers(1, 25))
def test_the_best_threshold_is_the_best_of_all(seed, rows):
    rng = np.random.default_rng(seed)
    p, y = rng.integers(1, 10, rows) / 10, rng.random(rows) < 0.3

    def f1(threshold):
        said = p >= threshold
        return 2 * (said & y).sum() / max(1, said.sum() + y.sum())

    chosen = best_threshold(p, y)
    assert f1(chosen) == max(f1(t) for t in (*p, 0.5, 2.0)) or not y.any()
    assert 0 < chosen < 1
    assert y.any() or chosen == 0.5


def test_errors_of_a_regression_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    y, owner = rng.normal(3, 2, 60), rng.integers(0, 5, 60)
    y[owner == 2] = 0.1
    error = rng.normal(size=60)
    rows = NumberRows(error, y, owner, 6)
    for i in range(-1, 6):
        mask = np.ones(60, bool) if i < 0 else owner == i
        e, own = error[mask], y[mask]
        want = {}
        if len(e):
            spread = np.sum((own - own.mean()) ** 2)
            alike = len(set(own.tolist())) == 1
            want = {"mae": np.mean(np.abs(e)), "rmse": np.sqrt(np.mean(e**2))}
            want["r2"] = np.nan if alike else 1 - np.sum(e**2) / spread
        for key in ("mae", "rmse", "r2"):
            value = rows.value(key)
            number = value.overall if i < 0 else value.own[i]
            assert number == pytest.approx(want.get(key, np.nan), rel=1e-9, nan_ok=True)
    nothing = NumberRows(np.zeros(0), np.zeros(0), np.zeros(0, int), 2)
    assert all(nothing.value(key).overall is None for key in ("mae", "rmse", "r2"))
