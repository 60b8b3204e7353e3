"""The rows of a table, read once: clients, labels and texts as a whole, numbers in pieces."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from pfedme.data.disk import Disk, Spill
from pfedme.data.forms import PLAIN, Form
from pfedme.data.reading import Part, SchemaChanged, Types, on_all_cores, shown, without_blank_end
from pfedme.data.schema import (
    Coded,
    Column,
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
from pfedme.errors import InputError, Problems


class Piece(NamedTuple):
    """Some consecutive rows of a file."""

    start: int
    """Index of the first among all rows."""
    place: Place
    """The file that contains them, and their row numbers in it."""
    numbers: np.ndarray
    """float32, one column for each numeric column; NaN for missing values."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of all files of a table, one file after another."""

    path: Path
    parts: list[Part]
    heights: list[int]
    """Number of rows in each file, without those that are left out."""
    client_column: str | None
    client: Coded
    label: pl.Series
    """Numbers (float64), or categories."""
    whole: bool
    """Whether the label was written in whole numbers."""
    texts: dict[str, Coded]
    """Feature columns that were read as text."""
    standard: Schema
    """The feature columns that were read as numbers, and how."""
    blocks: list[Iterable[np.ndarray]]
    """These numbers, by file; see `Piece`."""
    kept: list[np.ndarray | None]
    """Which rows of each file are kept; None if all are."""
    problems: list[InputError]
    """What is wrong with clients, labels and numbers."""
    notes: list[str]
    """What a reader should know about how the table was read."""

    @property
    def numbers(self) -> list[str]:
        """Feature columns that were read as numbers."""
        return [column.name for column in self.standard.columns]

    @property
    def where(self) -> str:
        """The name of the table in messages."""
        return shown(self.path)

    @cached_property
    def starts(self) -> list[int]:
        """Index of each file's first row."""
        return [0, *itertools.accumulate(self.heights)][:-1]

    def at(self, row: int) -> str:
        """`row 17 of patients.csv`, for the index of a row."""
        # An empty file has the same start as the next one, so take the last.
        file = bisect.bisect_right(self.starts, row) - 1
        return self.places[file].at(row - self.starts[file])

    @cached_property
    def places(self) -> list[Place]:
        """The place of each file's rows, for messages."""
        kept = [None if own is None else np.flatnonzero(own) + 1 for own in self.kept]
        return [Place(part.where, numbers=own) for part, own in zip(self.parts, kept, strict=True)]

    def labels(self, schema: Schema) -> np.ndarray:
        """The labels of all rows, as the schema encodes them."""
        ends = zip(self.places, self.starts, self.heights, strict=True)
        return np.concatenate([schema.encode_label(self.label[s : s + h], p) for p, s, h in ends])

    @cached_property
    def plan(self) -> Schema:
        """How the feature columns were read, so that another table can be read in the same way."""
        texts = tuple(Column(name, "category") for name in self.texts)
        return dataclasses.replace(self.standard, columns=(*self.standard.columns, *texts))

    def pieces(self) -> Iterator[Piece]:
        """All rows, once: numbers are released after they have been returned."""
        for k, blocks in enumerate(self.blocks):
            kept, done, read = self.kept[k], 0, 0
            height = self.heights[k] if kept is None else len(kept)
            for block in blocks:
                own, rest = block[: height - read], block[height - read :]
                if not np.isnan(rest).all():
                    raise InputError(
                        f"Row {height + 1} of {self.parts[k].where} has no client and no label; fill them "
                        "in, or leave it out."
                    )
                place = Place(self.parts[k].where, read + 1)
                if kept is not None:
                    here = kept[read : read + len(own)]
                    place = place._replace(numbers=read + 1 + np.flatnonzero(here))
                    read, own = read + len(own), own[here]
                else:
                    read += len(own)
                if len(own):
                    yield Piece(self.starts[k] + done, place, own)
                done += len(own)

    def missing(self, columns: Sequence[str]) -> InputError | None:
        """The error for missing values, counted by column; None if there are none."""
        counts: dict[str, int] = {}
        example = ""
        for name in columns:
            for k, part in enumerate(self.parts):
                if name in self.texts:
                    ends = slice(self.starts[k], self.starts[k] + self.heights[k])
                    there = self.texts[name].code[ends] >= 0
                else:
                    kept = self.kept[k]
                    series = part.frame({name: pl.Float64()})[name]
                    there = (series.is_not_null() & series.is_not_nan()).fill_null(False).to_numpy()
                    there = there[: self.heights[k]] if kept is None else there[: len(kept)][kept]
                if not there.all():
                    example = example or f" (the first in {self.places[k].at(first(~there))})"
                    counts[name] = counts.get(name, 0) + int((~there).sum())
        if not counts:
            return None
        told = listed([f"{n:,} in '{name}'" for name, n in counts.items()], quote=False)
        drop = shlex.quote(",".join(counts))
        return InputError(
            f"Values are missing in {self.where}: {told}{example}. Use --impute mean to fill them in, or "
            f"leave the columns out with --drop {drop}."
        )


