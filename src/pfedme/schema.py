"""Columns of a table, and how its rows become numbers.

A number becomes (value − mean)/scale, a category one feature for each value that it takes, 1 where it takes
it. Means, scales and categories come from what each client can tell about its training rows without showing
one of them: how many there are, their sums, the sums of their squares, and the categories that occur.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from pfedme.errors import InputError

Kind = Literal["number", "category"]
Task = Literal["classification", "regression"]

MISSING = "missing"
"""The category of missing values, where they are imputed."""
SHOWN = 5
"""How many names a message lists at most."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of features."""

    name: str
    kind: Kind
    mean: float = 0.0
    """Of a number, over all clients' training rows."""
    scale: float = 1.0
    """Its standard deviation there; 1 for a column that is constant."""
    categories: tuple[str, ...] = ()
    """Of a category, sorted; one feature each."""

    @property
    def features(self) -> int:
        """Numbers that this column becomes."""
        return 1 if self.kind == "number" else len(self.categories)


class MissingValues(InputError):
    """Values that are not there, in a table whose missing values are not imputed."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """Which columns of a table are what, complete enough to encode other rows in the same way.

    >>> schema = Schema(
    ...     columns=(Column("age", "number", 50.0, 10.0), Column("sex", "category", categories=("f", "m"))),
    ...     label="outcome", client="hospital", task="classification", labels=("no", "yes"),
    ... )
    >>> schema.encode(pl.DataFrame({"sex": ["m", "f"], "age": [60, 45]}), "new rows")
    array([[ 1. ,  0. ,  1. ],
           [-0.5,  1. ,  0. ]], dtype=float32)
    >>> Schema.from_json(schema.to_json()) == schema
    True
    """

    columns: tuple[Column, ...]
    label: str
    client: str | None
    """The client column; None where each client has a file of its own."""
    task: Task
    labels: tuple[str, ...] = ()
    """The classes as text, sorted; by value if all are numbers."""
    label_mean: float = 0.0
    """Of a regression, whose y is (value − label_mean)/label_scale."""
    label_scale: float = 1.0
    impute: bool = False
    """Whether a missing number becomes the mean, and a missing category one of its own."""

    @property
    def features(self) -> int:
        """Numbers that a row becomes."""
        return sum(column.features for column in self.columns)

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """The columns that are numbers."""
        return tuple(column for column in self.columns if column.kind == "number")

    @cached_property
    def starts(self) -> dict[str, int]:
        """The first feature of each column."""
        at = np.cumsum([0, *(column.features for column in self.columns)])
        return {column.name: int(k) for column, k in zip(self.columns, at, strict=False)}

    def encode(
        self, frame: pl.DataFrame, where: str, *, first_row: int = 1, strangers: bool = False
    ) -> np.ndarray:
        """The rows of a frame as numbers, float32, rows × features.

        `where` is what an error calls the frame, and `first_row` the number of its first row. `strangers`
        allows categories that the schema does not know: such a row gets none of its column's features.
        """
        self.require(frame.columns, where)
        place = Place(where, first_row)
        block = np.empty((frame.height, len(self.numbers)))
        for k, column in enumerate(self.numbers):
            block[:, k] = _as_numbers(frame[column.name], place)
        out = np.zeros((frame.height, self.features), np.float32)
        out[:, [self.starts[column.name] for column in self.numbers]] = self.standardised(block, place)
        for column in self.columns:
            if column.kind == "category":
                code = self._codes(column, frame[column.name], place, strangers)
                known = np.flatnonzero(code >= 0)
                out[known, self.starts[column.name] + code[known]] = 1
        return out

    def require(self, names: Sequence[str], where: str) -> None:
        """Raises an error if a column of features is not among `names`."""
        if lacking := [column.name for column in self.columns if column.name not in names]:
            raise InputError(
                f"{where} has no column {listed(lacking)}; its columns are {listed(names, quote=False)}."
            )

    def standardised(self, block: np.ndarray, place: Place) -> np.ndarray:
        """A block of the number columns' values, NaN where one is missing, as (value − mean)/scale."""
        mean, scale = (np.array([getattr(c, name) for c in self.numbers]) for name in ("mean", "scale"))
        with np.errstate(over="ignore", invalid="ignore"):
            z = ((block - mean) / scale).astype(np.float32)
        if not np.isfinite(z).all():
            missing = np.isnan(block)
            if missing.any() and not self.impute:
                row, column = np.argwhere(missing)[0]
                raise place.missing(self.numbers[column].name, int(row))
            if (infinite := ~np.isfinite(z) & ~missing).any():
                row, column = np.argwhere(infinite)[0]
                raise InputError(
                    f"Column '{self.numbers[column].name}' of {place.at(int(row))} is {block[row, column]}, "
                    "which no model can use; correct it, or leave it empty and give --impute mean."
                )
            z[missing] = 0
        return z

    def _codes(self, column: Column, series: pl.Series, place: Place, strangers: bool) -> np.ndarray:
        """Which category each value is; −1 for none."""
        if not (is_category(series.dtype) or series.dtype.is_integer() or series.dtype == pl.Null):
            raise InputError(
                f"Column '{column.name}' of {place.where} holds {in_words(series.dtype)}, and should hold "
                f"categories such as {listed(column.categories)}."
            )
        text = series.cast(pl.String)
        if text.null_count():
            if not self.impute:
                raise place.missing(column.name, int(text.is_null().arg_max() or 0))
            text = text.fill_null(MISSING)
        code = text.cast(pl.Enum(column.categories), strict=False).to_physical()
        if code.null_count() and not strangers:
            unknown = code.is_null() & (text != MISSING) if self.impute else code.is_null()
            if unknown.any():
                row = int(unknown.arg_max() or 0)
                raise InputError(
                    f"Column '{column.name}' of {place.at(row)} is '{text[row]}', a category that the "
                    f"training rows do not have; they have {listed(column.categories)}."
                )
        return code.cast(pl.Int64).fill_null(-1).to_numpy()

    def encode_label(self, series: pl.Series, where: str, *, first_row: int = 1) -> np.ndarray:
        """The labels as classes 0, 1, ... (int32), or standardised numbers (float32)."""
        place = Place(where, first_row)
        if series.null_count():
            raise place.missing(self.label, int(series.is_null().arg_max() or 0))
        if self.task == "regression":
            y = (_as_numbers(series, place) - self.label_mean) / self.label_scale
            return y.astype(np.float32)
        text = as_text(series, numeric=all(map(is_number, self.labels)))
        code = text.cast(pl.Enum(self.labels), strict=False).to_physical()
        if code.null_count():
            row = int(code.is_null().arg_max() or 0)
            raise InputError(
                f"The label '{self.label}' of {place.at(row)} is '{series[row]}', which no training row has; "
                f"they have {listed(self.labels)}."
            )
        return code.cast(pl.Int32).to_numpy()

    def to_json(self) -> dict[str, Any]:
        """This schema as JSON values."""
        columns = [{**dataclasses.asdict(c), "categories": list(c.categories)} for c in self.columns]
        return {**dataclasses.asdict(self), "columns": columns, "labels": list(self.labels)}

    @classmethod
    def from_json(cls, document: Any) -> Schema:
        """The inverse of `to_json`."""
        try:
            columns = tuple(
                Column(**{**c, "categories": tuple(c["categories"])}) for c in document["columns"]
            )
            return cls(**{**document, "columns": columns, "labels": tuple(document["labels"])})
        except (KeyError, TypeError) as error:
            raise InputError(f"This is not the description of a table's columns: {error}.") from None


