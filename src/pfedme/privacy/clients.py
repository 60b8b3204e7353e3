"""Differential privacy of clients: how much noise the server adds, and what it is worth.

The unit is a client with all its rows. The server draws each cohort at random, clips what its clients send
and adds noise to the sum (`pfedme.core.private_mean`). Clients have to trust it, and what it publishes, the
shared model in every round, is covered. A client's own models are functions of that and of its own rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from pfedme.algorithms import ALGORITHMS, Algorithm, FedBN
from pfedme.algorithms.aggregate import Mean
from pfedme.algorithms.base import Cohort
from pfedme.core.model import Model
from pfedme.core.private_mean import PrivateMean
from pfedme.errors import InputError
from pfedme.privacy.accounting import Event, check_delta, check_epsilon, noise_for, spent
from pfedme.privacy.rows import CUT
from pfedme.privacy.units import ADAPTIVE, Clients

FIRST_CLIP = 0.1
"""The first C if it adapts (Andrew et al., 2021)."""
VOTES = 20
"""σ_b, the noise on the number of uploads that were not clipped, is S divided by this (likewise)."""
DROWNING = 0.5
"""The length of all noise, as a share of the furthest that clients can move the model, above which a run is
unlikely to be of use."""

COVERED = "the shared model of every round, whoever sees it, and what clients make of it for themselves"
NOT_COVERED = (
    "how many clients there are, and how many are expected in a round",
    "what clients agree on before training: columns, categories, means and deviations",
    "what a client's own models reveal, if it hands them out",
    "results of clients, on test and on training rows",
    "step sizes and other settings, if they were chosen by looking at rows",
)
"""What ε says nothing about."""


@dataclasses.dataclass(frozen=True)
class ClientPlan:
    """The noise of the server, and its ε."""

    spec: Clients
    clients: int
    """N: the number of all clients."""
    cohort: int
    """S: the expected number of clients in a round, by which sums are divided."""
    rounds: int
    numbers: int
    """d: how many numbers a client sends."""
    noise: float
    """z: the noise multiplier."""
    epsilon: float
    """ε at δ, over the whole run."""
    most: int
    """M: the largest cohort; of a larger one, some clients are left out."""

    @property
    def rate(self) -> float:
        """q = S/N: the probability with which a client is in a cohort."""
        return self.cohort / self.clients

    def mean(self) -> PrivateMean:
        """What makes the mean of a cohort's uploads private."""
        adapts = self.spec.clip == 0
        return PrivateMean(
            jnp.float32(FIRST_CLIP if adapts else self.spec.clip),
            jnp.float32(beside_votes(self.noise, self.cohort) if adapts else self.noise),
            self.cohort, adapts, jnp.float32(self.cohort / VOTES if adapts else 0),
        )  # fmt: skip

    def event(self, rounds: int | None = None) -> Event:
        """What all rounds, or the first so many of them, cost; for `accounting.spent`."""
        return Event(self.rate, self.noise, self.rounds if rounds is None else rounds)

    @property
    def in_round(self) -> float:
        """z √d/S: the length of the noise in a round, divided by the furthest that S clients can move the
        mean, which is C."""
        z = beside_votes(self.noise, self.cohort) if self.spec.clip == 0 else self.noise
        return z * math.sqrt(self.numbers) / self.cohort

    @property
    def in_all(self) -> float:
        """The same over all rounds, in which noise grows with √T and what clients do with T at most."""
        return self.in_round / math.sqrt(max(1, self.rounds))

    @property
    def warning(self) -> str:
        """What to tell before training, if there is more noise than clients can make up for."""
        if self.in_all <= DROWNING:
            return ""
        return (
            f"Noise drowns the signal: it is {self.in_round:.3g} times as long as the furthest that "
            f"{self.cohort:,} clients can move the model in a round, and {self.in_all:.2g} times over all "
            f"{self.rounds:,} rounds. With the same epsilon and the same share of clients in a round, that "
            f"would be a tenth with {math.ceil(10 * self.clients * self.in_all):,} clients. For fewer, "
            "--dp rows protects single rows."
        )

    def to_json(self) -> dict[str, Any]:
        """What a record says about it."""
        return {
            "unit": "clients",
            "relation": "add or remove one client with all its rows",
            "sampling": sampling(self.clients, self.cohort),
            "accountant": "closed form of the Gaussian mechanism" if self.rate >= 1 else
            "privacy loss distributions, dp-accounting",
            "simulated": True,
            "epsilon": self.spec.epsilon,
            "delta": self.spec.delta,
            "clip": self.spec.clip or ADAPTIVE,
            "clients": self.clients,
            "cohort": self.cohort,
            "largest_cohort": self.most,
            "rounds": self.rounds,
            "noise": float(f"{self.noise:.6g}"),
            "spent": float(f"{self.epsilon:.6g}"),
            "noise_to_signal": {
                "round": float(f"{self.in_round:.3g}"), "all_rounds": float(f"{self.in_all:.3g}")
            },
            "covered": COVERED,
            "not_covered": list(NOT_COVERED),
            **({"warning": self.warning} if self.warning else {}),
        }  # fmt: skip


