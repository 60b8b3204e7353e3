"""Advice on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.screen.layout import print_table, standard_output
from pfedme.cli.screen.personalization import print_offer
from pfedme.report.differing import about_difference

if TYPE_CHECKING:
    from pfedme.advice.advise import Advice


def print_advice(advice: Advice, out: Path) -> None:
    """Prints what was tried, what clients choose and gain, and what to do."""
    console = standard_output()
    facts = about_difference(advice.differences, advice.federation.classes)
    for heading, text in facts[:1]:
        console.print(f"{heading[0].upper()}{heading[1:]}: {text}", highlight=False)
    rows = [
        [t.method, "diverged" if t.loss is None else f"{t.loss:.4f}", str(t.rounds), f"{t.seconds:.0f}"]
        for t in advice.trials
    ]
    print_table(
        console, "tried, best first: loss on validation rows of the model that clients would use",
        ["method", "loss", "rounds", "seconds"], rows,
    )  # fmt: skip
    print_offer(advice.found, out)
    console.print(f"\n[bold]{advice.answer()}[/bold]", highlight=False, soft_wrap=True)
    console.print(f"To train it here: {advice.command}", highlight=False, soft_wrap=True, markup=False)
    for command in advice.deployed:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)
    if advice.left:
        console.print(f"With more --minutes: {'; '.join(advice.left)}.", highlight=False, markup=False)
    console.print(
        f"Report: {out}/report.html   Models: {out}/models/", highlight=False, soft_wrap=True, markup=False
    )
