"""What the tests of pFedMe's relatives share: a small federation, rounds with half of its clients, and NumPy.

Rounds are played with the methods of an algorithm, client by client, because that compiles far faster than a
simulation; `test_contract.py` shows for every algorithm that a simulation does the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from laws import (
    EXACT,
    SIZE,
    federation,
    flat,
    point,
    problem,
    softmax_regression,
    train_rows,
)

from pfedme.algorithms import Algorithm, Models
from pfedme.algorithms.base import Cohort
from pfedme.core.models import Model, Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import State

FED = federation(EXACT, dtype=np.float64)
ROWS = train_rows(FED)
N, R, L2, ETA, BETA = len(EXACT), 3, 0.05, 0.2, 1.5
MODEL = softmax_regression(L2)
PLAIN: dict[str, Any] = {"R": R, "B": 0, "eta": ETA}
STEPS: dict[str, Any] = {**PLAIN, "beta": BETA}
COHORTS = ((0, 2), (1, 2))
"""The clients of two rounds: one is in both, one in none."""
w0, w1 = (np.random.default_rng(seed).normal(size=SIZE) for seed in (0, 1))


def rounds_of(
    algorithm: Algorithm, *first: np.ndarray, model: Model = MODEL, fed: Federation = FED,
    cohorts: Sequence[Sequence[int]] = COHORTS, start: State | None = None,
) -> list[State]:  # fmt: skip
    """The states before the first round and after each; by default the start has the models `first`."""
    states = [start or _first_state(algorithm, model, fed, *first or (w0,))]
    update_of = jax.jit(type(algorithm).client_update)
    for t, cohort in enumerate(cohorts):
        _, server, clients, _ = states[-1]
        updates = [update_of(algorithm, *asked(algorithm, model, fed, states[-1], i)) for i in cohort]
        uploads = jax.tree.map(lambda *all: jnp.stack(all), *(update.upload for update in updates))
        members = jax.random.key(t), jnp.array(cohort), jnp.asarray(fed.n_train[[*cohort]])
        server = _served(algorithm, server, uploads, members, fed.clients)
        for i, update in zip(cohort, updates, strict=True):
            clients = jax.tree.map(lambda all, own, i=i: all.at[i].set(own), clients, update.state)
        states.append(State(t + 1, server, clients))
    return states


def _first_state(algorithm: Algorithm, model: Model, fed: Federation, *first: np.ndarray) -> State:
    """The state before the first round, with these initial models."""
    made = [point(model, w) for w in first]
    server = algorithm.begin(jax.random.key(0), made.__getitem__, fed.clients)
    sent = [algorithm.send(server, jnp.int32(i)) for i in range(fed.clients)]
    kept = [algorithm.init(own, made.__getitem__) for own in sent]
    return State(0, server, jax.tree.map(lambda *own: jnp.stack(own), *kept))


@partial(jax.jit, static_argnums=4)
def _served(algorithm: Algorithm, server: Any, uploads: Any, members: Any, total: int) -> Any:
    return algorithm.server_update(server, uploads, Cohort(*members, total=total))


def answers(
    algorithm: Algorithm, state: State, model: Model = MODEL, fed: Federation = FED
) -> tuple[Models, dict[str, np.ndarray]]:
    """The models with which all clients respond, stacked, and what they say about them."""
    answer = jax.jit(type(algorithm).answer)
    all = [answer(algorithm, *asked(algorithm, model, fed, state, i)) for i in range(fed.clients)]
    return jax.tree.map(lambda *own: jnp.stack(own), *all)


def asked(algorithm: Algorithm, model: Model, fed: Federation, state: State, i: int) -> tuple[Any, ...]:
    """What client i responds to: a key, its problem, what it is sent and what it keeps."""
    key, sent = jax.random.fold_in(jax.random.key(state.t), i), algorithm.send(state.server, jnp.int32(i))
    return key, problem(fed, model, i), sent, jax.tree.map(lambda all: all[i], state.clients)


def grad(theta: np.ndarray, i: int) -> np.ndarray:
    """∇f_i(θ) of softmax regression."""
    return oracles.gradient(theta, ROWS[i], L2)


def descended(
    theta: np.ndarray, i: int, extra: Callable[[np.ndarray], Any] = lambda _: 0.0, steps: int = R
) -> np.ndarray:
    """θ after gradient steps on f_i, with something added to each gradient."""
    for _ in range(steps):
        theta = theta - ETA * (grad(theta, i) + extra(theta))
    return theta


def alone(i: int, rounds: int) -> np.ndarray:
    """Client i's model after so many rounds on its own."""
    return descended(w0, i, steps=rounds * R)


def averaged(w: np.ndarray, ends: Mapping[int, np.ndarray], *, by_samples: bool) -> np.ndarray:
    """(1 − β) w + β Σ p_i w_i, for the clients' models."""
    counts = [len(ROWS[i].y) for i in ends]
    return oracles.server(w, list(ends.values()), counts, beta=BETA, by_samples=by_samples)


def stacked(points: Params | None) -> np.ndarray:
    """Coordinates of stacked points, a row each."""
    return flat(points, stacked=True)


def assert_exact(got: Any, want: Any) -> None:
    """Alike to the rounding of float64."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-10, atol=1e-12)


# --- quadratics: linear regressions, f_i = mean ½ (x·θ + b − y)²

LINE = Network(features=2, classes=0)
LAM = 0.6


def lines() -> tuple[Federation, list[tuple[np.ndarray, np.ndarray]]]:
    """A federation of regressions, and A and c of each client's f_i = ½ (θ − c)ᵀA (θ − c) + constant."""
    rng = np.random.default_rng(7)
    fed = federation(((6, 0), (5, 0), (8, 0), (7, 0)), dtype=np.float64)
    x, y = rng.normal(size=(len(fed.x), 2)), rng.normal(size=len(fed.y))
    fed = dataclasses.replace(fed, x=x, y=y, classes=0).checked()
    own = []
    for s, n in zip(fed.start, fed.n_train, strict=True):
        full = oracles.with_one(x[s : s + n])
        own.append((full.T @ full / n, np.linalg.lstsq(full, y[s : s + n], rcond=None)[0]))
    return fed, own


def best_models(own: list, lam: float) -> np.ndarray:
    """argmin Σ f_i(x_i) + λ/2 ‖x_i − x̄‖², by one linear system."""
    n, d = len(own), len(own[0][1])
    A, b = np.zeros((n * d, n * d)), np.concatenate([A @ c for A, c in own])
    for i, (own_A, _) in enumerate(own):
        for j in range(n):
            A[i * d : (i + 1) * d, j * d : (j + 1) * d] = lam * ((i == j) - 1 / n) * np.eye(d)
        A[i * d : (i + 1) * d, i * d : (i + 1) * d] += own_A
    return np.linalg.solve(A, b).reshape(n, d)


def at(theta: np.ndarray) -> Params:
    """A point, or one for each client, of the linear regression."""
    return point(LINE, theta)
