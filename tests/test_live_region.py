"""A tree of servers as real processes, with TLS and keys: `make test-live`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from live import Live, federation, table

from pfedme.algorithms import PFedMe
from pfedme.export import load, model_of

REGIONS = {"eastern": ("anna", "berta", "carl"), "western": ("dora", "emil", "süd")}
EVERYONE = tuple(name for names in REGIONS.values() for name in names)
ROUNDS = 3
ALGORITHM = PFedMe(lam=5.0, eta=0.05, alpha=0.05, R=10, B=16, K=3, aggregation="samples")
STRICT = ("--clip", "0")


def start_region(live: Live, upper: Live, name: str, *options: str) -> None:
    """Starts a region whose clients are those of `live`."""
    live.start("server", [
        "server", "--upper", f"127.0.0.1:{upper.port}", "--upper-keys", str(upper.own(name)),
        "--keys", str(live.folder / "keys"), "--listen", f"127.0.0.1:{live.port}", "--out", str(live.out),
        "--min-clients", "3", "--min-replies", "3", *STRICT, *options,
    ])  # fmt: skip


def relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


@pytest.mark.slow
def test_two_regions_with_six_clients_have_the_models_of_six_clients_at_one_server(tmp_path: Path):
    """Even if one of the regions is killed during the run."""
    with contextlib.ExitStack() as stack:
        upper = stack.enter_context(federation(tmp_path / "upper", tuple(REGIONS)))
        regions = {n: stack.enter_context(federation(tmp_path / n, own)) for n, own in REGIONS.items()}
        began = time.monotonic()
        upper.server(
            ALGORITHM, "--rounds", str(ROUNDS), "--min-clients", "2", "--min-replies", "2", *STRICT,
            "--regions", ",".join(REGIONS), "--deadline", "60", "--max-attempts", "20",
        )  # fmt: skip
        for name, live in regions.items():
            start_region(live, upper, name)
            for own in live.names:
                table(EVERYONE.index(own)).write_csv(live.tables / f"{own}.csv")
            live.clients("--share-metrics")
        upper.done(1)
        regions["western"].kill("server")  # whatever it was doing
        regions["western"].resume()
        assert upper.wait("server") == 0, upper.said("server") + upper.log()
        for live in regions.values():
            live.finished()
        print(f"\ntree: {time.monotonic() - began:.0f} s\n{upper.log()}\n{regions['western'].log()}")
    with federation(tmp_path / "flat", EVERYONE) as flat:
        flat.server(
            ALGORITHM, "--rounds", str(ROUNDS), "--min-clients", "6", "--min-replies", "6", *STRICT,
        )  # fmt: skip
        flat.clients("--share-metrics")
        flat.finished()
    w, one = (np.asarray(model_of(live.out).theta.ravel()) for live in (upper, flat))
    apart = {"w": relative(w, one)}
    for live in regions.values():
        for name in live.names:
            theta = (load(place.state(name) / "model").theta.ravel() for place in (live, flat))
            apart[name] = relative(*map(np.asarray, theta))
    print(apart)
    assert max(apart.values()) < 1e-5, apart
    assert np.abs(w).max() > 0.1
    scores = [live.record()["final"]["global"] for live in (upper, flat)]
    for key in ("accuracy", "loss"):
        assert scores[0][key] == pytest.approx(scores[1][key], rel=1e-4)
    for name, live in regions.items():
        parts = [(line["round"], line["client"]) for line in live.ledger() if line["outcome"] == "counted"]
        assert sorted(parts) == [(str(t), own) for t in range(1, ROUNDS + 1) for own in live.names]
        sent = [line for line in upper.ledger() if (line["client"], line["outcome"]) == (name, "counted")]
        assert [line["rows"] for line in sent] == [str(3 * 180)] * ROUNDS
        assert json.loads((live.out / "record.json").read_text())["status"] == "finished"
