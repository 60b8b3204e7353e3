"""The parts of a measurement of a claim: numbers with intervals, and exponents fitted to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pfedme.experiments.finding import Finding

SLACK = 0.1
"""How much a fitted exponent may differ from the paper's and still count as the same."""


class Row(NamedTuple):
    """A measured number: mean and interval over repetitions, with the paper's bound (NaN for none)."""

    claim: str
    quantity: str
    x: float
    value: float
    low: float
    high: float
    bound: float


@dataclasses.dataclass(frozen=True)
class Measured(Finding):
    """A finding with the numbers behind it."""

    rows: tuple[Row, ...]


class Size(NamedTuple):
    """How many measurements are made."""

    draws: int
    """Mini-batches for an expectation at a fixed w."""
    pairs: int
    batches: tuple[int, ...]
    tolerances: tuple[float, ...]
    repetitions: int
    """Runs for an expectation over runs with noise."""
    cohorts: int
    """Runs for an expectation over cohorts only."""
    rounds: tuple[int, ...]
    long: tuple[int, ...]
    """Rounds T of runs with the theorems' own, tiny steps."""
    settling: int
    """Rounds of the run that settles to the floor."""
    resting: int
    """Rounds of runs around the floor."""
    local: tuple[int, ...]
    """Local rounds R of runs without noise."""
    noisy_local: tuple[int, ...]
    """Local rounds R of runs with noise."""


FULL = Size(
    draws=2000, pairs=400, batches=(1, 4, 16, 64, 256), tolerances=(1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    repetitions=16, cohorts=128, rounds=(128, 256, 512, 1024), long=(4096, 8192, 16384, 32768, 65536),
    settling=2048, resting=512, local=(4, 8, 16, 64), noisy_local=(4, 16),
)  # fmt: skip
QUICK = Size(
    draws=400, pairs=100, batches=(1, 64), tolerances=(1e-4, 1e-2, 1.0),
    repetitions=8, cohorts=24, rounds=(128, 256, 512), long=(4096, 8192, 16384),
    settling=1024, resting=256, local=(4, 16), noisy_local=(),
)  # fmt: skip


class Slope(NamedTuple):
    """A fitted exponent p of y ∝ x^p, with an interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def reaches(self, rate: float) -> bool:
        """Whether y falls as x^rate or faster; the paper's rates are upper bounds."""
        return self.low <= rate + SLACK

    def equals(self, rate: float) -> bool:
        """Whether the interval, widened by `SLACK`, contains the rate."""
        return self.low - SLACK <= rate <= self.high + SLACK


def power(x: Sequence[float], samples: np.ndarray, seed: int = 0) -> Slope:
    """The least-squares exponent of E y ∝ x^p, for samples of y with a row for each x.

    The interval contains 95 % of the exponents of resampled repetitions. Without repetitions it runs from the
    smallest to the largest slope between neighbouring points.

    >>> str(power([1, 2, 4], np.array([[3.0], [12.0], [48.0]])))
    '2.00 [2.00, 2.00]'
    """
    u = np.log(x) - np.mean(np.log(x))

    def fit(means: np.ndarray) -> np.ndarray:
        return u @ np.log(means) / (u @ u)

    repetitions = samples.shape[1]
    if repetitions == 1:
        local = np.diff(np.log(samples[:, 0])) / np.diff(np.log(x))
        return Slope(float(fit(samples[:, 0])), float(local.min()), float(local.max()))
    chosen = np.random.default_rng(seed).integers(0, repetitions, (1000, repetitions))
    low, high = np.quantile(fit(samples[:, chosen].mean(axis=2)), [0.025, 0.975])
    return Slope(float(fit(samples.mean(axis=1))), float(low), float(high))


def series(
    claim: str, quantity: str, x: Sequence[float], samples: np.ndarray, bounds: Sequence[float] | None = None
) -> tuple[Row, ...]:
    """A row for each x: the mean of its samples, plus and minus two standard errors."""
    mean, count = samples.mean(axis=1), samples.shape[1]
    error = 2 * samples.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else 0 * mean
    columns = np.column_stack([x, mean, mean - error, mean + error, bounds or [math.nan] * len(x)])
    return tuple(Row(claim, quantity, *map(float, row)) for row in columns)


class Scan(NamedTuple):
    """Runs in which one parameter varies: the measurements, their bounds, and the paper's rate."""

    name: str
    x: Sequence[float]
    samples: np.ndarray
    bounds: Sequence[float]
    rate: float

    @property
    def slope(self) -> Slope:
        """The exponent."""
        return power(self.x, self.samples)

    @property
    def holds(self) -> bool:
        """Whether the exponent is the paper's or, if the quantity should fall, better."""
        return self.slope.reaches(self.rate) if self.rate < 0 else self.slope.equals(self.rate)

    def rows(self, claim: str) -> tuple[Row, ...]:
        """The rows of the table."""
        return series(claim, self.name, self.x, self.samples, self.bounds)

    def __str__(self) -> str:
        return f"{self.name}: {self.slope} (paper {self.rate:.3g})"
