"""Clients that choose their models, in a federation of real processes: `make test-live`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from live import federation, soon

from pfedme.algorithms import LabelPrior
from pfedme.export import load

NAMES, ROUNDS = ("east", "north"), 3
AUTO = ("--personalize", "auto:steps=20")


@pytest.mark.slow
def test_clients_choose_when_the_run_is_over_and_one_that_was_killed_chooses_later(tmp_path: Path):
    with federation(tmp_path / "live", NAMES) as live:
        live.server(
            LabelPrior(eta=0.05, R=10, B=16), "--rounds", str(ROUNDS), "--min-clients", "2", "--min-replies",
            "2", "--clip", "0",
        )  # fmt: skip
        live.client("east", *AUTO)
        live.client("north", *AUTO)
        live.done(1)
        live.kill("north")  # in the middle of the run; what it keeps stays kept
        live.client("north", *AUTO)
        soon(lambda: "Training alone" in live.said("east"), 600, live.said("east"))
        live.kill("east")  # in the middle of its choice
        assert live.wait("server") == 0, live.said("server")
        assert live.wait("north") == 0, live.said("north")
        assert load(live.state("east") / "model").origin["which"] == "personal"
        assert (live.state("east") / "last.safetensors").exists()
        live.client("east", *AUTO)  # the server has gone
        assert live.wait("east") == 0, live.said("east")
        for name in NAMES:
            said = live.said(name)
            choice = json.loads((live.state(name) / "choice.json").read_text())
            assert choice["rows"] == 36
            names = {candidate["name"] for candidate in choice["candidates"]}
            assert {"global", "label-prior", "fine-tuned", "near-label-prior", "alone"} <= names
            assert "One of 5 parts of the training rows is kept out of training" in said
            assert all(sentence in said for sentence in choice["sentences"])
            origin = load(live.state(name) / "model").origin
            assert (origin["which"], origin["choice"]) == ("recommended", choice["choice"])
            assert not (live.state(name) / "last.safetensors").exists()
            told = {word for message in live.sent(name) for word in message.words}
            assert "choice" not in told
            assert "personalize" not in told
        assert {line["rows"] for line in live.ledger()} <= {"", "180"}
        assert "keeps" not in live.log()
