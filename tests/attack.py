"""What a malicious, or merely curious, server can read out of a client's uploads: attacks on our own client.

Every attack chooses w (and, beyond the client's limits, settings) and reads rows out of what comes back. It
reaches the client through a function `respond(ask, w)` alone, and sees no row otherwise. It may know what a
server knows: how many training rows there are, and that columns are standardised.

`python tests/attack.py` prints the table of what was recovered.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import cKDTree
from scipy.stats import norm

from pfedme.algorithms import Algorithm, FedAvg, PerFedAvg, PFedMe
from pfedme.federation import Federation
from pfedme.models import Network
from pfedme.problem import Problem
from pfedme.simulate import Simulation
from pfedme.tree import Params

ID = 7
"""The client's id, which the server hands out."""
SATURATED = 60.0
"""A lead in logits after which softmax is 0 or 1 in float32, and stays so whatever R steps do."""


class Ask(NamedTuple):
    """What a server asks for beside w."""

    algorithm: Algorithm
    model: Network
    round: int = 0


Respond = Callable[[Ask, np.ndarray], np.ndarray]
"""A client: the upload with which it answers w."""


class Rows(NamedTuple):
    """Training rows, standardised, and their labels."""

    x: np.ndarray
    y: np.ndarray


# The client under attack, and the score.


def victim(rows: Rows, seed: int, batches: np.ndarray | None = None) -> Respond:
    """A client with these training rows that draws its batches from (seed, round, id), as `Client` does.

    A seed that the server does not know stands for batches drawn from a secret of the client's own.
    """
    one = np.ones(1, np.int64)
    simulations: dict[tuple[Algorithm, Network], Simulation] = {}

    def respond(ask: Ask, w: np.ndarray) -> np.ndarray:
        key = ask.algorithm, ask.model
        if key not in simulations:
            simulations.clear()
            federation = Federation(
                x=rows.x, y=rows.y, n_train=len(rows.x) * one, n_test=0 * one, classes=ask.model.classes,
                ids=np.array([ID], np.uint32),
            )  # fmt: skip
            simulations[key] = Simulation(*key, federation, cohort=1, seed=seed)
        simulation = simulations[key]
        start = simulation.start(layout(ask.model).like(jnp.asarray(w, jnp.float32)))
        update = simulation.update(start._replace(t=ask.round), np.zeros(1, int))
        return np.asarray(update.upload.ravel(1)[0])

    return respond


def layout(model: Network) -> Params:
    """The layers of a model, without numbers."""
    return jax.eval_shape(model.init, jax.random.key(0))


def patients(n: int, *, features: int = 4, classes: int = 2, seed: int = 0, noise: float = 1.0) -> Rows:
    """Synthetic training rows: numbers that depend on each other, standardised, some of them skewed.

    The label is a class by a linear risk with noise, or with 0 classes the risk itself.
    """
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, features)) @ (np.eye(features) + 0.4 * rng.normal(size=(features, features)))
    z[:, ::2] = np.exp(0.4 * z[:, ::2])
    x = ((z - z.mean(0)) / z.std(0)).astype(np.float32)
    risk = x @ rng.normal(size=features) + noise * rng.normal(size=n)
    if classes == 0:
        return Rows(x, ((risk - risk.mean()) / risk.std()).astype(np.float32))
    edges = np.quantile(risk, np.arange(1, classes) / classes)
    return Rows(x, np.searchsorted(edges, risk).astype(np.int32))


class Score(NamedTuple):
    """How many true rows were recovered, each counted once, and how many guesses that took."""

    near: int
    """All features within 0.05 standard deviations."""
    exact: int
    """Within 0.001."""
    guesses: int


def score(guesses: np.ndarray, rows: Rows) -> Score:
    """Compares guesses with the true rows."""
    guesses = guesses[np.isfinite(guesses).all(axis=1)]
    if not len(guesses):
        return Score(0, 0, 0)
    away, which = cKDTree(rows.x).query(guesses, p=np.inf)
    near, exact = (len(np.unique(which[away <= within])) for within in (0.05, 0.001))
    return Score(near, exact, len(guesses))


# What a server knows about how an upload comes about.


