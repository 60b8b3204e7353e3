"""APFL and MAPPER, whose personal models lie between the shared and an own one: NumPy, laws and mistakes.

A check is a function of a class; each must fail for a class that makes the mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax import lax
from laws import flat, point, problem
from relatives import (
    COHORTS,
    ETA,
    FED,
    L2,
    MODEL,
    ROWS,
    STEPS,
    N,
    R,
    alone,
    answers,
    assert_exact,
    averaged,
    grad,
    rounds_of,
    stacked,
    w0,
)

from pfedme.algorithms import APFL, FedAvg, Mapper, Models, Update
from pfedme.algorithms.base import Cohort
from pfedme.core.problem import Loss, Problem
from pfedme.core.tree import Params, record
from pfedme.engine.simulate import State

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

# --- APFL


def check_apfl(cls: type[APFL], *, adaptive: bool = False, alpha: float = 0.4) -> None:
    """Two rounds of the paper's Algorithm 1."""
    states = rounds_of(algorithm := cls(alpha=alpha, adaptive=adaptive, **STEPS))
    w, vs, alphas = w0, [w0] * N, [alpha] * N
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        ends = {}
        for i in cohort:
            w_i, v, a = w, vs[i], alphas[i]
            for _ in range(R):
                g = grad(a * v + (1 - a) * w_i, i)
                slope = (v - w_i) @ g
                w_i, v = w_i - ETA * grad(w_i, i), v - ETA * a * g
                a = float(np.clip(a - ETA * slope, 0, 1)) if adaptive else a
            ends[i], vs[i], alphas[i] = w_i, v, a
        w = averaged(w, ends, by_samples=True)
        assert_exact(flat(state.server), w)
        assert_exact(stacked(state.clients[0]), vs)
        assert_exact(state.clients[1], alphas)
    models, info = answers(algorithm, states[-1])
    assert models.local is None
    assert_exact(stacked(models.personal), [a * v + (1 - a) * w for a, v in zip(alphas, vs, strict=True)])
    assert_exact(info["alpha"], alphas)


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_is_the_oracles(adaptive):
    check_apfl(APFL, adaptive=adaptive)


