"""The models with a client's own label frequencies, among those that it chooses from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import CLASSES, FEATURES, RAGGED, federation, point, softmax_regression, with_test_rows

from pfedme.algorithms import FedAvg
from pfedme.core.model import Model
from pfedme.core.models import CNN, DNN, MLR, Description, Network, NormalisedDNN
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.synthetic import Synthetic
from pfedme.engine.choices import Line, Personalize, Start, candidates, for_all, personalize
from pfedme.engine.label_shift import SMOOTHING, frequencies, prior, shift, shifted
from pfedme.engine.metrics import Blocks
from pfedme.engine.path import lambda_path
from pfedme.engine.personalized import Candidate, Personalized
from pfedme.personalization.finished import FinishedRun
from pfedme.runs.run import Run
from pfedme.training.execute import execute

HOW = Personalize(steps=3, eta=0.03, folds=3, B=4)


def found(
    fed: Federation, model: Model, prior: Callable[[Federation], np.ndarray] | None = None
) -> Personalized:
    w = model.init(jax.random.key(1))

    def alone(part: Federation) -> Params:
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(2), i))(part.ids)
        return jax.vmap(model.init)(keys)

    line = Line(
        "global", lambda fed: Start(for_all(w, fed.clients), prior(fed) if prior and fed.classes else None)
    )
    return personalize(HOW, model, fed, [line], alone)


def starts(w: Params, shift: np.ndarray) -> dict[str, Params]:
    """A shared model, and the same with label frequencies."""
    for_each = for_all(w, len(shift))
    return {
        "global": for_each,
        "label-prior": jax.vmap(shifted)(for_each, jnp.asarray(shift, jnp.float32)),
    }


def is_shifted(candidate: Candidate) -> bool:
    return candidate.line.endswith("label-prior")


def uniform(fed: Federation) -> np.ndarray:
    return prior(fed, "uniform")


def labels(fed: Federation, i: int) -> np.ndarray:
    start, count = fed.rows("train")
    return fed.y[start[i] : start[i] + count[i]]


# --- frequencies


def test_the_prior_is_the_mean_that_the_uploads_have():
    fed = federation()
    counts = np.array([np.bincount(labels(fed, i), minlength=CLASSES) for i in range(fed.clients)])
    np.testing.assert_allclose(frequencies(fed), counts / counts.sum(axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(uniform(fed), frequencies(fed).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(prior(fed, "samples"), counts.sum(axis=0) / counts.sum(), rtol=1e-6)


def test_a_shift_is_the_logarithm_of_smoothed_frequencies():
    fed, pi = federation(), np.array([0.7, 0.3, 0.0])
    for i, got in enumerate(shift(fed, pi)):
        own = np.bincount(labels(fed, i), minlength=CLASSES) + SMOOTHING * pi
        want = np.log(own[:2] / own.sum()) - np.log(pi[:2])
        np.testing.assert_allclose(got[:2], want, atol=1e-6)
        assert got[2] == 0  # the shared model has not seen this label


@pytest.mark.parametrize(
    "description", [MLR(), DNN(hidden=(4,)), NormalisedDNN(hidden=(4,)), CNN(channels=(2,), hidden=(3,))]
)
def test_the_shift_is_added_to_the_scores(description: Description):
    model = description.build(16, 3, (4, 4))
    assert model.has_class_biases()
    theta, x = model.init(jax.random.key(0)), np.random.default_rng(0).normal(size=(5, 16))
    own = jnp.array([0.5, -1.0, 2.0])
    rows = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(
        model.apply(shifted(theta, own), rows), model.apply(theta, rows) + own, rtol=1e-5, atol=1e-6
    )


# --- Bayes' rule


MEANS = np.array([[1.0, 0.0], [-1.0, 0.5], [0.0, -1.0]])
TRUE = np.array([[0.8, 0.1, 0.1], [0.1, 0.6, 0.3], [0.0, 0.5, 0.5]])
"""How often each label occurs at each client."""


def differing_in_labels(rows: int = 1000) -> Federation:
    """Clients whose x given y are the same Gaussians."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.choice(3, 2 * rows, p=p) for p in TRUE])
    x = MEANS[y] + rng.normal(size=(len(y), 2))
    sizes = np.full(3, rows)
    return Federation(
        x=x.astype(np.float32), y=y.astype(np.int32), n_train=sizes, n_test=sizes, classes=3,
        ids=np.arange(3, dtype=np.uint32),
    )  # fmt: skip


