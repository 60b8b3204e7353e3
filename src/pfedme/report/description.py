"""A description in words and tables: the columns, each client's labels, and how different clients are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pfedme.data.federation import Federation
from pfedme.data.schema import listed
from pfedme.report.describe import label_mean_std
from pfedme.report.spread import bars, label_shares

MOST_SHOWN = 40
"""At most this many clients, or columns, are listed."""
MOST_CLASSES = 12
"""With at most this many classes, each client's rows are counted by class."""
MOST_BARS = 60
"""At most this many classes are drawn."""
MOST_CATEGORIES = 6
"""At most this many categories are named."""


class Listing(NamedTuple):
    """A table to print."""

    title: str
    header: list[str]
    rows: list[list[str]]


def about_task(description: dict[str, Any]) -> list[tuple[str, str]]:
    """What is predicted, if the data names it."""
    if not description["target"]:
        return []
    names = description["target"]["labels"]
    return [
        (
            "to predict",
            f"'{description['target']['name']}', "
            + (f"a class: {listed(names, quote=False)}" if names else "a quantity"),
        )
    ]


def about_clients(description: dict[str, Any]) -> list[tuple[str, str]]:
    """How different clients are, and how different they would be by chance.

    >>> about_clients({"classes": 3, "unlike": {"labels": {"distance": 0.41, "by_chance": 0.02}}})
    [("clients' labels differ by", '0.41, by chance 0.02 (total variation: 0 equal, 1 disjoint)')]
    """
    means = "of their means, in standard deviations"
    units = {"labels": "total variation: 0 equal, 1 disjoint" if description["classes"] else means}
    return [
        (
            f"clients' {what} differ by",
            f"{d['distance']:.2f}, by chance {d['by_chance']:.2f} ({units.get(what, means)})",
        )
        for what, d in description["unlike"].items()
    ]


def tables(description: dict[str, Any], federation: Federation) -> Iterator[Listing]:
    """The columns of a table, and each client's labels, as many as are easy to read."""
    if description["columns"]:
        yield _columns(description["columns"])
    yield _labels(federation)


def _columns(told: list[dict[str, Any]]) -> Listing:
    rows = []
    for column in told[:MOST_SHOWN]:
        if column["kind"] == "number":
            numbers = [_number(column[k]) for k in ("mean", "std", "min", "max")]
            rows.append([column["name"], "number", *numbers, ""])
        elif column["kind"] == "date":
            rows.append([column["name"], "date", column["mean"], "", column["min"], column["max"], ""])
        else:
            common = sorted(column["categories"].items(), key=lambda item: -item[1])
            shown = ", ".join(f"{name} {n:,}" for name, n in common[:MOST_CATEGORIES])
            more = len(common) - MOST_CATEGORIES
            rows.append(
                [column["name"], "category", *[""] * 4, shown + (f" and {more:,} more" if more > 0 else "")]
            )
    header = ["column", "kind", "mean", "deviation", "from", "to", "categories"]
    return Listing(f"columns{_first(len(rows), len(told))}", header, rows)


def _labels(federation: Federation) -> Listing:
    """Each client's labels as a picture and, if there are few classes, in numbers."""
    f = federation
    shares, names = label_shares(f)
    who = min(f.clients, MOST_SHOWN)
    title, header, numbers = "rows of each label, by client", list[str](), [list[str]()] * who
    if f.classes == 0:
        title, header = "labels, by client", ["mean", "deviation"]
        numbers = [[_number(v) for v in own] for own in zip(*label_mean_std(f), strict=True)]
    elif f.classes <= MOST_CLASSES:
        header = names
        numbers = [[f"{c:,}" if c else "·" for c in counts] for counts in f.label_counts()[:who]]
    most = float(shares[:who].max())
    rows = [
        [f.name(i), f"{f.count[i]:,}", *numbers[i], bars(shares[i, :MOST_BARS], most)] for i in range(who)
    ]
    return Listing(f"{title}{_first(who, f.clients)}", ["client", "rows", *header, "picture"], rows)


def _first(shown: int, there: int) -> str:
    return f", the first {shown} of {there:,}" if shown < there else ""


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
