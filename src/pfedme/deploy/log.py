"""Lines for people, in the logs of Flower's processes."""

from __future__ import annotations

import math
import time
from typing import Any

MARK = "pfedme: "
"""The prefix of lines for people, in a log that is otherwise Flower's."""
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
        print(f"{MARK}{one_line(line)}", flush=True)


def one_line(text: Any, most: int | None = None) -> str:
    """A text as one line of printable characters, at most `most`: others may have written it.

    >>> one_line("gone" + chr(27) + "[2J"), one_line([1, 2, 3], 5)
    ('gone [2J', '[1, 2')
    """
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])


def amount(count: int) -> str:
    """A number of bytes in words.

    >>> amount(65536), amount(4 * 2**20), amount(2**20 + 2**19)
    ('64 KiB', '4 MiB', '1.5 MiB')
    """
    return f"{count / MIB:.4g} MiB" if count >= MIB else f"{count / KIB:.4g} KiB"