class Place(NamedTuple):
    """Where rows come from, for messages."""

    where: str
    first_row: int = 1

    def at(self, row: int) -> str:
        """`row 17 of patients.csv`, for a place among the rows."""
        return f"row {self.first_row + row} of {self.where}"

    def missing(self, column: str, row: int) -> MissingValues:
        """The error for a value that is not there."""
        return MissingValues(
            f"Column '{column}' of {self.at(row)} is empty; fill it, leave the row out, or train with "
            "--impute mean."
        )


class Sums(NamedTuple):
    """What clients tell about the training rows of number columns: a row a client, a column a column."""

    values: np.ndarray
    """How many values are there."""
    total: np.ndarray
    squares: np.ndarray
    """Sums of the values' squares."""


def sums_of_clients(x: np.ndarray, start: np.ndarray, count: np.ndarray) -> Sums:
    """The sums over rows start[i] ... start[i] + count[i] − 1 of x, for each client i; NaN is a missing one.

    >>> sums = sums_of_clients(np.array([[1.0], [3.0], [np.nan], [5.0]]), np.array([0, 2]), np.array([2, 2]))
    >>> sums.values.tolist(), sums.total.tolist(), sums.squares.tolist()
    ([[2.0], [1.0]], [[4.0], [5.0]], [[10.0], [25.0]])
    """
    # Sums between neighbouring edges: the rows of a client, then those up to the next one's, and so on.
    edges = np.stack([start, start + count], axis=1).ravel()

    def sums(values: np.ndarray) -> np.ndarray:
        padded = np.concatenate([values, np.zeros_like(values[:1])])
        return np.add.reduceat(padded, edges, axis=0)[::2] * (count > 0)[:, None]

    there = ~np.isnan(x)
    known = np.where(there, x, 0).astype(np.float64)
    return Sums(sums(there.astype(np.float64)), sums(known), sums(known**2))


