"""Odd tables that can be read: what becomes of each, and the note that says so."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_bad_input import contents
from test_bad_tables import problems

from pfedme.cli import main
from pfedme.data.federation import Federation
from pfedme.data.forms import PERIODS, Form, find
from pfedme.data.schema import Column, Schema
from pfedme.data.table import Table
from pfedme.deploy.messages import Refusal
from pfedme.deploy.policy import Policy
from pfedme.errors import InputError
from pfedme.report.describe import describe

N = 60
GIVEN = "--client hospital --label outcome"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of every test here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def good(n: int = N) -> dict[str, list[Any]]:
    """A table with nothing to note."""
    rng = np.random.default_rng(0)
    return {
        "hospital": [f"h{i % 3}" for i in range(n)],
        "age": [round(v, 2) for v in rng.normal(50, 10, n).tolist()],
        "outcome": ["yes" if v else "no" for v in rng.random(n) < 0.5],
    }


def written(columns: Mapping[str, Sequence[Any]], separator: str = ",") -> str:
    """Columns as CSV; None is nothing."""
    return pl.DataFrame(
        {k: ["" if v is None else str(v) for v in own] for k, own in columns.items()}
    ).write_csv(separator=separator)


def load(columns: Mapping[str, Sequence[Any]], separator: str = ",", **options: Any) -> Federation:
    """The federation of columns that were written as CSV."""
    Path("t.csv").write_text(written(columns, separator))
    return Table(path="t.csv", **{"client": "hospital", "label": "outcome", **options}).load()


def raw(f: Federation, name: str) -> list[float]:
    """A column of numbers as it was, sorted."""
    assert f.schema is not None
    column = next(c for c in f.schema.columns if c.name == name)
    own = f.x[:, f.schema.starts[name]].astype(np.float64)
    return sorted(column.mean + column.scale * own)


def column(make: Callable[[int], object]) -> list[object]:
    """A column of values made from the rows' numbers."""
    return [make(i) for i in range(N)]


def cycle(*values: object) -> list[object]:
    """A column of these values again and again."""
    return [values[i % len(values)] for i in range(N)]


V = [round(v, 1) for v in np.random.default_rng(1).uniform(1, 99, N).tolist()]
LARGE = [1000 + 777 * i for i in range(N)]
DAY = datetime.date(2023, 1, 1)
DAYS = [DAY + datetime.timedelta(days=37 * i % 700) for i in range(N)]
SINCE = [float((day - datetime.date(1970, 1, 1)).days) for day in DAYS]


def comma(value: float) -> str:
    """A number with a decimal comma."""
    return str(value).replace(".", ",")


