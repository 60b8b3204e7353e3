"""The ledger of a deployed run: what happened to each client's contribution to each round."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any, Literal

Outcome = Literal["counted", "dropped", "failed", "late", "absent"]
"""What happened to a client's contribution to a round. `dropped`: it arrived, but was not fit to be counted.
`failed`: an error arrived instead. `late`: nothing arrived before the deadline. `absent`: the client was not
connected."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A client's contribution to one attempt at a round: a line of the ledger."""

    round: int
    """The first round is 1."""
    attempt: int
    client: str
    outcome: Outcome
    reason: str = ""
    rows: int | None = None
    """Training rows, if they are reported because updates are weighted by them."""
    norm: float | None = None
    """‖w_i − w‖, as it arrived."""
    clipped: float | None = None
    """The norm after clipping, if it was clipped."""
    step: float | None = None
    """‖w_(t+1) − w_t‖, if the round counted."""
    without: float | None = None
    """What `step` would have been without this client."""


COLUMNS = [field.name for field in dataclasses.fields(Part)]


def ledger_csv(parts: Sequence[Part], *, header: bool = True) -> str:
    """The ledger, or some lines of it, as CSV."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if header:
        table.writerow(COLUMNS)
    table.writerows([cell(getattr(part, name)) for name in COLUMNS] for part in parts)
    return text.getvalue()


def cell(value: Any) -> Any:
    """A value that is safe for a spreadsheet: text that it would take for a formula gets an apostrophe.

    >>> cell("=1+1"), cell("north"), cell(None), cell(0.12345678)
    ("'=1+1", 'north', '', '0.123457')
    """
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r", "'")) else value
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def text_of(cell: str) -> str:
    """The text that `cell` was given.

    >>> text_of("'=1+1"), text_of("north")
    ('=1+1', 'north')
    """
    return cell.removeprefix("'")