def sampling(clients: int, cohort: int) -> str:
    """How cohorts are drawn, in words.

    >>> sampling(1000, 100), sampling(10, 10)
    ('Poisson, 100 of 1,000 clients expected in a round', 'none: all 10 clients in every round')
    """
    if cohort == clients:
        return f"none: all {clients:,} clients in every round"
    return f"Poisson, {cohort:,} of {clients:,} clients expected in a round"


def beside_votes(noise: float, cohort: int) -> float:
    """z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2): the noise multiplier of the sum, if C adapts by a noisy number of votes
    of ±1/2, so that both together are a mechanism with noise multiplier z; infinite if that cannot be."""
    if not noise:
        return noise
    left = noise**-2 - (2 * cohort / VOTES) ** -2
    return left**-0.5 if left > 0 else math.inf


def supported() -> list[str]:
    """The names of the algorithms that can train with differential privacy of clients."""
    return [name for name, cls in ALGORITHMS.items() if _is_covered(cls)]


def _is_covered(algorithm: Algorithm | type[Algorithm]) -> bool:
    return algorithm.averages and algorithm.federated


def check_algorithm(algorithm: Algorithm, model: Model | None = None) -> None:
    """Raises an error if the algorithm or the model cannot train with a private mean."""
    if not algorithm.federated:
        raise InputError(
            f"{algorithm.name} has no rounds in which clients send something, which --dp clients could "
            "protect; leave it out."
        )
    if not _is_covered(algorithm):
        raise InputError(
            f"Differential privacy of clients (--dp clients) does not cover {algorithm.name}, whose server "
            f"uses more than the mean of what clients send; choose one of {', '.join(supported())}."
        )
    if algorithm.aggregation == "samples":
        raise InputError(
            "--aggregation samples, the default of some algorithms, weights clients by their rows, which "
            "--dp clients does not cover; use --aggregation uniform."
        )
    if type(algorithm.combine) is not Mean:
        raise InputError(
            f"--combine {algorithm.combine.name} cannot be used with --dp clients, which limits what each "
            "client adds to a mean; leave it out."
        )
    normalised = model is not None and type(model).in_training is not Model.in_training
    if normalised and not isinstance(algorithm, FedBN):
        raise InputError(
            "With --dp clients, noise would make the shared variances of a batch normalisation negative; "
            "choose model mlr, dnn or cnn, or algorithm fedbn, which does not share them."
        )


def room(clients: int, cohort: int, rounds: int, epsilon: float, delta: float) -> int:
    """The largest cohort for which there is room: rounds · (1 + e^ε) · P(N > M) is at most a share of δ.

    >>> room(10, 10, 100, 8.0, 1e-2), room(1000, 100, 100, 8.0, 1e-5)
    (10, 174)
    """
    if cohort == clients:
        return clients
    allowed = math.log(CUT * delta / max(1, rounds)) - np.logaddexp(0, epsilon)
    most = cohort
    while most < clients and binom.logsf(most, clients, cohort / clients) > allowed:
        most += 1
    return most


def plan_clients(
    spec: Clients, algorithm: Algorithm, clients: int, cohort: int, rounds: int, numbers: int
) -> ClientPlan:
    """The noise with which each client's part in the whole run costs at most ε at δ.

    Arguments:
        spec: ε, δ and the clipping length.
        algorithm: what is trained.
        clients: N, the number of all clients.
        cohort: S, the expected number of clients in a round.
        rounds: T.
        numbers: d, how many numbers a client sends.
    """
    check_epsilon(spec.epsilon)
    check_algorithm(algorithm)
    check_delta(spec.delta, clients, "the federation")
    everyone = cohort == clients
    delta = spec.delta if everyone else (1 - CUT) * spec.delta
    noise = noise_for(spec.epsilon, delta, cohort / clients, rounds)
    if spec.clip == 0 and not math.isfinite(beside_votes(noise, cohort)):
        raise InputError(
            f"--dp-clip {ADAPTIVE} needs a noise multiplier below {2 * cohort / VOTES:g}, a tenth of the "
            f"clients in a round, but epsilon {spec.epsilon:g} needs {noise:.3g}; give a length, such as "
            "--dp-clip 1, or a larger --cohort."
        )
    cost = spent([Event(cohort / clients, noise, rounds)], delta)
    most = room(clients, cohort, rounds, spec.epsilon, spec.delta)
    return ClientPlan(spec, clients, cohort, rounds, numbers, noise, cost, most)


def private_step(
    algorithm: Algorithm, mean: PrivateMean, server: Any, uploads: Any, cohort: Cohort, kept: Any
) -> tuple[Any, Any]:
    """What the server keeps after a round, its models and its clipping length.

    The algorithm sees nothing but the private mean, as the upload of a single client, so whatever it does
    with that is covered too.
    """
    found, kept = mean(cohort.key, uploads, cohort.rows > 0, kept)
    single = Cohort(cohort.key, jnp.zeros(1, jnp.int32), jnp.ones(1, cohort.rows.dtype), cohort.total)
    return algorithm.server_update(server, jax.tree.map(lambda a: a[None], found), single), kept
