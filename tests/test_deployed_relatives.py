"""Relatives of pFedMe, deployed: the models that clients get are those of a simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_deploy import QUICK, Room, deployed, owners

from pfedme.algorithms import (
    IFCA,
    Algorithm,
    LabelPrior,
    Mocha,
)
from pfedme.core.models import DNN, MLR, Description
from pfedme.data.table import Table
from pfedme.deploy.plan import Plan
from pfedme.errors import InputError
from pfedme.export import load
from pfedme.runs.run import Run

SMALL = DNN(hidden=(4,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        pytest.param(Mocha(**QUICK), MLR(), marks=pytest.mark.slow),
        (IFCA(clusters=3, warmup=1, **QUICK), MLR()),
        pytest.param(LabelPrior(form="training", **QUICK), SMALL, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
def test_deployed_clients_have_the_models_of_a_simulation(
    algorithm: Algorithm, model: Description, tmp_path: Path
):
    tables = owners(tmp_path)
    plan = Plan(algorithm=algorithm, model=model, rounds=3, cohort=4, seed=5, min_clients=5, clip=0.0)
    room = Room(tables, tmp_path / "state")
    deployed(tmp_path, plan, room)
    data = Table(path=str(tables), label="sick")
    _, simulation = Run(algorithm=algorithm, data=data, model=model, rounds=3, cohort=4, seed=5).prepare()
    state, finite = simulation.advance(simulation.start(), 3)
    assert finite
    models, _ = simulation.answer(state)
    assert models.personal is not None
    for name, theta in zip(room.clients, np.asarray(models.personal.ravel(1)), strict=True):
        mine = load(tmp_path / "state" / name / "model")
        assert mine.origin["which"] == "personal"
        np.testing.assert_allclose(mine.theta.ravel(), theta, rtol=1e-4, atol=1e-5 * np.abs(theta).max())


def test_a_server_stops_before_it_binds_clients_if_their_label_does_not_fit(tmp_path: Path):
    room = Room(owners(tmp_path, quantity=True), tmp_path / "state")
    plan = Plan(algorithm=LabelPrior(**QUICK), model=MLR(), rounds=2, min_clients=5)
    with pytest.raises(InputError, match="label-prior needs classes"):
        deployed(tmp_path, plan, room)
    assert {kind for kind, _, _ in room.sent} == {"agree", "refuse"}
