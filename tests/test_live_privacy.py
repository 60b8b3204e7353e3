"""Four sites in real processes, each with an ε of its own; one runs out in the middle: `make test-live`."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from live import federation

from pfedme.algorithms import PFedMe
from pfedme.cli import main
from pfedme.deploy.audit_log import LOG, AuditLog, check_log
from pfedme.deploy.budget import Budget, Cost, report
from pfedme.deploy.messages import Content, digest
from pfedme.deploy.policy import Policy
from pfedme.export import model_of
from pfedme.privacy.accounting import Event

pytestmark = pytest.mark.slow

ROUNDS, DELTA = 4, 1e-4
LIMITS = {"east": 1.0, "north": 2.0, "south": 8.0, "west": 3.0}
TOLD = """
epsilon = 0.5
classes = ["no", "yes"]
numbers.age = {lowest = 0, highest = 120}
numbers.dose = {mean = 1e6, deviation = 5}
categories.ward = ["a", "b", "c"]
"""
AGREED = {
    "name", "version", "label", "task", "impute", "numbers", "categories", "classes", "quantity",
    "most_classes",
}  # fmt: skip
ALGORITHM = PFedMe(lam=5.0, eta=0.05, alpha=0.05, R=10, B=16, K=3)


def spend_before(state: Path, epsilon: float, limit: float) -> None:
    """Puts the replies of an earlier run into a client's log, until they cost ε."""
    log = AuditLog(state)
    policy = Policy(dp="rows", max_epsilon=limit, max_delta=DELTA)
    for t in range(100):
        budget = Budget.of(log.read())
        if budget.epsilon(DELTA) >= epsilon:
            return
        cost = Cost("an earlier run..", Event(0.09, 2.0, 10), DELTA, limit)
        log.append("spent", kind="train", round=t + 1, sha256="0" * 64, **budget.charge(cost, policy))
    raise AssertionError


def test_four_sites_with_an_epsilon_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    began = time.monotonic()
    with federation(tmp_path / "live", tuple(LIMITS)) as live:
        spend_before(live.state("west"), 2.0, LIMITS["west"])
        live.server(
            ALGORITHM, "--rounds", str(ROUNDS), "--min-clients", "4", "--cohort", "4", "--min-replies", "3",
            "--dp", "rows", "--epsilon", "5", "--delta", str(DELTA),
        )  # fmt: skip
        (tmp_path / "told.toml").write_text(TOLD)
        for name, limit in LIMITS.items():
            schema = ["--schema", str(tmp_path / "told.toml")] if name == "south" else []
            live.client(name, "--dp", "rows", "--max-epsilon", str(limit), "--max-delta", str(DELTA), *schema)
        assert live.wait("server", 400) == 0, live.said("server")
        status = {name: live.wait(name, 60) for name in LIMITS}
    assert status == {"east": 0, "north": 0, "south": 0, "west": 1}, live.said("west")

    # West runs out, and says why at both ends.
    parts = [(line["outcome"], line["reason"]) for line in live.ledger() if line["client"] == "west"]
    done = [outcome for outcome, _ in parts].count("counted")
    assert 0 < done < ROUNDS
    assert parts[done][0] == "failed"
    why = r"its budget is spent: this would bring epsilon over all its runs to [\d.]+, above its limit of 3"
    assert re.match(why, parts[done][1])
    assert re.search(rf"Round {done + 1}: west failed \({why}", live.log())
    assert re.search(rf"This client has left the run: {why}", live.said("west"))
    assert re.search(rf"What is left lasts for {done} of {ROUNDS} rounds", live.said("west"))
    counted = {line["client"] for line in live.ledger() if line["outcome"] == "counted"}
    assert counted == set(LIMITS)

    noise = {}
    size = np.asarray(model_of(live.out).theta.ravel()).shape
    for name, limit in LIMITS.items():
        # What was spent is within each site's own limit, and smaller limits have more noise.
        found = report(live.state(name))
        assert (found["max_epsilon"], found["epsilon"] <= limit) == (limit, True)
        assert found["runs"][-1]["rounds"] == (done if name == "west" else ROUNDS)
        assert len(found["runs"]) == (2 if name in ("south", "west") else 1)
        assert found["runs"][-1]["epsilon"] <= min(limit, 5.0)
        noise[name] = found["runs"][-1]["noise"]

        # Nothing left but what the documentation lists, and each message has its line.
        chain = check_log(live.state(name))
        logged = [
            (line["bytes"], line["sha256"]) for line in chain.lines if line["what"] in ("sent", "refused")
        ]
        for message in live.sent(name):
            arrays = {key: (a.shape, a.dtype) for key, a in message.arrays.items()}
            assert digest(Content(message.words, message.arrays)) in logged
            match message.kind:
                case "train" if "error" not in message.words:
                    assert (message.words, arrays) == ({"name": name}, {"w": (size, np.float32)})
                case "train" | "evaluate":
                    assert set(message.words) <= {"name", "error"}
                    assert arrays == {}
                case "query.agree" if "pending" not in message.words:
                    assert arrays == {}
                    assert set(message.words) == (AGREED | {"source"} if name == "south" else AGREED)
                case kind:
                    assert arrays == {}
                    own = {"query.agree": {"pending"}, "query.join": {"bound", "pending"}}.get(kind, set())
                    assert set(message.words) <= {"name"} | own
        texts = [json.dumps(message.words) for message in live.sent(name)]
        assert not any('"rows"' in text or '"scores"' in text for text in texts)

        # The owner can check the log, and finds a changed byte.
        state = live.state(name)
        assert f"its head is {chain.head}." in live.said(name)
        assert main(["log", "verify", str(state), "--head", chain.head]) == 0
        raw = (state / LOG).read_bytes()
        place = len(raw) // 2
        (state / LOG).write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert main(["log", "verify", str(state)]) == 1
        number = raw.count(b"\n", 0, place) + 1
        assert f"{state}: line {number} " in capsys.readouterr().out
        live_again = [
            "client",
            "--server",
            f"127.0.0.1:{live.port}",
            "--data",
            str(live.tables / f"{name}.csv"),
        ]
        live_again += ["--label", "sick", "--state", str(state), "--keys", str(live.own(name))]
        assert main(live_again) == 2
        assert "its log audit.jsonl was changed" in capsys.readouterr().err
    assert noise["east"] > noise["north"] > noise["west"] > noise["south"]
    spent = ", ".join(f"{name} {report_line}" for name, report_line in noise.items())
    print(f"\nfour sites: {time.monotonic() - began:.0f} s; west left after {done} rounds; noise {spent}")
