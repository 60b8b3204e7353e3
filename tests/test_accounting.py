"""The accountant: published and measured values, closed forms, and a second accountant of our own."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import norm

from pfedme.errors import InputError

pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")

from pfedme.privacy.accounting import (
    Event,
    check_delta,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    noise_for,
    renyi_epsilon,
    replace_one_epsilon,
    spent,
)

DELTA = 1e-5


def root(f: Callable[[float], float], most: float) -> float:
    """Where a falling function is zero, by bisection."""
    least = 0.0
    for _ in range(100):
        middle = (least + most) / 2
        least, most = (middle, most) if f(middle) > 0 else (least, middle)
    return most


def test_noise_for_rows_of_a_hospital():
    """3,000 rows, mini-batches of 20, 2,000 of them."""
    found = [noise_for(target, DELTA, 20 / 3000, 2000) for target in (1, 3, 8)]
    assert [f"{z:.2f}" for z in found] == ["1.34", "0.78", "0.57"]
    found = [noise_for(target, DELTA, 20 / 3000, 2000, K=5) for target in (1, 3, 8)]
    assert [f"{z:.2f}" for z in found] == ["3.00", "1.75", "1.28"]


def test_cohorts_of_a_hundred_of_a_thousand_clients():
    case = 0.1, 1.0, 100, DELTA
    assert epsilon(*case) == pytest.approx(7.05, abs=0.005)
    assert renyi_epsilon(*case) == pytest.approx(7.90, abs=0.005)
    assert replace_one_epsilon(*case) == pytest.approx(10.5, abs=0.05)
    assert replace_one_epsilon(*case, sampling="fixed") == pytest.approx(31.4, abs=0.05)
    assert epsilon(1.0, 1.0, 100, DELTA) == pytest.approx(91.8, abs=0.05)


@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (1.0, 100), (5.0, 40), (40.0, 300), (0.5, 3)])
def test_everyone_every_round_is_the_closed_form(z, steps):
    mu = math.sqrt(steps) / z

    def delta(eps: float) -> float:
        return float(ndtr(-eps / mu + mu / 2)) - math.exp(eps) * float(ndtr(-eps / mu - mu / 2))

    want = root(lambda eps: delta(eps) - DELTA, 300)
    assert epsilon(1.0, z, steps, DELTA) == pytest.approx(want, abs=1e-6)
    assert gaussian_epsilon(z, steps, DELTA) == pytest.approx(want, abs=1e-6)
    assert gaussian_delta(z, steps, want) == pytest.approx(DELTA, rel=1e-6)


def test_distributions_of_everyone_every_round_agree_with_the_closed_form():
    """The library on the same mechanism, composed with one that reveals next to nothing."""
    found = spent([Event(1.0, 5.0, 25), Event(1e-9, 50.0, 1)], DELTA)
    assert found == pytest.approx(gaussian_epsilon(1.0, 1, DELTA), rel=2e-3)


@pytest.mark.parametrize("q", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("z", [0.6, 1.1, 4.0])
def test_loss_distributions_are_never_above_renyi(q, z):
    for steps in (1, 50, 1000):
        assert epsilon(q, z, steps, DELTA) <= renyi_epsilon(q, z, steps, DELTA) + 1e-9


def by_convolution(q: float, z: float, steps: int, delta: float) -> float:
    """A second accountant: both privacy losses on a fine grid, rounded to the nearest point, and raised to a
    power by one Fourier transform."""
    found = []
    x = np.linspace(-12 * z - 1, 12 * z + 2, 400_001)
    edges = (x[1:] + x[:-1]) / 2
    p0 = np.diff(norm.cdf(edges / z), prepend=0, append=1)
    p1 = np.diff(norm.cdf((edges - 1) / z), prepend=0, append=1)
    mixed = (1 - q) * p0 + q * p1
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * z * z)))
    grid, size = 2e-4, 2**18
    for mass, values in ((mixed, loss), (p0, -loss)):
        place = np.round(values / grid).astype(int)
        pmf = np.bincount(place % size, weights=mass, minlength=size)
        # Rounding to the nearest point shifts the mean of the loss a little; shift it back.
        shift = steps * (mass @ values - mass @ (place * grid))
        total = np.fft.irfft(np.fft.rfft(pmf) ** steps, size)
        points = np.fft.fftfreq(size, 1 / size) * grid + shift
        order = np.argsort(points)
        points, total = points[order], np.maximum(total[order], 0)

        def gap(eps: float, points=points, total=total) -> float:
            above = points > eps
            return float(total[above] @ -np.expm1(eps - points[above])) - delta

        found.append(root(gap, points[-1]) if gap(0.0) > 0 else 0.0)
    return max(found)


@pytest.mark.parametrize(
    ("q", "z", "steps"), [(20 / 3000, 0.78, 2000), (20 / 3000, 1.34, 2000), (0.1, 1.0, 100), (0.3, 2.0, 50)]
)
def test_a_second_accountant_agrees(q, z, steps):
    assert epsilon(q, z, steps, DELTA) == pytest.approx(by_convolution(q, z, steps, DELTA), rel=5e-3)


@pytest.mark.parametrize(
    ("q", "z", "steps"), [(20 / 3000, 0.78, 2000), (20 / 3000, 0.57, 2000), (0.1, 1.0, 100), (0.3, 2.0, 50)]
)
def test_an_accountant_of_others_agrees(q, z, steps):
    """Gopi, Lee and Wutschitz (2021); `pip install --no-deps prv-accountant` is enough for this test."""
    prv = pytest.importorskip("prv_accountant", reason="prv-accountant is not installed")
    mechanism = prv.PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=z)
    theirs = prv.PRVAccountant(
        prvs=[mechanism], max_self_compositions=[steps], eps_error=0.005, delta_error=1e-9
    )
    low, estimate, high = theirs.compute_epsilon(DELTA, [steps])
    assert low <= epsilon(q, z, steps, DELTA) <= high
    assert epsilon(q, z, steps, DELTA) == pytest.approx(estimate, rel=1e-3)


@pytest.mark.parametrize("target", [0.1, 1.0, 3.0, 20.0])
def test_noise_is_just_enough(target):
    z = noise_for(target, DELTA, 0.01, 500)
    assert epsilon(0.01, z, 500, DELTA) <= target < epsilon(0.01, 0.998 * z, 500, DELTA)


def test_more_of_anything_costs_more():
    base = epsilon(0.01, 1.0, 500, DELTA)
    assert base < epsilon(0.02, 1.0, 500, DELTA)
    assert base < epsilon(0.01, 0.9, 500, DELTA)
    assert base < epsilon(0.01, 1.0, 600, DELTA)
    assert base < epsilon(0.01, 1.0, 500, DELTA / 10)


def test_using_a_batch_K_times_is_one_use_with_less_noise():
    assert epsilon(0.01, 2.0, 300, DELTA, K=4) == epsilon(0.01, 1.0, 300, DELTA)


def test_several_runs_cost_less_than_the_sum_and_more_than_each():
    runs = [Event(0.01, 1.0, 200), Event(0.02, 1.5, 100), Event(0.01, 1.0, 300)]
    each = [spent([run], DELTA) for run in runs]
    together = spent(runs, DELTA)
    assert max(each) < together < sum(each)
    assert together == spent(runs[::-1], DELTA)
    assert spent([Event(0.01, 1.0, 500), runs[1]], DELTA) == together
    assert spent([], DELTA) == spent([Event(0.01, 1.0, 0)], DELTA) == 0.0
    assert spent([*runs, Event(0.01, 0.0, 1)], DELTA) == math.inf


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf])
def test_an_impossible_epsilon_is_refused(value):
    with pytest.raises(InputError, match="epsilon must be a positive finite number"):
        noise_for(value, DELTA, 0.01, 100)


@pytest.mark.parametrize("value", [0, -1e-5, 1, 2.0, math.nan, math.inf])
def test_an_impossible_delta_is_refused(value):
    with pytest.raises(InputError, match="delta must be above 0 and below 1"):
        spent([Event(0.01, 1.0, 1)], value)


def test_delta_must_be_below_one_in_all_units():
    check_delta(0.9e-3, 1000)
    with pytest.raises(InputError, match=r"choose --delta below 0\.001"):
        check_delta(1e-3, 1000)


@pytest.mark.parametrize("event", [Event(math.nan, 1, 1), Event(1.5, 1, 1), Event(0.1, math.nan, 1)])
def test_impossible_events_are_refused(event):
    with pytest.raises(InputError):
        spent([event], DELTA)
