"""The baseline without learning: the same answer for every row, from the labels of the training rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedme.data.federation import Federation, Part
from pfedme.engine.metrics import Blocks, Scores, Spread, summary
from pfedme.engine.rowmetrics import MOST_SCORES, ClassRows, NumberRows


def baseline(federation: Federation, who: np.ndarray | None = None) -> dict[str, Any]:
    """The record's entry for a model that predicts the most frequent class of all clients' training rows for
    every row, with the class frequencies as probabilities; or the mean of their labels.

    A class without training rows has the probability of half a row, so that the loss is finite. `label` is
    the class, or the mean in the original units of the data. `who` are the clients that are tested.
    """
    f = federation
    who = np.arange(f.clients) if who is None else who
    if f.classes:
        answer = np.log(np.maximum(f.train_labels, 0.5) / f.train_labels.sum())
        label: str | float = f.label_name(int(np.argmax(answer)))
    else:
        y = f.y[Blocks.cut(*f.rows("train")).rows()].astype(np.float64)
        answer = np.array([y.mean()])
        label = float(f.label_unit * y.mean() + (f.schema.label_mean if f.schema else 0.0))
    test, train = (_scores(f, answer, who, part) for part in ("test", "train"))
    return {"label": label, **summary(test, train, full=True)}


def _scores(f: Federation, answer: np.ndarray, who: np.ndarray, part: Part) -> Scores:
    """The scores of a model that gives every row the same answer, logits or a number."""
    blocks = Blocks.cut(*(a[who] for a in f.rows(part)))
    y, owner, clients = f.y[blocks.rows()], blocks.owner(), len(who)
    count = np.bincount(owner, minlength=clients)
    keep = part == "test" and len(y) * max(1, f.classes) <= MOST_SCORES
    if f.classes:
        right = np.bincount(owner, y == np.argmax(answer), clients)
        loss = np.bincount(owner, -answer[y], clients)
        every = np.broadcast_to(answer, (len(y), f.classes))
        rows = ClassRows(every, y, owner, clients, f.positive) if keep else None
        return Scores(right, loss, count, rows=rows)
    spread = Spread.of(f.y, blocks, clients, f.label_unit)
    y = y.astype(np.float64)
    error = answer[0] - y
    rows = NumberRows(f.label_unit * error, f.label_unit * y, owner, clients) if keep else None
    return Scores(np.full(clients, np.nan), np.bincount(owner, error**2 / 2, clients), count, spread, rows)
