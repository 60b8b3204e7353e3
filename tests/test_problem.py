"""Mini-batches: which rows a client draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import federation, point, problem, softmax_regression

from pfedme.core.private import scaled
from pfedme.core.problem import BLOCK
from pfedme.engine.store import Store


@pytest.mark.parametrize("count", [1, 2, 3, 187, 2**16 - 1, 2**16, 2**16 + 1, 10**6, 2**31 - 1])
def test_random_bits_scale_to_rows_as_whole_numbers_would(count: int):
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64)
    bits[:2] = 0, 2**32 - 1
    got = scaled(jnp.asarray(bits.astype(np.uint32)), jnp.int32(count))
    assert (np.asarray(got) == (bits * np.uint64(count)) >> np.uint64(32)).all()


def test_rows_are_drawn_uniformly_from_the_clients_training_rows_and_from_no_other():
    fed = federation()
    for i in range(fed.clients):
        own = problem(fed, softmax_regression(0.0), i)
        rows = np.asarray(own.draw(jax.random.key(i), 50, 400)) - fed.start[i]
        n = int(fed.n_train[i])
        assert rows.min() >= 0
        assert rows.max() < n
        seen = np.bincount(rows.ravel(), minlength=n)
        # Each count is binomial(20000, 1/n): six standard deviations.
        assert np.abs(seen - rows.size / n).max() <= 6 * np.sqrt(rows.size / n) + 1e-9


def test_cycled_rows_come_in_order_round_after_round():
    fed = federation()
    store = Store.of(fed)
    for i in range(fed.clients):
        drawn = [
            store.problem(softmax_regression(), i, t, "cycled").draw(jax.random.key(t), 2, 3)
            for t in range(9)
        ]
        want = fed.start[i] + np.arange(9 * 6) % fed.n_train[i]
        np.testing.assert_array_equal(np.concatenate(drawn).ravel(), want)


def test_test_rows_are_the_clients_own_and_a_client_without_any_gives_a_training_row():
    fed = federation()
    for i in range(fed.clients):
        rows = np.asarray(problem(fed, softmax_regression(), i).draw_test(jax.random.key(i), 500))
        first = fed.start[i] + fed.n_train[i] if fed.n_test[i] else fed.start[i]
        assert set(rows.tolist()) == set(range(first, first + max(1, fed.n_test[i])))


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_the_mean_loss_is_the_oracles_over_the_clients_training_rows_alone(rows: int, l2: float):
    fed = federation([(7, 3), (rows, 4), (2, 1)])
    own = slice(fed.start[1], fed.start[1] + rows)
    x = np.full_like(fed.x, np.nan)
    x[own] = fed.x[own]
    model = softmax_regression(l2)
    vectors = np.random.default_rng(rows).normal(size=(3, model.init(jax.random.key(0)).ravel().size))
    own_problem = problem(dataclasses.replace(fed, x=x), model, 1)
    got = jax.vmap(own_problem.mean_loss)(point(model, vectors.astype(np.float32)))
    want = [oracles.loss(vector, oracles.Rows(fed.x[own], fed.y[own]), l2) for vector in vectors]
    np.testing.assert_allclose(got, want, rtol=1e-5)