def test_apfl_descends_the_loss_of_the_mixture_in_v_and_in_alpha():
    """One step moves v and α by −η times the slopes of f_i(α v + (1 − α) w), found by differences."""
    rows, v, alpha = ROWS[0], np.random.default_rng(5).normal(size=w0.size), 0.4
    (start,) = rounds_of(algorithm := APFL(alpha=alpha, R=1, B=0, eta=ETA), cohorts=())
    kept = start.server.like(jnp.asarray(v)), jnp.asarray(alpha)
    update = jax.jit(algorithm.client_update)(jax.random.key(0), problem(FED, MODEL, 0), start.server, kept)
    in_v = oracles.slope(lambda v: oracles.loss(alpha * v + (1 - alpha) * w0, rows, L2), v)
    in_alpha = oracles.slope(lambda a: oracles.loss(a * v + (1 - a) * w0, rows, L2), np.array([alpha]))
    np.testing.assert_allclose(flat(update.state[0]), v - ETA * in_v, atol=1e-9)
    np.testing.assert_allclose(update.state[1], np.clip(alpha - ETA * in_alpha[0], 0, 1), atol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_apfls_w_is_fedavgs_for_every_alpha(alpha):
    states = rounds_of(APFL(alpha=alpha, **STEPS))
    plain = rounds_of(FedAvg(**STEPS))
    for state, fedavg in zip(states, plain, strict=True):
        assert_exact(flat(state.server), flat(fedavg.server))


def test_with_alpha_one_apfls_v_is_alone_and_with_alpha_zero_it_stays():
    for alpha, want in ((1.0, [alone(0, 1), alone(1, 1), alone(2, 2), w0]), (0.0, [w0] * N)):
        states = rounds_of(APFL(alpha=alpha, adaptive=False, **STEPS))
        assert_exact(stacked(states[-1].clients[0]), want)


def test_a_learned_alpha_stays_between_zero_and_one():
    states = rounds_of(APFL(alpha=0.99, R=R, B=0, eta=3.0), cohorts=3 * COHORTS)
    alphas = np.array([state.clients[1] for state in states])
    assert alphas.min() >= 0
    assert alphas.max() <= 1
    assert {0.0, 1.0} & set(alphas.ravel().tolist()), "and the bounds matter here"


Step = Callable[[Loss, Params, Params, Any], tuple[Params, Params]]


def apfl_with(step: Step) -> type[APFL]:
    """APFL with a fixed α and a step of its own."""

    @record
    class Mutant(APFL):
        def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
            v, alpha = state

            def one(carry: tuple[Params, Params], rows: jax.Array) -> Any:
                return step(problem.loss(rows), *carry, alpha), None

            (w_i, v), _ = lax.scan(one, (w, v), problem.draw(key, self.R, self.B))
            return Update(w_i - w, (v, alpha), Models(local=w_i), {})

    return Mutant


def right(f: Loss, w: Params, v: Params, a: Any) -> tuple[Params, Params]:
    return w - ETA * f.grad(w), v - ETA * a * f.grad(a * v + (1 - a) * w)


def trains_v_at_v(f: Loss, w: Params, v: Params, a: Any) -> tuple[Params, Params]:
    return w - ETA * f.grad(w), v - ETA * f.grad(v)


def steps_w_twice(f: Loss, w: Params, v: Params, a: Any) -> tuple[Params, Params]:
    w, v = right(f, w, v, a)
    return w - ETA * f.grad(w), v


def leaves_v_without_gradient(f: Loss, w: Params, v: Params, a: Any) -> tuple[Params, Params]:
    return w - ETA * f.grad(w), v


def lacks_the_alpha_of_the_chain_rule(f: Loss, w: Params, v: Params, a: Any) -> tuple[Params, Params]:
    return w - ETA * f.grad(w), v - ETA * f.grad(a * v + (1 - a) * w)


def test_apfls_check_passes_with_its_own_step():
    check_apfl(apfl_with(right))


@pytest.mark.parametrize(
    "wrong", [trains_v_at_v, steps_w_twice, leaves_v_without_gradient, lacks_the_alpha_of_the_chain_rule]
)
def test_apfls_check_finds(wrong):
    """Bugs of PFLlib, FL-bench, fluke and fedjax."""
    with pytest.raises(AssertionError):
        check_apfl(apfl_with(wrong))


# --- MAPPER


def check_mapper(cls: type[Mapper]) -> None:
    """Two rounds; a client chooses λ by the loss on the last fifth of its rows, or on all if it has few."""
    lams = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    w, best = w0, [0] * N
    thetas = w0 + np.random.default_rng(1).normal(size=(N, len(lams), len(w0)))
    start = State(0, point(MODEL, w0), (point(MODEL, thetas), jnp.zeros(N, jnp.int32)))
    states = rounds_of(algorithm := cls(**STEPS), start=start)
    for state, cohort in zip(states[1:], COHORTS, strict=True):
        ends = {}
        for i in cohort:
            x, y = ROWS[i]
            held = len(y) // 5
            fit = oracles.Rows(x[: len(y) - held], y[: len(y) - held])
            judge = oracles.Rows(x[-held:], y[-held:]) if held else fit
            ws, losses = [], []
            for k, lam in enumerate(lams):
                theta, w_i = thetas[i, k], w
                for _ in range(R):
                    g = oracles.gradient(lam * theta + (1 - lam) * w_i, fit, L2)
                    theta, w_i = theta - ETA * lam * g, w_i - ETA * (1 - lam) * g
                thetas[i, k] = theta
                ws.append(w_i)
                losses.append(oracles.loss(lam * theta + (1 - lam) * w_i, judge, L2))
            best[i] = int(np.argmin(losses))
            ends[i] = ws[best[i]]
        w = averaged(w, ends, by_samples=False)
        assert_exact(flat(state.server), w)
        assert_exact(state.clients[1], best)
        assert_exact(state.clients[0].ravel(2), thetas)
    models, info = answers(algorithm, states[-1])
    mix = [lams[k] for k in best]
    assert_exact(stacked(models.personal), [m * thetas[i, best[i]] + (1 - m) * w for i, m in enumerate(mix)])
    assert_exact(info["mix"], mix)
    assert len(set(best[:3])) > 1, "clients differ in their choices here"


def test_mapper_is_the_oracles():
    check_mapper(Mapper)


def test_with_the_only_weight_one_mapper_is_alone_and_sends_nothing():
    states = rounds_of(algorithm := Mapper(mix=1.0, **STEPS))
    assert_exact(flat(states[-1].server), w0)
    want = [alone(0, 1), alone(1, 1), alone(2, 2), w0]
    assert_exact(stacked(answers(algorithm, states[-1])[0].personal), want)


def test_with_the_only_weight_zero_mapper_is_fedavg():
    states = rounds_of(algorithm := Mapper(mix=0.0, **STEPS))
    plain = rounds_of(FedAvg(aggregation="uniform", **STEPS))
    for state, fedavg in zip(states, plain, strict=True):
        assert_exact(flat(state.server), flat(fedavg.server))
    personal = stacked(answers(algorithm, states[-1])[0].personal)
    assert_exact(personal, [flat(states[-1].server)] * N)


@pytest.mark.slow
def test_mappers_check_finds_that_only_the_last_client_counts():
    """Bug of the authors' code."""

    @record
    class Mutant(Mapper):
        def server_update(self, server: Params, uploads: Params, cohort: Cohort) -> Params:
            return server + self.beta * uploads[-1]

    with pytest.raises(AssertionError):
        check_mapper(Mutant)
