"""What Flower's processes tell whoever supervises them, apart from lines for people.

An event is a line of JSON in a file in Flower's private home, where nothing that others send is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

VARIABLE = "PFEDME_EVENTS"
"""The variable, in the environment of Flower's processes, of the file."""

Name = Literal[
    "connected", "unreachable", "reachable", "wrong server", "refused", "replaced", "foreign program",
    "working", "idle", "round done",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that has happened."""

    name: Name
    number: int = 0
    """The number of rounds that are done."""
    line: str = ""
    """The line of the log that tells people of it."""


def events_file(home: Path) -> Path:
    """The file of events in one of Flower's homes."""
    return home / "events.jsonl"


def emit(event: Event) -> None:
    """Tells whoever supervises this process, if anybody does."""
    if path := os.environ.get(VARIABLE):
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(line.encode())


def read_event(line: str) -> Event:
    """The inverse of what `emit` writes."""
    return Event(**json.loads(line))
