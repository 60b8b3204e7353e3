"""The meaning of a table's texts: numbers in some form, dates or categories; and the kind of its label."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from pfedme.data.forms import PLAIN, Form, Found, cycles, find
from pfedme.data.rows import Rows, near
from pfedme.data.schema import Coded, Column, Task, coded, first, shortest
from pfedme.errors import InputError, Problems

MOST_CATEGORIES = 1_000
"""The largest number of categories of a column, and of classes of a label."""
MOST_CLASSES = 20
"""Number of distinct values above which a label with fractions is taken for a quantity."""

Texts = dict[str, list[Column]]
"""What becomes of each column that was read as text; see `columns_of_text`."""


def columns_of_text(rows: Rows, name: str) -> list[Column]:
    """What a column that was read as text becomes: numbers after all, a date, or categories, which are
    determined later."""
    column = rows.texts[name]
    drop = f"leave the column out with --drop {shlex.quote(name)}"
    if not column.names:
        raise InputError(f"Column '{name}' of {rows.where} is empty; {drop}.")
    found = form_of(rows, column)
    if found is not None:
        return _columns_of_form(rows, name, found, drop)
    if len(column.names) > MOST_CATEGORIES:
        raise InputError(
            f"Column '{name}' of {rows.where} has {len(column.names):,} different values, but at most "
            f"{MOST_CATEGORIES:,} categories are allowed; {drop}."
        )
    kinds = {part.types[name].is_numeric(): part.where for part in rows.parts}
    if len(kinds) == 2:
        rows.notes.append(
            f"Column '{name}' holds numbers in {kinds[True]} but text in {kinds[False]}, so it is read as "
            "categories."
        )
    return [Column(name, "category")]


def form_of(rows: Rows, column: Coded) -> Found | None:
    """The form that nearly all values of a column have; None if they are categories."""
    count = np.bincount(column.code + 1, minlength=len(column.names) + 1)[1:]
    signs = {part.decimal for part in rows.parts}
    found = find(pl.Series(column.names, dtype=pl.String), count, signs.pop() if len(signs) == 1 else None)
    if found is not None and found.form.unit and found.odd.any() and len(column.names) <= MOST_CLASSES:
        return None  # for example 1 child, 2 children, none
    return found


def _columns_of_form(rows: Rows, name: str, found: Found, drop: str) -> list[Column]:
    """The numeric columns that texts of a form become; raises an error for texts of another form."""
    column, form = rows.texts[name], found.form
    what = "times" if form.date == "time" else "dates" if form.date else "numbers"
    unit = f" with the unit '{form.unit}'" if form.unit else ""
    odd = found.odd
    if form.unit == "%" and found.bare:
        odd = odd | ~pl.Series(column.names).str.contains("%", literal=True).to_numpy()
    if odd.any():
        row = first(np.append(odd, False)[column.code])
        raise InputError(
            f"Column '{name}' of {rows.at(row)} is '{column.names[column.code[row]]}', but nearly all others "
            f"are {what}{unit}; write it like them, leave it empty and use --impute mean, or {drop}."
        )
    example = column.names[first(~found.odd)]
    if found.ambiguous:
        raise InputError(
            f"Column '{name}' of {rows.where} holds dates such as '{example}', which may have the day or the "
            f"month first; write them as 2024-12-31, or {drop}."
        )
    main = dataclasses.replace(near(name, found.values), form=form)
    if form == PLAIN:
        return [main]
    parts = cycles(found.values) if form.date not in ("", "time") else []
    rows.notes.append(_said_of_form(name, column, found, parts))
    return [main] + [
        Column(f"{name} ({part})", "number", of=name, form=dataclasses.replace(form, part=part))
        for part in parts
    ]


def _said_of_form(name: str, column: Coded, found: Found, parts: Sequence[str]) -> str:
    """The note on how texts are read."""
    form, example = found.form, max(column.names, key=len)
    value = float(found.values[column.names.index(example)])
    example = example.removesuffix(".000000")
    if form.date == "time":
        return f"Column '{name}' holds times such as '{example}', read as {value:.4g} hours."
    if form.date:
        order = {"ymd": "year, month, day", "dmy": "day, month, year", "mdy": "month, day, year"}[form.date]
        periods = list(dict.fromkeys(part.split()[0] for part in parts))
        places = f" and their positions in the {' and the '.join(periods)}" if periods else ""
        return f"Column '{name}' holds dates such as '{example}' ({order}), read as days since 1970{places}."
    bare = f"; {found.bare:,} have no '{form.unit}' and are read as if they did" if found.bare else ""
    return f"Column '{name}' holds numbers such as '{example}', read as {value:.10g}{bare}."


class Target(NamedTuple):
    """The kind of a label."""

    task: Task
    labels: tuple[str, ...] = ()
    """The classes of a classification."""
    form: Form = PLAIN
    """The form of a quantity's texts."""


