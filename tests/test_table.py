"""Tables of the user's own: whose rows are whose, what becomes of columns, and that a run of one goes on."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import math
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import assert_read_back

from pfedme.algorithms import FedAvg
from pfedme.cli import main
from pfedme.core.models import parse_model
from pfedme.data import parse_data
from pfedme.data.federation import Federation
from pfedme.data.fitting import combine, sets_of_clients, sums_of_clients, told_by_clients
from pfedme.data.hashing import ids_of_names
from pfedme.data.layout import Strata, arrange
from pfedme.data.schema import Schema
from pfedme.data.synthetic import Synthetic
from pfedme.data.table import Table
from pfedme.errors import InputError
from pfedme.personalization.finished import FinishedRun
from pfedme.report.describe import describe
from pfedme.runs.run import Run

HOSPITALS = ("Nord", "Süd", "west / 3")


def patients(n: int = 60, seed: int = 0) -> pl.DataFrame:
    """Rows of three hospitals; `age` is a number of its own for each row."""
    rng = np.random.default_rng(seed)
    return pl.DataFrame({
        "hospital": [HOSPITALS[k] for k in rng.integers(0, 3, n)],
        "age": (1000 * seed + rng.permutation(n)).astype(float) / 4,
        "visits": rng.integers(0, 9, n),
        "ward": [("a", "b", "ü c")[k] for k in rng.integers(0, 3, n)],
        "smoker": rng.random(n) < 0.5,
        "outcome": [("no", "yes")[k] for k in rng.integers(0, 2, n)],
    })  # fmt: skip


def saved(frame: pl.DataFrame, path: Path, separator: str = ",") -> Path:
    """The frame as CSV, compressed if the name says so."""
    text = frame.write_csv(separator=separator).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def source(path: Path, **fields: Any) -> Table:
    """The table of patients at a path."""
    return Table(path=str(path), **{"client": "hospital", "label": "outcome", **fields})


def loaded(tmp_path: Path, frame: pl.DataFrame, **fields: Any) -> Federation:
    """The federation of a frame that was saved as CSV."""
    return source(saved(frame, tmp_path / "patients.csv"), **fields).load()


def raw(f: Federation, column: str) -> np.ndarray:
    """A column of numbers as it was before it was standardised."""
    assert f.schema is not None
    own = next(c for c in f.schema.columns if c.name == column)
    return own.mean + own.scale * f.x[:, f.schema.starts[column]].astype(np.float64)


def parts(f: Federation, i: int) -> tuple[list[float], list[float]]:
    """The ages of client i's training rows and of its test rows."""
    own = np.round(4 * raw(f, "age")[f.start[i] : f.start[i] + f.count[i]]) / 4
    return sorted(own[: f.n_train[i]]), sorted(own[f.n_train[i] :])


# --- Whose rows are whose ----------------------------------------------------------------------------


def test_clients_are_named_sorted_and_have_their_own_rows_and_labels(tmp_path: Path):
    frame = patients()
    f = loaded(tmp_path, frame)
    assert f.names is not None
    assert f.names == tuple(sorted(HOSPITALS))
    assert f.ids.tolist() == [zlib.crc32(name.encode()) for name in f.names]
    assert f.schema is not None
    assert f.schema.labels == ("no", "yes")
    outcome = dict(zip(frame["age"], frame["outcome"], strict=True))
    for i, name in enumerate(f.names):
        train, test = parts(f, i)
        assert sorted(train + test) == sorted(frame.filter(pl.col("hospital") == name)["age"])
        for age, y in zip(raw(f, "age")[f.start[i] :][: f.count[i]], f.y[f.start[i] :], strict=False):
            assert f.schema.labels[y] == outcome[round(4 * age) / 4]


