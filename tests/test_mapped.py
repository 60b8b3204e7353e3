"""A federation in a folder that is mapped into memory: the same rows and the same models as in memory."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import polars as pl
import pytest

from pfedme.algorithms import FedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.data import disk, parse_data
from pfedme.data.federation import Federation
from pfedme.data.mapped import Mapped, convert, open_federation
from pfedme.data.synthetic import Synthetic
from pfedme.data.table import Table
from pfedme.engine.simulate import Simulation, Store
from pfedme.errors import InputError, RunError


def frame(rows: int = 500, clients: int = 7, seed: int = 0) -> pl.DataFrame:
    """Rows of clients of very different sizes, with everything that columns can be."""
    rng = np.random.default_rng(seed)
    client = np.sort(rng.integers(clients, size=(rows, 3)))[:, 2]
    day = np.datetime64("2020-01-01") + rng.integers(1500, size=rows)
    return pl.DataFrame(
        {
            "who": np.array([f"hospital {k}" for k in range(clients)])[client],
            "age": rng.normal(50, 9, rows),
            "dose": rng.normal(1e6, 3, rows),
            "ward": rng.choice(["a", "b", "c"], rows),
            "day": pl.Series(day.astype("datetime64[D]")).cast(pl.String),
            "sick": rng.choice(["yes", "no"], rows),
            "cost": np.exp(rng.normal(size=rows)),
        }
    )


def same(one: Federation, other: Federation, *, but: tuple[str, ...] = ()) -> None:
    """Asserts that two federations are equal to the bit."""
    for field in dataclasses.fields(Federation):
        own, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(own, np.ndarray):
            assert (own.dtype, own.shape) == (its.dtype, its.shape), field.name
            assert own.tobytes() == its.tobytes(), field.name
        elif field.name not in ("mapped", *but):
            assert own == its, field.name


def as_csv(folder: Path) -> Table:
    frame().write_csv(folder / "t.csv")
    return Table(path=str(folder / "t.csv"), client="who", label="sick", drop=("cost",))


def with_gaps(folder: Path) -> Table:
    gaps = frame().with_columns(
        pl.when(pl.int_range(500) % 7 > 0).then("age").alias("age"),
        pl.when(pl.int_range(500) % 11 > 0).then("ward").alias("ward"),
        pl.when(pl.int_range(500) % 13 > 0).then("sick").alias("sick"),
    )
    gaps.write_csv(folder / "t.csv")
    return Table(
        path=str(folder / "t.csv"), client="who", label="sick", impute="mean", drop_missing_labels=True
    )


def as_parquet(folder: Path) -> Table:
    frame().write_parquet(folder / "t.parquet")
    return Table(path=str(folder / "t.parquet"), client="who", label="cost")


def as_folder(folder: Path) -> Table:
    (folder / "t").mkdir()
    for (name,), own in frame().group_by("who"):
        own.drop("who").write_csv(folder / "t" / f"{name}.csv")
    return Table(path=str(folder / "t"), label="sick")


def with_test_rows(folder: Path) -> Table:
    frame().write_csv(folder / "t.csv")
    frame(rows=90, seed=1).write_parquet(folder / "test.parquet")
    return Table(path=str(folder / "t.csv"), test=str(folder / "test.parquet"), client="who", label="sick")


def with_a_late_gap(folder: Path) -> Table:
    """A word for a missing value that only shows after the first rows, so that the table is read again."""
    late = frame()
    late[499, "ward"] = "NA"
    pl.concat([*[frame()] * 3, late]).write_csv(folder / "t.csv")
    return Table(path=str(folder / "t.csv"), client="who", label="sick", impute="mean")


def as_images(folder: Path) -> Table:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4, 5)).astype(np.float32)
    np.savez(folder / "t.npz", x=x, y=rng.integers(3, size=80), client=rng.integers(4, size=80))
    return Table(path=str(folder / "t.npz"))


TABLES = (as_csv, with_gaps, as_parquet, as_folder, with_test_rows, with_a_late_gap, as_images)


@pytest.mark.parametrize("made", TABLES, ids=lambda made: made.__name__)
def test_a_converted_table_is_the_table(
    made: Callable[[Path], Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also if it is sorted in many small parts."""
    table = made(tmp_path)
    whole = table.load()
    same(convert(table, tmp_path / "one"), whole)
    monkeypatch.setattr(disk, "BUCKET", 2_000)
    monkeypatch.setattr("pfedme.data.reading.PIECE", 100)
    same(convert(table, tmp_path / "many"), whole)
    one, many = (json.loads((tmp_path / name / "federation.json").read_text()) for name in ("one", "many"))
    assert one["sha256"] == many["sha256"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "federation.json", "ids.npy", "n_test.npy", "n_train.npy", "origin.npy", "x.npy", "y.npy"
    ]  # fmt: skip
    assert not list(tmp_path.glob(".*"))


