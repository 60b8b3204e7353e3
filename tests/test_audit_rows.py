"""Rows in one upload: where the quotient is the row, where it is a mean, and where it is nothing."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pfedme.algorithms import Alone, FedAvg, PFedMe
from pfedme.audits.rows import matched, quotients, recover
from pfedme.core.models import Convolutional, Network
from pfedme.data.federation import Federation
from pfedme.engine.exchange import first_model
from pfedme.engine.simulate import Simulation


def federation(rows: int = 30, features: int = 12, classes: int = 3) -> Federation:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2 * rows, features)).astype(np.float32)
    return Federation.split([rows, rows], x, rng.integers(classes, size=2 * rows), classes=classes)


MODEL = Network(features=12, classes=3)


def test_one_row_in_one_step_is_the_upload_itself():
    simulation = Simulation(FedAvg(eta=0.1, R=1, B=1), MODEL, federation(), cohort=2)
    for found in recover(simulation, first_model(MODEL, 0))[:2]:
        assert found.best < 1e-3
        assert found.near == 2  # one of each client
        assert found.chance > 0.2
        assert found.chance_near == 0


def test_a_step_on_all_rows_gives_nothing_closer_than_their_means():
    simulation = Simulation(FedAvg(eta=0.1, R=1, B=0), MODEL, federation(rows=200), cohort=2)
    curious = recover(simulation, None)[0]
    assert curious.best > 0.3
    assert curious.near == 0


def test_a_malicious_server_reads_the_only_row_of_a_rare_class():
    f = federation()
    y = np.where(np.arange(len(f.y)) == 5, 1, 0)  # one training row of class 1, all others of class 0
    simulation = Simulation(PFedMe(eta=0.05, B=20, R=5), MODEL, dataclasses.replace(f, y=y), cohort=2)
    malicious = recover(simulation, first_model(MODEL, 0))[-1]
    assert malicious.server == "malicious"
    assert malicious.best < 1e-3
    np.testing.assert_allclose(malicious.pairs[0].guess, f.x[5], atol=1e-2)


def test_the_clients_mean_has_an_error_of_one_and_the_row_itself_of_zero():
    x = np.random.default_rng(0).normal(size=(40, 5))
    assert [pair.error for pair in matched(0, x.mean(axis=0)[None], x)] == [pytest.approx(1.0)]
    assert sorted(pair.error for pair in matched(0, x, x)) == pytest.approx([0.0] * 40)


def test_rows_that_equal_the_mean_do_not_count():
    assert matched(0, np.ones((1, 3)), np.ones((4, 3))) == []
    assert matched(0, np.ones((0, 3)), np.eye(3)) == []


def test_differences_of_units_separate_rows_that_units_share():
    """Units Σ g_kj (x_j, 1) with one row in common: their difference has the other row alone."""
    x = np.random.default_rng(2).normal(size=(2, 6))
    one = np.hstack([x, np.ones((2, 1))])
    layer = np.stack([one[0] + 2 * one[1], one[0]])
    assert np.abs(quotients(layer) - x[1]).sum(axis=1).min() < 1e-12


def test_without_a_linear_first_layer_or_an_upload_there_is_nothing_to_divide():
    f = dataclasses.replace(federation(features=64), shape=(8, 8))
    cnn = Convolutional(shape=(8, 8), classes=3, channels=(2,))
    assert recover(Simulation(FedAvg(eta=0.1, B=4), cnn, f, cohort=2), None) == []
    assert recover(Simulation(Alone(eta=0.1, l2="model"), MODEL, federation(), cohort=2), None) == []


def test_a_client_with_one_row_is_not_attacked():
    f = federation()
    small = Federation.split([2, 30], f.x[:32], f.y[:32], classes=3, train=0.5)
    found = recover(Simulation(FedAvg(eta=0.1, R=1, B=1), MODEL, small, cohort=2), None)[0]
    assert {pair.client for pair in found.pairs} == {1}
    assert jnp.isfinite(found.best)
