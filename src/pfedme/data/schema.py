"""Columns of a table, and how its rows become numbers.

A number becomes (value − mean)/scale. A category becomes one feature for each of its values, which is 1 in
rows with that value. A date becomes several numbers. Means, scales and categories come from what each client
can share about its training rows without revealing any of them: their number, their sums, the sums of their
squares, and the categories that occur.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from pfedme.data.forms import PLAIN, Form
from pfedme.errors import InputError

Kind = Literal["number", "category"]
Task = Literal["classification", "regression"]

MISSING = "missing"
"""The category of missing values, if they are imputed."""
SHOWN = 5
"""The largest number of names that a message lists."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A feature column."""

    name: str
    kind: Kind
    mean: float = 0.0
    """Mean of a number over all clients' training rows."""
    scale: float = 1.0
    """Standard deviation of a number over all clients' training rows; 1 for a constant column."""
    categories: tuple[str, ...] = ()
    """The values of a category, sorted; one feature each."""
    near: float | None = None
    """For a number, the value that is subtracted in double precision before conversion to single precision,
    which could not tell large numbers apart; the mean if not given."""
    of: str = ""
    """The source column in the table, if its name differs: a date becomes several columns."""
    form: Form = PLAIN
    """The form of its texts, if they are numbers or dates."""

    @property
    def source(self) -> str:
        """The column of the table that this one is made from."""
        return self.of or self.name

    @property
    def zero(self) -> float:
        """The value that numbers are measured from."""
        return self.mean if self.near is None else self.near

    @property
    def features(self) -> int:
        """Numbers that this column becomes."""
        return 1 if self.kind == "number" else len(self.categories)