# What a column of texts is read as: the texts, the numbers that they stand for, and words of the note.
NUMBERS: dict[str, tuple[Sequence[object], Sequence[float], list[str]]] = {
    "percent": ([f"{v}%" for v in V], V, ["'c' holds numbers such as", "%'"]),
    "percent after a blank": ([f"{v} %" for v in V], V, ["%'"]),
    "a unit": ([f"{v} mmHg" for v in V], V, ["mmHg', read as"]),
    "a unit without a blank": ([f"{v}kg" for v in V], V, ["kg', read as"]),
    "a unit in capitals or not": ([f"{v} {('KG', 'kg')[i % 2]}" for i, v in enumerate(V)], V, ["read as"]),
    "one and several": ([f"{v} day{'s' if v > 50 else ''}" for v in V], V, ["days', read as"]),
    "a unit of two words": ([f"{v} kg/m²" for v in V], V, ["kg/m²"]),
    "degrees": ([f"{v} °C" for v in V], V, ["°C"]),
    "some without the unit": ([f"{v} kg" if i else v for i, v in enumerate(V)], V, ["1 have no 'kg'"]),
    "dollars": ([f"${v:.2f}" for v in V], V, ["$"]),
    "euros behind": ([f"{comma(v)} €" for v in V], V, ["€', read as"]),
    "negative dollars": ([f"-${v}" for v in V], [-v for v in V], ["read as -"]),
    "dollars with a sign inside": ([f"$-{v}" for v in V], [-v for v in V], ["read as -"]),
    "thousands": ([f"{v:,}" for v in LARGE], LARGE, ["read as"]),
    "millions": ([f"{1000 * v:,}" for v in LARGE], [1000 * v for v in LARGE], ["read as"]),
    "thousands and cents": ([f"{1000 + v:,.1f}" for v in V], [1000 + v for v in V], ["read as"]),
    "thousands by blanks": ([f"{v:,}".replace(",", " ") for v in LARGE], LARGE, ["read as"]),
    "thousands by apostrophes": ([f"{v:,}".replace(",", "'") for v in LARGE], LARGE, ["read as"]),
    "decimal commas in quotation marks": ([comma(v) for v in V], V, ["read as"]),
    "thousands and decimal commas": (column(lambda i: f"1.{100 + i},5"), [1100.5 + i for i in range(N)], []),
    "a long minus": ([f"−{v}" for v in V], [-v for v in V], []),
    "numbers and blanks": ([f"  {v} " for v in V], V, []),
    "ISO dates": ([str(day) for day in DAYS], SINCE, ["dates", "year, month, day", "the week"]),
    "dates with slashes, year first": ([f"{d:%Y/%m/%d}" for d in DAYS], SINCE, ["dates"]),
    "German dates": ([f"{d:%d.%m.%Y}" for d in DAYS], SINCE, ["day, month, year"]),
    "German dates without zeros": ([f"{d.day}.{d.month}.{d.year}" for d in DAYS], SINCE, ["dates"]),
    "short years": ([f"{d:%d.%m.%y}" for d in DAYS], SINCE, ["dates"]),
    "day first, some above 12": ([f"{d:%d/%m/%Y}" for d in DAYS], SINCE, ["day, month, year"]),
    "month first, some above 12": ([f"{d:%m/%d/%Y}" for d in DAYS], SINCE, ["month, day, year"]),
    "timestamps": ([f"{d}T06:00:00" for d in DAYS], [d + 0.25 for d in SINCE], ["dates"]),
    "timestamps with a zone": ([f"{d} 06:00:00.5+02:00" for d in DAYS], [d + 0.25 for d in SINCE], ["dates"]),
    "afternoons": ([f"{d:%m/%d/%Y} 6:00 PM" for d in DAYS], [d + 0.75 for d in SINCE], ["month, day, year"]),
    "times": ([f"{i % 24:02}:30" for i in range(N)], [i % 24 + 0.5 for i in range(N)], ["times", "hours"]),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_texts_that_stand_for_numbers_are_read_as_numbers_with_a_note(name: str):
    texts, want, words = NUMBERS[name]
    f = load({**good(), "c": texts})
    np.testing.assert_allclose(raw(f, "c"), sorted(want), atol=2e-3 * (1 + np.ptp(want)))
    said = next((note for note in f.notes if note.startswith("Column 'c' holds")), "")
    assert [word for word in words if word not in said] == []
    assert f.schema is not None
    again = Schema.from_json(json.loads(json.dumps(f.schema.to_json())))
    assert again == f.schema
    frame = pl.DataFrame({**good(), "c": [str(text) for text in texts]})
    np.testing.assert_allclose(
        np.sort(again.encode(frame, "new rows"), axis=0), np.sort(f.x, axis=0), atol=1e-5
    )


# Texts that look like numbers and are not, or not clearly: the column stays one of categories.
CATEGORIES: dict[str, list[object]] = {
    "wards": column(lambda i: f"ward {i % 4}"),
    "ranges": column(lambda i: f"{10 * (i % 4)}-{10 * (i % 4) + 9}"),
    "old people": cycle("<40", "40-65", "65+"),
    "codes": column(lambda i: f"A{i % 5}"),
    "two units": column(lambda i: f"{i % 3} {'kg' if i % 2 else 'lb'}"),
    "children": cycle("no child", "1 child", "2 children"),
    "versions": column(lambda i: f"1.{i % 2}.{i % 3}b"),
    "impossible dates": column(lambda i: f"2024-13-{40 + i % 3}"),
    "months": column(lambda i: f"2024-0{1 + i % 5}"),
    "numbers for a half": column(lambda i: str(i % 3) if i % 2 else "abc"[i % 3]),
}


@pytest.mark.parametrize("name", CATEGORIES)
def test_texts_that_are_no_numbers_stay_categories(name: str):
    f = load({**good(), "c": CATEGORIES[name]})
    assert f.schema is not None
    own = next(c for c in f.schema.columns if c.name == "c")
    assert own.kind == "category"
    assert set(own.categories) == set(map(str, CATEGORIES[name]))


def replaced(values: Sequence[object], row: int, value: object) -> list[object]:
    """Values with another one in a row."""
    return [*values[: row - 1], value, *values[row:]]


# Columns that nearly all have one form, and the row that has not.
ODD: dict[str, tuple[list[object], list[str]]] = {
    "another unit": (replaced([f"{v} mmHg" for v in V], 7, "1.2 kPa"), ["row 7", "'1.2 kPa'", "unit 'mmHg'"]),
    "a text among units": (replaced([f"{v} kg" for v in V], 9, "heavy"), ["row 9", "'heavy'", "--drop c"]),
    "no percent": (replaced([f"{v}%" for v in V], 5, "0.89"), ["row 5", "'0.89'", "unit '%'"]),
    "no date": (replaced([str(d) for d in DAYS], 4, "soon"), ["row 4", "'soon'", "dates"]),
    "no day": (replaced([str(d) for d in DAYS], 4, "2023-02-30"), ["row 4", "'2023-02-30'", "dates"]),
    "another order": (replaced([f"{d:%d/%m/%Y}" for d in DAYS], 1, "12/31/2023"), ["row 1", "'12/31/2023'"]),
    "day or month": (column(lambda i: f"0{1 + i % 9}/0{1 + i % 8}/2020"), ["day or the month first"]),
    "no time": (replaced(column(lambda i: f"{i % 24}:15"), 3, "25:99"), ["row 3", "'25:99'", "times"]),
    "a word among thousands": (replaced([f"{1000 + i:,}" for i in range(N)], 8, "many"), ["row 8", "'many'"]),
    "smaller than": (replaced(V, 2, "<0.5"), ["row 2", "'<0.5'", "numbers"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_the_row_that_has_another_form_is_named(capsys: pytest.CaptureFixture[str], name: str):
    texts, words = ODD[name]
    Path("t.csv").write_text(written({**good(), "c": texts}))
    (said,) = problems(capsys, f"data describe --data t.csv {GIVEN}")
    assert [word for word in words if word not in said] == []
    assert "Column 'c' of" in said


# --- What looks wrong -----------------------------------------------------------------------------------

rng = np.random.default_rng(2)
LOOKS: dict[str, tuple[Mapping[str, Sequence[object]], list[str]]] = {
    "an index": ({"c": range(1, N + 1)}, ["'c' numbers the rows from 1 to 60", "--drop c"]),
    "an index from 0": ({"c": range(N)}, ["'c' numbers the rows from 0 to 59"]),
    "a shuffled index": ({"c": rng.permutation(N).tolist()}, ["'c' numbers the rows"]),
    "numbers of patients": ({"patient_id": rng.choice(10**6, N, False).tolist()}, ["60 different whole"]),
    "numbers that never meet": ({"c": rng.choice(300, N, False).tolist()}, ["'c' has 60 different whole"]),
    "names of patients": ({"c": column(lambda i: f"p{i}")}, ["'c' has 60 different values", "identifier"]),
    "the label again": ({"c": good()["outcome"]}, ["'c' determines the label 'outcome' exactly"]),
    "the label in numbers": ({"c": [int(v == "yes") for v in good()["outcome"]]}, ["'c' determines"]),
    "the label in other words": ({"c": [f"was {v}" for v in good()["outcome"]]}, ["'c' determines"]),
    "capitals": ({"c": cycle("Yes", "YES", "no")}, ["'c' has 'YES' and 'Yes'"]),
    "blanks": ({"c": cycle("New York", "New  York", "Rom")}, ["'New  York' and 'New York'"]),
    "leading zeros": ({"c": cycle("007", "7", "x")}, ["'007' and '7'"]),
    "a client in capitals": ({"hospital": cycle("Bonn", "BONN", "Ulm")}, ["'BONN' and 'Bonn'"]),
    "clients and zeros": ({"hospital": cycle("1", "01", "2")}, ["client, has '01' and '1'"]),
    "a label in capitals": ({"outcome": cycle("no", "yes", "yes", "No", "no")}, ["has 'No' and 'no'"]),
    "a value far outside": ({"c": replaced([v / 32 for v in V], 9, 61370)}, ["'c' is 61,370 in 1 row"]),
    "999 for missing": ({"c": [round(v) if i % 10 else 999 for i, v in enumerate(V)]}, ["is 999 in 6 rows"]),
    "far below": ({"c": replaced(V, 9, -1e6)}, ["'c' is -1e+06 in 1 row"]),
    "a constant": ({"c": [3.5] * N}, ["'c' is the same in every row"]),
    "one category": ({"c": ["x"] * N}, ["'c' is the same in every row"]),
    "one date": ({"c": ["2024-01-01"] * N}, ["'c' is the same in every row"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_wrong_is_noted_and_described(capsys: pytest.CaptureFixture[str], name: str):
    columns, words = LOOKS[name]
    Path("t.csv").write_text(written({**good(), **columns}))
    before = contents(Path())
    assert main(["data", "describe", "--data", "t.csv", *GIVEN.split(), "--json"]) == 0
    said = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert [word for word in words if word not in said] == []
    assert contents(Path()) == before


@pytest.mark.slow
def test_the_notes_are_printed_after_runs_and_comparisons(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(written({**good(), "c": [f"{v} kg" for v in V], "d": ["[x]"] * N}))
    for command in ("run fedavg", "compare fedavg"):
        line = f"{command} --data t.csv {GIVEN} --rounds 1 --R 1 --out {command.split()[0]}"
        assert main(shlex.split(line)) == 0
        out = capsys.readouterr().out
        assert "Note: Column 'd' is the same in every row" in out
        assert "Note: Column 'c' holds numbers such as" in out


TAILS: dict[str, np.ndarray] = {
    "normal": rng.normal(size=1000),
    "uniform": rng.uniform(size=1000),
    "exponential": rng.exponential(size=1000),
    "lognormal": rng.lognormal(0, 1.5, 1000),
    "three degrees of freedom": rng.standard_t(3, 1000),
    "Pareto": rng.pareto(2, 1000),
    "rare events": (rng.random(1000) < 0.01).astype(float),
    "counts": rng.poisson(0.2, 1000).astype(float),
    "two heaps": np.where(rng.random(1000) < 0.3, 100.0, 0.0) + rng.normal(size=1000),
    "salaries": np.round(rng.lognormal(10, 0.5, 1000)),
    "visits": rng.integers(0, 2000, 1000).astype(float),
}


@pytest.mark.parametrize("name", TAILS)
def test_heavy_tails_are_not_noted(name: str):
    whole = np.all(TAILS[name] % 1 == 0)
    values = [int(v) if whole else v for v in TAILS[name].tolist()]
    assert load({**good(1000), "c": values}).notes == ()


def test_a_quantity_that_is_a_column_in_other_units_is_noted():
    f = load({**good(), "c": V, "outcome": [32 + 1.8 * v for v in V]})
    assert any("'c' determines the label 'outcome' exactly" in note for note in f.notes)
    noisy = load({**good(), "c": V, "outcome": [32 + 1.8 * v + (i % 2) for i, v in enumerate(V)]})
    assert noisy.notes == ()


def test_a_column_of_numbers_in_one_file_and_of_texts_in_another_is_noted():
    Path("d").mkdir()
    own = {name: values for name, values in good().items() if name != "hospital"}
    Path("d/a.csv").write_text(written({**own, "c": V}))
    Path("d/b.csv").write_text(written({**own, "c": column(lambda i: "ab"[i % 2])}))
    f = Table(path="d", label="outcome").load()
    assert any("'c' holds numbers in d/a.csv but text in d/b.csv" in note for note in f.notes)


def test_equal_rows_are_noted_only_if_they_are_more_than_chance():
    draws = np.random.default_rng(0)
    few = draws.integers(0, 3, (200, 3)).astype(np.float32)
    y = draws.integers(0, 2, 200)
    assert not any(
        "same as" in w for w in describe(Federation.split([100, 100], few, y, classes=2))["warnings"]
    )
    many = draws.normal(size=(200, 3)).astype(np.float32)
    many[100:120], y[100:120] = many[:20], y[:20]
    (said,) = (
        w for w in describe(Federation.split([100, 100], many, y, classes=2))["warnings"] if "same" in w
    )
    assert "40 rows (20.0%) are the same as a row of another client" in said
    assert "by chance there would be none" in said


# --- Options ---------------------------------------------------------------------------------------------


def test_rows_without_a_label_are_left_out_on_request(capsys: pytest.CaptureFixture[str]):
    columns = {**good(), "c": V}
    gone = [3, 17, 18, 60]
    for row in gone:
        columns["outcome"] = replaced(columns["outcome"], row, None if row != 17 else "NA")
    f = load(columns, drop_missing_labels=True)
    assert f.notes == ("In t.csv, 4 rows have no 'outcome' and are left out.",)
    rest = {name: [v for i, v in enumerate(own, 1) if i not in gone] for name, own in columns.items()}
    want = load(rest)
    assert (f.names, f.n_train.tolist()) == (want.names, want.n_train.tolist())
    assert (f.y == want.y).all()
    np.testing.assert_allclose(f.x, want.x, atol=1e-6)
    Path("t.csv").write_text(written(columns))
    (said,) = problems(capsys, f"data describe --data t.csv {GIVEN}")
    assert "missing in 4 rows of t.csv, first in row 3 of t.csv" in said
    assert "--drop-missing-labels" in said
    assert main(shlex.split(f"data describe --data t.csv {GIVEN} --drop-missing-labels")) == 0
    assert "4 rows have no 'outcome'" in capsys.readouterr().out


@pytest.mark.parametrize("size", [7, 20, 10**6])
def test_errors_count_rows_that_were_left_out(monkeypatch: pytest.MonkeyPatch, size: int):
    monkeypatch.setattr("pfedme.data.reading.PIECE", size)
    columns = {**good(), "c": replaced(V, 31, None), "d": replaced(column(lambda i: "ab"[i % 2]), 33, None)}
    columns["outcome"] = replaced(replaced(columns["outcome"], 2, None), 30, None)
    with pytest.raises(InputError) as caught:
        load(columns, drop_missing_labels=True)
    assert "1 in 'c', 1 in 'd' (the first in row 31 of t.csv)" in str(caught.value)
    assert load(columns, drop_missing_labels=True, impute="mean").count.sum() == N - 2


def test_rows_of_a_test_table_without_a_label_are_left_out_too():
    held = {**good(), "outcome": replaced(good()["outcome"], 1, None)}
    Path("test.csv").write_text(written(held))
    f = load(good(), test="test.csv", drop_missing_labels=True)
    assert (f.n_train.sum(), f.n_test.sum()) == (N, N - 1)
    with pytest.raises(InputError, match=r"No row of t\.csv has a 'outcome'"):
        load({**good(), "outcome": [None] * N}, drop_missing_labels=True)


@pytest.mark.parametrize("word", [".", "-", "?", "-99", "unknown", "not asked"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_further_words_count_as_missing(word: str, ending: str):
    columns = {**good(), "c": V, "d": column(lambda i: "ab"[i % 2])}
    gone = {**columns, "c": replaced(V, 5, None), "d": replaced(columns["d"], 6, None)}
    marked = {**columns, "c": replaced(V, 5, word), "d": replaced(columns["d"], 6, word)}
    want = load(gone, impute="mean")
    f = load(marked, impute="mean", na=(word, "nil"))
    if ending == "parquet":
        frame = pl.read_csv("t.csv", infer_schema_length=None)
        frame.write_parquet("t.parquet")
        f = Table(
            path="t.parquet", client="hospital", label="outcome", impute="mean", na=(word, "nil")
        ).load()
    assert f.schema is not None
    assert want.schema is not None
    assert sorted(c.name for c in f.schema.columns) == sorted(c.name for c in want.schema.columns)
    np.testing.assert_allclose(np.sort(f.x, axis=0), np.sort(want.x, axis=0), atol=1e-5)
    new = pl.DataFrame({"age": ["50"], "c": [word], "d": [word]})
    at = f.schema.starts["c"]
    assert f.schema.encode(new, "new rows")[0, at] == 0


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("given", [None, ","])
def test_decimal_commas_are_found_and_can_be_given(separator: str, given: str | None):
    numbers = {**good(), "c": V, "d": column(lambda i: 1000 + i * i % 700)}
    want = load(numbers, separator)
    assert want.notes == ()
    commas = {
        **numbers, "c": [comma(v) for v in V], "age": [comma(v) for v in numbers["age"]],
        "d": column(lambda i: f"1.{i * i % 700:03}"),
    }  # fmt: skip
    f = load(commas, separator, decimal=given)
    for name in ("age", "c", "d"):
        np.testing.assert_allclose(raw(f, name), raw(want, name), rtol=1e-5)
    assert any("decimal commas" in note for note in f.notes) == (given is None)


def test_a_decimal_point_that_is_given_makes_commas_thousands():
    columns = {**good(), "age": column(lambda i: i % 7), "c": column(lambda i: f"{1 + i},{100 + i}")}
    decimal = raw(load(columns, ";"), "c")
    assert decimal == pytest.approx(sorted(1 + i + (100 + i) / 1000 for i in range(N)), abs=1e-4)
    thousands = raw(load(columns, ";", decimal="."), "c")
    assert thousands == pytest.approx(sorted(1000 * (1 + i) + 100 + i for i in range(N)), rel=1e-4)
    assert raw(load(columns, "\t"), "c") == pytest.approx(thousands)


def test_columns_with_points_keep_them_beside_columns_with_commas():
    f = load({**good(), "c": [comma(v) for v in V], "d": V}, ";")
    assert raw(f, "c") == pytest.approx(sorted(V), abs=1e-4)
    assert raw(f, "d") == pytest.approx(sorted(V), abs=1e-4)


def test_a_quantity_may_have_a_unit_and_new_rows_are_read_alike():
    plain = load({**good(), "outcome": V})
    f = load({**good(), "outcome": [f"{comma(v)} kg" for v in V]})
    assert f.classes == 0
    np.testing.assert_allclose(f.labels_in_units(), plain.labels_in_units(), rtol=1e-5)
    assert any("'outcome' holds numbers" in note for note in f.notes)
    assert f.schema is not None
    Path("new.csv").write_text(written({**good(), "outcome": [f"{comma(v)} kg" for v in V]}))
    again = Table(path="new.csv", client="hospital", label="outcome").load(f.schema)
    np.testing.assert_allclose(again.y, f.y, rtol=1e-5)
    few = load({**good(), "outcome": column(lambda i: f"{1 + i % 3} kg")})
    assert few.schema is not None
    assert few.schema.labels == ("1 kg", "2 kg", "3 kg")


# --- Dates ------------------------------------------------------------------------------------------------


def test_a_date_becomes_days_and_its_places_in_the_cycles_that_it_covers():
    times = [datetime.datetime(2023, 1, 1) + datetime.timedelta(hours=1001 * i % 17000) for i in range(N)]
    f = load({**good(), "c": [str(time) for time in times]})
    assert f.schema is not None
    days = np.array([(time - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1) for time in times])
    for period, length in PERIODS.items():
        for function, curve in (("sine", np.sin), ("cosine", np.cos)):
            want = curve(2 * np.pi * days / length)
            np.testing.assert_allclose(raw(f, f"c ({period} {function})"), sorted(want), atol=1e-4)
    short = load({**good(), "c": column(lambda i: f"2024-01-0{1 + i % 5}")})
    births = load({**good(), "c": column(lambda i: f"{1930 + i}-05-05")})
    for other in (short, births):
        assert other.schema is not None
        assert [c.name for c in other.schema.columns] == ["age", "c"]


def test_dates_of_a_parquet_file_are_read_like_their_texts():
    frame = pl.DataFrame(
        {**good(), "c": DAYS, "d": [datetime.datetime(2024, 1, 1, i % 24) for i in range(N)]}
    )
    zoned = frame.with_columns(pl.col("d").dt.replace_time_zone("Europe/Berlin"))
    zoned.write_parquet("t.parquet")
    f = Table(path="t.parquet", client="hospital", label="outcome").load()
    want = load({**good(), "c": DAYS, "d": frame["d"].to_list()})
    np.testing.assert_allclose(f.x, want.x, atol=1e-5)
    assert f.schema is not None
    np.testing.assert_allclose(
        np.sort(f.schema.encode(zoned, "new rows"), axis=0), np.sort(f.x, axis=0), atol=1e-5
    )
    for wrong, words in (({"c": ["soon"]}, "not a date"), ({"c": [3]}, "should hold dates or times")):
        row = frame[:1].with_columns(c=pl.Series(wrong["c"]))
        with pytest.raises(InputError, match=words):
            f.schema.encode(row, "new rows")
    with pytest.raises(InputError, match="must be a frame"):
        f.schema.encode(np.zeros((1, f.features)), "new rows")


def test_missing_dates_are_imputed_or_refused():
    columns = {**good(), "c": replaced([str(d) for d in DAYS], 3, None)}
    with pytest.raises(InputError, match=r"1 in 'c' \(the first in row 3"):
        load(columns)
    f = load(columns, impute="mean")
    assert (f.x[:, 1] == 0).sum() == 1


def test_the_form_of_dates_is_decided_by_those_that_leave_no_choice():
    both, day, month = (
        pl.Series(texts) for texts in (["1/2/2020", "3/4/2020"], ["13/2/2020", "3/4/2020"], ["2/13/2020"])
    )
    found = find(both, np.ones(2))
    assert found is not None
    assert found.ambiguous
    for texts, order in ((day, "dmy"), (month, "mdy")):
        found = find(texts, np.ones(len(texts)))
        assert found is not None
        assert (found.form.date, found.ambiguous) == (order, False)
    same = find(pl.Series(["3/3/2020"]), np.ones(1))
    assert same is not None
    assert not same.ambiguous
    assert Form(date="mdy").read(pl.Series(["1.2.2020"])).to_list() == [None]
    leap = Form(date="ymd").read(pl.Series(["2024-02-29", "2023-02-29", "1900-01-01", "2024-01-01 24:00"]))
    assert leap.to_list() == [19782.0, None, -25567.0, None]


# --- All problems at once -----------------------------------------------------------------------------------


def test_all_problems_of_a_table_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    columns: Mapping[str, Sequence[Any]] = {
        **good(), "empty": [None] * N, "units": replaced([f"{v} kg" for v in V], 9, "heavy"),
        "words": replaced(V, 4, "old"), "days": column(lambda i: f"0{1 + i % 9}/0{1 + i % 8}/2020"),
        "gaps": replaced(V, 11, None), "big": replaced(V, 12, "inf"),
    }  # fmt: skip
    columns["hospital"] = replaced(columns["hospital"], 6, None)
    columns["outcome"] = replaced(columns["outcome"], 8, None)
    Path("t.csv").write_text(written(columns))
    said = problems(capsys, f"data describe --data t.csv {GIVEN}")
    words = [
        "'big'",
        "client 'hospital'",
        "label 'outcome'",
        "'empty'",
        "'units'",
        "'words'",
        "'days'",
        "'gaps'",
    ]
    assert [word for word, text in zip(words, said, strict=True) if word not in text] == []
    for text, row in zip(said, (12, 6, 8, None, 9, 4, None, 11), strict=True):
        assert row is None or f"row {row} of t.csv" in text
        assert any(cure in text for cure in ("--drop", "fill it in", "correct it"))


def test_a_long_list_of_problems_is_cut_off(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(written({**good(), **{f"c{k}": [None] * N for k in range(14)}}))
    said = problems(capsys, f"data describe --data t.csv {GIVEN}")
    assert len(said) == 11
    assert "And 4 more" in said[-1]


def test_wrong_options_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    Path("t.csv").write_text(written(good()))
    for options, count in (
        ("", 2),
        ("--client hopsital --label outcom", 2),
        (f"{GIVEN} --drop aeg,outcome,hospital --features agge", 4),
    ):
        assert len(problems(capsys, f"data describe --data t.csv {options}")) == count


def test_lists_and_bytes_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    frame = pl.DataFrame({**good(), "a": [[1]] * N, "b": [b"x"] * N, "c": [datetime.timedelta(1)] * N})
    frame.write_parquet("t.parquet")
    assert len(problems(capsys, f"data describe --data t.parquet {GIVEN}")) == 3


def test_columns_that_files_do_not_share_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    Path("d").mkdir()
    own = {name: values for name, values in good().items() if name != "hospital"}
    Path("d/a.csv").write_text(written({**own, "b": V}))
    Path("d/b.csv").write_text(written({**own, "c": V, "d": V}))
    assert len(problems(capsys, "data describe --data d --label outcome")) == 3


# --- Clients with tables of their own -----------------------------------------------------------------------


def own_table(columns: Mapping[str, Sequence[Any]], separator: str = ",", **options: Any) -> Table:
    """The table of one client among others."""
    Path("own.csv").write_text(written({k: v for k, v in columns.items() if k != "hospital"}, separator))
    return Table(path="own.csv", label="outcome", owner="north", **options)


@pytest.mark.parametrize(
    "texts", [[f"{v} kg" for v in V], [str(d) for d in DAYS], [f"{1000 + i:,}" for i in range(N)]]
)
def test_a_client_among_others_must_write_plain_numbers(texts: list[str]):
    table = own_table({**good(), "c": texts})
    for use in (table.load, table.tell):
        with pytest.raises(
            InputError, match=r"Column 'c' of own\.csv holds .* cannot agree on; write plain numbers"
        ):
            use()


def test_a_client_among_others_may_read_its_file_in_its_own_way():
    plain = own_table({**good(), "c": replaced(V, 4, None)}, impute="mean").tell()
    commas = {
        **good(),
        "age": [comma(v) for v in good()["age"]],
        "c": replaced([comma(v) for v in V], 4, "?"),
    }
    table = own_table(commas, ";", impute="mean", na=("?",))
    told = table.tell()
    assert told == plain
    numbers = [Column(name, "number", own.mean, own.spread**0.5) for name, own in told.numbers.items()]
    schema = Schema(tuple(numbers), "outcome", None, "classification", told.classes, impute=True)
    Policy().check_schema(schema, told)
    assert table.load(schema).count.sum() == N
    label = own_table({**good(), "outcome": replaced(good()["outcome"], 1, None)}, drop_missing_labels=True)
    assert label.load().count.sum() == N - 1


@pytest.mark.parametrize(
    "change", [{"form": Form(unit="kg", decimal=".")}, {"form": Form(date="ymd")}, {"of": "c"}]
)
def test_a_client_refuses_an_agreement_on_other_forms(change: dict[str, Any]):
    told = own_table(good()).tell()
    column = Column("age", "number", told.numbers["age"].mean, told.numbers["age"].spread ** 0.5)
    fine = Schema((column,), "outcome", None, "classification", told.classes)
    Policy().check_schema(fine, told)
    for wrong in (
        dataclasses.replace(fine, columns=(dataclasses.replace(column, **change),)),
        dataclasses.replace(fine, na=("50",)),
        dataclasses.replace(fine, label_form=Form(decimal=",")),
    ):
        with pytest.raises(Refusal, match="plain numbers and categories"):
            Policy().check_schema(wrong, told)


def test_texts_without_a_digit_are_numbers_only_if_programs_write_them_so():
    found = find(pl.Series(["nan", "-inf", "Infinity"]), np.array([5, 3, 1]))
    assert found is not None
    assert found.form == Form()
    mixed = pl.Series(["5 kg", "high"])
    found = find(mixed, np.array([90, 10]))  # nearly all
    assert found is not None
    assert (found.form.unit, found.odd.tolist()) == ("kg", [False, True])
    assert find(mixed, np.array([89, 11])) is None
