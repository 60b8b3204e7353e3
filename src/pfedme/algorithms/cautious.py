"""Step sizes for rows that nobody has looked at."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from pfedme.algorithms.base import Algorithm, rounded_down

A = TypeVar("A", bound=Algorithm)

UNSEEN_CURVATURE = 100.0
"""The assumed L if no step size is given: well above that of most standardised tables."""
LARGEST_STEP = 1.0
"""The largest η, α, ηλ and αλ/2 that a client accepts unless its owner says otherwise."""


def with_cautious_steps(algorithm: A) -> A:
    """The algorithm with step sizes for those that are not given: small enough for tables that the server
    does not see, and for clients with default limits."""
    found = algorithm.with_steps(UNSEEN_CURVATURE)
    lam = getattr(algorithm, "lam", 0.0)
    limits = {"eta": LARGEST_STEP / max(1.0, lam), "alpha": LARGEST_STEP / max(1.0, lam / 2)}
    too_large = {
        name: limit
        for name, limit in limits.items()
        if name in algorithm.steps and not getattr(algorithm, name) and getattr(found, name) > limit
    }
    return dataclasses.replace(
        found, **{name: min(limit, rounded_down(limit)) for name, limit in too_large.items()}
    )
