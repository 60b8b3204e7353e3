"""What a finished run offers its clients, and newcomers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.screen.layout import print_table, standard_output
from pfedme.cli.screen.numbers import percent
from pfedme.cli.screen.verdict import print_verdict
from pfedme.personalization.finished import names, summary
from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.engine.choices import Personalized
    from pfedme.personalization.finished import Level


def print_offer(found: Personalized, out: Path) -> None:
    """Prints what each method gives the clients, what they chose, and what they gain."""
    what = found.measure
    console = standard_output()
    heads = [f"{head} {what.sign}" for head in ("over all rows", "client mean", "worst tenth")]
    print_table(
        console, f"{found.clients} clients: test {what.name} of a model for each",
        ["model", *heads, "harmed %"], _offer_rows(found),
    )  # fmt: skip
    print_verdict(found.verdict(), console)
    for sentence in tables.offer_sentences(found):
        console.print(sentence, highlight=False)
    console.print(
        f"Each client's choice: {out}/personalized.csv   Picture: {out}/personalized.png   "
        f"Models: {out}/personalized.safetensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _offer_rows(found: Personalized) -> list[list[str]]:
    """How each method does, in the order in which they are offered."""
    labels = {"given": "pfedme (given λ)", "own-lambda": "own λ, joined"}
    what, rows = found.measure, []
    for name in names(found):
        s = summary(found, found.of(name))
        values = [what.text(what.scale * s[k]) for k in (what.key, "mean", "worst_decile")]
        rows.append([labels.get(name, name), *values, percent(s["harmed"])])
    return rows


def print_newcomers(levels: Sequence[Level], out: Path) -> None:
    """Prints how newcomers fare by the number of their rows."""
    methods, what = list(levels[0].methods), levels[0].measure
    heads = ["pfedme (given λ)" if m == "given" else m for m in methods]
    header = ["rows", "clients", *(f"{head} {what.sign}" for head in heads)]
    rows = [
        [str(level.rows), str(level.clients),
         *(what.text(what.scale * level.methods[m]["mean"]) for m in methods)]
        for level in levels
    ]  # fmt: skip
    console = standard_output()
    print_table(
        console, f"newcomers: client mean of test {what.name}, by their training rows", header, rows,
        spare=(f"own-lambda {what.sign}", "clients", f"fine-tuned {what.sign}"),
    )  # fmt: skip
    console.print(tables.newcomer_sentence(levels), highlight=False)
    console.print(f"Results: {out}/newcomers.csv, {out}/newcomers.png", soft_wrap=True, highlight=False)
