"""The numbers of a table on disk while it is read, if they may not fit into memory."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

BUCKET = 2**28
"""Approximate number of bytes that are sorted in memory at once."""
MOST_BUCKETS = 500
"""Fewer than the files that a process may have open."""


class Disk:
    """A folder for numbers. Its scratch files have no names, so that nothing remains of a killed process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, contextlib.ExitStack()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the scratch files."""
        self.files.close()

    def scratch(self) -> IO[bytes]:
        """A file without a name."""
        return self.files.enter_context(tempfile.TemporaryFile(dir=self.folder))

    def spill(self) -> Spill:
        """Blocks of rows on disk."""
        return Spill(self.scratch())

    def room(self, shape: tuple[int, ...]) -> np.memmap:
        """x.npy in the folder, mapped into memory; raises an error now if the disk is too small for it."""
        path = self.folder / "x.npy"
        x = np.lib.format.open_memmap(path, "w+", np.dtype("<f4"), shape)
        if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return x

    def buckets(self, height: int, width: int) -> Buckets:
        """Rows that arrive in any order, to be sorted by their positions."""
        return Buckets(self, height, width)


class Spill:
    """Blocks of rows in a file, by number: a mapping with what a caller needs of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.lock = file, threading.Lock()
        self.places = dict[int, tuple[int, tuple[int, ...]]]()

    def __setitem__(self, number: int, block: np.ndarray) -> None:
        with self.lock:
            self.places[number] = self.file.seek(0, os.SEEK_END), block.shape
            self.file.write(np.ascontiguousarray(block, np.float32).data)

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def pop(self, number: int) -> np.ndarray:
        """A block, which is read once."""
        offset, shape = self.places.pop(number)
        with self.lock:
            self.file.seek(offset)
            block = np.ndarray(shape, np.float32, self.file.read(4 * math.prod(shape)))
            if not self.places:
                self.file.close()  # its space is needed
        return block


class Buckets:
    """An external sort: rows are distributed over files by their positions, and every file fits into
    memory."""

    def __init__(self, disk: Disk, height: int, width: int) -> None:
        self.height = height
        self.record = np.dtype([("place", "<i8"), ("row", "<f4", (width,))])
        number = min(MOST_BUCKETS, -(-height * self.record.itemsize // BUCKET))
        self.size = -(-height // max(1, number))
        """Number of rows in a bucket."""
        self.files = [disk.scratch() for _ in range(-(-height // self.size))]
        self.locks = [threading.Lock() for _ in self.files]

    def add(self, place: np.ndarray, rows: np.ndarray) -> None:
        """Adds rows at these positions."""
        which = (place // self.size).astype(np.uint16)
        order = np.argsort(which, kind="stable")
        records = np.empty(len(order), self.record)
        records["place"], records["row"] = place[order], rows[order]
        ends = np.cumsum(np.bincount(which, minlength=len(self.files)))
        for k, (end, count) in enumerate(zip(ends, np.diff(ends, prepend=0), strict=True)):
            if count:
                with self.locks[k]:
                    self.files[k].write(records[end - count : end].data)

    def into(self, x: np.ndarray) -> None:
        """Writes all rows into their positions in x."""
        for k, file in enumerate(self.files):
            first = k * self.size
            file.seek(0)
            records = np.frombuffer(file.read(), self.record)
            file.close()
            block = np.empty((min(self.size, self.height - first), x.shape[1]), np.float32)
            block[records["place"] - first] = records["row"]
            x[first : first + len(block)] = block
