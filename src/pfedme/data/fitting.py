"""From statistics that clients share about their training rows to the columns of a schema."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pfedme.data.layout import Layout
from pfedme.data.reading import on_all_cores
from pfedme.data.rows import Rows
from pfedme.data.schema import MISSING, Coded, Column, Place, Schema, Task, as_numbers, coded, listed
from pfedme.data.understanding import MOST_CATEGORIES, Texts
from pfedme.errors import InputError

BLOCK = 2**17
"""Numbers that are summed at once: few enough to stay in the processor's cache."""


class Sums(NamedTuple):
    """What clients share about the training rows of numeric columns: one row per client, one column per
    column."""

    values: np.ndarray
    """Number of values."""
    total: np.ndarray
    squares: np.ndarray
    """Sums of the values' squares."""


def sums_of_clients(x: np.ndarray, start: np.ndarray, count: np.ndarray) -> Sums:
    """The sums over rows start[i] ... start[i] + count[i] − 1 of x, for each client i; NaN means missing.

    >>> sums = sums_of_clients(np.array([[1.0], [3.0], [np.nan], [5.0]]), np.array([0, 2]), np.array([2, 2]))
    >>> sums.values.tolist(), sums.total.tolist(), sums.squares.tolist()
    ([[2.0], [1.0]], [[4.0], [5.0]], [[10.0], [25.0]])
    """
    # Sums between neighbouring edges: the rows of a client, then those up to the next client's, and so on.
    edges = np.stack([start, start + count], axis=1).ravel()
    inside = edges < len(x)

    def sums(values: np.ndarray) -> np.ndarray:
        out = np.zeros((len(edges), x.shape[1]))
        out[inside] = np.add.reduceat(values, edges[inside], axis=0)
        return out[::2] * (count > 0)[:, None]

    known = x.astype(np.float64)
    missing = np.isnan(known)
    values = np.broadcast_to(count[:, None], (len(count), x.shape[1])).astype(np.float64)
    if missing.any():
        known[missing] = 0
        values -= sums(missing.astype(np.float64))
    total = sums(known)
    return Sums(values, total, sums(np.square(known, out=known)))


