"""An ensemble against NumPy, its laws, and from one-shot training to an export."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedme import Ensemble, Network, Predictor, Simulation, Synthetic, load
from pfedme.algorithms import OneShot
from pfedme.core.models import model_from_json
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.errors import InputError

MEMBERS = 5


def members(classes: int) -> tuple[Ensemble, jax.Array]:
    """An ensemble, and rows."""
    one = Network(features=4, classes=classes, hidden=(3,))
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
    return Ensemble(one=one, members=MEMBERS, classes=classes), rows


def test_it_gives_the_mean_of_the_members_probabilities():
    model, x = members(classes=3)
    theta = model.init(jax.random.key(1))
    each = []
    for k in range(MEMBERS):
        (W, b), (V, c) = jax.tree.map(lambda leaf, k=k: np.asarray(leaf[k], np.float64), theta.tree)
        z = np.maximum(np.asarray(x, np.float64) @ W.T + b, 0) @ V.T + c
        each.append(np.exp(z) / np.exp(z).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.exp(model.apply(theta, x)), np.mean(each, axis=0), rtol=1e-5)


def test_of_a_quantity_it_gives_the_mean_of_the_predictions():
    model, x = members(classes=0)
    theta = model.init(jax.random.key(1))
    each = [model.one.apply(theta[k], x) for k in range(MEMBERS)]
    np.testing.assert_allclose(model.apply(theta, x), np.mean(each, axis=0), rtol=1e-5)


def test_members_are_drawn_independently_and_their_order_does_not_matter():
    model, x = members(classes=3)
    theta = model.init(jax.random.key(1))
    assert len(np.unique(theta.tree[0][0].reshape(MEMBERS, -1), axis=0)) == MEMBERS
    permuted = theta[np.array([3, 0, 4, 2, 1])]
    np.testing.assert_allclose(model.apply(permuted, x), model.apply(theta, x), rtol=1e-5)


def test_equal_members_are_one_of_them():
    model, x = members(classes=3)
    theta = model.init(jax.random.key(1))[np.zeros(MEMBERS, int)]
    want = jax.nn.softmax(model.one.apply(theta[0], x), axis=1)
    np.testing.assert_allclose(np.exp(model.apply(theta, x)), want, rtol=1e-5)


def test_the_models_of_one_shot_training_predict_together_after_an_export(tmp_path: Path):
    federation = Synthetic(clients=4, rows=40, features=5, classes=3, iid=True).load()
    one = Network(features=5, classes=3)
    simulation = Simulation(OneShot(eta=0.1, R=5, B=10), one, federation, cohort=4)
    state, finite = simulation.advance(simulation.start(), 5)
    assert finite
    theta = simulation.answer(state)[0].local
    assert theta is not None
    model = Ensemble(one=one, members=4, classes=3)
    blocks = Blocks.cut(*federation.rows("test"))
    found = outcomes(model, theta, jnp.asarray(federation.x), jnp.asarray(federation.y), blocks)
    Predictor(model, theta).save(tmp_path / "together")
    rows = blocks.rows()
    predicted = load(tmp_path / "together").predict(federation.x[rows])
    assert ((predicted.astype(int) == federation.y[rows]) == found.right).all()


@pytest.mark.parametrize(
    "wrong", [{"members": 0}, {"members": 2.5}, {"one": {"kind": "ensemble"}}, {"one": None}]
)
def test_a_damaged_description_is_refused(wrong: dict):
    document = json.loads(json.dumps(members(classes=3)[0].to_json()))
    assert model_from_json(document) == members(classes=3)[0]
    with pytest.raises(InputError):
        model_from_json(document | wrong)
