"""pfedme's command line on a table, with defaults only, and the results in its folder.

A cell is a table, a budget of rounds and a seed. Its result is stored as JSON next to the comparison's
folder; an interrupted comparison is resumed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from reference import measure, rows_of
from scipy.special import softmax

import pfedme.cli
from pfedme.core.models import model_from_json
from pfedme.data.federation import Federation
from pfedme.data.natural import Entry
from pfedme.files import atomic_write
from pfedme.runs.folder import Folder, read_models
from pfedme.runs.plan import PLAN
from pfedme.runs.run import Run
from pfedme.training.pilot import ENOUGH

ALGORITHMS = ("fedavg", "pfedme", "alone", "pooled")
BUDGET = Run.budget
DIVERGED = 1
"""The exit status of a comparison in which a run diverged."""
TOLERANCE = 1e-4
"""How far the record's accuracy or R² may be from the one that is computed here, in float32."""
KEYS = ("accuracy", "log_loss", "auc", "recall", "brier", "r2", "rmse")
"""What is taken from the record for a model that is in no file."""


class Cell(NamedTuple):
    """A table, the most rounds, and a seed."""

    table: Entry
    budget: int
    seed: int

    def __str__(self) -> str:
        return f"{self.table.name}, at most {self.budget} rounds, seed {self.seed}"

    @property
    def algorithms(self) -> tuple[str, ...]:
        """What is compared: with the defaults all, else what a verdict needs."""
        return ALGORITHMS if (self.budget, self.seed) == (BUDGET, 0) else ALGORITHMS[:-1]

    def folder(self, out: Path) -> Path:
        """Where its comparison is."""
        return out / self.table.name / f"budget-{self.budget}" / f"seed-{self.seed}"

    def command(self, out: Path) -> list[str]:
        """The command, without the program."""
        words = ["compare", *self.algorithms, "--data", self.table.name]
        words += ["--budget", str(self.budget)] if self.budget != BUDGET else []
        words += ["--seed", str(self.seed)] if self.seed else []
        return [*words, "--out", str(self.folder(out))]


def result(cell: Cell, out: Path) -> dict[str, Any] | None:
    """What is kept of a cell, or None."""
    kept = cell.folder(out).with_suffix(".json")
    return json.loads(kept.read_text()) if kept.exists() else None


def with_defaults(cell: Cell, kept: dict[str, Any]) -> bool:
    """Whether a larger budget would change nothing in a cell: every training ended by itself, and twice its
    rounds, the longest that it has tried, were not cut short (tests/test_auto.py has the law)."""
    ends = [run["auto"] for run in kept["runs"].values()]
    return all(
        end["stopped"] == "converged" and max(2.1 * end["rounds"], 1.5 * ENOUGH) <= cell.budget
        for end in ends
    )


def equal(cell: Cell, budgets: Sequence[int], out: Path) -> dict[str, Any] | None:
    """The result of the same cell with a smaller budget, where this one's must be equal."""
    for budget in sorted(budgets):
        smaller = cell._replace(budget=budget)
        if budget < cell.budget and (kept := result(smaller, out)) and with_defaults(smaller, kept):
            return {**kept, "equals": budget}
    return None


def carry_out(
    cell: Cell, federation: Federation, out: Path, budgets: Sequence[int], *, force: bool = False
) -> dict[str, Any]:
    """Runs a cell's comparison, or resumes it unless it is to be run anew, and keeps its result.

    One that a smaller budget has answered is not run again.
    """
    folder = cell.folder(out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if kept := equal(cell, budgets, out):
        atomic_write(folder.with_suffix(".json"), json.dumps(kept, indent=1))
        return kept
    begun = (folder / PLAN).exists() and not force
    words = ["resume", str(folder)] if begun else [*cell.command(out), "--force"]
    began = time.monotonic()
    said = io.StringIO()
    # In this process, where the programs of a table are compiled once for all its cells.
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = pfedme.cli.main(words)
    if status not in (0, DIVERGED) or "verdict" not in read_plan(folder):
        sys.exit(f"{cell}: {' '.join(words)} ended with status {status}.\n{said.getvalue()}")
    kept = {"seconds": round(time.monotonic() - began, 1), **read(folder, cell, federation)}
    atomic_write(folder.with_suffix(".json"), json.dumps(kept, indent=1))
    return kept


def read(folder: Path, cell: Cell, federation: Federation) -> dict[str, Any]:
    """The verdict of a comparison, and by algorithm its training's end and its models' metrics.

    Metrics are computed from the saved models, by the same function as scikit-learn's, and must agree with
    those of the record. For the baseline, and any other model that is not saved, the record's are taken.
    """
    runs = {}
    for algorithm in cell.algorithms:
        run = folder / algorithm / f"seed-{cell.seed}"
        record = Folder(run).read()
        models = {}
        final = record["final"] or {}  # of a run that diverged there is none
        for name, p in predictions(run / "model.safetensors", federation).items() if final else ():
            models[name] = measure(p, federation)
            key = "r2" if federation.classes == 0 else "accuracy"
            if abs(models[name][key] - final[name][key]) > TOLERANCE:
                sys.exit(f"{run}: {name} {key} is {models[name][key]}, in the record {final[name][key]}.")
        for name in {"global", "personal", "baseline"} & final.keys() - models.keys():
            models[name] = {key: final[name].get(key) for key in KEYS}
        runs[algorithm] = {"auto": record.get("auto"), "metric": record.get("metric"), "models": models}
    return {"verdict": read_plan(folder)["verdict"], "runs": runs}


def read_plan(folder: Path) -> dict[str, Any]:
    """A comparison's plan, which has its verdict once it is finished."""
    return json.loads((folder / PLAN).read_text()) if (folder / PLAN).exists() else {}


def predictions(path: Path, federation: Federation) -> dict[str, np.ndarray]:
    """What the `global` and the `personal` models in a file predict for all test rows."""
    tensors, about = read_models(path)
    model = model_from_json(about["model"])
    like = model.init(jax.random.key(0)).like
    x, _, owner = rows_of(federation, "test")

    def predict(theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
        scores = np.asarray(model.apply(like(jax.numpy.asarray(theta)), rows), np.float64)
        return softmax(scores, axis=1) if federation.classes else scores.reshape(len(rows))

    found = {}
    if "w" in tensors:
        found["global"] = predict(tensors["w"], x)
    if "theta" in tensors:
        places = {client: row for row, client in enumerate(about["clients"])}
        parts = [
            predict(tensors["theta"][places[int(federation.ids[i])]], x[owner == i])
            for i in range(federation.clients)
        ]
        found["personal"] = np.concatenate(parts)
    return found
