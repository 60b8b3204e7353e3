"""What a finished run offers its clients and newcomers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.screen.layout import print_table, standard_output
from pfedme.cli.screen.numbers import percent, scaled
from pfedme.cli.screen.verdict import print_verdict
from pfedme.personalization.finished import methods
from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.engine.measure import Measure
    from pfedme.engine.personalized import Personalized
    from pfedme.personalization.finished import Level


def print_offer(found: Personalized, out: Path) -> None:
    """Prints what each method gives the clients, what they chose, and what they gain."""
    what, usual = found.measure, _usual(found)
    console = standard_output()
    heads = [f"{head} {what.sign}" for head in ("over all rows", "client mean", "worst tenth")]
    others = [other.title for other in usual]
    print_table(
        console, f"{found.clients} clients: test {what.name} of each client's model",
        ["model", *heads, *others, "harmed %"], _offer_rows(found), spare=others,
    )  # fmt: skip
    print_verdict(found.verdict(), console)
    for sentence in tables.offer_sentences(found):
        console.print(sentence, highlight=False)
    console.print(
        f"Each client's choice: {out}/personalized.csv   Picture: {out}/personalized.png   "
        f"Models: {out}/personalized.safetensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _usual(found: Personalized) -> list[Measure]:
    """The usual measure, if clients are judged by another one."""
    return [found.usual] if found.metric else []


def _offer_rows(found: Personalized) -> list[list[str]]:
    """The results of each method, in the order in which they are offered."""
    labels = {"given": "pfedme (given λ)", "own-lambda": "own λ, joined"}
    what, rows = found.measure, []
    for name, entry in methods(found).items():
        values = [scaled(what, entry[k]) for k in (what.key, "mean", "worst_decile")]
        values += [scaled(other, entry[other.key]) for other in _usual(found)]
        rows.append([labels.get(name, name), *values, percent(entry["harmed"])])
    return rows


def print_newcomers(levels: Sequence[Level], out: Path) -> None:
    """Prints how newcomers fare, by the number of their rows."""
    tried, what = list(levels[0].methods), levels[0].measure
    heads = ["pfedme (given λ)" if m == "given" else m for m in tried]
    header = ["rows", "clients", *(f"{head} {what.sign}" for head in heads)]
    rows = [
        [str(level.rows), str(level.clients),
         *(scaled(what, level.methods[m]["mean"]) for m in tried)]
        for level in levels
    ]  # fmt: skip
    console = standard_output()
    print_table(
        console, f"newcomers: client mean of test {what.name}, by number of training rows", header, rows,
        spare=(f"own-lambda {what.sign}", "clients", f"fine-tuned {what.sign}"),
    )  # fmt: skip
    console.print(tables.newcomer_sentence(levels), highlight=False)
    console.print(f"Results: {out}/newcomers.csv, {out}/newcomers.png", soft_wrap=True, highlight=False)
