"""What a person who interrupts a command is told about finishing it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence

from pfedme.errors import Interrupted

INTERRUPTED = 130
"""The exit status of a command that was interrupted."""


def same_command_resumes(words: Sequence[str]) -> int:
    """Prints the command that goes on where it was interrupted, and returns the exit status."""
    again = shlex.join(["pfedme", *words])
    print(f"pfedme: interrupted; the same command goes on where it stopped: {again}", file=sys.stderr)
    return INTERRUPTED


@contextlib.contextmanager
def rest_is_done_by(words: Sequence[str]) -> Iterator[None]:
    """Names the command that does what an interrupt leaves undone once a run is finished."""
    try:
        yield
    except KeyboardInterrupt:
        command = shlex.join(["pfedme", *words])
        raise Interrupted(None, f"the run is finished, and '{command}' does the rest") from None
