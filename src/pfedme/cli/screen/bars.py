"""Progress on standard error: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from pfedme.cli.screen.numbers import accuracies, scaled
from pfedme.livebar import Live
from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.training.execution import Progress as Step
    from pfedme.tuning.tune import Step as SearchStep

PATIENCE_S = 2.0
"""Seconds before the first sign of progress."""
LINE_EVERY_S = 2.0
"""Seconds between two lines where there is no terminal."""


class TrainingBar(Live):
    """Progress of something that trains, on standard error. Of several hosts, only the first has it
    `shown`."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        super().__init__(what, total, Console(stderr=True))
        self.shown = shown
        self.live = self.live if shown else None
        self.said = time.monotonic()

    def pilot(self, name: str, round: int) -> None:
        """Shows that a pilot is finding out how long to train `name`."""
        self.show(f"{name:<8}", round, None, ["finding out how long to train"])
        self.say(f"{name}: finding out how long to train, round {round}")

    def warn(self, line: str) -> None:
        """Prints a line that stays."""
        if self.live:
            self.live.console.print(escape(line), highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def say(self, line: str, *, always: bool = False) -> None:
        """Prints a line where there is no bar, unless one was printed a moment ago."""
        if self.shown and not self.live and (always or time.monotonic() - self.said >= LINE_EVERY_S):
            self.said = time.monotonic()
            print(line, file=sys.stderr, flush=True)


class Bar(TrainingBar):
    """Progress over all rounds of one or several runs; `total` is None if they train until they have
    converged."""

    def __init__(self, total: int | None, *, shown: bool = True) -> None:
        super().__init__("", total, shown=shown)
        self.total, self.entry = total, {}
        self.warned = set[str]()
        self.rounds: dict[int, int] = {}  # the current round of each run
        self.before: dict[int, int] = {}  # its round when first seen; not 0 if it was resumed

    def __call__(self, name: str, place: int, step: Step) -> None:
        """Shows that run number `place`, called `name`, has reached `step`."""
        if not self.shown:
            return
        if step.pilot:
            self.pilot(name, step.round)
            return
        if step.warning:
            if step.warning not in self.warned:
                self.warned.add(step.warning)
                self.warn(f"{name}: {step.warning}")
            return
        self.rounds[place] = step.round
        self.before.setdefault(place, step.round)
        done = sum(self.rounds.values())
        if step.entry:
            self.entry = step.entry
        found = [accuracies(self.entry, kinds) for kinds in (tables.KINDS, ("global", "personal"))]
        found += [accuracies(self.entry, (kind,)) for kind in reversed(tables.KINDS)]
        total = self.total or (step.rounds if len(self.rounds) == 1 else None)
        left = self.show(f"{name:<8}", done, total, list(filter(None, found)), sum(self.before.values()))
        if step.entry:
            of_all = f"/{step.rounds}" if step.rounds else ""
            after = f", {left}" if left else ""
            ended = step.round in (0, step.rounds)
            self.say(f"{name} round {step.round}{of_all}: {found[0]}{after}", always=ended)


class SearchBar(TrainingBar):
    """Progress over the trials of a search, with the best score so far."""

    def __init__(self, *, shown: bool = True) -> None:
        super().__init__("trials", shown=shown)
        self.before: int | None = None  # trials that had finished when the search was resumed

    def __call__(self, step: SearchStep) -> None:
        """Shows the progress of the search."""
        what = step.measure
        best = ""
        if step.best is not None:
            best = "best " + what.pattern.format(scaled(what, step.best))
        done = step.finished + step.round / step.rounds
        if self.before is None:
            self.before = step.finished
        left = self.show("trials", done, step.trials, [best], self.before)
        said = [f"trial {step.finished + 1}/{step.trials} round {step.round}/{step.rounds}", best, left]
        self.say(", ".join(filter(None, said)))


class Steps(Live):
    """Progress over a few long steps, on standard error. Of several hosts, only the first has it `shown`."""

    def __init__(self, *, shown: bool = True) -> None:
        super().__init__("", 1, Console(stderr=True))
        self.shown = shown
        self.live = self.live if shown else None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` steps are done and that `what` comes next."""
        if not self.shown:
            return
        self.show(what, done, total)
        if not self.live and done < total:
            print(f"{what}: step {done + 1} of {total}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows `what` on standard error after two seconds; yields a function that changes it on a terminal."""
    # A copy of standard error, because polars' messages there are suppressed while a table is read.
    with os.fdopen(os.dup(2), "w") as said:
        status = Console(file=said).status(what) if said.isatty() else None
        start = status.start if status else lambda: print(f"{what} ...", file=said, flush=True)
        timer = threading.Timer(PATIENCE_S, start)
        timer.start()
        try:
            yield status.update if status else lambda _: None
        finally:
            timer.cancel()
            timer.join()
            if status:
                status.stop()
