"""What a client whose owner allows it tells the server about the scores of its models."""

from __future__ import annotations

from typing import Any

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
