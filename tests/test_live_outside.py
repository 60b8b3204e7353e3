"""The algorithms and the model of another package in federations of real processes that are killed:
`make test-live`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import polars as pl
import pytest
import safetensors

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from conftest import INSTALLED
from laws import differs, there
from live import LABEL, Live, federation, soon
from outside import OUTSIDE, Clusters, Narrow

import pfedme
from pfedme.algorithms import Algorithm
from pfedme.core.tree import leaves
from pfedme.data.table import Table
from pfedme.export import load
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("outside_installed")]

NAMES, ROUNDS = ("east", "north", "south"), 4
MODEL = Narrow(width=4)
OWN = ("--algorithms", ",".join(OUTSIDE), "--models", "narrow")
"""What clients allow."""


@pytest.mark.parametrize("cls", OUTSIDE.values(), ids=OUTSIDE)
def test_all_that_is_kept_outlives_kills_of_a_client_and_of_the_server(
    cls: type[Algorithm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [INSTALLED, Path(__file__).parent, Path(pfedme.__file__).parents[1]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    algorithm, began = cls(eta=0.05, R=10, B=16), time.monotonic()
    with federation(tmp_path / "live", NAMES) as live:
        opposed(live, "south")
        live.server(
            algorithm, "--model", "narrow:width=4", "--rounds", str(ROUNDS), "--min-clients", "3",
            "--cohort", "3", "--min-replies", "3", "--max-attempts", "20", "--clip", "0", "--deadline", "20",
        )  # fmt: skip
        live.clients(*OWN)
        live.done(1)
        soon(lambda: answering(live, "north") == 2, 60, "north in round 2")
        assert live.kill("north") >= 3
        soon(lambda: not live.processes("north"), 20, "end of north")
        live.client("north", *OWN)
        live.done(2)
        # East then has what it would keep after a round that the server knows nothing of.
        soon(lambda: "Round 3: trained" in live.said("east"), 60, "east's part of round 3")
        assert live.kill("server") >= 4
        soon(lambda: not live.processes("server"), 20, "end of the server")
        live.resume()
        server = last_checkpoint(live)
        live.finished()
    took = time.monotonic() - began
    assert "Round 2: north failed" in live.log()
    assert "Resumed before round" in live.log()

    data = Table(path=str(live.tables), label=LABEL)
    sim = Run(algorithm=algorithm, data=data, model=MODEL, rounds=ROUNDS, cohort=3, seed=5).prepare()[1]
    first = sim.start()
    state, _ = sim.advance(first, ROUNDS)
    # What would be equal even if nothing were kept shows nothing.
    for part in ("server", "clients"):
        for a, b in zip(*(jax.tree.leaves(getattr(s, part)) for s in (first, state)), strict=True):
            assert differs(a, b)
    apart = {"server": far(server, leaves("server", state.server))}
    models, info = sim.answer(state)
    if cls is Clusters:
        assert sorted(np.asarray(info["second"])) in ([0, 0, 1], [0, 1, 1])
    theta = models.personal if models.personal is not None else there(models.local)
    for i, name in enumerate(there(sim.federation.names)):
        used = load(live.state(name) / "model").theta
        apart[f"model of {name}"] = far(leaves("w", used), leaves("w", theta[i]))
        want = leaves("after", jax.tree.map(lambda a, i=i: a[i], state.clients))
        if want:
            with safetensors.safe_open(live.state(name) / "kept.safetensors", framework="numpy") as file:
                assert json.loads(file.metadata()["pfedme"])["round"] == ROUNDS
                apart[f"state of {name}"] = far({key: file.get_tensor(key) for key in want}, want)
        else:
            assert not (live.state(name) / "kept.safetensors").exists()
    again = [name for name in NAMES if live.said(name).count("Round 3: trained") > 1]
    print(f"\n{cls.name}: {took:.0f} s; round 3 twice at {again}; differences: {apart}\n{live.log()}")
    assert max(apart.values()) < 1e-5, apart
    counted = [(line["round"], line["client"]) for line in live.ledger() if line["outcome"] == "counted"]
    assert sorted(counted) == sorted((str(t), name) for t in range(1, ROUNDS + 1) for name in NAMES)


def opposed(live: Live, name: str) -> None:
    """Turns a client's labels around, so that clients do not all choose the same of two models."""
    path = live.tables / f"{name}.csv"
    turned = pl.col(LABEL).replace({"yes": "no", "no": "yes"})
    pl.read_csv(path).with_columns(turned).write_csv(path)


def answering(live: Live, name: str) -> int:
    """The last round that a client has begun to answer."""
    path = live.state(name) / "rounds.json"
    return 1 + json.loads(path.read_text())["round"] if path.exists() else 0


def last_checkpoint(live: Live) -> dict[str, np.ndarray]:
    """What the server keeps after the last round, while clients answer it: then its file is removed."""

    def found() -> dict[str, np.ndarray] | None:
        tensors, about = Folder(live.out).read_checkpoint()
        return tensors if about["round"] == ROUNDS else None

    return soon(found, 300, f"round {ROUNDS} in\n{live.log()}")


def far(own: dict[str, Any], want: dict[str, Any]) -> float:
    """How far arrays are from others, relative to the largest number of each."""
    assert own.keys() == want.keys()
    largest = {key: np.abs(want[key]).max() or 1.0 for key in want}
    return max(float(np.abs(own[key] - want[key]).max() / largest[key]) for key in want)