def test_other_sources_are_converted_too(tmp_path: Path):
    source = Synthetic(clients=5, rows=30)
    same(convert(source, tmp_path / "f"), source.load())
    again = convert(Mapped(path=str(tmp_path / "f")), tmp_path / "g")
    same(again, source.load())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted federation."""
    path = tmp_path_factory.mktemp("mapped") / "f"
    convert(Synthetic(clients=9, rows=60), path)
    return path


def test_the_devices_use_the_pages_of_the_file(folder: Path):
    """There is no copy, neither one for all nor one for each device."""
    federation = open_federation(folder)
    assert isinstance(federation.x, np.memmap)
    store = Store.of(federation)
    for array, own in ((store.x, federation.x), (store.y, federation.y)):
        places = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        assert places == [own.ctypes.data] * jax.device_count()


@pytest.mark.parametrize("algorithm", [PFedMe(eta=0.05, alpha=0.02, R=3), FedAvg(eta=0.05, B=0)])
def test_training_is_the_same_to_the_bit(algorithm: Any, folder: Path):
    model = MLR(l2=0.001).build(60, 10)

    def trained(federation: Federation) -> list[Any]:
        simulation = Simulation(algorithm, model, federation, cohort=4)
        state, finite = simulation.advance(simulation.start(), 5)
        assert finite
        evaluation, models = simulation.evaluate(state, rows=True)
        return [*jax.tree.leaves((state, models)), json.dumps(evaluation.entry(full=True))]

    for own, its in zip(
        trained(open_federation(folder)), trained(Synthetic(clients=9, rows=60).load()), strict=True
    ):
        np.testing.assert_array_equal(own, its)


@pytest.mark.parametrize(
    "part",
    [
        lambda f: f.hold_out(0, 5), lambda f: f.hold_out(3, 5), lambda f: f.pooled(), lambda f: f.limit(11),
        lambda f: f.take([7, 2]), lambda f: f.take([7, 2]).hold_out(1, 5).take([1]),
    ],
)  # fmt: skip
def test_parts_of_it_are_the_same_and_stay_on_the_disk(
    part: Callable[[Federation], Federation], folder: Path
):
    found = part(open_federation(folder))
    same(found, part(Synthetic(clients=9, rows=60).load()))
    assert isinstance(found.x, np.memmap)
    assert len(list(folder.iterdir())) == 6


def test_the_command_line_converts_and_trains_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = as_csv(tmp_path)
    given = f"--client who --label sick --drop cost --out {tmp_path}"
    train = "--rounds 2 --cohort 3 --eta 0.05 --alpha 0.02"
    out = tmp_path / "f"
    assert main(f"data convert {table.path} {given.replace('--out', '-o')}/f".split()) == 0
    assert str(out) in capsys.readouterr().out
    assert main(f"run pfedme --data {out} {train} --out {tmp_path}/mapped".split()) == 0
    assert main(f"run pfedme --data {table.path} {train} {given}/table".split()) == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("mapped", "table")]
    assert models[0] == models[1]
    record = json.loads((tmp_path / "mapped" / "record.json").read_text())
    sha = json.loads((out / "federation.json").read_text())["sha256"]
    assert record["config"]["data"] == {"name": "mapped", "path": str(out), "fingerprint": sha}
    assert f"--data {out} " in record["command"]


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a command says that ends with status 2."""
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_bad_options_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "--label only applies to your own tables" in refused(
        capsys, f"run fedavg --data {folder} --label y"
    )
    assert "exists already" in refused(capsys, f"data convert synthetic -o {folder}")
    assert "data 'nothing'" in refused(capsys, f"data convert nothing -o {tmp_path / 'f'}")
    assert "-o" in refused(capsys, "data convert synthetic")
    assert not list(tmp_path.iterdir())


def damaged_x(copy: Path) -> None:
    with (copy / "x.npy").open("rb+") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\1")


def longer_x(copy: Path) -> None:
    with (copy / "x.npy").open("ab") as file:
        file.write(b"\0")


def swapped(copy: Path) -> None:
    shutil.copy2(copy / "n_test.npy", copy / "ids.npy")


