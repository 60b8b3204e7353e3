"""Messages that say how to finish a command that was interrupted."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence

from pfedme.errors import Interrupted

INTERRUPTED = 130
"""The exit status of a command that was interrupted."""


def same_command_resumes(words: Sequence[str]) -> int:
    """Prints the command that resumes the work, and returns the exit status."""
    again = shlex.join(["pfedme", *words])
    print(f"pfedme: interrupted; to resume where it stopped, run: {again}", file=sys.stderr)
    return INTERRUPTED


@contextlib.contextmanager
def rest_is_done_by(words: Sequence[str]) -> Iterator[None]:
    """Names the command that does the remaining work if it is interrupted after a run has finished."""
    try:
        yield
    except KeyboardInterrupt:
        command = shlex.join(["pfedme", *words])
        raise Interrupted(None, f"the run is finished, and '{command}' does the rest") from None
