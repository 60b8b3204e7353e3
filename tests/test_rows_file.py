"""The file of test rows: where its rows come from, and that the record's numbers follow from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from test_table import patients, saved

import pfedme
from pfedme.data.table import Table
from pfedme.runs import rows_file

QUICK = pfedme.PFedMe(lam=5.0, eta=0.05, R=3, K=2, B=8)


def accuracies(rows: pl.DataFrame, kind: str) -> tuple[float, dict[str, float]]:
    """The accuracy of a model over all rows, and of each client."""
    right = rows.select("client", right=pl.col(f"{kind}_prediction") == pl.col("label"))
    own = right.group_by("client").agg(pl.col("right").mean())
    return right["right"].mean(), dict(zip(own["client"], own["right"], strict=True))  # type: ignore


def check_classes(result: pfedme.api.Result, rows: pl.DataFrame, clients: pl.DataFrame) -> None:
    """That the numbers of the record and of clients.csv follow from the rows alone."""
    for kind in ("global", "local", "personal"):
        over_all, own = accuracies(rows, kind)
        assert over_all == result.record["final"][kind]["accuracy"]
        assert own == dict(zip(clients["client"], clients[f"{kind}_accuracy"], strict=True))
        names = [name for name in rows.columns if name.startswith(f"{kind}_probability_")]
        chances = rows.select(names).to_numpy()
        np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)
        labels = [name.removeprefix(f"{kind}_probability_") for name in names]
        of_label = chances[np.arange(len(rows)), [labels.index(label) for label in rows["label"]]]
        assert -np.log(of_label).mean() == pytest.approx(result.record["final"][kind]["loss"], rel=1e-5)


def test_the_records_numbers_follow_from_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "hospitals"
    folder.mkdir()
    tables = {name: patients(n, seed=k) for k, (name, n) in enumerate([("north", 50), ("south", 37)])}
    for name, table in tables.items():
        saved(table.drop("hospital"), folder / f"{name}.csv")
    result = pfedme.train(
        QUICK, Table(path=str(folder), label="outcome"), rounds=3, out=tmp_path / "run", force=True
    )
    rows = pl.read_csv(tmp_path / "run" / "test_rows.csv")
    assert sorted(rows.columns[:4]) == ["client", "file", "label", "row"]
    assert rows.height == result.federation.n_test.sum()
    check_classes(result, rows, pl.read_csv(tmp_path / "run" / "clients.csv"))
    # The rows are those of the files, and none of them was trained on.
    f = result.federation
    assert f.schema is not None
    trained_on = {
        row.tobytes()
        for row in f.x[np.concatenate([np.arange(s, s + n) for s, n in zip(*f.rows("train"), strict=True)])]
    }
    for file, row, client, label in rows.select("file", "row", "client", "label").iter_rows():
        assert Path(file).stem == client
        own = tables[client][row - 1]
        assert own["outcome"].item() == label
        assert f.schema.encode(own, "the file")[0].tobytes() not in trained_on
    assert rows.select("file", "row").is_unique().all()

    monkeypatch.setattr(rows_file, "CSV_CELLS", 0)
    pfedme.train(QUICK, Table(path=str(folder), label="outcome"), rounds=3, out=tmp_path / "run", force=True)
    assert not (tmp_path / "run" / "test_rows.csv").exists()
    again = pl.read_parquet(tmp_path / "run" / "test_rows.parquet")
    assert again.select("file", "row", "client").equals(rows.select("file", "row", "client"))
    monkeypatch.setattr(rows_file, "MOST_CELLS", 0)
    pfedme.train(QUICK, Table(path=str(folder), label="outcome"), rounds=3, out=tmp_path / "run", force=True)
    assert not list((tmp_path / "run").glob("test_rows*"))


def test_a_table_of_test_rows_is_named(tmp_path: Path):
    train, test = saved(patients(60), tmp_path / "a.csv"), saved(patients(20, seed=1), tmp_path / "b.csv")
    table = Table(path=str(train), client="hospital", label="outcome", test=str(test))
    f = table.load()
    assert [Path(name).name for name, _ in f.files] == ["a.csv", "b.csv"]
    pfedme.train(QUICK, table, rounds=1, out=tmp_path / "run")
    rows = pl.read_csv(tmp_path / "run" / "test_rows.csv")
    assert {Path(name).name for name in rows["file"]} == {"b.csv"}
    assert sorted(rows["row"]) == list(range(1, 21))
    want = patients(20, seed=1)[(rows["row"] - 1).to_list()]
    assert rows["client"].to_list() == want["hospital"].to_list()


@pytest.mark.parametrize("change", ["take", "limit", "hold out"])
def test_rows_keep_their_origin(change: str, tmp_path: Path):
    frame = patients(60)
    f = Table(path=str(saved(frame, tmp_path / "p.csv")), client="hospital", label="outcome").load()
    assert f.schema is not None
    g = {"take": lambda: f.take([2, 0]), "limit": lambda: f.limit(5), "hold out": lambda: f.hold_out(1, 3)}[
        change
    ]()
    assert g.origin is not None
    np.testing.assert_array_equal(f.schema.encode(frame[g.origin.tolist()], "p"), g.x)


def test_a_quantity_is_told_in_its_own_unit(tmp_path: Path):
    rng = np.random.default_rng(0)
    frame = patients(80).drop("outcome")
    frame = frame.with_columns(stay=100 + 50 * frame["age"] + pl.Series(rng.normal(size=80)))
    table = Table(path=str(saved(frame, tmp_path / "p.csv")), client="hospital", label="stay")
    result = pfedme.train(pfedme.FedAvg(eta=0.05), table, rounds=5, out=tmp_path / "run")
    rows = pl.read_csv(tmp_path / "run" / "test_rows.csv")
    label = rows["label"].to_numpy()
    np.testing.assert_allclose(label, frame["stay"].to_numpy()[rows["row"].to_numpy() - 1], rtol=1e-6)
    error = ((rows["global_prediction"].to_numpy() - label) ** 2).sum()
    r2 = 1 - error / ((label - label.mean()) ** 2).sum()
    assert r2 == pytest.approx(result.record["final"]["global"]["r2"], abs=1e-5)


def test_generated_rows_have_no_file(tmp_path: Path):
    result = pfedme.train(
        QUICK, "synthetic:clients=4,rows=40,features=5,classes=3", rounds=2, out=tmp_path / "run"
    )
    rows = pl.read_csv(
        tmp_path / "run" / "test_rows.csv",
        schema_overrides={"label": pl.String, "client": pl.String, "file": pl.String},
    )
    predicted = [name for name in rows.columns if name.endswith("_prediction")]
    rows = rows.with_columns(pl.col(predicted).cast(pl.String))
    assert rows["file"].null_count() == rows.height
    clients = pl.read_csv(tmp_path / "run" / "clients.csv", schema_overrides={"client": pl.String})
    check_classes(result, rows, clients)
