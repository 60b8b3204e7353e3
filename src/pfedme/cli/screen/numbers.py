"""Numbers as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfedme.engine.measure import Measure, measure_of
from pfedme.report import tables


def accuracies(entry: dict[str, Any], kinds: Sequence[str] = tables.KINDS) -> str:
    """`global 78.65 %  personal 83.20 %`, or `global R² 0.7865  personal R² 0.8320`."""
    what = measure_of(entry)
    shown = [
        f"{kind} {what.pattern.format(what.text(value))}"
        for kind in kinds
        if kind in entry and (value := what.of(entry[kind])) is not None
    ]
    return "  ".join(shown)


def with_half_width(what: Measure, value: float | None, half: float | None) -> str:
    """`83.21 ± 0.40`, from a number in displayed units and a half-width in recorded units."""
    if value is None or half is None:
        return what.text(value)
    return f"{what.text(value)} ± {scaled(what, half)}"


def scaled(what: Measure, value: float | None) -> str:
    """A recorded number as tables show it."""
    return what.text(None if value is None else what.scale * value)


def percent(value: float | None) -> str:
    """A share in percent, with two decimals."""
    return "–" if value is None else f"{100 * value:.2f}"


def decimal(value: float | None) -> str:
    """A number with four decimals."""
    return "–" if value is None else f"{value:.4f}"


def measured(value: float | None) -> str:
    """A number of any size in the units of the data."""
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
