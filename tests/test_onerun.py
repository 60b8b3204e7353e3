"""The lower bound on ε from one run, against closed forms, transcriptions and mechanisms of known ε."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from pfedme.audits.onerun import bound, lower_bound, p_value
from pfedme.privacy.accounting import gaussian_epsilon

DELTA = 1e-5


def by_the_formula(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The theorem, term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))

    def at_least(k: int) -> float:
        return sum(math.comb(r, j) * q**j * (1 - q) ** (r - j) for j in range(max(k, 0), r + 1))

    lost = max((at_least(v - i) - at_least(v)) / i for i in range(1, m + 1)) if v else 0.0
    return min(1.0, at_least(v) + 2 * m * delta * lost)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_p_value_is_that_of_the_theorem(epsilon: float, delta: float):
    for r in (1, 5, 12):
        for v in range(r + 1):
            assert p_value(12, r, v, epsilon, delta) == pytest.approx(
                by_the_formula(12, r, v, epsilon, delta)
            )


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (1.0, 0.01), (3.0, 1e-3)])
def test_no_mechanism_of_that_epsilon_is_refuted_more_often_than_the_p_value_says(
    epsilon: float, delta: float
):
    """Each coin is told as it is with probability δ, and else by randomised response: (ε, δ)-DP, and the
    number of right guesses has an exact distribution."""
    m, right = 30, delta + (1 - delta) / (1 + math.exp(-epsilon))
    for v in range(m + 1):
        assert binom.sf(v - 1, m, right) <= p_value(m, m, v, epsilon, delta) * (1 + 1e-9)


def test_the_bound_is_where_the_p_value_crosses_the_level():
    for m, r, v in ((100, 40, 35), (1000, 1000, 700), (50, 50, 50)):
        found = lower_bound(m, r, v, DELTA)
        assert p_value(m, r, v, found, DELTA) <= 0.05 < p_value(m, r, v, found + 1e-4, DELTA)
    assert lower_bound(100, 100, 50, DELTA) == 0
    assert lower_bound(100, 0, 0, DELTA) == 0


def test_guesses_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="impossible"):
        p_value(10, 5, 6, 1.0, 0.0)


def shift(epsilon: float) -> float:
    """μ of the Gaussian mechanism with this ε."""
    low, high = 1e-3, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(1 / middle, 1, DELTA) < epsilon else (low, middle)
    return low


def gaussian_bounds(epsilon: float, canaries: int, repetitions: int) -> np.ndarray:
    """Bounds from canaries of which each has a Gaussian release of its own."""
    mu, found = shift(epsilon), []
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        included = rng.random(canaries) < 0.5
        found.append(bound(rng.normal(size=canaries) + mu * included, included, DELTA).epsilon)
    return np.array(found)


def test_a_gaussian_of_known_epsilon_is_bounded_from_below():
    """With 1,000 canaries and ε = 10, jax_privacy's one-run audit finds 2.74 in this form of the bound and
    4.14 in a sharper one."""
    found = gaussian_bounds(10.0, 1000, 10)
    assert 2.2 < found.mean() < 4.1
    assert found.max() < 10


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_bound_seldom_exceeds_the_truth(epsilon: float):
    """Randomised response is the mechanism for which the theorem is an equality."""
    exceeded = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        included = rng.random(100) < 0.5
        told = np.where(rng.random(100) < 1 / (1 + math.exp(-epsilon)), included, ~included)
        # All scores of a kind are equal; which of them are guessed must not depend on the coins.
        exceeded += bound(told + 1e-3 * rng.random(100), included, 0.0).epsilon > epsilon
    assert exceeded <= 10


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_bound_seldom_exceeds_the_truth_of_a_gaussian(epsilon: float):
    assert (gaussian_bounds(epsilon, 500, 200) > epsilon).sum() <= 10
