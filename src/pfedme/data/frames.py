"""Tables in memory: polars or pandas frames, and anything else that maps names to columns."""

from __future__ import annotations

import hashlib
from typing import Any

import polars as pl

from pfedme.errors import InputError


class Held:
    """A frame that compares equal to another with the same content."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.frame = frame
        content = hashlib.sha256(repr(list(frame.schema.items())).encode())
        for series in frame:
            content.update(series.hash(seed=0).to_numpy().tobytes())
        self.sha256 = content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"Held({self.sha256[:12]})"


def as_frame(rows: Any, what: str = "The rows") -> pl.DataFrame:
    """A polars frame of anything that maps names to columns; error messages call it `what`.

    >>> as_frame({"age": [3, None]}).shape
    (2, 1)
    """
    if isinstance(rows, pl.DataFrame):
        return rows
    if isinstance(rows, pl.LazyFrame):
        return rows.collect()
    try:
        if hasattr(rows, "isna"):  # pandas, which is not a dependency
            rows = {
                str(name): [
                    None if gone else value for value, gone in zip(rows[name], rows[name].isna(), strict=True)
                ]
                for name in rows.columns
            }
        return pl.DataFrame(rows, strict=False)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{what} are not a frame: {str(error).splitlines()[0]}") from None
