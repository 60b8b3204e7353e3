"""Ditto, MR-MTL and L2GD against NumPy, the laws that they obey, and public mistakes.

A check is a function of a class; each must fail for a class that makes the mistake."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import (
    assert_close,
    assert_same_bits,
    federation,
    flat,
    problem,
    softmax_regression,
    there,
    tiny,
    trajectory,
)
from relatives import (
    COHORTS,
    ETA,
    FED,
    LAM,
    LINE,
    MODEL,
    PLAIN,
    STEPS,
    N,
    alone,
    answers,
    asked,
    assert_exact,
    at,
    averaged,
    best_models,
    descended,
    grad,
    lines,
    rounds_of,
    stacked,
    w0,
)

from pfedme.algorithms import APFL, L2GD, MRMTL, Ditto, Mapper, PFedMe
from pfedme.algorithms.aggregate import FedPAQ
from pfedme.algorithms.base import Algorithm, Cohort, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record
from pfedme.engine.simulate import Simulation, State

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

# --- Ditto


def check_ditto(cls: type[Ditto], lam: float = 0.7) -> None:
    """Two rounds of the paper's Algorithm 1, with FedAvg for w."""
    states = rounds_of(algorithm := cls(lam=lam, **STEPS))
    w, vs = w0, [w0] * N
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        for i in cohort:
            vs[i] = descended(vs[i], i, lambda v, w=w: lam * (v - w))
        w = averaged(w, {i: descended(w, i) for i in cohort}, by_samples=True)
        assert_exact(flat(state.server), w)
        assert_exact(stacked(state.clients), vs)
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), vs)


def check_that_it_is_not_alone_by_default(cls: type[Ditto]) -> None:
    states = rounds_of(cls(**STEPS))
    for i, rounds in ((0, 1), (1, 1), (2, 2)):
        assert np.abs(stacked(states[-1].clients)[i] - alone(i, rounds)).max() > 1e-3


def test_ditto_is_the_oracles():
    check_ditto(Ditto)


def test_with_lambda_zero_dittos_v_is_alone():
    check_ditto(Ditto, lam=0.0)
    states = rounds_of(Ditto(lam=0.0, **STEPS))
    assert_exact(stacked(states[-1].clients), [alone(0, 1), alone(1, 1), alone(2, 2), w0])


def test_ditto_pulls_by_default():
    """Bug: the default λ = 0 makes it alone (PFLlib)."""

    @record
    class Mutant(Ditto):
        lam: NonNegative = 0.0

    check_that_it_is_not_alone_by_default(Ditto)
    with pytest.raises(AssertionError):
        check_that_it_is_not_alone_by_default(Mutant)


@pytest.mark.slow
def test_dittos_check_finds_a_pull_towards_the_local_model():
    @record
    class Mutant(Ditto):
        def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
            update = super().client_update(key, problem, w, state)
            w_i = update.models.local

            def pull(v: Params) -> Params:
                return self.lam * (v - there(w_i))

            v = sgd(key, problem, state, eta=self.eta, steps=self.R, B=self.B, extra=pull)
            return update._replace(state=v, models=update.models._replace(personal=v))

    with pytest.raises(AssertionError):
        check_ditto(Mutant)


# --- MR-MTL


def check_mr_mtl(cls: type[MRMTL], lam: float = 0.7) -> None:
    """Two rounds; w is the mean of all clients' models, those that were absent included."""
    states = rounds_of(algorithm := cls(lam=lam, **PLAIN))
    w, vs = w0, [w0] * N
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        for i in cohort:
            vs[i] = descended(vs[i], i, lambda v, w=w: lam * (v - w))
        w = np.mean(vs, axis=0)
        assert_exact(flat(state.server), w)
        assert_exact(stacked(state.clients), vs)
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), vs)


def test_mr_mtl_is_the_oracles():
    check_mr_mtl(MRMTL)


def test_with_lambda_zero_mr_mtls_models_are_alone():
    check_mr_mtl(MRMTL, lam=0.0)
    states = rounds_of(MRMTL(lam=0.0, **PLAIN))
    assert_exact(stacked(states[-1].clients), [alone(0, 1), alone(1, 1), alone(2, 2), w0])


