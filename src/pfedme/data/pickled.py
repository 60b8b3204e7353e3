"""Pickled pandas frames, read without pandas.

A pickle can only name what is allowed below: types of NumPy, and functions of this module that stand in for
those of pandas.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import polars as pl


class Frame:
    """Stands in for a pandas frame, whose blocks hold columns of the same type."""

    blocks: tuple[tuple[np.ndarray, Any], ...]
    names: np.ndarray

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.blocks, (columns, _) = state["_mgr"]
        self.names = columns["data"]

    def columns(self) -> pl.DataFrame:
        """The frame; NaN is a missing value, in text too."""
        found = {}
        for values, place in self.blocks:
            for name, own in zip(self.names[place], values, strict=True):
                missing = own != own  # only NaN differs from itself
                found[name] = [None if gone else v for v, gone in zip(own.tolist(), missing, strict=True)]
        return pl.DataFrame({name: found[name] for name in self.names})


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "slice"): slice,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy.core.multiarray", "_reconstruct"): lambda _, shape, dtype: np.ndarray(shape, dtype),
    ("numpy.core.numeric", "_frombuffer"): lambda raw, dtype, shape, order: np.frombuffer(raw, dtype).reshape(
        shape, order=order
    ),
    ("pandas._libs.internals", "_unpickle_block"): lambda values, place, _: (values, place),
    ("pandas.core.frame", "DataFrame"): Frame,
    ("pandas.core.indexes.base", "Index"): None,
    ("pandas.core.indexes.base", "_new_Index"): lambda _, content: content,
    ("pandas.core.indexes.range", "RangeIndex"): None,
    ("pandas.core.internals.managers", "BlockManager"): lambda blocks, axes: (blocks, axes),
}
"""What a pickle may name, and what that is here."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for, if it is allowed."""
        module = module.replace("numpy._core", "numpy.core")  # its name since NumPy 2
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"a data frame needs no {module}.{name}")
        return ALLOWED[module, name]


def unpickled(raw: bytes) -> pl.DataFrame:
    """The frame in a pickle."""
    made = _Unpickler(io.BytesIO(raw)).load()
    if not isinstance(made, Frame):
        raise pickle.UnpicklingError("the pickle contains no data frame")
    return made.columns()
