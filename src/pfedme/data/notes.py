"""What looks wrong in a readable table: identifiers, copies of the label, outliers, ...

Every check first looks at distinct texts, at the extremes of a column or at a sample of rows, so that large
clean tables cost next to nothing.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from pfedme.data.federation import Federation
from pfedme.data.rows import Rows
from pfedme.data.schema import Column, Schema, is_number, listed, shortest

SAMPLE = 2_000
"""Size of the sample that a column is judged by before all rows are examined."""
FEW_ROWS = 20
"""In tables with fewer rows, distinct values mean nothing."""
NEARLY_ALL_DIFFERENT = 0.95
"""The least share of distinct values for which a column is taken for an identifier."""
FAR = 20.0
"""The least distance of an outlier from the median, in robust standard deviations,"""
GAP = 10.0
"""and as a multiple of that of all other values."""
MOST_OUTSIDE = 3
"""The largest number of distinct outliers in a column."""


def notes(federation: Federation, rows: Rows) -> list[str]:
    """What looks wrong in a federation that was read from the rows of a table, most important first."""
    schema = federation.schema
    if schema is None or federation.shape:
        return []
    number = [column for column in schema.numbers if not column.of]
    low, high = _extremes(federation.x, [schema.starts[column.name] for column in number])
    ends = {c.name: (float(a), float(b)) for c, a, b in zip(number, low, high, strict=True)}
    constant = [name for name, (a, b) in ends.items() if a == b]
    constant += [c.name for c in schema.columns if c.kind == "category" and _is_constant(federation, c)]
    varying = [column for column in number if column.name not in constant]
    return [
        *_copies(federation, schema, constant),
        *_identifiers(federation, schema, rows, varying),
        *_outside(federation, schema, varying, ends),
        *_look_alikes(federation, schema, rows),
        *(f"Column '{name}' is the same in every row, and therefore useless." for name in constant),
    ]


def _extremes(x: np.ndarray, places: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of some features."""
    if not places:
        return np.zeros(0), np.zeros(0)
    step = max(1, 2**20 // x.shape[1])
    ends = [(own.min(axis=0), own.max(axis=0)) for own in (x[k : k + step] for k in range(0, len(x), step))]
    low, high = (np.stack(values) for values in zip(*ends, strict=True))
    return low.min(axis=0)[places], high.max(axis=0)[places]


def _is_constant(federation: Federation, column: Column) -> bool:
    assert federation.schema is not None
    return column.features == 1 and bool(_values(federation, federation.schema, column).all())


def _values(federation: Federation, schema: Schema, column: Column) -> np.ndarray:
    """The first feature of a column in all rows."""
    return federation.x[:, schema.starts[column.name]]


def _raw(column: Column, value: float) -> str:
    """A standardised value in its original units, up to single-precision rounding."""
    digits = 4 - int(np.floor(np.log10(column.scale)))
    return f"{round(column.mean + column.scale * float(value), digits) + 0.0:,.6g}"


def _drop(name: str) -> str:
    return f"--drop {shlex.quote(name)}"


def _copies(federation: Federation, schema: Schema, constant: Sequence[str]) -> Iterator[str]:
    """Notes on columns that determine the label and are determined by it."""
    f = federation
    some = _some(len(f.y))
    for column in schema.columns:
        if column.of or column.name in constant:
            continue
        at = schema.starts[column.name]
        if schema.task == "regression":
            same = column.kind == "number" and _proportional(f.x[some, at], f.y[some])
            same = same and _proportional(f.x[:, at], f.y)
        else:
            same = _one_to_one(f.x[some, at : at + column.features], f.y[some])
            same = same and _one_to_one(f.x[:, at : at + column.features], f.y)
        if same:
            yield (
                f"Column '{column.name}' determines the label '{schema.label}' exactly, as a copy would; if "
                f"it is not known beforehand, leave it out with {_drop(column.name)}."
            )


def _some(n: int) -> np.ndarray:
    """A sample of n rows, evenly spaced."""
    return np.unique(np.linspace(0, n - 1, min(n, SAMPLE)).astype(np.int64))


def _proportional(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether x is a linear function of y, up to rounding."""
    x, y = (v - v.mean(dtype=np.float64) for v in (x, y))
    size = float(np.sqrt((x @ x) * (y @ y)))
    return len(x) > 2 and size > 0 and abs(float(x @ y)) > (1 - 1e-9) * size


def _one_to_one(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether values, each a number or one-hot, correspond to the labels one to one."""
    value = x[:, 0] if x.shape[1] == 1 else np.where(x.any(axis=1), x.argmax(axis=1), -1)
    different, code = np.unique(value, return_inverse=True)
    labels, own = np.unique(y, return_inverse=True)
    if len(different) != len(labels) or len(labels) < 2:
        return False
    return len(np.unique(code * len(labels) + own)) == len(labels)


def _identifiers(
    federation: Federation, schema: Schema, rows: Rows, numbers: Sequence[Column]
) -> Iterator[str]:
    """Notes on columns whose values are all distinct, or nearly so."""
    f, n = federation, len(federation.y)
    if n < FEW_ROWS:
        return
    for column in numbers:
        if column.form.date or not all(p.types[column.name].is_integer() for p in rows.parts):
            continue
        value = _values(f, schema, column)
        sample = value[_some(n)]
        if len(np.unique(sample)) < NEARLY_ALL_DIFFERENT * len(sample):
            continue
        different = np.unique(value)
        span = float(different[-1] - different[0]) * column.scale + 1
        if len(different) == n and abs(span - n) < 0.5:
            yield (
                f"Column '{column.name}' numbers the rows from {_raw(column, different[0])} to "
                f"{_raw(column, different[-1])}, like an index; leave it out with {_drop(column.name)}."
            )
        elif len(different) == n and (_is_called_id(column.name) or _never_meet(sample, column, n)):
            yield (
                f"Column '{column.name}' has {len(different):,} different whole numbers in {n:,} rows, like "
                f"an identifier; if it is one, leave it out with {_drop(column.name)}."
            )
    for name, texts in rows.texts.items():
        column = next((c for c in schema.columns if c.name == name), None)
        if column is not None and column.kind == "category" and len(texts.names) >= NEARLY_ALL_DIFFERENT * n:
            yield (
                f"Column '{name}' has {len(texts.names):,} different values in {n:,} rows, like an "
                f"identifier; leave it out with {_drop(name)}."
            )


def _is_called_id(name: str) -> bool:
    """Whether a column has the name of an identifier.

    >>> [name for name in ("patient_id", "CaseNr", "MRN", "paid", "age") if _is_called_id(name)]
    ['patient_id', 'CaseNr', 'MRN']
    """
    return (
        re.search(r"(?:^|[_\W])(?:id|nr|no|key|uuid|mrn|number|index)$|[a-z](?:ID|Id|Nr|No)$|^MRN$", name)
        is not None
    )


def _never_meet(sample: np.ndarray, column: Column, n: int) -> bool:
    """Whether some of n whole numbers should be equal if they were measurements: whether at least five equal
    pairs are expected among numbers with the spread of the sample."""
    low, high = np.quantile(sample, [0.25, 0.75])
    width = 2 * float(high - low) * column.scale
    return n**2 / 2 > 5 * width


def _outside(
    federation: Federation,
    schema: Schema,
    numbers: Sequence[Column],
    ends: dict[str, tuple[float, float]],
) -> Iterator[str]:
    """Notes on outliers."""
    some = _some(len(federation.y))
    for column in numbers:
        value = _values(federation, schema, column)
        sample = value[some].astype(np.float64)
        middle = float(np.median(sample))
        away = np.abs(sample - middle)
        # If more than half of the values are equal, the others show what is usual.
        usual = 1.4826 * float(np.median(away) or np.median(away[away > 0] if away.any() else [0.0]))
        low, high = ends[column.name]
        if not usual or max(high - middle, middle - low) < FAR * usual:
            continue
        distance = np.unique(np.abs(value.astype(np.float64) - middle))[::-1][: MOST_OUTSIDE + 1]
        gaps = np.flatnonzero(distance[:-1] >= GAP * np.maximum(distance[1:], usual))
        if len(gaps) and distance[gaps[-1]] >= FAR * usual:
            far = np.abs(value - middle) >= distance[gaps[-1]] * (1 - 1e-6)
            outside, inside = np.unique(value[far]), value[~far]
            values = listed([_raw(column, v) for v in outside], quote=False)
            n, low, high = int(far.sum()), _raw(column, inside.min()), _raw(column, inside.max())
            yield (
                f"Column '{column.name}' is {values} in {n:,} row{'s' if n > 1 else ''}, far from the rest, "
                f"which is {low} to {high}; if it is a mistake or stands for a missing value, correct it or "
                "use --na."
            )


def _look_alikes(federation: Federation, schema: Schema, rows: Rows) -> Iterator[str]:
    """Notes on names that may be intended to be the same: clients, labels, categories."""
    named: dict[str, Sequence[str]] = {f"Column '{rows.client_column}', the client,": federation.names or ()}
    named[f"The label '{schema.label}'"] = schema.labels
    named |= {f"Column '{c.name}'": c.categories for c in schema.columns if c.kind == "category"}
    for what, names in named.items():
        groups = defaultdict[str, list[str]](list)
        for name in names:
            groups[_plain(name)].append(name)
        if alike := [group for group in groups.values() if len(group) > 1]:
            pairs = "; ".join(" and ".join(f"'{name}'" for name in group[:3]) for group in alike[:3])
            yield f"{what} has {pairs}, which count as different; if they mean the same, write them alike."


def _plain(name: str) -> str:
    """A name without capitals, blanks and leading zeros.

    >>> _plain("007") == _plain("7"), _plain("New  York") == _plain("new-york"), _plain("a") == _plain("b")
    (True, True, False)
    """
    if is_number(name):
        return shortest(name)
    return "".join(char for char in name.casefold() if not char.isspace() and char not in "-_")