class MissingValues(InputError):
    """Missing values in a table without imputation."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """The meaning of a table's columns, complete enough to encode other rows in the same way.

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
    """The client column; None if each client has its own file."""
    task: Task
    labels: tuple[str, ...] = ()
    """The classes as text, sorted; by value if all are numbers."""
    label_mean: float = 0.0
    """For a regression, whose y is (value − label_mean)/label_scale."""
    label_scale: float = 1.0
    label_form: Form = PLAIN
    """The form of a quantity's texts."""
    impute: bool = False
    """Whether a missing number becomes the mean, and a missing category a separate category."""
    na: tuple[str, ...] = ()
    """Additional words, or numbers, that count as missing values."""

    @property
    def features(self) -> int:
        """Numbers that a row becomes."""
        return sum(column.features for column in self.columns)

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """The columns that are numbers."""
        return tuple(column for column in self.columns if column.kind == "number")

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The columns of a table that features are made from."""
        return tuple(dict.fromkeys(column.source for column in self.columns))

    @cached_property
    def starts(self) -> dict[str, int]:
        """The first feature of each column."""
        at = np.cumsum([0, *(column.features for column in self.columns)])
        return {column.name: int(k) for column, k in zip(self.columns, at, strict=False)}

    def encode(
        self, frame: pl.DataFrame | np.ndarray, where: str, *, first_row: int = 1, fitting: bool = False
    ) -> np.ndarray:
        """The rows of a frame, or of an array of numeric columns, as float32 numbers, rows × features.

        `where` is the name of the frame in error messages, and `first_row` the number of its first row. While
        a schema is `fitting`, numbers to impute stay NaN, and unknown categories become zeros.
        """
        place = Place(where, first_row)
        if isinstance(frame, np.ndarray):
            rows = self._flat(frame, where)
            values = {column.name: rows[:, k] for k, column in enumerate(self.numbers)}
        else:
            self.require(frame.columns, where)
            if self.na:
                frame = frame.select(blanked(name, frame.schema[name], self.na) for name in self.sources)
            values = {c.name: as_numbers(frame[c.source], place, c.form) for c in self.numbers}
        out = np.zeros((len(frame), self.features), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for column in self.numbers:
                # Column by column and in float64, so that little precision is lost and little is copied.
                out[:, self.starts[column.name]] = values[column.name] - column.zero
            self.standardise(out)
        if not np.isfinite(out).all():
            self._mend(out, values, place, fitting)
        for column in self.columns:
            if column.kind == "category" and not isinstance(frame, np.ndarray):
                self._mark_series(out, column, frame[column.name], place, fitting)
        return out

    def standardise(self, counted: np.ndarray) -> None:
        """Standardises features whose numbers are measured from `Column.zero`, in place."""
        shift, size = self._shift_and_size
        if shift.any() or (size != 1).any():
            # All features at once, because they are contiguous: 0 and 1 leave categories unchanged.
            counted -= shift
            counted /= size

    @cached_property
    def _shift_and_size(self) -> tuple[np.ndarray, np.ndarray]:
        shift, size = np.zeros(self.features, np.float32), np.ones(self.features, np.float32)
        for column in self.numbers:
            at = self.starts[column.name]
            shift[at], size[at] = column.mean - column.zero, column.scale
        return shift, size

    def _mend(self, out: np.ndarray, values: dict[str, np.ndarray], place: Place, fitting: bool) -> None:
        """Imputes missing numbers or raises an error for them; raises an error for infinite ones."""
        for column in self.numbers:
            z, value = out[:, self.starts[column.name]], values[column.name]
            missing = np.isnan(value)
            if missing.any() and not self.impute:
                raise place.missing(column.source, first(missing))
            if (infinite := ~np.isfinite(z) & ~missing).any():
                row = first(infinite)
                raise InputError(
                    f"Column '{column.name}' of {place.at(row)} is {value[row]}, which no model can use; "
                    "correct it, or leave it empty and use --impute mean."
                )
            z[missing] = np.nan if fitting else 0

    def _flat(self, rows: np.ndarray, where: str) -> np.ndarray:
        """Rows or images as rows of numbers, after a check that they have all columns."""
        if dates := [column.source for column in self.columns if column.form.date]:
            raise InputError(f"The rows of {where} must be a frame, because '{dates[0]}' is a date.")
        width = int(np.prod(rows.shape[1:]))
        if width != self.features:
            raise InputError(f"The rows of {where} have {width} numbers, but should have {self.features}.")
        return rows.reshape(len(rows), width)

    def require(self, names: Sequence[str], where: str) -> None:
        """Raises an error if a feature column is not among `names`."""
        if lacking := [name for name in self.sources if name not in names]:
            raise InputError(
                f"{where} has no column {listed(lacking)}; its columns are {listed(names, quote=False)}."
            )

    def _mark_series(
        self, out: np.ndarray, column: Column, series: pl.Series, place: Place, fitting: bool
    ) -> None:
        """`mark` for values that are not coded yet."""
        if not (is_category(series.dtype) or series.dtype.is_integer() or series.dtype == pl.Null):
            raise InputError(
                f"Column '{column.name}' of {place.where} holds {in_words(series.dtype)}, but should hold "
                f"categories such as {listed(column.categories)}."
            )
        own = coded(series)
        if series.dtype == pl.Boolean:
            # A boolean is "true" in a typed table, but may have been "True" in a text file.
            names = {name.lower(): name for name in column.categories}
            own = Coded(own.code, tuple(names.get(name, name) for name in own.names))
        self.mark(out, column, own, place, fitting=fitting)

    def mark(self, out: np.ndarray, column: Column, own: Coded, place: Place, *, fitting: bool) -> None:
        """Sets the features of a column of categories, which are 0 in `out`; `fitting` as in `encode`."""
        if (own.code < 0).any() and not self.impute:
            raise place.missing(column.name, first(own.code < 0))
        known = {name: k for k, name in enumerate(column.categories)}
        code = own.mapped([known.get(name, -1) for name in own.names], missing=known.get(MISSING, -1))
        if not fitting and (unknown := (code < 0) & (own.code >= 0)).any():
            row = first(unknown)
            raise InputError(
                f"Column '{column.name}' of {place.at(row)} is '{own.names[own.code[row]]}', a category that "
                f"the training rows do not have; they have {listed(column.categories)}."
            )
        rows = np.flatnonzero(code >= 0)
        out[rows, self.starts[column.name] + code[rows]] = 1

    def encode_label(self, series: pl.Series, place: Place | str) -> np.ndarray:
        """The labels as classes 0, 1, ... (int32), or standardised numbers (float32)."""
        place = Place(place) if isinstance(place, str) else place
        numeric = all(map(is_number, self.labels))
        if self.task == "regression" or (numeric and series.dtype.is_numeric()):
            value = as_numbers(series, place, self.label_form)
            unknown = np.isnan(value)
            if not unknown.any() and self.task == "regression":
                return ((value - self.label_mean) / self.label_scale).astype(np.float32)
            classes = np.array(self.labels, np.float64)
            code = np.minimum(np.searchsorted(classes, value), len(classes) - 1).astype(np.int32)
            code[classes[code] != value] = -1
        else:
            own = coded(series)
            unknown = own.code < 0
            known = {name: k for k, name in enumerate(self.labels)}
            names = [shortest(n) if numeric and is_number(n) else n for n in own.names]
            code = own.mapped([known.get(name, -1) for name in names])
        if unknown.any():
            raise place.missing(self.label, first(unknown))
        if (code < 0).any():
            row = first(code < 0)
            raise InputError(
                f"The label '{self.label}' of {place.at(row)} is '{series[row]}', which no training row has; "
                f"they have {listed(self.labels)}."
            )
        return code

    def to_json(self) -> dict[str, Any]:
        """This schema as JSON values."""
        columns = [{**dataclasses.asdict(c), "categories": list(c.categories)} for c in self.columns]
        lists = {"columns": columns, "labels": list(self.labels), "na": list(self.na)}
        return {**dataclasses.asdict(self), **lists}

    @classmethod
    def from_json(cls, document: Any) -> Schema:
        """The inverse of `to_json`."""
        try:
            columns = tuple(
                Column(**{**c, "categories": tuple(c["categories"]), "form": Form(**c.get("form", {}))})
                for c in document["columns"]
            )
            lists = {"labels": tuple(document["labels"]), "na": tuple(document.get("na", ()))}
            form = Form(**document.get("label_form", {}))
            return cls(**{**document, **lists, "columns": columns, "label_form": form})
        except (KeyError, TypeError) as error:
            raise InputError(f"This is not the description of a table's columns: {error}.") from None


class Place(NamedTuple):
    """Where rows come from, for messages."""

    where: str
    first_row: int = 1
    numbers: np.ndarray | None = None
    """The numbers of the rows, if some were left out."""

    def at(self, row: int) -> str:
        """`row 17 of patients.csv`, for an index among the rows."""
        number = self.first_row + row if self.numbers is None else self.numbers[row]
        return f"row {number} of {self.where}"

    def missing(self, column: str, row: int) -> MissingValues:
        """The error for a missing value."""
        return MissingValues(
            f"Column '{column}' of {self.at(row)} is empty; fill it, leave the row out, or train with "
            "--impute mean."
        )


class Coded(NamedTuple):
    """Texts coded as integers."""

    code: np.ndarray
    """The index of each value among the names, int32; −1 for missing values."""
    names: tuple[str, ...]
    """The distinct texts, sorted."""

    def mapped(self, to: Sequence[int], missing: int = -1) -> np.ndarray:
        """`to` of each value's code, int32; `missing` for missing values."""
        return np.array([*to, missing], np.int32)[self.code]


