"""Which rows of a table a client trains on, and the position of every row in the store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from pfedme.data.disk import Disk
from pfedme.data.federation import aligned
from pfedme.data.hashing import draws, ids_of_names
from pfedme.data.reading import on_all_cores
from pfedme.data.rows import Piece, Rows
from pfedme.data.schema import Coded, MissingValues, Schema, first
from pfedme.errors import InputError

BLOCK = 2**17
"""Approximate number of rows that are arranged at once."""


class Strata(NamedTuple):
    """Kinds of rows that are to be split in the same proportions."""

    code: np.ndarray
    """The kind of each row."""
    ids: np.ndarray
    """The number that the randomness of each kind depends on."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The position in the store of each row of one or two tables."""

    ids: np.ndarray
    n_train: np.ndarray
    n_test: np.ndarray
    places: list[np.ndarray]
    """Positions of the rows of the table, and of the table of test rows if there is one."""
    in_train: np.ndarray
    """Which rows of the table are to be trained on."""
    disk: Disk | None = None
    """Where the features are written; None to keep them in memory."""

    @property
    def start(self) -> np.ndarray:
        """Where each client's rows begin."""
        count = self.n_train + self.n_test
        return np.cumsum(count) - count

    def placed(self, labels: Sequence[np.ndarray]) -> np.ndarray:
        """The labels of the tables, in their positions."""
        y = np.empty(sum(map(len, self.places)), labels[0].dtype)
        for own, place in zip(labels, self.places, strict=True):
            y[place] = own
        return y

    def origin(self) -> np.ndarray:
        """The row at each position of the store, numbered through the tables."""
        height = sum(map(len, self.places))
        out = np.empty(height, np.int32 if height < 2**31 else np.int64)
        before = 0
        for place in self.places:
            out[place] = np.arange(before, before + len(place), dtype=out.dtype)
            before += len(place)
        return out

    def filled(
        self, tables: Sequence[Rows], schema: Schema, *, fitting: bool = False, strict: bool = True
    ) -> np.ndarray:
        """All features, in their positions; unless `strict`, an unknown category becomes zeros."""
        height = sum(map(len, self.places))
        if self.disk is None:
            _refuse_too_large(tables[0], height, schema)
            x, buckets = aligned((height, schema.features), np.float32), None
        else:
            x, buckets = self.disk.room((height, schema.features)), self.disk.buckets(height, schema.features)
        whole_rows = np.dtype((np.void, x.itemsize * x.shape[1]))  # moving whole rows is much faster
        places_in_x = x.view(whole_rows)[:, 0]
        for rows, place in zip(tables, self.places, strict=True):
            of_texts = _numbers_of_texts(rows, schema)

            def put(
                piece: Piece,
                rows: Rows = rows,
                place: np.ndarray = place,
                of_texts: Mapping[str, np.ndarray] = of_texts,
            ) -> None:
                encoded = _encoded(rows, piece, schema, of_texts, fitting, strict)
                own = place[piece.start : piece.start + len(encoded)]
                if buckets is None:
                    places_in_x[own] = encoded.view(whole_rows)[:, 0]
                else:
                    buckets.add(own, encoded)

            try:
                on_all_cores(put, rows.pieces())
            except MissingValues:
                if (error := rows.missing(schema.sources)) is not None:
                    raise error from None
                raise
        if buckets is not None:
            buckets.into(x)
        return x


def _encoded(
    rows: Rows,
    piece: Piece,
    schema: Schema,
    of_texts: Mapping[str, np.ndarray],
    fitting: bool,
    strict: bool,
) -> np.ndarray:
    """The features of some rows, as `Schema.encode` makes them."""
    start, place, numbers = piece
    n = len(numbers)
    out = np.zeros((n, schema.features), np.float32)
    places = [schema.starts[name] for name in rows.numbers]
    low, high = min(places, default=0), max(places, default=-1) + 1
    out[:, slice(low, high) if places == [*range(low, high)] else places] = numbers  # the first is faster
    for column in schema.columns:
        if column.source not in rows.texts:
            continue
        code, names = rows.texts[column.source]
        code = code[start : start + n]
        if column.kind == "category":
            schema.mark(out, column, Coded(code, names), place, fitting=fitting or not strict)
        else:
            value = of_texts[column.name][code]
            if (unfit := np.isinf(value)).any():
                row = first(unfit)
                raise InputError(
                    f"Column '{column.source}' of {place.at(row)} is '{names[code[row]]}', which no model "
                    "can use; correct it, or leave it empty and use --impute mean."
                )
            out[:, schema.starts[column.name]] = value
    if (missing := np.isnan(out)).any():
        if not schema.impute:
            raise MissingValues
        if not fitting:
            out[missing] = 0
    return out


