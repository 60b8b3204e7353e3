"""Lines for people, in the logs of Flower's processes."""

from __future__ import annotations

import math
import time

MARK = "pfedme: "
"""How a line for people begins, in a log that is otherwise Flower's."""
AGAIN_S = 60.0
"""Seconds for which a line is not repeated."""
KIB, MIB = 2**10, 2**20

_said: dict[str, float] = {}


def say(line: str, about: str = "") -> None:
    """Prints a line, unless the same one, or one with the same `about`, was printed in the last minute."""
    now = time.monotonic()
    if now - _said.get(about or line, -math.inf) >= AGAIN_S:
        for old in [key for key, when in _said.items() if now - when >= AGAIN_S]:
            del _said[old]
        _said[about or line] = now
        print(f"{MARK}{line}", flush=True)


def amount(count: int) -> str:
    """A number of bytes in words.

    >>> amount(65536), amount(4 * 2**20), amount(2**20 + 2**19)
    ('64 KiB', '4 MiB', '1.5 MiB')
    """
    return f"{count / MIB:.4g} MiB" if count >= MIB else f"{count / KIB:.4g} KiB"