def understand_label(rows: Rows, wanted: Task | None, *, among_others: bool = False) -> Target:
    """The kind of the label; for a client `among_others`, one class is enough."""
    name, numeric = rows.label.name, rows.label.dtype.is_numeric()
    if numeric:
        value = rows.label.to_numpy()
        if not (finite := np.isfinite(value)).all():
            row = first(~finite)
            raise InputError(f"The label '{name}' of {rows.at(row)} is {value[row]}; correct it.")
        distinct = [shortest(str(v)) for v in rows.label.unique().sort()[: MOST_CATEGORIES + 1]]
    else:
        texts = coded(rows.label)
        distinct = list(texts.names)
        found = form_of(rows, texts) if wanted != "classification" else None
        few = wanted is None and len(distinct) <= MOST_CLASSES
        if found is not None and (found.form.date or (few and found.form != PLAIN)):
            found = None
        if found is None and wanted == "regression":
            plain = PLAIN.read(pl.Series(distinct, dtype=pl.String))
            found = Found(PLAIN, plain.to_numpy(), plain.is_null().to_numpy())
        if found is not None and found.odd.any():
            row = first(found.odd[texts.code])
            raise InputError(
                f"The label '{name}' of {rows.at(row)} is '{distinct[texts.code[row]]}', which is not a "
                "number; correct it, or give --task classification."
            )
        if found is not None and found.form != PLAIN and (wanted or (found.values % 1).any()):
            rows.notes.append(_said_of_form(name, texts, found, ()))
            return Target("regression", form=found.form)
    if len(distinct) == 1 and not among_others:
        raise InputError(
            f"Every row of {rows.where} has '{name}' = {distinct[0]}; there is nothing to learn."
        )
    quantity = numeric and not rows.whole and len(distinct) > MOST_CLASSES
    if wanted == "regression" or (wanted is None and quantity):
        return Target("regression")
    if len(distinct) > MOST_CATEGORIES:
        cure = "give --task regression if it is a quantity" if numeric else "choose another --label"
        raise InputError(
            f"The label '{name}' of {rows.where} has more than {MOST_CATEGORIES:,} different values, too "
            f"many classes; {cure}."
        )
    return Target("classification", tuple(distinct))


def refuse_forms(columns: Iterable[Column], rows: Rows) -> None:
    """Raises an error for texts that are numbers or dates in a form that is specific to one client: a
    federation of several owners agrees on columns of plain numbers and categories."""
    problems = Problems()
    for column in columns:
        with problems:
            if column.form != PLAIN and not column.of:
                what = "dates or times" if column.form.date else "numbers with units or separators"
                raise InputError(
                    f"Column '{column.name}' of {rows.where} holds {what}, which clients with their own "
                    "tables cannot agree on; write plain numbers (for a date, days), or leave the column out "
                    f"with --drop {shlex.quote(column.name)}."
                )
    problems.raise_any(rows.where)
