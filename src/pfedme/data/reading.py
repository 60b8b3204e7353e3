"""Opening the files of tables: the columns are known, and the rows are read later, at once or in pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import polars as pl

from pfedme.data.schema import blanked
from pfedme.errors import InputError

T = TypeVar("T")

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".xlsx", ".npz")
"""File name extensions of tables."""
NULLS = ("", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "<NA>", "#N/A")
"""Texts that count as missing values."""
PIECE = 2**22
"""Approximate number of values in a piece."""

HEAD = 1_000
"""The first rows."""

Types = dict[str, pl.DataType]
"""Columns and their types, or the types to read them as."""


class Reading(NamedTuple):
    """How to read files."""

    na: tuple[str, ...] = ()
    """Additional words that count as missing values."""
    decimal: str | None = None
    """The decimal sign of texts; None if it is still to be detected."""
    sheet: str | None = None
    """Sheet of an Excel file; the first if not given."""


PLAINLY = Reading()
"""The defaults."""


class SchemaChanged(Exception):
    """A column turned out to contain something other than its first rows."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A file of a table."""

    path: Path
    types: Types
    """Its columns, in order."""
    frame: Callable[[Types], pl.DataFrame]
    """Some of the columns, read as the given types."""
    pieces: Callable[[Types], Iterator[pl.DataFrame | np.ndarray]]
    """The same, one group of rows after another."""
    head: Callable[[Types], pl.DataFrame | np.ndarray]
    """The same, for the first rows only."""
    shape: tuple[int, ...] = ()
    """The shape of an image, if rows are images; else ()."""
    nulls: frozenset[str] = frozenset()
    """Texts that should count as missing values but do not, because the file was opened for quick reading."""
    decimal: str | None = None
    """The decimal sign of numbers, if known."""
    notes: tuple[str, ...] = ()
    """What a reader should know about how the file was read."""

    @property
    def where(self) -> str:
        """The name of the file in messages."""
        return shown(self.path)

    @property
    def stem(self) -> str:
        """The file's name without the extension that shows its format."""
        endings = (s for s in SUFFIXES if self.path.name.lower().endswith(s))
        return self.path.name[: len(self.path.name) - len(max(endings, key=len, default=""))]


def lazy_part(
    path: Path,
    types: Types,
    scan: Callable[[Types], pl.LazyFrame],
    explain: Callable[[str], InputError],
    how: pl.QueryOptFlags | None = None,
    nulls: frozenset[str] = frozenset(),
    decimal: str | None = None,
    notes: tuple[str, ...] = (),
) -> Part:
    """A file that polars can scan; `explain` turns the reason for a failure into an error."""

    def frame(types: Types) -> pl.DataFrame:
        with explained(explain):
            return scan(types).collect(engine="streaming")

    def pieces(types: Types) -> Iterator[pl.DataFrame]:
        with explained(explain):
            size, query = rows_of_a_piece(len(types)), scan(types)
            yield from query.collect_batches(chunk_size=size, optimizations=how or pl.QueryOptFlags())

    def head(types: Types) -> pl.DataFrame:
        with explained(explain):
            return scan(types).head(HEAD).collect()

    return Part(path, types, frame, pieces, head, (), nulls, decimal, notes)


@contextlib.contextmanager
def explained(explain: Callable[[str], InputError]) -> Iterator[None]:
    """Turns errors of polars about an unreadable file into our own."""
    try:
        with _silent_panics():
            yield
    except (pl.exceptions.PolarsError, OSError) as error:
        raise explain(short(str(error).strip().partition("\n")[0])) from None
    except BaseException as error:
        # A panic of polars is not an Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise explain(short(str(error).partition("\n")[0])) from None


@contextlib.contextmanager
def _silent_panics() -> Iterator[None]:
    """Discards what polars prints on standard error when a damaged file makes it panic."""
    sys.stderr.flush()
    there = os.dup(2)
    panicked = False
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(there, 2)
            os.close(there)
            kept.seek(0)
            if not panicked and (said := kept.read()):
                os.write(2, said)


def open_parts(
    path: Path,
    used: Sequence[str] | None,
    *,
    whole: bool = False,
    quick: bool = False,
    reading: Reading = PLAINLY,
) -> list[Part]:
    """The file, or the files of a folder by name.

    `used` are the columns that matter, None for all. `whole` looks at all rows of a CSV file, rather than
    the first, to detect the type of a column. `quick` ignores words for missing values if the first rows have
    none: a caller that finds one of `Part.nulls` among texts must open the file again.
    """
    files = files_of(path)
    if reading.sheet is not None and (other := [f for f in files if f.suffix.lower() != ".xlsx"]):
        raise InputError(f"--sheet is for Excel files, and {shown(other[0])} is not one; leave it out.")
    return [_open(file, used, whole, quick, reading) for file in files]