def drawn(algorithm: Algorithm, seed: int, n: int, rounds: Sequence[int]) -> np.ndarray:
    """Which rows a client's steps use, rounds × R × B: a function of seed, round, id and how many rows n."""
    zero, count = jnp.int32(0), jnp.int32(n)
    several = isinstance(algorithm, PerFedAvg)
    shape = (algorithm.R + 1, 3, algorithm.B) if several else (algorithm.R, algorithm.B)

    def of_round(t: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), ID)
        none = jnp.zeros(0)
        problem = Problem(Network(features=1), none, none, zero, count, zero, t, n, algorithm.batches)
        rows = problem.draw(key, *shape)
        return rows[:-1, 1] if several else rows

    return np.asarray(jax.vmap(of_round)(jnp.asarray(rounds, jnp.uint32)))


def effects(algorithm: Algorithm, l2: float) -> tuple[float, np.ndarray]:
    """(k, a) of w_R = k w − Σ_r a_r g_r, where g_r, the gradient of step r, depends on its batch alone.

    FedAvg: a_r = η (1 − η l2)^(R−1−r) and k = (1 − η l2)^R. pFedMe: by its recursion for w and θ, which is
    linear then.
    """
    one = np.eye(algorithm.R + 1)
    w = theta = one[-1]
    for r in range(algorithm.R):
        if isinstance(algorithm, PFedMe):
            for _ in range(algorithm.K):
                theta = theta - algorithm.alpha * (one[r] + l2 * theta + algorithm.lam * (theta - w))
            w = w - algorithm.eta * algorithm.lam * (w - theta)
        else:
            w = w - algorithm.eta * (one[r] + l2 * w)
    return w[-1], -w[:-1]


def shares(algorithm: Algorithm, l2: float, seed: int, n: int, rounds: Sequence[int]) -> np.ndarray:
    """M, rounds × n: how much row j weighs in the upload of round t, M_tj = Σ_r a_r #(j in batch r) / B."""
    a = effects(algorithm, l2)[1]
    rows = drawn(algorithm, seed, n, rounds)
    flat = rows.reshape(len(rows), -1) + n * np.arange(len(rows))[:, None]
    weight = np.broadcast_to(a[:, None] / rows.shape[2], rows.shape).ravel()
    return np.bincount(flat.ravel(), weight, minlength=n * len(rows)).reshape(len(rows), n)


# Mini-batches that the server knows: linear algebra.


def linear_system(respond: Respond, algorithm: Algorithm, model: Network, seed: int, n: int, rounds: int):
    """Rows by linear algebra from uploads that sum over all of a round's rows, with no layer to trap them.

    In softmax regression with W = 0 and b at a class s that nobody has far above the others, p is the s-th
    unit vector for every row and at every step, and class c ≠ s tells Σ_j M_tj 1[y_j = c] (x_j, 1). With two
    classes w = 0 does: p = ½, and class 1 tells Σ_j M_tj (½ − 1[y_j = 1]) (x_j, 1), up to O(η R). In ridge
    regression W = 0 and b = β, very large, tells Σ_j M_tj (β − y_j) (x_j, 1), up to O(η R).
    M is known, so that M U = D has one solution U as soon as there are n rounds.
    """
    start = np.zeros((model.outputs, model.features + 1))
    if model.classes == 0:
        start[:, -1] = 1e6
    elif model.classes > 2:
        start[-1, -1] = SATURATED
    asks = [Ask(algorithm, model, t) for t in range(rounds)]
    w = joined(start)
    told = np.stack([split(w - respond(ask, w), model) for ask in asks])
    M = shares(algorithm, model.l2, seed, n, range(rounds))
    if model.classes == 0:
        return np.linalg.lstsq(M, told[:, 0, :-1] / start[0, -1], rcond=None)[0]
    if model.classes == 2:
        U = np.linalg.lstsq(M, told[:, 1], rcond=None)[0]
        return U[:, :-1] / np.where(np.abs(U[:, -1:]) > 0.1, U[:, -1:], np.nan)
    return -np.linalg.lstsq(M, told[:, :-1, :-1].sum(axis=1), rcond=None)[0]


def joined(layer: np.ndarray) -> np.ndarray:
    """A layer (W, b), with b as its last column, in the order of `Params.ravel`."""
    return np.concatenate([layer[:, :-1].ravel(), layer[:, -1]]).astype(np.float32)


def split(vector: np.ndarray, model: Network) -> np.ndarray:
    """The inverse of `joined` for a model's first layer."""
    units = model.hidden[0] if model.hidden else model.outputs
    size = units * model.features
    W, b = vector[:size].reshape(units, -1), vector[size : size + units]
    return np.column_stack([W, b]).astype(np.float64)
