"""Checks of the mechanism itself: whether private gradients are made as the accounting assumes.

A lower bound on ε from a whole run is far below the truth, so a mistake that doubles ε can hide beneath the
claim. These checks look at single private gradients

    g = (1/B) (Σ_{j ∈ D} clip_c(∇ℓ_j(θ)) + N(0, z²c²I))

of the run's own clients instead, where the same mistakes are far outside of what chance explains. z is
calibrated anew from the claimed ε, and not taken from the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.stats import binom, chi2, norm

from pfedme.audits.onerun import Bound, bound
from pfedme.core.models import Network
from pfedme.core.private import Batch, PrivateLoss
from pfedme.core.problem import Problem
from pfedme.core.prox import prox
from pfedme.core.tree import Params, record
from pfedme.engine.exchange import first_model
from pfedme.engine.simulate import Simulation
from pfedme.privacy.accounting import noise_for
from pfedme.privacy.rows import CUT, RowPlan

MOST_CLIENTS = 20
"""Clients that are checked."""
NUMBERS = 20_000
"""Numbers of noise that are looked at for each client, at least."""
DRAWS = 200
"""Mini-batches that are drawn for each client."""
ENORMOUS = 1e4
"""By how much the inputs of rows are multiplied to see whether their gradients are clipped."""
SHORT = 1e-5
"""The size of steps in which gradients hardly change."""
ROWS = 32
"""Rows of each client whose contribution is measured."""
CANARIES = 1000
"""Of all clients together, for which the mechanism is looked at directly."""
LARGEST = 20_000_000
"""The most numbers in the rows of a client with canaries."""
MOST_STEPS = 4000
"""Steps of the canaries' release; a run with more has spent more, so the bound holds for it."""


class Check(NamedTuple):
    """A property that the accounting assumes, and what was measured."""

    name: str
    """What should hold."""
    statistic: str
    """What is measured."""
    value: float
    threshold: float
    above: bool
    """Whether values above the threshold fail; else those below it."""
    level: float
    """The probability with which a correct mechanism fails; 0 if chance plays no part."""
    client: str = ""
    """The client with this value, the most extreme one."""

    @property
    def passed(self) -> bool:
        """Whether it holds; a value that is not a number fails."""
        return self.value <= self.threshold if self.above else self.value >= self.threshold

    def to_json(self) -> dict[str, Any]:
        """The numbers of the document."""
        return {**self._asdict(), "passed": self.passed}


