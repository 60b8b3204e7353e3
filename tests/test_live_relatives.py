"""Every relative that can be deployed, in a federation of real processes: `make test-live`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from laws import there
from live import LABEL, federation
from test_live_outside import far, last_checkpoint
from test_outside_deploy import DEPLOYABLE, small

from pfedme.algorithms import Algorithm
from pfedme.core.models import MODELS
from pfedme.core.spec import to_json
from pfedme.core.tree import leaves
from pfedme.data.table import Table
from pfedme.export import load
from pfedme.runs.run import Run

NAMES, ROUNDS = ("east", "north", "south"), 4


@pytest.mark.slow
@pytest.mark.parametrize("cls", DEPLOYABLE.values(), ids=DEPLOYABLE)
def test_server_and_clients_have_the_models_of_a_simulation(cls: type[Algorithm], tmp_path: Path):
    (algorithm, model), began = small(cls), time.monotonic()
    name = next(name for name, known in MODELS.items() if type(model) is known)
    hidden = "-".join(map(str, to_json(model).get("hidden") or ()))
    with federation(tmp_path / "live", NAMES) as live:
        live.server(
            algorithm, "--model", f"{name}:hidden={hidden}" if hidden else name, "--rounds", str(ROUNDS),
            "--min-clients", "3", "--cohort", "3", "--min-replies", "3", "--clip", "0",
        )  # fmt: skip
        live.clients("--models", name)
        live.done(1)
        server = last_checkpoint(live)
        live.finished()
    data = Table(path=str(live.tables), label=LABEL)
    sim = Run(algorithm=algorithm, data=data, model=model, rounds=ROUNDS, cohort=3, seed=5).prepare()[1]
    state, _ = sim.advance(sim.start(), ROUNDS)
    models, _ = sim.answer(state)
    theta = there(models.personal if models.personal is not None else models.local)
    apart = {"server": far(server, leaves("server", state.server))}
    for i, who in enumerate(there(sim.federation.names)):
        apart[who] = far(leaves("w", load(live.state(who) / "model").theta), leaves("w", theta[i]))
    print(f"\n{cls.name}: {time.monotonic() - began:.0f} s, differences {apart}")
    assert max(apart.values()) < 1e-5, apart
