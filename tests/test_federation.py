"""Federations: who owns which rows, and which rows are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedme.data.federation import Federation
from pfedme.errors import InputError


def numbered(
    counts: list[int], *, train: float = 0.75, shuffle: np.random.Generator | None = None
) -> Federation:
    """Clients with so many rows; row k of the store has feature k and label k mod 3."""
    n = sum(counts)
    x = np.arange(n, dtype=np.float32)[:, None]
    return Federation.split(counts, x, np.arange(n) % 3, classes=3, train=train, shuffle=shuffle)


def rows_of(f: Federation, i: int) -> np.ndarray:
    """The first feature of client i's rows."""
    return f.x[f.start[i] : f.start[i] + f.count[i], 0]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_each_client_trains_on_the_floor_of_its_share_and_on_one_row_at_least(
    counts: list[int], train: float
):
    f = numbered(counts, train=train)
    assert f.count.tolist() == counts
    assert f.n_train.tolist() == [max(1, int(np.floor(train * n))) for n in counts]
    assert f.start.tolist() == [sum(counts[:i]) for i in range(len(counts))]
    assert f.clients == len(counts)


def test_a_client_with_one_row_trains_on_it_and_has_nothing_to_test():
    f = numbered([1, 4])
    assert f.n_train.tolist() == [1, 3]
    assert f.n_test.tolist() == [0, 1]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_shuffling_keeps_every_row_with_its_client_and_its_label(counts: list[int], seed: int):
    f = numbered(counts, shuffle=np.random.default_rng(seed))
    for i, n in enumerate(counts):
        assert sorted(rows_of(f, i)) == list(range(sum(counts[:i]), sum(counts[:i]) + n))
    assert (f.y == f.x[:, 0] % 3).all()


def test_shuffling_shuffles_and_the_seed_decides_how():
    one, same, other = (numbered([100, 100], shuffle=np.random.default_rng(s)) for s in (0, 0, 1))
    assert (one.x == same.x).all()
    assert (one.x != other.x).any()
    assert rows_of(one, 0).tolist() != sorted(rows_of(one, 0))


def test_label_counts_are_counted_by_client_and_label():
    f = Federation.split([3, 2], np.zeros((5, 1), np.float32), np.array([0, 2, 2, 1, 1]), classes=4)
    assert f.label_counts().tolist() == [[1, 0, 2, 0], [0, 2, 0, 0]]


def test_clients_that_are_taken_keep_their_ids_and_rows():
    f = numbered([3, 5, 2, 7])
    part = f.take([3, 1])
    assert part.ids.tolist() == [3, 1]
    assert part.count.tolist() == [7, 5]
    assert part.n_train.tolist() == [f.n_train[3], f.n_train[1]]
    assert rows_of(part, 0).tolist() == rows_of(f, 3).tolist()
    assert rows_of(part, 1).tolist() == rows_of(f, 1).tolist()


def test_features_are_the_numbers_in_a_row_whatever_its_shape():
    f = Federation.split([2], np.zeros((2, 4, 5), np.float32), np.array([0, 0]), classes=1)
    assert f.features == 20


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_feature_that_is_not_finite_is_named_by_client_row_and_feature(value: float):
    x = np.zeros((9, 4), np.float32)
    x[7, 2] = value
    with pytest.raises(InputError) as caught:
        Federation.split([4, 5], x, np.zeros(9, int), classes=1)
    assert str(caught.value).startswith(f"Feature 2 of row 3 of client 1 is {value};")
    assert "remove or impute" in str(caught.value)


def test_a_feature_of_an_image_is_named_by_its_place():
    x = np.zeros((3, 2, 5), np.float32)
    x[1, 1, 4] = np.nan
    with pytest.raises(InputError, match="Feature 1, 4 of row 1 of client 0 is nan"):
        Federation.split([3], x, np.zeros(3, int), classes=1)


def test_a_missing_value_far_down_is_found_too():
    # Rows are examined in groups of 2²⁴ numbers; this one is in the second.
    x = np.zeros((20, 2**20), np.float16)
    x[18, 2**20 - 1] = np.nan
    with pytest.raises(InputError, match=rf"Feature {2**20 - 1} of row 8 of client 1 is nan"):
        Federation.split([10, 10], x, np.zeros(20, int), classes=1)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_is_shown_with_the_range(label: int):
    with pytest.raises(InputError, match=rf"Labels must be 0 to 2; found .*{label}"):
        Federation.split([2], np.zeros((2, 1), np.float32), np.array([1, label]), classes=3)


def test_a_federation_without_clients_is_refused():
    with pytest.raises(InputError, match="no clients"):
        Federation.split([], np.zeros((0, 2), np.float32), np.zeros(0, int), classes=2)


def test_a_client_without_rows_is_named():
    with pytest.raises(InputError, match="Client 1 has no training rows"):
        Federation.split([2, 0, 1], np.zeros((3, 2), np.float32), np.zeros(3, int), classes=2)


@pytest.mark.parametrize("counts", [[2, 2], [2, 4]])
def test_counts_that_do_not_add_up_to_the_rows_are_refused(counts: list[int]):
    with pytest.raises(InputError, match=rf"{sum(counts)}.*5|5.*{sum(counts)}"):
        Federation.split(counts, np.zeros((5, 2), np.float32), np.zeros(5, int), classes=2)


def test_features_and_labels_of_different_length_are_refused():
    with pytest.raises(InputError, match=r"5.*4|4.*5"):
        Federation.split([5], np.zeros((5, 2), np.float32), np.zeros(4, int), classes=2)