def read_rows(
    path: Path,
    parts: list[Part],
    client: str | None,
    label: str,
    columns: Sequence[str],
    known: Schema | None,
    sole: str = "",
    *,
    drop_missing_labels: bool = False,
    disk: Disk | None = None,
) -> Rows:
    """The table's rows, with columns read according to a schema, if one is known. If `sole` is given, all
    rows belong to that client. Rows without a label may be left out. Numbers are kept on disk, if one is
    given."""
    named = [*([client] if client else []), label]
    kinds, problems, notes = dict[str, str](), Problems(), [note for part in parts for note in part.notes]
    for name in [*named, *columns]:
        with problems:
            kinds[name] = _kind(parts, name, is_feature=name not in named)
    problems.raise_any(shown(path))
    given = {column.source: column for column in known.columns} if known else {}
    kinds |= {n: "text" for n, column in given.items() if column.kind == "category" or column.form.date}
    numbers = [name for name in columns if kinds[name] == "number"]
    types: Types = {client: pl.Categorical()} if client else {}
    types[label] = pl.Float64() if kinds[label] == "number" else pl.Categorical()
    types |= {name: pl.Categorical() for name in columns if kinds[name] == "text"}
    own_columns = [given[name] for name in numbers] if known else _near_first(parts[0], numbers)
    standard = Schema(tuple(own_columns), label, client, "regression", impute=True)
    read = [_read(part, types, standard, problems, disk) for part in parts]
    frames, blocks = [frame for frame, _ in read], [own for _, own in read]
    kept: list[np.ndarray | None] = [None] * len(parts)
    if drop_missing_labels:
        frames, kept = _with_labels(frames, label, parts, notes)
    heights = [frame.height for frame in frames]
    frame = pl.concat(frames)
    if not frame.height:
        raise InputError(f"{shown(path)} has no rows, only a header; there is nothing to learn from.")
    own = dict[str, Coded]()
    on_all_cores(
        lambda name: own.update({name: coded(frame[name])}),
        (name for name, kind in types.items() if kind == pl.Categorical),
    )
    nulls = frozenset[str]().union(*(part.nulls for part in parts))
    if any(not nulls.isdisjoint(column.names) for column in own.values()):
        raise SchemaChanged
    if client:
        owner = own[client]
    else:
        stems = [sole or part.stem for part in parts]
        names = tuple(sorted(set(stems)))
        owner = Coded(np.repeat(np.array([names.index(s) for s in stems], np.int32), heights), names)
    values, whole = frame[label], not any(part.types[label].is_float() for part in parts)
    if kinds[label] == "text":
        code, names = own[label]
        if names and all(map(is_number, names)):
            values = pl.Series(label, np.array([*map(float, names), np.nan])[code])
            whole = all(name.lstrip("+-").isdigit() for name in names)
        elif len(blank := np.flatnonzero(code < 0)):
            values = values.scatter(blank, None)
    values = values.fill_nan(None) if values.dtype == pl.Float64 else values
    texts = {name: own[name] for name in columns if kinds[name] == "text"}
    rows = Rows(
        path, parts, heights, client, owner, values, whole, texts, standard, blocks, kept, problems.found,
        notes,
    )  # fmt: skip
    for what, name, gone in (
        ("client", client, owner.code < 0),
        ("label", label, values.is_null().to_numpy()),
    ):
        if gone.any():
            n = int(gone.sum())
            cure = "leave out the rows that have none" + (
                " with --drop-missing-labels" if what == "label" else ""
            )
            rows.problems.append(
                InputError(
                    f"The {what} '{name}' is missing in {n:,} row{'s' if n > 1 else ''} of {rows.where}, "
                    f"first in {rows.at(first(gone))}; fill it in, or {cure}."
                )
            )
    return rows


