"""The audit of private gradients: correct ones pass, and each planted mistake is caught."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedme.algorithms import Algorithm, FedAvg, PFedMe
from pfedme.audits import audit, mechanism
from pfedme.audits.mechanism import Check, Mechanism, clipping_adapts
from pfedme.core import private, private_prox
from pfedme.core.models import Network
from pfedme.core.private_mean import adapted
from pfedme.data.federation import Federation
from pfedme.deploy import private as deployed
from pfedme.engine.simulate import Simulation
from pfedme.privacy.rows import RowPlan, plan_rows
from pfedme.privacy.units import Rows

CLIENTS, ROUNDS, EPSILON, DELTA = 3, 20, 8.0, 1e-5
ALGORITHM = FedAvg(eta=0.1, R=5, B=12)
INNER = PFedMe(eta=0.1, alpha=0.1, R=5, K=3, B=12)
LEVEL = audit.CHECK_LEVEL


@cache
def plan(rows: int, algorithm: Algorithm = ALGORITHM) -> RowPlan:
    """The noise for clients with so many training rows."""
    took_part = np.full(CLIENTS, ROUNDS)
    spec, n = Rows(epsilon=EPSILON, delta=DELTA), np.full(CLIENTS, rows)
    return plan_rows(spec, algorithm, n, took_part, 0 * took_part)


def simulation(seed: int = 0, algorithm: Algorithm = ALGORITHM, features: int = 5) -> Simulation:
    """Three clients with 60 training rows each."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80 * CLIENTS, features)).astype(np.float32)
    f = Federation.split([80] * CLIENTS, x, rng.integers(3, size=len(x)), classes=3)
    model = Network(features=features, classes=3)
    return Simulation(algorithm, model, f, cohort=CLIENTS, seed=seed, privacy=plan(60, algorithm))


@pytest.fixture(autouse=True)
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers, which are enough to tell, and entropy that is the same each time."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(mechanism, "NUMBERS", 4000)
    monkeypatch.setattr(deployed, "secrets", SimpleNamespace(token_bytes=rng.bytes))


@pytest.fixture
def mutable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Compiled programs are forgotten before and after a mistake is planted."""
    jax.clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


def failures(of: Simulation, seed: int = 0) -> list[str]:
    """What the audit says is wrong."""
    checks, worst = audit.check_mechanism(of, DELTA, seed)
    too_much = ["ε"] if worst.bound.epsilon > EPSILON else []
    return [check.statistic for check in checks if not check.passed] + too_much


def false_alarms(repetitions: int) -> int:
    return sum(bool(failures(simulation(seed), seed)) for seed in range(repetitions))


def test_correct_private_gradients_seldom_raise_an_alarm():
    assert false_alarms(2) == 0


@pytest.mark.slow
def test_correct_private_gradients_raise_an_alarm_at_most_as_often_as_the_audit_says():
    assert false_alarms(200) <= 10


def test_noise_that_is_half_as_large_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RowPlan, "private", with_factors(noise=0.5))
    made = Mechanism.of(simulation())
    noise = {release.name: made.noise(release) for release in made.releases}
    check = mechanism.noise_is_as_large(noise, LEVEL)
    assert not check.passed
    assert check.value == pytest.approx(0.5, rel=0.1)


@pytest.mark.slow
def test_noise_that_is_drawn_half_as_large_is_caught(mutable: pytest.MonkeyPatch):
    correct = private.normal_like
    mutable.setattr(private, "normal_like", lambda key, like: 0.5 * correct(key, like))
    assert "standard deviation of the noise, divided by z c/B" in failures(simulation())


def inner_steps() -> Mechanism:
    """That of pFedMe, whose inner steps are taken in the space of the mini-batch."""
    made = Mechanism.of(simulation(algorithm=INNER, features=40))
    problem = made.releases[0].problem
    assert private_prox.covers(problem.loss(problem.draw(made.key, INNER.B)))
    return made


def test_correct_inner_steps_pass_and_those_with_half_the_noise_are_caught(mutable: pytest.MonkeyPatch):
    def check() -> Check:
        made = inner_steps()
        noise = {release.name: made.noise(release) for release in made.releases}
        return mechanism.noise_is_as_large(noise, LEVEL)

    assert check().passed
    correct = private_prox.normal_like
    mutable.setattr(private_prox, "normal_like", lambda key, like: 0.5 * correct(key, like))
    jax.clear_caches()
    assert not check().passed
    assert check().value == pytest.approx(0.5, rel=0.1)


def test_inner_steps_that_do_not_clip_are_caught(mutable: pytest.MonkeyPatch):
    assert mechanism.rows_are_clipped(inner_steps()).passed
    correct: Callable[..., Any] = private_prox.clipped_slopes
    mutable.setattr(private_prox, "clipped_slopes", lambda *args: correct(*args[:-1], jnp.float32(jnp.inf)))
    jax.clear_caches()
    assert mechanism.rows_are_clipped(inner_steps()).value > 100


def with_factors(noise: float = 1.0, clip: float = 1.0) -> Callable[[RowPlan], private.Private]:
    """A plan's `private` whose noise and clipping length at client 1 are multiplied by these factors."""
    correct, one = RowPlan.private, jnp.ones(CLIENTS)

    def made(plan: RowPlan) -> private.Private:
        found = correct(plan)
        own, length = (one.at[1].set(factor) for factor in (noise, clip))
        return dataclasses.replace(found, noise=found.noise * own, clip=found.clip * length)

    return made