def combine(sums: Sequence[Sums]) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the standard deviation of each column, from all clients' sums; 0 and 1 where no client has
    a value, and a standard deviation of 1 where all values are equal.

    >>> combine([Sums(np.array([[2.0], [1.0]]), np.array([[4.0], [5.0]]), np.array([[10.0], [25.0]]))])
    (array([3.]), array([1.63299316]))
    """
    count, total, squares = (sum(part.sum(axis=0) for part in parts) for parts in zip(*sums, strict=True))
    mean = total / np.maximum(count, 1)
    spread = squares / np.maximum(count, 1) - mean**2
    # What is left of a constant's squares is rounding.
    varies = spread > 1e-12 * np.maximum(squares / np.maximum(count, 1), 1e-300)
    return mean, np.where(varies, np.sqrt(np.where(varies, spread, 1)), 1.0)


def as_text(series: pl.Series, *, numeric: bool) -> pl.Series:
    """The values as text; as the shortest text of their numbers, if they are to be compared as numbers.

    >>> as_text(pl.Series(["1.0", "01", "2.50"]), numeric=True).to_list()
    ['1', '1', '2.5']
    """
    text = series.cast(pl.String)
    if not numeric:
        return text
    distinct = text.drop_nulls().unique()
    shown = pl.Series([shortest(t) if is_number(t) else t for t in distinct], dtype=pl.String)
    return text.replace_strict(distinct, shown, default=None)


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def listed(names: Sequence[str], *, quote: bool = True) -> str:
    """The first names, and how many there are more.

    >>> listed(["a", "b", "c"]), listed(list("abcdefgh"), quote=False)
    ("'a', 'b', 'c'", 'a, b, c, d, e and 3 more')
    """
    shown = ", ".join(f"'{name}'" if quote else name for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def shortest(number: str) -> str:
    """The shortest text of a number that is given as text."""
    value = float(number)
    return str(int(value)) if value.is_integer() else repr(value)


def _as_numbers(series: pl.Series, place: Place) -> np.ndarray:
    """The values as float64, NaN where one is missing."""
    dtype = series.dtype
    if dtype == pl.String:
        number = series.str.strip_chars().replace("", None).cast(pl.Float64, strict=False)
        if (wrong := number.is_null() & series.is_not_null() & (series.str.strip_chars() != "")).any():
            row = int(wrong.arg_max() or 0)
            raise InputError(
                f"Column '{series.name}' of {place.at(row)} is '{series[row]}', which is no number; correct "
                "it, or leave it empty and train with --impute mean."
            )
    elif dtype.is_numeric() or dtype == pl.Null:
        number = series.cast(pl.Float64)
    else:
        raise InputError(
            f"Column '{series.name}' of {place.where} holds {in_words(dtype)}, and should hold numbers."
        )
    return number.to_numpy()


def is_category(dtype: pl.DataType) -> bool:
    """Whether a column of this type holds categories."""
    return dtype in (pl.String, pl.Boolean) or isinstance(dtype, pl.Categorical | pl.Enum)


def in_words(dtype: pl.DataType) -> str:
    """What a column of this type holds."""
    if dtype.is_temporal():
        return "dates or times"
    if dtype.is_nested():
        return "lists or records"
    if dtype.is_numeric():
        return "numbers"
    return "true and false" if dtype == pl.Boolean else "text" if is_category(dtype) else "binary data"