def edited(old: str, new: str) -> Callable[[Path], None]:
    def edit(copy: Path) -> None:
        text = (copy / "federation.json").read_text()
        assert old in text
        (copy / "federation.json").write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damaged_x, "x.npy is damaged"),
        (lambda copy: os.truncate(copy / "x.npy", 5_000), "x.npy is incomplete"),
        (lambda copy: os.truncate(copy / "y.npy", 0), "y.npy is incomplete"),
        (longer_x, "x.npy is not the array that was written"),
        (swapped, "ids.npy is not the array that was written"),
        (lambda copy: (copy / "y.npy").unlink(), "y.npy is missing"),
        (edited('"version": 1', '"version": 2'), "has version 2 of the format"),
        (edited('"classes": 10', '"classes": 9'), "federation.json is damaged"),
        (edited("{", "<"), "federation.json cannot be read"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(
    damage: Callable[[Path], object],
    told: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.iterdir():
        path.chmod(0o644)
    same(open_federation(copy), open_federation(folder))
    damage(copy)
    said = refused(capsys, f"run fedavg --data {copy} --rounds 1 --out {tmp_path / 'run'}")
    assert told in said
    assert str(copy) in said


def test_a_plain_copy_is_checked_and_is_the_same_data(folder: Path, tmp_path: Path):
    """`cp` gives files new dates, so that their content is compared with the checksums."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        shutil.copyfile(path, copy / path.name)
    same(open_federation(copy), open_federation(folder))
    assert parse_data(str(copy)).fingerprint == parse_data(str(folder)).fingerprint  # type: ignore[attr-defined]


def test_it_cannot_be_changed_by_accident_and_a_change_ends_the_run(folder: Path, tmp_path: Path):
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    federation = open_federation(copy)
    simulation = Simulation(FedAvg(eta=0.05), MLR().build(60, 10), federation, cohort=4)
    state, _ = simulation.advance(simulation.start(), 1)
    (copy / "x.npy").chmod(0o644)
    damaged_x(copy)
    with pytest.raises(RunError, match=r"x\.npy was changed while it was in use"):
        simulation.advance(state, 1)
    with pytest.raises(RunError, match=r"x\.npy was changed while it was in use"):
        simulation.evaluate(state)
    shutil.rmtree(copy)  # a mapped file remains until it is no longer used
    assert simulation.advance(state, 1)[1]


def test_a_run_is_not_resumed_with_other_rows(folder: Path, tmp_path: Path):
    known = Mapped(path=str(folder)).pinned()
    assert known.pinned() == known
    other = convert(Synthetic(clients=9, rows=60, seed=1), tmp_path / "f")
    assert other.clients == 9
    with pytest.raises(InputError, match="has changed since the run began"):
        dataclasses.replace(known, path=str(tmp_path / "f")).pinned()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The room for the rows is taken before they are written."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    table = as_csv(tmp_path)
    with pytest.raises(RunError, match="could not be written: No space left"):
        convert(table, tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_who_is_killed_leaves_no_federation_and_its_remains_are_removed(tmp_path: Path):
    table = as_csv(tmp_path)
    program = f"""
        import time
        from pathlib import Path
        from pfedme.data import mapped
        from pfedme.data.table import Table
        digest = mapped._digest
        mapped._digest = lambda about: (print("now", flush=True), time.sleep(60))
        mapped.convert(Table(path={table.path!r}, client="who", label="sick"), Path({str(tmp_path / "f")!r}))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"now\n"
        (remains,) = tmp_path.glob(".f.*")
        assert (remains / "x.npy").exists()
        with pytest.raises(InputError, match="no federation"):
            open_federation(tmp_path / "f")
        convert(Synthetic(clients=2, rows=20), tmp_path / "f")  # at the same time
        assert remains.exists()
        shutil.rmtree(tmp_path / "f")
        child.send_signal(signal.SIGKILL)
    (tmp_path / ".f.mine").mkdir()
    convert(table, tmp_path / "f")
    assert not remains.exists()
    assert (tmp_path / ".f.mine").exists()
    same(open_federation(tmp_path / "f"), table.load())


MEMORY = """
    import sys, threading, time
    from pathlib import Path
    from pfedme.data.mapped import convert
    from pfedme.data.table import Table

    def held():  # bytes that are not pages of a file
        return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

    def watch():
        while True:
            peak[0] = max(peak[0], held())
            time.sleep(0.005)

    convert(Table(path=sys.argv[1], client="who", label="sick"), Path(sys.argv[3]))  # loads the libraries
    before = held()
    peak = [before]
    threading.Thread(target=watch, daemon=True).start()
    convert(Table(path=sys.argv[2], client="who", label="sick"), Path(sys.argv[4]))
    print(peak[0] - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_numbers(tmp_path: Path):
    """A table of 1.2 GB of numbers is converted within 500 MB; what grows is an index of the rows."""
    rng = np.random.default_rng(0)
    rows, width = 300_000, 1_000
    part = {f"x{k}": rng.normal(size=10_000).astype(np.float32) for k in range(width)}
    (tmp_path / "big").mkdir()
    for name, count in (("small", 1), ("big", rows // 10_000)):
        (tmp_path / name).mkdir(exist_ok=True)
        for k in range(count):
            who = pl.Series([f"c{c}" for c in rng.integers(40, size=10_000)])
            own = pl.DataFrame({"who": who, **part, "sick": rng.integers(2, size=10_000)})
            own.write_parquet(tmp_path / name / f"{k:02}.parquet", compression="uncompressed")
    words = [str(tmp_path / name) for name in ("small", "big", "small.f", "big.f")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), *words], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "big.f" / "x.npy").stat().st_size > 1.2e9
    assert int(done.stdout) < 5e8
