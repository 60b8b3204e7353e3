"""Malformed tables: status 2, a sentence that names file, row or column and the cure, and nothing written."""

from __future__ import annotations

import datetime
import gzip
import io
import os
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bad_input import contents, refused

from pfedme.cli import main
from pfedme.data.table import Table
from pfedme.errors import InputError

GIVEN = "--client hospital --label outcome"
HEADER = "hospital,age,sex,outcome"
GOOD = [f"h{i % 3},{20 + i},{'fm'[i % 2]},{'yes' if i % 4 else 'no'}" for i in range(40)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of every test here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """The problems that a command line is refused for, one or several; nothing is written."""
    before = contents(Path())
    status = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("pfedme: ")
    assert "Traceback" not in err
    assert "polars" not in err.lower()
    assert contents(Path()) == before
    first, *rest = err.removeprefix("pfedme: ").splitlines()
    assert all(text.endswith(".") for text in (first, *rest))
    return [re.sub(r"^ +\d+\. ", "", text) for text in rest] or [first]


def table(*lines: str, header: str = HEADER) -> bytes:
    """A CSV file of forty good rows with these lines after them."""
    return "\n".join([header, *GOOD, *lines, ""]).encode()


def packed(content: bytes) -> bytes:
    """The content, compressed."""
    return gzip.compress(content, mtime=0)


def with_column(name: str, values: Callable[[int], object]) -> bytes:
    """The good table with one more column."""
    rows = [f"{row},{values(i)}" for i, row in enumerate(GOOD)]
    return "\n".join([f"{HEADER},{name}", *rows, ""]).encode()


def parquet(**columns: object) -> bytes:
    """A Parquet file of forty good rows, with some columns replaced or added."""
    plain = {
        "hospital": [f"h{i % 3}" for i in range(40)],
        "age": list(range(20, 60)),
        "outcome": ["yes" if i % 4 else "no" for i in range(40)],
    }
    out = io.BytesIO()
    pl.DataFrame({**plain, **columns}).write_parquet(out)
    return out.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    """An NPZ file of forty good rows, with some arrays replaced or added."""
    plain = {"x": np.arange(80.0).reshape(40, 2), "y": np.arange(40) % 2, "client": np.arange(40) % 3}
    out = io.BytesIO()
    np.savez(out, **{**plain, **arrays})
    return out.getvalue()


def some_bytes_changed(content: bytes) -> bytes:
    """The content with its middle turned upside down."""
    middle = len(content) // 2
    return content[:middle] + bytes(255 - b for b in content[middle : middle + 20]) + content[middle + 20 :]


DAY = datetime.date(2024, 1, 1)
FILES: dict[str, tuple[str, bytes, list[str]]] = {
    # the file as a whole
    "empty": ("t.csv", b"", ["t.csv is empty", "column names"]),
    "blank": ("t.csv", b"\n\n  \n", ["t.csv is empty"]),
    "header only": ("t.csv", f"{HEADER}\n".encode(), ["t.csv has no rows"]),
    "latin-1": (
        "t.csv",
        table("hé,30,f,yes").decode().encode("latin1"),
        ["t.csv", "UTF-8", "0xe9", "line 42", "iconv"],
    ),
    "latin-1 header": (
        "t.csv",
        table(header="hôpital,age,sex,outcome").decode().encode("latin1"),
        ["UTF-8", "line 1"],
    ),
    "utf-16": ("t.csv", table().decode().encode("utf-16"), ["t.csv is not UTF-8", "UTF-16", "save it"]),
    "an image": ("t.csv", b"\x89PNG\r\n\x1a\n" + bytes(200), ["t.csv is not UTF-8 text"]),
    "old Mac line ends": ("t.csv", table().replace(b"\n", b"\r"), ["t.csv", r"\r alone", r"\n line endings"]),
    "cut off gzip": (
        "t.csv.gz",
        packed(table())[:-30],
        ["t.csv.gz is damaged or truncated", "copy it again"],
    ),
    "changed gzip": ("t.csv.gz", some_bytes_changed(packed(table())), ["t.csv.gz", "copy it again"]),
    "cut off parquet": ("t.parquet", parquet()[:-10], ["t.parquet is not a complete Parquet file", "again"]),
    "no parquet": ("t.parquet", table(), ["t.parquet is not a complete Parquet file"]),
    "changed parquet": ("t.parquet", some_bytes_changed(parquet()), ["t.parquet"]),
    "cut off npz": ("t.npz", npz()[:-30], ["t.npz is not a complete NPZ file", "numpy.savez"]),
    "no npz": ("t.npz", table(), ["t.npz is not a complete NPZ file"]),
    # the header
    "no header": ("t.csv", b"1,2,3\n4,5,6\n", ["t.csv has no header", "'1,2,3'", "names"]),
    "two columns of one name": (
        "t.csv",
        table(header="hospital,age,age,outcome"),
        ["two columns 'age'", "rename"],
    ),
    "a column without a name": (
        "t.csv",
        table(header="hospital,,sex,outcome"),
        ["Column 2 of t.csv", "no name", "--features"],
    ),
    "spaces between columns": (
        "t.csv",
        table().replace(b",", b" "),
        ["only one column", "commas, semicolons, tabs"],
    ),
    "commas in .tsv": ("t.tsv", table(), ["t.tsv has only one column", "tabs", ".csv"]),
    "no client column": (
        "t.csv",
        table(header="hopsital,age,sex,outcome"),
        ["t.csv", "'hospital'", "--client", "'hopsital'?"],
    ),
    "no label column": (
        "t.csv",
        table(header="hospital,age,sex,result"),
        ["no column 'outcome'", "--label", "result"],
    ),
    # rows
    "a row with more fields": (
        "t.csv",
        table("h1,30,f,yes,9"),
        ["Row 41 of t.csv has 5 fields", "header has 4", "comma"],
    ),
    "an open quotation mark": ("t.csv", table('h1,30,"f,yes'), ["t.csv", "quotation mark"]),
    "a row with fewer fields": ("t.csv", table("h1,30"), ["label 'outcome'", "row 41 of t.csv"]),
    "a row without a client": (
        "t.csv",
        table(",30,f,yes"),
        ["client 'hospital' is missing in 1 row", "row 41 of t.csv"],
    ),
    "rows without a label": (
        "t.csv",
        table("h1,30,f,", "h1,30,f,NA"),
        ["label 'outcome' is missing in 2 rows", "row 41"],
    ),
    "an empty line among rows": ("t.csv", table("", "h1,30,f,yes"), ["missing in 1 row", "row 41 of t.csv"]),
    # columns
    "missing numbers": (
        "t.csv",
        table("h1,,f,yes", "h1,NA,,yes"),
        ["2 in 'age'", "1 in 'sex'", "row 41", "--impute mean", "--drop age,sex"],
    ),
    "text among numbers": (
        "t.csv",
        table("h1,old,f,yes"),
        ["'age' of row 41 of t.csv is 'old'", "--impute mean", "--drop age"],
    ),
    "infinite": ("t.csv", table("h1,inf,f,yes"), ["'age' of row 41 of t.csv is inf"]),
    "too large": ("t.csv", table("h1,1e300,f,yes"), ["'age' of row 41 of t.csv is 1e+300"]),
    "lists": ("t.parquet", parquet(scores=[[1, 2]] * 40), ["'scores'", "lists or records", "--drop scores"]),
    "bytes": ("t.parquet", parquet(raw=[b"x"] * 40), ["'raw'", "binary data", "--drop raw"]),
    "a label of dates": ("t.parquet", parquet(outcome=[DAY] * 40), ["'outcome'", "dates or times"]),
    "an empty column": (
        "t.csv",
        with_column("notes", lambda _: ""),
        ["'notes' of t.csv is empty", "--drop notes"],
    ),
    "too many texts": (
        "t.csv",
        "\n".join(["hospital,id,outcome", *(f"h{i % 3},id{i},{i % 2}" for i in range(1001)), ""]).encode(),
        ["'id' of t.csv has 1,001 different values", "1,000", "--drop id"],
    ),
    "nothing to predict from": ("t.csv", b"hospital,outcome\na,1\nb,0\n", ["t.csv has no column left"]),
    "lengths of time": (
        "t.parquet",
        parquet(stay=[datetime.timedelta(1)] * 40),
        ["'stay' of t.parquet holds dates or times", "--drop stay"],
    ),
    "dates from nowhere": (
        "t.csv",
        with_column("day", lambda i: f"0{1 + i % 9}/0{1 + i % 7}/2024"),
        ["'day' of t.csv holds dates", "the day or the month first", "--drop day"],
    ),
    # labels
    "one class": ("t.csv", table().replace(b",no\n", b",yes\n"), ["'outcome' = yes", "nothing to learn"]),
    "one row": ("t.csv", f"{HEADER}\n{GOOD[0]}\n".encode(), ["nothing to learn"]),
    "too many classes": (
        "t.csv",
        "\n".join(["hospital,age,outcome", *(f"h{i % 3},{i},{i}" for i in range(1100)), ""]).encode(),
        ["'outcome' of t.csv has more than 1,000", "--task regression"],
    ),
    "text among a label's numbers": (
        "t.csv",
        "\n".join(
            ["hospital,age,outcome", *(f"h{i % 3},{i},{i / 7}" for i in range(60)), "h1,3,high", ""]
        ).encode(),
        ["label 'outcome' of row 61 of t.csv is 'high'", "--task classification"],
    ),
    "an infinite label": (
        "t.csv",
        "\n".join(
            ["hospital,age,outcome", *(f"h{i % 3},{i},{i / 7}" for i in range(60)), "h1,3,inf", ""]
        ).encode(),
        ["label 'outcome' of row 61 of t.csv is inf"],
    ),
    # arrays
    "no x": ("t.npz", npz().replace(b"x.npy", b"z.npy"), ["t.npz", "no array 'x'", "'client'"]),
    "objects": ("t.npz", npz(y=np.array([None] * 40)), ["t.npz is not a complete NPZ file of plain arrays"]),
    "texts in x": ("t.npz", npz(x=np.array([["a", "b"]] * 40)), ["x in t.npz must contain numbers"]),
    "x of one dimension": ("t.npz", npz(x=np.arange(40.0)), ["x in t.npz must contain numbers", "40"]),
    "no samples": (
        "t.npz",
        npz(x=np.zeros((0, 2)), y=np.zeros(0), client=np.zeros(0)),
        ["x in t.npz", "0×2"],
    ),
    "y of another length": ("t.npz", npz(y=np.arange(39)), ["y in t.npz", "40 rows of x", "39"]),
    "NaN in x": ("t.npz", npz(x=np.full((40, 2), np.nan)), ["40 in 'x0'", "row 1 of t.npz", "--impute mean"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_table_is_refused(capsys: pytest.CaptureFixture[str], name: str):
    file, content, words = FILES[name]
    Path(file).write_bytes(content)
    given = "" if file.endswith(".npz") else GIVEN
    err = " ".join(problems(capsys, f"data describe --data {file} {given}"))
    assert [word for word in words if word not in err] == []


def test_a_malformed_table_is_refused_by_every_command(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_bytes(table("h1,old,f,yes"))
    for command in ("run pfedme", "compare fedavg alone", "tune fedavg --trials 1"):
        assert "'old'" in refused(capsys, f"{command} --data t.csv {GIVEN} --rounds 1 --out out")


OPTIONS: list[tuple[str, list[str]]] = [
    ("--data nowhere.csv --client hospital --label outcome", ["no file nowhere.csv"]),
    ("--data nowhere", ["no data 'nowhere'", "synthetic, mnist", "path of a table"]),
    ("--data t.txt --client hospital --label outcome", ["t.txt has an unknown format", ".parquet"]),
    ("--data nothing --label outcome", ["The folder nothing contains no table", ".csv"]),
    (
        "--data t.csv --client hospital",
        ["Which column of t.csv is to be predicted?", "--label", "hospital, age, sex, outcome"],
    ),
    (
        "--data t.csv --label outcome",
        ["Which client does each row of t.csv belong to?", "--client", "hospital, age, sex, outcome"],
    ),
    ("--data t.csv --client outcome --label outcome", ["--client and --label are both 'outcome'"]),
    (f"--data t.csv {GIVEN} --features age,sx", ["no column 'sx'", "--features", "'sex'?"]),
    (f"--data t.csv {GIVEN} --features age,hospital", ["--features names 'hospital'", "the client"]),
    (f"--data t.csv {GIVEN} --drop outcome", ["--drop names 'outcome'", "the label"]),
    (f"--data t.csv {GIVEN} --drop aeg", ["no column 'aeg'", "--drop", "'age'?"]),
    (f"--data t.csv {GIVEN} --drop age,sex", ["t.csv has no column left"]),
    (f"--data t.csv {GIVEN} --features ,", ["features", "names separated by commas"]),
    (f"--data t.csv {GIVEN} --task ranking", ["task", "'ranking'", "classification, regression"]),
    (
        f"--data t.csv {GIVEN} --task regression",
        ["label 'outcome' of row 1 of t.csv is 'no'", "not a number"],
    ),
    (f"--data t.csv {GIVEN} --impute median", ["impute", "'median'", "mean"]),
    (f"--data t.csv {GIVEN} --train 1", ["train", "below 1"]),
    (f"--data t.csv {GIVEN} --split-seed -1", ["seed", "at least 0"]),
    (f"--data t.csv {GIVEN} --test nowhere.csv", ["no file nowhere.csv"]),
    (
        f"--data t.csv {GIVEN} --test stranger.csv",
        ["client of row 1 of stranger.csv is 'h9'", "no training rows"],
    ),
    (
        f"--data t.csv {GIVEN} --test label.csv",
        ["label 'outcome' of row 1 of label.csv is 'maybe'", "no training row"],
    ),
    (f"--data t.csv {GIVEN} --test narrow.csv", ["narrow.csv has no column 'sex'"]),
    ("--data t.npz --features x0", ["t.npz contains arrays", "leave --features and --drop out"]),
    ("--data both.npz --test t.npz", ["both.npz already has test rows", "--test"]),
    (
        "--data folder --label outcome",
        ["folder/b.csv has a column 'extra'", "folder/a.csv does not", "--drop"],
    ),
    ("--data folder --label outcome --drop extra --test t.csv", ["--test t.csv must be a folder"]),
    ("--data twice --label outcome", ["two files for the client 'a'"]),
    (
        "--data synthetic --label outcome",
        ["--label only applies to your own tables", "--data synthetic is not one"],
    ),
    ("--data mnist:clients=7 --impute mean", ["--impute only applies to your own tables"]),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_options_that_do_not_fit_the_table_are_refused(
    capsys: pytest.CaptureFixture[str], options: str, words: list[str]
):
    Path("t.csv").write_bytes(table())
    Path("t.txt").write_bytes(table())
    Path("t.npz").write_bytes(npz())
    Path("both.npz").write_bytes(npz(x_test=np.ones((1, 2)), y_test=np.ones(1), client_test=np.ones(1)))
    Path("stranger.csv").write_bytes(table().replace(b"h0,", b"h9,"))
    Path("label.csv").write_bytes(table().replace(b",no\n", b",maybe\n"))
    Path("narrow.csv").write_text("hospital,age,outcome\nh0,3,yes\n")
    for name in ("nothing", "folder", "twice"):
        Path(name).mkdir()
    Path("folder/a.csv").write_bytes(table())
    Path("folder/b.csv").write_bytes(with_column("extra", lambda i: i))
    Path("twice/a.csv").write_bytes(table())
    Path("twice/a.parquet").write_bytes(parquet())
    err = refused(capsys, f"data describe {options}")
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize("wrong", ["x", "1", "0.5,1", "", "n"])
def test_the_first_wrong_value_is_found_far_below_the_rows_that_told_the_type(
    monkeypatch: pytest.MonkeyPatch, wrong: str
):
    monkeypatch.setattr("pfedme.data.text.SAMPLE", 5)
    monkeypatch.setattr("pfedme.data.reading.PIECE", 20)
    field = f'"{wrong}"'
    Path("t.csv").write_bytes(table(f"h1,{field},f,yes"))
    source = Table(path="t.csv", client="hospital", label="outcome")
    if wrong == "1":
        assert source.load().count.sum() == 41
        return
    with pytest.raises(InputError) as caught:
        source.load()
    assert "row 41 of t.csv" in str(caught.value)
    assert "age" in str(caught.value)


@pytest.mark.slow
def test_a_client_that_is_called_like_a_path_is_only_a_name(capsys: pytest.CaptureFixture[str]):
    inner = Path("deep/inside")
    inner.mkdir(parents=True)
    rows = [row.replace("h0", "../../etc").replace("h1", "/etc/passwd") for row in GOOD]
    (inner / "t.csv").write_text("\n".join([HEADER, *rows, ""]))
    line = f"run fedavg --data {inner}/t.csv {GIVEN} --rounds 1 --R 1 --out {inner}/out"
    assert main(line.split()) == 0
    capsys.readouterr()
    made = {path for path in Path().rglob("*") if path.is_file() and inner / "out" not in path.parents}
    assert made == {inner / "t.csv"}
    assert "../../etc," in (inner / "out/clients.csv").read_text()


def read(path: Path, **fields: str | None) -> None:
    """Reads a table, which may only end well or in an error of ours, of one line."""
    said = "."
    try:
        federation = Table(path=str(path), **{"client": "a", "label": "b", **fields}).load()
        assert np.isfinite(federation.x).all()
        assert federation.count.sum() == len(federation.y)
    except InputError as error:
        said = str(error)
    assert all(line.endswith((".", "?")) for line in said.splitlines())


QUICK = settings(
    derandomize=True, deadline=None, max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@QUICK
@given(st.binary(max_size=300), st.sampled_from(["csv", "tsv", "csv.gz", "parquet", "npz"]))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes, ending: str):
    path = tmp_path / f"t.{ending}"
    path.write_bytes(content)
    read(path)


@QUICK
@given(
    st.binary(min_size=1, max_size=8), st.integers(0, 10**6), st.sampled_from(["csv.gz", "parquet", "npz"])
)
def test_a_whole_file_with_some_bytes_changed_is_read_or_refused(
    tmp_path: Path, change: bytes, at: int, ending: str
):
    whole = {"csv.gz": packed(table()), "parquet": parquet(), "npz": npz()}[ending]
    at %= len(whole)
    path = tmp_path / f"t.{ending}"
    path.write_bytes(whole[:at] + change + whole[at + len(change) :])
    names = {} if ending == "npz" else {"client": "hospital", "label": "outcome"}
    read(path, **names)


FIELD = st.one_of(
    st.sampled_from(
        ["", "1", "0", "-2.5", "1e5", "NA", "nan", "inf", "x", "y", "2024-01-01", "true", '"', "a,b"]
    ),
    st.text(max_size=4),
)


@QUICK
@given(
    st.lists(st.lists(FIELD, min_size=1, max_size=5), min_size=1, max_size=12),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from([None, "mean"]),
)
def test_any_table_of_texts_is_read_or_refused(
    tmp_path: Path, rows: list[list[str]], separator: str, impute: str | None
):
    path = tmp_path / "t.csv"
    lines = [["a", "b", "c", "d"], *rows]
    path.write_bytes("\n".join(separator.join(row) for row in lines).encode("utf-8", "surrogatepass"))
    read(path, impute=impute)


def test_an_npz_with_a_member_that_is_no_array_is_refused(capsys: pytest.CaptureFixture[str]):
    with zipfile.ZipFile("t.npz", "w") as file:
        file.writestr("x.npy", b"nonsense")
    assert "t.npz" in refused(capsys, "data describe --data t.npz")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_a_file_that_may_not_be_read_is_named(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_bytes(table())
    Path("t.csv").chmod(0)
    assert "t.csv cannot be read" in refused(capsys, f"data describe --data t.csv {GIVEN}")
