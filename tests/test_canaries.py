"""Canaries: where they are planted, and what their scores show."""

from __future__ import annotations

import numpy as np
import pytest

from pfedme.algorithms import Alone, FedAvg
from pfedme.audits.canaries import Canaries, train
from pfedme.core.models import Network
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError

MODEL = Network(features=40, classes=3)


def federation(*rows: int, classes: int = 3) -> Federation:
    rng = np.random.default_rng(0)
    n = sum(rows)
    y = rng.integers(classes, size=n) if classes else rng.normal(size=n).astype(np.float32)
    return Federation.split(rows, rng.normal(size=(n, 40)).astype(np.float32), y, classes=classes)


def drawn(f: Federation, count: int | None = None, clients: tuple[int, ...] | None = None) -> Canaries:
    who = np.arange(f.clients) if clients is None else np.array(clients)
    return Canaries.draw(f, who, count, np.random.default_rng(1))


def test_canaries_are_orthogonal_and_as_long_as_rows():
    f = federation(80, 80)
    found = drawn(f, 30)
    gram = found.x @ found.x.T
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-3
    lengths = np.linalg.norm(f.x[:60], axis=1)
    assert lengths.min() < np.sqrt(gram[0, 0]) < lengths.max()


def test_clients_with_the_most_rows_get_them_at_most_half_as_many_as_rows():
    f = federation(40, 400, 200)
    assert np.bincount(drawn(f, 160).owner, minlength=3).tolist() == [0, 150, 10]
    assert np.bincount(drawn(f).owner, minlength=3).tolist() == [15, 150, 75]
    assert set(drawn(f, 60, (2,)).owner) == {2}


def test_only_included_canaries_are_planted_and_only_among_training_rows():
    f = federation(40, 60, 40)
    found = drawn(f, 40)
    planted = found.planted(f)
    start, count = planted.rows("train")
    for i in range(3):
        mine = found.owner == i
        rows = planted.x[start[i] : start[i] + count[i]]
        held = [any(np.array_equal(x, row) for row in rows) for x in found.x[mine]]
        assert held == found.included[mine].tolist()
        before, after = (g.rows("test") for g in (f, planted))
        own, new = (slice(a[i], a[i] + n[i]) for a, n in (before, after))
        np.testing.assert_array_equal(f.x[own], planted.x[new])
        np.testing.assert_array_equal(f.y[own], planted.y[new])
        # As many rows as before on average: half the canaries come, and as many honest rows go.
        assert count[i] == f.n_train[i] - mine.sum() // 2 + found.included[mine].sum()
    assert len(planted.x) == len(planted.y) == planted.count.sum()


@pytest.mark.parametrize(("count", "clients"), [(5, None), (1000, None), (40, (0,))])
def test_too_few_or_too_many_are_refused(count: int, clients: tuple[int, ...] | None):
    with pytest.raises(InputError, match="choose --canaries between 10 and"):
        drawn(federation(40, 60), count, clients)


@pytest.mark.parametrize("algorithm", [FedAvg(eta=0.3, R=5, B=10), Alone(eta=0.3, l2="model", R=5, B=10)])
def test_training_without_noise_tells_who_was_there(algorithm: FedAvg | Alone):
    """By uploads, or if there are none, by the losses of the final model."""
    f = federation(120, 120)
    found = drawn(f, 80)
    simulation = Simulation(algorithm, MODEL, found.planted(f), cohort=2)
    result = train(simulation, found, 30, 1e-5)
    assert result.white_box == (algorithm.name == "fedavg")
    assert result.scores[found.included].mean() > result.scores[~found.included].mean()
    assert result.bound.epsilon > 0.1
    assert result.bound.canaries == 80


def test_a_quantity_has_labels_far_out():
    assert set(drawn(federation(80, classes=0), 20).y) == {-3.0, 3.0}
