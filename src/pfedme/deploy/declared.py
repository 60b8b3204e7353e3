"""What a client tells about its table from a file that its owner has written, instead of from its rows.

    rows = 1000
    classes = ["no", "yes"]
    numbers.age = {mean = 50, deviation = 20}
    categories.ward = ["a", "b"]

Nothing in it is computed from rows, so that it reveals nothing about them that its owner has not decided to
publish. The columns must be those of the table.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedme.data.fitting import Moments, Told
from pfedme.data.schema import listed
from pfedme.errors import InputError

KEYS = ("rows", "classes", "quantity", "numbers", "categories")
ROWS = 1000
"""The weight of the file in the scaling that clients agree on, as a number of rows."""


def declared(path: Path, own: Told) -> Told:
    """What the file says about a table whose rows say `own`."""
    try:
        words = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    if foreign := [key for key in words if key not in KEYS]:
        raise InputError(f"{path} has '{foreign[0]}'; it may have {', '.join(KEYS)}.")
    rows = words.get("rows", ROWS)
    if type(rows) is not int or rows < 1:
        raise InputError(f"{path}: rows must be a whole number of at least 1, not {rows!r}.")
    numbers, categories = words.get("numbers", {}), words.get("categories", {})
    for kind, said, needed in (
        ("numbers", numbers, own.numbers),
        ("categories", categories, own.categories),
    ):
        if not isinstance(said, dict) or set(said) != set(needed):
            raise InputError(
                f"{path}: [{kind}] must have the columns {listed(list(needed)) or '(none)'}, which the "
                f"table has. Leave columns out with --drop."
            )
    return dataclasses.replace(
        own,
        numbers={name: _moments(path, f"numbers.{name}", numbers[name], rows) for name in own.numbers},
        categories={name: _texts(path, f"categories.{name}", categories[name]) for name in own.categories},
        classes=_classes(path, words, own),
        quantity=_moments(path, "quantity", words.get("quantity"), rows)
        if own.task == "regression"
        else None,
    )


def _classes(path: Path, words: Mapping[str, Any], own: Told) -> tuple[str, ...]:
    if own.task == "regression":
        return ()
    found = _texts(path, "classes", words.get("classes"))
    if lacking := sorted(set(own.classes) - set(found)):
        raise InputError(f"{path}: classes lacks '{lacking[0]}', which occurs in the table.")
    return found


def _texts(path: Path, where: str, said: Any) -> tuple[str, ...]:
    if not isinstance(said, list) or not said or not all(isinstance(text, str) for text in said):
        raise InputError(f'{path}: {where} must be a list of texts, such as ["a", "b"].')
    return tuple(sorted(set(said)))


def _moments(path: Path, where: str, said: Any, rows: int) -> Moments:
    try:
        mean, deviation = (float(said[key]) for key in ("mean", "deviation"))
        if set(said) != {"mean", "deviation"} or not (math.isfinite(mean) and 0 < deviation < math.inf):
            raise ValueError("impossible")
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: {where} must be such as {{mean = 50, deviation = 20}}.") from None
    return Moments(rows, mean, deviation**2)
