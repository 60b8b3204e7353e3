"""The proximal step: argmin_θ f(θ) + λ/2 ‖θ − w‖²."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from laws import SIZE, federation, flat, point, problem, softmax_regression, train_rows

from pfedme.core.losses import cross_entropy
from pfedme.core.models import Network
from pfedme.core.problem import Loss
from pfedme.core.prox import MOST_STEPS, Proximal, Solver, Span, descend, envelope_grad, prox
from pfedme.core.tree import Params

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

SOLVERS: tuple[Solver, ...] = ("gradient", "nesterov")
few = settings(derandomize=True, deadline=None, max_examples=30)


@partial(jax.tree_util.register_dataclass, data_fields=["A", "b"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Quadratic:
    """f(θ) = ½ θᵀ A θ − bᵀ θ."""

    A: jax.Array
    b: jax.Array

    def grad(self, theta: Params) -> Params:
        return Params(self.A @ theta.tree - self.b)


@partial(jax.jit, static_argnames=("K", "solver"))
def solve(f, w, start, lam, alpha, K, nu=None, solver: Solver = "gradient") -> Proximal:
    return prox(f, w, start, lam=lam, alpha=alpha, K=K, nu=nu, solver=solver)


def spread(smallest: float, largest: float, size: int, seed: int = 0) -> np.ndarray:
    """A symmetric matrix with eigenvalues evenly spread between two."""
    Q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    return Q @ np.diag(np.linspace(smallest, largest, size)) @ Q.T


numbers = st.floats(-3, 3)


@pytest.mark.parametrize("solver", SOLVERS)
@few
@given(arrays(float, (4, 4), elements=numbers), arrays(float, 4, elements=numbers), st.floats(0.1, 10))
def test_the_prox_of_a_quadratic_is_a_linear_solve(solver, M, w, lam):
    """∇h = A θ − b + λ (θ − w) vanishes at (A + λ I)⁻¹ (b + λ w)."""
    A, b = M @ M.T, M[0]
    alpha = 1 / (np.linalg.eigvalsh(A)[-1] + lam)
    p = Params(jnp.asarray(w))
    theta = solve(Quadratic(jnp.asarray(A), jnp.asarray(b)), p, p, lam, alpha, 1, 1e-22, solver).theta
    np.testing.assert_allclose(flat(theta), np.linalg.solve(A + lam * np.eye(4), b + lam * w), atol=1e-9)


@pytest.mark.parametrize("K", [1, 2, 5])
@pytest.mark.parametrize("solver", SOLVERS)
def test_k_steps_are_k_steps_made_by_hand(solver, K):
    A, (w, start, b) = spread(0.5, 4, 5), np.random.default_rng(1).normal(size=(3, 5))
    by_hand = oracles.descend if solver == "gradient" else oracles.accelerate
    got = solve(
        Quadratic(jnp.asarray(A), jnp.asarray(b)), Params(jnp.asarray(w)), Params(jnp.asarray(start)),
        1.5, 0.15, K, None, solver,
    )  # fmt: skip
    want = by_hand(lambda p: A @ p - b, w, start, 1.5, 0.15, K)
    np.testing.assert_allclose(flat(got.theta), want, rtol=1e-12, atol=1e-14)
    assert int(got.steps) == K


def test_one_step_of_nesterov_is_one_of_gradient_descent():
    f, w = Quadratic(jnp.eye(3), jnp.ones(3)), Params(jnp.arange(3.0))
    one, other = (solve(f, w, w, 2.0, 0.1, 1, None, solver).theta for solver in SOLVERS)
    np.testing.assert_array_equal(flat(one), flat(other))


@pytest.mark.parametrize("nu", [1e-2, 1e-6, 1e-20])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_asked_for_accuracy_is_met(solver, nu):
    fed, lam, l2 = federation(dtype=np.float64), 3.0, 0.05
    model = softmax_regression(l2)
    w, start = np.random.default_rng(2).normal(size=(2, SIZE))
    for i, rows in enumerate(train_rows(fed)):
        alpha = 1 / (oracles.smoothness(rows, l2) + lam)
        f = dataclasses.replace(
            problem(fed, model, i).sample(jax.random.key(0), 0), weight=jnp.asarray(_weights(fed, i))
        )
        found = solve(f, point(model, w), point(model, start), lam, alpha, 1, nu, solver)
        theta = flat(found.theta)
        rest = oracles.gradient(theta, rows, l2) + lam * (theta - w)
        assert rest @ rest <= nu * (1 + 1e-9) + 1e-28
        assert int(found.steps) < MOST_STEPS
        # A strongly convex h keeps θ within ‖∇h‖/(λ + μ) of its minimiser.
        away = theta - oracles.prox(w, rows, lam, l2)
        assert np.linalg.norm(away) <= np.sqrt(nu) / (lam + l2) + 1e-12


def _weights(fed, i: int) -> np.ndarray:
    return np.where(np.arange(fed.n_train.max()) < fed.n_train[i], 1 / fed.n_train[i], 0.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_step_is_taken_from_a_point_that_is_accurate_enough(solver):
    f, w = Quadratic(jnp.eye(3), jnp.zeros(3)), Params(jnp.arange(3.0))
    start = Params(jnp.asarray(0.5 * np.arange(3) + 1e-6))
    found = solve(f, w, start, 1.0, 0.1, 7, 1e-8, solver)
    np.testing.assert_array_equal(flat(found.theta), flat(start))
    assert int(found.steps) == 1, "one gradient of h is needed to know"


def test_fewer_steps_than_counted_would_not_have_been_enough():
    f, w = Quadratic(jnp.asarray(spread(0.1, 5, 4)), jnp.ones(4)), Params(jnp.arange(4.0))
    nu = 1e-6
    found = solve(f, w, w, 0.5, 0.15, 1, nu)
    gradients = int(found.steps)
    for K, enough in ((gradients - 1, True), (gradients - 2, False)):
        rest = envelope_grad(f, solve(f, w, w, 0.5, 0.15, K).theta, w, 0.5)
        assert (float(rest @ rest) <= nu) == enough


@pytest.mark.parametrize("kappa", [100.0, 10_000.0])
def test_nesterov_needs_far_fewer_steps_when_the_problem_is_ill_conditioned(kappa):
    """Gradient descent needs about κ steps for a digit, Nesterov's method about √κ."""
    lam = 1.0
    A = spread(0, (kappa - 1) * lam, 6)
    f, w = (
        Quadratic(jnp.asarray(A), jnp.ones(6)),
        Params(jnp.asarray(np.random.default_rng(0).normal(size=6))),
    )
    slow, fast = (int(solve(f, w, w, lam, 1 / kappa, 1, 1e-4, solver).steps) for solver in SOLVERS)
    assert fast < slow / 2
    rest = flat(envelope_grad(f, w, w, lam))
    # Nesterov: h − h* ≤ 2 (1 − 1/√κ)ᵏ (h₀ − h*), so θ's squared error is at most that times 2/λ. The
    # returned y is within three such errors, and ‖∇h(y)‖² ≤ (κλ)² times its square. From the start,
    # h₀ − h* ≤ ‖∇h₀‖²/(2λ). Together: ‖∇h(y)‖² ≤ 18 κ² (1 − 1/√κ)ᵏ ‖∇h₀‖².
    digits = np.log(18 * kappa**2 * (rest @ rest) / 1e-4)
    assert fast <= np.sqrt(kappa) * digits + 2


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_accuracy_beyond_reach_ends_the_search(solver):
    f, w = Quadratic(jnp.asarray(spread(0.3, 2, 3)), jnp.ones(3)), Params(jnp.ones(3) / 3)
    found = solve(f, w, w, 0.7, 0.3, 1, 0.0, solver)
    assert int(found.steps) <= MOST_STEPS
    want = np.linalg.solve(np.asarray(f.A) + 0.7 * np.eye(3), np.ones(3) + 0.7 / 3)
    np.testing.assert_allclose(flat(found.theta), want, rtol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_each_of_many_problems_solved_at_once_meets_its_accuracy(solver):
    """Under vmap the loop runs as long as the slowest needs; the others must stay where they are."""
    A = jnp.stack([jnp.asarray(spread(0.1, top, 4, seed)) for seed, top in enumerate((0.2, 3.0, 9.0))])
    w, b = Params(jnp.ones((3, 4))), jnp.ones((3, 4))

    def one(A, b, w):
        return prox(Quadratic(A, b), w, w, lam=0.5, alpha=0.1, K=1, nu=1e-10, solver=solver)

    together = jax.jit(jax.vmap(one))(A, b, w)
    apart = [jax.jit(one)(A[i], b[i], w[i]) for i in range(3)]
    assert [int(s) for s in together.steps] == [int(p.steps) for p in apart]
    for i, p in enumerate(apart):
        np.testing.assert_allclose(flat(together.theta[i]), flat(p.theta), rtol=1e-12)


def test_the_gradient_of_h_is_that_of_f_plus_the_pull():
    f, theta, w = Quadratic(2 * jnp.eye(2), jnp.array([1.0, 0.0])), Params(jnp.ones(2)), Params(jnp.zeros(2))
    np.testing.assert_array_equal(flat(envelope_grad(f, theta, w, 3.0)), [2 - 1 + 3, 2 + 3])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_too_long_never_reports_accuracy_that_is_not_there(solver):
    """α > 2/(L + λ) diverges; the search stops, and the caller can see that it did not arrive."""
    f, w = Quadratic(jnp.asarray(spread(1, 4, 3)), jnp.ones(3)), Params(jnp.ones(3))
    found = solve(f, w, w, 1.0, 3.0, 1, 1e-6, solver)
    rest = envelope_grad(f, found.theta, w, 1.0)
    assert not float(rest @ rest) <= 1e-6


# --- Sample space --------------------------------------------------------------------------------------


def batch_loss(hidden: tuple[int, ...], l2: float, weighted: bool) -> tuple[Loss, Params, Params]:
    """The loss of a network on five rows, and two points."""
    rng = np.random.default_rng(len(hidden))
    model = Network(features=7, classes=4, hidden=hidden, l2=l2)
    weight = jnp.asarray([0.1, 0.2, 0.3, 0.4, 0.0]) if weighted else None
    f = Loss(model, jnp.asarray(rng.normal(size=(5, 7))), jnp.array([0, 1, 2, 3, 0]), weight)
    w, start = (model.init(jax.random.key(seed)).map(lambda a: 2 * a.astype(jnp.float64)) for seed in (0, 1))
    return f, w, start


NETWORKS = pytest.mark.parametrize("hidden", [(), pytest.param((6,), marks=pytest.mark.slow), (6, 5)])


@NETWORKS
@pytest.mark.parametrize("l2", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_in_sample_space_are_the_plain_steps(hidden: tuple[int, ...], l2: float, solver: Solver):
    f, w, start = batch_loss(hidden, l2, weighted=bool(l2))
    for K, nu in ((7, None), (5, 1e-3)):
        got = solve(f, w, start, 3.0, 0.05, K, nu, solver)
        want = descend(f, w, start, 3.0, 0.05, K, nu, solver)
        assert int(got.steps) == int(want.steps)
        np.testing.assert_allclose(flat(got.theta), flat(want.theta), rtol=1e-10, atol=1e-12)


@NETWORKS
def test_norms_in_sample_space_are_euclidean(hidden: tuple[int, ...]):
    f, w, start = batch_loss(hidden, 0.1, weighted=False)
    span, rng = Span.of(f, w, start), np.random.default_rng(5)
    v = span.w.map(lambda a: jnp.asarray(rng.normal(size=a.shape)))
    np.testing.assert_allclose(span.square(v), np.sum(flat(span.point(v)) ** 2), rtol=1e-12)
    np.testing.assert_allclose(flat(span.point(span.w)), flat(w), rtol=1e-12)
    np.testing.assert_allclose(flat(span.point(span.start)), flat(start), rtol=1e-12)


@NETWORKS
def test_the_written_out_gradient_of_the_head_is_the_derivative(hidden: tuple[int, ...]):
    f, w, _ = batch_loss(hidden, 0.0, weighted=False)
    model, rest = Network(features=7, classes=4, hidden=hidden), w.tree[1:]
    z = jnp.asarray(np.random.default_rng(2).normal(size=(len(w.tree[0][1]), 5)))

    def mean_loss(logits: jax.Array) -> jax.Array:
        return jnp.mean(cross_entropy(logits, f.y))

    got = model.head_grad(rest, z, mean_loss)
    want = jax.grad(lambda z, rest: mean_loss(model.head(rest, z)), argnums=(0, 1))(z, rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
