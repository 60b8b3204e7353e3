"""What it means for an algorithm to be as its paper says: softmax regression against NumPy, and quadratic
losses, whose minimisers are linear solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import EXACT, SIZE, federation, flat, softmax_regression, start_at, train_rows
from oracles_shared import Oracle, carried_out

from pfedme.algorithms import Algorithm
from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation, State

L2 = 0.05
w0 = np.random.default_rng(0).normal(size=SIZE)


def vectors(tree: Any) -> list[np.ndarray]:
    """The points and arrays of a tree, as vectors."""
    parts = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, Params))
    return [flat(part) if isinstance(part, Params) else np.asarray(part) for part in parts]


def assert_equal(got: Any, want: Any) -> None:
    """Equal up to rounding in float64."""
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def two_rounds(algorithm: Algorithm, rounds: int = 2) -> tuple[Simulation, State]:
    """Softmax regression with cohorts of three of four clients, of which two at least are in both rounds."""
    fed = federation(EXACT, dtype=np.float64)
    simulation = Simulation(algorithm, softmax_regression(L2), fed, cohort=3, seed=2)
    state, finite = simulation.advance(start_at(simulation, w0), rounds)
    assert finite
    return simulation, state


def check_rounds(algorithm: Algorithm, oracle: Oracle, *, models: bool = True) -> None:
    """What the server and the clients keep after two rounds, and their models, are the oracle's."""
    simulation, state = two_rounds(algorithm)
    cohorts = [simulation.cohort_of(t).tolist() for t in range(2)]
    want = carried_out(oracle, w0, train_rows(simulation.federation), cohorts)
    for got, part in zip(vectors(state.server), want.server, strict=True):
        assert_equal(got, part)
    if jax.tree.leaves(state.clients):
        assert_equal(flat(state.clients, True), want.own)
    assert_equal(flat(simulation.shared(state)), want.shared)
    if models:
        answer, _ = simulation.answer(state)
        assert_equal(flat(answer.local, True), want.local)
        assert (answer.personal is None) == (want.personal is None)
        if want.personal is not None:
            assert_equal(flat(answer.personal, True), want.personal)


def check_same_model(one: Algorithm, other: Algorithm, *, rtol: float = 1e-10) -> None:
    """After two rounds, two algorithms have the same shared model."""
    got, want = (flat(simulation.shared(state)) for simulation, state in map(two_rounds, (one, other)))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-12)


def each(mutants: Mapping[type, Any], *, slow: Sequence[type]) -> pytest.MarkDecorator:
    """A test of each of these, which are a longer form of it if they are `slow`."""
    marked = [pytest.param(cls, marks=[pytest.mark.slow] * (cls in slow)) for cls in mutants]
    return pytest.mark.parametrize("mutant", marked, ids=lambda cls: cls.__name__)


class Quadratic(NamedTuple):
    """f(x) = ½ (x − c)ᵀ A (x − c)."""

    A: np.ndarray
    c: np.ndarray

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """A (x − c)."""
        return self.A @ (x - self.c)


def quadratics(clients: int = 5, dimension: int = 3, seed: int = 0) -> list[Quadratic]:
    """Different curvatures, with eigenvalues between 0.5 and 2.5 or so, and different minimisers."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(clients):
        B = rng.normal(size=(dimension, dimension))
        A = B @ B.T
        parts.append(
            Quadratic(0.5 * np.eye(dimension) + 2 * A / np.linalg.norm(A, 2), rng.normal(size=dimension))
        )
    return parts


def minimiser(parts: Sequence[Quadratic]) -> np.ndarray:
    """argmin Σ f_i, where Σ A_i x = Σ A_i c_i."""
    return np.linalg.solve(sum(p.A for p in parts), sum(p.A @ p.c for p in parts))


def as_federation(parts: Sequence[Quadratic]) -> Federation:
    """Clients with these losses: the rows X = √d Lᵀ, where A = L Lᵀ, have mean ½ (Xx − Xc)² = f(x)."""
    d = len(parts[0].c)
    x = np.concatenate([np.sqrt(d) * np.linalg.cholesky(p.A).T for p in parts])
    n = np.full(len(parts), d)
    y = np.einsum("nj,nj->n", x, np.repeat([p.c for p in parts], d, axis=0))
    ids = np.arange(len(parts), dtype=np.uint32)
    return Federation(x=x, y=y, n_train=n, n_test=0 * n, classes=0, ids=ids).checked()


def linear(dimension: int) -> Model:
    """A model without a bias, whose parameters are x."""
    return Model(
        init_fn=lambda key: jnp.zeros(dimension), apply_fn=lambda x, rows: (rows @ x)[:, None], classes=0
    )


def on_quadratics(
    algorithm: Algorithm, parts: Sequence[Quadratic], rounds: int, *, cohort: int = 2
) -> tuple[Simulation, State]:
    """Rounds from zero on quadratic losses."""
    dimension = len(parts[0].c)
    simulation = Simulation(algorithm, linear(dimension), as_federation(parts), cohort=cohort, seed=1)
    state, finite = simulation.advance(start_at(simulation, np.zeros(dimension)), rounds)
    assert finite
    return simulation, state
