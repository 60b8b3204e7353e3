"""Models, losses and batches against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import (
    CLASSES,
    FEATURES,
    RAGGED,
    SIZE,
    double_precision,
    federation,
    flat,
    network,
    point,
    problem,
    softmax_regression,
    train_rows,
)

from pfedme.core.losses import cross_entropy, curvature
from pfedme.core.models import DNN, MLR, Model, Network, parse_model
from pfedme.core.problem import Loss, Problem
from pfedme.core.tree import Params


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@jax.jit
def loss_and_gradient(f: Loss, theta: Params) -> tuple[jax.Array, Params]:
    return f(theta), f.grad(theta)


@partial(jax.jit, static_argnames="B")
def sample(own: Problem, key: jax.Array, B: int) -> Loss:
    return own.sample(key, B)


def test_softmax_regression_has_the_oracles_logits():
    model, theta, x = softmax_regression(), normal(0, SIZE), normal(1, 6, FEATURES)
    got = model.apply(point(model, theta.astype(np.float32)), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, oracles.logits(theta, x), rtol=1e-5, atol=1e-5)


def test_a_network_is_linear_layers_with_relu_between():
    model = Network(features=FEATURES, classes=CLASSES, hidden=(5, 4))
    theta, x = model.init(jax.random.key(3)), normal(1, 6, FEATURES)
    got = model.apply(theta, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, oracles.network_logits(theta.tree, x), rtol=1e-5, atol=1e-5)


def test_weights_and_biases_start_uniform_within_one_over_root_fan_in():
    layers = Network(features=400, classes=30, hidden=(50,)).init(jax.random.key(1)).tree
    assert [(W.shape, b.shape) for W, b in layers] == [((50, 400), (50,)), ((30, 50), (30,))]
    for (W, b), fan_in in zip(layers, (400, 50), strict=True):
        bound = fan_in**-0.5
        for a in (np.asarray(W), np.asarray(b)):
            assert np.abs(a).max() <= bound
            # A uniform variable on ±c has variance c²/3 and fourth moment c⁴/5: five standard errors.
            error = 5 * np.sqrt((1 / 5 - 1 / 9) / a.size)
            assert abs((a**2).mean() / bound**2 - 1 / 3) < error
            assert abs(a.mean() / bound) < 5 * np.sqrt(1 / 3 / a.size)


def test_different_layers_and_keys_start_differently():
    model = Network(features=4, classes=4, hidden=(4,))
    (W1, b1), (W2, b2) = model.init(jax.random.key(1)).tree
    (V1, _), _ = model.init(jax.random.key(2)).tree
    for a, b in ((W1, W2), (b1, b2), (W1, V1)):
        assert not np.any(np.asarray(a) == np.asarray(b))


def test_cross_entropy_is_minus_the_log_of_the_labels_probability():
    z, y = 5 * normal(0, 7, 4), np.array([0, 1, 2, 3, 3, 2, 1])
    got = cross_entropy(jnp.asarray(z.T, jnp.float32), jnp.asarray(y))
    np.testing.assert_allclose(got, oracles.row_losses(z, y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, -np.log(oracles.softmax(z)[np.arange(7), y]), rtol=1e-5, atol=1e-5)


def test_cross_entropy_of_huge_logits_stays_finite():
    got = cross_entropy(jnp.array([[1e30, 1e30], [0.0, 0.0]]), jnp.array([0, 1]))
    np.testing.assert_allclose(got, [0, 1e30])


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_the_loss_and_its_gradient_are_the_oracles(l2):
    rows, theta = oracles.Rows(normal(0, 6, FEATURES), np.array([0, 1, 2, 2, 1, 0])), normal(1, SIZE)
    model = softmax_regression(l2)
    with double_precision():
        f = Loss(model, jnp.asarray(rows.x), jnp.asarray(rows.y))
        value, gradient = loss_and_gradient(f, point(model, theta))
    np.testing.assert_allclose(float(value), oracles.loss(theta, rows, l2), rtol=1e-12)
    np.testing.assert_allclose(flat(gradient), oracles.gradient(theta, rows, l2), rtol=1e-10, atol=1e-13)


def test_the_l2_term_is_over_weights_and_biases_of_every_layer():
    x, y = jnp.ones((4, FEATURES)), jnp.array([0, 1, 2, 0])
    theta = network().init(jax.random.key(0))
    with_term, without = (loss_and_gradient(Loss(network(l2), x, y), theta)[0] for l2 in (0.5, 0.0))
    np.testing.assert_allclose(float(with_term - without), 0.25 * np.sum(flat(theta) ** 2), rtol=1e-5)


def test_weights_of_rows_weigh_their_losses():
    x, y, weight = normal(0, 3, FEATURES), np.array([0, 1, 2]), np.array([0.5, 0.0, 0.5])
    model, theta = softmax_regression(), normal(1, SIZE)
    f = Loss(model, jnp.asarray(x, jnp.float32), jnp.asarray(y), jnp.asarray(weight, jnp.float32))
    want = weight @ oracles.row_losses(oracles.logits(theta, x), y)
    np.testing.assert_allclose(float(f(point(model, theta.astype(np.float32)))), want, rtol=1e-5)


@pytest.mark.parametrize("i", range(len(RAGGED)))
def test_a_full_batch_is_the_mean_over_the_clients_own_training_rows(i):
    fed, model, theta = federation(), softmax_regression(0.1), normal(1, SIZE)
    f, rows = sample(problem(fed, model, i), jax.random.key(0), 0), train_rows(fed)[i]
    value, gradient = loss_and_gradient(f, point(model, theta.astype(np.float32)))
    np.testing.assert_allclose(float(value), oracles.loss(theta, rows, 0.1), rtol=1e-5)
    np.testing.assert_allclose(flat(gradient), oracles.gradient(theta, rows, 0.1), rtol=1e-4, atol=1e-6)


def test_a_full_batch_keeps_the_precision_of_the_rows():
    fed, model, theta = federation(dtype=np.float64), softmax_regression(), normal(1, SIZE)
    for i, rows in enumerate(train_rows(fed)):
        with double_precision():
            f = sample(problem(fed, model, i), jax.random.key(0), 0)
            value, _ = loss_and_gradient(f, point(model, theta))
        np.testing.assert_allclose(float(value), oracles.loss(theta, rows, 0), rtol=1e-12)


@pytest.mark.parametrize("i", range(len(RAGGED)))
def test_mini_batches_come_from_the_clients_training_rows_alike_often(i):
    fed, draws = federation(), 4000
    own, n = problem(fed, softmax_regression(), i), RAGGED[i][0]
    batch = sample(own, jax.random.key(5), draws)
    rows = train_rows(fed)[i]
    x, y = np.asarray(batch.x), np.asarray(batch.y)
    seen = (x[:, None] == rows.x[None]).all(axis=2) & (y[:, None] == rows.y)
    assert (seen.sum(axis=1) == 1).all()
    # A binomial count is within five standard deviations of its mean.
    assert np.abs(seen.sum(axis=0) - draws / n).max() <= 5 * np.sqrt(draws / n * (1 - 1 / n))


def test_another_key_draws_another_mini_batch():
    own = problem(federation(), softmax_regression(), 3)
    a, b, again = (sample(own, jax.random.key(k), 5).x for k in (0, 1, 0))
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(a, again)


def test_any_pair_of_functions_is_a_model():
    model = Model(
        init_fn=lambda key: {"W": jax.random.normal(key, (FEATURES, CLASSES))},
        apply_fn=lambda tree, x: x @ tree["W"],
        l2=0.2,
    )
    theta, x = model.init(jax.random.key(0)), normal(1, 5, FEATURES).astype(np.float32)
    want = oracles.network_logits([(theta.tree["W"].T, np.zeros(CLASSES))], x)
    np.testing.assert_allclose(model.apply(theta, jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(float(model.regulariser(theta)), 0.1 * np.sum(flat(theta) ** 2), rtol=1e-5)


def test_descriptions_build_the_papers_models():
    assert MLR(l2=0.001).build(60, 10) == Network(features=60, classes=10, l2=0.001)
    assert DNN().build(60, 10).hidden == (20,)
    assert DNN().build(784, 10).hidden == (100,)
    assert parse_model("dnn:hidden=7-5,l2=0.5").build(60, 10) == Network(
        features=60, classes=10, hidden=(7, 5), l2=0.5
    )


@pytest.mark.parametrize("eigenvalues", [(1.0, 3.0, 0.5), (2.0, 0.1, 0.0), (-1.0, 5.0, 2.0)])
def test_curvature_of_a_quadratic_is_its_largest_eigenvalue(eigenvalues):
    Q, _ = np.linalg.qr(normal(0, 3, 3))
    A = jnp.asarray(Q @ np.diag(eigenvalues) @ Q.T, jnp.float32)
    got = curvature(lambda p: 0.5 * (p.tree @ (A @ p.tree)), Params(jnp.zeros(3)))
    np.testing.assert_allclose(float(got), max(eigenvalues), rtol=1e-3)


@pytest.mark.parametrize("l2", [0.0, 0.001, 1.0])
def test_curvature_of_softmax_regression_is_the_largest_eigenvalue_of_its_hessian(l2):
    """Power iteration must not begin in the null space: adding a constant to all logits changes nothing."""
    model, rows = softmax_regression(l2), oracles.Rows(normal(0, 32, FEATURES), np.arange(32) % CLASSES)
    f = Loss(model, jnp.asarray(rows.x, jnp.float32), jnp.asarray(rows.y))
    for theta in (np.zeros(SIZE), 0.5 * normal(1, SIZE)):
        got = curvature(f, point(model, theta.astype(np.float32)))
        want = np.linalg.eigvalsh(oracles.hessian(theta, rows, l2))[-1]
        np.testing.assert_allclose(float(got), want, rtol=0.1)  # thirty steps from any fair start reach 4 %
