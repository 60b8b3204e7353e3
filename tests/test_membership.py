"""Membership inference against counts over all pairs, resampling, and models that have learned by heart."""

from __future__ import annotations

import numpy as np
import pytest

from pfedme.algorithms import Alone
from pfedme.audits.membership import Membership, compare
from pfedme.core.models import Network
from pfedme.data.federation import Federation
from pfedme.engine.exchange import first_model
from pfedme.engine.simulate import Simulation


def losses(seed: int, shift: float = 0.5, size: int = 60) -> Membership:
    """Losses with ties, lower for members."""
    rng = np.random.default_rng(seed)
    return Membership(rng.normal(size=size).round(1), (rng.normal(size=size) + shift).round(1))


def test_the_auc_is_the_share_of_pairs_in_order():
    one = losses(0)
    pairs = one.others[None] - one.members[:, None]
    assert one.auc == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(300):
        low, high = losses(seed, 0.0).interval()
        covered += low <= 0.5 <= high
    assert 0.90 < covered / 300 < 0.99


def test_true_positives_are_counted_below_the_threshold_of_the_false_ones():
    others, members = np.arange(200.0), np.array([-1.0, 0.0, 1.0, 1.5, 2.0, 300.0])
    found = Membership(members, others)
    # Two of the others may be called members: those with losses 0 and 1.
    assert found.true_positives(0.01) == pytest.approx(4 / 6)
    low, high = found.true_positives_interval(0.01)
    assert low <= 4 / 6 <= high


def test_the_curve_has_the_area_of_the_auc():
    one = losses(3)
    false, true = one.curve()
    assert np.trapezoid(true, false) == pytest.approx(one.auc)


def noise_federation(rows: int = 40) -> Federation:
    """Labels that nothing predicts."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3 * rows, 30)).astype(np.float32), rng.integers(2, size=3 * rows)
    return Federation.split([rows] * 3, x, y, classes=2, train=0.5)


def test_rows_learned_by_heart_are_found_and_others_are_not():
    federation, model = noise_federation(), Network(features=30, classes=2)
    simulation = Simulation(Alone(eta=0.5, l2="model", B=0), model, federation, cohort=3)
    state, _ = simulation.advance(simulation.start(), 30)
    theta, who = simulation.answer(state)[0].personal, np.arange(3)
    assert theta is not None
    learned = compare(model, theta, federation, who, shared=False)
    assert learned is not None
    assert len(learned.members) == len(learned.others) == 60
    assert learned.auc > 0.7  # about half of the other rows are predicted rightly, by chance
    untrained = compare(model, first_model(model, 0), federation, who, shared=True)
    assert untrained is not None
    low, high = untrained.interval(0.999)
    assert low < 0.5 < high


def test_without_test_rows_there_is_nothing_to_compare():
    x = np.zeros((4, 2), np.float32)
    federation = Federation.split([2, 2], x, np.zeros(4, int), classes=2, train=1.0)
    model = Network(features=2, classes=2)
    assert compare(model, first_model(model, 0), federation, np.arange(2), shared=True) is None
