"""Label prior against NumPy and Bayes' rule."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from laws import federation, flat, point, train_rows
from relatives import (
    COHORTS,
    ROWS,
    STEPS,
    N,
    answers,
    assert_exact,
    averaged,
    descended,
    rounds_of,
    stacked,
    w0,
)  # fmt: skip

from pfedme.algorithms import FedAvg, LabelPrior
from pfedme.core.models import Network
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.engine.simulate import State

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

CLASSES = 3
Form = Literal["end", "training"]
forms = pytest.mark.parametrize("form", ["end", "training"])


def counts(i: int) -> np.ndarray:
    return np.bincount(ROWS[i].y, minlength=CLASSES)


def shifted(w: np.ndarray, i: int, known: np.ndarray, smoothing: float) -> np.ndarray:
    """w with log π_i − log π in its biases, which are its last numbers."""
    own = (counts(i) + smoothing * known) / (counts(i).sum() + smoothing)
    return np.concatenate([w[:-CLASSES], w[-CLASSES:] + np.log(own) - np.log(known)])


def check_label_prior(cls: type[LabelPrior], form: Form) -> None:
    """Two rounds; π is the mean of the cohorts' label frequencies, with a thousandth added to each."""
    smoothing, equal = 3.0, np.full(CLASSES, 1 / CLASSES)
    states = rounds_of(algorithm := cls(form=form, smoothing=smoothing, **STEPS))
    w, seen = w0, []
    for t, (state, cohort) in enumerate(zip(states[1:], COHORTS, strict=True)):
        ends = {}
        for i in cohort:
            start = shifted(w, i, equal, smoothing) if form == "training" else w
            ends[i] = w + descended(start, i) - start
        w = averaged(w, ends, by_samples=False)
        seen.append(np.mean([counts(i) / counts(i).sum() for i in cohort], axis=0))
        assert_exact(flat(state.server[0]), w)
        assert_exact(state.server[1], np.mean(seen, axis=0))
        assert int(state.server[2]) == t + 1
    known = np.mean(seen, axis=0) + 1e-3 if form == "end" else equal
    personal = [shifted(w, i, known / known.sum(), smoothing) for i in range(N)]
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), personal)
    assert_exact(flat(algorithm.shared(states[-1].server, ())), w)


@forms
def test_label_prior_is_the_oracles(form):
    check_label_prior(LabelPrior, form)


def test_its_shared_model_is_fedavgs_with_equal_weights():
    states = rounds_of(LabelPrior(**STEPS))
    for state, plain in zip(states, rounds_of(FedAvg(aggregation="uniform", **STEPS)), strict=True):
        assert_exact(flat(state.server[0]), flat(plain.server))


# --- Bayes' rule


OF_FOUR = np.array([[2, 1, 1], [1, 2, 1], [0, 1, 3]])
"""Of four rows with label y (a row here), how many have each of the three values x can take."""
FOURS = np.array([[1, 2, 3], [3, 1, 2], [4, 6, 2]])
"""How many times four rows of each label (a column) a client has; the mean of the frequencies is 1/3 each."""
MODEL = Network(features=3, classes=CLASSES)


def differing_in_labels() -> Federation:
    """Clients with the same p(x | y), exactly, and different p(y)."""
    own = FOURS[:, :, None] * OF_FOUR
    cells = [np.argwhere(np.ones_like(table)).repeat(table.ravel(), axis=0) for table in own]
    y, x = np.concatenate(cells).T
    sizes = [(int(n), 0) for n in own.sum(axis=(1, 2))]
    fed = federation(sizes, dtype=np.float64)
    return dataclasses.replace(fed, x=np.eye(3)[x], y=y.astype(np.int32)).checked()


def check_bayes(cls: type[LabelPrior], form: Form) -> None:
    """Where the shared model is at its optimum a round leaves it there, and clients' models are Bayes'."""
    fed, given_y = differing_in_labels(), (OF_FOUR + 1e-9) / (OF_FOUR + 1e-9).sum(axis=1, keepdims=True)
    w = point(MODEL, np.concatenate([np.log(given_y).ravel(), np.zeros(CLASSES)]))
    algorithm = cls(form=form, smoothing=1e-9, R=1 if form == "end" else 3, B=0, eta=0.5)
    start = State(0, (w, jnp.full(CLASSES, 1 / CLASSES), jnp.int32(0)), ())
    _, after = rounds_of(algorithm, model=MODEL, fed=fed, cohorts=[range(3)], start=start)
    np.testing.assert_allclose(flat(after.server[0]), flat(w), atol=1e-8)
    personal = stacked(answers(algorithm, after, MODEL, fed)[0].personal)
    for theta, fours, rows in zip(personal, FOURS, train_rows(fed), strict=True):
        joint = fours[:, None] * OF_FOUR
        want = (joint / joint.sum(axis=0))[:, rows.x.argmax(axis=1)].T
        np.testing.assert_allclose(oracles.softmax(oracles.logits(theta, rows.x)), want, atol=1e-8)


@forms
def test_if_clients_differ_in_label_frequencies_only_their_models_follow_bayes_rule(form):
    check_bayes(LabelPrior, form)


@record
class Untouched(LabelPrior):
    """w is every client's model."""

    def corrected(self, problem: Problem, w: Params, pi: object) -> Params:
        return w


@record
class Backwards(LabelPrior):
    """log π − log π_i is added."""

    def corrected(self, problem: Problem, w: Params, pi: jnp.ndarray) -> Params:
        return 2 * w - super().corrected(problem, w, pi)


@pytest.mark.parametrize(
    ("mutant", "form"), [(Untouched, "end"), pytest.param(Backwards, "training", marks=pytest.mark.slow)]
)
def test_the_checks_find_a_wrong_correction(mutant, form):
    for check in (check_label_prior, check_bayes):
        with pytest.raises(AssertionError):
            check(mutant, form)