def formats(frame: pl.DataFrame, folder: Path) -> dict[str, Table]:
    """The same table in every format."""
    frame.write_parquet(folder / "p.parquet")
    by_client, quoted = folder / "folder", folder / "quoted.csv"
    by_client.mkdir()
    mixed = [".csv", ".parquet", ".tsv.gz"]
    for ending, (name, own) in zip(
        mixed, sorted(frame.group_by("hospital", maintain_order=True)), strict=True
    ):
        path = by_client / f"{str(name[0]).replace('/', '-')}{ending}"
        own = own.drop("hospital").select(reversed(own.drop("hospital").columns))
        if ending == ".parquet":
            own.write_parquet(path)
        else:
            saved(own, path, "\t" if "tsv" in ending else ",")
    quoted.write_text("\ufeff" + frame.write_csv(quote_style="always", line_terminator="\r\n") + "\r\n\r\n")
    spaced = frame.write_csv().replace(",", ", ")
    (folder / "spaced.csv").write_text(spaced)
    return {
        "csv": source(saved(frame, folder / "p.csv")),
        "semicolons": source(saved(frame, folder / "s.csv", ";")),
        "tsv": source(saved(frame, folder / "p.tsv", "\t")),
        "gzip": source(saved(frame, folder / "p.csv.gz")),
        "parquet": source(folder / "p.parquet"),
        "folder": source(by_client, client=None),
        "Excel": source(quoted),
        "spaces": source(folder / "spaced.csv"),
        "capitals": source(saved(frame, folder / "P.CSV")),
    }


def test_all_formats_give_the_same_federation(tmp_path: Path):
    frame = patients().with_columns(pl.col("hospital").str.replace("/", "-"))
    federations = {name: table.load() for name, table in formats(frame, tmp_path).items()}
    want = federations.pop("csv")
    for name, f in federations.items():
        assert (f.names, f.ids.tolist(), f.n_train.tolist()) == (
            want.names,
            want.ids.tolist(),
            want.n_train.tolist(),
        )
        assert f.schema is not None
        assert want.schema is not None
        assert {c.name: c.categories for c in f.schema.columns} == {
            c.name: c.categories for c in want.schema.columns
        }, name
        assert (f.y == want.y).all(), name
        order = [k for c in want.schema.columns for k in _places(f.schema, c.name)]
        np.testing.assert_allclose(f.x[:, order], want.x, atol=1e-5, err_msg=name)


def _places(schema: Schema, name: str) -> range:
    column = next(c for c in schema.columns if c.name == name)
    return range(schema.starts[name], schema.starts[name] + column.features)


def test_a_folder_of_parts_may_have_a_client_column(tmp_path: Path):
    frame = patients()
    whole = loaded(tmp_path, frame)
    (tmp_path / "parts").mkdir()
    saved(frame[:20], tmp_path / "parts/1.csv")
    frame[20:].write_parquet(tmp_path / "parts/2.parquet")
    f = source(tmp_path / "parts").load()
    assert f.names == whole.names
    assert (f.y == whole.y).all()
    np.testing.assert_allclose(f.x, whole.x, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2)])
