"""Mistakes that public implementations of pFedMe make, each with a test that would find it here."""

import numpy as np
import oracles
import pytest
from laws import (
    EXACT,
    SIZE,
    assert_same_bits,
    differs,
    federation,
    flat,
    held_out,
    softmax_regression,
    start_at,
    tiny,
    train_rows,
    trajectory,
    with_test_rows,
)

from pfedme.algorithms import Alone, FedAvg, FedAvgFT, PerFedAvg, PFedMe, Pooled
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

L2, LAM, ETA, ALPHA = 0.05, 4.0, 0.08, 0.06
w0 = np.random.default_rng(0).normal(size=SIZE)


def simulation(R: int = 2, K: int = 7, lam: float = LAM) -> Simulation:
    algorithm = PFedMe(B=0, R=R, K=K, lam=lam, eta=ETA, alpha=ALPHA)
    return Simulation(
        algorithm, softmax_regression(L2), federation(EXACT, dtype=np.float64), cohort=4, seed=3
    )


def oracle(w: np.ndarray, rows: oracles.Rows, R: int = 2, K: int = 7, lam: float = LAM) -> oracles.Answer:
    return oracles.pfedme_client(w, rows, lam=lam, eta=ETA, alpha=ALPHA, R=R, K=K, l2=L2, restart=False)


def losses(thetas: np.ndarray, clients: list[oracles.Rows]) -> list[float]:
    """Summed losses of each client's rows under its row of `thetas`."""
    return [
        oracles.score(oracles.logits(theta, rows.x), rows.y)[1]
        for theta, rows in zip(thetas, clients, strict=True)
    ]


def test_the_personal_model_is_not_the_local_one():
    """Bug: θ_i is overwritten by w_i before it is evaluated (the released code)."""
    sim = simulation()
    state = trajectory(sim, start_at(sim, w0), 2)[-1]
    evaluation, models = sim.evaluate(state)
    for i, rows in enumerate(train_rows(sim.federation)):
        want = oracle(flat(state.server), rows)
        assert np.abs(want.personal - want.local).max() > 1e-2, "the two differ on these data"
        np.testing.assert_allclose(flat(models.personal, True)[i], want.personal, rtol=1e-9)
        np.testing.assert_allclose(flat(models.local, True)[i], want.local, rtol=1e-9)
    for kind, stack in (("personal", models.personal), ("local", models.local)):
        np.testing.assert_allclose(
            evaluation.test[kind].loss, losses(flat(stack, True), held_out(sim.federation)), rtol=1e-6
        )
    assert np.abs(evaluation.train["personal"].loss - evaluation.train["local"].loss).min() > 1e-3


def test_the_global_model_is_not_evaluated_as_the_personal_one():
    """Bug: w is evaluated under the personal model's name."""
    sim = simulation()
    state = trajectory(sim, start_at(sim, w0), 2)[-1]
    evaluation, models = sim.evaluate(state)
    test, train, n = held_out(sim.federation), train_rows(sim.federation), sim.federation.clients
    for scores, rows in ((evaluation.test, test), (evaluation.train, train)):
        np.testing.assert_allclose(
            scores["global"].loss, losses(np.tile(flat(state.server), (n, 1)), rows), rtol=1e-6
        )
        np.testing.assert_allclose(
            scores["personal"].loss, losses(flat(models.personal, True), rows), rtol=1e-6
        )
    assert np.abs(evaluation.train["personal"].loss - evaluation.train["global"].loss).min() > 1e-3


def test_the_personal_model_is_the_one_that_was_trained():
    """Bug: θ is computed but never stored, so that the initial model is evaluated for ever."""
    sim = simulation()
    states = trajectory(sim, start_at(sim, w0), 2)
    answers = [flat(sim.answer(state)[0].personal, True) for state in states]
    for i, rows in enumerate(train_rows(sim.federation)):
        assert np.abs(answers[-1][i] - w0).max() > 1e-2
        assert np.abs(answers[-1][i] - answers[0][i]).max() > 1e-3
        np.testing.assert_allclose(answers[-1][i], oracle(flat(states[-1].server), rows).personal, rtol=1e-9)


def test_the_proximal_term_is_there():
    """Bug: λ (θ − w) is always zero, because θ and w are one object or w is replaced by θ."""
    answers = {}
    for lam in (0.01, 4.0, 16.0):
        sim = simulation(lam=lam)
        models, _ = sim.answer(start_at(sim, w0))
        answers[lam] = flat(models.personal, True)
        for i, rows in enumerate(train_rows(sim.federation)):
            np.testing.assert_allclose(answers[lam][i], oracle(w0, rows, lam=lam).personal, rtol=1e-9)
    assert differs(answers[0.01], answers[4.0], 1e-2)
    assert differs(answers[4.0], answers[16.0], 1e-2)


def test_r_and_k_are_not_exchanged():
    """Bug: R inner steps in K local rounds."""
    ends = []
    for R, K in ((2, 7), (7, 2)):
        sim = simulation(R, K)
        models, _ = sim.answer(start_at(sim, w0))
        ends.append(models)
        for i, rows in enumerate(train_rows(sim.federation)):
            want = oracle(w0, rows, R, K)
            np.testing.assert_allclose(flat(models.local, True)[i], want.local, rtol=1e-9)
            np.testing.assert_allclose(flat(models.personal, True)[i], want.personal, rtol=1e-9)
    assert differs(ends[0].local, ends[1].local, 1e-2)
    assert differs(ends[0].personal, ends[1].personal, 1e-2)


def test_gradients_do_not_pile_up_between_steps():
    """Bug: gradients are never cleared, so that step k uses the sum of k of them."""
    K, sim = 6, simulation(R=1, K=6)
    models, _ = sim.answer(start_at(sim, w0))
    for i, rows in enumerate(train_rows(sim.federation)):
        theta, piled, total = w0, w0, np.zeros(SIZE)
        for _ in range(K):
            theta = theta - ALPHA * (oracles.gradient(theta, rows, L2) + LAM * (theta - w0))
            total = total + oracles.gradient(piled, rows, L2) + LAM * (piled - w0)
            piled = piled - ALPHA * total
        assert np.abs(theta - piled).max() > 1e-2, "piling up would show"
        np.testing.assert_allclose(flat(models.personal, True)[i], theta, rtol=1e-9)


def test_nobody_adapts_on_test_rows():
    """Bug: the personal model takes its steps on the batches that it is then tested on."""
    for cls in (PFedMe, FedAvg, PerFedAvg, Alone, FedAvgFT, Pooled):  # the others: see test_contract.py
        answers = []
        for value, label in ((0.0, 0), (7.0, 1), (np.nan, 2)):
            fed = with_test_rows(federation(EXACT, dtype=np.float64), value, label)
            sim = Simulation(tiny(cls, B=0), softmax_regression(L2), fed, cohort=3)
            answers.append(sim.answer(start_at(sim, w0)))
        assert_same_bits(answers[0], answers[1])
        assert_same_bits(answers[0], answers[2])
