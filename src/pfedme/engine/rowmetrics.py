"""Metrics of individual predictions: AUC, recall, precision, F1, Brier score, calibration, mean absolute
error.

Each is computed over all rows and for all clients at once, without a loop over clients. docs/metrics.md has
the formulas. The interval of a metric over all rows comes from its influence values: v_i is the influence of
row i on the metric, and the standard error is the square root of Σ v_i² / n². For AUC this is DeLong's.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

CLASS_KEYS = ("auc", "balanced_accuracy", "recall", "precision", "f1", "brier")
"""The metrics that `ClassRows` adds to accuracy and log loss."""
MOST_SCORES = 2**25
"""Limit on the scores (rows times classes) that are kept for these metrics; larger evaluations omit them."""
BINS = 10
"""Points of a calibration curve."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A metric over all rows and for each client."""

    overall: float | None
    """None where it is undefined."""
    half_width: float | None
    """Half-width of its 95 % interval, for test rows redrawn from the same clients."""
    own: np.ndarray
    """Its value for each client, NaN where it is undefined."""


def value(overall: float, influence: np.ndarray, own: np.ndarray) -> Value:
    """A metric with the interval from its influence values."""
    if np.isnan(overall):
        return Value(None, None, own)
    return Value(float(overall), float(1.96 * np.sqrt(np.sum(influence**2)) / len(influence)), own)