@pytest.mark.slow
def test_mr_mtls_check_finds_a_mean_over_the_cohort():
    @record
    class Mutant(MRMTL):
        def server_update(self, w: Params, uploads: Params, cohort: Cohort) -> Params:
            return w + self.beta * self.combined(uploads, cohort)

    with pytest.raises(AssertionError):
        check_mr_mtl(Mutant)


# --- the three on quadratics


def stays(algorithm: Algorithm, server: Any, clients: Any) -> State:
    """The state after a round of all clients, from a given one."""
    fed, _ = lines()
    start = State(0, server, clients)
    return rounds_of(algorithm, model=LINE, fed=fed, cohorts=[range(N)], start=start)[-1]


@pytest.mark.slow
def test_on_quadratics_mr_mtl_and_pfedme_stay_at_the_same_minimiser():
    fed, own = lines()
    want = best_models(own, LAM)
    mean = want.mean(axis=0)
    assert_exact(sum(A @ (x - c) for (A, c), x in zip(own, want, strict=True)), np.zeros(3))
    after = stays(MRMTL(lam=LAM, **PLAIN), at(mean), at(want))
    assert_exact(stacked(after.clients), want)
    assert_exact(flat(after.server), mean)
    pfedme = PFedMe(lam=LAM, R=1, B=0, eta=0.5, alpha=0.3, K=200)
    after = stays(pfedme, at(mean), ())
    assert_exact(flat(after.server), mean)
    assert_exact(stacked(answers(pfedme, after, LINE, fed)[0].personal), want)


def test_on_quadratics_dittos_v_comes_to_its_fixed_point():
    _, own = lines()
    w = np.array([0.5, -1.0, 2.0])
    want = [np.linalg.solve(A + LAM * np.eye(3), A @ c + LAM * w) for A, c in own]
    after = stays(Ditto(lam=LAM, R=300, B=0, eta=0.3), at(w), at(np.zeros((N, 3))))
    assert_exact(stacked(after.clients), want)


# --- L2GD


P = 0.3


def check_l2gd(cls: type[L2GD]) -> None:
    """Two rounds, with as many steps as the server says; x̄ is the mean over all clients."""
    lam, taken = 0.7, 0
    states = rounds_of(algorithm := cls(lam=lam, p=P, B=0, eta=ETA))
    xs, mean = [w0] * N, w0
    for before, state, cohort in zip(states, states[1:], COHORTS, strict=False):
        steps = int(before.server[1])
        for i in cohort:
            xs[i] = xs[i] - ETA * lam / P * (xs[i] - mean)
            for _ in range(steps):
                xs[i] = xs[i] - ETA / (1 - P) * grad(xs[i], i)
        mean, taken = np.mean(xs, axis=0), taken + steps
        assert_exact(flat(state.server[0]), mean)
        assert_exact(stacked(state.clients), xs)
    assert taken > 0
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), xs)
    assert_exact(flat(algorithm.shared(states[-1].server, ())), mean)


def check_coin(cls: type[L2GD]) -> None:
    """The server stops before another step with probability p, before the first round and after each."""
    algorithm, draws = cls(p=P, lam=LAM, eta=ETA), 4000
    w, keys = at(np.zeros(3)), jax.random.split(jax.random.key(1), draws)
    nothing = at(np.zeros((1, 3)))

    def after(key: jax.Array) -> jax.Array:
        who = Cohort(key, jnp.arange(1), jnp.ones(1, jnp.int32), N)
        return algorithm.server_update((w, jnp.int32(0)), nothing, who)[1]

    for toss in (after, lambda key: algorithm.begin(key, lambda _: w, N)[1]):
        found = np.asarray(jax.jit(jax.vmap(toss))(keys))
        for k in range(7):
            chance = P * (1 - P) ** k
            assert abs(np.mean(found == k) - chance) < 5 * np.sqrt(chance * (1 - chance) / draws)


