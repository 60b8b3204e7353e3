"""A lower bound on ε from one run with canaries (Steinke, Nasr and Jagielski, 2023).

Each of m canaries is included by a fair coin S_i ∈ {−1, 1}. An auditor who sees the result guesses some of
the coins, T_i ∈ {−1, 0, 1} (0: no guess), r in all. If the run is (ε, δ)-DP in each canary, the number V of
correct guesses is nearly dominated by r independent coins that are right with probability q = e^ε/(1 + e^ε):

    P[V ≥ v | T] ≤ f(v) + 2 m δ max_{1 ≤ i ≤ v} (f(v − i) − f(v)) / i,    f(v) = P[Binomial(r, q) ≥ v].

All ε for which the right side is below the level are refuted. This holds however the canaries influence each
other, and whatever the auditor does, as long as r does not depend on the coins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import expit
from scipy.stats import binom

LEVEL = 0.05
"""The probability with which a bound may exceed the truth."""
SHARES = (0.02, 0.05, 0.1, 0.25, 1.0)
"""The shares of the canaries that are guessed, fixed in advance; each has an equal part of the level."""
MOST = 60.0
"""The largest ε that is looked for: no number of canaries that fits into a run can show more."""


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of v or more correct guesses of r, with m canaries, under
    (ε, δ)-DP.

    >>> round(p_value(10, 10, 10, 0.0, 0.0) * 2**10, 9)
    1.0
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} correct of {r} guesses about {m} canaries is impossible")
    q = expit(epsilon)
    right = binom.sf(v - 1, r, q)
    if not delta or not v:
        return float(min(1.0, right))
    i = np.arange(1, v + 1)
    lost = np.cumsum(binom.pmf(v - i, r, q)) / i
    return float(min(1.0, right + 2 * m * delta * lost.max()))


def lower_bound(m: int, r: int, v: int, delta: float, level: float = LEVEL) -> float:
    """The largest ε that v correct guesses of r refute at this level; 0 if they refute none.

    With δ = 0 and all guesses right it solves q^r = level:

    >>> round(lower_bound(100, 100, 100, 0.0), 6) == round(float(np.log(1 / (0.05**-0.01 - 1))), 6)
    True
    """
    low, high = 0.0, MOST
    if r == 0 or p_value(m, r, v, 0.0, delta) > level:
        return 0.0
    # p_value rises with ε: it is at most the level at `low`, above it at `high`.
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(m, r, v, middle, delta) <= level else (low, middle)
    return low


class Bound(NamedTuple):
    """What one run shows about ε."""

    epsilon: float
    """A lower bound that holds with probability 1 − level."""
    canaries: int
    guesses: int
    """Of the share of guesses that gives the best bound."""
    correct: int
    delta: float
    level: float


def bound(
    scores: np.ndarray, included: np.ndarray, delta: float, level: float = LEVEL,
    shares: tuple[float, ...] = SHARES,
) -> Bound:  # fmt: skip
    """The lower bound on ε from canaries' scores, which are larger if a canary was included.

    The auditor guesses that the r/2 largest scores belong to canaries that were included and the r/2 smallest
    to canaries that were not, for each of several r, and each r has an equal part of the level.
    """
    m, order = len(scores), np.argsort(scores, kind="stable")
    found = []
    for share in shares:
        half = max(1, round(share * m / 2)) if m > 1 else 0
        right = int(included[order[m - half :]].sum() + (~included[order[:half]]).sum())
        epsilon = lower_bound(m, 2 * half, right, delta, level / len(shares))
        found.append(Bound(epsilon, m, 2 * half, right, delta, level))
    return max(found, key=lambda one: (one.epsilon, one.guesses))
