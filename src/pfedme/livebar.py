"""A progress bar that keeps its width on a terminal; texts that do not fit are left out."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

BAR = 20
"""Width of the bar itself, in columns."""
HALF_LIFE_S = 20.0
"""Seconds after which a measurement of the pace counts half."""
SETTLED_S = 1.0
"""Seconds of work, not counting the first step, that an estimate of the remaining time needs."""


class Pace:
    """Estimates the remaining time from a smoothed pace.

    The first step is not counted, because it includes compilation. There is no estimate before a second of
    work.

    >>> pace = Pace(clock=iter([0.0, 9.0, 10.0, 11.0]).__next__)
    >>> [pace.left(done, 10) for done in (0, 1, 3, 5)]
    [None, None, 3.5, 2.5]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds = self.steps = 0.0
        self.at: float | None = None
        self.done = 0.0
        self.moved = False
        self.last: float | None = None

    def left(self, done: float, total: float | None) -> float | None:
        """The seconds until all `total` steps are done, if `done` are now; None if it is too early to say."""
        now = self.clock()
        if self.at is None:
            self.at, self.done = now, done
        elif done > self.done:
            took, steps = now - self.at, done - self.done
            if self.moved:
                fade = 0.5 ** (took / HALF_LIFE_S)
                self.seconds, self.steps = fade * self.seconds + took, fade * self.steps + steps
            self.moved = True
            self.at, self.done = now, done
        if total is None or not self.steps or self.seconds < SETTLED_S:
            return None
        return max(0.0, (total - done) * self.seconds / self.steps)


def in_words(seconds: float | None) -> str:
    """`40 s left`, `12 min left`, `1 h 20 min left`; empty if unknown.

    >>> in_words(None), in_words(3.2), in_words(100), in_words(4790), in_words(1e6)
    ('', '4 s left', '2 min left', '1 h 20 min left', '12 days left')
    """
    if seconds is None:
        return ""
    minutes = math.ceil(seconds / 60)
    if seconds <= 90:
        return f"{math.ceil(seconds)} s left"
    if minutes < 60:
        return f"{minutes} min left"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min left"
    return f"{seconds / 86400:.0f} days left"


class Live:
    """A context manager that shows a progress bar, if there is a terminal."""

    def __init__(self, name: str, total: float | None, console: Console) -> None:
        self.pace = Pace()
        self.live: Progress | None = None
        if console.is_terminal:

            def text(field: str) -> TextColumn:
                return TextColumn(f"{{task.{field}}}", table_column=Column(no_wrap=True), markup=False)

            self.live = Progress(
                text("description"), BarColumn(BAR), MofNCompleteColumn(), text("fields[left]"),
                text("fields[latest]"), console=console, transient=True,
            )  # fmt: skip
            self.task = self.live.add_task(name, total=total, left="", latest="")

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(
        self, name: str, done: float, total: float | None, latest: Sequence[str] = (), skipped: float = 0
    ) -> str:
        """Moves the bar, if there is one, and returns the remaining time in words. `skipped` steps had been
        done before. `latest` are texts about the latest results, each shorter than the one before; the first
        that fits is shown."""
        seconds = self.pace.left(done - skipped, None if total is None else total - skipped)
        left = "" if done == total else in_words(seconds)
        if not self.live:
            return left
        counted = len(f"{int(done)}/?") if total is None else 2 * len(str(int(total))) + 1
        room = self.live.console.width - BAR - counted - 6  # four gaps, and columns are never empty
        name = name[: max(0, room)]
        room -= len(name)
        shown = left if len(left) <= room else ""
        fitting = next((text for text in latest if len(text) <= room - len(shown)), "")
        self.live.update(self.task, description=name, completed=done, total=total, left=shown, latest=fitting)
        return left


class Rounds(Live):
    """Progress over the rounds of a deployed run, and its messages, on standard error."""

    def __init__(self, total: int | None) -> None:
        """`total` is None if only others know it."""
        super().__init__("rounds", total, Console(stderr=True))
        self.total = total

    def __call__(self, line: str, done: int | None) -> None:
        """Shows a line; if it reports that rounds are done and there is a bar, moves the bar instead."""
        if self.live and done is not None:
            self.show("rounds", done, self.total)
        elif self.live:
            self.live.console.print(escape(line), highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)
