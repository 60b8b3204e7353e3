"""Tracking a run while it is in progress, with any of the trackers.

A resumed run is bit-identical to an uninterrupted one. So a number that is already in a log for a round is
not written again, and missing ones are added: each number is there once, whatever stopped the run.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedme.core.spec import build, parse, to_json
from pfedme.errors import InputError, unknown
from pfedme.runs.folder import Folder
from pfedme.training.trackers import MLFLOW_DEFAULTS, TRACKERS, Log, Tracker, numbers

FILES = ("record.json", "clients.csv", "curves.png")
"""The files of a run's folder that trackers receive when it ends: no rows and no models."""


def parse_trackers(texts: Sequence[str]) -> tuple[Tracker, ...]:
    """The trackers that texts such as `mlflow:experiment=hospitals` describe, after a check of their
    packages."""
    trackers = tuple(parse(text, TRACKERS, "tracker") for text in texts)
    for tracker, text in zip(trackers, texts, strict=True):
        if trackers.count(tracker) > 1:
            raise InputError(f"--track {text} is given twice.")
    return ready(trackers)


def described(trackers: Sequence[Tracker]) -> list[dict[str, Any]]:
    """Trackers as JSON values."""
    return [{"name": tracker.name, **to_json(tracker)} for tracker in trackers]


def from_json(document: Sequence[Mapping[str, Any]]) -> tuple[Tracker, ...]:
    """The inverse of `described`."""
    return tuple(_from_json(one)[0] for one in document)


def _from_json(one: Mapping[str, Any]) -> tuple[Tracker, str | None]:
    """A tracker, and the name of its log."""
    fields = dict(one)
    name, run = fields.pop("name"), fields.pop("run", None)
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    return build(TRACKERS[name], fields, f"tracker '{name}'"), run


def ready(trackers: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    """The same with all defaults filled in, after a check that their packages are installed."""
    for variable, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    for tracker in trackers:
        try:
            with _quiet():
                importlib.import_module(tracker.package)
        except ImportError as error:
            extra = f"pip install 'pfedme[{tracker.name}]'"
            raise InputError(f"--track {tracker.name} needs {extra} ({error}).") from None
    return tuple(tracker.with_defaults() for tracker in trackers)


class Tracking:
    """The trackers of a run in progress. One that fails is dropped with a warning, and the run continues."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self.trackers = trackers
        self.logs: dict[Tracker, Log] = {}
        self.runs: dict[Tracker, str | None] = {}  # names by which trackers find them again
        self.there: dict[Log, set[tuple[str, int]]] = {}  # the numbers that were there at the start

    @classmethod
    def begin(cls, trackers: Sequence[Tracker], folder: Path, *, force: bool) -> Tracking:
        """The trackers of a new run in a folder; raises an error if one of them cannot be reached."""
        tracking = cls(ready(tuple(trackers)))
        for tracker in tracking.trackers:
            try:
                with _quiet():
                    tracking.logs[tracker] = tracker.open(folder, None, force=force)
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"--track {tracker.name} does not work here: {_sentence(error)}") from None
        return tracking

    @classmethod
    def reopen(cls, record: Mapping[str, Any], folder: Path) -> Tracking:
        """The trackers in a run's record."""
        known = [_from_json(one) for one in record.get("track", [])]
        tracking = cls(ready(tuple(tracker for tracker, _ in known)))
        for tracker, (_, run) in zip(tracking.trackers, known, strict=True):
            tracking.runs[tracker] = run
            try:
                with _quiet():
                    tracking.logs[tracker] = tracker.open(folder, run, force=True)
            except Exception as error:
                _warn(tracker, error)
        return tracking

    def to_json(self) -> list[dict[str, Any]]:
        """What `reopen` finds in the record."""
        runs = [self.runs.get(tracker) for tracker in self.trackers]
        return [one | {"run": run} for one, run in zip(described(self.trackers), runs, strict=True)]

    def start(self, record: Mapping[str, Any]) -> None:
        """Starts or resumes: logs get what they lack of the record's history."""

        def start(log: Log) -> None:
            log.start(record)
            self.there[log] = log.logged()
            for entry in record["history"]:
                # The record does not have the time of earlier entries.
                self._log(log, entry["round"], numbers(entry, {}))

        self._each(start)

    def entry(self, entry: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Logs an evaluation."""
        told = numbers(entry, timing)
        self._each(lambda log: self._log(log, entry["round"], told))

    def end(self, status: str, step: int, files: Sequence[Path] = ()) -> None:
        """Logs how the run ended, with those of the files that exist."""
        self.keep(files)
        self._each(lambda log: log.end(status, step))

    def keep(self, files: Sequence[Path]) -> None:
        """Adds files to the logs, if there are any."""
        for file in filter(Path.exists, files):
            self._each(lambda log, file=file: log.keep(file))

    def _log(self, log: Log, step: int, told: Mapping[str, float]) -> None:
        new = {name: value for name, value in told.items() if (name, step) not in self.there[log]}
        if new:
            log.log(step, new)

    def _each(self, do: Callable[[Log], None]) -> None:
        for tracker, log in list(self.logs.items()):
            try:
                with _quiet():
                    do(log)
            except Exception as error:
                del self.logs[tracker]
                _warn(tracker, error)
            self.runs[tracker] = log.run


def keep(folder: Path, *files: Path) -> None:
    """Passes files that were made after the end of a run to the trackers of the run in a folder."""
    Tracking.reopen(Folder(folder).read(), folder).keep(files)


def _quiet() -> warnings.catch_warnings:
    """Suppresses the warnings that packages give about each other."""
    return warnings.catch_warnings(action="ignore")


def _warn(tracker: Tracker, error: Exception) -> None:
    print(
        f"pfedme: {tracker.name} no longer tracks the run, which continues: {_sentence(error)}",
        file=sys.stderr,
        flush=True,
    )


def _sentence(error: Exception) -> str:
    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return said if said.endswith(".") else f"{said}."