def _numbers_of_texts(rows: Rows, schema: Schema) -> dict[str, np.ndarray]:
    """The standardised number that each text of a column becomes, and NaN for missing ones."""
    out = dict[str, np.ndarray]()
    for column in schema.numbers:
        if column.source in rows.texts:
            code, names = rows.texts[column.source]
            value = column.form.read(pl.Series(names, dtype=pl.String))
            if (odd := value.is_null().to_numpy()).any():
                row = first(np.append(odd, False)[code])
                what = "date or time" if column.form.date else "number"
                raise InputError(
                    f"Column '{column.source}' of {rows.at(row)} is '{names[code[row]]}', which is not a "
                    f"{what}; correct it, or leave it empty and train with --impute mean."
                )
            with np.errstate(over="ignore"):
                counted = (value.to_numpy() - column.zero).astype(np.float32)
                standard = (counted - np.float32(column.mean - column.zero)) / np.float32(column.scale)
            out[column.name] = np.append(standard, np.float32(np.nan))
    return out


def lay_out(tables: Sequence[Rows], strata: Strata | None, train: float, seed: int) -> Layout:
    """The layout of a table whose rows are split, or of a table with a separate table of test rows.

    Rows are split at random, each stratum in proportion as far as possible.
    """
    rows = tables[0]
    names, owner = rows.client.names, rows.client.code
    ids = ids_of_names(names)
    rank = arrange(owner, ids, strata, seed)
    count = np.bincount(owner, minlength=len(names))
    if len(tables) == 1:
        n_train = np.minimum(np.maximum(np.floor(train * count).astype(np.int64), 1), count)
        start = np.cumsum(count) - count
        return Layout(ids, n_train, count - n_train, [start[owner] + rank], rank < n_train[owner])
    held = tables[1]
    known = {name: k for k, name in enumerate(names)}
    theirs = held.client.mapped([known.get(name, -1) for name in held.client.names])
    if (stranger := theirs < 0).any():
        row = first(stranger)
        raise InputError(
            f"The client of {held.at(row)} is '{held.client.names[held.client.code[row]]}', which has no "
            f"training rows in {rows.where}; leave its test rows out."
        )
    n_test = np.bincount(theirs, minlength=len(names))
    start = np.cumsum(count + n_test) - count - n_test
    behind = start[theirs] + count[theirs] + arrange(theirs, ids, None, seed)
    return Layout(ids, count, n_test, [start[owner] + rank, behind], np.ones(len(owner), bool))


def arrange(owner: np.ndarray, ids: np.ndarray, strata: Strata | None, seed: int) -> np.ndarray:
    """The position of each row among its client's rows: random, with each stratum spread evenly.

    So any contiguous part of a client's rows contains each stratum in proportion, as far as possible. A
    client's arrangement does not depend on other clients.
    """
    code, salt = strata or (0, np.zeros(1, np.uint32))
    kinds = len(salt)
    group = _narrow(owner.astype(np.int64) * kinds + code, len(ids) * kinds)
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(ids)))
    out = np.empty(len(owner), np.int64)

    def fill(some: slice) -> None:
        """Arranges the rows of some clients, at these positions of `order`."""
        rows = order[some]
        own = group[rows].astype(np.int64)
        first, whose = own[0] // kinds, own // kinds
        edges = np.concatenate([[0], np.flatnonzero(np.diff(own)) + 1, [len(rows)]])
        size, which = np.diff(edges), own[edges[:-1]]
        rank = np.arange(len(rows)) - np.repeat(edges[:-1], size)
        random = draws(seed, np.repeat(ids[which // kinds] ^ salt[which % kinds], size), rank)
        within = whose[-1] - first + 1
        shuffled = np.lexsort((random.astype(np.uint16), _narrow(own - first * kinds, within * kinds)))
        if strata is not None:
            # Row k of a stratum's n rows belongs at the fraction (k + 1/2)/n; ties between strata are random.
            chance = (random >> np.uint64(16)).astype(np.uint16) / 2**18 + 3 / 8
            way = ((rank + chance) / np.repeat(size, size) * 2**16).astype(np.uint16)
            shuffled = shuffled[np.lexsort((way, _narrow(whose - first, within)))]
        count = np.bincount(whose - first)
        out[rows[shuffled]] = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)

    on_all_cores(fill, _shares(ends))
    return out


def _shares(ends: np.ndarray) -> Iterator[slice]:
    """All positions, in slices of whole clients that are small enough to sort in the processor's cache."""
    start = 0
    while start < ends[-1]:
        far = np.searchsorted(ends, start + BLOCK, "right") - 1
        end = int(max(ends[max(far, 0)], ends[np.searchsorted(ends, start, "right")]))
        yield slice(start, end)
        start = end


def _narrow(values: np.ndarray, kinds: int) -> np.ndarray:
    """Values below `kinds`, in 16 bits if possible: NumPy sorts these in linear time."""
    return values.astype(np.uint16) if kinds <= 2**16 else values


def _refuse_too_large(rows: Rows, height: int, schema: Schema) -> None:
    """Raises an error if the numbers do not fit into the machine's memory."""
    needed = 4 * height * schema.features
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(
            f"{height:,} rows of {schema.features:,} numbers need {needed / 2**30:.0f} GiB, but this machine "
            f"has {there / 2**30:.0f}; leave columns out with --drop, those with many categories first, or "
            "train from the folder that 'pfedme data convert' makes."
        )
