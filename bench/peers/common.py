"""Code shared by all peers' scripts: the task that they read, and the seconds that they write."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

R, B, ETA = 20, 20, 0.01
"""Local steps, rows of a batch, and step size, the same for all."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A federation's training rows, the sizes of the model, and who trains how many rounds."""

    x: np.ndarray
    y: np.ndarray
    n_train: np.ndarray
    sizes: tuple[int, ...]
    """Features, hidden units, classes."""
    cohort: int
    rounds: dict[str, int]
    """Rounds to be timed, with everyone training and with the cohort."""

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.n_train)

    @property
    def trains(self) -> dict[str, int]:
        """The number of clients that train in a round."""
        return {"everyone": self.clients, "cohort": self.cohort}

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Features and labels of each client."""
        ends = np.cumsum(self.n_train)
        return [(self.x[a:b], self.y[a:b]) for a, b in zip(ends - self.n_train, ends, strict=True)]


def write_task(path: Path, task: Task) -> None:
    """Stores a task for another environment."""
    rounds = [task.rounds["everyone"], task.rounds["cohort"]]
    np.savez(
        path, x=task.x, y=task.y, n_train=task.n_train, sizes=task.sizes, cohort=task.cohort, rounds=rounds
    )


def read_task(path: str) -> Task:
    """The task stored at `path`."""
    with np.load(path) as file:
        everyone, cohort = file["rounds"].tolist()
        return Task(
            x=file["x"],
            y=file["y"],
            n_train=file["n_train"],
            sizes=tuple(file["sizes"].tolist()),
            cohort=int(file["cohort"]),
            rounds={"everyone": everyone, "cohort": cohort},
        )


def per_round(ends: list[float]) -> float:
    """Seconds per round, given when each round ended; the first round, which warms up, is not counted."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def write_seconds(seconds: dict[str, dict[str, Any]]) -> None:
    """Stores the seconds per round, by what was run and who trained, where the caller looks for them."""
    Path(sys.argv[2]).write_text(json.dumps(seconds))
