"""`pfedme data describe`: what it tells about the columns, and about how unlike clients are."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from test_table import loaded, patients, saved

from pfedme.cli import main
from pfedme.data.federation import Federation
from pfedme.data.hashing import hash_rows
from pfedme.data.synthetic import Synthetic
from pfedme.report.describe import describe


def test_a_description_tells_what_is_in_the_columns(tmp_path: Path):
    frame = patients()
    told = describe(loaded(tmp_path, frame))
    columns = {c["name"]: c for c in told["columns"]}
    assert (columns["age"]["min"], columns["age"]["max"]) == (
        pytest.approx(0, abs=1e-5),
        pytest.approx(59 / 4),
    )
    assert columns["ward"]["categories"] == dict(frame["ward"].value_counts().iter_rows())
    assert told["target"] == {"name": "outcome", "labels": ["no", "yes"]}


def test_how_unlike_clients_are_is_the_total_variation_distance(tmp_path: Path):
    def distance(labels: list[int], classes: int = 2) -> float:
        x = np.random.default_rng(0).normal(size=(len(labels), 1)).astype(np.float32)
        half = len(labels) // 2
        f = Federation.split([half, half], x, np.array(labels), classes=classes)
        return describe(f)["unlike"]["labels"]["distance"]

    assert distance([0, 1] * 20) == 0
    assert distance([0] * 20 + [1] * 20) == 0.5
    many = [k // 2 for k in range(80)]  # forty classes, each in one of the two clients only
    assert distance(many, 40) == 0.5
    counts = Synthetic(clients=7, rows=30, features=3, classes=4).load()
    told = describe(counts)["unlike"]["labels"]["distance"]
    shares = counts.label_counts() / 30
    assert told == pytest.approx(np.abs(shares - shares.mean(axis=0)).sum(axis=1).mean() / 2)


def test_clients_whose_rows_were_dealt_at_random_are_as_unlike_as_by_chance():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(20_000, 5)).astype(np.float32), rng.integers(0, 4, 20_000)
    unlike = describe(Federation.split([100] * 200, x, y, classes=4))["unlike"]
    for told in unlike.values():
        assert told["distance"] == pytest.approx(told["by_chance"], rel=0.1)
    y = y.astype(np.float32)
    regression = Federation.split([100] * 200, x, y, classes=0)
    told = describe(regression)["unlike"]["labels"]
    assert told["distance"] == pytest.approx(told["by_chance"], rel=0.1)


def test_rows_that_are_held_twice_are_counted():
    x = np.arange(80, dtype=np.float32)[:, None].repeat(2, axis=1)
    y = np.arange(80) % 2
    x[40:43], y[40:43] = x[0:3], y[0:3]  # three training rows of the other client
    x[79], y[79] = x[1], y[1]  # a test row, held by all
    x[39, 1] = -0.0
    said = " ".join(describe(Federation.split([40, 40], x, y, classes=2))["warnings"])
    assert "7 rows (8.8%) are the same as a row of another client" in said
    assert "1 test rows (5.0%) are the same as a training row" in said


def test_equal_rows_have_equal_hashes_and_others_have_not():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (3000, 6)).astype(np.float32), rng.integers(0, 2, 3000)
    hashes = hash_rows(x, y)
    different = len({(*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)})
    assert len(np.unique(hashes)) == different
    zero = np.zeros((1, 6), np.float32)
    assert hash_rows(zero, y[:1]) == hash_rows(-zero, y[:1])


def test_describing_draws_the_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = saved(patients(), tmp_path / "patients.csv")
    line = f"data describe --data {path} --client hospital --label outcome --out {tmp_path / 'd'}"
    assert main(shlex.split(line)) == 0
    printed = capsys.readouterr().out
    for word in ("west / 3", "ü c", "'outcome', a class: no, yes", "by chance", "█"):
        assert word in printed
    assert (tmp_path / "d/labels.png").read_bytes().startswith(b"\x89PNG")
    assert main(shlex.split(f"{line.replace('outcome', 'age')} --task regression --drop outcome")) == 0
    assert "a quantity" in capsys.readouterr().out
    assert (
        main(["data", "describe", "--data", "synthetic:clients=50,rows=20", "--out", str(tmp_path / "s")])
        == 0
    )
    assert "the first 40 of 50" in capsys.readouterr().out
    assert (tmp_path / "s/labels.png").exists()


def test_one_client_is_warned_of(tmp_path: Path):
    f = loaded(tmp_path, patients().with_columns(hospital=pl.lit("only")))
    assert any("only one client" in w for w in describe(f)["warnings"])
