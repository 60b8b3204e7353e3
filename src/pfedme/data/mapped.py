"""A federation in a folder, whose rows are mapped into memory rather than read into it.

    federation.json   what the rows mean, and the type, shape and SHA-256 of every array
    x.npy, y.npy      features and labels, one client after another, as in `Federation`
    n_train.npy, n_test.npy, ids.npy
    origin.npy        for rows of a table

XLA uses the pages of x.npy where the operating system keeps them, without a copy. So rows may be larger than
memory, only those that are used are read, and processes that train from the same folder share them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pfedme import __version__
from pfedme.core.spec import to_json
from pfedme.core.tree import record
from pfedme.data.disk import Disk
from pfedme.data.federation import Federation, stamp
from pfedme.data.reading import short, shown
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.errors import InputError
from pfedme.files import atomic_folder, writing

ABOUT = "federation.json"
FORMAT, VERSION = "pfedme federation", 1
ARRAYS = ("x", "y", "n_train", "n_test", "ids", "origin")
IN_MEMORY = ("n_train", "n_test", "ids")
"""Arrays with a number for each client, which are read."""
CONVERT = "restore it, or convert the data again"
"""The cure for a damaged folder."""


@record
class Mapped:
    """A folder that `pfedme data convert` has written: rows that may be larger than memory."""

    name: ClassVar[str] = "mapped"

    path: str = ""
    """The folder."""
    fingerprint: str = ""
    """Fingerprint of its content, which ensures that a run is resumed with the data that it started with."""

    def pinned(self) -> Mapped:
        """This source with its full path and fingerprint; if a fingerprint was given, it must match."""
        path = Path(self.path).absolute()
        now = _about(path)["sha256"]
        if self.fingerprint not in ("", now):
            raise InputError(
                f"The data of this run, {shown(path)}, has changed since the run began; restore it, or start "
                "a new run."
            )
        return Mapped(path=str(path), fingerprint=now)

    def words(self) -> list[str]:
        """The command line that describes this source."""
        return ["--data", self.path]

    def load(self) -> Federation:
        """The federation; only its small arrays are in memory."""
        return open_federation(Path(self.path))


def is_mapped(path: Path) -> bool:
    """Whether a path is a folder with a federation."""
    return (path / ABOUT).is_file()


def convert(source: Any, out: Path) -> Federation:
    """Writes the federation of a source to a new folder, and returns it as it is in there.

    A table is read once, in pieces, and may be larger than memory.
    """
    if out.exists():
        raise InputError(f"{shown(out)} exists already; choose another folder, or remove it.")
    about = {"source": {"name": source.name, **to_json(source)}}
    with writing(out), atomic_folder(out) as folder, Disk(folder) as disk:
        federation = source.load(disk=disk) if isinstance(source, Table) else source.load()
        write(federation, folder, about, files=0o444, folders=0o755)
    return open_federation(out)


def write(
    federation: Federation, folder: Path, about: dict[str, Any], *, files: int = 0o600, folders: int = 0o700
) -> None:
    """Writes a federation into a folder, with these modes; features that are mapped from its x.npy are there
    already. `about` is to be in the description as well."""
    f = federation
    if np.any(f.n_val):
        raise ValueError("validation rows are kept apart already")
    arrays, written = dict[str, Any](), dict[str, int]()
    for name in ARRAYS:
        own = getattr(f, name)
        if own is None:
            continue
        path = folder / f"{name}.npy"
        if isinstance(own, np.memmap) and Path(str(own.filename)) == path:
            own.flush()
        else:
            np.save(path, own.astype(own.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path.chmod(files)
        kind = own.dtype.newbyteorder("<").str
        arrays[name] = {"type": kind, "shape": list(own.shape), "sha256": digest}
        written[name] = path.stat().st_mtime_ns
    described = {
        "format": FORMAT,
        "version": VERSION,
        "pfedme": __version__,
        **about,
        "classes": f.classes,
        "image": list(f.shape),
        "note": f.note,
        "notes": list(f.notes),
        "names": None if f.names is None else list(f.names),
        "files": [list(file) for file in f.files],
        "schema": f.schema.to_json() if f.schema else None,
        "arrays": arrays,
    }
    described = json.loads(json.dumps(described, default=str))
    with (folder / ABOUT).open("x", encoding="utf-8") as file:
        json.dump({**described, "sha256": _digest(described), "written": written}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    (folder / ABOUT).chmod(files)
    folder.chmod(folders)


def open_federation(folder: Path) -> Federation:
    """The federation in a folder, after a check that its arrays are complete.

    If an array was written since `write`, or is a copy with another date, its content is checked as well.
    """
    about = _about(folder)
    arrays = {name: _mapped(folder, name, entry, about) for name, entry in about["arrays"].items()}
    small = {name: np.array(arrays[name]) for name in IN_MEMORY}
    kept: dict[str, Any] = {**arrays, **small}
    return Federation(
        **kept,
        classes=about["classes"],
        note=about["note"],
        notes=tuple(about["notes"]),
        names=None if about["names"] is None else tuple(about["names"]),
        shape=tuple(about["image"]),
        schema=None if about["schema"] is None else Schema.from_json(about["schema"]),
        files=tuple((name, height) for name, height in about["files"]),
        mapped=tuple((path, stamp(path)) for name in arrays if (path := folder / f"{name}.npy")),
    )


def _about(folder: Path) -> dict[str, Any]:
    """The description of the federation in a folder."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        form, version = about["format"], about["version"]
    except FileNotFoundError:
        raise InputError(f"There is no federation in {shown(folder)}: it has no {ABOUT}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{shown(path)} cannot be read ({short(str(error))}); {CONVERT}.") from None
    if (form, version) != (FORMAT, VERSION):
        raise InputError(
            f"{shown(folder)} has version {version} of the format, but this pfedme reads version {VERSION}; "
            "convert the data with this version, or use another one."
        )
    known = {key: value for key, value in about.items() if key not in ("sha256", "written")}
    if _digest(known) != about.get("sha256"):
        raise InputError(f"{shown(path)} is damaged: its checksum does not match; {CONVERT}.")
    return about


def _mapped(folder: Path, name: str, entry: dict[str, Any], about: dict[str, Any]) -> np.ndarray:
    """An array, mapped into memory."""
    path = folder / f"{name}.npy"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        before = stamp(path)
    except FileNotFoundError:
        raise InputError(f"{shown(path)} is missing; {CONVERT}.") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{shown(path)} is incomplete ({short(str(error))}); {CONVERT}.") from None
    wanted = (entry["type"], entry["shape"], array.offset + array.nbytes)
    if (array.dtype.str, list(array.shape), before.size) != wanted or not array.flags.c_contiguous:
        raise InputError(f"{shown(path)} is not the array that was written; {CONVERT}.")
    if before.changed != about["written"][name]:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise InputError(f"{shown(path)} is damaged: its checksum does not match; {CONVERT}.")
    return array


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
