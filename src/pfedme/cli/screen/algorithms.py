"""The list of algorithms, and the description of one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from rich.markup import escape
from rich.table import Table

from pfedme.algorithms.base import Idea
from pfedme.cli.options import flag, help_of
from pfedme.cli.screen.layout import standard_output
from pfedme.core.spec import field_types

if TYPE_CHECKING:
    from pfedme.algorithms import Algorithm


def print_algorithms(facts: Sequence[dict[str, Any]]) -> None:
    """Prints all algorithms, grouped by what clients share."""
    console = standard_output()
    for idea in get_args(Idea):
        console.print(f"\n[bold]{idea}[/bold]")
        console.print(_pairs([(fact["name"], fact["about"]) for fact in facts if fact["idea"] == idea]))
    away = [fact["name"] for fact in facts if not fact["deployable"]]
    console.print(f"\nFor simulations only: {', '.join(away)}. All others can be deployed.", highlight=False)
    console.print("'pfedme algorithms NAME' describes one of them.", highlight=False)


def print_algorithm(fact: dict[str, Any], cls: type[Algorithm]) -> None:
    """Prints what one algorithm does, and its hyperparameters."""
    console = standard_output()
    console.print(f"\n[bold]{fact['name']}[/bold]  {escape(fact['reference'])}\n", highlight=False)
    console.print(escape(inspect.cleandoc(cls.__doc__ or "")), highlight=False)
    console.print()
    deployed = "yes" if fact["deployable"] else f"no: {fact['why_not'] or 'nothing is shared'}"
    rows = [
        ("personal model", fact["personal"] or "none"),
        ("a client sends", fact["sends"] or "nothing"),
        ("a newcomer gets", fact["newcomer"]),
        ("gradients", f"{fact['gradients']} per client and round with the default settings"),
        ("can be deployed", deployed),
    ]
    console.print(_pairs(rows if fact["gradients"] is not None else [*rows[:3], rows[4]]))
    docs, default = help_of(cls), cls()
    console.print("\n[bold]hyperparameters[/bold]")
    shown = [(flag(name), f"{docs[name]} ({_written(getattr(default, name))})") for name in field_types(cls)]
    console.print(_pairs([(name, text.replace("%%", "%")) for name, text in shown]))


def _written(value: Any) -> str:
    return str(getattr(value, "name", value)) if value is not None else "none"


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names with texts, which wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(f"  {escape(name)}", escape(text))
    return table
