"""Rows to predict that have values the model was not trained on: how they are encoded and counted."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import polars as pl

from pfedme.data.schema import Schema, coded, listed


@dataclasses.dataclass
class Gaps:
    """Number of rows that lack a value, or have a category that no training row has, by column.

    >>> from pfedme.data.schema import Column
    >>> columns = (Column("age", "number", 50.0, 10.0), Column("sex", "category", categories=("f", "m")))
    >>> schema = Schema(columns, label="outcome", client=None, task="classification", labels=("no", "yes"))
    >>> gaps = Gaps()
    >>> gaps.encode(schema, pl.DataFrame({"age": [None, 60], "sex": ["m", "x"]}), "new.csv")
    array([[0., 0., 1.],
           [1., 0., 0.]], dtype=float32)
    >>> print(gaps.sentence("new.csv"))
    2 of 2 rows of new.csv have values that the model was not trained on: missing in 'age' (1 row), taken as \
the training rows' mean; a new category in 'sex' (1 row, such as 'x'), taken as none of the known ones.
    """

    rows: int = 0
    """Rows that were encoded."""
    affected: int = 0
    """Rows that have at least one such value."""
    numbers: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows without a number, by column."""
    categories: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows without a category, by column."""
    unseen: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows with a category that no training row has, by column."""
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    """An example of such a category, by column."""

    def encode(
        self, schema: Schema, frame: pl.DataFrame | np.ndarray, where: str, first_row: int = 1
    ) -> np.ndarray:
        """The rows as `Schema.encode` encodes them; a missing number becomes the mean, and a category that is
        missing or unknown becomes zeros."""
        filling = dataclasses.replace(schema, impute=True)
        x = filling.encode(frame, where, first_row=first_row, fitting=True)
        affected = np.zeros(len(x), bool)
        for column in schema.columns:
            own = x[:, schema.starts[column.name] :][:, : column.features]
            if column.kind == "category":
                gone = np.asarray(~own.any(axis=1))
                if gone.any():
                    assert isinstance(frame, pl.DataFrame)
                    self._count_categories(column.name, frame[column.name].filter(pl.Series(gone)))
            else:
                # If training rows were imputed, a number may be missing.
                gone = np.asarray(np.isnan(own).any(axis=1) & (not schema.impute))
                self.numbers[column.name] += int(gone.sum())
            affected |= gone
        x[np.isnan(x)] = 0
        self.rows += len(x)
        self.affected += int(affected.sum())
        return x

    def _count_categories(self, name: str, values: pl.Series) -> None:
        """Counts values that became zeros: missing ones, and unknown categories."""
        code, names = coded(values)
        unseen = int((code >= 0).sum())
        self.unseen[name] += unseen
        self.categories[name] += len(values) - unseen
        if unseen:
            self.examples.setdefault(name, names[code[code >= 0][0]])

    def sentence(self, where: str) -> str:
        """A sentence about what was found in the rows `where`; empty if nothing was found."""

        def told(counts: Counter[str]) -> list[str]:
            return [
                f"'{name}' ({n:,} row{'s' if n > 1 else ''}"
                + (f", such as '{self.examples[name]}')" if counts is self.unseen else ")")
                for name, n in counts.items()
                if n
            ]

        parts = [
            f"{what} in {listed(columns, quote=False)}, taken as {taken}"
            for what, columns, taken in (
                ("missing", told(self.numbers), "the training rows' mean"),
                ("missing", told(self.categories), "no category"),
                ("a new category", told(self.unseen), "none of the known ones"),
            )
            if columns
        ]
        if not parts:
            return ""
        return (
            f"{self.affected:,} of {self.rows:,} rows of {where} have values that the model was not trained "
            f"on: {'; '.join(parts)}."
        )
