"""The paper's theorems, measured on federations whose constants are known.

Client i has f_i(θ) = Σ_j a_ij φ(θ_j − c_ij): strongly convex with φ(u) = u²/2, where everything in the
theorems has a closed form, or nonconvex and smooth with φ(u) = 1 − cos u. A row of data is noise ξ on the
gradient with E ‖ξ‖² = γ_f², so that a mini-batch has the variance γ_f²/|D|. Rounds are those of
`PFedMe.client_update` and `server_update`. The clients are copies of four kinds, so that federations of
4, 8 and 16 clients have the same F, w*, σ_F1 and drift, and differ in N alone.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from pfedme.algorithms.pfedme import PFedMe
from pfedme.experiments.finding import Finding, failing, judge
from pfedme.prox import prox
from pfedme.report.figures import COLOURS, DASHES
from pfedme.tree import Params

DIMENSION, KINDS, MOST = 10, 4, 16
"""d, how many kinds of client there are, and the most clients of a federation."""
BLOCKS = 32
"""How often a run is looked at, at equal distances."""
SLACK = 0.1
"""By how much a fitted exponent may miss the paper's and still count as the same."""
EXACT = 40
"""Inner steps that leave nothing of the inner problem's error in float64."""
COUNTS = (4, 8, 16)
"""Numbers N of clients to compare."""
NU = 0.01
"""ν of the runs whose only error is that of the inner solver."""
START = np.full(DIMENSION, 2.0)
"""w_0; the centres of the clients are between −1 and 1 in each coordinate."""
LAM_1, LAM_2 = 2.0, math.sqrt(1.5)
"""λ of the convex federation, where μ = 1 and L = 3, and of the other, where L = 1/4.

L = 1/4 with λ² = 8L² + 1 is the most favourable to Theorem 2: its step times L is then the largest."""


class Row(NamedTuple):
    """A measured number: mean and interval over repetitions, beside the paper's bound (NaN for none)."""

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
    """How much is measured."""

    draws: int
    """Mini-batches for an expectation at a fixed w."""
    pairs: int
    batches: tuple[int, ...]
    tolerances: tuple[float, ...]
    repetitions: int
    """Runs for an expectation over runs with noise."""
    cohorts: int
    """Runs for an expectation over cohorts alone."""
    rounds: tuple[int, ...]
    long: tuple[int, ...]
    """Rounds T of runs with the theorems' own, tiny steps."""
    settling: int
    """Rounds of the run to the floor."""
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


class Family(NamedTuple):
    """φ and its derivative."""

    value: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


CONVEX = Family(lambda u: u * u / 2, lambda u: u)
NONCONVEX = Family(lambda u: 1 - jnp.cos(u), jnp.sin)


@partial(jax.tree_util.register_dataclass, data_fields=["a", "c", "gamma"], meta_fields=["family"])
@dataclasses.dataclass(frozen=True)
class Client:
    """f(θ) = Σ_j a_j φ(θ_j − c_j), as `PFedMe.client_update` asks for it; or several clients, stacked."""

    family: Family
    a: jax.Array
    c: jax.Array
    gamma: jax.Array
    """γ_f: the root of a row's noise E ‖ξ‖²."""

    def draw(self, key: jax.Array, *shape: int) -> jax.Array:
        """Rows ξ for mini-batches; the last number of `shape` is |D|, and 0 stands for no noise at all."""
        d = self.c.shape[-1]
        return self.gamma / math.sqrt(d) * jax.random.normal(key, (*shape, d), self.c.dtype)

    def loss(self, rows: jax.Array) -> Batch:
        """f̃(θ; D) on the mini-batch D of these rows."""
        return Batch(self, rows)

    def exact(self) -> Batch:
        """f itself."""
        return self.loss(jnp.zeros((0, self.c.shape[-1])))


class Batch(NamedTuple):
    """f̃(θ; D) = f(θ) + ⟨mean of the rows ξ, θ⟩."""

    client: Client
    rows: jax.Array

    def grad(self, theta: Params) -> Params:
        """∇f̃(θ; D)."""
        f = self.client
        return Params(f.a * f.family.slope(theta.tree - f.c) + self.noise)

    @property
    def noise(self) -> jax.Array:
        """The mean of the rows."""
        return jnp.mean(self.rows, axis=0) if self.rows.size else jnp.zeros(self.rows.shape[-1])


