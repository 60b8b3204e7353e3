"""The ledger of a deployed run: what became of each client's part of each round."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from typing import Any, Literal

Outcome = Literal["counted", "dropped", "failed", "late", "absent"]
"""What became of a client's part of a round. `dropped`: it came, and was not fit to be counted. `failed`: an
error came instead. `late`: nothing came before the deadline. `absent`: the client was not connected."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A client's part of one try of a round: a line of the ledger."""

    round: int
    """The first round is 1."""
    attempt: int
    client: str
    outcome: Outcome
    reason: str = ""
    rows: int | None = None
    """Training rows, where they are told because updates are weighted by them."""
    norm: float | None = None
    """‖w_i − w‖, as it came."""
    clipped: float | None = None
    """What it was shortened to, if it was."""
    step: float | None = None
    """‖w_(t+1) − w_t‖ of a round that counted."""
    without: float | None = None
    """What that would have been without this client."""


COLUMNS = [field.name for field in dataclasses.fields(Part)]


def ledger_csv(parts: Sequence[Part], *, header: bool = True) -> str:
    """The ledger as text, or some lines of it."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    if header:
        table.writerow(COLUMNS)
    table.writerows([cell(getattr(part, name)) for name in COLUMNS] for part in parts)
    return text.getvalue()


def cell(value: Any) -> Any:
    """A value as a spreadsheet may read it: a text that it would take for a formula gets an apostrophe.

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