def _with_labels(
    frames: Sequence[pl.DataFrame], label: str, parts: Sequence[Part], notes: list[str]
) -> tuple[list[pl.DataFrame], list[np.ndarray | None]]:
    """The rows of each file that have a label, and which rows these are; None if all have one."""
    with_label, kept = list[pl.DataFrame](), list[np.ndarray | None]()
    for frame, part in zip(frames, parts, strict=True):
        own = frame[label]
        there = own.is_not_null()
        if own.dtype == pl.Float64:
            there &= own.is_not_nan().fill_null(False)
        else:
            there &= (own.cast(pl.String).str.strip_chars() != "").fill_null(False)
        if gone := int((~there).sum()):
            rows = "1 row has" if gone == 1 else f"{gone:,} rows have"
            left = "is left out" if gone == 1 else "are left out"
            notes.append(f"In {part.where}, {rows} no '{label}' and {left}.")
        with_label.append(frame.filter(there) if gone else frame)
        kept.append(there.to_numpy() if gone else None)
    if not any(frame.height for frame in with_label) and any(frame.height for frame in frames):
        raise InputError(f"No row of {parts[0].where} has a '{label}'; choose another --label.")
    return with_label, kept


def near(name: str, values: np.ndarray) -> Column:
    """A numeric column measured from these values, so that float32 does not lose their differences."""
    finite = values[np.isfinite(values)]
    return Column(name, "number", float(np.median(finite)) if len(finite) else 0.0)


def _near_first(part: Part, numbers: Sequence[str]) -> list[Column]:
    """The numeric columns, measured from the values in a file's first rows."""
    head, place = part.head({name: pl.Float64() for name in numbers}), Place(part.where)
    columns = head.T if isinstance(head, np.ndarray) else [as_numbers(head[n], place) for n in numbers]
    form = Form(decimal=",") if part.decimal == "," else PLAIN
    own = (near(name, column) for name, column in zip(numbers, columns, strict=True))
    return [dataclasses.replace(column, form=form) for column in own]


def _read(
    part: Part, types: Types, standard: Schema, problems: Problems, disk: Disk | None
) -> tuple[pl.DataFrame, Iterable[np.ndarray]]:
    """A file's columns of these types, and its numbers in blocks of rows."""
    every = types | {column.name: pl.Float64() for column in standard.columns}

    def encode(row: int, content: pl.DataFrame | np.ndarray) -> np.ndarray:
        return standard.encode(content, part.where, first_row=row, fitting=True)

    if part.path.suffix.lower() == ".npz":  # already in memory
        return part.frame(types), itertools.starmap(encode, _counted(part.pieces(every)))
    told, kept = [pl.DataFrame(schema=types)], disk.spill() if disk else dict[int, np.ndarray]()
    wrong = dict[int, InputError]()

    def keep(piece: tuple[int, pl.DataFrame | np.ndarray]) -> None:
        try:
            kept[piece[0]] = encode(*piece)
        except InputError as error:
            kept[piece[0]] = np.zeros((len(piece[1]), len(standard.columns)), np.float32)
            wrong[piece[0]] = error

    def pieces() -> Iterator[tuple[int, pl.DataFrame | np.ndarray]]:
        for row, content in _counted(part.pieces(every)):
            assert isinstance(content, pl.DataFrame)
            told.append(content.select(*types))
            yield row, content

    on_all_cores(keep, pieces())
    if wrong:
        problems.found.append(wrong[min(wrong)])
    return without_blank_end(pl.concat(told)), _let_go(kept)


def _counted(
    pieces: Iterable[pl.DataFrame | np.ndarray],
) -> Iterator[tuple[int, pl.DataFrame | np.ndarray]]:
    """Pieces of a file, each with the number of its first row, from 1."""
    row = 1
    for content in pieces:
        yield row, content
        row += len(content)


def _let_go(blocks: dict[int, np.ndarray] | Spill) -> Iterator[np.ndarray]:
    """The blocks in the order of their numbers, each released after use."""
    for k in sorted(blocks):
        yield blocks.pop(k)


def _kind(parts: Sequence[Part], name: str, *, is_feature: bool) -> str:
    """Whether a column is read as numbers or as text; if it is text in one file, it is text in all."""
    kinds = set()
    for part in parts:
        if name not in part.types:
            names = listed(list(part.types), quote=False)
            raise InputError(f"{part.where} has no column '{name}'; its columns are {names}.")
        kind = part.types[name]
        time = is_feature and kind.is_temporal() and kind != pl.Duration
        if not (kind.is_numeric() or is_category(kind) or kind == pl.Null or time):
            cure = f", or leave the column out with --drop {shlex.quote(name)}" if is_feature else ""
            raise InputError(
                f"Column '{name}' of {part.where} holds {in_words(kind)}; turn it into numbers or text{cure}."
            )
        kinds.add("number" if kind.is_numeric() else "text")
    return "number" if kinds == {"number"} else "text"