def test_a_client_that_does_not_clip_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Its noise is as it should be."""
    monkeypatch.setattr(RowPlan, "private", with_factors(noise=1e-4, clip=1e4))
    made = Mechanism.of(simulation())
    check = mechanism.rows_are_clipped(made)
    assert not check.passed
    assert check.client == "1"
    assert check.value > 100


def test_noise_from_the_seed_is_caught(monkeypatch: pytest.MonkeyPatch):
    """At deployed clients, which have the only noise that is to be secret."""
    seed = np.asarray(jax.random.key_data(jax.random.key(3))).tobytes()
    monkeypatch.setattr(deployed, "secrets", SimpleNamespace(token_bytes=lambda size: seed[:size]))
    found = failures(simulation(seed=3))
    assert len(found) == 1
    assert "with what the seed gives" in found[0]


def adaptive(C: float, lengths: np.ndarray, *, sign: float) -> float:
    """The rule of private means, or its inverse."""
    after = float(adapted(jnp.float32(C), jnp.float32(np.mean(lengths <= C))))
    return C * (after / C) ** sign if C > 0 else C


def test_an_inverted_adaptive_rule_is_caught():
    right = clipping_adapts(lambda C, lengths: adaptive(C, lengths, sign=1.0), 0.5)
    wrong = clipping_adapts(lambda C, lengths: adaptive(C, lengths, sign=-1.0), 0.5)
    assert right.passed
    assert not wrong.passed
    assert wrong.value > 10


def test_noise_that_is_used_again_is_caught():
    made = Mechanism.of(simulation())
    noise = made.noise(made.releases[0])
    assert mechanism.noise_is_fresh({"0": noise}, LEVEL).passed
    again = np.concatenate([noise[: len(noise) // 2]] * 2)
    assert not mechanism.noise_is_fresh({"0": again}, LEVEL).passed
    assert not mechanism.noise_is_fresh({"0": noise, "1": noise}, LEVEL).passed
    assert not mechanism.noise_is_fresh({"0": 0 * noise}, LEVEL).passed


def test_batches_with_replacement_are_caught(mutable: pytest.MonkeyPatch):
    correct = private.Private.draw

    def twice(
        self: private.Private, key: jax.Array, start: jax.Array, count: jax.Array, shape: tuple[int, ...]
    ) -> private.Batch:
        batch = correct(self, key, start, count, shape)
        rows = batch.rows.at[..., 1].set(batch.rows[..., 0])
        return dataclasses.replace(batch, rows=rows, used=jnp.ones_like(batch.used))

    mutable.setattr(private.Private, "draw", twice)
    found = mechanism.sampled(Mechanism.of(simulation()))
    assert not mechanism.rows_are_drawn_once(found).passed
    assert not mechanism.rows_are_drawn_rarely(found, Mechanism.of(simulation()), LEVEL).passed


def test_a_value_that_is_not_a_number_fails():
    for above in (True, False):
        assert not Check("", "", math.nan, 1.0, above, 0.0).passed
