"""Batch normalisation against NumPy, its moving averages, and from the command line to predictions."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import (
    PAPERS,
    assert_close,
    assert_same_bits,
    double_precision,
    federation,
    flat,
    point,
    problem,
    tiny,
    train_rows,
)
from test_deploy import QUICK, Room, deployed, owners, w_of

import pfedme
from pfedme.algorithms import Algorithm, FedAvg
from pfedme.algorithms.base import sgd
from pfedme.cli import main
from pfedme.core.models import DNN, MODELS, Network, NormalisedDNN, model_from_json, parse_model
from pfedme.core.normalised import Moments, Normalisation, NormalisedNetwork, normalisation
from pfedme.core.problem import Loss
from pfedme.core.prox import prox
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.table import Table
from pfedme.deploy.messages import Refusal
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.execute import execute

FEATURES, CLASSES = 3, 3
MODEL = NormalisedNetwork(features=FEATURES, classes=CLASSES, hidden=(4, 2))
HIDDEN, WIDTHS = (4 * 3 + 4, 2 * 4 + 2), (4, 2)
"""Number of weights and biases of each hidden layer, and its number of units."""
UNEQUAL = np.array([0.1, 0.3, 0.2, 0.15, 0.0, 0.25])

Layers = list[tuple[np.ndarray, ...]]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def drawn(seed: int = 0) -> np.ndarray:
    """Parameters without any regularity, with variances that are positive."""
    vector = normal(seed, 16 + 16 + 10 + 8 + 9)
    vector[variances()] = np.abs(vector[variances()]) + 0.3
    return vector


def statistics() -> np.ndarray:
    """Which of the coordinates are m and v."""
    found, at = np.zeros(59, bool), 0
    for weights, units in zip(HIDDEN, WIDTHS, strict=True):
        found[at + weights + 2 * units : at + weights + 4 * units] = True
        at += weights + 4 * units
    return found


def variances() -> np.ndarray:
    """Which of the coordinates are v."""
    found = statistics()
    found[16 + 8 : 16 + 12] = found[32 + 10 + 4 : 32 + 10 + 6] = False
    return found


def rows() -> oracles.Rows:
    return oracles.Rows(normal(7, 6, FEATURES), np.array([0, 1, 2, 2, 1, 0]))


def layers_of(theta: np.ndarray) -> Layers:
    """(W, b, scale, shift, m, v) of each hidden layer, and (W, b) of the last, from the flat vector."""
    found, at = [], 0
    for shapes in (((4, 3), *[(4,)] * 5), ((2, 4), *[(2,)] * 5), ((3, 2), (3,))):
        layer = []
        for shape in shapes:
            size = int(np.prod(shape))
            layer.append(theta[at : at + size].reshape(shape))
            at += size
        found.append(tuple(layer))
    assert at == len(theta)
    return found


def logits(
    theta: np.ndarray, x: np.ndarray, share: np.ndarray | None
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The logits, and each hidden layer's mean and variance over rows with these weights; or, if `share` is
    None, the logits with m and v."""
    *hidden, (W, b) = layers_of(theta)
    moments = []
    for V, c, scale, shift, m, v in hidden:
        z = x @ V.T + c
        if share is not None:
            m = (share[:, None] * z).sum(axis=0)
            v = (share[:, None] * z**2).sum(axis=0) - m**2
        moments.append((m, v))
        x = np.maximum(scale * (z - m) / np.sqrt(v + 1e-5) + shift, 0)
    return x @ W.T + b, moments


def training_loss(theta: np.ndarray, share: np.ndarray, l2: float) -> float:
    """The loss of a batch, with l2 on all but m and v."""
    z, _ = logits(theta, rows().x, share)
    return float(share @ oracles.row_losses(z, rows().y) + l2 / 2 * np.sum(theta[~statistics()] ** 2))


def batch(model: NormalisedNetwork, weight: np.ndarray | None = None) -> Loss:
    x, y = map(jnp.asarray, rows())
    return Loss(model, x, y, None if weight is None else jnp.asarray(weight))