def test_arrays_are_flattened_and_remember_their_shape(tmp_path: Path, shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    x, y, client = rng.normal(size=(50, *shape)), np.arange(50) % 3, np.arange(50) // 17
    np.savez(tmp_path / "a.npz", x=x, y=y, client=client)
    names = [f"x{k}" for k in range(4)]
    table = pl.DataFrame(x.reshape(50, 4), schema=names).with_columns(outcome=y, hospital=client)
    f, want = Table(path=str(tmp_path / "a.npz")).load(), loaded(tmp_path, table)
    assert f.shape == (shape if len(shape) > 1 else ())
    assert f.names == want.names == ("0", "1", "2")
    assert (f.y == want.y).all()
    np.testing.assert_allclose(f.x, want.x, atol=1e-5)
    assert f.schema is not None
    np.testing.assert_allclose(f.schema.encode(x, "x"), f.schema.encode(table, "table"), atol=1e-6)


def test_arrays_may_bring_their_own_test_rows(tmp_path: Path):
    x = np.arange(20.0).reshape(10, 2)
    np.savez(
        tmp_path / "a.npz", x=x, y=np.arange(10) % 2, client=np.array(["b", "a"] * 5),
        x_test=x[:3] + 100, y_test=np.array([1, 1, 0]), client_test=np.array(["a", "a", "b"]),
    )  # fmt: skip
    f = Table(path=str(tmp_path / "a.npz")).load()
    assert (f.names, f.n_train.tolist(), f.n_test.tolist()) == (("a", "b"), [5, 5], [2, 1])
    back = np.round(raw(f, "x0"))
    assert sorted(back[5:7]) == [100, 102]
    assert back[-1] == 104


def test_names_stay_with_their_clients(tmp_path: Path):
    f = loaded(tmp_path, patients())
    assert f.names is not None
    assert f.take([2, 0]).names == (f.names[2], f.names[0])
    assert f.hold_out(0, 2).names == f.names
    assert f.limit(2).names == f.names
    assert (f.name(1), Synthetic(clients=2, rows=3).load().name(1)) == (f.names[1], "1")


def test_two_names_with_one_checksum_get_different_ids():
    # "plumless" and "buckeroo" are known to have the same CRC-32.
    ids = ids_of_names(["plumless", "buckeroo", "other"])
    assert len(set(ids.tolist())) == 3
    assert ids[0] == zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    assert ids_of_names(["other"])[0] == ids[2]


# --- The split ---------------------------------------------------------------------------------------


def test_a_client_keeps_its_split_when_others_come_and_go_and_classes_with_them(tmp_path: Path):
    frame = patients(90)
    whole = loaded(tmp_path, frame)
    rest = frame.filter(pl.col("hospital") != HOSPITALS[0])
    other = rest.with_columns(
        outcome=pl.when(pl.col("hospital") == HOSPITALS[2]).then(pl.lit("a new class")).otherwise("outcome")
    )
    assert whole.names is not None
    for fewer in (loaded(tmp_path, rest), loaded(tmp_path, other)):
        assert fewer.names is not None
        assert parts(fewer, fewer.names.index("Süd")) == parts(whole, whole.names.index("Süd"))


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=80),
    st.integers(0, 2**32 - 1),
)
def test_every_run_of_a_clients_rows_has_each_class_in_its_due_share(rows: list[tuple[int, int]], seed: int):
    owner, code = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    ids, salt = np.arange(5, dtype=np.uint32) * 7, np.arange(4, dtype=np.uint32) * 13
    place = arrange(owner, ids, Strata(code, salt), seed)
    for i in range(5):
        own = np.argsort(place[owner == i])
        assert sorted(place[owner == i]) == list(range(len(own)))
        classes = code[owner == i][own]
        for k in range(4):
            due = (classes == k).sum() * np.arange(len(own) + 1) / max(1, len(own))
            got = np.concatenate([[0], np.cumsum(classes == k)])
            assert np.abs(got - due).max() <= len(np.unique(classes)) / 2 + 1


def test_which_rows_are_trained_on_is_random_and_the_seed_decides(tmp_path: Path):
    frame = patients(90)
    one, same, other = (loaded(tmp_path, frame, seed=s) for s in (0, 0, 1))
    assert [parts(one, i) for i in range(3)] == [parts(same, i) for i in range(3)]
    assert [parts(one, i) for i in range(3)] != [parts(other, i) for i in range(3)]


def test_each_row_is_as_likely_to_be_a_test_row():
    # 2,000 clients with the same twelve rows of two classes: each row is a test row in about a quarter.
    owner = np.repeat(np.arange(2000, dtype=np.int32), 12)
    code = np.tile(np.array([0] * 8 + [1] * 4, np.int32), 2000)
    ids = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    place = arrange(owner, ids, Strata(code, np.array([5, 6], np.uint32)), 0)
    share = (place.reshape(2000, 12) >= 9).mean(axis=0)
    np.testing.assert_allclose(share, 0.25, atol=5 * math.sqrt(0.25 * 0.75 / 2000))


@pytest.mark.parametrize("train", [0.2, 0.5, 0.75, 0.9])
def test_the_share_to_train_on_is_given(tmp_path: Path, train: float):
    f = loaded(tmp_path, patients(), train=train)
    assert f.n_train.tolist() == [max(1, math.floor(train * n)) for n in f.count]


def test_a_table_of_test_rows_leaves_all_others_to_train_on(tmp_path: Path):
    frame, held = patients(60), patients(20, seed=1)
    saved(held, tmp_path / "test.csv")
    f = loaded(tmp_path, frame, test=str(tmp_path / "test.csv"))
    assert f.names is not None
    for i, name in enumerate(f.names):
        mine = pl.col("hospital") == name
        assert parts(f, i) == (sorted(frame.filter(mine)["age"]), sorted(held.filter(mine)["age"]))
    assert f.schema is not None
    ages = next(c for c in f.schema.columns if c.name == "age")
    assert ages.mean == pytest.approx(np.mean(frame["age"].to_numpy()))


