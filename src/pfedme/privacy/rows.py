"""Differential privacy of rows: the noise that each client needs, and what it is worth.

The unit is one row of one client. Each client clips the gradients of its rows and adds noise itself
(`pfedme.core.private`), so that nobody else has to be trusted, and everything that leaves it, shared and
personal models alike, is covered. Every client has a noise multiplier of its own, because the same batch size
is a larger share of fewer rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import ALGORITHMS, Algorithm, Alone, PFedMe
from pfedme.core.model import Model
from pfedme.core.private import Private, poisson_thresholds
from pfedme.errors import InputError
from pfedme.privacy.accounting import Event, check_delta, check_epsilon, noise_for, spent
from pfedme.privacy.units import Rows

DISTINCT = 24
"""Noise is calibrated for at most this many sampling rates and numbers of steps; those between are rounded
up."""
CUT = 0.01
"""The share of δ for batches that are larger than there is room for."""

NOT_COVERED = (
    "the number of rows of each client",
    "a person with several rows, who is protected less: with k rows, epsilon is up to k times as large",
    "what clients agree on before training: columns, categories, means and deviations without noise",
    "results on test rows",
    "step sizes and other settings, if they were chosen by looking at rows",
)
"""What ε says nothing about."""


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """The noise of each client, and its ε."""

    spec: Rows
    B: int
    gradients: int
    """K: private gradients on each mini-batch."""
    rows: np.ndarray
    """n_i: training rows of each client."""
    batches: np.ndarray
    """Mini-batches that each client uses in the whole run."""
    rate: np.ndarray
    """q_i: the probability with which a row is in a mini-batch."""
    noise: np.ndarray
    """z_i: the noise multiplier of each client."""
    epsilon: np.ndarray
    """ε_i at δ, over the whole run."""
    most: int
    """M: the largest number of rows that are picked for a mini-batch."""

    @property
    def warning(self) -> str:
        """What to tell before training: nothing."""
        return ""

    def private(self) -> Private:
        """What makes the gradients of all clients private, stacked."""
        clip = np.full(len(self.rows), self.spec.clip, np.float32)
        thresholds = [poisson_thresholds(picks(self.B, int(n)), self.most) for n in self.rows]
        return Private(
            jnp.asarray(clip), jnp.asarray(self.noise, jnp.float32), jnp.asarray(np.stack(thresholds)), self.B
        )

    def event(self, i: int, batches: int | None = None) -> Event:
        """What client i's mini-batches, or the first so many of them, cost; for `accounting.spent`."""
        used = int(self.batches[i]) if batches is None else batches
        return Event.of(float(self.rate[i]), float(self.noise[i]), used, self.gradients)

    def to_json(self) -> dict[str, Any]:
        """What a record says about it."""

        def spread(values: np.ndarray) -> dict[str, float]:
            found = {"min": values.min(), "median": np.median(values), "max": values.max()}
            return {name: float(f"{value:.6g}") for name, value in found.items()}

        return {
            "unit": "rows",
            "relation": "add or remove one row",
            "sampling": f"Poisson, {self.B or 'all'} of a client's rows expected in a mini-batch",
            "accountant": "privacy loss distributions, dp-accounting",
            "simulated": True,
            "epsilon": self.spec.epsilon,
            "delta": self.spec.delta,
            "clip": self.spec.clip,
            "gradients_per_batch": self.gradients,
            "batches": spread(self.batches),
            "noise": spread(self.noise),
            "spent": spread(self.epsilon),
            "clients": {
                "noise": [float(f"{z:.6g}") for z in self.noise],
                "epsilon": [float(f"{e:.6g}") for e in self.epsilon],
            },
            "not_covered": list(NOT_COVERED),
        }


def supported() -> list[str]:
    """The names of the algorithms that can train with differential privacy of rows."""
    return [name for name, cls in ALGORITHMS.items() if cls.accesses is not None]


def with_fixed_choices(algorithm: Algorithm) -> Algorithm:
    """The algorithm without choices that a client would make on validation rows, outside of its budget."""
    if isinstance(algorithm, Alone) and algorithm.l2 == "own":
        return dataclasses.replace(algorithm, l2="model")
    return algorithm


def check_algorithm(algorithm: Algorithm, model: Model | None = None) -> None:
    """Raises an error if the algorithm or the model cannot train with private gradients."""
    if algorithm.accesses is None:
        raise InputError(
            f"Differential privacy of rows (--dp rows) does not cover {algorithm.name}; choose one of "
            f"{', '.join(supported())}."
        )
    if isinstance(algorithm, PFedMe) and algorithm.nu is not None:
        raise InputError(
            f"--nu {algorithm.nu:g} takes as many steps as the rows need, but differential privacy of rows "
            "(--dp rows) needs a fixed number; leave --nu out and give --K."
        )
    if isinstance(algorithm, PFedMe) and algorithm.rechoose:
        raise InputError(
            "--rechoose chooses λ on rows, which the budget of --dp rows does not include; leave it out."
        )
    if algorithm.batches != "random":
        raise InputError(
            "--batches cycled has no random mini-batches, which differential privacy of rows (--dp rows) "
            "needs; leave it out."
        )
    if isinstance(algorithm, Alone) and algorithm.l2 == "own":
        raise InputError(
            "With --dp rows, l2 of 'alone' must be 'model': otherwise clients choose it on validation rows."
        )
    if model is not None and type(model).in_training is not Model.in_training:
        raise InputError(
            f"Differential privacy of rows (--dp rows) does not work with {type(model).__name__}: in "
            "training it mixes the rows of a batch. Choose model mlr, dnn or cnn."
        )


