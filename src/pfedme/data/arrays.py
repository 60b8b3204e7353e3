"""Tables as arrays: an NPZ file with x (a row or an image for each sample), y and client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from pfedme.data.reading import HEAD, Part, Types, read_as, rows_of_a_piece, short, shown
from pfedme.data.schema import listed
from pfedme.errors import InputError


def open_arrays(path: Path, suffix: str = "") -> Part:
    """The arrays x, y and client; with the suffix `_test`, x_test, y_test and client_test."""
    arrays = _read(path, suffix)
    x = _checked(arrays, suffix, shown(path))
    rows = x.reshape(len(x), -1)
    columns = {name: pl.Series(name, array) for name, array in arrays.items() if name != "x"}
    places = {f"x{k}": k for k in range(rows.shape[1])}

    def frame(types: Types) -> pl.DataFrame:
        own = [columns[n] if n in columns else pl.Series(n, rows[:, places[n]]) for n in types]
        return pl.DataFrame(own).select(read_as(name, types[name]) for name in types)

    def pieces(types: Types) -> Iterator[np.ndarray]:
        step = rows_of_a_piece(len(types))
        for at in range(0, len(rows), step):
            yield rows[at : at + step].astype(np.float64)

    def head(_: Types) -> np.ndarray:
        return rows[:HEAD].astype(np.float64)

    types: Types = {name: series.dtype for name, series in columns.items()}
    types |= {name: pl.Float64() for name in places}
    return Part(path, types, frame, pieces, head, x.shape[1:] if x.ndim > 2 else ())


def has_test(path: Path) -> bool:
    """Whether an NPZ file also contains test rows."""
    return "x_test" in _names(path)


def _names(path: Path) -> list[str]:
    return list(_load(path, []))


def _read(path: Path, suffix: str) -> dict[str, np.ndarray]:
    names = [name for name in _names(path) if name.endswith("_test") == bool(suffix)]
    arrays = _load(path, names)
    return {name.removesuffix(suffix): arrays[name] for name in names}


def _load(path: Path, wanted: list[str]) -> dict[str, np.ndarray]:
    """The names of all arrays in a file, with the contents of those that are wanted."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) if name in wanted else np.empty(0) for name in file.files}
    except Exception as error:
        # A damaged archive makes zipfile and NumPy raise almost anything.
        raise InputError(
            f"{shown(path)} is not a complete NPZ file of plain arrays ({short(str(error))}); write it again "
            "with numpy.savez."
        ) from None


def _checked(arrays: dict[str, np.ndarray], suffix: str, where: str) -> np.ndarray:
    """x, after a check that the arrays fit together."""
    x = arrays.get("x")
    if x is None:
        raise InputError(f"{where} has no array 'x{suffix}'; it holds {listed(sorted(arrays))}.")
    if x.ndim < 2 or x.dtype.kind not in "fiub" or x.size == 0:
        raise InputError(
            f"x{suffix} in {where} must contain numbers, a row or an image for each sample; it is {x.dtype} "
            f"of shape {_shape(x)}."
        )
    for name, array in arrays.items():
        if name != "x" and (array.shape != (len(x),) or array.dtype.kind not in "fiubU"):
            raise InputError(
                f"{name}{suffix} in {where} must have a number or a string for each of the {len(x)} rows of "
                f"x{suffix}; it is {array.dtype} of shape {_shape(array)}."
            )
    return x


def _shape(array: np.ndarray) -> str:
    return "×".join(map(str, array.shape)) or "()"
