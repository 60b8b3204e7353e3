"""The proximal step as machine code: it must take the steps that `descend` takes."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import federation, network, tiny

from pfedme.algorithms import FedAvg, PFedMe
from pfedme.core import native
from pfedme.core.models import Network
from pfedme.core.problem import Loss
from pfedme.core.prox import descend, prox
from pfedme.engine import simulate
from pfedme.engine.devices import padded
from pfedme.engine.simulate import Simulation
from pfedme.runs.environment import form

needs_kernel = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="the kernel is compiled by the package ziglang"
)
LAM, ALPHA, CLIENTS = 3.0, 0.05, 3


def problem(features, hidden, classes, B, l2=0.0, class_weights=None):
    """A network, batches of three clients, weights of their rows, and two points of each."""
    rng = np.random.default_rng(features)
    model = Network(features=features, classes=classes, hidden=hidden, l2=l2, class_weights=class_weights)
    x = jnp.asarray(rng.normal(size=(CLIENTS, B, features)), jnp.float32)
    labels = rng.integers(0, classes, (CLIENTS, B)) if classes else rng.normal(size=(CLIENTS, B))
    y = jnp.asarray(labels, jnp.int32 if classes else jnp.float32)
    weight = jnp.asarray(rng.dirichlet(np.ones(B), CLIENTS), jnp.float32)
    w, start = (jax.vmap(model.init)(jax.random.split(jax.random.key(k), CLIENTS)) for k in (0, 1))
    return model, (x, y, weight), (w, start)


def plain(f, w, start, K):
    """The steps without a change of coordinates."""
    return descend(f, w, start, LAM, ALPHA, K, None, "gradient").theta


def kernel(f, w, start, K):
    """The steps of prox.c."""
    assert native.covers(f, w)
    return native.steps(f, w, start, LAM, ALPHA, K)


def assert_close(got, want):
    """Within rounding: relative to the largest number of each array, and a few units of float32's 1.2e-7."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(b))))


@needs_kernel
@pytest.mark.parametrize("K", [1, 7])
@pytest.mark.parametrize(
    ("features", "hidden", "classes", "B"),
    [
        (16, (8,), 8, 20),  # whole vectors
        (13, (11,), 3, 7),  # every remainder
        (61, (33, 17), 27, 33),
        (5, (), 2, 1),
        (9, (6,), 0, 20),  # a regression
        (3, (), 0, 5),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_takes_the_plain_steps(features, hidden, classes, B, K, weighted):
    l2 = 0.1 if weighted else 0.0
    model, data, points = problem(features, hidden, classes, B, l2)

    def both(x, y, weight, w, start):
        f = Loss(model, x, y, weight if weighted else None)
        return kernel(f, w, start, K), plain(f, w, start, K)

    assert_close(*jax.jit(jax.vmap(both))(*data, *points))


@needs_kernel
def test_the_kernel_reads_the_rows_of_a_store_and_weights_classes():
    model, (x, y, _), (w, start) = problem(13, (5,), 3, 20, class_weights=(0.5, 1.0, 2.0))
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 60, (CLIENTS, 9)), jnp.int32)
    x, y = x.reshape(60, 13), y.reshape(60)

    def both(rows, w, start):
        f = Loss(model, x[rows], y[rows], source=(x, y, rows))
        return kernel(f, w, start, 5), plain(f, w, start, 5)

    assert_close(*jax.jit(jax.vmap(both))(rows, w, start))


@needs_kernel
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0)])
def test_what_problems_share_need_not_be_stacked(axes):
    model, (x, y, _), points = problem(7, (5,), 3, 6)

    def each(step):
        def one(x, w, start):
            return step(Loss(model, x, y[0]), w, start, 5)

        def own(at, a):
            return a if at == 0 else jax.tree.map(lambda leaf: leaf[0], a)

        x_own, w_own, start_own = own(axes[0], x), own(axes[1], points[0]), own(axes[2], points[1])
        once = jax.vmap(one, axes)
        pair = start_own.map(lambda a: jnp.stack([a, 2 * a]))
        return once(x_own, w_own, start_own), jax.vmap(once, (None, None, 0))(x_own, w_own, pair)

    assert_close(each(kernel), each(plain))


@needs_kernel
def test_numbers_that_are_not_finite_stay_visible():
    """A run stops at the first of them."""
    model, (x, y, _), points = problem(7, (5,), 3, 6)
    w, start = (p[0] for p in points)
    for bad in (np.nan, np.inf):
        broken = start.map(lambda a, bad=bad: a.at[(0,) * a.ndim].set(bad))
        assert not kernel(Loss(model, x[0], y[0]), w, broken, 5).all_finite()


@needs_kernel
def test_large_scores_do_not_overflow():
    model, (x, y, _), (w, start) = problem(7, (), 3, 6)
    f = Loss(model, 1e3 * x[0], y[0])
    assert_close(kernel(f, w[0], start[0], 1), plain(f, w[0], start[0], 1))


@needs_kernel
@pytest.mark.parametrize(
    ("given", "longest"),
    [({}, 8), ({"nu": 0.1}, 8), ({"solver": "nesterov"}, 8), ({"B": 0}, 64), ({"B": 0}, 65)],
)
def test_the_record_says_which_form_ran(given, longest):
    fed = federation(((longest, 2), (5, 1), (6, 1)))
    simulation = Simulation(tiny(PFedMe, R=2, **given), network(), fed, cohort=2)
    who = np.stack([padded(simulation.seated(0))] * simulate.MOST_ROUNDS).astype(np.int32)
    state, work = simulation.start(), (padded(np.zeros(2, int)), who, 1, None)
    program = simulate._advance.trace(simulation.store, (simulation.job(0),), (state,), *work, cohort=2)
    ran = "machine code" if native.TARGET in program.lower().as_text() else "XLA"
    assert form(simulation) == {"proximal_steps": ran}
    assert (ran == "machine code") == (not given or (longest == 64 and "B" in given))
    fedavg = Simulation(tiny(FedAvg), network(), fed, cohort=2)
    assert form(fedavg) == {}


def test_everything_else_is_left_to_xla():
    model, (x, y, _), points = problem(7, (5,), 3, 6)
    w, start = (p[0] for p in points)
    many = Loss(model, jnp.tile(x[0], (11, 1)), jnp.tile(y[0], 11))
    other = Loss(Network(features=7, classes=3, hidden=(5,)), x[0].astype(jnp.float16), y[0])
    assert not native.covers(many, w)
    assert not native.covers(other, w)
    theta = prox(many, w, start, lam=LAM, alpha=ALPHA, K=3).theta
    assert_close(theta, plain(many, w, start, 3))
