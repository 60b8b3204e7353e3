"""What models are judged by, and how it is told: accuracy in percent, or R² where labels are numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """What models are judged by, as reports tell it.

    >>> ACCURACY.text(81.234), ACCURACY.told(81.234), ACCURACY.apart(-1.26)
    ('81.23', '81.2 %', '1.3 points')
    >>> R2.text(0.81234), R2.told(0.81234), R2.apart(-0.0126)
    ('0.8123', 'R² 0.812', '0.013')
    """

    key: str
    """Its name in an entry of a record."""
    name: str
    """What a sentence calls it."""
    title: str
    """The head of its column in a table."""
    sign: str
    """What follows the head of another column of such numbers, as in `client mean %`."""
    axis: str
    """What a figure calls it."""
    pattern: str
    """A number of its kind in running text."""
    points: str
    """A difference of two in running text."""
    scale: float
    """What reports multiply the record's number by."""
    digits: int
    """Digits after the point in a table; a sentence has one less."""

    def of(self, entry: Mapping[str, Any]) -> float | None:
        """The number in a model's entry; None if it has none."""
        value = entry[self.key]
        return None if value is None else self.scale * value

    def text(self, value: float | None) -> str:
        """The number in a table; a dash for nothing."""
        return "–" if value is None else f"{value:.{self.digits}f}"

    def told(self, value: float) -> str:
        """The number in a sentence."""
        return self.pattern.format(f"{value:.{self.digits - 1}f}")

    def apart(self, difference: float) -> str:
        """How far two of these numbers are apart, in a sentence."""
        return self.points.format(f"{abs(difference):.{self.digits - 1}f}")

    def level(self, difference: float) -> bool:
        """Whether two numbers that are so far apart would be told as the same."""
        return abs(difference) < 0.5 * 0.1 ** (self.digits - 1)


ACCURACY = Measure(
    key="accuracy", name="accuracy", title="accuracy %", sign="%", axis="test accuracy (%)",
    pattern="{} %", points="{} points", scale=100, digits=2,
)  # fmt: skip
R2 = Measure(
    key="r2", name="R²", title="R²", sign="R²", axis="test R²",
    pattern="R² {}", points="{}", scale=1, digits=4,
)  # fmt: skip


def measure_of(entry: Mapping[str, Any]) -> Measure:
    """What the models in an entry of a record's history are judged by."""
    parts = (part for part in entry.values() if isinstance(part, Mapping))
    return R2 if any(R2.key in part for part in parts) else ACCURACY
