"""Files, which are written atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import pooch

from pfedme.errors import InputError, RunError

LOCK = "being-written"
"""The file that locks a folder while it is written."""


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replaces `path` with `content` in one step: even after a crash, a reader sees the old or new file."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is complete."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, with mode 0700, which becomes `path` once it is complete. What a killed process
    left there is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for lock in path.parent.glob(f".{path.name}.*/{LOCK}"):
        with contextlib.suppress(InputError, OSError), alone(lock):
            shutil.rmtree(lock.parent)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        with alone(scratch / LOCK):
            yield scratch
            (scratch / LOCK).unlink()
            os.rename(scratch, path)
        handle = os.open(path.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def refuse_file(path: Path) -> None:
    """Raises an error if `path` cannot be a folder because it, or one of its parents, is a file."""
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{path} cannot be a folder, because {place} is a file; choose another --out.")


def cache_folder() -> Path:
    """Where fetched data is kept: $PFEDME_CACHE, or pfedme in the user's cache folder."""
    return Path(os.environ.get("PFEDME_CACHE") or pooch.os_cache("pfedme"))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[IO[bytes]]:
    """A file, created if needed, that locks its folder for this process until the process ends."""
    import fcntl  # not available on Windows

    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"Another process is using {path.parent}; wait for it to finish, or stop it."
            ) from None
        yield file


@contextlib.contextmanager
def writing(path: Path, hint: str = "") -> Iterator[None]:
    """Turns a failure to write into a `RunError`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}.{hint}") from error