def test_test_rows_may_be_in_a_folder_too(tmp_path: Path):
    frame = patients(60).with_columns(pl.col("hospital").str.replace("/", "-"))
    for folder, some in (("train", frame[:45]), ("test", frame[45:])):
        (tmp_path / folder).mkdir()
        for name, own in some.group_by("hospital"):
            saved(own.drop("hospital"), tmp_path / folder / f"{name[0]}.csv")
    f = source(tmp_path / "train", client=None, test=str(tmp_path / "test")).load()
    assert (f.n_train.sum(), f.n_test.sum()) == (45, 15)


# --- Columns -----------------------------------------------------------------------------------------


def test_numbers_are_standardised_by_training_rows_alone(tmp_path: Path):
    frame = patients(90)
    f = loaded(tmp_path, frame)
    assert f.schema is not None
    training = np.concatenate([parts(f, i)[0] for i in range(3)])
    age = next(c for c in f.schema.columns if c.name == "age")
    assert (age.mean, age.scale) == (pytest.approx(training.mean()), pytest.approx(training.std()))
    visits = next(c for c in f.schema.columns if c.name == "visits")
    want = frame.filter(pl.col("age").is_in(training.tolist()))["visits"].to_numpy()
    assert (visits.mean, visits.scale) == (pytest.approx(want.mean()), pytest.approx(want.std()))


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.floats(-100, 100), max_size=6), min_size=1, max_size=8),
    st.sampled_from([1, 2, 3, 1000]),
    st.integers(0, 3),
)
def test_sums_of_clients_combine_to_the_mean_and_deviation_of_all_rows(
    clients: list[list[float]], block: int, gap: int
):
    # Between clients there are rows that do not count, as test rows do not.
    rows = [value for own in clients for value in (*own, *[9e9] * gap)]
    count = np.array([len(own) for own in clients])
    start = np.cumsum(count + gap) - count - gap
    x = np.array(rows).reshape(-1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfedme.data.fitting.BLOCK", block)
        told = list(told_by_clients(x, start, count)) if len(x) else []
    flat = np.array([value for own in clients for value in own])
    if not told or not len(flat):
        return
    values, mean, scale = combine(told)
    assert values[0] == len(flat)
    assert mean[0] == pytest.approx(flat.mean(), abs=1e-6)
    if flat.std() > 1e-3:
        assert scale[0] == pytest.approx(flat.std(), rel=1e-4)
    if np.ptp(flat) == 0:
        assert scale[0] == 1


def test_what_a_client_tells_depends_on_its_training_rows_alone():
    x = np.random.default_rng(0).normal(size=(9, 2))
    start, count = np.array([0, 4]), np.array([3, 2])
    told = sums_of_clients(x, start, count)
    x[[3, 6, 7, 8]] = 0  # rows that are not trained on
    for one, same in zip(told, sums_of_clients(x, start, count), strict=True):
        assert (one == same).all()
    assert told.total[1].tolist() == pytest.approx(x[4:6].sum(axis=0).tolist())
    seen = sets_of_clients(np.array([0, 2, -1, 2]), np.array([0, 0, 1, 1]), 2, 3)
    assert seen.tolist() == [[True, False, True], [False, False, True]]


def test_what_distinguishes_large_numbers_is_not_lost(tmp_path: Path):
    frame = patients().with_columns(visits=1_700_000_000 + pl.col("visits"))
    f = loaded(tmp_path, frame)
    assert f.schema is not None
    at = f.schema.starts["visits"]
    assert len(np.unique(f.x[:, at])) == frame["visits"].n_unique()
    assert set(np.round(raw(f, "visits"), 3)) == set(frame["visits"])


def test_a_category_becomes_a_feature_for_each_value(tmp_path: Path):
    frame = patients()
    f = loaded(tmp_path, frame)
    assert f.schema is not None
    assert [(c.name, c.kind) for c in f.schema.columns] == [
        ("age", "number"), ("visits", "number"), ("ward", "category"), ("smoker", "category"),
    ]  # fmt: skip
    ward = next(c for c in f.schema.columns if c.name == "ward")
    assert ward.categories == ("a", "b", "ü c")
    wards = dict(zip(frame["age"], frame["ward"], strict=True))
    one_hot = f.x[:, list(_places(f.schema, "ward"))]
    assert (one_hot.sum(axis=1) == 1).all()
    for age, row in zip(np.round(4 * raw(f, "age")) / 4, one_hot, strict=True):
        assert ward.categories[int(row.argmax())] == wards[age]


def test_a_category_that_only_test_rows_have_gets_no_feature_and_a_warning(tmp_path: Path):
    held = patients(9, seed=1).with_columns(ward=pl.lit("z"))
    saved(held, tmp_path / "test.csv")
    f = loaded(tmp_path, patients(), test=str(tmp_path / "test.csv"))
    assert f.schema is not None
    wards = f.x[:, list(_places(f.schema, "ward"))]
    assert (wards.sum(axis=1) == 0).sum() == 9
    assert any("9 test rows have a 'ward' that no training row has" in w for w in describe(f)["warnings"])


@pytest.mark.parametrize("kind", ["number", "category"])
def test_all_columns_may_be_of_one_kind(tmp_path: Path, kind: str):
    columns = {"number": ("age", "visits"), "category": ("ward", "smoker")}[kind]
    f = loaded(tmp_path, patients(), features=columns)
    assert f.schema is not None
    assert {c.kind for c in f.schema.columns} == {kind}
    want = patients().select(columns).n_unique() if kind == "category" else 60
    assert len(np.unique(f.x, axis=0)) == want


def test_features_and_drop_choose_columns(tmp_path: Path):
    frame = patients()
    for choice, names in (
        ({"features": ("ward", "age")}, ["age", "ward"]),
        ({"drop": ("ward", "age")}, ["visits", "smoker"]),
    ):
        schema = loaded(tmp_path, frame, **choice).schema
        assert schema is not None
        assert [column.name for column in schema.columns] == names


def test_columns_that_are_not_used_may_hold_anything(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text(
        "hospital,,x,x,day,age,outcome\n"
        + "".join(f"h{i % 2},,1,,2024-01-01,{i},{i % 2}\n" for i in range(20))
    )
    f = source(path, features=("age",)).load()
    assert f.schema is not None
    assert [c.name for c in f.schema.columns] == ["age"]


def test_missing_values_are_imputed_if_asked(tmp_path: Path):
    frame = patients(80)
    gone = pl.int_range(pl.len()) % 5 == 0
    holes = frame.with_columns(
        visits=pl.when(gone).then(None).otherwise("visits"), ward=pl.when(gone).then(None).otherwise("ward")
    )
    with pytest.raises(InputError) as caught:
        loaded(tmp_path, holes)
    assert "16 in 'visits', 16 in 'ward'" in str(caught.value)
    f = loaded(tmp_path, holes, impute="mean")
    assert f.schema is not None
    at = f.schema.starts["visits"]
    empty = np.isin(np.round(4 * raw(f, "age")) / 4, holes.filter(gone)["age"].to_numpy())
    assert (f.x[empty, at] == 0).all()
    training = np.concatenate([f.start[i] + np.arange(f.n_train[i]) for i in range(3)])
    there = training[~empty[training]]
    np.testing.assert_allclose([f.x[there, at].mean(), f.x[there, at].std()], [0, 1], atol=1e-5)
    ward = next(c for c in f.schema.columns if c.name == "ward")
    assert ward.categories == ("a", "b", "missing", "ü c")
    assert (f.x[empty, f.schema.starts["ward"] + 2] == 1).all()
    again = f.schema.encode(
        pl.DataFrame({"age": [1.0], "visits": [None], "ward": [None], "smoker": [True]}), "new"
    )
    assert again[0, at] == 0
    assert again[0, f.schema.starts["ward"] + 2] == 1


def test_a_constant_column_is_kept_and_told_of(tmp_path: Path):
    f = loaded(tmp_path, patients().with_columns(visits=pl.lit(7)))
    assert f.schema is not None
    column = next(c for c in f.schema.columns if c.name == "visits")
    assert (column.mean, column.scale) == (7, 1)
    assert any("'visits' is the same in every row" in w for w in describe(f)["warnings"])


def test_a_category_in_text_that_looks_like_a_number_further_up_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pfedme.data.text.SAMPLE", 10)
    frame = patients().with_columns(code=pl.Series(["1"] * 20 + ["x", "y"] * 20))
    f = loaded(tmp_path, frame)
    assert f.schema is not None
    assert f.schema.columns[-1].categories == ("1", "x", "y")


def test_pieces_of_any_size_make_the_same_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frame = patients(70)
    whole = loaded(tmp_path, frame)
    monkeypatch.setattr("pfedme.data.reading.PIECE", 30)
    monkeypatch.setattr("pfedme.data.fitting.BLOCK", 12)
    small = loaded(tmp_path, frame)
    assert (small.y == whole.y).all()
    np.testing.assert_allclose(small.x, whole.x, atol=1e-5)


@pytest.mark.parametrize("word", ["NA", "n/a", "null"])
@pytest.mark.parametrize("column", ["age", "ward", "smoker"])
def test_a_word_for_a_missing_value_is_one_however_late_it_comes(tmp_path: Path, column: str, word: str):
    frame = patients(45_000)
    assert frame.estimated_size() > 2**20  # beyond the rows that tell how a file may be read
    texts = frame.select(pl.all().cast(pl.String)).to_dict(as_series=False)
    texts[column][-1] = word
    late = loaded(tmp_path, pl.DataFrame(texts), impute="mean")
    texts[column][-1] = ""
    empty = loaded(tmp_path, pl.DataFrame(texts), impute="mean")
    assert late.schema == empty.schema
    assert (late.x == empty.x).all()
    texts[column][-1] = word
    with pytest.raises(InputError, match=f"1 in '{column}'.*row 45000"):
        loaded(tmp_path, pl.DataFrame(texts))


def test_test_rows_are_read_as_the_training_rows_were(tmp_path: Path):
    frame = patients().with_columns(ward=pl.Series(["1", "2", "c"] * 20))
    held = patients(9, seed=1).with_columns(ward=pl.Series(["1", "2", "2"] * 3))
    saved(held, tmp_path / "test.csv")
    f = loaded(tmp_path, frame, test=str(tmp_path / "test.csv"))
    assert f.schema is not None
    own = zip(*f.rows("test"), strict=True)
    at, testing = f.schema.starts["ward"], np.concatenate([f.x[s : s + n] for s, n in own])
    assert testing[:, at : at + 3].sum(axis=0).tolist() == [3, 6, 0]


def test_clients_are_arranged_alike_in_shares_of_any_size(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    owner, code = rng.integers(0, 40, 3000), rng.integers(0, 5, 3000)
    ids, salt = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (40, 5))
    want = arrange(owner, ids, Strata(code, salt), 0)
    for rows in (1, 100, 1000):
        monkeypatch.setattr("pfedme.data.layout.BLOCK", rows)
        assert (arrange(owner, ids, Strata(code, salt), 0) == want).all()


# --- Labels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "task", "classes"),
    [
        (lambda i: "ab"[i % 2], "classification", ("a", "b")),
        (lambda i: i % 12, "classification", tuple(str(k) for k in range(12))),
        (lambda i: f"{i % 3}.0", "classification", ("0", "1", "2")),
        (lambda i: i, "classification", tuple(str(k) for k in range(60))),
        (lambda i: i / 4, "regression", ()),
        (lambda i: (i % 20) / 4, "classification", None),
        (lambda i: (i % 21) / 4, "regression", ()),
        (lambda i: i % 2 == 0, "classification", ("false", "true")),
    ],
)
def test_the_task_follows_from_the_label(
    tmp_path: Path, labels: Callable[[int], object], task: str, classes: tuple[str, ...] | None
):
    frame = patients().drop("outcome")
    lines = frame.write_csv().splitlines()
    text = [f"{lines[0]},outcome", *(f"{line},{str(labels(i)).lower()}" for i, line in enumerate(lines[1:]))]
    (tmp_path / "t.csv").write_text("\n".join(text))
    f = source(tmp_path / "t.csv").load()
    assert f.schema is not None
    assert f.schema.task == task
    assert f.classes == len(f.schema.labels)
    if classes is not None:
        assert f.schema.labels == classes


def test_a_regressions_labels_are_standardised_by_training_rows(tmp_path: Path):
    frame = patients(80).with_columns(outcome=1e6 + 3 * pl.col("age"))
    f = loaded(tmp_path, frame)
    assert f.classes == 0
    assert f.y.dtype == np.float32
    assert f.schema is not None
    training = 1e6 + 3 * np.concatenate([parts(f, i)[0] for i in range(3)])
    assert f.schema.label_mean == pytest.approx(training.mean())
    assert f.schema.label_scale == pytest.approx(training.std())
    np.testing.assert_allclose(f.labels_in_units(), 1e6 + 3 * np.round(4 * raw(f, "age")) / 4, atol=0.01)


def test_the_task_can_be_given(tmp_path: Path):
    assert loaded(tmp_path, patients(), label="visits", task="regression").classes == 0
    few = loaded(tmp_path, patients(), label="age", task="classification")
    assert few.classes == 60


# --- Other rows in the same way ----------------------------------------------------------------------


def test_a_schema_encodes_rows_as_the_federation_has_them(tmp_path: Path):
    frame = patients(70)
    f = loaded(tmp_path, frame)
    assert f.schema is not None
    again = Schema.from_json(json.loads(json.dumps(f.schema.to_json())))
    assert again == f.schema
    order = np.argsort(raw(f, "age"))
    sorted_frame = frame.sort("age")
    np.testing.assert_allclose(again.encode(sorted_frame, "patients"), f.x[order], atol=1e-5)
    assert (again.encode_label(sorted_frame["outcome"], "patients") == f.y[order]).all()
    as_text = sorted_frame.with_columns(pl.col("age").cast(pl.String), pl.col("smoker").cast(pl.String))
    np.testing.assert_allclose(again.encode(as_text, "patients"), f.x[order], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"age": None}, ["Column 'age' of row 2 of new rows is empty", "--impute mean"]),
        ({"age": "old"}, ["Column 'age' of row 2 of new rows is 'old'", "not a number"]),
        ({"age": math.inf}, ["Column 'age' of row 2 of new rows is inf"]),
        ({"ward": "z"}, ["Column 'ward' of row 2 of new rows is 'z'", "'a', 'b', 'ü c'"]),
        ({"ward": None}, ["Column 'ward' of row 2 of new rows is empty"]),
    ],
)
def test_rows_that_do_not_fit_a_schema_are_refused(tmp_path: Path, change: dict[str, Any], words: list[str]):
    f = loaded(tmp_path, patients())
    good = {"age": 3.0, "visits": 1, "ward": "a", "smoker": True}
    rows = [good, {**good, **change}]
    frame = pl.DataFrame({name: [row[name] for row in rows] for name in good}, strict=False)
    if change.get("age") == "old":
        frame = frame.with_columns(age=pl.Series(["3", "old"]))
    assert f.schema is not None
    with pytest.raises(InputError) as caught:
        f.schema.encode(frame, "new rows")
    assert [word for word in words if word not in str(caught.value)] == []


