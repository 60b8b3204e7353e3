"""The ways in which a command can fail; an error carries one or two sentences that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MOST_NAMES = 20
"""An error lists at most this many names."""
MOST_PROBLEMS = 10
"""An error lists at most this many problems."""


class InputError(ValueError):
    """The input was wrong: a name, a number, a file. Exit status 2."""


class Problems:
    """Collects errors about input, so that they can all be reported at once.

    >>> problems = Problems()
    >>> for age in ("old", "3", "young"):
    ...     with problems:
    ...         if not age.isdigit():
    ...             raise InputError(f"'{age}' is not an age.")
    >>> problems.raise_any("patients.csv")
    Traceback (most recent call last):
    pfedme.errors.InputError: There are 2 problems with patients.csv.
      1. 'old' is not an age.
      2. 'young' is not an age.
    """

    def __init__(self) -> None:
        self.found: list[InputError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Keeps an error about input."""
        if isinstance(error, InputError):
            self.found.append(error)
        return isinstance(error, InputError)

    def raise_any(self, where: str) -> None:
        """Raises the error if there is one, or one error that lists all if there are several."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = [f"  {k}. {error}" for k, error in enumerate(self.found[:MOST_PROBLEMS], 1)]
            if (more := len(self.found) - MOST_PROBLEMS) > 0:
                lines.append(f"  And {more:,} more like these.")
            raise InputError("\n".join([f"There are {len(self.found)} problems with {where}.", *lines]))


class RunError(RuntimeError):
    """The run failed or diverged. Exit status 1."""


class Diverged(RunError):
    """The run's numbers are no longer finite; its last finite state is kept."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run, whose state is saved in `folder`, if any; `goes_on` says how to continue."""

    def __init__(self, folder: Path | None, goes_on: str = "") -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.goes_on = goes_on or (f"'pfedme resume {folder}' continues where it stopped" if folder else "")


def unknown(what: str, given: str, known: Iterable[str]) -> InputError:
    """An error for a name that does not exist, which suggests the most similar one that does.

    >>> print(unknown("algorithm", "pfedmee", ["pfedme", "fedavg"]))
    There is no algorithm 'pfedmee'; did you mean 'pfedme'? Known: pfedme, fedavg.
    >>> print(unknown("option of codec 'none'", "levels", []))
    There is no option of codec 'none' 'levels'; there are none.
    """
    names = list(known)
    if not names:
        return InputError(f"There is no {what} '{given}'; there are none.")
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), lower, n=1)
    hint = f"; did you mean '{lower[near[0]]}'?" if near else "."
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return InputError(f"There is no {what} '{given}'{hint} Known: {', '.join(names[:MOST_NAMES])}{more}.")