def test_l2gd_is_the_oracles():
    check_l2gd(L2GD)


@pytest.mark.slow
def test_on_quadratics_l2gd_stays_at_mr_mtls_minimiser_in_the_mean_over_the_coin():
    """Σ_k p (1 − p)ᵏ x(k) = x, where x(k) is what k steps make of x; no single k leaves it where it is."""
    fed, own = lines()
    want, most = best_models(own, LAM), 100
    algorithm = L2GD(lam=LAM, p=P, B=0, eta=0.2)
    chance = P * (1 - P) ** np.arange(most)
    mean = at(want.mean(axis=0))

    @jax.jit
    def after(own: Problem, x: Params) -> Params:
        def one(steps: jax.Array) -> Params:
            return algorithm.client_update(jax.random.key(0), own, (mean, steps), x).state

        return jax.vmap(one)(jnp.arange(most))

    for i, x in enumerate(want):
        ends = stacked(after(problem(fed, LINE, i), at(x)))
        assert_exact(chance @ ends, x)
        assert np.abs(ends - x).max(axis=1).min() > 1e-3


@pytest.mark.slow
def test_l2gds_coin_is_a_coin():
    check_coin(L2GD)


def test_l2gds_check_finds_a_fixed_schedule():
    """It would be biased, as the test of the mean shows."""

    @record
    class Mutant(L2GD):
        def _steps(self, key: jax.Array) -> jax.Array:
            return jnp.round((1 - self.p) / self.p).astype(jnp.int32)

    check_l2gd(Mutant)
    with pytest.raises(AssertionError):
        check_coin(Mutant)


@pytest.mark.slow
def test_l2gds_check_finds_a_mean_over_the_cohort():
    @record
    class Mutant(L2GD):
        def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
            _, steps = super().server_update(server, uploads, cohort)
            return server[0] + self.combined(uploads, cohort), steps

    with pytest.raises(AssertionError):
        check_l2gd(Mutant)


def test_r_has_no_effect_on_l2gd():
    (start,) = rounds_of(L2GD(p=P, **PLAIN), cohorts=())
    programs = [
        jax.make_jaxpr(L2GD(p=P, B=0, eta=ETA, R=R).client_update)(*asked(L2GD(), MODEL, FED, start, 0))
        for R in (1, 9)
    ]
    assert str(programs[0]) == str(programs[1])


def test_l2gds_p_and_eta_are_the_best_and_the_largest_stable_ones():
    """Both kinds of steps end where their quadratic is least: ηλ/p = 1 and ηL/(1 − p) = 1."""
    for L in (0.5, 20.0):
        steps = L2GD(lam=LAM).stable_steps(L)
        np.testing.assert_allclose(steps["p"], LAM / (L + LAM))
        np.testing.assert_allclose([steps["eta"] * LAM / steps["p"], steps["eta"] * L / (1 - steps["p"])], 1)


# --- all that clients keep


@pytest.mark.parametrize("cls", [APFL, Ditto, L2GD, Mapper, MRMTL])
def test_what_a_client_keeps_first_does_not_depend_on_when_it_joins(cls: type[Algorithm]):
    """A deployed client makes it when it is first asked, a simulation before the first round."""
    algorithm, first = cls(eta=ETA).with_steps(1.0), at(np.ones(3))

    def kept(w: Params) -> Any:
        server = algorithm.begin(jax.random.key(0), lambda _: w, N)
        return algorithm.init(algorithm.send(server, jnp.int32(0)), lambda _: first)

    assert_same_bits(kept(first), kept(at(np.zeros(3))))


@pytest.mark.parametrize("cls", [MRMTL, L2GD])
def test_w_stays_the_mean_of_what_clients_keep_through_any_codec(cls: type[Algorithm]):
    algorithm = tiny(cls, B=0, codec=FedPAQ(levels=2))
    sim = Simulation(algorithm, softmax_regression(), federation(), cohort=3)
    for state in trajectory(sim, sim.start(), 4):
        mean = there(state.clients).map(lambda a: jnp.mean(a, axis=0))
        assert_close(sim.shared(state), mean)