def test_rows_without_a_column_or_of_another_kind_are_refused(tmp_path: Path):
    schema = loaded(tmp_path, patients()).schema
    assert schema is not None
    with pytest.raises(InputError, match="new rows has no column 'visits', 'ward', 'smoker'"):
        schema.encode(pl.DataFrame({"age": [3.0]}), "new rows")
    day = pl.Series([1]).cast(pl.Date)
    row = pl.DataFrame({"age": day, "visits": [1], "ward": ["a"], "smoker": [True]})
    with pytest.raises(InputError, match="'age' of new rows holds dates or times, but should hold numbers"):
        schema.encode(row, "new rows")
    with pytest.raises(InputError, match="numbers, but should have 7"):
        schema.encode(np.zeros((2, 3)), "new rows")
    with pytest.raises(InputError, match="not the description"):
        Schema.from_json({"columns": 3})


def test_newcomers_are_encoded_by_the_schema_of_the_run(tmp_path: Path):
    f = loaded(tmp_path, patients())
    other = patients(40, seed=3).with_columns(hospital=pl.lit("new ") + pl.col("hospital"))
    table = source(saved(other, tmp_path / "new.csv"))
    newcomers = table.load(f.schema)
    assert newcomers.schema == f.schema
    assert (newcomers.features, newcomers.clients) == (f.features, 3)
    assert sorted(np.round(4 * raw(newcomers, "age")) / 4) == sorted(other["age"])