@dataclasses.dataclass(frozen=True)
class ClassRows:
    """The output of a classifier for each row.

    >>> rows = ClassRows(np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), np.array([0, 1, 1]),
    ...                  owner=np.array([0, 0, 1]), clients=2, positive=1)
    >>> rows.value("auc").overall, rows.value("recall").own
    (0.5, array([1., 0.]))
    """

    scores: np.ndarray
    """Logits, a row for each row and a column for each class."""
    y: np.ndarray
    owner: np.ndarray
    """The client of each row."""
    clients: int
    positive: int
    """The class that recall and similar metrics refer to if there are two; with several, they are macro
    means."""
    threshold: float | None = None
    """With two classes, the least probability for which a row counts as positive; 0.5 if None."""

    def value(self, key: str) -> Value:
        """The metric of this name."""
        return getattr(self, f"_{key}")()

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self.scores.shape[1]

    @cached_property
    def guess(self) -> np.ndarray:
        """The predicted class of each row."""
        if self.threshold is not None:
            above = self.probability(self.positive) >= self.threshold
            return np.where(above, self.positive, 1 - self.positive)
        return np.argmax(self.scores, axis=1)

    def best_threshold(self) -> float:
        """The threshold for the positive one of two classes with the largest F1 on these rows."""
        return best_threshold(self.probability(self.positive), self.y == self.positive)

    def log_odds(self, k: int) -> np.ndarray:
        """A number that increases with the probability of class k, without ties for probabilities near 1."""
        if self.classes == 2:
            return self.scores[:, k] - self.scores[:, 1 - k]
        return self.scores[:, k] - self._log_total

    def probability(self, k: int) -> np.ndarray:
        """The probability of class k in each row."""
        return np.exp(self.scores[:, k] - self._log_total)

    @cached_property
    def _log_total(self) -> np.ndarray:
        scores = self.scores.astype(np.float64)
        top = scores.max(axis=1)
        return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))

    @property
    def losses(self) -> np.ndarray:
        """−log of the probability of each row's label."""
        return self._log_total - self.scores[np.arange(len(self.y)), self.y]

    @property
    def judged(self) -> range:
        """The classes that recall and similar metrics average over."""
        return range(self.positive, self.positive + 1) if self.classes == 2 else range(self.classes)

    def counts(self, which: np.ndarray, of: np.ndarray | slice = slice(None)) -> np.ndarray:
        """How often each class (column) occurs in `which`, the labels or the predictions, of each client
        (row)."""
        cell = self.owner[of].astype(np.int64) * self.classes + which[of]
        return np.bincount(cell, minlength=self.clients * self.classes).reshape(self.clients, self.classes)

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, predictions and correct predictions of each class, one row for each client."""
        return (
            self.counts(self.y),
            self.counts(self.guess),
            self.counts(self.y, np.flatnonzero(self.y == self.guess)),
        )

    def _accuracy(self) -> Value:
        right = (self.guess == self.y).astype(np.float64)
        return self._mean(right)

    def _log_loss(self) -> Value:
        return self._mean(self.losses)

    def _brier(self) -> Value:
        if self.classes == 2:
            return self._mean((self.probability(self.positive) - (self.y == self.positive)) ** 2)
        squares = np.zeros(len(self.y))
        for k in range(self.classes):
            squares += (self.probability(k) - (self.y == k)) ** 2
        return self._mean(squares)

    def _mean(self, values: np.ndarray) -> Value:
        return mean_of(values, self.owner, self.clients)

    def _recall(self) -> Value:
        has, _, right = self._counts
        return self._ratio(has, right, self.y, self._macro(_ratio(right, has)))

    def _precision(self) -> Value:
        _, guessed, right = self._counts
        return self._ratio(guessed, right, self.guess, self._macro(_ratio(right, guessed)))

    def _balanced_accuracy(self) -> Value:
        has, _, right = self._counts
        own = np.where((has > 0).sum(axis=1) > 1, _mean_of_defined(_ratio(right, has)), np.nan)
        found = self._ratio(has, right, self.y, own, range(self.classes))
        return found if (has.sum(axis=0) > 0).sum() > 1 else Value(None, None, own)

    def _ratio(
        self,
        count: np.ndarray,
        right: np.ndarray,
        by: np.ndarray,
        own: np.ndarray,
        judged: range | None = None,
    ) -> Value:
        """Correct predictions over `count`, class by class: the rows of a class by label or by prediction."""
        whole, weight = self._weights(_ratio(right.sum(axis=0), count.sum(axis=0)), judged)
        per_row = weight * _ratio(len(by), count.sum(axis=0))
        influence = (np.nan_to_num(per_row)[by]) * ((self.guess == self.y) - np.nan_to_num(whole)[by])
        return value(_mean_of_defined(whole[weight > 0]), influence, own)

    def _f1(self) -> Value:
        has, guessed, right = self._counts
        both = has + guessed
        whole, weight = self._weights(_ratio(2 * right.sum(axis=0), both.sum(axis=0)))
        per_row = np.nan_to_num(weight * _ratio(len(self.y), both.sum(axis=0)))
        f = np.nan_to_num(whole)
        influence = (
            2 * (self.guess == self.y) * per_row[self.y] - (f * per_row)[self.y] - (f * per_row)[self.guess]
        )
        return value(_mean_of_defined(whole[weight > 0]), influence, self._macro(_ratio(2 * right, both)))

    def _auc(self) -> Value:
        one = np.zeros(len(self.y), np.int64)
        own, whole = np.full((self.clients, self.classes), np.nan), np.full(self.classes, np.nan)
        influences = np.zeros((len(self.judged), len(self.y)), np.float32)
        for place, k in enumerate(self.judged):
            score, positive = self.log_odds(k), self.y == k
            own[:, k], _ = auc(score, positive, self.owner, self.clients)
            (whole[k],), ahead = auc(score, positive, one, 1)
            if not np.isnan(whole[k]):
                share = np.where(positive, positive.mean(), 1 - positive.mean())
                influences[place] = (ahead - whole[k]) / share
        whole, weight = self._weights(whole)
        influence = weight[list(self.judged)] @ influences
        return value(_mean_of_defined(whole[weight > 0]), influence, self._macro(own))

    def _weights(self, whole: np.ndarray, judged: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A metric of each class, and the weight of each class in its mean over the classes where it is
        defined."""
        weight = np.zeros(self.classes)
        weight[list(judged or self.judged)] = 1
        weight *= ~np.isnan(whole)
        return whole, weight / max(1.0, weight.sum())

    def _macro(self, own: np.ndarray) -> np.ndarray:
        """Each client's mean over the classes in `judged`, where defined."""
        return _mean_of_defined(own[:, list(self.judged)])

    def calibration(self, bins: int = BINS) -> list[dict[str, Any]]:
        """How often predictions with a certain probability came true, over all rows.

        The rows are divided into groups of about the same size by probability: that of the positive class,
        or of the predicted class if there are several. Rows with equal probability stay together.
        """
        if not len(self.y):
            return []
        if self.classes == 2:
            predicted, true = self.probability(self.positive), self.y == self.positive
        else:
            predicted = np.exp(self.scores.max(axis=1) - self._log_total)
            true = self.guess == self.y
        edges = np.unique(np.quantile(predicted, np.arange(1, bins) / bins))
        place = np.searchsorted(edges, predicted, side="right")
        count = np.bincount(place, minlength=len(edges) + 1)
        sums = [np.bincount(place, v, len(count)) for v in (predicted, true)]
        return [
            {"predicted": float(p / n), "observed": float(o / n), "rows": int(n)}
            for p, o, n in zip(*sums, count, strict=True)
            if n
        ]