def coded(series: pl.Series) -> Coded:
    """The values as texts without surrounding blanks; a text of only blanks is missing.

    >>> coded(pl.Series(["b", None, " a", "a"]))
    Coded(code=array([ 1, -1,  0,  0], dtype=int32), names=('a', 'b'))
    """
    kept = series if series.dtype == pl.Categorical else series.cast(pl.String).cast(pl.Categorical)
    physical = kept.to_physical()
    size = int(np.asarray(physical.max() or 0)) + 1
    value = physical.fill_null(size).to_numpy()
    # The index of each value's last occurrence; finding distinct values with polars takes longer.
    last = np.full(size + 1, -1)
    last[value] = np.arange(len(value))
    distinct = np.flatnonzero(last[:size] >= 0)
    texts = kept[last[distinct]].cast(pl.String).str.strip_chars().to_list()
    if series.dtype.is_float():
        texts = [shortest(text) if is_number(text) else "" for text in texts]
    names = tuple(sorted({text for text in texts if text}))
    place = {name: k for k, name in enumerate(names)}
    table = np.full(size + 1, -1, np.int32)
    table[distinct] = [place.get(text, -1) for text in texts]
    return Coded(table[value], names)


def first(mask: np.ndarray) -> int:
    """The first index where the mask is true."""
    return int(np.argmax(mask))


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def listed(names: Sequence[str], *, quote: bool = True) -> str:
    """The first names, and the number of further ones.

    >>> listed(["a", "b", "c"]), listed(list("abcdefgh"), quote=False)
    ("'a', 'b', 'c'", 'a, b, c, d, e and 3 more')
    """
    shown = ", ".join(f"'{name}'" if quote else name for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def shortest(number: str) -> str:
    """The shortest way to write a number that is given as text."""
    value = float(number)
    return str(int(value)) if value.is_integer() else repr(value)


def as_numbers(series: pl.Series, place: Place, form: Form = PLAIN) -> np.ndarray:
    """The values as float64, read in a form; NaN for missing values."""
    dtype = series.dtype
    if form.date and dtype.is_temporal():
        series = timeless(series)
    if is_text(series.dtype):
        number = form.read(series)
        text = series.cast(pl.String).str.strip_chars()
        if (wrong := (number.is_null() & (text != "").fill_null(False)).to_numpy()).any():
            row = first(wrong)
            what = "time" if form.date == "time" else "date" if form.date else "number"
            raise InputError(
                f"Column '{series.name}' of {place.at(row)} is '{series[row]}', which is not a {what}; "
                "correct it, or leave it empty and train with --impute mean."
            )
    elif dtype == pl.Null or (dtype.is_numeric() and not form.date):
        number = series.cast(pl.Float64)
    else:
        wanted = "dates or times" if form.date else "numbers"
        raise InputError(
            f"Column '{series.name}' of {place.where} holds {in_words(dtype)}, but should hold {wanted}."
        )
    return number.to_numpy()


def timeless(series: pl.Series) -> pl.Series:
    """Dates and times as texts, without their time zone."""
    if isinstance(series.dtype, pl.Datetime):
        series = series.dt.replace_time_zone(None)
    return series.cast(pl.String)


def blanked(name: str, dtype: pl.DataType, words: Sequence[str]) -> pl.Expr:
    """A column in which some words, or numbers, become missing values."""
    column = pl.col(name)
    if dtype.is_numeric():
        gone = column.is_in([float(word) for word in words if is_number(word)])
    elif is_text(dtype):
        gone = column.cast(pl.String).str.strip_chars().is_in(list(words))
    else:
        return column
    return pl.when(~gone.fill_null(False)).then(column).alias(name)


def is_text(dtype: pl.DataType) -> bool:
    """Whether a column of this type holds texts."""
    return dtype == pl.String or isinstance(dtype, pl.Categorical | pl.Enum)


def is_category(dtype: pl.DataType) -> bool:
    """Whether a column of this type holds categories."""
    return dtype == pl.Boolean or is_text(dtype)


def in_words(dtype: pl.DataType) -> str:
    """What a column of this type holds."""
    if dtype.is_temporal():
        return "dates or times"
    if dtype.is_nested():
        return "lists or records"
    if dtype.is_numeric():
        return "numbers"
    return "true and false" if dtype == pl.Boolean else "text" if is_category(dtype) else "binary data"
