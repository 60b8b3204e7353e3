"""A run's folder: its files, how they are read and written, and when it is refused."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.core.models import Model
from pfedme.data.federation import Federation
from pfedme.engine.devices import from_first
from pfedme.engine.metrics import Blocks
from pfedme.errors import InputError
from pfedme.files import atomic_file, atomic_write, refuse_file, writing

LATER = (
    "personalized.csv", "personalized.json", "personalized.png", "personalized.safetensors",
    "columns.csv", "columns.json", "columns.png",
    "newcomers.csv", "newcomers.png", "report.html", "test_rows.csv", "test_rows.parquet",
)  # fmt: skip
"""Files that are made from a finished run, and so do not apply to another one."""

OWN = "own"
"""The kind of a model that is the user's own code, which a file cannot describe."""

EVENTS = "events.out.tfevents.*"
"""Names of TensorBoard's event files."""


class Folder:
    """A run's folder: record.json, and while it is unfinished checkpoint.safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "record.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"
        self.offered = path / "personalized.safetensors"
        self.clients = path / "clients.csv"
        self.curves = path / "curves.png"

    def check_writable(self, *, force: bool) -> None:
        """Raises an error if the path cannot be a folder, or if the folder holds files that would be lost."""
        refuse_file(self.path)
        if self.record.exists() and not force:
            if (status := self.status()) == "running":
                raise InputError(
                    f"{self.path} holds an unfinished run; 'pfedme resume {self.path}' continues it, "
                    "--force starts over."
                )
            raise InputError(
                f"{self.path} holds a {status} run; choose another --out, or --force to overwrite it."
            )
        if not self.record.exists() and self.path.exists() and any(self.path.iterdir()) and not force:
            raise InputError(f"{self.path} is not empty and holds no run; choose another --out, or --force.")

    def claim(self) -> None:
        """Creates the folder, or removes from it what an earlier run left."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for old in (self.record, self.checkpoint, self.model, self.clients, self.curves):
                old.unlink(missing_ok=True)
            for name in LATER:
                (self.path / name).unlink(missing_ok=True)
            for old in (self.path / "tensorboard").glob(EVENTS):
                old.unlink()

    def read(self) -> dict[str, Any]:
        """The record."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            raise InputError(f"There is no run in {self.path}: it has no record.json.") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.record} cannot be read ({error}); start the run again.") from None
        if not (isinstance(record, dict) and isinstance(record.get("config"), dict)):
            raise InputError(f"{self.record} is not the record of a run; start the run again.")
        return record

    def read_by_all(self) -> dict[str, Any]:
        """The record, on all hosts; only the first needs the folder."""
        return json.loads(from_first(lambda: json.dumps(self.read()).encode()))

    def status(self) -> str:
        """`running`, `finished` or `diverged`."""
        return self.read().get("status", "")

    def client_names(self) -> list[str]:
        """The clients that were evaluated, as listed in clients.csv; empty without that file."""
        if not self.clients.exists():
            return []
        with self.clients.open(newline="", encoding="utf-8") as file:
            return [row["client"] for row in csv.DictReader(file)]

    def write_checkpoint(self, tensors: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        """Writes the state of an unfinished run, with a checksum."""
        signed = about | {"sha256": _digest(tensors, about)}
        content = safetensors.numpy.save(tensors, {"pfedme": json.dumps(signed)})
        atomic_write(self.checkpoint, content)

    def read_checkpoint(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The state that `write_checkpoint` was given, after checking that it is intact."""
        try:
            content = from_first(self.checkpoint.read_bytes)
            size = int.from_bytes(content[:8], "little")
            about = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["pfedme"])
            tensors = safetensors.numpy.load(content)
            whole = about.pop("sha256") == _digest(tensors, about)
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise InputError(self.bad_checkpoint(f"cannot be read ({error})")) from None
        if not whole:
            raise InputError(self.bad_checkpoint("is damaged: its checksum does not match"))
        return tensors, about

    def bad_checkpoint(self, what: str) -> str:
        """Says what is wrong with the checkpoint, and how to fix it."""
        return (
            f"The checkpoint {self.checkpoint} {what}; delete {self.checkpoint.name} to start from round 0 "
            f"with 'pfedme resume {self.path}'."
        )


def write_models(
    path: Path, tensors: dict[str, np.ndarray], model: Model, federation: Federation,
    who: Sequence[int] | np.ndarray,
) -> None:  # fmt: skip
    """Writes models' parameters and what is needed to use them; `theta` has a row for each of `who`."""
    about: dict[str, Any] = {
        "version": __version__,
        "model": _about(model),
        "clients": [int(federation.ids[i]) for i in who],
    }
    if len(who):
        blocks = Blocks.cut(*(values[list(who)] for values in federation.rows("test")))
        about["block"] = len(blocks.offset)
    if federation.names:
        about["names"] = [federation.names[i] for i in who]
    if federation.schema:
        about["schema"] = federation.schema.to_json()
    with atomic_file(path) as file:
        # One key, because safetensors does not keep the order of several.
        write_safetensors(file, tensors, {"pfedme": json.dumps(about)})


def write_safetensors(file: BinaryIO, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes numbers in the format of safetensors, whose own writer needs their memory twice more."""
    header, at = dict[str, Any](__metadata__=metadata), 0
    tensors = {name: np.ascontiguousarray(a) for name, a in sorted(tensors.items())}
    for name, a in tensors.items():
        kind = f"{a.dtype.kind.upper()}{8 * a.dtype.itemsize}"  # F32, I64
        header[name] = {"dtype": kind, "shape": a.shape, "data_offsets": (at, at := at + a.nbytes)}
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for a in tensors.values():
        file.write(a.reshape(-1).data)


def _about(model: Model) -> dict[str, Any]:
    """Everything needed to use a model; for the user's own code, only its name."""
    try:
        return model.to_json()
    except NotImplementedError:
        return {"kind": OWN, "class": f"{type(model).__module__}:{type(model).__qualname__}"}


def read_models(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The parameters that `write_models` was given, and its description of them."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["pfedme"])
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}); start the run again.") from None


def _digest(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()
