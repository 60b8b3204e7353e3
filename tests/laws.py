"""Small federations and models to state laws about, and what it means for a law to hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler  # no public setting gives an option of XLA to every program
from oracles import Rows

from pfedme.algorithms import ALGORITHMS, Algorithm, FedBN, Mocha
from pfedme.core.models import Model, Network
from pfedme.core.normalised import NormalisedNetwork
from pfedme.core.problem import Problem
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation, State
from pfedme.engine.store import Store

A = TypeVar("A", bound=Algorithm)
T = TypeVar("T")

PAPERS = {
    name: ALGORITHMS[name] for name in ("pfedme", "fedavg", "per-fedavg", "alone", "fedavg-ft", "pooled")
}
"""The algorithms that the paper compares, and the baselines: tests of what is around algorithms use these."""
FEATURES, CLASSES = 3, 3
SIZE = (FEATURES + 1) * CLASSES
"""d of softmax regression."""
RAGGED = ((7, 3), (12, 0), (2, 1), (20, 6), (5, 4))
"""Training and test rows of five clients; the second has nothing to test."""
EXACT = ((8, 3), (4, 0), (16, 1), (2, 5))
"""The same, with training rows whose reciprocals are exact in any floating-point format."""

QUICKLY_COMPILED = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_llvm_disable_expensive_passes=true",
}
"""What makes a process compile programs fast, rather than to be fast, as is usual in tests."""


@contextmanager
def optimised() -> Iterator[None]:
    """Programs in the block are compiled to be fast, as users' are."""
    options = compiler.get_compile_options

    def with_fusion(*args: Any, **kwargs: Any) -> Any:
        found = options(*args, **kwargs)
        found.env_option_overrides = [*found.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return found

    jax.config.update("jax_disable_most_optimizations", False)
    compiler.get_compile_options = with_fusion
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
        compiler.get_compile_options = options


@contextmanager
def double_precision() -> Iterator[None]:
    """float64, for comparisons with NumPy."""
    with jax.enable_x64(True):
        yield


@contextmanager
def single_precision() -> Iterator[None]:
    """float32, optimised, as the program is used: for a comparison amid others in float64."""
    with optimised(), jax.enable_x64(False):
        yield


def federation(
    sizes: Sequence[tuple[int, int]] = RAGGED, *, seed: int = 0, dtype: type = np.float32
) -> Federation:
    """Clients of different sizes whose features have different means; labels are random."""
    rng = np.random.default_rng(seed)
    n_train, n_test = np.array(sizes).T
    counts = n_train + n_test
    centre = np.repeat(rng.normal(size=(len(sizes), FEATURES)), counts, axis=0)
    return Federation(
        x=(centre + rng.normal(size=(counts.sum(), FEATURES))).astype(dtype),
        y=rng.integers(0, CLASSES, counts.sum()).astype(np.int32),
        n_train=n_train,
        n_test=n_test,
        classes=CLASSES,
        ids=np.arange(len(sizes), dtype=np.uint32),
    ).checked()


def softmax_regression(l2: float = 0.0) -> Network:
    """The model of the oracles."""
    return Network(features=FEATURES, classes=CLASSES, l2=l2)


def network(l2: float = 0.01) -> Network:
    """A model with a hidden layer."""
    return Network(features=FEATURES, classes=CLASSES, hidden=(4,), l2=l2)


def fitting(cls: type[Algorithm], l2: float = 0.01) -> Model:
    """A small model that the algorithm can train."""
    if cls is FedBN:
        return NormalisedNetwork(features=FEATURES, classes=CLASSES, hidden=(4,), l2=l2)
    return softmax_regression(l2) if cls is Mocha else network(l2)


def train_rows(fed: Federation) -> list[Rows]:
    """Each client's training rows."""
    return [Rows(fed.x[s : s + n], fed.y[s : s + n]) for s, n in zip(fed.start, fed.n_train, strict=True)]


def held_out(fed: Federation) -> list[Rows]:
    """Each client's test rows."""
    return [
        Rows(fed.x[s + n : s + n + m], fed.y[s + n : s + n + m])
        for s, n, m in zip(fed.start, fed.n_train, fed.n_test, strict=True)
    ]


def with_test_rows(fed: Federation, value: float, label: int) -> Federation:
    """The same federation, with every number in its test rows replaced; not checked."""
    x, y = fed.x.copy(), fed.y.copy()
    for s, n, m in zip(fed.start, fed.n_train, fed.n_test, strict=True):
        x[s + n : s + n + m] = value
        y[s + n : s + n + m] = label
    return dataclasses.replace(fed, x=x, y=y)


def problem(fed: Federation, model: Model, i: int) -> Problem:
    """Client i's learning problem."""
    return Store.of(fed).problem(model, jnp.int32(i))


def point(model: Model, vector: np.ndarray) -> Params:
    """A vector, or each row of a matrix, as the model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0)).like(jnp.asarray(vector))


def tiny(cls: type[A], **given: Any) -> A:
    """An algorithm with few steps of each kind that it has."""
    few = {"R": 3, "K": 2, "F": 4, "H": 2, "B": 5, "eta": 0.05, "alpha": 0.01, "p": 0.5}
    few |= {"clusters": 2, "warmup": 1, "graph": "full"}
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in (few | given).items() if k in known})


def there(thing: T | None) -> T:
    """`thing`, which is there."""
    assert thing is not None
    return thing


def flat(point: Params | None, stacked: bool = False) -> np.ndarray:
    """Coordinates; of stacked points a row each."""
    return np.asarray(there(point).ravel(int(stacked)), np.float64)


def start_at(simulation: Simulation, w: np.ndarray) -> State:
    """The state before the first round, with w in place of the random models and in the dtype of w."""
    algorithm, clients, first = simulation.algorithm, simulation.trained_clients, point(simulation.model, w)
    server = algorithm.begin(jax.random.key(0), lambda _: first, clients)

    def own(i: jax.Array) -> Any:
        return algorithm.init(algorithm.send(server, i), lambda _: first)

    return State(0, server, jax.vmap(own)(jnp.arange(clients)))


def trajectory(simulation: Simulation, state: State, rounds: int) -> list[State]:
    """The state before the first of `rounds` rounds and after each."""
    states = [state]
    for _ in range(rounds):
        after, finite = simulation.advance(states[-1], 1)
        assert finite
        states.append(after)
    return states


def assert_same_bits(a: Any, b: Any) -> None:
    """Two trees of arrays are alike to the last bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()


def assert_close(a: Any, b: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two trees of arrays are alike to rounding; by default to float32's after a few dozen operations."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=rtol, atol=atol)


def differs(a: Any, b: Any, least: float = 1e-4) -> bool:
    """Whether two trees of arrays differ by more than rounding somewhere."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(p) - np.asarray(q)).max()) for p, q in leaves) > least


def assert_smooth_and_strongly_convex(
    gradients: np.ndarray, points: np.ndarray, *, smooth: float, convex: float | None, slack: float
) -> None:
    """‖g(a) − g(b)‖ ≤ L ‖a − b‖ and ⟨g(a) − g(b), a − b⟩ ≥ μ ‖a − b‖², for all pairs of points.

    `slack` is how far the gradients may be from exact ones.
    """
    for i in range(len(points)):
        for j in range(i):
            step, change = points[i] - points[j], gradients[i] - gradients[j]
            length = np.linalg.norm(step)
            assert np.linalg.norm(change) <= smooth * length + 2 * slack
            if convex is not None:
                assert change @ step >= convex * length**2 - 2 * slack * length
