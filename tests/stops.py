"""Tiny runs, ways to stop them, and what must not depend on it."""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pfedme.algorithms import ALGORITHMS
from pfedme.core.models import parse_model
from pfedme.core.spec import build
from pfedme.data.synthetic import Synthetic
from pfedme.runs.run import Run
from pfedme.training.execute import execute
from pfedme.training.execution import Progress

DATA = Synthetic(clients=4, rows=40, features=5, classes=3)


def tiny(name: str, **options: Any) -> Run:
    """A run of a few rounds."""
    given = {"R": 2, "B": 5, **({"F": 3} if name == "fedavg-ft" else {})}
    algorithm = build(ALGORITHMS[name], given, name)
    run = Run(algorithm=algorithm, data=DATA, model=parse_model("mlr"), rounds=6, cohort=2, eval_every=2)
    return dataclasses.replace(run, **options)


class Results:
    """What must not depend on interruptions."""

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / "record.json").read_text())
        assert record["status"] == "finished"
        assert not (folder / "checkpoint.safetensors").exists()
        self.final, self.history, self.config = record["final"], record["history"], record["config"]
        self.model = (folder / "model.safetensors").read_bytes()
        self.clients = (folder / "clients.csv").read_bytes()

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


def stop_at(round: int, *, evaluated: bool | None = None, pilot: bool = False) -> Callable[[Progress], None]:
    """A watcher that interrupts at the first news from `round` or later (of an evaluation, or of none); with
    `pilot`, of the pilot."""

    def watch(progress: Progress) -> None:
        there = progress.round >= round and progress.pilot == pilot
        if there and evaluated in (None, progress.entry is not None):
            raise KeyboardInterrupt

    return watch


def interrupted(folder: Path, run: Run, round: int = 3, *, pilot: bool = False) -> Path:
    """A folder with a run that was interrupted."""
    with pytest.raises(KeyboardInterrupt):
        execute(run, folder, watch=stop_at(round, pilot=pilot))
    return folder


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
