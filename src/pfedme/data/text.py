"""Tables as text: CSV and TSV with a header, plain or compressed with gzip."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from pfedme.data.forms import NEARLY_ALL
from pfedme.data.reading import (
    NULLS,
    PLAINLY,
    Part,
    Reading,
    SchemaChanged,
    Types,
    explained,
    lazy_part,
    read_as,
    short,
    shown,
)
from pfedme.data.schema import is_number
from pfedme.errors import InputError

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE = 10_000
"""Number of rows that the type of a column is first detected from."""
LOOKED_AT = 500
"""Number of rows that decimal commas are detected from."""
DECIMAL_COMMA = r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?"
DECIMAL_POINT = r"[+-]?\d+\.(\d{1,2}|\d{4,})"
"""A number whose point is not a thousands separator."""


def open_text(
    path: Path,
    used: Sequence[str] | None,
    *,
    whole: bool = False,
    quick: bool = False,
    reading: Reading = PLAINLY,
) -> Part:
    """A CSV or TSV file; see `open_parts`."""
    start = _start(path)
    separator, names = _header(path, start)
    names = checked_names(names, used, shown(path))
    words = [*NULLS, *reading.na]
    quick = quick and not _has_null(start, separator, words)
    column = None if reading.decimal else _with_decimal_commas(start, separator, words)
    comma = reading.decimal == "," or column is not None

    def explain(reason: str) -> InputError:
        if "could not parse" in reason and "dtype `str`" not in reason and not whole:
            raise SchemaChanged
        return _explained(path, separator, len(names), reason)

    def scan(types: Types) -> pl.LazyFrame:
        # Looking for these words in every field takes polars as long as everything else.
        nulls = None if quick else words
        # Numbers are read as numbers and everything else as text; polars only checks text for valid UTF-8.
        every = {name: pl.Float64() if types.get(name) == pl.Float64 else pl.String() for name in names}
        table = pl.scan_csv(
            path, separator=separator, glob=False, null_values=nulls, schema=every, has_header=False,
            skip_rows=1, raise_if_empty=False, decimal_comma=comma,
        )  # fmt: skip
        return table.select(read_as(name, types[name]) for name in types)

    with explained(explain):
        table = pl.scan_csv(
            path, separator=separator, glob=False, null_values=words, new_columns=names,
            infer_schema_length=None if whole else SAMPLE, decimal_comma=comma,
        )  # fmt: skip
        types = {name: kind for name, kind in table.collect_schema().items() if name[:1] != "\0"}
    # polars counts the fields of a row only if it reads all columns.
    how = pl.QueryOptFlags(projection_pushdown=False)
    nulls, notes = frozenset(words) if quick else frozenset(), ()
    if column is not None:
        notes = (
            f"The numbers of {shown(path)} are read with decimal commas, as in '{names[column]}'; give "
            "--decimal . if that is wrong.",
        )
    return lazy_part(path, types, scan, explain, how, nulls, "," if comma else reading.decimal, notes)


def _with_decimal_commas(start: str, separator: str, nulls: Sequence[str]) -> int | None:
    """The first column of numbers with decimal commas, if no other column has decimal points. None if columns
    are separated by commas, where decimal commas are rare enough to be detected later."""
    if separator == "," or "," not in start:
        return None
    # The last line may be cut off.
    lines = io.StringIO(start.rpartition("\n")[0], newline="")
    with contextlib.suppress(csv.Error):
        records = list(itertools.islice(csv.reader(lines, delimiter=separator), LOOKED_AT + 1))[1:]
        found = None
        for k, fields in enumerate(itertools.zip_longest(*records, fillvalue="")):
            values = [field.strip() for field in fields if field.strip() not in nulls]
            fits = [value for value in values if re.fullmatch(DECIMAL_COMMA, value)]
            if any(re.fullmatch(DECIMAL_POINT, value) for value in values):
                return None
            commas = [value for value in fits if "," in value]
            # 1,234 alone may mean more than a thousand, except in Excel's files with semicolons.
            plain = separator == ";" or not all(re.fullmatch(r".*,\d{3}", value) for value in commas)
            if found is None and commas and plain and len(fits) >= NEARLY_ALL * len(values):
                found = k
        return found
    return None


def _has_null(start: str, separator: str, nulls: Sequence[str]) -> bool:
    """Whether a field is one of the words that count as a missing value."""
    between, words = f"[{re.escape(separator)}\\r\\n]", "|".join(map(re.escape, filter(None, nulls)))
    return re.search(f'{between}"?({words})"?({between}|$)', start) is not None


def _header(path: Path, start: str) -> tuple[str, list[str]]:
    """The separator and the column names, from the start of the file."""
    where = shown(path)
    first, second = _first_records(start)
    tabs = path.name.lower().removesuffix(".gz").endswith(".tsv")
    found = {s: _fields(first, s) for s in ("\t" if tabs else SEPARATORS)}
    # The separator with which the next line has as many fields as the header; the most frequent of these.
    separator = max(found, key=lambda s: (len(found[s]) == len(_fields(second, s)) > 1, len(found[s])))
    names = [name.strip() for name in found[separator]]
    if len(names) < 2:
        cure = "tabs, or its name end in .csv" if tabs else "commas, semicolons, tabs or |"
        raise InputError(
            f"{where} has only one column, '{short(first)}'; its columns must be separated by {cure}."
        )
    if all(map(is_number, names)):
        raise InputError(
            f"{where} has no header; its first line is '{short(first)}'. Put the column names there."
        )
    return separator, names


def _fields(record: str, separator: str) -> list[str]:
    with contextlib.suppress(csv.Error):
        return next(csv.reader(io.StringIO(record, newline=""), delimiter=separator), [])
    return []


def checked_names(names: Sequence[str], used: Sequence[str] | None, where: str) -> list[str]:
    """The names, after a check that those that matter occur exactly once; the others are made distinct."""
    out = []
    for place, name in enumerate(names):
        if not name and used is None:
            raise InputError(
                f"Column {place + 1} of {where} has no name, like an index that was saved with the table; "
                "name it, or name the columns to use with --features."
            )
        if name and name in names[:place] and (used is None or name in used):
            raise InputError(f"{where} has two columns '{name}'; rename one of them.")
        out.append(name if name and name not in names[:place] else f"\0{place}")
    return out


def _plain(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """A file's bytes, decompressed if it is a gzip file."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else open(path, "rb")


