"""The rows of a table: whose they are, their labels and texts at once, their numbers in pieces."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from pfedme.data.reading import Part, Types, shown, without_blank_end
from pfedme.errors import InputError
from pfedme.schema import (
    Coded,
    Place,
    Schema,
    as_numbers,
    coded,
    first,
    in_words,
    is_category,
    is_number,
    listed,
)


class Piece(NamedTuple):
    """Some rows that follow each other."""

    start: int
    """Place of the first among all rows."""
    where: str
    """The file that they are in."""
    first_row: int
    """The number of the first in the file, counted from 1."""
    content: pl.DataFrame | np.ndarray


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of all files of a table, one file after the other."""

    path: Path
    parts: list[Part]
    heights: list[int]
    """How many rows each file has."""
    client_column: str | None
    client: Coded
    label: pl.Series
    """Numbers (float64), or categories."""
    whole: bool
    """Whether the label was written in whole numbers."""
    texts: dict[str, Coded]
    """Columns of features that were read as texts."""
    numbers: list[str]
    """Columns of features that were read as numbers."""

    @property
    def where(self) -> str:
        """What messages call the table."""
        return shown(self.path)

    @cached_property
    def starts(self) -> list[int]:
        """Place of each file's first row."""
        return [0, *itertools.accumulate(self.heights)][:-1]

    def at(self, row: int) -> str:
        """`row 17 of patients.csv`, for the place of a row."""
        part = bisect.bisect_right(self.starts, row) - 1
        return f"row {row - self.starts[part] + 1} of {self.parts[part].where}"

    def labels(self, schema: Schema) -> np.ndarray:
        """The labels of all rows, as the schema encodes them."""
        ends = zip(self.parts, self.starts, self.heights, strict=True)
        return np.concatenate([schema.encode_label(self.label[s : s + h], p.where) for p, s, h in ends])

    def near(self, numbers: Sequence[str]) -> np.ndarray:
        """A value near the first ones of each column of numbers."""
        head, place = self.parts[0].head(self._types(numbers, [])), Place(self.parts[0].where)
        columns = head.T if isinstance(head, np.ndarray) else [as_numbers(head[n], place) for n in numbers]
        finite = (column[np.isfinite(column)] for column in columns)
        return np.array([np.median(column) if len(column) else 0.0 for column in finite])

    def _types(self, numbers: Sequence[str], categories: Sequence[str]) -> Types:
        types: Types = {name: pl.Float64() if name in self.numbers else pl.String() for name in numbers}
        return types | {name: pl.Categorical() for name in categories}

    def pieces(self, numbers: Sequence[str], categories: Sequence[str]) -> Iterator[Piece]:
        """All rows of these columns."""
        types = self._types(numbers, categories)
        for part, start, height in zip(self.parts, self.starts, self.heights, strict=True):
            done = 0
            for content in part.pieces(types):
                own, rest = content[: height - done], content[height - done :]
                if isinstance(rest, pl.DataFrame) and any(rest[n].count() for n in rest.columns):
                    raise InputError(
                        f"Row {height + 1} of {part.where} has no client and no label; fill them in, or "
                        "leave it out."
                    )
                if len(own):
                    yield Piece(start + done, part.where, done + 1, own)
                done += len(own)

    def missing(self, columns: Sequence[str]) -> InputError:
        """The error for values that are not there, counted by column."""
        counts: dict[str, int] = {}
        example = ""
        for name in columns:
            for k, part in enumerate(self.parts):
                if name in self.texts:
                    ends = slice(self.starts[k], self.starts[k] + self.heights[k])
                    there = self.texts[name].code[ends] >= 0
                else:
                    series = part.frame({name: pl.Float64()})[name][: self.heights[k]]
                    there = (series.is_not_null() & series.is_not_nan()).fill_null(False).to_numpy()
                if not there.all():
                    example = example or f" (the first in row {first(~there) + 1} of {part.where})"
                    counts[name] = counts.get(name, 0) + int((~there).sum())
        told = listed([f"{n:,} in '{name}'" for name, n in counts.items()], quote=False)
        drop = shlex.quote(",".join(counts))
        return InputError(
            f"Values are missing in {self.where}: {told}{example}. Give --impute mean to fill them in, or "
            f"leave the columns out with --drop {drop}."
        )


def read_rows(path: Path, parts: list[Part], client: str | None, label: str, columns: Sequence[str]) -> Rows:
    """The table's rows, with all that is text read."""
    named = [*([client] if client else []), label]
    kinds = {name: _kind(parts, name, is_feature=name not in named) for name in [*named, *columns]}
    types: Types = {client: pl.Categorical()} if client else {}
    types[label] = pl.Float64() if kinds[label] == "number" else pl.Categorical()
    types |= {name: pl.Categorical() for name in columns if kinds[name] == "text"}
    frames = [without_blank_end(part.frame(types)) for part in parts]
    heights = [frame.height for frame in frames]
    frame = pl.concat(frames)
    if not frame.height:
        raise InputError(f"{shown(path)} has no rows, only a header; there is nothing to learn from.")
    if client:
        owner = coded(frame[client])
    else:
        stems = [part.stem for part in parts]
        names = tuple(sorted(stems))
        owner = Coded(np.repeat(np.array([names.index(s) for s in stems], np.int32), heights), names)
    values, whole = frame[label], not any(part.types[label].is_float() for part in parts)
    if kinds[label] == "text":
        own = coded(values)
        if own.names and all(map(is_number, own.names)):
            values = pl.Series(label, np.array([*map(float, own.names), np.nan])[own.code])
            whole = all(name.lstrip("+-").isdigit() for name in own.names)
    values = values.fill_nan(None) if values.dtype == pl.Float64 else values
    texts = {name: coded(frame[name]) for name in columns if kinds[name] == "text"}
    numbers = [name for name in columns if kinds[name] == "number"]
    rows = Rows(path, parts, heights, client, owner, values, whole, texts, numbers)
    for what, name, gone in (
        ("client", client, owner.code < 0),
        ("label", label, values.is_null().to_numpy()),
    ):
        if gone.any():
            n = int(gone.sum())
            raise InputError(
                f"The {what} '{name}' is missing in {n:,} row{'s' if n > 1 else ''} of {rows.where}, first "
                f"in {rows.at(first(gone))}; fill it in, or leave out the rows that have none."
            )
    return rows


def _kind(parts: Sequence[Part], name: str, *, is_feature: bool) -> str:
    """Whether a column is read as numbers or as text, which it is in all files if it is in one."""
    kinds = set()
    for part in parts:
        if name not in part.types:
            names = listed(list(part.types), quote=False)
            raise InputError(f"{part.where} has no column '{name}'; its columns are {names}.")
        kind = part.types[name]
        if not (kind.is_numeric() or is_category(kind) or kind == pl.Null):
            cure = f", or leave the column out with --drop {shlex.quote(name)}" if is_feature else ""
            raise InputError(
                f"Column '{name}' of {part.where} holds {in_words(kind)}; make numbers or texts of it{cure}."
            )
        kinds.add("number" if kind.is_numeric() else "text")
    return "number" if kinds == {"number"} else "text"
