"""Files: written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import pooch

from pfedme.errors import InputError, RunError


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replaces `path` by `content` in one step: a reader, or a crash, sees the old file or the new one."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` once it is complete."""
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


def refuse_file(path: Path) -> None:
    """Raises an error if a folder at `path` is impossible because a file is there, or above it."""
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{path} cannot be a folder, because {place} is a file; choose another --out.")


def cache_folder() -> Path:
    """Where fetched data is kept: $PFEDME_CACHE, or pfedme in the user's cache folder."""
    return Path(os.environ.get("PFEDME_CACHE") or pooch.os_cache("pfedme"))


@contextlib.contextmanager
def alone(path: Path) -> Iterator[IO[bytes]]:
    """A file, made if need be, that marks its folder as this process's own until it ends, however it ends."""
    import fcntl  # which Windows has not

    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"Another process is at work in {path.parent}; wait for it, or stop it."
            ) from None
        yield file


@contextlib.contextmanager
def writing(path: Path, hint: str = "") -> Iterator[None]:
    """Turns a failure to write into a sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror or error}.{hint}") from error
