"""The verdict on joining."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from pfedme.engine.verdict import Verdict


def print_verdict(verdict: Verdict | None, console: Console) -> None:
    """Prints whether joining pays, in colour where there is a terminal."""
    if verdict:
        style = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}[verdict.verdict]
        console.print(verdict.sentence, style=style, highlight=False)