def check_rows(rows: np.ndarray, B: int, delta: float, name: Callable[[int], str]) -> None:
    """Raises an error if a client has fewer rows than a mini-batch, or so few that δ means nothing."""
    least = int(np.argmin(rows))
    n = int(rows[least])
    if n < max(1, B):
        raise InputError(
            f"{name(least)} has {n:,} training rows, fewer than the {B} of a mini-batch, which --dp rows "
            f"draws from them; choose --B {max(n, 1)} or less, or leave out clients with few rows."
        )
    largest = int(np.argmax(rows))
    check_delta(delta, int(rows[largest]), name(largest))


def picks(B: int, n: int) -> float:
    """−n log(1 − q) for q = B/n: the mean number of picks of a mini-batch; infinite if it has all rows."""
    return math.inf if B in (0, n) else -n * math.log1p(-B / n)


def rate(B: int, n: int) -> float:
    """The probability with which a row is in a mini-batch, rounded up.

    A pick is one of 2³² numbers, which rows share almost equally: no row has more than 1/n + 2⁻³² of them.
    """
    if B in (0, n):
        return 1.0
    return -math.expm1(-picks(B, n) * (1 / n + 2.0**-32))


def room(B: int, n: int, batches: int, epsilon: float, delta: float) -> int:
    """The number of picks for which there is room: batches · (1 + e^ε) · P(N > M) is at most a share of δ."""
    if B in (0, n):
        return n
    from scipy.stats import poisson  # takes a second, and as much memory as JAX

    allowed = math.log(CUT * delta / max(1, batches)) - np.logaddexp(0, epsilon)
    mean = picks(B, n)
    most = max(B, math.ceil(mean))
    while poisson.logsf(most, mean) > allowed:
        most += 1
    return most


def plan_rows(
    spec: Rows,
    algorithm: Algorithm,
    rows: np.ndarray,
    took_part: np.ndarray,
    answered: np.ndarray,
    *,
    name: Callable[[int], str] = lambda i: f"Client {i}",
    longest: int | None = None,
    watch: Callable[[int, int], None] = lambda *_: None,
) -> RowPlan:
    """The noise with which each client spends at most ε at δ in the whole run.

    Arguments:
        spec: ε, δ and the clipping length.
        algorithm: what is trained.
        rows: n_i, the training rows of each client.
        took_part: in how many rounds each client takes part, including those that only its answers repeat.
        answered: how often each client responds with its models besides.
        name: what errors call a client.
        longest: the largest number of mini-batches of any client, if runs with other cohorts are to share
            a compiled program.
        watch: called with the number of clients done and their total.
    """
    check_epsilon(spec.epsilon)
    check_algorithm(algorithm)
    assert algorithm.accesses is not None
    rows = np.asarray(rows)
    check_rows(rows, algorithm.B, spec.delta, name)
    per_round, per_answer, K = algorithm.accesses.counts(algorithm)
    batches = per_round * np.asarray(took_part) + per_answer * np.asarray(answered)
    rates = np.array([rate(algorithm.B, int(n)) for n in rows])
    delta = (1 - CUT) * spec.delta
    at = _rounded_up(rates), _rounded_up(batches.astype(float))
    noise, epsilon = np.zeros(len(rows)), np.zeros(len(rows))
    for i, (q, steps) in enumerate(zip(*at, strict=True)):
        watch(i, len(rows))
        steps = math.ceil(steps - 1e-9)
        noise[i] = noise_for(spec.epsilon, delta, float(q), steps, K)
        epsilon[i] = spent([Event.of(float(q), noise[i], steps, K)], delta)
    watch(len(rows), len(rows))
    most_batches = longest or int(batches.max())
    most = max(room(algorithm.B, int(n), most_batches, spec.epsilon, spec.delta) for n in np.unique(rows))
    return RowPlan(spec, algorithm.B, K, rows, batches, rates, noise, epsilon, most)


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """The values; if many are different, each rounded up to one of a few."""
    distinct = np.unique(values)
    if len(distinct) <= DISTINCT:
        return values
    low, high = max(distinct[0], 1e-12), distinct[-1]
    edges = np.geomspace(low, high, DISTINCT)
    edges[-1] = high
    return edges[np.minimum(np.searchsorted(edges, values * (1 - 1e-12)), DISTINCT - 1)]


def stacked_like(private: Private, clients: int) -> Private:
    """The same privacy for several clients with equally many rows."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (clients, *a.shape)), private)
