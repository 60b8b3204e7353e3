"""Excel files, read with `fastexcel`, an optional dependency: `pip install 'pfedme[xlsx]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from pfedme.data.reading import NULLS, Part, Reading, short, shown, typed_part
from pfedme.data.text import checked_names
from pfedme.errors import InputError, unknown


def open_excel(path: Path, used: Sequence[str] | None, reading: Reading) -> Part:
    """A sheet of an Excel file, whose first row holds the columns' names; see `open_parts`."""
    where = shown(path)
    try:
        import fastexcel
    except ImportError:
        raise InputError(
            f"Reading the Excel file {where} needs fastexcel; install it with pip install 'pfedme[xlsx]', or "
            "save the sheet as CSV."
        ) from None

    def explain(reason: str) -> InputError:
        return InputError(f"{where} is not a complete Excel file ({reason}); save it again, or as CSV.")

    try:
        book = fastexcel.read_excel(path)
        sheets = book.sheet_names
        if reading.sheet is not None and reading.sheet not in sheets:
            raise unknown(f"sheet of {where}", reading.sheet, sheets)
        sheet = reading.sheet or sheets[0]
        header = book.load_sheet(sheet, header_row=None, n_rows=1, dtypes="string").to_polars()
        if not header.height:
            raise InputError(f"The sheet '{sheet}' of {where} is empty; its first row must be column names.")
        names = checked_names([(name or "").strip() for name in header.row(0)], used, where)
        # Rows are numbered, so empty ones must be kept.
        frame = pl.read_excel(
            path, sheet_name=sheet, infer_schema_length=None, drop_empty_rows=False, drop_empty_cols=False,
            raise_if_empty=False,
        )  # fmt: skip
    except fastexcel.FastExcelError as error:
        raise explain(short(str(error).partition("\n")[0])) from None
    frame.columns = names
    types = {name: kind for name, kind in frame.schema.items() if name[:1] != "\0"}
    return typed_part(path, frame.lazy, types, reading, explain, NULLS)
