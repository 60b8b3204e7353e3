"""scikit-learn on the rows of a federation: a model for each client, one for all rows, and no model at all.

Strengths are chosen by cross-validation on training rows: logistic regression by log loss, ridge regression
by RidgeCV. Both sides of the comparison are measured by `measure`, from predictions for the test rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold, StratifiedKFold

from pfedme.data.federation import Federation, Part

STRENGTHS = 10.0 ** np.arange(-4, 3)
"""C of logistic regression."""
ALPHAS = 10.0 ** np.arange(-2, 5.5, 0.5)
"""α of ridge regression."""
FOLDS = 5
FEWEST = 5
"""A client with fewer training rows predicts the shares of its classes, or its mean."""


def rows_of(federation: Federation, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and owners of the rows of a part, one client after the other."""
    start, count = federation.rows(part)
    place = np.concatenate([np.arange(s, s + c) for s, c in zip(start, count, strict=True)])
    owner = np.repeat(np.arange(federation.clients), count)
    return federation.x[place].reshape(len(place), -1), federation.y[place], owner


def references(federation: Federation) -> dict[str, np.ndarray]:
    """Predictions for all test rows by `per client`, `pooled` and `majority`; of classes, probabilities."""
    x, y, owner = rows_of(federation, "train")
    new, _, new_owner = rows_of(federation, "test")
    fit = _ridge if federation.classes == 0 else _logistic
    per_client = [
        fit(x[owner == i], y[owner == i], new[new_owner == i], federation.classes)
        for i in range(federation.clients)
    ]
    return {
        "per client": np.concatenate(per_client),
        "pooled": fit(x, y, new, federation.classes),
        "majority": _constant(y, len(new), federation.classes),
    }


def with_client_column(federation: Federation) -> np.ndarray:
    """Predictions for all test rows by one model for all rows that is told whose row it is."""
    (x, y, owner), (new, _, new_owner) = rows_of(federation, "train"), rows_of(federation, "test")
    told = np.eye(federation.clients, dtype=np.float32)
    fit = _ridge if federation.classes == 0 else _logistic
    return fit(np.hstack([x, told[owner]]), y, np.hstack([new, told[new_owner]]), federation.classes)


def _constant(y: np.ndarray, rows: int, classes: int) -> np.ndarray:
    """The classes' smoothed shares, or the mean, for each of so many rows."""
    if classes == 0:
        return np.full(rows, y.mean() if len(y) else 0.0)
    share = (np.bincount(y, minlength=classes) + 0.5) / (len(y) + 0.5 * classes)
    return np.tile(share, (rows, 1))


def _ridge(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: int) -> np.ndarray:
    if len(y) < FEWEST or not len(new):
        return _constant(y, len(new), classes)
    return RidgeCV(ALPHAS).fit(x.astype(float), y.astype(float)).predict(new.astype(float))


def _logistic(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: int) -> np.ndarray:
    counts = np.bincount(y, minlength=classes)
    if len(y) < FEWEST or np.count_nonzero(counts) < 2 or not len(new):
        return _constant(y, len(new), classes)
    least = counts[counts > 0].min()
    folds = (
        StratifiedKFold(min(FOLDS, int(least)), shuffle=True, random_state=0)
        if least > 1
        else KFold(FOLDS, shuffle=True, random_state=0)
    )
    losses = np.zeros(len(STRENGTHS))
    for train, held in folds.split(x, y):
        for k, p in enumerate(_path(x[train], y[train], x[held], classes)):
            losses[k] -= np.log(p[np.arange(len(held)), y[held]]).sum()
    best = int(np.argmin(losses))
    *_, p = _path(x, y, new, classes, STRENGTHS[: best + 1])
    return p


def _path(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: int, strengths: np.ndarray = STRENGTHS
) -> Iterator[np.ndarray]:
    """Probabilities for new rows by each strength, each fit begun where the one before it ended.

    A class that no row has gets the probability 1/(2n); every other one at least 1e-7.
    """
    known = np.unique(y)
    if len(known) < 2:
        yield from (_constant(y, len(new), classes) for _ in strengths)
        return
    model = LogisticRegression(max_iter=2000, warm_start=True)
    for C in strengths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.set_params(C=C).fit(x, y)
        p = np.full((len(new), classes), 1 / (2 * len(y)))
        p[:, known] = model.predict_proba(new).clip(1e-7)
        yield p / p.sum(axis=1, keepdims=True)


def measure(p: np.ndarray, federation: Federation) -> dict[str, Any]:
    """The metrics of predictions for all test rows, over all rows; `clients` has means over clients.

    With two classes, AUC, recall and Brier score are those of the class that is rarer in training rows; with
    more, AUC is the mean over classes of one against the rest, and the Brier score the sum over classes.
    """
    _, y, owner = rows_of(federation, "test")
    if federation.classes == 0:
        unit = federation.label_unit
        error = (p - y) ** 2
        r2 = 1 - error.sum() / ((y - y.mean()) ** 2).sum()
        return {"r2": float(r2), "rmse": float(unit * np.sqrt(error.mean()))}
    right = p.argmax(axis=1) == y
    hot = np.eye(federation.classes)[y]
    counts = np.bincount(rows_of(federation, "train")[1], minlength=federation.classes)
    rare = [int(counts.argmin())] if federation.classes == 2 else range(federation.classes)
    brier = ((p - hot)[:, rare] ** 2).sum(axis=1)
    own = [auc for i in range(federation.clients) if (auc := _auc(p[owner == i], hot[owner == i], rare))]
    result = {
        "accuracy": float(right.mean()),
        "log_loss": float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-15)).mean()),
        "auc": _auc(p, hot, rare),
        "brier": float(brier.mean()),
        "recall": float(np.mean([right[y == c].mean() for c in rare if (y == c).any()])),
        "clients": {"auc": float(np.mean(own)) if own else None, "auc_of": len(own)},
    }
    return (
        {**result, "calibration": calibration(p[:, rare[0]], hot[:, rare[0]])} if len(rare) == 1 else result
    )


def _auc(p: np.ndarray, hot: np.ndarray, classes: Any) -> float | None:
    """The mean over classes of the area under the curve, of those that both occur and do not."""
    both = [c for c in classes if 0 < hot[:, c].sum() < len(hot)]
    return float(np.mean([roc_auc_score(hot[:, c], p[:, c]) for c in both])) if both else None


def calibration(p: np.ndarray, happened: np.ndarray, groups: int = 10) -> list[dict[str, float]]:
    """Rows in equal groups by predicted probability: how many, mean `predicted`, and `observed` share."""
    return [
        {"rows": len(g), "predicted": float(p[g].mean()), "observed": float(happened[g].mean())}
        for g in np.array_split(np.argsort(p, kind="stable"), groups)
        if len(g)
    ]