# --- Values and gradients ----------------------------------------------------------------------------


def test_in_use_rows_are_normalised_by_running_statistics():
    with double_precision():
        got = MODEL.apply(point(MODEL, drawn()), jnp.asarray(rows().x))
    np.testing.assert_allclose(got, logits(drawn(), rows().x, None)[0], rtol=1e-10)


def test_a_negative_variance_counts_as_zero():
    """As after a step that is too large."""
    below, zero = drawn(), drawn()
    below[variances()], zero[variances()] = -0.5, 0
    with double_precision():
        got = MODEL.apply(point(MODEL, below), jnp.asarray(rows().x))
    np.testing.assert_allclose(got, logits(zero, rows().x, None)[0], rtol=1e-10)


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("weight", [None, UNEQUAL], ids=["equal", "weighted"])
def test_the_loss_and_its_gradient_are_those_of_numpy(weight: np.ndarray | None, l2: float):
    theta, model = drawn(), dataclasses.replace(MODEL, l2=l2)
    share = np.full(6, 1 / 6) if weight is None else weight
    with double_precision():
        f = batch(model, weight)
        value, gradient = jax.jit(jax.value_and_grad(f.__call__))(point(model, theta))
    np.testing.assert_allclose(float(value), training_loss(theta, share, l2), rtol=1e-10)
    want = oracles.slope(lambda at: training_loss(at, share, l2), theta)
    _, moments = logits(theta, rows().x, share)
    running = np.concatenate([np.concatenate(layer[4:6]) for layer in layers_of(theta)[:-1]])
    want[statistics()] = running - np.concatenate([np.concatenate(found) for found in moments])
    np.testing.assert_allclose(flat(gradient), want, rtol=1e-6, atol=1e-8)


def test_a_regression_has_one_score():
    model = NormalisedNetwork(features=FEATURES, hidden=(4,))
    theta = model.init(jax.random.key(0))
    assert model.apply(theta, jnp.zeros((5, FEATURES))).shape == (5, 1)
    f = Loss(model, jnp.asarray(normal(0, 5, FEATURES), jnp.float32), jnp.asarray(normal(1, 5), jnp.float32))
    assert bool(jax.jit(f.grad)(theta).all_finite())


def test_a_batch_of_one_row_has_finite_gradients():
    """Its variance is zero."""
    f = Loss(MODEL, jnp.ones((1, FEATURES)), jnp.array([1]))
    assert bool(jax.jit(f.grad)(MODEL.init(jax.random.key(0))).all_finite())


def test_it_starts_with_the_weights_of_a_network_and_statistics_that_change_nothing():
    key = jax.random.key(5)
    *hidden, last = MODEL.init(key).tree
    plain = Network(features=FEATURES, classes=CLASSES, hidden=(4, 2)).init(key)
    assert_same_bits([*((W, b) for W, b, _ in hidden), last], plain.tree)
    for W, _, layer in hidden:
        one, zero = jnp.ones(len(W)), jnp.zeros(len(W))
        assert_same_bits(layer, Normalisation(one, zero, Moments(zero, one)))


# --- Training ----------------------------------------------------------------------------------------


def test_a_step_of_sgd_is_a_moving_average_with_momentum_eta():
    eta, fed = 0.2, federation(dtype=np.float64)
    own = train_rows(fed)[3]
    share = np.full(len(own.y), 1 / len(own.y))
    with double_precision():
        client, theta = problem(fed, dataclasses.replace(MODEL, l2=0.3), 3), point(MODEL, drawn())
        step = jax.jit(lambda w: sgd(jax.random.key(0), client, w, eta=eta, steps=1, B=0))
        for _ in range(3):
            before, theta = flat(theta), step(theta)
            _, moments = logits(before, own.x, share)
            for old, new, (mean, var) in zip(
                layers_of(before), layers_of(flat(theta)), moments, strict=False
            ):
                np.testing.assert_allclose(new[4], (1 - eta) * old[4] + eta * mean, rtol=1e-9, atol=1e-12)
                np.testing.assert_allclose(new[5], (1 - eta) * old[5] + eta * var, rtol=1e-9, atol=1e-12)


