"""Params is a vector space with an inner product; records change their floats without a new program."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from laws import assert_close, assert_same_bits, flat

from pfedme.algorithms import ALGORITHMS
from pfedme.core.tree import Params, record

few = settings(derandomize=True, deadline=None, max_examples=25)
numbers = st.integers(-80, 80).map(lambda n: n / 10)
vectors = arrays(np.float32, 9, elements=numbers)
shape = Params([(jnp.zeros((2, 3)), jnp.zeros(2)), jnp.zeros(())])


def point(vector: np.ndarray) -> Params:
    return shape.like(jnp.asarray(vector))


def assert_equal(a: Params, b: Params) -> None:
    """To rounding: coordinates are at most some hundreds, float32 has 2⁻²³ of that."""
    assert_close(a, b, rtol=1e-5, atol=1e-3)


@few
@given(vectors, vectors, vectors)
def test_addition_is_commutative_associative_and_has_a_zero(a, b, c):
    u, v, w = point(a), point(b), point(c)
    assert_same_bits(u + v, v + u)
    assert_equal((u + v) + w, u + (v + w))
    np.testing.assert_array_equal(flat(u + 0.0 * v), a)
    np.testing.assert_array_equal(flat(u - u), 0)


@few
@given(vectors, vectors, numbers, numbers)
def test_scaling_distributes_over_vectors_and_scalars(a, b, s, t):
    u, v = point(a), point(b)
    assert_equal(s * (u + v), s * u + s * v)
    assert_equal((s + t) * u, s * u + t * u)
    assert_equal(s * (t * u), (s * t) * u)
    assert_same_bits(1.0 * u, u)
    assert_same_bits(s * u, u * s)
    assert_same_bits(u - v, u + (-1.0) * v)


@few
@given(vectors, vectors, vectors, numbers)
def test_the_inner_product_is_symmetric_bilinear_and_that_of_the_coordinates(a, b, c, s):
    u, v, w = point(a), point(b), point(c)
    assert float(u @ v) == float(v @ u)
    np.testing.assert_allclose(float(u @ v), np.dot(a.astype(float), b.astype(float)), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(float((s * u + v) @ w), s * float(u @ w) + float(v @ w), rtol=1e-5, atol=2e-2)
    assert float(u @ u) >= 0


@few
@given(vectors, vectors)
def test_arithmetic_is_that_of_the_coordinate_vectors(a, b):
    np.testing.assert_array_equal(flat(point(a) + point(b)), a + b)
    np.testing.assert_array_equal(flat(point(a) - point(b)), a - b)
    np.testing.assert_array_equal(flat(point(a) * 3.0), np.float32(3) * a)


@pytest.mark.parametrize("scalar", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), jnp.float32(2)])
def test_every_kind_of_scalar_scales_from_either_side(scalar):
    w = point(np.arange(9, dtype=np.float32))
    for product in (scalar * w, w * scalar):
        assert isinstance(product, Params)
        assert product.ravel().dtype == jnp.float32
        np.testing.assert_array_equal(flat(product), 2 * np.arange(9))


@few
@given(vectors)
def test_like_undoes_ravel_and_ravel_undoes_like(a):
    w = point(a)
    np.testing.assert_array_equal(flat(w), a)
    assert_same_bits(shape.like(w.ravel()), w)


@few
@given(arrays(np.float32, (4, 9), elements=numbers))
def test_like_undoes_ravel_for_a_stack_of_points(rows):
    stack = point(rows)
    assert [leaf.shape for leaf in jax.tree.leaves(stack)] == [(4, 2, 3), (4, 2), (4,)]
    np.testing.assert_array_equal(flat(stack, stacked=True), rows)
    assert_same_bits(shape.like(stack.ravel(1)), stack)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(flat(stack[i]), row)
    np.testing.assert_array_equal(flat(stack[jnp.array([3, 1])], stacked=True), rows[[3, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 7, 8])
def test_one_bad_coordinate_in_any_layer_is_not_finite(bad, where):
    vector = np.ones(9, np.float32)
    assert bool(point(vector).all_finite())
    vector[where] = bad
    assert not bool(point(vector).all_finite())


def test_points_pass_through_transformations():
    w = point(np.arange(9, dtype=np.float32))
    assert_same_bits(jax.grad(lambda p: 0.5 * (p @ p))(w), w)
    assert_same_bits(jax.jit(lambda p: 2.0 * p)(w), 2.0 * w)


@record
class Settings:
    """A record with every kind of field."""

    eta: float = 0.5
    nu: float | None = None
    R: int = 3
    kind: str = "plain"


def test_floats_of_a_record_are_data_and_everything_else_is_static():
    assert jax.tree.leaves(Settings()) == [0.5]
    assert jax.tree.leaves(Settings(nu=0.25)) == [0.5, 0.25]
    assert jax.tree.structure(Settings()) == jax.tree.structure(Settings(eta=7.0))
    for other in (Settings(R=4), Settings(kind="other"), Settings(nu=1.0)):
        assert jax.tree.structure(Settings()) != jax.tree.structure(other)


def test_records_that_differ_in_floats_share_one_program():
    traced: list[Any] = []

    @jax.jit
    def double(s: Settings) -> Any:
        traced.append(s.R)
        return 2 * s.eta

    assert float(double(Settings(eta=1.0))) == 2
    assert float(double(Settings(eta=3.0))) == 6
    assert len(traced) == 1
    double(Settings(R=9))
    assert len(traced) == 2


def test_a_record_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataclasses.replace(Settings()).__setattr__("eta", 1.0)


def test_records_of_different_types_are_different_trees():
    """Bug (of JAX 0.10, in `register_dataclass`): types with as many fields are equal, so that one record is
    now and then given the program that was compiled for another."""
    made = []
    for number in range(200):

        @record
        class Alike:
            eta: float = 0.1

            def told(self, number: int = number) -> Any:
                return 0 * self.eta + number

        made.append(Alike())
    told = jax.jit(lambda it: it.told())
    assert [int(told(it)) for it in made] == list(range(200))


def test_no_two_algorithms_are_the_same_tree():
    shapes = [
        jax.tree.structure(dataclasses.replace(cls(), aggregation="uniform")) for cls in ALGORITHMS.values()
    ]
    assert all(a != b for a, b in itertools.combinations(shapes, 2))


def test_a_record_is_flattened_with_the_names_of_its_floats():
    (found,) = jax.tree_util.tree_leaves_with_path(Settings(eta=3.0))
    assert jax.tree_util.keystr(found[0]) == ".eta"
    again = jax.tree.map(lambda a: 2 * a, Settings(eta=3.0, R=9))
    assert again == Settings(eta=6.0, R=9)
