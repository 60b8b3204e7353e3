"""The description of a federation, and notes on anything odd about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from pfedme.cli.screen.layout import plain_table, print_table, standard_output
from pfedme.cli.screen.numbers import measured
from pfedme.report import description as words

if TYPE_CHECKING:
    from pfedme.data.federation import Federation

MOST_NOTES = 8
"""At most this many notes on a table are printed after a run."""


def print_description(
    name: str, description: dict[str, Any], federation: Federation, more: Sequence[tuple[str, str]]
) -> None:
    """Prints the description of a federation, with more facts at the end of the first table."""
    console = standard_output()
    table = plain_table(name, ["", ""], [*_in_words(description), *more])
    table.show_header, table.columns[-1].no_wrap = False, False
    console.print(table)
    for title, header, rows in words.tables(description, federation):
        safe = [[escape(cell) for cell in row] for row in rows]
        print_table(console, title, [escape(name) for name in header], safe, header[3:-1], wrap_last=True)
    for warning in description["warnings"]:
        console.print(f"Note: {warning}", highlight=False, markup=False)


def print_names(listing: Sequence[dict[str, Any]]) -> None:
    """Prints the federations that have a name."""
    rows = [
        [
            told["name"], *(f"{n:,}" if (n := told[key]) else "" for key in ("rows", "clients")),
            told["licence"] or "", told["question"],
        ]
        for told in listing
    ]  # fmt: skip
    header = ["data", "rows", "clients", "licence", "question"]
    safe = [[escape(cell) for cell in row] for row in rows]
    print_table(standard_output(), "", header, safe, ["licence"], wrap_last=True)


def _in_words(d: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts about a federation, each with a heading."""
    sizes = d["rows_per_client"]
    return [
        ("clients", f"{d['clients']:,}"),
        ("rows", f"{d['rows']:,} ({d['train_rows']:,} for training, {d['test_rows']:,} for testing)"),
        ("rows per client", f"{sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}"),
        ("features", f"{d['features']:,}"),
        *words.about_task(d),
        *_about_labels(d),
        *([("rows are", d["note"])] if d["note"] else []),
        *words.about_clients(d),
    ]


def print_notes(notes: Sequence[str]) -> None:
    """Prints the first notes on how a table was read and what looks wrong in it."""
    console = standard_output()
    for note in notes[:MOST_NOTES]:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)
    if len(notes) > MOST_NOTES:
        console.print(
            f"And {len(notes) - MOST_NOTES} more notes: see 'pfedme data describe'.", soft_wrap=True
        )


def _about_labels(d: dict[str, Any]) -> list[tuple[str, str]]:
    """The labels, and how they are distributed over clients."""
    if d["classes"]:
        own = d["labels_per_client"]
        spread = f"{own['min']}" if own["min"] == own["max"] else f"{own['min']} to {own['max']}"
        return [("classes", f"{d['classes']}"), ("labels per client", spread)]
    label, mean, std = d["label"], d["label_mean_per_client"], d["label_std_per_client"]
    ranges = (f"{measured(v['min'])} to {measured(v['max'])}" for v in (label, mean, std))
    whole = f"mean {measured(label['mean'])}, standard deviation {measured(label['std'])}"
    names = ("label (a number)", "its mean per client", "its standard deviation per client")
    return [(name, told) for name, told in zip(names, ranges, strict=True)] + [("over all rows", whole)]