def _start(path: Path) -> str:
    """The start of a file, after a check that it is text."""
    where = shown(path)
    try:
        with _plain(path) as file:
            start = file.read(2**20)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{where} is damaged or truncated ({short(str(error))}); copy it again.") from None
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:100]:
        raise InputError(f"{where} is not UTF-8 text (perhaps UTF-16, or binary); save it as CSV in UTF-8.")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if not text.strip():
        raise InputError(f"{where} is empty; its first line must contain the column names.")
    if "\n" not in text and "\r" in text:
        raise InputError(
            f"The lines of {where} end in \\r alone, as on old Macs; save it with \\n line endings."
        )
    return text


def _first_records(start: str) -> tuple[str, str]:
    """The header and the line below it, unparsed."""
    records, lines = [], iter(start.split("\n"))
    for record in lines:
        while record.count('"') % 2 and (more := next(lines, None)) is not None:
            record += "\n" + more
        records.append(record.rstrip("\r"))
        if len(records) == 2:
            break
    return records[0], records[-1]


def _explained(path: Path, separator: str, fields: int, reason: str) -> InputError:
    """Why polars could not read a file."""
    where = shown(path)
    if "more fields" in reason:
        row, found = _ragged(path, separator, fields)
        return InputError(
            f"Row {row} of {where} has {found} fields but the header has {fields}; put quotation marks "
            f"around text that contains a {SEPARATORS[separator]}."
        )
    if "utf-8" in reason:
        return _not_utf8(path)
    if "gzip" in reason or "end of file" in reason or "deflate" in reason:
        return InputError(f"{where} is damaged or truncated ({reason}); copy it again.")
    return InputError(f"{where} cannot be read as CSV ({reason}); check that every quotation mark is closed.")


def _not_utf8(path: Path) -> InputError:
    """The error for a file that is not UTF-8, with the position of the invalid byte."""
    decoder, line, bad = codecs.getincrementaldecoder("utf-8")(), 1, "it is truncated"
    with _plain(path) as file:
        while block := file.read(2**20):
            try:
                line += decoder.decode(block).count("\n")
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                bad = f"byte {error.object[error.start]:#x} in line {line}"
                break
    return InputError(
        f"{shown(path)} is not UTF-8 text ({bad}); save it as UTF-8, for example with "
        "'iconv -f latin1 -t utf-8'."
    )


def _ragged(path: Path, separator: str, fields: int) -> tuple[int, int]:
    """The first row with more fields than the header, and its number of fields."""
    raw = _plain(path)
    with io.TextIOWrapper(raw, "utf-8-sig", "replace", newline="") as text, contextlib.suppress(csv.Error):
        for row, record in enumerate(csv.reader(text, delimiter=separator)):
            if len(record) > fields:
                return row, len(record)
    return 0, fields + 1
