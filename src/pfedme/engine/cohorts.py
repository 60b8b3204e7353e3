"""Which clients train in a round, and which are evaluated."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pfedme.core.noise import threefry, words_of
from pfedme.errors import InputError

COINS = 2**32 - 5
"""Folded into the key of the seed for the coins of clients; larger than any round."""


def check_cohort(cohort: int, clients: int) -> None:
    """Raises an error if a cohort of this size cannot be drawn."""
    if not 1 <= cohort <= clients:
        raise InputError(
            f"A cohort of {cohort} cannot be drawn from {clients} clients; choose --cohort between 1 and "
            f"{clients}."
        )


def evaluated_clients(total: int, clients: int, seed: int) -> np.ndarray:
    """Which of `total` clients are evaluated."""
    if clients == total:
        return np.arange(clients)
    return np.sort(np.random.default_rng([seed, 2**32]).choice(total, clients, replace=False))


def draw_cohort(by_id: np.ndarray, cohort: int, seed: int, t: int) -> np.ndarray:
    """The clients of round t, of those in `by_id`, drawn uniformly without replacement, in the same order."""
    rng = np.random.default_rng([seed, t])
    return by_id[np.sort(rng.choice(len(by_id), cohort, replace=False))]


def draw_poisson(by_id: np.ndarray, ids: np.ndarray, rate: float, seed: int, t: int) -> np.ndarray:
    """The clients of round t, of those in `by_id`, in the same order: each with a probability of `rate`,
    rounded down to a multiple of 2⁻⁶⁴, independently of the others.

    A client's coin is a function of (seed, round, id), so it does not depend on who else there is.

    >>> everyone, ids = np.arange(4), np.array([7, 3, 9, 5], np.uint32)
    >>> draw_poisson(everyone, ids, 1.0, 0, 0), draw_poisson(everyone, ids, 0.0, 0, 0)
    (array([0, 1, 2, 3]), array([], dtype=int64))
    """
    if rate >= 1:
        return by_id
    high, low = (np.asarray(part, np.uint64) for part in _coins(seed, t, np.asarray(ids, np.uint32)[by_id]))
    return by_id[(high << np.uint64(32) | low) < np.uint64(int(rate * 2.0**64))]


@jax.jit
def _coins(seed: Any, t: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random words for each client."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), COINS), t)
    return threefry(words_of(key), ids, 0)
