"""The ways in which a command ends badly; errors carry one or two sentences that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MOST_NAMES = 20
"""How many names an error lists."""


class InputError(ValueError):
    """The input was wrong: a name, a number, a file. Exit status 2."""


class RunError(RuntimeError):
    """The run failed, or diverged. Exit status 1."""


class Diverged(RunError):
    """The run's numbers are no longer finite; its last finite state is kept."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run whose state is saved in `folder`, if it has one; `goes_on` says what is next."""

    def __init__(self, folder: Path | None, goes_on: str = "") -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.goes_on = goes_on or (f"'pfedme resume {folder}' goes on where it stopped" if folder else "")


def unknown(what: str, given: str, known: Iterable[str]) -> InputError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("algorithm", "pfedmee", ["pfedme", "fedavg"]))
    There is no algorithm 'pfedmee'; did you mean 'pfedme'? Known: pfedme, fedavg.
    """
    names = list(known)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), lower, n=1)
    hint = f"; did you mean '{lower[near[0]]}'?" if near else "."
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return InputError(f"There is no {what} '{given}'{hint} Known: {', '.join(names[:MOST_NAMES])}{more}.")
