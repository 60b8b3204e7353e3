"""What a deployed client keeps of its table between messages: it is read once, and changes are noticed."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pfedme.data.federation import Federation
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.deploy import encoded
from pfedme.deploy.encoded import Encoded
from pfedme.errors import InputError


class Owner:
    """A client's table, which counts how often it is read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.reads = folder / "t.csv", 0
        rng = np.random.default_rng(0)
        self.frame = pl.DataFrame(
            {"age": rng.normal(50, 9, 60), "ward": rng.choice(["a", "b"], 60), "sick": rng.integers(0, 2, 60)}
        )
        self.frame.write_csv(self.path)
        self.table = Table(path=str(self.path), label="sick", owner="north")
        self.kept = Encoded(self.table, folder / "state")
        plan = self.table.load().schema
        assert plan is not None
        self.schema = plan
        self.fingerprint = self.table.pinned().fingerprint
        monkeypatch.setattr(encoded, "SETTLED_S", 0.0)
        read = Table._read

        def counted(*given, **options):
            self.reads += 1
            return read(*given, **options)

        monkeypatch.setattr(Table, "_read", counted)
        time.sleep(0.02)

    def rows(self, schema: Schema | None = None) -> Federation:
        return self.kept.rows(schema or self.schema, self.fingerprint)


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    return Owner(tmp_path, monkeypatch)


def same(one: Federation, other: Federation) -> None:
    for field in dataclasses.fields(Federation):
        own, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(own, np.ndarray):
            np.testing.assert_array_equal(own, its)
            assert own.dtype == its.dtype
        elif field.name != "mapped":
            assert own == its, field.name


def test_the_table_is_read_once_and_the_rows_are_the_same(owner: Owner):
    whole = owner.table.load(owner.schema)
    owner.reads = 0
    same(owner.rows(), whole)
    assert owner.reads == 1
    same(owner.rows(), whole)
    assert (owner.kept.fingerprint(), owner.reads) == (owner.fingerprint, 1)


@pytest.mark.parametrize("least", [1, 5])
def test_what_a_table_tells_is_kept_as_it_is(least: int, owner: Owner):
    told = owner.table.tell(least), int(owner.table.load().n_train[0])
    assert owner.kept.told(least) == told
    owner.reads = 0
    assert owner.kept.told(least) == told
    assert owner.reads == 0


def test_another_schema_or_another_table_has_rows_of_its_own(owner: Owner):
    first = owner.rows()
    columns = [dataclasses.replace(c, scale=2 * c.scale) for c in owner.schema.columns]
    wider = dataclasses.replace(owner.schema, columns=tuple(columns))
    same(owner.rows(wider), owner.table.load(wider))
    assert len(list(owner.kept.folder.glob("rows-*"))) == 1  # the others were removed
    np.testing.assert_array_equal(first.x, owner.table.load(owner.schema).x)  # but are still mapped
    half = dataclasses.replace(owner.table, train=0.5)
    again = Encoded(half, owner.kept.state).rows(owner.schema, owner.fingerprint)
    same(again, half.load(owner.schema))


def test_a_table_that_has_changed_is_noticed_and_a_new_date_alone_does_not_matter(owner: Owner):
    owner.rows()
    told, _ = owner.kept.told(1)
    owner.reads = 0
    os.utime(owner.path, (1, 1))
    owner.rows()
    assert owner.reads == 0
    before = owner.path.stat()
    text = owner.path.read_text()
    owner.path.write_text(text[:-2] + ("0" if text[-2] == "1" else "1") + "\n")
    os.utime(owner.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size and date
    time.sleep(0.02)
    with pytest.raises(InputError, match="has changed since the run began"):
        owner.rows()
    assert owner.kept.fingerprint() != owner.fingerprint
    assert owner.kept.told(1) != told
    owner.path.write_text(text)
    owner.rows()


def test_a_file_that_was_just_written_is_not_trusted(owner: Owner, monkeypatch: pytest.MonkeyPatch):
    """Within the resolution of its date, it may be written again."""
    monkeypatch.setattr(encoded, "SETTLED_S", 60.0)
    owner.kept.fingerprint()
    assert not (owner.kept.folder / "table.json").exists()


def test_a_table_that_changes_while_it_is_read_is_not_kept(owner: Owner, monkeypatch: pytest.MonkeyPatch):
    load = Table.load

    def slow(*given, **options):
        found = load(*given, **options)
        os.utime(owner.path, (1, 1))
        return found

    monkeypatch.setattr(Table, "load", slow)
    for read in (owner.rows, lambda: owner.kept.told(1)):
        with pytest.raises(InputError, match="has changed while it was read"):
            read()
    assert not [path for path in owner.kept.folder.iterdir() if path.name not in ("lock", "table.json")]


def test_only_the_owner_can_read_it(owner: Owner):
    owner.rows()
    owner.kept.told(1)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in owner.kept.state.rglob("*")}
    assert len(modes) > 8
    for path, mode in modes.items():
        inside = path.parent != owner.kept.state
        assert mode == (0o700 if path.is_dir() else 0o600) or (path.name == "lock" and inside), path
    assert stat.S_IMODE(owner.kept.folder.stat().st_mode) == 0o700


def test_rows_that_are_damaged_or_incomplete_are_read_again(owner: Owner):
    whole = owner.table.load(owner.schema)
    owner.rows()
    (folder,) = owner.kept.folder.glob("rows-*")
    os.truncate(folder / "x.npy", 300)
    same(owner.rows(), whole)
    (folder / "federation.json").unlink()
    same(owner.rows(), whole)
    (owner.kept.folder / "table.json").write_text("{")
    owner.reads = 0
    same(owner.rows(), whole)
    assert owner.reads == 0


def test_rows_are_removed_when_they_are_no_longer_needed(owner: Owner):
    owner.rows()
    (owner.kept.folder / ".rows-1234.abc").mkdir()  # a killed process
    owner.kept.forget()
    assert {path.name for path in owner.kept.folder.iterdir()} == {"lock", "table.json"}
