"""A client's table as numbers, which is read once and not again for every message.

In the folder `rows` of the state folder, with mode 0700:

    table.json    the SHA-256 of the table, and the size and the date of each of its files at that time
    told-*.json   what the table tells, and its number of training rows
    rows-*/       the rows, encoded by a schema, as `pfedme data convert` writes them

Names contain the hash of all that the content depends on. So what belongs to a table that has changed, or to
another agreement, is never found, and is removed when something else takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pfedme import __version__
from pfedme.core.spec import to_json
from pfedme.data.federation import Federation
from pfedme.data.fitting import Moments, Told
from pfedme.data.mapped import open_federation, write
from pfedme.data.reading import files_of, shown
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.deploy.declared import Ranges
from pfedme.deploy.messages import Words, sha256
from pfedme.errors import InputError
from pfedme.files import atomic_folder, atomic_write, writing

FOLDER, TABLE, LOCK = "rows", "table.json", "lock"
SETTLED_S = 2.0
"""A file that was written so shortly before it was read may be written again without a later date."""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A client's table, and what is kept of it in its state folder."""

    table: Table
    state: Path

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return self.state / FOLDER

    def fingerprint(self) -> str:
        """The fingerprint of the table's content, which is read only if a file has another size or date."""
        files, began = self._files(), time.time()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads((self.folder / TABLE).read_text(encoding="utf-8"))
            if known["files"] == files:
                return known["fingerprint"]
        found = self.table.pinned().fingerprint
        settled = all(max(file[-2:]) / 1e9 < began - SETTLED_S for file in files)
        if files and settled and files == self._files():
            with self._turn():
                self._write(TABLE, {"files": files, "fingerprint": found})
        return found

    def told(self, least: int, ranges: Ranges | None = None) -> tuple[Told, int]:
        """`Table.tell`, and the number of training rows."""
        name = f"told-{self._key(self.fingerprint(), [least, sorted((ranges or {}).items(), key=str)])}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads((self.folder / name).read_text(encoding="utf-8"))
            return _told(known["told"]), int(known["rows"])
        with self._unchanged():
            told, rows = self.table.tell(least, ranges), int(self.table.load().n_train[0])
        with self._turn():
            self._remove("told-")
            self._write(name, {"told": dataclasses.asdict(told), "rows": rows})
        return told, rows

    def rows(self, schema: Schema, fingerprint: str) -> Federation:
        """The rows, encoded by a schema; raises an error if the table does not have this fingerprint."""
        if self.fingerprint() != fingerprint:
            dataclasses.replace(self.table, fingerprint=fingerprint).pinned()  # raises an error
        path = self.folder / f"rows-{self._key(fingerprint, schema.to_json())}"
        with self._turn():
            with contextlib.suppress(InputError):
                return open_federation(path)
            self._remove("rows-")
            with writing(path), atomic_folder(path) as folder, self._unchanged():
                write(self.table.load(schema), folder, {})
            return open_federation(path)

    def forget(self) -> None:
        """Removes the rows, once no further message needs them."""
        with self._turn():
            self._remove("rows-")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raises an error if the table changes while it is read, because the result would be kept."""
        files = self._files()
        yield
        if self._files() != files:
            raise InputError(f"{shown(Path(self.table.path))} has changed while it was read; try again.")

    def _files(self) -> list[list[Any]]:
        """The files of the table, each with what shows that it has changed."""
        paths = [file for p in (self.table.path, self.table.test) if p for file in files_of(Path(p))]
        try:
            stats = [path.stat() for path in paths]
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {error.strerror}.") from None
        return [
            [str(path.absolute()), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
            for path, s in zip(paths, stats, strict=True)
        ]

    def _key(self, fingerprint: str, other: object) -> str:
        """What is different for another content of the table, other options, or another version."""
        options = {**to_json(self.table), "path": "", "test": "", "fingerprint": fingerprint}
        return sha256({"version": __version__, "table": options, "other": other})[:16]

    def _write(self, name: str, words: Words) -> None:
        with writing(self.folder):
            atomic_write(self.folder / name, json.dumps(words, indent=1) + "\n")
            (self.folder / name).chmod(0o600)

    def _remove(self, start: str) -> None:
        for old in self.folder.glob(f"*{start}*"):  # also what a killed process left
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Makes other processes wait, so that the table is read once if two need it."""
        import fcntl  # not available on Windows

        with writing(self.folder):
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            lock = (self.folder / LOCK).open("ab")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _told(words: Words) -> Told:
    """The inverse of `dataclasses.asdict` for what a table tells, through JSON."""
    return Told(
        **words
        | {
            "numbers": {name: Moments(*values) for name, values in words["numbers"].items()},
            "categories": {name: tuple(texts) for name, texts in words["categories"].items()},
            "classes": tuple(words["classes"]),
            "quantity": None if words["quantity"] is None else Moments(*words["quantity"]),
        }
    )
