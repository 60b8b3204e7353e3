"""Scores against a loop over rows in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import federation, flat, held_out, network, point, softmax_regression, train_rows

from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.metrics import Blocks, Scores, score, summary

SIZES = ((7, 3), (12, 0), (3, 1), (90, 70), (5, 4), (1, 17), (40, 16))
"""Clients with no test row, a single one, and more rows than go into one block."""
few = settings(derandomize=True, deadline=None, max_examples=200)


def blocks_of(fed: Federation, part: str) -> Blocks:
    if part == "train":
        return Blocks.cut(fed.start, fed.n_train)
    return Blocks.cut(fed.start + fed.n_train, fed.n_test)


def models_for(model: Network, clients: int) -> Params:
    size = sum((a + 1) * b for a, b in itertools.pairwise((model.features, *model.hidden, model.classes)))
    return point(model, np.random.default_rng(1).normal(size=(clients, size)).astype(np.float32))


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize(
    ("model", "stacked"),
    [(network(), False), (network(), True), (softmax_regression(0.5), True)],
    ids=["one for all", "one each", "softmax regression"],
)
def test_scores_are_those_of_a_loop_over_the_rows(part, model, stacked):
    fed = federation(SIZES)
    thetas = models_for(model, fed.clients)
    theta = thetas if stacked else thetas[0]
    got = score(model, theta, jnp.asarray(fed.x), jnp.asarray(fed.y), blocks_of(fed, part), fed.clients)
    for i, rows in enumerate((train_rows if part == "train" else held_out)(fed)):
        layers = (thetas[i] if stacked else theta).tree
        correct, loss = oracles.score(oracles.network_logits(layers, rows.x), rows.y)
        assert got.count[i] == len(rows.y)
        assert got.correct[i] == correct
        np.testing.assert_allclose(got.loss[i], loss, rtol=1e-5, atol=1e-5)
        if len(rows.y):
            np.testing.assert_allclose(got.accuracy[i], correct / len(rows.y))
        else:
            assert np.isnan(got.accuracy[i])
    np.testing.assert_allclose(got.mean_loss, got.loss.sum() / got.count.sum())


def test_a_client_is_scored_with_its_own_model():
    """Exchanging two clients' models changes their scores and nobody else's."""
    fed, model = federation(SIZES), softmax_regression()
    thetas = models_for(model, fed.clients)
    exchanged = thetas[np.array([0, 1, 2, 4, 3, 5, 6])]
    one, other = (
        score(model, t, jnp.asarray(fed.x), jnp.asarray(fed.y), blocks_of(fed, "train"), fed.clients)
        for t in (thetas, exchanged)
    )
    np.testing.assert_array_equal(np.flatnonzero(one.loss != other.loss), [3, 4])


@pytest.mark.parametrize("part", ["train", "test"])
def test_rows_of_the_other_part_do_not_matter_to_a_score(part):
    fed, model = federation(SIZES), softmax_regression()
    theta, blocks = models_for(model, 1)[0], blocks_of(fed, part)
    poisoned = np.full_like(fed.x, np.nan)
    for s, n, m in zip(fed.start, fed.n_train, fed.n_test, strict=True):
        keep = slice(s, s + n) if part == "train" else slice(s + n, s + n + m)
        poisoned[keep] = fed.x[keep]
    one, other = (
        score(model, theta, jnp.asarray(x), jnp.asarray(fed.y), blocks, fed.clients)
        for x in (fed.x, poisoned)
    )
    np.testing.assert_array_equal(one.loss, other.loss)
    np.testing.assert_array_equal(one.correct, other.correct)


def test_a_federation_without_test_rows_has_no_test_scores():
    fed, model = federation(((4, 0), (6, 0))), softmax_regression()
    theta = models_for(model, 1)[0]
    test, train = (
        score(model, theta, jnp.asarray(fed.x), jnp.asarray(fed.y), blocks_of(fed, part), 2)
        for part in ("test", "train")
    )
    assert np.isnan(test.accuracy).all()
    assert test.count.sum() == 0
    entry = summary(test, train)
    assert entry["accuracy"] is entry["loss"] is entry["clients"] is None
    losses = [oracles.loss(flat(theta), rows, 0.0) for rows in train_rows(fed)]
    np.testing.assert_allclose(entry["train_loss"], np.average(losses, weights=[4, 6]), rtol=1e-5)


@few
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 5)), min_size=1, max_size=12))
def test_blocks_cover_each_row_exactly_once_and_belong_to_its_owner(sizes):
    """Clients of any size, with gaps of rows between them that belong to nobody."""
    count, gap = np.array(sizes).T
    start = np.cumsum(gap) + np.concatenate([[0], np.cumsum(count)[:-1]])
    blocks = Blocks.cut(start, count)
    np.testing.assert_array_equal(blocks.offset, np.arange(len(blocks.offset)))
    assert (blocks.valid >= 1).all()
    assert (blocks.valid <= len(blocks.offset)).all()
    covered = [
        (int(c), int(s + o))
        for c, s, v in zip(blocks.client, blocks.start, blocks.valid, strict=True)
        for o in blocks.offset[:v]
    ]
    owned = [
        (i, int(row)) for i, (s, n) in enumerate(zip(start, count, strict=True)) for row in range(s, s + n)
    ]
    assert sorted(covered) == owned


def scores(correct: list[float], count: list[int], loss: list[float] | None = None) -> Scores:
    return Scores(np.array(correct), np.array(loss or [0.0] * len(count)), np.array(count))


def test_accuracy_is_over_all_rows_and_the_clients_figures_over_their_own_accuracies():
    test = scores([1, 30, 0, 0], [2, 40, 0, 8], [4.0, 10.0, 0.0, 6.0])
    train = scores([0, 0, 0, 0], [5, 5, 5, 5], [1.0, 2.0, 3.0, 4.0])
    entry, own = summary(test, train), np.array([0.5, 0.75, 0.0])
    assert entry["accuracy"] == 31 / 50
    assert entry["loss"] == 20.0 / 50
    assert entry["train_loss"] == 10.0 / 20
    assert entry["clients"]["mean"] == own.mean()
    np.testing.assert_allclose(entry["clients"]["std"], own.std())
    assert entry["clients"]["min"] == 0.0


@few
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=45), st.integers(0, 5)
)
def test_the_worst_decile_is_the_mean_over_the_worst_tenth_of_clients_with_test_rows(rows, without):
    """A tenth is rounded up, so that it is at least one client."""
    count = [n for _, n in rows] + [0] * without
    correct = [float(min(k, n)) for k, n in rows] + [0.0] * without
    own = sorted(c / n for c, n in zip(correct, count, strict=True) if n)
    worst = own[: int(np.ceil(len(own) / 10))]
    entry = summary(scores(correct, count), scores([0.0], [1]))
    np.testing.assert_allclose(entry["clients"]["worst_decile"], sum(worst) / len(worst))
    assert entry["clients"]["min"] <= entry["clients"]["worst_decile"] <= entry["clients"]["mean"] + 1e-12