def test_a_clients_own_l2_does_not_shrink_statistics():
    client, w = problem(federation(), MODEL, 3), MODEL.init(jax.random.key(1))
    step = jax.jit(lambda l2: sgd(jax.random.key(0), client, w, eta=0.1, steps=1, B=0, l2=l2))
    weak, strong = (flat(step(jnp.float32(l2))) for l2 in (0.0, 100.0))
    np.testing.assert_array_equal(weak[statistics()], strong[statistics()])
    assert not np.array_equal(weak, strong)


def test_rows_that_fill_up_a_full_batch_change_nothing():
    fed = federation()
    theta, own = MODEL.init(jax.random.key(2)), train_rows(fed)[0]
    assert len(own.y) < fed.n_train.max()
    masked = jax.jit(lambda client: client.sample(jax.random.key(0), 0).grad(theta))
    plain = jax.jit(Loss(MODEL, jnp.asarray(own.x), jnp.asarray(own.y)).grad)(theta)
    assert_close(masked(problem(fed, MODEL, 0)), plain)
    assert_close(masked(problem(fed.take([0]), MODEL, 0)), plain)


def test_the_prox_takes_gradient_steps():
    """Not those in sample space, which are for plain networks."""
    lam, alpha = 2.0, 0.05
    with double_precision():
        f, w, start = batch(MODEL), point(MODEL, drawn()), point(MODEL, drawn(1))
        found = jax.jit(lambda: prox(f, w, start, lam=lam, alpha=alpha, K=2))().theta
        step = jax.jit(lambda theta: theta - alpha * (f.grad(theta) + lam * (theta - w)))
        want = step(step(start))
    assert_close(found, want, rtol=1e-9, atol=1e-12)


def alike() -> Federation:
    """Clients whose rows come from one distribution, with labels that depend on them."""
    fed = federation(((7, 3), (12, 2), (3, 1), (9, 4)))
    x = normal(3, *fed.x.shape).astype(np.float32)
    return dataclasses.replace(fed, x=x, y=np.argmax(x, axis=1).astype(np.int32)).checked()


@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=pytest.mark.slow if name != "pfedme" else ()) for name, cls in PAPERS.items()],
    ids=PAPERS,
)
def test_every_algorithm_learns(cls: type[Algorithm]):
    sim = Simulation(tiny(cls, alpha=0.05, eta=0.1), MODEL, alike(), cohort=3)
    start = sim.start()
    later, finite = sim.advance(start, 60)
    assert finite
    before, after = (sim.evaluate(state)[0].train for state in (start, later))
    for kind in before:
        assert after[kind].mean_loss < before[kind].mean_loss


# --- Parts of a point --------------------------------------------------------------------------------


def split(w: Params) -> tuple[Params, Params]:
    part = normalisation(w)
    return part, w.without(part)


@pytest.mark.parametrize("stacked", [False, True])
def test_normalisation_and_the_rest_are_parts_that_rejoin(stacked: bool):
    w = point(MODEL, np.stack([drawn(), drawn(1)]) if stacked else drawn())
    part, rest = split(w)
    for joined in (part | rest, rest | part, (2.0 * part - part) | rest):
        assert_same_bits(joined, w)
    sizes = [leaf.shape[-1] for leaf in jax.tree.leaves(part)]
    assert sizes == [4] * 4 + [2] * 4
    assert len(jax.tree.leaves(part)) + len(jax.tree.leaves(rest)) == len(jax.tree.leaves(w))


def test_a_layer_is_a_linear_layer_with_its_normalisation():
    w = point(MODEL, drawn())
    assert len(w.layers) == 3
    body, head = w.layers[:-1], w.layers[-1:]
    assert_same_bits(body | head, w)
    assert [leaf.shape for leaf in jax.tree.leaves(head)] == [(3, 2), (3,)]
    assert not jax.tree.leaves(normalisation(w).layers[-1:])
    assert_same_bits(w.without(head), body)


