"""FedPer, LG-FedAvg, FedRep, FedBABU and FedBN against NumPy, what they send, and public mistakes.

A model is one vector here, and a mask says which of its numbers are private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracles
import pytest
from laws import assert_same_bits, flat, network, there
from relatives import BETA, COHORTS, ETA, ROWS, STEPS, N, R, answers, assert_exact, rounds_of, stacked

from pfedme.algorithms import ALGORITHMS, FedAvg, FedBABU, FedBN, FedPer, FedRep, LGFedAvg
from pfedme.algorithms.base import Algorithm, Models, Update, sgd
from pfedme.algorithms.partly import PartlyShared
from pfedme.core.models import Model, Network
from pfedme.core.normalised import NormalisedNetwork
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record
from pfedme.engine.exchange import exchange

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2 = 0.01
MODEL: Network = network(L2)
FIRST = 4 * 3 + 4
"""How many numbers the first layer has, of those of a network with four hidden units."""
w0 = np.random.default_rng(0).normal(size=FIRST + 3 * 4 + 3)
HEAD = np.arange(len(w0)) >= FIRST
NORMALISED = NormalisedNetwork(features=3, classes=3, hidden=(4,), l2=L2)
NORM = slice(FIRST, FIRST + 16)
"""Where its scale, shift, m and v are."""

Gradient = Callable[[np.ndarray, int], np.ndarray]


def gradient(theta: np.ndarray, i: int) -> np.ndarray:
    """∇f_i of the network, by hand."""
    x, y = ROWS[i]
    W, b, V, c = theta[:12].reshape(4, 3), theta[12:16], theta[16:28].reshape(3, 4), theta[28:]
    z = x @ W.T + b
    error = (oracles.softmax(np.maximum(z, 0) @ V.T + c) - np.eye(3)[y]) / len(y)
    back = (error @ V) * (z > 0)
    parts = back.T @ x, back.sum(axis=0), error.T @ np.maximum(z, 0), error.sum(axis=0)
    return np.concatenate([part.ravel() for part in parts]) + L2 * theta


def normalised_gradient(theta: np.ndarray, i: int) -> np.ndarray:
    """∇f_i with batch normalisation, by differences; m and v are pulled towards the moments of the rows."""
    x, y = ROWS[i]
    at = NORM.start
    fixed = np.zeros(len(theta), bool)
    fixed[at + 8 : at + 16] = True
    z = x @ theta[:12].reshape(4, 3).T + theta[12:16]

    def loss(theta: np.ndarray) -> float:
        z = x @ theta[:12].reshape(4, 3).T + theta[12:16]
        z = (z - z.mean(axis=0)) / np.sqrt(z.var(axis=0) + 1e-5)
        hidden = np.maximum(theta[at : at + 4] * z + theta[at + 4 : at + 8], 0)
        scores = hidden @ theta[NORM.stop : NORM.stop + 12].reshape(3, 4).T + theta[NORM.stop + 12 :]
        return oracles.row_losses(scores, y).mean() + L2 / 2 * theta[~fixed] @ theta[~fixed]

    moments = np.concatenate([z.mean(axis=0), z.var(axis=0)])
    slope = oracles.slope(loss, theta)
    slope[fixed] = theta[fixed] - moments
    return slope


def jointly(theta: np.ndarray, i: int, private: np.ndarray, grad: Gradient) -> np.ndarray:
    """R steps on all numbers."""
    for _ in range(R):
        theta = theta - ETA * grad(theta, i)
    return theta


def in_turn(theta: np.ndarray, i: int, private: np.ndarray, grad: Gradient) -> np.ndarray:
    """Two steps on the private numbers, then R on the others."""
    for part in [private] * 2 + [~private] * R:
        theta = theta - ETA * part * grad(theta, i)
    return theta


def check(
    algorithm: Algorithm, private: np.ndarray, train: Callable[..., np.ndarray] = jointly,
    model: Model = MODEL, first: np.ndarray = w0, grad: Gradient = gradient, tight: float = 1e-10,
) -> None:  # fmt: skip
    """Two rounds: the server has the mean of what is shared, and each client its own private numbers."""

    def assert_alike(got: np.ndarray, want: Any) -> None:
        np.testing.assert_allclose(got, np.asarray(want), rtol=tight, atol=tight)

    states = rounds_of(algorithm, first, model=model)
    shared, own = first[~private], [first[private]] * N

    def whole(i: int) -> np.ndarray:
        theta = first.copy()
        theta[private], theta[~private] = own[i], shared
        return theta

    for state, cohort in zip(states[1:], COHORTS, strict=True):
        ends = {i: train(whole(i), i, private, grad) for i in cohort}
        shared = shared + BETA * np.mean([end[~private] - shared for end in ends.values()], axis=0)
        own = [ends[i][private] if i in ends else own[i] for i in range(N)]
        assert_alike(flat(state.server), shared)
        assert_alike(stacked(state.clients), own)
    models, _ = answers(algorithm, states[-1], model)
    assert models.local is None
    assert_alike(stacked(models.personal), [whole(i) for i in range(N)])


def check_wire(algorithm: Algorithm, shared: int, model: Model = MODEL) -> None:
    """What is sent, in either direction, has no private numbers."""
    shapes = exchange(algorithm, model, 3, N)
    for message in (shapes.sent, shapes.message):
        assert sum(leaf.size for leaf in jax.tree.leaves(message)) == shared


# --- the five


def check_fedper(cls: type[FedPer]) -> None:
    check(cls(**STEPS), HEAD)


def check_lg_fedavg(cls: type[FedPer]) -> None:
    check(cls(**STEPS), ~HEAD)


def check_fedrep(cls: type[FedRep]) -> None:
    check(cls(H=2, **STEPS), HEAD, in_turn)


def test_fedper_is_the_oracles_and_sends_no_head():
    check_fedper(FedPer)
    check_wire(FedPer(), FIRST)


def test_lg_fedavg_is_the_oracles_and_sends_the_head_only():
    check_lg_fedavg(LGFedAvg)
    check_wire(LGFedAvg(), len(w0) - FIRST)


def test_fedrep_is_the_oracles_and_sends_no_head():
    check_fedrep(FedRep)
    check_wire(FedRep(), FIRST)
    assert FedRep(H=2, R=3).gradients == 5


def test_fedbn_is_the_oracles_and_sends_no_normalisation():
    first = np.concatenate([w0[:FIRST], np.random.default_rng(1).normal(1, 0.3, 16), w0[FIRST:]])
    private = np.zeros(len(first), bool)
    private[NORM] = True
    check(
        FedBN(**STEPS), private, model=NORMALISED, first=first, grad=normalised_gradient, tight=1e-7
    )  # by differences
    check_wire(FedBN(), len(w0), NORMALISED)


def check_fedbabu(cls: type[FedBABU]) -> None:
    """Two rounds on the body, under a head that stays; and the models of all clients."""
    states = rounds_of(algorithm := cls(F=4, **STEPS), w0, model=MODEL)
    w = w0

    def body(theta: np.ndarray, i: int) -> np.ndarray:
        for _ in range(R):
            theta = theta - ETA * ~HEAD * gradient(theta, i)
        return theta

    def tuned(theta: np.ndarray, i: int) -> np.ndarray:
        for _ in range(4):
            theta = theta - ETA * gradient(theta, i)
        return theta

    for state, cohort in zip(states[1:], COHORTS, strict=True):
        w = w + BETA * np.mean([body(w, i) - w for i in cohort], axis=0)
        assert_exact(flat(state.server), w)
        np.testing.assert_array_equal(flat(state.server)[HEAD], w0[HEAD])
    models, _ = answers(algorithm, states[-1], MODEL)
    assert_exact(stacked(models.local), [body(w, i) for i in range(N)])
    assert_exact(stacked(models.personal), [tuned(w, i) for i in range(N)])
    assert sum(leaf.size for leaf in jax.tree.leaves(exchange(algorithm, MODEL, 3, N).message)) == FIRST


def test_fedbabu_is_the_oracles_and_sends_no_head():
    check_fedbabu(FedBABU)


def test_private_counts_layers_from_the_right_end():
    deep = Network(features=3, classes=3, hidden=(4, 5))
    for cls, shared in ((FedPer, 16), (LGFedAvg, 18)):
        check_wire(cls(private=2), shared, deep)


# --- the two ends


@record
class AllShared(PartlyShared):
    """Nothing is private."""

    def kept(self, w: Params) -> Params:
        return w.layers[:0]


@record
class AllPrivate(PartlyShared):
    """Everything is."""

    def kept(self, w: Params) -> Params:
        return w.layers[:]


def test_with_everything_shared_it_is_fedavg():
    states = rounds_of(AllShared(**STEPS), w0, model=MODEL)
    for state, plain in zip(
        states, rounds_of(FedAvg(aggregation="uniform", **STEPS), w0, model=MODEL), strict=True
    ):
        assert_exact(flat(state.server), flat(plain.server))


def test_with_nothing_shared_clients_are_alone():
    states = rounds_of(AllPrivate(**STEPS), w0, model=MODEL)
    assert not jax.tree.leaves(states[-1].server)
    want = [w0] * N
    for i, rounds in ((0, 1), (1, 1), (2, 2)):
        for _ in range(rounds):
            want[i] = jointly(want[i], i, HEAD, gradient)
    assert_exact(stacked(states[-1].clients), want)


# --- mistakes of public implementations


@record
class WrongHalf(LGFedAvg):
    """Keeps the last layers, not the first (FL-bench)."""

    def kept(self, w: Params) -> Params:
        return w.layers[-self.private :]


@record
class FedPerThatSharesAll(FedPer):
    """Uploads and averages private layers (FL-bench)."""

    def kept(self, w: Params) -> Params:
        return w.layers[:0]


@record
class FedRepThatSharesAll(FedRep):
    """Uploads and averages private layers (FL-bench)."""

    def client_update(self, key: jax.Array, problem: Problem, body: Params, head: Params) -> Update:
        own = self.kept(body)
        update = super().client_update(key, problem, body.without(own), own)
        after = there(update.models.personal)
        return update._replace(upload=after - body, state=head)

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Params:
        return first(0)


@record
class BodyFirst(FedRep):
    """Trains the body before the head."""

    def client_update(self, key: jax.Array, problem: Problem, body: Params, head: Params) -> Update:
        after = sgd(key, problem, body, eta=self.eta, steps=self.R, B=self.B, fixed=head)
        head = sgd(key, problem, head, eta=self.eta, steps=self.H, B=self.B, fixed=after)
        return Update(upload=after - body, state=head, models=Models(personal=after | head), info={})


@record
class HeadTrained(FedBABU):
    """The head is trained with the body."""

    def kept(self, w: Params) -> Params:
        return w.layers[:0]


@pytest.mark.parametrize(
    ("checked", "mutant"),
    [
        (check_lg_fedavg, WrongHalf),
        (check_fedper, FedPerThatSharesAll),
        (check_fedrep, FedRepThatSharesAll),
        pytest.param(check_fedrep, BodyFirst, marks=pytest.mark.slow),
        pytest.param(check_fedbabu, HeadTrained, marks=pytest.mark.slow),
    ],
)
def test_the_checks_find(checked: Callable[[type], None], mutant: type):
    with pytest.raises(AssertionError):
        checked(mutant)


@pytest.mark.parametrize(
    ("mutant", "shared"),
    [(WrongHalf, len(w0) - FIRST), (FedPerThatSharesAll, FIRST), (FedRepThatSharesAll, FIRST)],
)
def test_the_check_of_what_is_sent_finds(mutant: type[FedPer], shared: int):
    with pytest.raises(AssertionError):
        check_wire(mutant(), shared)


def test_a_round_does_not_depend_on_other_clients_private_layers():
    """What client 1 is sent, and does, is the same whatever client 0 keeps."""
    algorithm = FedPer(**STEPS)
    (start,) = rounds_of(algorithm, w0, model=MODEL, cohorts=())
    other = start._replace(clients=start.clients.map(lambda a: a.at[0].add(3.0)))
    ends = [rounds_of(algorithm, model=MODEL, cohorts=[(1,)], start=s)[-1] for s in (start, other)]
    assert_same_bits(ends[0].server, ends[1].server)
    assert_same_bits(ends[0].clients[1], ends[1].clients[1])


def test_they_are_the_partly_shared_ones():
    named = {name for name, cls in ALGORITHMS.items() if cls.idea == "partly shared"}
    assert named == {"fedper", "lg-fedavg", "fedrep", "fedbabu", "fedbn"}