@dataclasses.dataclass(frozen=True)
class Release:
    """What a client's private gradients are made of, and what is claimed about them."""

    problem: Problem
    id: int
    batches: int
    noise: float
    """z, calibrated from the claimed ε."""
    clip: float
    rate: float
    """q, as the accounting assumes it."""
    name: str


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The private gradients of some clients of a run."""

    releases: tuple[Release, ...]
    theta: Params
    B: int
    gradients: int
    """K: private gradients on each mini-batch."""
    key: jax.Array
    seed: int

    @classmethod
    def of(cls, simulation: Simulation, clients: int = MOST_CLIENTS) -> Mechanism:
        """That of a simulation, with the claims of its plan."""
        plan, private, f = simulation.privacy, simulation.private, simulation.federation
        assert isinstance(plan, RowPlan)
        assert private is not None
        who = np.arange(f.clients)
        if len(who) > clients:
            who = np.sort(np.random.default_rng(simulation.seed).choice(who, clients, replace=False))
        found = []
        for i in map(int, who):
            own = jax.tree.map(lambda a, i=i: a[i], private)
            problem = simulation.store.problem(simulation.model, jnp.int32(i), jnp.int32(0), "random", own)
            claims = int(plan.batches[i]), claimed_noise(plan, i), plan.spec.clip, float(plan.rate[i])
            found.append(Release(problem, int(f.ids[i]), *claims, f.name(i)))
        theta = first_model(simulation.model, simulation.seed)
        return cls(tuple(found), theta, plan.B, plan.gradients, simulation.key, simulation.seed)

    def size(self, release: Release) -> float:
        """The fixed number by which a client's sums are divided."""
        return float(self.B or release.problem.count)

    @property
    def repeats(self) -> int:
        """How many gradients have enough numbers."""
        return max(8, -(-NUMBERS // self.theta.ravel().size))

    def keys(self, release: Release, count: int, key: jax.Array | None = None) -> jax.Array:
        """The random keys of a client in the first `count` rounds."""
        key = self.key if key is None else key
        own = jax.vmap(lambda t: jax.random.fold_in(jax.random.fold_in(key, t), release.id))
        return own(jnp.arange(count, dtype=jnp.uint32))

    def noise(self, release: Release, key: jax.Array | None = None) -> np.ndarray:
        """Noise as it comes out, a line for each of many mini-batches, divided by z c/B: differences of two
        uses of a mini-batch, in which nothing but the noise differs, divided by √2."""
        keys = self.keys(release, self.repeats, key)
        unit = math.sqrt(2) * release.noise * release.clip / self.size(release)
        found = _differences(release.problem, self.theta, keys, self.B, self.gradients)
        return np.sqrt(self.gradients) * np.asarray(found, np.float64) / unit


@partial(jax.jit, static_argnames=("B", "K"))
def _differences(problem: Problem, theta: Params, keys: jax.Array, B: int, K: int) -> jax.Array:
    """How two private gradients on the same mini-batch differ, for each key."""

    def difference(key: jax.Array) -> jax.Array:
        loss = problem.loss(problem.draw(key, B))
        first, second = (_gradient(loss.at(k), theta, K, SHORT) for k in range(2))
        return (first - second).ravel()

    return lax.map(difference, keys)


def _gradient(loss: PrivateLoss, theta: Params, K: int, alpha: float) -> Params:
    """A private gradient; if the algorithm takes K of them on a mini-batch, the mean of those in a proximal
    step, which makes their noise in a way of its own."""
    if K == 1:
        return loss.grad(theta)
    return (1 / (alpha * K)) * (theta - prox(loss, theta, theta, lam=0.0, alpha=alpha, K=K).theta)


def claimed_noise(plan: RowPlan, i: int) -> float:
    """z with which client i would spend exactly the claimed ε."""
    q, steps = float(plan.rate[i]), int(plan.batches[i])
    return noise_for(plan.spec.epsilon, (1 - CUT) * plan.spec.delta, q, steps, plan.gradients)


def noise_is_as_large(noise: dict[str, np.ndarray], level: float) -> Check:
    """Whether the noise of each client is as large as claimed, by a χ² test of its variance."""
    each = level / len(noise)
    found = {}
    for name, values in noise.items():
        n = values.size
        # Of the claimed deviation, the share that the sample would have to fall below.
        found[name] = (values**2).mean() ** 0.5, (chi2.ppf(each, n) / n) ** 0.5
    name = min(found, key=lambda name: found[name][0] / found[name][1])
    value, threshold = found[name]
    return Check(
        "The noise is as large as claimed", "standard deviation of the noise, divided by z c/B",
        float(value), float(threshold), False, level, name,
    )  # fmt: skip


def noise_is_fresh(noise: dict[str, np.ndarray], level: float) -> Check:
    """Whether the noise of different mini-batches and clients has nothing in common, by correlations."""
    parts = [(name, part.ravel()) for name, own in noise.items() for part in _quarters(own)]
    value, (first, _) = _largest_correlation([part for _, part in parts])
    every = np.concatenate(list(noise.values())).round(6)
    if len(np.unique(every, axis=0)) < len(every):
        value = 1.0
    return Check(
        "Each mini-batch has noise of its own", "largest correlation of the noise of different mini-batches",
        value, _correlation_by_chance(level, parts[0][1].size, len(parts)), True, level, parts[first][0],
    )  # fmt: skip


def _quarters(noise: np.ndarray) -> np.ndarray:
    """The noise of a client in four parts."""
    length = len(noise) // 4
    return noise[: 4 * length].reshape(4, length, -1)


def _largest_correlation(vectors: list[np.ndarray]) -> tuple[float, tuple[int, int]]:
    """The largest correlation of two vectors, and which they are; infinite if one of them is constant."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.abs(np.corrcoef(np.stack(vectors)))
    values = np.where(np.tri(len(vectors), dtype=bool), -1, np.nan_to_num(values, nan=np.inf))
    first, second = divmod(int(np.argmax(values)), len(vectors))
    return float(values[first, second]), (first, second)


def _correlation_by_chance(level: float, size: int, vectors: int) -> float:
    """What no correlation of two of so many independent vectors exceeds, except with probability `level`."""
    pairs = vectors * (vectors - 1) / 2
    return math.tanh(float(norm.isf(level / pairs / 2)) / math.sqrt(max(1, size - 3)))


def rows_are_clipped(mechanism: Mechanism) -> Check:
    """Whether no row changes B g by more than c, at any client, even if its input is enormous."""
    values = {}
    for release in mechanism.releases:
        rows = jnp.asarray(np.linspace(0, int(release.problem.count) - 1, ROWS).astype(np.int32))
        size, key = jnp.float32(mechanism.size(release)), mechanism.key
        found = _largest_contribution(
            release.problem, mechanism.theta, rows, size, key, mechanism.B, mechanism.gradients
        )
        values[release.name] = float(np.nan_to_num(found, nan=np.inf)) / release.clip
    name = max(values, key=lambda name: values[name])
    return Check(
        "No row counts for more than the clipping length", "largest contribution of one row, divided by c",
        values[name], 1.0001, True, 0.0, name,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("B", "K"))
def _largest_contribution(
    problem: Problem, theta: Params, rows: jax.Array, size: jax.Array, key: jax.Array, B: int, K: int
) -> jax.Array:
    """The largest change of B g by one of these rows, if it is alone in a mini-batch."""
    private, some = problem.private, problem.draw(key, B)
    assert private is not None
    # Noise that cancels would leave its rounding.
    quiet = dataclasses.replace(private, noise=jnp.zeros_like(private.noise))
    enormous = dataclasses.replace(problem, x=ENORMOUS * problem.x)

    def contribution(row: jax.Array) -> jax.Array:
        picked = jnp.full(private.most, problem.start, jnp.int32).at[0].set(problem.start + row)

        def gradient(number: int) -> Params:
            used = jnp.arange(private.most) < number
            batch = dataclasses.replace(some, rows=picked, used=used, number=jnp.int32(1))
            return _gradient(dataclasses.replace(enormous.loss(batch), private=quiet), theta, K, 1.0)

        difference = gradient(1) - gradient(0)
        return size * jnp.sqrt(difference @ difference)

    return jnp.max(lax.map(contribution, rows))


class Sampled(NamedTuple):
    """Mini-batches of a client."""

    used: int
    """Rows in all of them."""
    repeats: int
    """Rows that are in a mini-batch twice."""


def sampled(mechanism: Mechanism) -> dict[str, Sampled]:
    """Draws mini-batches of each client."""
    found = {}
    for release in mechanism.releases:
        batch = _drawn(release.problem, mechanism.keys(release, 1)[0], mechanism.B)
        rows, used = np.asarray(batch.rows), np.asarray(batch.used)
        distinct = sum(len(np.unique(r[u])) for r, u in zip(rows, used, strict=True))
        found[release.name] = Sampled(int(used.sum()), int(used.sum()) - distinct)
    return found


@partial(jax.jit, static_argnames="B")
def _drawn(problem: Problem, key: jax.Array, B: int) -> Batch:
    return problem.draw(key, DRAWS, B)


def rows_are_drawn_once(found: dict[str, Sampled]) -> Check:
    """Whether no row is twice in a mini-batch, where it would count twice."""
    name = max(found, key=lambda name: found[name].repeats)
    return Check(
        "No row is in a mini-batch twice", "rows that are in a mini-batch twice",
        float(found[name].repeats), 0.0, True, 0.0, name,
    )  # fmt: skip


def rows_are_drawn_rarely(found: dict[str, Sampled], mechanism: Mechanism, level: float) -> Check:
    """Whether rows are in no more mini-batches than the accounting assumes, by a binomial test."""
    each, shares = level / len(found), {}
    for release in mechanism.releases:
        trials = DRAWS * int(release.problem.count)
        most = trials if release.rate >= 1 else binom.isf(each, trials, release.rate)
        expected = trials * release.rate
        shares[release.name] = float(found[release.name].used / expected), float(most / expected)
    name = max(shares, key=lambda name: shares[name][0] - shares[name][1])
    value, threshold = shares[name]
    return Check(
        "Rows are drawn as rarely as claimed", "rows in mini-batches, divided by what q = B/n gives",
        value, threshold, True, level, name,
    )  # fmt: skip


def noise_is_secret(mechanism: Mechanism, secret: Callable[[], jax.Array], level: float) -> Check:
    """Whether the noise of a deployed client has nothing in common with what the server can compute from the
    seed, which it knows.

    `secret` makes the key that a deployed client uses. The noise with that key is compared with the noise
    with the key that follows from the seed, and with that of a client that starts again.
    """
    release = mechanism.releases[0]
    keys = [jax.random.key(mechanism.seed), *(secret() for _ in range(3))]
    vectors = [mechanism.noise(release, key).ravel() for key in keys]
    value, _ = _largest_correlation(vectors)
    return Check(
        "The server cannot compute a deployed client's noise",
        "largest correlation with what the seed gives, and with another start",
        value, _correlation_by_chance(level, vectors[0].size, len(vectors)), True, level, release.name,
    )  # fmt: skip


Rule = Callable[[float, np.ndarray], float]
"""An adaptive rule: the next C, from C and the lengths of the updates of a round."""


def clipping_adapts(rule: Rule, quantile: float, rounds: int = 300) -> Check:
    """Whether an adaptive C settles near the quantile of the lengths, from far below and far above.

    The lengths are log-normal, so that the quantile is known.
    """
    rng, target = np.random.default_rng(0), math.exp(norm.ppf(quantile))
    worst = 0.0
    for first in (0.1 * target, 10 * target):
        C = first
        for _ in range(rounds):
            C = rule(C, np.exp(rng.normal(size=100)))
        away = abs(math.log(C / target)) if C > 0 and math.isfinite(C) else math.inf
        worst = max(worst, away)
    return Check(
        f"An adaptive clipping length settles at the quantile {quantile:g} of the lengths",
        "|log(C/quantile)| after 300 rounds", worst, math.log(2), True, 0.0,
    )  # fmt: skip


# Canaries at the worst: rows whose gradients point in directions of their own.


@record
class Bare(Network):
    """A model whose loss on a row is y z: its gradient is y (x, 1), and 0 if y is 0."""

    def losses(self, scores: jax.Array, y: jax.Array) -> jax.Array:
        """y z, column by column."""
        return scores[0] * y


@dataclasses.dataclass(frozen=True, eq=False)
class WorstCase:
    """Canaries that the mechanism was given directly, and what they show."""

    scores: np.ndarray
    included: np.ndarray
    bound: Bound
    steps: int
    clients: int

    def to_json(self) -> dict[str, Any]:
        """The numbers of the document."""
        return {
            "clients": self.clients,
            "steps": self.steps,
            "scores": {
                "included": self.scores[self.included].tolist(),
                "excluded": self.scores[~self.included].tolist(),
            },
            **self.bound._asdict(),
        }


def worst_case(mechanism: Mechanism, delta: float, level: float, seed: int) -> WorstCase:
    """The mechanism's output for canaries whose clipped gradients are orthogonal and of length c, seen step
    by step, with the likelihood ratio as their score: the strongest attack that the accounting allows for.

    Canary j of a client has the gradient c e_j if it is included and none if not; all other rows have none.
    With noise σ = z c/√K of K uses of a mini-batch, its score is
    Σ_t log(1 − q + q exp((2 c g_tj − c²)/(2σ²))).
    """
    rng, found = np.random.default_rng(seed), mechanism.releases
    rows = np.array([int(release.problem.count) for release in found])
    m = max(1, min(CANARIES // len(found), int(rows.min()), LARGEST // int(rows.max())))
    steps = min(MOST_STEPS, *(release.batches for release in found))
    x = np.zeros((rows.max(), m), np.float32)
    x[np.arange(m), np.arange(m)] = ENORMOUS
    scores, coins, theta = [], [], 0 * Bare(features=m).init(mechanism.key)
    for k, (release, n) in enumerate(zip(found, rows, strict=True)):
        coin = rng.random(m) < 0.5
        y = np.zeros(len(x), np.float32)
        y[:m] = coin
        zero = jnp.int32(0)
        problem = Problem(
            Bare(features=m), jnp.asarray(x), jnp.asarray(y), zero, jnp.int32(n), zero, zero, len(x),
            "random", release.problem.private,
        )  # fmt: skip
        variance = (release.noise * release.clip) ** 2 / mechanism.gradients
        numbers = jnp.array([release.clip, release.rate, variance, mechanism.size(release)], jnp.float32)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), k), steps)
        ratios = _likelihood_ratios(problem, theta, numbers, keys, mechanism.B, mechanism.gradients)
        scores.append(np.asarray(ratios, np.float64))
        coins.append(coin)
    all_scores, included = np.concatenate(scores), np.concatenate(coins)
    return WorstCase(all_scores, included, bound(all_scores, included, delta, level), steps, len(found))


@partial(jax.jit, static_argnames=("B", "K"))
def _likelihood_ratios(
    problem: Problem, theta: Params, numbers: jax.Array, keys: jax.Array, B: int, K: int
) -> jax.Array:
    """The scores of `worst_case`, with `numbers` c, q, σ² and the size by which sums are divided."""
    c, q, variance, size = numbers

    def step(total: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        loss = problem.loss(problem.draw(key, B))
        released = jnp.stack([loss.at(k).grad(theta).tree[0][0][0] for k in range(K)])
        g = size * jnp.mean(released, axis=0)
        ratio = (2 * c * g - c**2) / (2 * variance)
        return total + jnp.logaddexp(jnp.log1p(-q), jnp.log(q) + ratio), None

    return lax.scan(step, jnp.zeros(theta.ravel().size - 1), keys)[0]
