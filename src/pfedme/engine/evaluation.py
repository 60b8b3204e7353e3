"""The scores of all models after a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from pfedme.engine.metrics import Scores, summary
from pfedme.engine.rowmetrics import ClassRows


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of each existing model, `global`, `local` and `personal`, on test (or validation) rows and on
    training rows."""

    round: int
    clients: np.ndarray
    """The clients that were evaluated, by index in the federation."""
    test: dict[str, Scores]
    train: dict[str, Scores]
    """Empty if training rows were left out."""
    info: dict[str, np.ndarray]

    def entry(
        self, metric: str = "", *, full: bool = False, thresholds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """This evaluation as an entry of the record's history, with the main metric `metric`; `full` at the
        end of a run. `thresholds` has the thresholds of models that have one."""
        entry: dict[str, Any] = {"round": self.round} | ({"metric": metric} if metric else {})
        entry |= {
            kind: summary(
                test, self.train.get(kind), metric=metric, full=full, threshold=(thresholds or {}).get(kind)
            )
            for kind, test in self.test.items()
        }
        if "inner_residual" in self.info:
            entry["inner"] = {
                "residual": float(self.info["inner_residual"].mean()),
                "residual_max": float(self.info["inner_residual"].max()),
                "steps": float(self.info["inner_steps"].mean()),
            }
        other = {name: values for name, values in self.info.items() if not name.startswith("inner_")}
        if other:
            entry["info"] = {
                name: {"mean": float(values.mean()), "max": float(values.max())}
                for name, values in other.items()
            }
        return entry

    def thresholds(self) -> dict[str, float]:
        """For two classes, each model's best threshold for the rarer class on the rows of this evaluation,
        which should be validation rows; empty if rows were not kept."""
        kept = {kind: test.rows for kind, test in self.test.items()}
        return {
            kind: rows.best_threshold()
            for kind, rows in kept.items()
            if isinstance(rows, ClassRows) and rows.classes == 2
        }

    @property
    def finite(self) -> bool:
        """Whether every loss, and every number about the computation, is finite."""
        losses = [s.loss for s in (*self.test.values(), *self.train.values())]
        return all(np.isfinite(numbers).all() for numbers in (*losses, *self.info.values()))