# --- Runs --------------------------------------------------------------------------------------------


def a_run(path: Path, **fields: Any) -> Run:
    """A run of a few rounds on a table."""
    algorithm = FedAvg(R=2, B=5)
    return Run(algorithm=algorithm, data=source(path, **fields), model=parse_model("mlr"), rounds=2, cohort=2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"features": ("age", "a,b"), "drop": ("it's",), "task": "classification", "impute": "mean"},
        {"train": 0.5, "seed": 7, "client": None, "test": "held out.csv"},
        {"na": (".", "-99", "not asked"), "decimal": ",", "drop_missing_labels": True},
    ],
)
def test_a_runs_command_is_read_back_as_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: dict[str, Any]
):
    monkeypatch.chdir(tmp_path)
    path = saved(patients(), tmp_path / "my patients.csv")
    if "test" in fields:
        fields = {**fields, "test": str(saved(patients(), tmp_path / fields["test"]))}
    run = a_run(path, **fields)
    run = dataclasses.replace(run, data=source(path, **fields).pinned())

    assert_read_back(run, monkeypatch, tmp_path)


def unfinished(folder: Path) -> None:
    """Makes a finished run look as if it had been killed at once."""
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(
        json.dumps(record | {"status": "running", "history": [], "final": None})
    )


def test_a_run_of_a_table_is_recorded_by_name_and_resumed_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    saved(patients(), Path("patients.csv"))
    line = "run fedavg --data patients.csv --client hospital --label outcome --rounds 2 --R 2 --B 5 --out out"
    assert main(shlex.split(line)) == 0
    assert "patients.csv" in capsys.readouterr().out
    with open("out/clients.csv") as file:
        assert [row["client"] for row in csv.DictReader(file)] == sorted(HOSPITALS)
    before = {p: Path("out", p).read_bytes() for p in ("clients.csv", "model.safetensors")}
    unfinished(Path("out"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["resume", "../out"]) == 0
    assert before == {p: Path("../out", p).read_bytes() for p in before}
    assert FinishedRun.open(Path("../out")).simulation.federation.names == tuple(sorted(HOSPITALS))


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_does_not_go_on_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone: bool
):
    monkeypatch.chdir(tmp_path)
    path = saved(patients(), Path("patients.csv"))
    line = "run fedavg --data patients.csv --client hospital --label outcome --rounds 1 --R 1 --out out"
    assert main(shlex.split(line)) == 0
    unfinished(Path("out"))
    capsys.readouterr()
    text = path.read_text()
    if gone:
        path.unlink()
    else:
        path.write_text(text.replace(",no\n", ",yes\n", 1))
    assert main(["resume", "out"]) == 2
    err = capsys.readouterr().err
    assert ("no file patients.csv" if gone else "patients.csv, has changed since the run began") in err


def test_a_fingerprint_is_of_the_content_alone(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    frame = patients()
    one, copy = (source(saved(frame, tmp_path / folder / "p.csv")).pinned() for folder in ("a", "b"))
    assert one.fingerprint == copy.fingerprint
    text = (tmp_path / "b/p.csv").read_bytes()
    middle = text.index(b"no\n", len(text) // 2)
    (tmp_path / "b/p.csv").write_bytes(text[:middle] + b"on\n" + text[middle + 3 :])
    assert dataclasses.replace(copy, fingerprint="").pinned().fingerprint != one.fingerprint
    with pytest.raises(InputError, match="has changed"):
        copy.pinned()


def test_a_path_is_a_table_and_a_name_is_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    saved(patients(), Path("p.csv"))
    assert isinstance(parse_data("p.csv", {"client": "hospital", "label": "outcome"}), Table)
    Path("synthetic").mkdir()
    assert isinstance(parse_data("synthetic"), Synthetic)
    saved(patients(), Path("synthetic/a.csv"))
    assert isinstance(parse_data("./synthetic", {"label": "outcome"}), Table)
