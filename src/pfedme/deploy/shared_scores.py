"""What a client whose owner allows it tells the server about the scores of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme.data.federation import Federation, Part
from pfedme.engine.evaluation import Evaluation
from pfedme.engine.metrics import Scores


def scores_told(evaluation: Evaluation, federation: Federation) -> dict[str, Any]:
    """Counts and sums over a client's rows, from which the server computes the record.

    For each model and part: `loss`, `rows` and the number of `right` ones; in a regression, `mean` and
    `spread` of the labels instead.
    """
    parts: dict[Part, dict[str, Scores]] = {"test": evaluation.test, "train": evaluation.train}
    return {
        "n_train": int(federation.n_train[0]),
        "n_test": int(federation.n_test[0]),
        "info": {name: float(values[0]) for name, values in evaluation.info.items()},
        **{
            part: {kind: _sums(scores, federation, part) for kind, scores in of.items()}
            for part, of in parts.items()
        },
    }  # fmt: skip


def _sums(scores: Scores, federation: Federation, part: Part) -> dict[str, Any]:
    told: dict[str, Any] = {"loss": float(scores.loss[0]), "rows": int(scores.count[0])}
    if scores.spread is None:
        return told | {"right": int(scores.correct[0])}
    start, count = (values[0] for values in federation.rows(part))
    labels = federation.y[start : start + count]
    return told | {"spread": float(scores.spread.own[0]), "mean": float(labels.mean()) if count else 0.0}


def pooled(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The scores of several clients as those of one with the rows of all; numbers about the computation are
    means over clients.

    >>> one, two = ({"rows": n, "loss": 1.5, "spread": 0.0, "mean": mean} for n, mean in ((1, 0.0), (3, 4.0)))
    >>> _pooled([one, two])
    {'loss': 3.0, 'rows': 4, 'spread': 12.0, 'mean': 3.0}
    """
    return {
        "n_train": sum(one["n_train"] for one in scores),
        "n_test": sum(one["n_test"] for one in scores),
        "info": {key: float(np.mean([one["info"][key] for one in scores])) for key in scores[0]["info"]},
        **{
            part: {kind: _pooled([one[part][kind] for one in scores]) for kind in scores[0][part]}
            for part in ("test", "train")
        },
    }


def _pooled(sums: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = {key: sum(one[key] for one in sums) for key in ("loss", "rows", "right") if key in sums[0]}
    if "right" in told:
        return told
    rows, mean = (np.array([one[key] for one in sums]) for key in ("rows", "mean"))
    whole = float(rows @ mean) / max(1, told["rows"])
    spread = sum(one["spread"] for one in sums) + float(rows @ (mean - whole) ** 2)
    return told | {"spread": spread, "mean": whole}
