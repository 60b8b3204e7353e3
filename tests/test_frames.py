"""Tables that are not text files: sheets of Excel files, and frames in memory."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import polars as pl
import pytest
from test_bad_tables import problems
from test_odd_tables import DAYS, GIVEN, N, V, cycle, good, load, replaced, written

import pfedme
from pfedme.data.table import Table
from pfedme.errors import InputError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of every test here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- Excel --------------------------------------------------------------------------------------------------

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
SHEET = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def excel(**sheets: Mapping[str, Sequence[Any]]) -> bytes:
    """An Excel file of sheets."""

    def related(kinds: Sequence[tuple[str, str]]) -> str:
        own = (
            f'<Relationship Id="r{k}" Type="{OFFICE}/{t}" Target="{p}"/>' for k, (t, p) in enumerate(kinds)
        )
        return f'<Relationships xmlns="{PACKAGE}/relationships">{"".join(own)}</Relationships>'

    def cell(value: Any) -> str:
        if value is None:
            return "<c/>"
        if isinstance(value, int | float):
            return f"<c><v>{value}</v></c>"
        return f'<c t="inlineStr"><is><t>{escape(str(value))}</t></is></c>'

    def sheet(columns: Mapping[str, Sequence[Any]]) -> str:
        rows = [list(columns), *zip(*columns.values(), strict=True)] if columns else []
        body = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
        return f'<worksheet xmlns="{MAIN}"><sheetData>{body}</sheetData></worksheet>'

    names = [f"worksheets/sheet{k}.xml" for k in range(len(sheets))]
    parts = {f"xl/{name}": sheet(own) for name, own in zip(names, sheets.values(), strict=True)}
    listed = "".join(f'<sheet name="{name}" sheetId="{k + 1}" r:id="r{k}"/>' for k, name in enumerate(sheets))
    parts["xl/workbook.xml"] = (
        f'<workbook xmlns="{MAIN}" xmlns:r="{OFFICE}"><sheets>{listed}</sheets></workbook>'
    )
    parts["xl/_rels/workbook.xml.rels"] = related([("worksheet", name) for name in names])
    parts["_rels/.rels"] = related([("officeDocument", "xl/workbook.xml")])
    kinds = "".join(f'<Override PartName="/xl/{n}" ContentType="{SHEET}.worksheet+xml"/>' for n in names)
    kinds += f'<Override PartName="/xl/workbook.xml" ContentType="{SHEET}.sheet.main+xml"/>'
    parts["[Content_Types].xml"] = (
        f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="rels" '
        f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>{kinds}</Types>'
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, text in parts.items():
            file.writestr(name, f'<?xml version="1.0"?>{text}')
    return out.getvalue()


def test_an_excel_file_is_read_like_the_same_table_in_csv():
    pytest.importorskip("fastexcel")
    columns = {
        **good(),
        "c": replaced(V, 4, "NA"),
        "d": [str(day) for day in DAYS],
        "e": cycle(0, 1, 2, 3),
    }
    Path("t.xlsx").write_bytes(excel(notes={"x": [1]}, rows=columns))
    table = Table(path="t.xlsx", client="hospital", label="outcome", impute="mean", sheet="rows")
    f, want = table.load(), load(columns, impute="mean")
    assert (f.names, f.y.tolist(), f.notes) == (want.names, want.y.tolist(), want.notes)
    assert f.schema is not None
    assert want.schema is not None
    for own in want.schema.columns:
        at, there = f.schema.starts[own.name], want.schema.starts[own.name]
        np.testing.assert_allclose(f.x[:, at], want.x[:, there], atol=1e-5)
    Path("t.xlsx").write_bytes(excel(rows=columns, notes={"x": [1]}))
    assert dataclasses.replace(table, sheet=None).load().count.sum() == N


BOOKS: dict[str, tuple[bytes, str, list[str]]] = {
    "no book": (b"hello", "", ["t.xlsx is not a complete Excel file", "CSV"]),
    "a book cut off": (excel(a=good())[:-40], "", ["t.xlsx is not a complete Excel file"]),
    "an empty sheet": (excel(a={}), "", ["The sheet 'a' of t.xlsx is empty"]),
    "no such sheet": (excel(a=good(), rows=good()), "--sheet row", ["no sheet of t.xlsx 'row'", "'rows'?"]),
    "a header only": (excel(a={name: [] for name in good()}), "", ["t.xlsx has no rows"]),
    "no label": (excel(a={"hospital": ["a"], "age": [3]}), "", ["no column 'outcome'"]),
    "a gap": (excel(a={**good(), "c": replaced(V, 4, None)}), "", ["1 in 'c'", "row 4 of t.xlsx"]),
    "a word": (excel(a={**good(), "c": replaced(V, 4, "old")}), "", ["'c' of row 4 of t.xlsx is 'old'"]),
    "a column without a name": (excel(a={**good(), "": V}), "", ["Column 4 of t.xlsx has no name"]),
}


@pytest.mark.parametrize("name", BOOKS)
def test_a_malformed_excel_file_is_refused(capsys: pytest.CaptureFixture[str], name: str):
    pytest.importorskip("fastexcel")
    content, options, words = BOOKS[name]
    Path("t.xlsx").write_bytes(content)
    (said,) = problems(capsys, f"data describe --data t.xlsx {GIVEN} {options}")
    assert [word for word in words if word not in said] == []


def test_without_its_reader_an_excel_file_is_refused_with_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "fastexcel", None)
    Path("t.xlsx").write_bytes(excel(a=good()))
    Path("t.csv").write_text(written(good()))
    assert "pip install 'pfedme[xlsx]'" in problems(capsys, f"data describe --data t.xlsx {GIVEN}")[0]
    assert (
        "--sheet is for Excel files" in problems(capsys, f"data describe --data t.csv {GIVEN} --sheet a")[0]
    )


# --- Frames ----------------------------------------------------------------------------------------------


class Pandas:
    """As much of a pandas frame as is asked for."""

    class Series(list[Any]):
        """A column, NaN where a value is missing."""

        def isna(self) -> list[bool]:
            """Which values are missing."""
            return [isinstance(value, float) and math.isnan(value) for value in self]

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.own = {name: self.Series(values) for name, values in columns.items()}
        self.columns = list(columns)

    def __getitem__(self, name: str) -> Series:
        return self.own[name]

    def isna(self) -> None:
        """What a frame is known by."""


@pytest.mark.parametrize("kind", [pl.DataFrame, Pandas, dict, lambda columns: pl.DataFrame(columns).lazy()])
def test_a_frame_is_read_like_the_same_table_in_a_file(kind: Callable[[Any], Any]):
    columns = {**good(), "c": replaced(V, 3, math.nan if kind is Pandas else None), "d": DAYS}
    f = Table(frame=kind(columns), client="hospital", label="outcome", impute="mean").load()
    want = load({**columns, "c": replaced(V, 3, None)}, impute="mean")
    np.testing.assert_allclose(f.x, want.x, atol=1e-5)
    assert (f.y.tolist(), f.notes) == (want.y.tolist(), want.notes)


def test_a_frame_is_known_by_its_content():
    one, same, other = (
        Table(frame=pl.DataFrame(c), client="hospital", label="outcome").pinned()
        for c in (good(), good(), {**good(), "age": replaced(good()["age"], 60, 3.0)})
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one != other
    assert one.pinned() == one


@pytest.mark.slow
def test_a_run_of_a_frame_says_what_it_was_and_is_not_resumed_without_it(
    capsys: pytest.CaptureFixture[str],
):
    frame, held = pl.DataFrame(good()), pl.DataFrame(good(20))
    table = Table(frame=frame, test_frame=held, client="hospital", label="outcome")
    result = pfedme.train("fedavg:R=2", table, rounds=1, out="out")
    record = result.record
    assert record["config"]["data"]["path"] == ""
    assert record["config"]["data"]["fingerprint"] == table.pinned().fingerprint
    assert "--data" not in record["command"]
    called = "pfedme.Table(frame=frame, client='hospital', label='outcome', test_frame=test_frame)"
    assert called in record["command"]
    assert record["command"].startswith("pfedme.train('fedavg:eta=")
    json.dumps(record)
    assert pfedme.model_of("out").predict(frame).shape == (N,)
    unfinished = {**record, "status": "running", "history": [], "final": None}
    Path("out/record.json").write_text(json.dumps(unfinished))
    assert "were a frame in Python" in problems(capsys, "resume out")[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frame": 3}, "not a frame"),
        ({"frame": {"a": [1], "b": [1, 2]}}, "not a frame"),
        ({"frame": good(), "path": "t.csv"}, "a file or a frame, not both"),
        ({"path": "t.csv", "test_frame": good()}, "needs a frame"),
        ({"frame": good(), "label": "outcom"}, "the frame has no column 'outcom'"),
        ({"frame": good(), "client": None}, "Which client does each row of the frame belong to"),
        ({"frame": {**good(), "c": replaced(V, 4, None)}}, "row 4 of the frame"),
        ({}, "needs a path, or in Python a frame"),
    ],
)
def test_a_wrong_frame_is_refused_with_a_sentence(fields: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        Table(**{"client": "hospital", "label": "outcome", **fields}).pinned().load()