def files_of(path: Path) -> list[Path]:
    """The file itself, or the tables in a folder, by name."""
    if not path.exists():
        raise InputError(f"There is no file {shown(path)}; give the path of a table.")
    if not path.is_dir():
        return [path]
    files = sorted(f for f in path.iterdir() if f.is_file() and is_table(f) and f.name[0] != ".")
    if not files:
        raise InputError(f"The folder {shown(path)} contains no table; file names must end in {_endings()}.")
    return files


def _open(path: Path, used: Sequence[str] | None, whole: bool, quick: bool, reading: Reading) -> Part:
    from pfedme.data.arrays import open_arrays
    from pfedme.data.excel import open_excel
    from pfedme.data.text import open_text

    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise InputError(f"{shown(path)} cannot be read: {error.strerror}.") from None
    if not is_table(path):
        raise InputError(f"{shown(path)} has an unknown format; the name of a table ends in {_endings()}.")
    if path.suffix.lower() == ".npz":
        return open_arrays(path)
    if path.suffix.lower() == ".parquet":
        return open_parquet(path, reading)
    if path.suffix.lower() == ".xlsx":
        return open_excel(path, used, reading)
    return open_text(path, used, whole=whole, quick=quick, reading=reading)


def open_parquet(path: Path, reading: Reading) -> Part:
    """A Parquet file."""

    def explain(reason: str) -> InputError:
        return InputError(f"{shown(path)} is not a complete Parquet file ({reason}); copy or write it again.")

    with explained(explain):
        types = dict(pl.scan_parquet(path, glob=False).collect_schema())
    return typed_part(path, lambda: pl.scan_parquet(path, glob=False), types, reading, explain)


def open_frame(name: str, frame: pl.DataFrame, reading: Reading) -> Part:
    """A frame in memory, with the name that messages use for it."""

    def explain(reason: str) -> InputError:
        return InputError(f"{name} cannot be read ({reason}).")

    return typed_part(Path(name), frame.lazy, dict(frame.schema), reading, explain)


def typed_part(
    path: Path,
    table: Callable[[], pl.LazyFrame],
    types: Types,
    reading: Reading,
    explain: Callable[[str], InputError],
    nulls: tuple[str, ...] = (),
) -> Part:
    """A table whose columns already have types; texts among `nulls` count as missing."""
    words = (*nulls, *reading.na)

    def scan(wanted: Types) -> pl.LazyFrame:
        query = table()
        if words:
            query = query.with_columns(blanked(name, types[name], words) for name in wanted)
        return query.select(read_as(name, kind, types[name]) for name, kind in wanted.items())

    return lazy_part(path, types, scan, explain, decimal=reading.decimal)


def read_as(name: str, kind: pl.DataType, own: pl.DataType | None = None) -> pl.Expr:
    """A column, converted from its own type."""
    column = pl.col(name)
    if isinstance(own, pl.Datetime):
        column = column.dt.replace_time_zone(None)
    return column.cast(pl.String).cast(kind) if kind == pl.Categorical else column.cast(kind)


def without_blank_end(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows without empty lines at the end of a file."""
    if not frame.height or any(value is not None for value in frame.row(-1)):
        return frame
    filled = frame.select(pl.any_horizontal(pl.all().is_not_null())).to_series()
    return frame[: frame.height - int(filled.reverse().arg_max() or 0)] if filled.any() else frame[:0]


def on_all_cores(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Runs `work` on each item, on all cores, with few items waiting."""
    n = os.cpu_count() or 1
    with ThreadPoolExecutor(n) as pool:
        begun = deque[Future[None]]()
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > 2 * n:
                begun.popleft().result()
        for future in begun:
            future.result()


def is_table(path: Path) -> bool:
    """Whether the name is that of a table that can be read."""
    return path.name.lower().endswith(SUFFIXES)


def shown(path: Path) -> str:
    """A path as messages show it: relative to the working folder, if it is below it."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def rows_of_a_piece(width: int) -> int:
    """How many rows of `width` numbers are read at once."""
    return max(1, min(2**17, PIECE // max(1, width)))


def short(text: str) -> str:
    """A text on one line, shortened for a message."""
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def _endings() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