def told_by_clients(x: np.ndarray, start: np.ndarray, count: np.ndarray) -> Iterator[Sums]:
    """`sums_of_clients` in pieces, to save memory: a client may share its sums in several parts."""
    step = max(1, BLOCK // max(1, x.shape[1]))
    for low in range(0, len(x), step):
        high = min(low + step, len(x))
        some = slice(max(0, np.searchsorted(start, low, "right") - 1), np.searchsorted(start, high))
        begin, end = (np.clip(edge[some], low, high) - low for edge in (start, start + count))
        yield sums_of_clients(x[low:high], begin, end - begin)


def combine(sums: Iterable[Sums]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number of values of each column, their mean and their standard deviation, from all clients' sums; a
    constant column gets a standard deviation of 1.

    >>> count, mean, scale = combine([Sums(np.array([[3]]), np.array([[9]]), np.array([[35]]))])
    >>> count, mean, scale**2
    (array([3]), array([3.]), array([2.66666667]))
    """
    each = (np.stack([told.sum(axis=0) for told in part]) for part in sums)
    count, total, squares = functools.reduce(np.add, each)
    mean, square = total / np.maximum(count, 1), squares / np.maximum(count, 1)
    spread = square - mean**2
    # For a constant column, the remaining variance is rounding error.
    varies = spread > 1e-12 * square
    return count, mean, np.where(varies, np.sqrt(np.where(varies, spread, 1)), 1.0)


def sets_of_clients(code: np.ndarray, owner: np.ndarray, clients: int, categories: int) -> np.ndarray:
    """Whether each client (row) has each category (column) in its training rows."""
    seen = np.zeros((clients, categories + 1), bool)
    seen[owner, code] = True  # the last column is for −1, no category
    return seen[:, :categories]


class Gathered(NamedTuple):
    """A table's features before they are standardised, and what its clients share about them."""

    x: np.ndarray
    numbers: list[Column]
    """Numeric columns, the first features, relative to their means so far."""
    sums: Iterator[Sums]
    categories: list[Column]


def gather(tables: Sequence[Rows], layout: Layout, schema: Schema, texts: Texts) -> Gathered:
    """All features in their places, and the sums and sets of training rows."""
    rows = tables[0]
    columns = [column for own in texts.values() for column in own]
    numbers = [*rows.standard.columns, *(column for column in columns if column.kind == "number")]
    categories = [_category(rows, c.name, layout, schema) for c in columns if c.kind == "category"]
    x = layout.filled(tables, dataclasses.replace(schema, columns=(*numbers, *categories)), fitting=True)
    sums = told_by_clients(x[:, : len(numbers)], layout.start, layout.n_train)
    return Gathered(x, numbers, sums, categories)


def fit(tables: Sequence[Rows], layout: Layout, schema: Schema, texts: Texts) -> tuple[np.ndarray, Schema]:
    """All features in their places, and the schema with its columns fitted to training rows."""
    x, shifted, sums, categories = gather(tables, layout, schema, texts)
    rows = tables[0]
    zero = np.array([column.mean for column in shifted])
    count, mean, scale = combine(sums)
    if len(empty := np.flatnonzero(count == 0)):
        names = list(dict.fromkeys(shifted[k].source for k in empty))
        raise InputError(
            f"Column {listed(names)} of {rows.where} has no value in any training row; leave it out with "
            f"--drop {shlex.quote(','.join(names))}."
        )
    own = zip(shifted, zero + mean, scale, zero, strict=True)
    columns = [
        dataclasses.replace(column, mean=float(m), scale=float(s), near=float(z)) for column, m, s, z in own
    ]
    schema = dataclasses.replace(schema, columns=(*columns, *categories))
    step = max(1, 8 * BLOCK // x.shape[1])

    def standardise(at: int) -> None:
        block = x[at : at + step]
        schema.standardise(block)
        if schema.impute:
            np.nan_to_num(block, copy=False, nan=0.0)

    on_all_cores(standardise, range(0, len(x), step))
    return x, schema


def fit_label(rows: Rows, layout: Layout, schema: Schema) -> Schema:
    """The schema with the mean and the scale of a regression's labels in training rows."""
    if schema.task == "classification":
        return schema
    owner = rows.client.code[layout.in_train]
    order = np.argsort(owner, kind="stable")
    y = as_numbers(rows.label, Place(rows.where), schema.label_form)[layout.in_train][order][:, None]
    near = float(y[0, 0])
    start = np.cumsum(layout.n_train) - layout.n_train
    _, mean, scale = combine(told_by_clients(y - near, start, layout.n_train))
    return dataclasses.replace(schema, label_mean=near + float(mean[0]), label_scale=float(scale[0]))


def _category(rows: Rows, name: str, layout: Layout, schema: Schema, least: int = 1) -> Column:
    """A column of categories, with those that some client has in at least `least` of its training rows."""
    text = rows.texts[name]
    code, owner = (values[layout.in_train] for values in (text.code, rows.client.code))
    if least == 1:
        seen = sets_of_clients(code, owner, len(rows.client.names), len(text.names)).any(axis=0)
        missing = bool((code < 0).any())
    else:
        *count, none = np.bincount(code % (len(text.names) + 1), minlength=len(text.names) + 1)
        seen, missing = np.array(count) >= least, none >= least
    names = {text.names[k] for k in np.flatnonzero(seen)}
    if schema.impute and missing:
        names.add(MISSING)
    return Column(name, "category", categories=tuple(sorted(names)))


@dataclasses.dataclass(frozen=True)
class Told:
    """What a client of a deployed federation shares about its table."""

    label: str
    task: Task
    impute: bool
    numbers: dict[str, Moments]
    """Numeric columns, with the moments of their training rows."""
    categories: dict[str, tuple[str, ...]]
    """Columns of categories, with the categories that occur in training rows."""
    classes: tuple[str, ...] = ()
    """The labels that occur, in a classification."""
    quantity: Moments | None = None
    """The moments of the label, in a regression."""
    most_classes: int = MOST_CATEGORIES
    """The largest number of classes that the client accepts."""


class Moments(NamedTuple):
    """A summary of numbers."""

    values: float
    """How many numbers there are."""
    mean: float
    spread: float
    """The mean of their squared distances from the mean."""

    @classmethod
    def of(cls, values: np.ndarray, least: int = 1, zero: float = 0.0) -> Moments:
        """The moments of numbers, measured from `zero`, with NaN for missing ones.

        Nothing is revealed of fewer than `least` numbers, or of equal ones. Of fewer than `least` different
        numbers only one digit is revealed, so that it does not show how many rows have each value.

        >>> Moments.of(np.array([1.0, 2.0, 4.0])).mean, Moments.of(np.array([1.0, 2.0, 4.0]), least=5).values
        (2.3333333333333335, 0)
        >>> Moments.of(np.array([0.0] * 163 + [1.0] * 27), least=5)  # a mean of 0.142, a deviation of 0.349
        Moments(values=190, mean=0.1, spread=0.09)
        """
        own = values[~np.isnan(values)].astype(np.float64)
        different = len(np.unique(own)) if least > 1 else len(own)
        if len(own) < least or (least > 1 and different == 1) or not len(own):
            return cls(0, 0.0, 0.0)
        mean, deviation = zero + float(own.mean()), float(own.std())
        if different < least:
            digit = 10.0 ** np.floor(np.log10(deviation))
            mean, deviation = (round(value / digit) * digit for value in (mean, deviation))
            mean, deviation = (float(f"{value:.12g}") for value in (mean, deviation))
            return cls(len(own) // least * least, mean, float(f"{deviation**2:.12g}"))
        return cls(len(own), mean, float(own.var()))


def tell(
    tables: Sequence[Rows], layout: Layout, schema: Schema, texts: Texts, least: int,
    ranges: Mapping[str | None, tuple[float, float]],
) -> Told:  # fmt: skip
    """What the only client of a table shares about it; texts that occur in fewer than `least` training rows
    are not revealed. Numbers in columns with a range are moved into it, and told as they are; None stands for
    the label."""
    x, numbers, _, categorical = gather(tables, layout, schema, texts)
    rows, n = tables[0], int(layout.n_train[0])
    names = [column.name for column in categorical]
    categories = {name: _category(rows, name, layout, schema, least).categories for name in names}
    for name, told in categories.items():
        drop = f"leave it out with --drop {shlex.quote(name)}"
        _refuse_rare(f"Column '{name}' of {rows.where}", rows.texts[name], told, layout, least, drop)
    if schema.task == "classification" and not rows.label.dtype.is_numeric():
        labels = coded(rows.label)
        count = np.bincount(labels.code[layout.in_train], minlength=len(labels.names))
        often = tuple(np.array(labels.names)[count >= least])
        what = f"The label '{schema.label}' of {rows.where}"
        _refuse_rare(what, labels, often, layout, least, "choose another --label")

    def moments(name: str | None, values: np.ndarray, zero: float = 0.0) -> Moments:
        if name not in ranges:
            return Moments.of(values, least, zero)
        lowest, highest = ranges[name]
        return Moments.of(np.clip(values.astype(np.float64), lowest - zero, highest - zero), 1, zero)

    quantity = None
    if schema.task == "regression":
        quantity = moments(None, rows.label.to_numpy()[layout.in_train])
    return Told(
        label=schema.label,
        task=schema.task,
        impute=schema.impute,
        numbers={
            column.name: moments(column.name, x[:n, k], column.mean) for k, column in enumerate(numbers)
        },
        categories=categories,
        classes=schema.labels,
        quantity=quantity,
    )


def _refuse_rare(
    what: str, column: Coded, told: Sequence[str], layout: Layout, least: int, cure: str
) -> None:
    """Raises an error if most texts are rare, such as names: they may identify people."""
    often = np.array([*(name in set(told) for name in column.names), True])  # the last is for missing ones
    if least > 1 and often[column.code[layout.in_train]].mean() < 0.5:
        raise InputError(
            f"{what} has {len(column.names):,} different values, and most rows have one that occurs in fewer "
            f"than {least} rows: it may identify people. Please {cure}, or reveal it with --min-count 1."
        )