@dataclasses.dataclass(frozen=True)
class NumberRows:
    """The error of a regression in each row, in the original units of the data."""

    error: np.ndarray
    y: np.ndarray
    owner: np.ndarray
    clients: int

    def value(self, key: str) -> Value:
        """The metric of this name: `mae`, `rmse` or `r2`."""
        if key == "mae":
            return mean_of(np.abs(self.error), self.owner, self.clients)
        squares = mean_of(self.error**2, self.owner, self.clients)
        if squares.overall is None:
            return squares
        if key == "rmse":
            root = squares.overall**0.5
            influence = (self.error**2 - squares.overall) / (2 * root) if root else np.zeros(len(self.y))
            return value(root, influence, np.sqrt(squares.own))
        return self._r2(squares)

    def _r2(self, squares: Value) -> Value:
        assert squares.overall is not None
        away = (self.y - self.y.mean()) ** 2
        count = np.maximum(np.bincount(self.owner, minlength=self.clients), 1)
        mean = (np.bincount(self.owner, self.y, self.clients) / count)[self.owner]
        # Equal labels must not get a nonzero sum of squares from rounding.
        low, high = (np.full(self.clients, v) for v in (np.inf, -np.inf))
        np.minimum.at(low, self.owner, self.y)
        np.maximum.at(high, self.owner, self.y)
        spread = np.where(high > low, np.bincount(self.owner, (self.y - mean) ** 2, self.clients), 0)
        own = 1 - _ratio(count * squares.own, spread)
        if not np.ptp(self.y):
            return Value(None, None, own)
        left = squares.overall / away.mean()
        return value(1 - left, (left * away - self.error**2) / away.mean(), own)


def mean_of(values: np.ndarray, owner: np.ndarray, clients: int) -> Value:
    """The mean of one number per row, over all rows and over those of each client."""
    own = _ratio(np.bincount(owner, values, clients), np.bincount(owner, minlength=clients))
    if not len(values):
        return Value(None, None, own)
    mean = values.mean()
    return value(float(mean), values - mean, own)


def auc(
    score: np.ndarray, positive: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each client's area under the ROC curve, NaN if its rows are of one kind; and for each row the share of
    the client's rows of the other kind that it is ranked correctly against, with ties counting half.

    The area is the mean of these shares over the positive rows: the probability that a positive row scores
    higher than a negative one.

    >>> auc(np.array([1, 2, 2, 3]), np.array([False, True, False, True]), np.array([0, 0, 0, 0]), 1)
    (array([0.875]), array([1.  , 0.75, 0.75, 1.  ]))
    """
    order = np.lexsort((score, owner))
    s, mine, yes = score[order], owner[order], positive[order].astype(np.float64)
    new = np.ones(len(s), bool)
    new[1:] = (s[1:] != s[:-1]) | (mine[1:] != mine[:-1])
    first = np.flatnonzero(new)
    tie = np.cumsum(new) - 1  # the run of equal scores that a row is in
    last = np.append(first[1:], len(s))
    count = np.bincount(owner, minlength=clients)
    begin = np.cumsum(count) - count
    shares = []
    for kind in (1 - yes, yes):
        before = np.concatenate([[0.0], np.cumsum(kind)])
        total = np.bincount(mine, kind, clients)
        below = ((before[first] + before[last]) / 2)[tie] - before[begin][mine]
        shares.append((below, total))
    (negative_below, negatives), (positive_below, positives) = shares
    area = _ratio(np.bincount(mine, yes * negative_below, clients), positives * negatives)
    ahead = np.empty(len(s))
    ahead[order] = np.where(
        yes > 0,
        np.nan_to_num(_ratio(negative_below, negatives[mine])),
        np.nan_to_num(_ratio(positives[mine] - positive_below, positives[mine])),
    )
    return area, ahead


def best_threshold(probability: np.ndarray, y: np.ndarray) -> float:
    """The probability threshold for the positive class that maximises F1 on these rows.

    `y` says which rows are positive. The threshold is halfway between two probabilities that occur; the
    highest of several that do equally well. Without a positive row it is 0.5.

    >>> best_threshold(np.array([0.1, 0.2, 0.3, 0.4]), np.array([False, False, True, True]))
    0.25
    """
    y = np.asarray(y, bool)
    if not y.any():
        return 0.5
    order = np.argsort(-np.asarray(probability, np.float64), kind="stable")
    p, right = np.asarray(probability, np.float64)[order], np.cumsum(y[order])
    end = np.flatnonzero(np.append(p[1:] != p[:-1], True))  # where a run of equal probabilities ends
    f1 = 2 * right[end] / (end + 1 + right[-1])
    at = end[np.argmax(f1)]
    return float((p[at] + p[at + 1]) / 2) if at + 1 < len(p) else float(p[at] / 2)


def _ratio(a: Any, b: Any) -> np.ndarray:
    """a / b, NaN where b is 0."""
    b = np.asarray(b, np.float64)
    return np.where(b > 0, a / np.where(b > 0, b, 1), np.nan)


def _mean_of_defined(values: np.ndarray) -> Any:
    """The mean along the last axis, ignoring NaN; NaN if nothing is left."""
    there = ~np.isnan(values)
    return _ratio(np.where(there, values, 0).sum(axis=-1), there.sum(axis=-1))