def bayes(fed: Federation, of: np.ndarray) -> np.ndarray:
    """The probability of each test row's label by Bayes' rule, with the label frequencies of its client."""
    blocks = Blocks.cut(*fed.rows("test"))
    rows, owner = blocks.rows(), blocks.owner()
    joint = of[owner] * np.exp(-((fed.x[rows][:, None] - MEANS) ** 2).sum(axis=2) / 2)
    return (joint / joint.sum(axis=1, keepdims=True))[np.arange(len(rows)), fed.y[rows]]


def test_if_clients_differ_in_label_frequencies_only_the_model_is_bayes():
    fed = differing_in_labels()
    pi, model = uniform(fed), Network(features=2, classes=3)
    bias = np.log(pi) - (MEANS**2).sum(axis=1) / 2  # Bayes' model for labels with the frequencies π
    w = point(model, np.concatenate([MEANS.ravel(), bias]).astype(np.float32))
    offered = [Candidate("global", np.inf), Candidate("label-prior", np.inf)]
    who, test = np.arange(3), Blocks.cut(*fed.rows("test"))
    eta = np.full(fed.clients, HOW.eta, np.float32)
    walked = lambda_path(
        model, fed, starts(w, shift(fed, pi)), offered, jax.random.key(0), who, test, eta, HOW.B
    )
    shared, own = (np.asarray(outcome.likely) for outcome, _ in walked)
    n = fed.n_train[:, None]
    smoothed = (n * frequencies(fed) + SMOOTHING * pi) / (n + SMOOTHING)
    np.testing.assert_allclose(own, bayes(fed, smoothed), rtol=1e-4)
    np.testing.assert_allclose(shared, bayes(fed, np.tile(pi, (3, 1))), rtol=1e-4)
    loss = [-np.log(likely).mean() for likely in (own, bayes(fed, TRUE + 1e-12), shared)]
    assert loss[0] == pytest.approx(loss[1], abs=0.005)
    assert loss[0] < loss[2] - 0.1


# --- what it leaves as it was


