"""A real federation in its short form: processes on loopback, TLS and keys, and a look at what is sent."""

from __future__ import annotations

import json
import re
import struct
import sys

import numpy as np
import polars as pl
import pytest

pytest.importorskip("flwr", reason="pfedme[flower] is not installed")
if sys.platform != "linux":
    pytest.skip("processes are found by /proc, which Linux has", allow_module_level=True)

from live import LABEL, Live, federation

from pfedme.algorithms import PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.deploy.messages import sha256
from pfedme.deploy.plan import Plan
from pfedme.export import load, model_of

NAMES = ("east", "süd-west")
SHARING = ("east",)
ROUNDS = 2
ALGORITHM = PFedMe(lam=5.0, eta=0.05, alpha=0.05, R=10, B=16, K=3, aggregation="samples")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory):
    """A federation of two clients after its run."""
    with federation(tmp_path_factory.mktemp("live"), NAMES) as live:
        live.server(
            ALGORITHM, "--rounds", str(ROUNDS), "--min-clients", "2", "--min-replies", "2", "--clip", "0"
        )
        plan = Plan(algorithm=ALGORITHM, model=MLR(), rounds=ROUNDS, seed=5)
        live.client("east", "--share-metrics", approve="ask", typed="yes\n")
        live.client("süd-west", approve=sha256(plan.offer()))
        live.finished(240)
        yield live


def test_the_models_are_those_of_a_simulation(live: Live):
    differences = live.against_simulation(ALGORITHM, ROUNDS)
    assert set(differences) == {"w", *NAMES}
    assert max(differences.values()) < 1e-5, differences


def test_owners_see_the_plan_what_leaves_each_round_and_how_good_their_models_are(live: Live):
    sha = sha256(Plan(algorithm=ALGORITHM, model=MLR(), rounds=ROUNDS, seed=5).offer())
    agreed = re.search(r"The agreement's SHA-256 is (\w{64})\.", live.log())
    assert agreed
    assert f"The plan's SHA-256 is {sha};" in live.said("server")
    for name in NAMES:
        said = live.said(name)
        lines = [
            "numbers 'age': 180 values, mean ", f"SHA-256    {sha}",
            f"Bound by the agreement of {', '.join(NAMES)}; its SHA-256 is {agreed[1]}.",
            "Round 1: trained; the update leaves this machine.",
            "Round 2: trained; the update leaves this machine.",
            "On its own test rows: shared model ",
        ]  # fmt: skip
        places = [said.index(line) for line in lines]
        assert places == sorted(places)
        assert "Round 3" not in said
        scores = json.loads((live.state(name) / "scores.json").read_text())
        assert f"personal model {100 * scores['personal']['accuracy']:.1f} % right" in said
    assert "Round 1 of 2 is done" in live.log()
    assert "let what is listed above leave this machine? [yes/no]" in live.said("east")
    assert "[yes/no]" not in live.said("süd-west")


def test_the_run_folder_is_complete(live: Live):
    record = live.record()
    assert (record["status"], record["deployment"]["clients"]) == ("finished", list(NAMES))
    parts = [(line["round"], line["client"], line["outcome"], line["rows"]) for line in live.ledger()]
    assert sorted(parts) == [(str(t), name, "counted", "180") for t in range(1, ROUNDS + 1) for name in NAMES]
    assert (live.out / "report.html").stat().st_size > 1000
    assert (live.out / "clients.csv").read_text().count("\n") == 1 + len(SHARING)


def test_each_client_predicts_by_its_own_model(live: Live):
    for name in NAMES:
        model = live.state(name) / "model"
        assert load(model).origin == {"client": name, "which": "personal", "round": ROUNDS}
        out = live.folder / f"{name}-predictions.csv"
        words = ["predict", str(model), "--data", str(live.tables / f"{name}.csv"), "-o", str(out)]
        assert main(words) == 0
        assert pl.read_csv(out).height == pl.read_csv(live.tables / f"{name}.csv").height


MODEL_KINDS = {"global", "local", "personal"}


def test_nothing_but_what_is_listed_leaves_a_client(live: Live):
    w = np.asarray(model_of(live.out).theta.ravel())
    for name in NAMES:
        waiting = ("query.agree", {"name": name, "pending": True})
        sent = [message for message in live.sent(name) if (message.kind, message.words) != waiting]
        assert (len(sent) < len(live.sent(name))) == (name == "east"), "only east's owner is asked"
        assert [message.kind for message in sent] == [
            "query.agree",
            "query.join",
            *["train"] * ROUNDS,
            "evaluate",
        ]
        agreed, bound, *trained, finished = sent
        assert (set(bound.words), bound.arrays) == ({"name", "bound"}, {})
        assert set(agreed.words) == {
            "name", "version", "label", "task", "impute", "numbers", "categories", "classes", "quantity",
            "most_classes",
        }  # fmt: skip
        assert {column: len(told) for column, told in agreed.words["numbers"].items()} == {
            "age": 3,
            "dose": 3,
        }
        assert set(agreed.words["categories"]) == {"ward"}
        assert (agreed.words["classes"], agreed.arrays) == (["no", "yes"], {})
        for message in trained:
            assert message.words == {"name": name, "rows": 180}
            assert {key: (a.shape, a.dtype) for key, a in message.arrays.items()} == {"w": (w.shape, w.dtype)}
        assert finished.arrays == {}
        assert set(finished.words) == ({"name", "scores"} if name in SHARING else {"name"})
        if name in SHARING:
            scores = finished.words["scores"]
            assert set(scores) == {"n_train", "n_test", "info", "test", "train"}
            assert set(scores["test"]) <= MODEL_KINDS
            assert all(set(sums) == {"loss", "rows", "right"} for sums in scores["test"].values())


CARRIERS = ("push-object", "push-messages")
OTHERS = (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "pull-object", "get-run",
    "get-fab", "confirm-message-received",
)  # fmt: skip
"""What a SuperNode says to a server besides its messages: who it is, and what it wants to get."""


def test_no_row_and_no_personal_model_is_in_any_request(live: Live):
    for name in NAMES:
        requests = live.requests(name)
        for url, body in requests:
            server, _, what = url.partition("/v1/fleet/")
            assert (server, what in CARRIERS + OTHERS) == (f"https://127.0.0.1:{live.port}", True), url
            assert what in CARRIERS or len(body) < 400, (what, len(body))
        everything = b"\n".join(body for _, body in requests)
        rows = pl.read_csv(live.tables / f"{name}.csv")
        for value in [*rows["age"], *rows["dose"]]:
            for form in (repr(value).encode(), struct.pack("<d", value)):
                assert form not in everything, value
        theta = np.asarray(load(live.state(name) / "model").theta.ravel())
        assert theta.tobytes() not in everything
        assert LABEL.encode() in everything  # so that the search would find something
