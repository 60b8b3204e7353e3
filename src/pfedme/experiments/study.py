"""A plan of runs, each carried out once and kept, from which experiments read their numbers."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from pfedme import __version__
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.compare import Watch, carry_out_plan
from pfedme.training.execution import Progress, Wanted


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment needs, with seeds 0, 1, ... or from another first one."""

    run: Run
    seeds: int
    train_loss: bool = False
    first: int = 0

    def seeded(self) -> list[Run]:
        """The run with each seed."""
        return [
            dataclasses.replace(self.run, seed=seed) for seed in range(self.first, self.first + self.seeds)
        ]


class Study:
    """A folder of results: `results/` for readers, `runs/` for the runs that were carried out."""

    def __init__(self, out: Path, command: str) -> None:
        self.out, self.command = out, command
        self.results, self.runs = out / "results", out / "runs"

    def folder(self, wish: PlannedRun, run: Run) -> Folder:
        """The folder of a run; its name is made of everything that determines the run."""
        loss = "-loss" if wish.train_loss else ""
        return Folder(self.runs / f"{run.algorithm.name}-{run.digest()}{loss}")

    def plan(self, wishes: Sequence[PlannedRun]) -> dict[bool, list[tuple[str, Run, Path]]]:
        """All runs, each once, sorted by their data, and grouped by whether they need the training loss."""
        plan: dict[bool, dict[Path, tuple[str, Run, Path]]] = {True: {}, False: {}}
        for wish in wishes:
            for run in wish.seeded():
                path = self.folder(wish, run).path
                plan[wish.train_loss][path] = (run.algorithm.name, run, path)
        return {
            loss: sorted(jobs.values(), key=lambda job: (str(job[1].data), str(job[1].model)))
            for loss, jobs in plan.items()
        }

    def carry_out(self, wishes: Sequence[PlannedRun], watch: Watch = lambda *_: None) -> None:
        """Carries out the runs that have not been carried out yet."""
        with writing(self.results):
            self.results.mkdir(parents=True, exist_ok=True)
        plan = self.plan(wishes)
        for place, (name, run, path) in enumerate(job for jobs in plan.values() for job in jobs):
            if Folder(path).record.exists() and Folder(path).status() != "running":
                watch(name, place, Progress(run.rounds, run.rounds, None))
        first = 0
        for loss, jobs in plan.items():
            carry_out_plan(
                jobs,
                lambda name, place, progress, first=first: watch(name, first + place, progress),
                Wanted(files=False, train_loss=loss),
            )
            first += len(jobs)

    def rounds(self, wishes: Sequence[PlannedRun]) -> int:
        """The number of rounds of the whole plan."""
        return sum(run.rounds for jobs in self.plan(wishes).values() for _, run, _ in jobs)

    def has(self, wish: PlannedRun) -> bool:
        """Whether a run has been carried out with all of its seeds."""
        folders = [self.folder(wish, run) for run in wish.seeded()]
        return all(folder.record.exists() and folder.status() != "running" for folder in folders)

    def records(self, wish: PlannedRun) -> list[dict[str, Any]]:
        """The records of a run that was carried out, one per seed."""
        return [self.folder(wish, run).read() for run in wish.seeded()]

    def values(self, wish: PlannedRun, kind: str, pick: Callable[[Sequence[float]], float]) -> list[float]:
        """The accuracy in percent of one of a run's models, one value for each seed that did not diverge.

        `pick` chooses among the evaluated rounds.
        """
        return [
            100 * pick([entry[kind]["accuracy"] for entry in record["history"]])
            for record in self.records(wish)
            if record["final"] and kind in record["final"]
        ]

    def accuracy(self, wish: PlannedRun, kind: str, pick: Callable[[Sequence[float]], float]) -> Estimate:
        """The mean of these values."""
        return Estimate.of(self.values(wish, kind, pick))

    def write(self, name: str, content: str | bytes, seeds: int) -> None:
        """Writes a result, with a note of the command, version, seeds and date that produced it."""
        with writing(self.results):
            self.results.mkdir(parents=True, exist_ok=True)
            atomic_write(self.results / name, content)
            notes = self.read("provenance.json", {})
            notes[name] = self.provenance(seeds)
            atomic_write(self.results / "provenance.json", json.dumps(notes, indent=1, sort_keys=True) + "\n")

    def read(self, name: str, nothing: Any) -> Any:
        """A JSON document among the results, or `nothing`, which has the same type."""
        path = self.results / name
        if not path.exists():
            return nothing
        try:
            document = json.loads(path.read_text())
            if type(document) is not type(nothing):
                raise TypeError("its content has the wrong type")
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}); delete it and run this again.") from None
        return document

    def provenance(self, seeds: int) -> dict[str, Any]:
        """The command, version, seeds and date of a result."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        return {"command": self.command, "version": __version__, "seeds": seeds, "date": date}

    def footer(self, seeds: int) -> str:
        """The same as a line of Markdown."""
        p = self.provenance(seeds)
        many = f"{seeds} seed{'s' if seeds > 1 else ''}"
        return f"\n`{p['command']}` · pfedme {p['version']} · {many} · {p['date']}\n"


def last(values: Sequence[float]) -> float:
    """The accuracy after the last round."""
    return values[-1]


def best(values: Sequence[float]) -> float:
    """The best accuracy of any evaluated round, chosen on test rows: what the released code prints."""
    return max(values)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half-width of its 95 % interval (Student's t; NaN for a single seed)."""

    mean: float
    ci95: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The estimate from one value per seed.

        >>> Estimate.of([1.0, 2.0, 3.0])
        Estimate(mean=2.0, ci95=2.484..., seeds=3)
        """
        n = len(values)
        if n == 0:
            return cls(float("nan"), float("nan"), 0)
        spread = float(np.std(values, ddof=1)) if n > 1 else float("nan")
        return cls(float(np.mean(values)), float(stdtrit(max(1, n - 1), 0.975)) * spread / n**0.5, n)

    def __str__(self) -> str:
        if not self.seeds:
            return "diverged"
        return f"{self.mean:.2f} ± {self.ci95:.2f}" if self.seeds > 1 else f"{self.mean:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
