"""Tables that fit the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def standard_output() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    spare: Sequence[str] = (),
    *,
    wrap_last: bool = False,
) -> None:
    """Prints a table that fits the terminal: headers are wrapped first, then the columns `spare`, and then
    others from the right, are dropped. Numbers are never cut. With `wrap_last`, the last column may wrap."""
    header, kept = list(header), list(range(len(header)))
    order = [header.index(name) for name in spare if name in header]
    order += [k for k in range(len(header) - 1, 1, -1) if k not in order]
    wide = console.options.update(max_width=10_000)

    def made(broken: bool) -> Table:
        heads = [textwrap.fill(header[k], 9, break_long_words=False) if broken else header[k] for k in kept]
        table = plain_table(title, heads, [[row[k] for k in kept] for row in rows])
        if wrap_last:
            table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
        return table

    def fits(table: Table) -> bool:
        size = console.measure(table, options=wide)
        return (size.minimum if wrap_last else size.maximum) <= console.width

    table = made(broken=False)
    if not fits(table):
        table = made(broken=True)
    for k in order:
        if fits(table):
            break
        kept.remove(k)
        table = made(broken=True)
    if not fits(table):  # a very long name
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    console.print(table)
    if left_out := [header[k] for k in range(len(header)) if k not in kept]:
        console.print(f"A wider terminal also shows: {', '.join(left_out)}.", highlight=False)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with names on the left and numbers on the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k == 0 or not name else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
