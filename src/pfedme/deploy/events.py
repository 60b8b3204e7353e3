"""What Flower's processes report to their supervisor, separate from lines for people.

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
"""The environment variable that gives Flower's processes the path of the file."""

TURNED_OUT = "Another client has connected with the same key, and this one was turned out"
FOREIGN = "The server sent a program that is not part of the pfedme on this machine"
"""What two of the events mean."""

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
    """The line of the log that reports it to people."""


def events_file(home: Path) -> Path:
    """The file of events in one of Flower's homes."""
    return home / "events.jsonl"


def emit(event: Event) -> None:
    """Reports an event to the supervisor of this process, if there is one."""
    if path := os.environ.get(VARIABLE):
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(line.encode())


def read_event(line: str) -> Event:
    """The inverse of what `emit` writes."""
    return Event(**json.loads(line))
