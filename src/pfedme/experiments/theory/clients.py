"""Federations whose constants are known, and rounds of pFedMe on them."""

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

from pfedme.algorithms.base import Cohort
from pfedme.algorithms.pfedme import PFedMe
from pfedme.core.prox import prox
from pfedme.core.tree import Params

DIMENSION, KINDS, MOST = 10, 4, 16
"""d, the number of kinds of client, and the largest number of clients in a federation."""
BLOCKS = 32
"""How often a run is evaluated, at equal intervals."""
EXACT = 40
"""Inner steps that solve the inner problem to float64 precision."""
COUNTS = (4, 8, 16)
"""Numbers N of clients to compare."""
NU = 0.01
"""ν of the runs whose only error comes from the inner solver."""
START = np.full(DIMENSION, 2.0)
"""w_0; the centres of the clients are between −1 and 1 in each coordinate."""
LAM_1, LAM_2 = 2.0, math.sqrt(1.5)
"""λ of the convex federation, where μ = 1 and L = 3, and of the nonconvex one, where L = 1/4.

L = 1/4 with λ² = 8L² + 1 is the most favourable case for Theorem 2: it makes its step times L largest."""


class Family(NamedTuple):
    """φ and its derivative."""

    value: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


CONVEX = Family(lambda u: u * u / 2, lambda u: u)
NONCONVEX = Family(lambda u: 1 - jnp.cos(u), jnp.sin)


@partial(jax.tree_util.register_dataclass, data_fields=["a", "c", "gamma"], meta_fields=["family"])
@dataclasses.dataclass(frozen=True)
class Client:
    """f(θ) = Σ_j a_j φ(θ_j − c_j), as `PFedMe.client_update` needs it; or several clients, stacked."""

    family: Family
    a: jax.Array
    c: jax.Array
    gamma: jax.Array
    """γ_f: the square root of a row's noise E ‖ξ‖²."""

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
        """The smoothness of the F_i that the paper uses."""
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
        """`count` stacked clients that cycle through the kinds."""
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
    """F* of the nonconvex federation to about 1e-5: its coordinates are separable, so a grid is enough."""
    grid = np.linspace(-math.pi, math.pi, 2001)[:, None] * np.ones(DIMENSION)
    return float(envelopes(fed, grid).terms.mean(axis=1).min(axis=0).sum())


class Setting(NamedTuple):
    """One run: an algorithm, its clients, the initial w, and the numbers of clients and rounds."""

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
    """A mask of S of the first N clients, drawn uniformly without replacement."""
    ticket = jnp.where(jnp.arange(MOST) < N, jax.random.bits(key, (MOST,), jnp.uint32) / 2.0**32, 2.0)
    return jnp.sum(ticket < ticket[:, None], axis=1) < S


def advance(setting: Setting, key: jax.Array, w: jax.Array) -> jax.Array:
    """w after one more round: all clients answer, and the cohort's answers are averaged."""
    algorithm, clients = setting.algorithm, setting.clients
    own, draw = jax.random.split(key)

    def answer(key: jax.Array, client: Any) -> Params:
        return algorithm.client_update(key, client, Params(w), ()).upload

    uploads = jax.vmap(answer)(jax.random.split(own, MOST), clients)
    drawn = Cohort(draw, jnp.arange(MOST), cohort(draw, setting.N, setting.S), MOST)
    return algorithm.server_update(Params(w), uploads, drawn).tree


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
    """Repetitions of a run; only one if it is deterministic."""
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
