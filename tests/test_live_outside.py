"""An algorithm of another package whose clients keep something, in a federation of real processes that are
killed: `make test-live`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

import jax
from conftest import INSTALLED
from laws import there
from live import LABEL, federation, soon
from outside import Control

import pfedme
from pfedme.core.models import MLR
from pfedme.core.tree import leaves
from pfedme.data.table import Table
from pfedme.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("outside_installed")]

NAMES, ROUNDS = ("east", "north", "south"), 8
CONTROL = Control(eta=0.05, R=10, B=16)


def test_what_clients_keep_outlives_kills_of_a_client_and_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [INSTALLED, Path(__file__).parent, Path(pfedme.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    began = time.monotonic()
    with federation(tmp_path / "live", NAMES) as live:
        live.server(
            CONTROL, "--rounds", str(ROUNDS), "--min-clients", "3", "--cohort", "3", "--min-replies", "3",
            "--tries", "20", "--clip", "0", "--deadline", "60",
        )  # fmt: skip
        for name in NAMES:
            live.client(name, "--algorithms", "control")
        live.done(2)
        assert live.kill("north") >= 3
        soon(lambda: not live.processes("north"), 20, "end of north")
        live.client("north", "--algorithms", "control")
        live.done(5)
        assert live.kill("server") >= 4
        soon(lambda: not live.processes("server"), 20, "end of the server")
        live.resume()
        live.finished()
    assert "Resumed before round" in live.log()
    differences = live.against_simulation(CONTROL, ROUNDS)
    data = Table(path=str(live.tables), label=LABEL)
    run = Run(algorithm=CONTROL, data=data, model=MLR(), rounds=ROUNDS, cohort=len(NAMES), seed=5)
    sim = run.prepare()[1]
    state, _ = sim.advance(sim.start(), ROUNDS)
    for i, name in enumerate(there(sim.federation.names)):
        with safetensors.safe_open(live.state(name) / "kept.safetensors", framework="numpy") as file:
            assert json.loads(file.metadata()["pfedme"])["round"] == ROUNDS
            own = {key: file.get_tensor(key) for key in leaves("after", state.clients)}
        want = leaves("after", jax.tree.map(lambda a, i=i: a[i], state.clients))
        largest = max(np.abs(a).max() for a in want.values())
        differences[f"c of {name}"] = max(float(np.abs(own[k] - want[k]).max() / largest) for k in want)
    print(f"\n{time.monotonic() - began:.0f} s; relative differences: {differences}\n{live.log()}")
    assert set(differences) == {"w", *(f"c of {name}" for name in NAMES)}
    assert max(differences.values()) < 1e-5, differences
    counted = [(line["round"], line["client"]) for line in live.ledger() if line["outcome"] == "counted"]
    assert sorted(counted) == sorted((str(t), name) for t in range(1, ROUNDS + 1) for name in NAMES)