def test_other_models_have_no_normalisation():
    for model in (Network(features=3, classes=2, hidden=(4,)), parse_model("cnn").build(36, 2, (6, 6))):
        assert not jax.tree.leaves(normalisation(model.init(jax.random.key(0))))


# --- Descriptions ------------------------------------------------------------------------------------


def test_it_can_be_written_down_and_read_again():
    document = json.loads(json.dumps(MODEL.to_json()))
    assert model_from_json(document) == MODEL
    assert document["features"] == FEATURES


def test_its_options_are_those_of_dnn():
    found = parse_model("dnn-bn:hidden=100-50,l2=0.001")
    assert found == NormalisedDNN(hidden=(100, 50), l2=0.001)
    want = NormalisedNetwork(features=9, classes=2, hidden=(100, 50), l2=0.001)
    assert found.build(9, 2) == want
    for features in (99, 100):
        plain = DNN().with_defaults(features)
        assert NormalisedDNN().with_defaults(features).hidden == plain.hidden


@pytest.mark.parametrize(
    "make",
    [
        lambda: parse_model("dnn-bn:hidden=").with_defaults(9),
        lambda: model_from_json({**MODEL.to_json(), "hidden": []}),
    ],
    ids=["text", "JSON"],
)
def test_without_hidden_layers_there_is_nothing_to_normalise(make: Callable[[], object]):
    with pytest.raises(InputError, match="hidden of model 'dnn-bn' must name at least one layer"):
        make()


def test_a_deployed_client_trains_it_only_if_its_owner_allows_it():
    plan = Plan(algorithm=FedAvg(), model=MODELS["dnn-bn"]())
    with pytest.raises(Refusal, match="allows the model mlr, but not dnn-bn"):
        Policy().check_plan(plan)
    Policy(models=("mlr", "dnn-bn")).checked().check_plan(plan)


@pytest.mark.slow
def test_a_deployed_run_is_the_simulated_one(tmp_path: Path):
    tables, algorithm, model = owners(tmp_path), FedAvg(**QUICK), NormalisedDNN(hidden=(4,))
    plan = Plan(
        algorithm=algorithm, model=model, rounds=3, cohort=3, seed=5, min_clients=5, clip=0.0,
    )  # fmt: skip
    out = deployed(tmp_path, plan, Room(tables, tmp_path / "state"))
    data = Table(path=str(tables), label="sick")
    run = Run(algorithm=algorithm, data=data, model=model, rounds=3, cohort=3, seed=5)
    np.testing.assert_allclose(
        w_of(out), np.asarray(execute(run, tmp_path / "simulated").w), rtol=1e-4, atol=1e-5
    )


# --- From the command line to predictions ------------------------------------------------------------


@pytest.mark.slow
def test_a_run_ends_well_and_its_model_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    line = "run fedavg --model dnn-bn --data synthetic:clients=5,rows=40 --eta 0.1 --rounds 3 --out run"
    assert main(shlex.split(line)) == 0
    assert Folder(Path("run")).read()["config"]["model"] == {"name": "dnn-bn", "hidden": [20], "l2": 0.0}
    assert "A neural network with batch normalisation (dnn-bn:" in Path("run/report.html").read_text()
    assert main(["export", "run", "-o", "model"]) == 0
    trained, exported = pfedme.model_of("run"), pfedme.load("model")
    assert exported.model == NormalisedNetwork(features=60, classes=10, hidden=(20,))
    assert_same_bits(exported.theta, trained.theta)
    x = normal(0, 9, 60).astype(np.float32)
    scores = exported.scores(x)
    np.testing.assert_array_equal(scores, trained.scores(x))
    np.testing.assert_allclose(scores, exported.model.apply(exported.theta, jnp.asarray(x)), rtol=1e-5)
    (_, _, layer), _ = exported.theta.tree
    assert np.all(np.asarray(layer.running.mean) != 0)
    for k, row in enumerate(x):  # a prediction does not depend on the rows beside it
        np.testing.assert_array_equal(exported.scores(row[None])[0], scores[k])
