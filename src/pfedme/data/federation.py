"""A federation: the rows of all clients in one ragged store, without padding."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pfedme.errors import InputError, RunError
from pfedme.files import writing

if TYPE_CHECKING:
    from pfedme.data.schema import Schema

Part = Literal["train", "validation", "test"]
"""The purpose of rows."""
SPARE = 512
"""Rows of zeros after those of each of several hosts: as many as are ever read at a time."""


READ_AHEAD = 2**31
"""Bytes of mapped files that are read ahead."""


class Stamp(NamedTuple):
    """What shows that a file was changed."""

    inode: int
    size: int
    changed: int
    """When it was written, in nanoseconds."""


def stamp(path: Path) -> Stamp:
    """The stamp of a file."""
    own = path.stat()
    return Stamp(own.st_ino, own.st_size, own.st_mtime_ns)


def aligned(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """An empty array at an address that XLA can use without making a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].view(dtype).reshape(shape)


def will_need(x: np.ndarray, first: np.ndarray, count: np.ndarray) -> None:
    """Asks the operating system to read bytes first[i] ... first[i] + count[i] − 1 of a mapped array."""
    if not hasattr(mmap, "MADV_WILLNEED"):  # on Windows
        return
    advise = ctypes.CDLL(None).madvise
    for start, size in zip((x.ctypes.data + first).tolist(), count.tolist(), strict=True):
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(page), ctypes.c_size_t(start + size - page), mmap.MADV_WILLNEED)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Federation:
    """Rows of clients, one client after another; within a client, validation, then training, then test.

    >>> f = Federation.split([3, 1], np.zeros((4, 2), np.float32), np.array([0, 1, 1, 0]), classes=2)
    >>> f.n_train, f.n_test
    (array([2, 1]), array([1, 0]))
    """

    x: np.ndarray
    """Features, one row per sample."""
    y: np.ndarray
    """Labels 0 ... classes − 1, or numbers in a regression."""
    n_train: np.ndarray
    """Training rows of each client."""
    n_test: np.ndarray
    """Test rows of each client."""
    classes: int
    """Number of labels; 0 for a regression."""
    ids: np.ndarray
    """The number that a client's randomness depends on; it stays the same when other clients come and go."""
    n_val: np.ndarray | int = 0
    """Validation rows of each client: used to choose, neither trained on nor reported."""
    fold: tuple[int, int] | None = None
    """Which part of the training rows they are, counted from 0, and of how many; None for other rows."""
    note: str = ""
    """What a reader of the description should know about where the rows come from."""
    notes: tuple[str, ...] = ()
    """How a table was read where that is not obvious, and what looks wrong in it."""
    names: tuple[str, ...] | None = None
    """Names of the clients; None if they only have ids."""
    shape: tuple[int, ...] = ()
    """Height, width and possibly channels, if rows are images; else ()."""
    schema: Schema | None = None
    """How rows of a table became these numbers; None if they did not come from a table."""
    files: tuple[tuple[str, int], ...] = ()
    """The files that rows come from, and the number of rows in each."""
    origin: np.ndarray | None = None
    """The index of each row among the rows of all files, counted from 0; None if they did not come from
    files."""
    mapped: tuple[tuple[Path, Stamp], ...] = ()
    """The files that the arrays are mapped from, as they were then."""
    home: np.ndarray | None = None
    """If several hosts share the rows: the number of the host that has the features of each client."""
    host: int = 0
    """The number of this host: x has only the rows of its clients, followed by rows of zeros."""

    @classmethod
    def split(
        cls,
        counts: Sequence[int] | np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        *,
        classes: int,
        train: float = 0.75,
        shuffle: np.random.Generator | None = None,
        note: str = "",
        shape: tuple[int, ...] = (),
    ) -> Federation:
        """The federation whose client i owns the next `counts[i]` rows, ⌊train · count⌋ to train on.

        The rows of each client are shuffled first if a generator is given. A client with one row
        trains on it and has no test rows.
        """
        counts = np.asarray(counts, np.int64)
        if not counts.sum() == len(x) == len(y):
            raise InputError(
                f"The clients have {counts.sum()} rows together, but there are {len(x)} rows of features and "
                f"{len(y)} labels."
            )
        if shuffle is not None:
            owner = np.repeat(np.arange(len(counts)), counts)
            order = np.lexsort((shuffle.random(len(y)), owner))
            x, y = np.take(x, order, axis=0, out=aligned(x.shape, x.dtype)), y[order]
        n_train = np.minimum(np.maximum(np.floor(train * counts).astype(np.int64), 1), counts)
        return cls(
            x=x, y=y, n_train=n_train, n_test=counts - n_train, classes=classes,
            ids=np.arange(len(counts), dtype=np.uint32), note=note, shape=shape,
        ).checked()  # fmt: skip

    def checked(self) -> Federation:
        """This federation, after a check that it can be trained on."""
        if self.clients == 0:
            raise InputError("The federation has no clients.")
        if (empty := np.flatnonzero(self.n_train < 1)).size:
            raise InputError(f"Client {empty[0]} has no training rows; leave it out or give it at least one.")
        step = max(1, 2**24 // max(1, self.x[0].size))
        for at in range(0, len(self.x), step):
            bad = ~np.isfinite(self.x[at : at + step])
            if bad.any():
                row, *column = np.argwhere(bad)[0]
                owner = int(np.searchsorted(self.start, at + row, side="right")) - 1
                raise InputError(
                    f"Feature {', '.join(map(str, column))} of row {at + row - self.start[owner]} of client "
                    f"{owner} is {self.x[at + row][tuple(column)]}; remove or impute missing values first."
                )
        if self.classes == 0:
            if (bad := np.flatnonzero(~np.isfinite(self.y))).size:
                owner = int(np.searchsorted(self.start, bad[0], side="right")) - 1
                raise InputError(
                    f"The label of row {bad[0] - self.start[owner]} of client {owner} is {self.y[bad[0]]}; "
                    "remove rows without a label first."
                )
        elif len(self.y) and not (self.y.min() >= 0 and self.y.max() < self.classes):
            raise InputError(
                f"Labels must be 0 to {self.classes - 1}; found {self.y.min()} to {self.y.max()}."
            )
        return self

    @property
    def clients(self) -> int:
        """N."""
        return len(self.n_train)

    @property
    def features(self) -> int:
        """Numbers in a row."""
        return int(np.prod(self.x.shape[1:]))

    @property
    def label_unit(self) -> float:
        """The size of a label of 1 in the original units of a regression's data."""
        return self.schema.label_scale if self.schema else 1.0

    def labels_in_units(self) -> np.ndarray:
        """A regression's labels in their original units."""
        return self.label_unit * self.y.astype(np.float64) + (self.schema.label_mean if self.schema else 0.0)

    def name(self, client: int) -> str:
        """The name of a client, or its id if it has none."""
        return self.names[client] if self.names else str(self.ids[client])

    @cached_property
    def count(self) -> np.ndarray:
        """Number of rows of each client, for any purpose."""
        return self.n_val + self.n_train + self.n_test

    @cached_property
    def start(self) -> np.ndarray:
        """Where each client's rows begin."""
        return np.concatenate([[0], np.cumsum(self.count)[:-1]])

    def rows(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Where each client's rows of a part begin, and their number."""
        before = {"validation": 0, "train": self.n_val, "test": self.n_val + self.n_train}[part]
        count = {"validation": self.n_val, "train": self.n_train, "test": self.n_test}[part]
        return self.start + before, np.broadcast_to(count, self.clients)

    def hold_out(self, fold: int, folds: int) -> Federation:
        """This federation with one of `folds` parts of each client's training rows kept for validation.

        A client with fewer rows than folds keeps one row or none, and one with a single row trains on it.

        >>> f = Federation.split([8, 1], np.zeros((9, 2), np.float32), np.zeros(9, int), classes=2)
        >>> f.hold_out(1, 2).n_val, f.hold_out(1, 2).n_train
        (array([3, 0]), array([3, 1]))
        """
        if np.any(self.n_val):
            raise ValueError("validation rows are kept apart already")
        first, last = (np.where(self.n_train > 1, self.n_train * k // folds, 0) for k in (fold, fold + 1))
        kept = last - first
        if not first.any():  # the rows are in this order already
            return dataclasses.replace(self, n_train=self.n_train - kept, n_val=kept, fold=(fold, folds))
        place = np.arange(len(self.y)) - np.repeat(self.start, self.count)
        first, last = (np.repeat(a, self.count) for a in (first, last))
        # Within a client: the rows of the fold, then those before it, then those after it.
        rank = np.where(place < first, place + last - first, np.where(place < last, place - first, place))
        order = np.empty(len(self.y), np.int64)
        order[np.repeat(self.start, self.count) + rank] = np.arange(len(self.y))
        return self._with_rows(order, n_train=self.n_train - kept, n_val=kept, fold=(fold, folds))

    def pooled(self) -> Federation:
        """One client with the training rows of all clients, ordered by id, without validation or test rows.

        >>> f = Federation.split([3, 2], np.arange(10.0).reshape(5, 2), np.array([0, 1, 1, 0, 1]), classes=2)
        >>> f.pooled().n_train, f.pooled().y
        (array([3]), array([0, 1, 0]))
        """
        first, count = (a[np.argsort(self.ids, kind="stable")] for a in self.rows("train"))
        rows = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
        return dataclasses.replace(
            self, x=self._features(rows), y=self.y[rows], n_train=np.array([len(rows)]),
            n_test=np.array([0]), n_val=0, ids=np.zeros(1, np.uint32), names=None,
        )  # fmt: skip

    def _features(self, rows: np.ndarray) -> np.ndarray:
        """The features of some rows; in a file without a name if they are mapped from a file, because there
        may be more than fit into memory."""
        shape = (len(rows), *self.x.shape[1:])
        if not self.mapped:
            return np.take(self.x, rows, axis=0, out=aligned(shape, self.x.dtype))
        folder = self.mapped[0][0].parent
        own = folder if os.access(folder, os.W_OK) else None
        step = max(1, 2**24 // max(1, self.features))
        with writing(own or Path(tempfile.gettempdir())), tempfile.TemporaryFile(dir=own) as file:
            for at in range(0, len(rows), step):
                file.write(self.x[rows[at : at + step]].data)
            file.flush()
            return np.memmap(file, self.x.dtype, "r", 0, shape)

    def draws_ahead(self, clients: int) -> int:
        """How many draws of so many clients to read ahead."""
        return max(1, READ_AHEAD // max(1, clients * self.x.nbytes // self.clients)) if self.mapped else 2**31

    def read_ahead(self, clients: np.ndarray) -> None:
        """If rows are mapped from a file, checks that it is unchanged, and asks the operating system to read
        the training rows of these clients, in this order: that is faster than to read each when it is first
        used."""
        self.check_unchanged()
        size = self.x.strides[0]
        first, count = (values[clients] * size for values in self.rows("train"))
        if self.mapped and count.sum() <= READ_AHEAD:
            threading.Thread(target=will_need, args=(self.x, first, count), daemon=True).start()

    def check_unchanged(self) -> None:
        """Raises an error if a file that rows are mapped from was changed since."""
        for path, before in self.mapped:
            with contextlib.suppress(OSError):  # a file that was removed stays as it was
                now = stamp(path)
                if now.inode == before.inode and now != before:
                    raise RunError(f"{path} was changed while it was in use; convert the data again.")

    def label_counts(self) -> np.ndarray:
        """How often each client (row) has each label (column) of a classification."""
        owner = np.repeat(np.arange(self.clients), self.count)
        flat = np.bincount(owner * self.classes + self.y, minlength=self.clients * self.classes)
        return flat.reshape(self.clients, self.classes)

    @cached_property
    def train_labels(self) -> np.ndarray:
        """How often each label of a classification occurs in the training rows of all clients."""
        start, count = self.rows("train")
        ends = np.zeros(len(self.y) + 1, np.int64)  # +1 where training rows begin, −1 where they end
        np.add.at(ends, start, 1)
        np.add.at(ends, start + count, -1)
        return np.bincount(self.y[np.cumsum(ends[:-1]) > 0], minlength=self.classes)

    @property
    def positive(self) -> int:
        """The rarer of two labels in the training rows (the second if they are equal), which recall and
        similar metrics refer to; the rarest of several labels, and 0 in a regression."""
        if not self.classes:
            return 0
        counts = self.train_labels
        return int(np.flatnonzero(counts == counts.min())[-1])

    def label_name(self, label: int) -> str:
        """The name of a label of a classification."""
        return self.schema.labels[label] if self.schema else str(label)

    def limit(self, rows: int) -> Federation:
        """The clients that have at least `rows` training rows, each with only the first `rows` of them."""
        if np.any(self.n_val):
            raise ValueError("validation rows are kept apart already")
        some = self.take(np.flatnonzero(self.n_train >= rows))
        place = np.arange(len(some.y)) - np.repeat(some.start, some.count)
        kept = (place < rows) | (place >= np.repeat(some.n_train, some.count))
        return some._with_rows(np.flatnonzero(kept), n_train=np.full(some.clients, rows))

    def take(self, clients: Sequence[int] | np.ndarray) -> Federation:
        """The federation of these clients, in this order; they keep their ids."""
        clients = np.asarray(clients)
        count = self.count[clients]
        rows = np.repeat(self.start[clients] - np.cumsum(count) + count, count) + np.arange(count.sum())
        return self._with_rows(
            rows, n_train=self.n_train[clients], n_test=self.n_test[clients],
            n_val=np.broadcast_to(self.n_val, self.clients)[clients], ids=self.ids[clients],
            names=None if self.names is None else tuple(self.names[i] for i in clients),
            home=None if self.home is None else self.home[clients],
        )  # fmt: skip

    def of_host(self, host: int, hosts: int) -> Federation:
        """The part of one of several hosts: all labels and counts, but the features of its clients alone.

        Every host has as many clients, give or take one, in the order of their ids, as a cohort has.

        >>> f = Federation.split([2, 1], np.ones((3, 1), np.float32), np.array([0, 1, 1]), classes=2)
        >>> f.of_host(1, 2).x.sum(), f.of_host(1, 2).home
        (np.float32(1.0), array([0, 1]))
        """
        rank = np.argsort(np.argsort(self.ids, kind="stable"), kind="stable")
        return self._with_rows(np.arange(len(self.y)), home=rank * hosts // self.clients, host=host)

    def _with_rows(self, rows: np.ndarray, **changes: Any) -> Federation:
        """This federation with these rows of it, in this order, and other changes."""
        origin = None if self.origin is None else self.origin[rows]
        made = dataclasses.replace(self, y=self.y[rows], origin=origin, **changes)
        if made.home is None:
            return dataclasses.replace(made, x=self._features(rows))
        if self.home is not None:
            here = np.repeat(self.home == self.host, self.count)
            rows = (np.cumsum(here) - 1)[rows[here[rows]]]
        else:
            rows = rows[np.repeat(made.home == made.host, made.count)]
        heights = np.bincount(made.home, made.count)
        x = aligned((int(heights.max()) + SPARE, *self.x.shape[1:]), self.x.dtype)
        np.take(self.x, rows, axis=0, out=x[: len(rows)])
        x[len(rows) :] = 0
        return dataclasses.replace(made, x=x, mapped=())

    @cached_property
    def local_start(self) -> np.ndarray:
        """Where each client's rows begin in x on its host."""
        if self.home is None:
            return self.start
        order = np.argsort(self.home, kind="stable")
        before = np.cumsum(self.count[order]) - self.count[order]
        first = np.searchsorted(self.home[order], self.home[order])
        found = np.empty(self.clients, np.int64)
        found[order] = before - before[first]
        return found