def alike() -> Federation:
    """Clients with the same label frequencies, also in each of three parts of their training rows."""
    fed = federation(((12, 4), (24, 4), (12, 4)))
    y = np.tile([0, 1, 1, 2], len(fed.y) // 4).astype(np.int32)
    return dataclasses.replace(fed, y=y)


def test_with_equal_frequencies_the_choice_is_what_it_was():
    fed = alike()
    assert not shift(fed, uniform(fed)).any()
    assert not shift(fed, prior(fed, "samples")).any()
    old, new = (found(fed, softmax_regression(), of) for of in (None, uniform))
    label = [[result.candidates[k].label for k in result.choice] for result in (old, new)]
    assert label[0] == label[1]
    np.testing.assert_array_equal(np.asarray(old.theta.ravel(1)), np.asarray(new.theta.ravel(1)))
    plain = [not is_shifted(c) for c in new.candidates]
    np.testing.assert_array_equal(new.score[:, plain], old.score)
    np.testing.assert_array_equal(new.right[:, plain], old.right)
    twins = [is_shifted(c) for c in new.candidates]
    np.testing.assert_array_equal(new.score[:, twins], old.score[:, : sum(twins)])


def test_the_more_shared_models_come_first():
    lams = [(c.lam, is_shifted(c)) for c in candidates(HOW, given=15.0, shifted=True)]
    assert lams[:-1] == sorted(lams[:-1], key=lambda pair: (-pair[0], pair[1]))
    assert candidates(HOW, shifted=True)[1].label == "label-prior"
    assert candidates(HOW, shifted=True)[3].label == "label-prior, λ = 100"
    assert candidates(HOW, shifted=True)[-1].name == "alone"


def unbiased() -> Model:
    return Model(
        init_fn=lambda key: {"W": jax.random.normal(key, (FEATURES, CLASSES))},
        apply_fn=lambda tree, x: x @ tree["W"],
        classes=CLASSES,
    )


@pytest.mark.parametrize("model", [unbiased(), Network(features=FEATURES, classes=0)], ids=["bias", "class"])
def test_without_a_bias_for_each_class_the_menu_is_what_it_was(model: Model):
    fed = federation()
    if model.classes == 0:
        fed = dataclasses.replace(fed, y=fed.y.astype(np.float32), classes=0)
    old, new = (found(fed, model, of) for of in (None, uniform))
    assert new.candidates == old.candidates == candidates(HOW)
    np.testing.assert_array_equal(new.choice, old.choice)
    np.testing.assert_array_equal(np.asarray(new.theta.ravel(1)), np.asarray(old.theta.ravel(1)))


# --- rows that must not be counted


def test_test_rows_decide_nothing():
    fed = federation()
    a, b = (found(one, softmax_regression(), uniform) for one in (fed, with_test_rows(fed, 3.0, 1)))
    np.testing.assert_array_equal(a.choice, b.choice)
    np.testing.assert_array_equal(a.score, b.score)
    np.testing.assert_array_equal(np.asarray(a.theta.ravel(1)), np.asarray(b.theta.ravel(1)))


def test_the_rows_that_judge_are_not_counted():
    part = federation(RAGGED).hold_out(1, 3)
    y = part.y.copy()
    for kind in ("validation", "test"):
        for s, n in zip(*part.rows(kind), strict=True):
            y[s : s + n] = (y[s : s + n] + 1) % CLASSES
    other = dataclasses.replace(part, y=y)
    assert (other.y != part.y).any()
    model, offered = softmax_regression(), candidates(HOW, shifted=True)[:-1]
    w, who = model.init(jax.random.key(1)), np.arange(part.clients)
    models = []
    for fed in (part, other):
        walked = lambda_path(
            model, fed, starts(w, shift(fed, uniform(fed))), offered, jax.random.key(0), who,
            Blocks.cut(*fed.rows("validation")), np.full(fed.clients, HOW.eta, np.float32), HOW.B,
        )  # fmt: skip
        models.append([np.asarray(theta.ravel(1)) for _, theta in walked])
    np.testing.assert_array_equal(*models)
    assert (models[0][0] != models[0][1]).any()  # the label prior is not the global model here


# --- newcomers


@pytest.mark.slow
def test_what_a_newcomer_is_offered_depends_on_the_run_and_not_on_other_newcomers(tmp_path: Path):
    data = Synthetic(clients=6, rows=16, features=4, classes=3)
    run = Run(algorithm=FedAvg(R=2, B=5, eta=0.05), data=data, model=MLR(), rounds=3, cohort=2, budget=6)
    execute(dataclasses.replace(run, holdout_clients=0.34), tmp_path / "run")
    finished = FinishedRun.open(tmp_path / "run")
    newcomers = finished.run.parties()[1]
    assert newcomers is not None
    both, one = (finished.to_newcomers(fed, HOW) for fed in (newcomers, newcomers.take([1])))
    names = [c.name for c in both.candidates]
    first, second = names.index("global"), names.index("label-prior")
    np.testing.assert_allclose(both.score[1:, : second + 1], one.score[:, : second + 1], rtol=1e-5)
    assert (both.score[:, first] != both.score[:, second]).all()