@dataclasses.dataclass(frozen=True)
class Federation:
    """The four kinds of client, and what the theorems say about them; a is between μ and L."""

    family: Family
    a: np.ndarray
    c: np.ndarray
    lam: float

    @property
    def mu(self) -> float:
        """μ of the strongly convex f_i."""
        return float(self.a.min())

    @property
    def L(self) -> float:
        """The smoothness of the f_i."""
        return float(self.a.max())

    @property
    def L_F(self) -> float:
        """The smoothness of the F_i that the paper works with."""
        return self.lam

    @property
    def mu_F(self) -> float:
        """λμ/(λ + μ)."""
        return self.lam * self.mu / (self.lam + self.mu)

    @property
    def kappa_F(self) -> float:
        """L_F/μ_F."""
        return self.L_F / self.mu_F

    @property
    def alpha(self) -> float:
        """An inner step that contracts by (L − μ)/(L + μ + 2λ), or by L/λ without convexity."""
        return 2 / (2 * self.lam + self.L + self.mu) if self.family is CONVEX else 1 / self.lam

    @property
    def m(self) -> np.ndarray:
        """The curvatures λ a/(λ + a) of the strongly convex F_i: ∇F_i(w) = m_i (w − c_i)."""
        return self.lam * self.a / (self.lam + self.a)

    @property
    def optimum(self) -> np.ndarray:
        """w* = Σ m_i c_i / Σ m_i of the strongly convex F."""
        return np.sum(self.m * self.c, axis=0) / np.sum(self.m, axis=0)

    @property
    def sigma2(self) -> float:
        """σ_F1² = mean ‖∇F_i(w*)‖²."""
        return float(np.mean(np.sum((self.m * (self.optimum - self.c)) ** 2, axis=1)))

    @property
    def sigma_f2(self) -> float:
        """σ_f² = max_i sup_w ‖∇f_i(w) − ∇f(w)‖² of the nonconvex f_i, whose ∇f_i are sines of one period."""
        phases = self.a * np.exp(-1j * self.c)
        return float(np.max(np.sum(np.abs(phases - phases.mean(axis=0)) ** 2, axis=1)))

    @property
    def margin(self) -> float:
        """λ² − 8L², which Lemma 2 (b) needs to be positive and Theorem 2 to be at least 1."""
        return self.lam**2 - 8 * self.L**2

    @property
    def sigma_F2(self) -> float:
        """σ_F2² = λ²/(λ² − 8L²) σ_f²."""
        return self.lam**2 / self.margin * self.sigma_f2

    def excess(self, w: np.ndarray) -> np.ndarray:
        """F(w) − F(w*) = ½ Σ_j m̄_j (w_j − w*_j)² at points w along the last axis."""
        return np.sum(self.m.mean(axis=0) * (w - self.optimum) ** 2, axis=-1) / 2

    def delta2(self, gamma2_over_batch: float, nu: float = 0.0) -> float:
        """δ² = 2/(λ + μ)² (γ_f²/|D| + ν), or with λ − L in place of λ + μ without convexity."""
        h = self.lam + self.mu if self.family is CONVEX else self.lam - self.L
        return 2 / h**2 * (gamma2_over_batch + nu)

    def clients(self, count: int = KINDS, gamma: float = 0.0) -> Client:
        """`count` clients, stacked, the kinds taking turns."""
        a, c = (jnp.asarray(np.tile(v, (count // KINDS, 1))) for v in (self.a, self.c))
        return Client(self.family, a, c, jnp.full(count, float(gamma)))


def federation(family: Family, lam: float, seed: int = 0) -> Federation:
    """Kinds with random centres; curvatures from 1 to 3 if convex, and all 1/4 if not."""
    rng = np.random.default_rng(seed)
    c = rng.uniform(-1, 1, (KINDS, DIMENSION))
    spread = 3 ** rng.permuted(np.linspace(0, 1, c.size)).reshape(c.shape)
    return Federation(family, spread if family is CONVEX else np.full_like(c, 0.25), c, lam)


def proximal(clients: Client, w: jax.Array, lam: float, alpha: float) -> jax.Array:
    """θ̂_i(w) of stacked clients by the real `prox`, exact to rounding."""

    def one(client: Client) -> jax.Array:
        return prox(client.exact(), Params(w), Params(w), lam=lam, alpha=alpha, K=EXACT).theta.tree

    return jax.vmap(one)(clients)


class Envelopes(NamedTuple):
    """Every kind's θ̂_i(w), ∇F_i(w) = λ (w − θ̂_i(w)) and F_i(w) by coordinates at points, numerically."""

    theta: Any
    gradient: Any
    terms: Any


@jax.jit
def envelopes_of(clients: Client, points: jax.Array, lam: float, alpha: float) -> Envelopes:
    """The envelopes of stacked clients at stacked points."""

    def one(w: jax.Array) -> Envelopes:
        theta = proximal(clients, w, lam, alpha)
        terms = clients.a * clients.family.value(theta - clients.c) + lam / 2 * (theta - w) ** 2
        return Envelopes(theta, lam * (w - theta), terms)

    return jax.vmap(one)(points)


def envelopes(fed: Federation, points: np.ndarray) -> Envelopes:
    """The envelopes at the rows of `points`."""
    found = envelopes_of(fed.clients(), jnp.asarray(points), fed.lam, fed.alpha)
    return Envelopes(*map(np.asarray, found))


def lowest(fed: Federation) -> float:
    """F* of the nonconvex federation to about 1e-5: its coordinates are apart, so that a grid will do."""
    grid = np.linspace(-math.pi, math.pi, 2001)[:, None] * np.ones(DIMENSION)
    return float(envelopes(fed, grid).terms.mean(axis=1).min(axis=0).sum())


class Setting(NamedTuple):
    """One run: an algorithm, its clients, a first w, and how many clients and rounds there are."""

    algorithm: PFedMe
    clients: Client
    w: jax.Array
    N: int
    S: int
    rounds: int

    @property
    def step(self) -> float:
        """η̃ = ηβR."""
        return self.algorithm.eta * self.algorithm.beta * self.algorithm.R


class Trace(NamedTuple):
    """A run after each of its blocks of rounds: w_t, w̄_t, and the sum of ‖∇F(w_s)‖² over s < t."""

    w: np.ndarray
    average: np.ndarray
    squares: np.ndarray


def cohort(key: jax.Array, N: jax.typing.ArrayLike, S: jax.typing.ArrayLike) -> jax.Array:
    """Marks of S of the first N of all clients, drawn uniformly without replacement."""
    ticket = jnp.where(jnp.arange(MOST) < N, jax.random.bits(key, (MOST,), jnp.uint32) / 2.0**32, 2.0)
    return jnp.sum(ticket < ticket[:, None], axis=1) < S


def advance(setting: Setting, key: jax.Array, w: jax.Array) -> jax.Array:
    """w after one more round: all clients answer, and the cohort's answers are averaged."""
    algorithm, clients = setting.algorithm, setting.clients
    own, draw = jax.random.split(key)

    def answer(key: jax.Array, client: Any) -> Params:
        return algorithm.client_update(key, client, Params(w), ()).upload

    uploads = jax.vmap(answer)(jax.random.split(own, MOST), clients)
    return algorithm.server_update(Params(w), uploads, cohort(draw, setting.N, setting.S)).tree


@partial(jax.jit, static_argnames="gradients")
def trajectories(setting: Setting, keys: jax.Array, gradients: bool) -> Trace:
    """Runs with each of the keys.

    w̄_t weighs w_s by (1 − η̃ μ_F/2)^−(s+1) with η̃ = ηβR, as in the proof (the theorem prints η).
    """
    algorithm, clients = setting.algorithm, setting.clients
    lam, mu = algorithm.lam, jnp.min(clients.a)
    shrink = 1 - setting.step * lam * mu / (lam + mu) / 2
    kinds = jax.tree.map(lambda leaf: leaf[:KINDS], clients)

    def square(w: jax.Array) -> jax.Array:
        mean = lam * (w - jnp.mean(proximal(kinds, w, lam, algorithm.alpha), axis=0))
        return mean @ mean

    def one(_: jax.Array, at: tuple) -> tuple:
        key, w, average, weight, squares = at
        key, own = jax.random.split(key)
        weight = 1 + shrink * weight
        squares = squares + square(w) if gradients else squares
        return key, advance(setting, own, w), average + (w - average) / weight, weight, squares

    def block(at: tuple, _: None) -> tuple[tuple, tuple]:
        at = lax.fori_loop(0, setting.rounds // BLOCKS, one, at)
        return at, (at[1], at[2], at[4])

    def run(key: jax.Array) -> Trace:
        zero = jnp.zeros(())
        first = (key, setting.w, jnp.zeros_like(setting.w), zero, zero)
        return Trace(*lax.scan(block, first, None, length=BLOCKS)[1])

    return jax.vmap(run)(keys)


def keys(count: int, seed: int) -> jax.Array:
    """Keys of XLA's own generator: with JAX's default the programs take five times as long to compile."""
    return jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), count)


def simulate(setting: Setting, repetitions: int, seed: int, gradients: bool = False) -> Trace:
    """Repetitions of a run; one if there is no chance in it."""
    chance = setting.algorithm.B > 0 or setting.S < setting.N
    return Trace(*map(np.asarray, trajectories(setting, keys(repetitions if chance else 1, seed), gradients)))


def setting(
    fed: Federation,
    step: float,
    rounds: int,
    *,
    beta: float = 1.0,
    R: int = 4,
    gamma: float = 0.0,
    nu: float | None = None,
    N: int = MOST,
    S: int | None = None,
    w: np.ndarray = START,
) -> Setting:
    """A run with η̃ = ηβR = `step` from w."""
    algorithm = PFedMe(
        lam=fed.lam, eta=step / (beta * R), beta=float(beta), R=R, B=int(gamma > 0), K=15, nu=nu,
        alpha=fed.alpha if nu is None else fed.alpha / 5, theta_start="carry" if nu is None else "w",
    )  # fmt: skip
    return Setting(algorithm, fed.clients(MOST, gamma), jnp.asarray(w), N, N if S is None else S, rounds)


@jax.jit
def answers(algorithm: PFedMe, clients: Client, w: jax.Array, keys: jax.Array) -> jax.Array:
    """θ̃_i(w) of stacked clients for each key: the personal models of `client_update` with R = 1."""

    def one(key: jax.Array, client: Any) -> jax.Array:
        personal = algorithm.client_update(key, client, Params(w), ()).models.personal
        return (personal or Params(w)).tree

    count = clients.c.shape[0]
    return jax.vmap(lambda key: jax.vmap(one)(jax.random.split(key, count), clients))(keys)


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
        """Whether the interval, widened by `SLACK`, has the rate in it."""
        return self.low - SLACK <= rate <= self.high + SLACK


def power(x: Sequence[float], samples: np.ndarray, seed: int = 0) -> Slope:
    """The least-squares exponent of E y ∝ x^p, for samples of y with a row for each x.

    The interval holds 95 % of the exponents of resampled repetitions. Without repetitions it runs from the
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
    """A row for each x: the mean of its samples, and two standard errors either way."""
    mean, count = samples.mean(axis=1), samples.shape[1]
    error = 2 * samples.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else 0 * mean
    columns = np.column_stack([x, mean, mean - error, mean + error, bounds or [math.nan] * len(x)])
    return tuple(Row(claim, quantity, *map(float, row)) for row in columns)


class Scan(NamedTuple):
    """Runs in which one thing is varied: what was measured, its bounds, and the paper's rate."""

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
        """Whether the exponent is the paper's or, where things are to fall, better."""
        return self.slope.reaches(self.rate) if self.rate < 0 else self.slope.equals(self.rate)

    def rows(self, claim: str) -> tuple[Row, ...]:
        """What goes into the table."""
        return series(claim, self.name, self.x, self.samples, self.bounds)

    def __str__(self) -> str:
        return f"{self.name}: {self.slope} (paper {self.rate:.3g})"


def proposition_1(size: Size, seed: int) -> Measured:
    """The envelope's gradient, smoothness and strong convexity at random pairs of points."""
    claim, rows, checks, numbers = "Proposition 1", [], {}, []
    cases = (
        ("strongly convex", federation(CONVEX, LAM_1, seed)),
        ("nonconvex, λ = 3L", federation(NONCONVEX, 0.75, seed)),
        ("nonconvex, λ = 1.5L", federation(NONCONVEX, 0.375, seed)),
    )
    for name, fed in cases:
        miss, smooth, convex = curvatures(fed, size.pairs, seed)
        found = {"error of λ(w − θ̂)": (miss, 0.0), "largest change of ∇F": (smooth, fed.L_F)}
        numbers.append(
            f"{name}: λ(w − θ̂) is ∇F to {miss:.0e}, smoothness {smooth:.3f} (L_F = λ = {fed.lam:g})"
        )
        if fed.family is CONVEX:
            found["smallest change of ∇F"] = convex, fed.mu_F
            numbers[-1] += f", strong convexity {convex:.3f} (μ_F = {fed.mu_F:.3f})"
            checks["strong convexity"] = convex >= fed.mu_F - 1e-9
        if fed.family is CONVEX or fed.lam > 2 * fed.L:
            checks[f"the gradient ({name})"] = miss < 1e-6
            checks[f"smoothness ({name})"] = smooth <= fed.L_F + 1e-9
        for what, (value, bound) in found.items():
            rows += series(claim, f"{what}, {name}", [fed.lam], np.array([[value]]), [bound])
    return Measured(
        claim,
        "F_i is λ-smooth with gradient λ(w − θ̂_i(w)) if f_i is convex, or L-smooth with λ > 2L; and it is "
        "λμ/(λ+μ)-strongly convex if f_i is μ-strongly convex.",
        f"Central differences of F_i, and {size.pairs} random pairs of near and far points for each client.",
        "; ".join(numbers) + ".",
        judge(checks),
        f"{failing(checks)} The smoothness of a convex F_i is λL/(λ+L), below the λ that the paper uses. The "
        "last case breaks the condition λ > 2L on purpose: F_i can then bend down by λL/(λ−L), more than λ.",
        tuple(rows),
    )


def curvatures(fed: Federation, pairs: int, seed: int) -> tuple[float, float, float]:
    """How far λ(w − θ̂) is from differences of F, and the extremes of its change between two points.

    The changes are ‖∇F(w) − ∇F(v)‖/‖w − v‖ at most, and ⟨∇F(w) − ∇F(v), w − v⟩/‖w − v‖² at least.
    """
    rng = np.random.default_rng(seed)
    w = rng.uniform(-4, 4, (pairs, DIMENSION))
    along = np.eye(DIMENSION)[rng.integers(0, DIMENSION, pairs)] + rng.choice([0.0, 1e-3, 1.0], w.shape)
    v = w + along * 10.0 ** rng.uniform(-3, 0, (pairs, 1))
    g, step, h = envelopes(fed, w).gradient, (v - w)[:, None], 1e-4
    change, length = envelopes(fed, v).gradient - g, np.linalg.norm(step, axis=-1)
    difference = (envelopes(fed, w + h).terms - envelopes(fed, w - h).terms) / (2 * h)
    smooth = np.max(np.linalg.norm(change, axis=-1) / length)
    convex = np.min(np.sum(change * step, axis=-1) / length**2)
    return float(np.max(np.abs(difference - g))), float(smooth), float(convex)


def lemma_1(size: Size, seed: int) -> Measured:
    """E ‖θ̃ − θ̂‖² against the size of the mini-batch and against the inner tolerance."""
    claim, rows, checks, numbers = "Lemma 1", [], {}, []
    cases = {
        "strongly convex": federation(CONVEX, LAM_1, seed),
        "nonconvex": federation(NONCONVEX, LAM_2, seed),
    }
    for name, fed in cases.items():
        noisy = np.array([distances(fed, size.draws, seed, B=B, nu=1e-20) for B in size.batches])
        rough = np.array([distances(fed, 1, seed, B=0, nu=nu) for nu in size.tolerances])
        by_noise, by_nu = (
            [fed.delta2(1 / B) for B in size.batches],
            [fed.delta2(0, nu) for nu in size.tolerances],
        )
        scans = (
            Scan(f"δ² against |D|, {name}", size.batches, noisy, by_noise, -1),
            Scan(f"δ² against ν, {name}", size.tolerances, rough, by_nu, 1),
        )
        for scan in scans:
            tight = np.max(scan.samples.mean(axis=1) / scan.bounds)
            numbers.append(f"{scan}, at most {tight:.2f} of the bound")
            checks |= {scan.name: scan.slope.equals(scan.rate), f"the bound on {scan.name}": bool(tight <= 1)}
            rows += scan.rows(claim)
    return Measured(
        claim,
        "The mean squared error of the personal model is at most 2/(λ+μ)² (γ_f²/|D| + ν), or 2/(λ−L)² "
        "(γ_f²/|D| + ν) for nonconvex f_i and λ > L.",
        f"θ̃ of `client_update` at one w for {size.draws} mini-batches of each kind of client with γ_f = "
        "1 and ν = 1e-20, and without noise for several ν.",
        "Exponents: " + "; ".join(numbers) + ".",
        judge(checks),
        f"{failing(checks)} The factor 2 separates noise from tolerance and is lost where there is only "
        "one of the two; the rest of the gap is curvature above the least, λ+μ or λ−L.",
        tuple(rows),
    )


def distances(fed: Federation, draws: int, seed: int, *, B: int, nu: float) -> np.ndarray:
    """‖θ̃_i(w) − θ̂_i(w)‖² for mini-batches of |D| = B rows with γ_f = 1, the mean over kinds."""
    alpha = fed.alpha if B else fed.alpha / 10  # small steps end just below ν
    algorithm = PFedMe(lam=fed.lam, R=1, B=B, nu=nu, alpha=alpha)
    thetas = np.asarray(answers(algorithm, fed.clients(gamma=1.0), jnp.asarray(START), keys(draws, seed)))
    return np.mean(np.sum((thetas - envelopes(fed, START[None]).theta) ** 2, axis=-1), axis=-1)


def lemma_2(size: Size, seed: int) -> Measured:
    """The diversity of the ∇F_i at random points against its two bounds."""
    claim, points = "Lemma 2", np.random.default_rng(seed).uniform(-4, 4, (size.pairs, DIMENSION))
    convex, other = federation(CONVEX, LAM_1, seed), federation(NONCONVEX, LAM_2, seed)
    spread, _ = diversity(convex, points)
    spread_2, square = diversity(other, points)
    ratios = {
        "strongly convex": spread / (4 * convex.L_F * convex.excess(points) + 2 * convex.sigma2),
        "nonconvex": spread_2 / (8 * other.L**2 / other.margin * square + 2 * other.sigma_F2),
    }
    at_best = float(diversity(convex, convex.optimum[None])[0][0]) / (2 * convex.sigma2)
    checks = {name: bool(np.max(ratio) <= 1) for name, ratio in ratios.items()}
    rows = (
        Row(claim, f"left over right side, {name}", 0.0, float(r.mean()), float(r.min()), float(r.max()), 1.0)
        for name, r in ratios.items()
    )
    return Measured(
        claim,
        "The variance of the ∇F_i over clients is at most 4 L_F (F − F*) + 2 σ_F1², or, for nonconvex "
        "f_i and λ² > 8L², 8L²/(λ²−8L²) ‖∇F‖² + 2 σ_F2².",
        f"Both sides at {size.pairs} random points, and at w*; σ_F1 and σ_f in closed form.",
        f"With convexity the left side is at most {ratios['strongly convex'].max():.3f} of the right, and "
        f"{at_best:.2f} at w*; without, at most {ratios['nonconvex'].max():.3f}.",
        judge(checks),
        f"{failing(checks)} At w* the left side is σ_F1² itself, half of the bound; far from w* the bound "
        "grows with F − F*, while much of ∇F_i is common to the clients.",
        tuple(rows),
    )


def diversity(fed: Federation, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """mean ‖∇F_i − ∇F‖² and ‖∇F‖² at points."""
    g = envelopes(fed, points).gradient
    mean = g.mean(axis=1, keepdims=True)
    return np.mean(np.sum((g - mean) ** 2, axis=2), axis=1), np.sum(mean[:, 0] ** 2, axis=1)


def largest_step(fed: Federation, beta: float) -> float:
    """η̂_1 = 1/(6 L_F (3 + 128 κ_F/β)), the most that Theorem 1 allows η̃ = ηβR to be."""
    return 1 / (6 * fed.L_F * (3 + 128 * fed.kappa_F / beta))


def bound_1(fed: Federation, at: Setting, delta2: float) -> float:
    """μ_F Δ_0 e^(−η̃ μ_F T/2) + (η̃/β)² C_3 + η̃ C_2 + C_1, the end of the proof of Theorem 1 (a).

    C_3 keeps the factor L_F that the proof loses from one line to the next.
    """
    R, noise = at.algorithm.R, fed.lam**2 * delta2
    C_1 = 16 * noise / fed.mu_F
    C_2 = 6 * fed.sigma2 * (at.N / at.S - 1) / (at.N - 1)
    C_3 = 256 * fed.L_F * fed.kappa_F * (3 * R * fed.sigma2 + noise) / R
    far = float(np.sum((np.asarray(at.w) - fed.optimum) ** 2))
    start = fed.mu_F * far * math.exp(-at.step * fed.mu_F * at.rounds / 2)
    return start + (at.step / at.algorithm.beta) ** 2 * C_3 + at.step * C_2 + C_1


def theorem_1a(size: Size, seed: int) -> Measured:
    """The linear phase and the floor of F(w_t) − F* with the theorem's own step."""
    claim, fed, beta = "Theorem 1 (a)", federation(CONVEX, LAM_1, seed), 64.0
    step, run = largest_step(fed, beta), partial(setting, fed, beta=beta)
    main = run(step, size.settling, gamma=1.0)
    trace = simulate(main, size.repetitions, seed)
    errors, average = fed.excess(trace.w), float(fed.excess(trace.average[:, -1]).mean())
    times = main.rounds // BLOCKS * np.arange(1, BLOCKS + 1)
    ball, small_ball = (fed.lam**2 * fed.delta2(*of) / fed.mu_F for of in ((1.0,), (0.0, NU)))
    allowed = bound_1(fed, main, fed.delta2(1.0))
    rate, floor = decay(times, errors.mean(axis=0)), float(errors[:, -BLOCKS // 4 :].mean())

    def floors(name: str, x: Sequence[float], settings: list[Setting], bounds: list[float], p: float) -> Scan:
        values = [fed.excess(simulate(at, size.repetitions, seed).w[:, BLOCKS // 2 :]) for at in settings]
        return Scan(name, x, np.mean(values, axis=2), bounds, p)

    steps, gammas, home = [step, 4 * step, 16 * step], (0.25, 0.5, 1.0), fed.optimum
    noise = [g**2 for g in gammas]
    by_noise = floors(
        "floor against γ_f²/|D|", noise, [run(4 * step, size.resting, gamma=g, w=home) for g in gammas],
        [g * ball for g in noise], 1,
    )  # fmt: skip
    by_step = floors(
        "floor against η̃, noise",
        steps,
        [run(s, size.resting, gamma=1.0, w=home) for s in steps],
        [ball] * 3,
        0,
    )
    by_bias = floors(
        f"floor against η̃, ν = {NU:g}",
        steps,
        [run(s, size.resting, nu=NU, w=home) for s in steps],
        [small_ball] * 3,
        0,
    )
    checks = {
        "the linear phase": rate >= step * fed.mu_F / 2,
        "the bound": average <= allowed and floor <= 16 * ball,
        "a floor ∝ γ_f²/|D|": by_noise.holds,
    }
    return Measured(
        claim,
        "With a constant step the error falls linearly, at least as fast as exp(−η̃ μ_F t/2), to a "
        "neighbourhood of size O(λ²δ²/μ_F).",
        f"N = S = {MOST}, R = 4, β = {beta:g}, η̃ = ηβR = η̂_1 = {step:.4f}, γ_f = 1, |D| = 1; then "
        f"floors around w* for larger steps, for less noise, and for no noise but ν = {NU:g}.",
        f"The error falls by exp(−{rate:.4f} t), where exp(−{step * fed.mu_F / 2:.4f} t) is promised, to "
        f"a floor of {floor:.1e}, which is {floor / ball:.1e} of λ²δ²/μ_F = {ball:.2f}; F(w̄_T) − F* is "
        f"{average:.1e} against {allowed:.0f} from the proof's constants. Exponents: {by_noise}; "
        f"{by_step}; {by_bias}, at {by_bias.samples.max() / small_ball:.1e} of its λ²δ²/μ_F.",
        judge(checks),
        f"{failing(checks)} The floor of the bound is pessimistic for noise: fresh noise in N clients and "
        "R local rounds averages out, to the order of η̃λ²δ²/(NR), and vanishes with the step. What the "
        "inner solver leaves undone has no mean of zero; its floor does not shrink with the step, as the "
        "bound has it.",
        (
            *series(claim, "F(w_t) − F* against t", times.tolist(), errors.T, [ball] * BLOCKS),
            *(row for scan in (by_noise, by_step, by_bias) for row in scan.rows(claim)),
        ),
    )


def decay(times: np.ndarray, errors: np.ndarray) -> float:
    """The rate r of exp(−r t) that fits the errors above a hundred times the last ones."""
    above = errors > 100 * errors[-BLOCKS // 4 :].mean()
    return -float(np.polyfit(times[above], np.log(errors[above]), 1)[0])


def theorem_1b(size: Size, seed: int) -> Measured:
    """The distance of the personal models from w* after a run."""
    claim, fed, beta = "Theorem 1 (b)", federation(CONVEX, LAM_1, seed), 64.0
    algorithm = PFedMe(lam=fed.lam, R=1, B=1, nu=1e-20, alpha=fed.alpha)
    gammas, diverse, numbers, values, bounds = (0.5, 1.0, 2.0), fed.sigma2 / fed.lam**2, [], [], []
    for gamma in gammas:
        at = setting(fed, 4 * largest_step(fed, beta), 2 * size.resting, beta=beta, gamma=gamma)
        last, delta2 = simulate(at, size.repetitions, seed).w[:4, -1], fed.delta2(gamma**2)
        ask = partial(answers, algorithm, fed.clients(gamma=gamma), keys=keys(size.draws, seed))
        theta = np.array([ask(w) for w in jnp.asarray(last)])
        values.append(np.mean(np.sum((theta - fed.optimum) ** 2, axis=-1), axis=(1, 2)))
        bounds.append(9 * np.mean(np.sum((last - fed.optimum) ** 2, axis=-1)) + 6 * diverse + 3 * delta2)
        numbers.append(f"γ_f = {gamma:g}: {values[-1].mean():.3f} (σ_F1²/λ² + δ² = {diverse + delta2:.3f})")
    ratio = float(np.max(np.mean(values, axis=1) / bounds))
    checks = {"the bound": ratio <= 1}
    return Measured(
        claim,
        "The personal models end, in the mean, within a ball around w* whose squared radius is "
        "O((F(w̄_T) − F*)/μ_F + σ_F1²/λ² + δ²).",
        f"θ̃_i(w_T) of all kinds of client after {2 * size.resting} rounds with β = {beta:g}, for several "
        "γ_f.",
        f"Mean ‖θ̃_i − w*‖²: {'; '.join(numbers)}, with σ_F1²/λ² = {diverse:.3f}; at most {ratio:.2f} of the "
        "bound with the proof's constants.",
        judge(checks),
        f"{failing(checks)} The exact personal models at w* are at the mean squared distance σ_F1²/λ² "
        "from it: this part of the radius is attained. δ² overstates the rest as in Lemma 1.",
        series(claim, "mean ‖θ̃_i − w*‖² against γ_f²/|D|", [g**2 for g in gammas], np.array(values), bounds),
    )


def decreasing(fed: Federation, rounds: int, most: float) -> float:
    """η̃ = min(4 ln T/(μ_F T), most): the proof's choice, whose first error term is then O(1/T²)."""
    return min(4 * math.log(rounds) / (fed.mu_F * rounds), most)


class Decreasing(NamedTuple):
    """Runs of the convex federation with steps that decrease with T, from 1/(2 L_F)."""

    fed: Federation
    size: Size
    seed: int

    def run(self, rounds: int | None = None, **given: Any) -> Setting:
        """A run; by default the longest."""
        T = self.size.rounds[-1] if rounds is None else rounds
        return setting(self.fed, decreasing(self.fed, T, 1 / (2 * self.fed.L_F)), T, **given)

    def scan(self, name: str, x: Sequence[float], settings: Sequence[Setting], rate: float) -> Scan:
        """F(w̄_T) − F* of the runs."""
        fed, gamma = self.fed, float(settings[0].clients.gamma[0])
        runs = self.size.repetitions if gamma else self.size.cohorts
        errors = [fed.excess(simulate(at, runs, self.seed).average[:, -1]) for at in settings]
        return Scan(
            name, x, np.array(errors), [bound_1(fed, at, fed.delta2(gamma**2)) for at in settings], rate
        )

    def drift(self) -> list[Scan]:
        """No noise and all clients: what is left is the drift of the local rounds."""
        fed, size, betas = self.fed, self.size, (1.0, 4.0, 16.0)
        steps = [decreasing(fed, T, largest_step(fed, 256)) for T in size.long]
        own = [setting(fed, step, T, beta=256) for step, T in zip(steps, size.long, strict=True)]
        by_R = [self.run(beta=MOST * math.sqrt(R), R=R) for R in size.local]
        return [
            self.scan("drift against T", logarithmic(size.rounds), [self.run(T) for T in size.rounds], -2),
            self.scan("drift against T, β = 256, η̃ ≤ η̂_1", logarithmic(size.long), own, -2),
            self.scan("drift against β", betas, [self.run(beta=beta) for beta in betas], -2),
            self.scan("drift against N, β = N√R", COUNTS, [self.run(beta=2 * N, N=N) for N in COUNTS], -2),
            self.scan("drift against R, β = N√R", size.local, by_R, -2),
        ]

    def sampling(self) -> list[Scan]:
        """No noise and cohorts of S clients."""
        T, cohorts = self.size.rounds, (2, 4, 8)
        by_T = [self.run(t, beta=64, S=MOST // 4) for t in T]
        by_S = [self.run(beta=64, S=S) for S in cohorts]
        by_N = [self.run(beta=64, N=N, S=N // 2) for N in COUNTS]
        share = [(MOST / S - 1) / (MOST - 1) for S in cohorts]
        return [
            self.scan("sampling against T, S = N/4", logarithmic(T), by_T, -1),
            self.scan("sampling against (N/S − 1)/(N − 1), N = 16", share, by_S, 1),
            self.scan("sampling against (N/S − 1)/(N − 1), S = N/2", [1 / (N - 1) for N in COUNTS], by_N, 1),
        ]

    def noise(self) -> list[Scan]:
        """Noise, all clients, and β = N√R, with which the paper has 1/(TRN)²."""
        T, local = self.size.rounds, self.size.noisy_local
        by_T = [self.run(t, beta=2 * MOST, gamma=1.0) for t in T]
        by_N = [self.run(beta=2 * N, N=N, gamma=1.0) for N in COUNTS]
        by_R = [self.run(beta=MOST * math.sqrt(R), R=R, gamma=1.0) for R in local]
        return [
            self.scan("noise against T, β = N√R", logarithmic(T), by_T, -2),
            self.scan("noise against N, β = N√R", COUNTS, by_N, -2),
            *([self.scan("noise against R, β = N√R", local, by_R, -2)] if local else []),
        ]


def logarithmic(rounds: Sequence[int]) -> list[float]:
    """T/ln T."""
    return [T / math.log(T) for T in rounds]


def corollary_1(size: Size, seed: int) -> Measured:
    """F(w̄_T) − F* with decreasing steps, against T, S, N, β and R."""
    claim, fed = "Corollary 1", federation(CONVEX, LAM_1, seed)
    runs = Decreasing(fed, size, seed)
    scans = runs.drift() + runs.sampling() + runs.noise()
    seen = "seen" if all(scan.holds for scan in scans if "β = N√R" in scan.name) else "not seen"
    checks = {scan.name: scan.holds for scan in scans}
    first = next(T for T in (2**k for k in range(5, 60)) if decreasing(fed, T, 1.0) < largest_step(fed, 1.0))
    return Measured(
        claim,
        "With steps of order ln T/T the error without client sampling falls as 1/(Tβ)², and so as "
        "1/(TRN)² if β = N√R; client sampling adds a term of order (N/S − 1)/(TN).",
        "F(w̄_T) − F* with η̃ = min(4 ln T/(μ_F T), 1/(2L_F)), and for β = 256 with the theorem's own "
        "η̂_1 in place of 1/(2L_F): without noise for all clients (drift) and for cohorts (sampling), "
        f"and with γ_f = 1 (noise). R = 4, β = 1 (with cohorts 64) and T = {size.rounds[-1]} where "
        "nothing else is said.",
        f"Exponents, those of T being of T/ln T: {'; '.join(map(str, scans))}. With β = 1 and the "
        f"theorem's η̂_1 the step would begin to decrease at T ≈ {first:.0e}.",
        judge(checks),
        f"{failing(checks)} A quadratic speedup in TRN is {seen}: the choice β = N√R alone makes the "
        "exponent of N, and what σ_F1 adds to the bound, σ_F1²/(Tβ)², has no other R in it, so that R "
        "counts once at most. With noise fresh draws average to 1/(TRN), while the bound has a floor there. "
        "With β = 1 the constant 6·128 κ_F in η̂_1 hides the rate. The choice β = √N/T "
        "for N ≥ T² was not tried.",
        tuple(row for scan in scans for row in scan.rows(claim)),
    )


def tiny_step(fed: Federation) -> float:
    """η̂_2 = 1/(75 L_F λ²), the most that Theorem 2 allows η̃ = ηβR to be."""
    return 1 / (75 * fed.L_F * fed.lam**2)


class Nonconvex(NamedTuple):
    """The nonconvex federation with the constants of Theorem 2's proof; without noise, so that δ = 0."""

    fed: Federation
    gap: float
    """Δ_F = F(w_0) − F*."""
    runs: int
    seed: int

    @property
    def C_4(self) -> float:
        """48 σ_F2²."""
        return 48 * self.fed.sigma_F2

    def C_5(self, N: int, S: int) -> float:
        """3/2 L_F σ_F2² (N/S − 1)/(N − 1)."""
        return 1.5 * self.fed.L_F * self.fed.sigma_F2 * (N / S - 1) / (N - 1)

    def run(self, T: int, beta: float = 1.0, N: int = MOST, S: int | None = None, R: int = 4) -> Setting:
        """A run with η̃ = min((β²Δ_F/(T C_4))^(1/3), (Δ_F/(T C_5))^(1/2)), the proof's but for the cap η̂_2."""
        step = (beta**2 * self.gap / (T * self.C_4)) ** (1 / 3)
        if S is not None:
            step = min(step, math.sqrt(self.gap / (T * self.C_5(N, S))))
        return setting(self.fed, step, T, beta=beta, N=N, S=S, R=R)

    def bound(self, at: Setting) -> float:
        """2 (Δ_F/(η̃T) + (η̃/β)² C_4 + η̃ C_5), with the factor L_F² in C_4 that the proof loses."""
        drift = (at.step / at.algorithm.beta) ** 2 * self.fed.L_F**2 * self.C_4
        return 2 * (self.gap / (at.step * at.rounds) + drift + at.step * self.C_5(at.N, at.S))

    def scan(self, name: str, x: Sequence[float], settings: Sequence[Setting], rate: float) -> Scan:
        """The mean of ‖∇F(w_t)‖² over each run."""
        traces = [simulate(at, self.runs, self.seed, gradients=True) for at in settings]
        means = [trace.squares[:, -1] / at.rounds for trace, at in zip(traces, settings, strict=True)]
        return Scan(name, x, np.array(means), [self.bound(at) for at in settings], rate)

    def constant(self, T: int) -> Scan:
        """The mean of ‖∇F(w_t)‖² over the first quarter, half and whole of T rounds with η̃ = η̂_2."""
        at, parts = setting(self.fed, tiny_step(self.fed), T), np.array([4, 2, 1])
        times = T // parts
        means = simulate(at, 1, self.seed, gradients=True).squares[0, BLOCKS // parts - 1] / times
        bounds = [self.bound(at._replace(rounds=int(t))) for t in times]
        return Scan("‖∇F‖² against T, η̃ = η̂_2", times.tolist(), means[:, None], bounds, -1)


def nonconvex(size: Size, seed: int) -> Nonconvex:
    """The nonconvex federation with the least λ that Theorem 2 allows."""
    fed = federation(NONCONVEX, LAM_2, seed)
    gap = float(envelopes(fed, START[None]).terms.mean(axis=1).sum()) - lowest(fed)
    return Nonconvex(fed, gap, size.repetitions // 2, seed)


def theorem_2(size: Size, seed: int) -> Measured:
    """The mean of ‖∇F(w_t)‖² against T with the theorem's step and with larger ones."""
    claim, non, T = "Theorem 2", nonconvex(size, seed), size.rounds
    fed = non.fed
    scans = [
        non.constant(size.long[-1] // 4),
        non.scan("‖∇F‖² against T, S = N", T, [non.run(t) for t in T], -2 / 3),
        non.scan("‖∇F‖² against T, S = 1", T, [non.run(t, 8.0, S=1) for t in T], -1 / 2),
    ]
    worst = max(float(np.max(scan.samples.mean(axis=1) / scan.bounds)) for scan in scans)
    worst_b = personal_spread(fed, size, seed)
    checks = {scan.name: scan.holds for scan in scans}
    checks |= {"the bound of (a)": worst <= 1, "the bound of (b)": worst_b <= 1}
    needed = non.gap / (non.C_4 * tiny_step(fed) ** 3)
    return Measured(
        claim,
        "For nonconvex f_i the mean of ‖∇F(w_t)‖² over t < T is of order Δ_F/(η̂_2 T) + T^(−2/3) + λ²δ², "
        "with T^(−1/2) more for S < N; and the personal models stay within O(‖∇F‖² + σ_F2²/λ² + δ²) of w.",
        f"λ² = 8L² + 1, R = 4, β = 1 (8 for S = 1), no noise: a run with η̃ = η̂_2 = {tiny_step(fed):.4f}, and "
        "runs with the proof's other steps, (Δ_F/(TC_4))^(1/3) and (Δ_F/(TC_5))^(1/2), without the cap η̂_2.",
        f"Exponents: {'; '.join(map(str, scans))}. All are at most {worst:.2f} of the bound with the "
        f"proof's constants; in (b) the left side is at most {worst_b:.2f} of the right at {size.pairs} "
        "random points.",
        judge(checks),
        f"{failing(checks)} η̂_2 hides T^(−2/3): the step would leave this cap only at T ≈ {needed:.0e}, "
        "and until then Δ_F/(η̂_2 T) is all there is. With larger steps the exponents are those of "
        "1/(η̃T), since Δ_F/(η̃T) is the largest term even then.",
        tuple(row for scan in scans for row in scan.rows(claim)),
    )


def personal_spread(fed: Federation, size: Size, seed: int) -> float:
    """The most of mean ‖θ̂_i(w) − w‖² / (2 σ_F2²/λ² + 2/(λ² − 8L²) ‖∇F(w)‖²) at random points w."""
    spread, square = diversity(fed, np.random.default_rng(seed).uniform(-4, 4, (size.pairs, DIMENSION)))
    bound = 2 * fed.sigma_F2 / fed.lam**2 + 2 / fed.margin * square
    return float(np.max((spread + square) / fed.lam**2 / bound))


def corollary_2(size: Size, seed: int) -> Measured:
    """The mean of ‖∇F(w_t)‖² against β, and against T, N and R with the corollary's β."""
    claim, non, T, local = "Corollary 2", nonconvex(size, seed), size.rounds, size.local[:3]
    betas = (1.0, 2.0, 4.0, 8.0)

    def run(T: int = T[-1], N: int = MOST, R: int = 4) -> Setting:
        return non.run(T, math.sqrt(N) * R**0.25, N=N, R=R)

    scans = [
        non.scan("‖∇F‖² against T, β = √N R^¼", T, [run(T=t) for t in T], -2 / 3),
        non.scan("‖∇F‖² against N, β = √N R^¼", COUNTS, [run(N=N) for N in COUNTS], -2 / 3),
        non.scan("‖∇F‖² against R, β = √N R^¼", local, [run(R=R) for R in local], -2 / 3),
        non.scan("‖∇F‖² against β", betas, [non.run(T[-1], beta) for beta in betas], -4 / 3),
    ]
    checks = {scan.name: scan.holds for scan in scans}
    return Measured(
        claim,
        "Without client sampling and with β = Θ(√N R^¼) the mean of ‖∇F(w_t)‖² is of order 1/(TRN)^(2/3).",
        "As for Theorem 2 with S = N and η̃ = (β²Δ_F/(TC_4))^(1/3), without the cap η̂_2; "
        f"T = {T[-1]} where it does not vary.",
        f"Exponents: {'; '.join(map(str, scans))}.",
        judge(checks),
        f"{failing(checks)} With the proof's step the bound is Δ_F^(2/3) C_4^(1/3)/(βT)^(2/3); the paper "
        "writes (β²T)^(2/3), and so has β^(−4/3) in Theorem 2. β^(−2/3) makes N^(−1/3) and R^(−1/6) of "
        "the corollary's β. Under the cap η̂_2, where the step does not depend on β, N and R would not "
        "matter at all.",
        tuple(row for scan in scans for row in scan.rows(claim)),
    )


CLAIMS = (proposition_1, lemma_1, lemma_2, theorem_1a, theorem_1b, corollary_1, theorem_2, corollary_2)


def measure(quick: bool, seed: int = 0) -> list[Measured]:
    """What became of each claim, measured in float64."""
    with jax.enable_x64(True):
        return [claim(QUICK if quick else FULL, seed) for claim in CLAIMS]


class Line(NamedTuple):
    """A series of rows in a panel; the legend has its fitted exponent and the paper's, if there is one."""

    quantity: str
    label: str
    rate: float | None = None


class Panel(NamedTuple):
    """A panel of the figure: a title, what is on its axes, and its lines."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    bounds: str = ""
    """What the dotted lines of the bounds are called; empty for none."""
    log: bool = True


ERROR, SQUARE, RATE = "F(w̄$_T$) − F*", "mean ‖∇F(w$_t$)‖²", "paper's rate"
PANELS = (
    Panel("Lemma 1: mini-batch", "|D|", "δ²", (
        Line("δ² against |D|, strongly convex", "strongly convex", -1),
        Line("δ² against |D|, nonconvex", "nonconvex", -1),
    ), "bounds"),
    Panel("Lemma 1: inner tolerance", "ν", "δ²", (
        Line("δ² against ν, strongly convex", "strongly convex", 1),
        Line("δ² against ν, nonconvex", "nonconvex", 1),
    ), "bounds"),
    Panel("Theorem 1: linear phase, floor", "round t", "F(w$_t$) − F*", (
        Line("F(w_t) − F* against t", "η̃ = η̂$_1$, γ$_f$ = 1"),
    ), "λ²δ²/μ$_F$", False),
    Panel("Theorem 1: the floor", "η̃ = ηβR", "floor of F − F*", (
        Line("floor against η̃, noise", "noise, γ$_f$ = 1", 0),
        Line(f"floor against η̃, ν = {NU:g}", f"no noise, ν = {NU:g}", 0),
    ), "λ²δ²/μ$_F$"),
    Panel("Corollary 1: rounds", "T / ln T", ERROR, (
        Line("drift against T", "drift", -2),
        Line("sampling against T, S = N/4", "sampling", -1),
        Line("noise against T, β = N√R", "noise", -2),
    )),
    Panel("Corollary 1: cohort", "(N/S − 1) / (N − 1)", ERROR, (
        Line("sampling against (N/S − 1)/(N − 1), N = 16", "N = 16, S = 2, 4, 8", 1),
        Line("sampling against (N/S − 1)/(N − 1), S = N/2", "S = N/2, N = 4, 8, 16", 1),
    )),
    Panel("Corollary 1: β = N√R", "N or R", ERROR, (
        Line("drift against N, β = N√R", "drift, N", -2),
        Line("drift against R, β = N√R", "drift, R", -2),
        Line("noise against N, β = N√R", "noise, N", -2),
        Line("noise against R, β = N√R", "noise, R", -2),
    )),
    Panel("Theorem 2: rounds", "T", SQUARE, (
        Line("‖∇F‖² against T, η̃ = η̂_2", "η̃ = η̂$_2$", -1),
        Line("‖∇F‖² against T, S = N", "larger steps, S = N", -2 / 3),
        Line("‖∇F‖² against T, S = 1", "larger steps, S = 1", -1 / 2),
    )),
    Panel("Corollary 2", "β, N or R", SQUARE, (
        Line("‖∇F‖² against β", "β", -4 / 3),
        Line("‖∇F‖² against N, β = √N R^¼", "N, β = √N R$^{¼}$", -2 / 3),
        Line("‖∇F‖² against R, β = √N R^¼", "R, β = √N R$^{¼}$", -2 / 3),
    )),
)  # fmt: skip


def figure(findings: Sequence[Measured]) -> bytes:
    """A PNG of what was measured, with fitted exponents beside the paper's rates."""
    found = {line.quantity: [r for f in findings for r in f.rows if r.quantity == line.quantity]
             for panel in PANELS for line in panel.lines}  # fmt: skip
    sheet = Figure(figsize=(8.4, 8.2), layout="constrained", dpi=200)
    for at, panel in zip(np.ravel(sheet.subplots(3, 3)), PANELS, strict=True):
        shown = [line for line in panel.lines if found[line.quantity]]
        for k, line in enumerate(shown):
            _draw(at, found[line.quantity], line, panel, k)
        _dress(at, panel)
    image = io.BytesIO()
    sheet.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _draw(at: Axes, rows: Sequence[Row], line: Line, panel: Panel, k: int) -> None:
    """A series with its interval, its bound, and the paper's rate through its first point."""
    x, y, low, high, bound = (np.array([getattr(r, name) for r in rows]) for name in Row._fields[2:])
    colour, label, dash = COLOURS[k], line.label, (DASHES[0], DASHES[1], DASHES[3], DASHES[4])[k]
    if line.rate is not None:
        label += f": {power(x.tolist(), y[:, None]).value:.2f} (paper {_rate(line.rate)})".replace("-", "−")
    marker = "" if len(x) > 10 else "os^D"[k]
    at.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.2, label=label)
    at.fill_between(x, np.maximum(low, y / 10), high, color=colour, alpha=0.2, linewidth=0)
    if panel.bounds:
        name = panel.bounds if k == 0 else None
        at.plot(x, bound, color=colour, linestyle=":", linewidth=1.1, label=name)
    elif line.rate is not None:
        path, name = y[0] * (x / x[0]) ** line.rate, RATE if k == 0 else None
        at.plot(x, path, color="0.5", linestyle=":", linewidth=1, label=name, zorder=1)


def _rate(rate: float) -> str:
    """An exponent as the paper writes it."""
    return {-2 / 3: "−2/3", -4 / 3: "−4/3", -1 / 2: "−1/2"}.get(rate, f"{rate:g}")


def _dress(at: Axes, panel: Panel) -> None:
    """Scales, names and the legend, with room for it above the lines."""
    at.set_yscale("log")
    if panel.log:
        at.set_xscale("log")
    handles, labels = at.get_legend_handles_labels()
    bottom, top = np.log10(at.get_ylim())
    at.set_ylim(10**bottom, 10 ** (bottom + (top - bottom) / (0.97 - 0.07 * len(labels))))
    for axis in (at.xaxis, at.yaxis):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log" and high < 60 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
    at.set_xlabel(panel.x, fontsize=8)
    at.set_ylabel(panel.y, fontsize=8)
    at.set_title(panel.title, fontsize=9)
    at.tick_params(which="both", labelsize=7)
    at.grid(alpha=0.3, linewidth=0.5)
    at.spines[["top", "right"]].set_visible(False)
    order = np.argsort([label in (panel.bounds, RATE) for label in labels], kind="stable")
    at.legend(
        [handles[k] for k in order], [labels[k] for k in order],
        fontsize=6.3, frameon=False, loc="upper right", handlelength=3, labelspacing=0.3,
    )  # fmt: skip
