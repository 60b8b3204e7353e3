"""Ways around a client's limits, and ways in which one client could end a run for others: each is closed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_deploy import QUICK, SCORES, SUMS, Room, deployed, ledger, owners
from test_trust import SAFE, Bound, changed

from pfedme import __version__
from pfedme.algorithms import FedAvg, PFedMe
from pfedme.core.models import MLR
from pfedme.core.tree import to_vectors
from pfedme.deploy import gather
from pfedme.deploy.agreement import agree, to_words
from pfedme.deploy.answer import say
from pfedme.deploy.channel import never
from pfedme.deploy.client import REFUSED, Client
from pfedme.deploy.judge import scores_shape, unfit
from pfedme.deploy.messages import Content, Kind, Refusal, Reply, Words, sha256
from pfedme.deploy.pins import LOCK, Pins
from pfedme.deploy.plan import Plan, offered
from pfedme.deploy.policy import Policy
from pfedme.deploy.server import Server
from pfedme.deploy.work import news
from pfedme.errors import InputError

HALF = "\ud800"
"""Half a character: JSON can hold it, and no file."""
PLAN = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=2, min_clients=2)
OFFER = PLAN.offer()


# --- a malicious server


def offered_to(tmp_path: Path, approve: str = "ask") -> Client:
    """A client that has been started."""
    own = Room(owners(tmp_path, clients=1), tmp_path / "state").clients["east"]
    client = dataclasses.replace(own, policy=Policy(approve=approve))
    client.pins.begin()
    return client


def test_an_agreement_of_the_past_is_not_followed_without_approval(tmp_path: Path):
    bound = Bound(tmp_path)
    bound.train(0)
    bound.client.pins.begin()
    for approve, why in (("0" * 64, "its owner has approved the plan 0000"), ("ask", "has not approved")):
        other = dataclasses.replace(bound.client, policy=dataclasses.replace(SAFE, approve=approve))
        for work, t in ((other.train, 1), (other.finish, 4)):
            with pytest.raises(Refusal, match=why):
                work(Content({"agreement": bound.sha, "round": t}, to_vectors(bound.progress.server)))
    sha = sha256(bound.plan.offer())
    known = dataclasses.replace(bound.client, policy=dataclasses.replace(SAFE, approve=sha))
    assert known.train(
        Content({"agreement": bound.sha, "round": 1}, to_vectors(bound.progress.server))
    ).arrays


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"min_rows": 61}, "fewer training rows than its limit of 61"),
        ({"columns": ("age", "dose")}, "does not allow the column 'ward'"),
        ({"max_megabytes": 1e-5}, "the model has 12 parameters, above its limit"),
    ],
)
def test_a_limit_that_was_lowered_holds_for_an_agreement_of_the_past(
    limits: dict[str, Any], why: str, tmp_path: Path
):
    bound = Bound(tmp_path)
    strict = dataclasses.replace(bound.client, policy=dataclasses.replace(SAFE, **limits))
    with pytest.raises(Refusal) as refusal:
        strict.train(Content({"agreement": bound.sha, "round": 0}, to_vectors(bound.progress.server)))
    assert why in str(refusal.value)


def test_what_any_has_approved_the_owner_is_asked_about(tmp_path: Path):
    client = offered_to(tmp_path, "any")
    assert "numbers" in client.agree(Content({"plan": OFFER}, {})).words
    client.pins.begin()
    asking = dataclasses.replace(client, policy=Policy())
    assert asking.agree(Content({"plan": OFFER}, {})).words == {"pending": True}
    client.pins.approve(sha256(OFFER))
    client.pins.begin()  # what the owner has approved stays approved
    assert "numbers" in asking.agree(Content({"plan": OFFER}, {})).words


def test_only_the_plan_that_was_shown_is_approved(tmp_path: Path):
    client = offered_to(tmp_path)
    with pytest.raises(InputError, match="is not the one that was shown"):
        client.pins.approve(sha256(OFFER))
    client.agree(Content({"plan": OFFER}, {}))
    with pytest.raises(InputError, match="is not the one that was shown"):
        client.pins.approve("0" * 64)
    assert client.agree(Content({"plan": OFFER}, {})).words == {"pending": True}


def test_one_message_after_the_other_is_noted(tmp_path: Path):
    """Each message has a process of its own: two must not find the same round unanswered, or no plan."""
    bound = Bound(tmp_path)
    pins, w = bound.client.pins, to_vectors(bound.progress.server)["w"]
    plan = bound.plan.offer()
    for work in (
        lambda: pins.enter(bound.sha, 0, {"w": w}, train=True),
        lambda: pins.approved(plan, "any"),
        lambda: pins.bind(bound.progress.agreement.words(plan), "", {}),
        lambda: pins.approve(sha256(plan)),
        pins.end,
    ):
        thread = threading.Thread(target=work)
        with (pins.state / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
        thread.join(10)
        assert not thread.is_alive()


def test_rounds_that_come_at_once_are_answered_for_one_w(tmp_path: Path):
    bound = Bound(tmp_path)
    refused: list[str] = []

    def enter(k: int) -> None:
        try:
            Pins(bound.client.state).enter(
                bound.sha, 0, {"w": to_vectors(bound.progress.server)["w"] + np.float32(k)}, train=True
            )
        except Refusal as refusal:
            refused.append(str(refusal))

    threads = [threading.Thread(target=enter, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["it has answered round 1 for another w"] * 7


def test_a_round_counts_for_the_agreement_that_it_is_of(tmp_path: Path):
    bound = Bound(tmp_path)
    schema = bound.progress.agreement.schema.to_json()
    bound.join(schema=changed(schema, mean=schema["columns"][0]["mean"] + 0.1))
    with pytest.raises(Refusal, match="this is about another"):  # which a message in between has replaced
        bound.client.pins.enter(bound.sha, 0, to_vectors(bound.progress.server), train=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": "2"},
        {"rounds": True},
        {"seed": 10**400},
        {"deadline": 5.0},
        {"algorithm": {**OFFER["algorithm"], "eta": " \n\n0.05"}},
        {"algorithm": {**OFFER["algorithm"], "eta": 10**400}},
        {"algorithm": {**OFFER["algorithm"], "eta": float("inf")}},
        {"algorithm": {**OFFER["algorithm"], "R": "1_0"}},
        {"algorithm": {"name": "fedavg"}},
        {"algorithm": {**OFFER["algorithm"], "name": ["fedavg"]}},
        {"algorithm": [["name", "fedavg"]]},
        {"model": {**OFFER["model"], "l2": "nan"}},
    ],
)
def test_a_plan_is_written_as_the_owner_reads_it(changes: Words):
    assert offered(OFFER) == dataclasses.replace(PLAN)
    with pytest.raises(Refusal, match=r"the server's plan|does not know the algorithm"):
        offered({**OFFER, **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"near": 1e12}, "the agreed scaling of 'age' is impossible"),
        ({"near": 10**400}, "the agreed scaling of 'age' is impossible"),
        ({"scale": 10**400}, "the agreed scaling of 'age' is impossible"),
        ({"mean": float("nan")}, "the agreed scaling of 'age' is impossible"),
        ({"scale": True}, "the agreed scaling of 'age' is impossible"),
        ({"name": ["age"]}, "cannot be read"),
        ({"kind": {}}, "cannot be read"),
    ],
)
def test_numbers_of_an_agreement_must_be_possible(changes: Words, why: str, tmp_path: Path):
    bound = Bound(tmp_path)
    with pytest.raises(Refusal, match=why):
        bound.join(schema=changed(bound.progress.agreement.schema.to_json(), **changes))


@pytest.mark.parametrize("names", ["east", "xeasty", {"east": 1}, 7, None])
def test_names_are_a_list(names: object, tmp_path: Path):
    with pytest.raises(Refusal, match="cannot be read"):
        Bound(tmp_path).join(names=names)


def test_a_server_cannot_write_on_the_owners_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    client = offered_to(tmp_path)
    wild = f"\x1b[2J\r\n{HALF}\u202egone"
    client.refused(Content({"reason": wild}, {}))
    assert json.loads((client.state / REFUSED).read_text())["reason"].strip() == "[2J    gone"
    say(news({"outcome": "dropped", "round": wild, "reason": wild}))
    assert capsys.readouterr().out.isascii()
    say(wild)
    assert capsys.readouterr().out == "pfedme:  [2J    gone\n"


@pytest.mark.parametrize("told", [1, [], {}, {"outcome": "counted", "clipped": "x"}, {"outcome": []},
                                  {"outcome": "counted", "norm": 10**400, "clipped": 1.0},
                                  {"outcome": "counted", "norm": None, "clipped": [1]}])  # fmt: skip
def test_news_that_are_none_cost_no_round(told: object):
    assert isinstance(news(told), str)


# --- malicious clients


class Lying(Room):
    """A room with a client, north, that says other things."""

    def __init__(self, *args: Any, **said: Any) -> None:
        super().__init__(*args)
        self.said: dict[str, Reply | dict[str, Any]] = said

    def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
        replies = super().answers(kind, contents)
        if "north" in replies and kind in self.said:
            said, own = self.said[kind], replies["north"].content
            if isinstance(said, Reply):
                replies["north"] = said
            elif own:
                replies["north"] = Reply(Content({**own.words, **said}, own.arrays))
        return replies


def read(words: Any) -> Reply:
    """A client's words as the server reads them."""
    pytest.importorskip("flwr")
    from pfedme.deploy import app

    message: Any = SimpleNamespace(has_error=lambda: False, content=app.packed(Content(words, {})))
    return app.read_reply(message)


WILD = [HALF, "\x1b[2J\nRound 9: south failed", "x" * 10**6, ["x"] * 10**5, {"a": None}, 7, None]


@pytest.mark.parametrize("error", WILD)
def test_an_error_is_a_line(error: object):
    reply = read({"error": error})
    assert reply.content is None
    assert len(reply.error.encode()) <= 300
    assert reply.error.isprintable()


def test_half_a_character_does_not_end_the_run(tmp_path: Path):
    room = Lying(owners(tmp_path, clients=3), tmp_path / "state", train=read({"error": HALF}))
    out = deployed(tmp_path, dataclasses.replace(PLAN, min_clients=3), room)
    assert [line["outcome"] for line in ledger(out) if line["client"] == "north"] == ["failed"] * 2


@pytest.mark.parametrize(
    "said",
    [
        {"classes": ["no", HALF]},
        {"categories": {"ward": ["a", HALF]}},
        {"label": HALF},
        {"version": HALF},
        {"version": ["x"] * 10**5},
        {"numbers": {"age": [10**400, 0.0, 0.0]}},
        {"numbers": {"age": [5, 10**400, 0.0]}},
        {"numbers": {"age": [5, 0.0, -(10**400)]}},
        {"numbers": "age"},
        {"task": {}},
    ],
)
def test_who_tells_nonsense_is_left_out_of_the_agreement(said: Words, tmp_path: Path):
    room = Lying(owners(tmp_path, clients=3), tmp_path / "state", agree=said)
    out = deployed(tmp_path, dataclasses.replace(PLAN, rounds=1), room)
    assert json.loads((out / "record.json").read_text())["deployment"]["clients"] == ["east", "south"]
    assert "Refused north: " in (out / "server.log").read_text()


def test_texts_of_one_client_do_not_make_a_column_too_wide_for_all():
    from pfedme.data.fitting import Moments, Told

    def told(texts: list[str]) -> Words:
        one = Told("sick", "classification", False, {"age": Moments(9, 50.0, 4.0)},
                   {"town": tuple(texts)}, ("no", "yes"))  # fmt: skip
        return {"version": __version__, **json.loads(json.dumps(to_words(one)))}

    towns = [f"town {k}" for k in range(300)]
    said = {name: told(towns) for name in ("east", "south", "west")}
    found = agree({**said, "north": told([f"invented {k}" for k in range(900)])})
    assert found.names == ("east", "south", "west")
    assert "900" in found.refused["north"]
    many = {name: told([f"{name} {k}" for k in range(450)]) for name in ("a", "b", "c", "d")}
    with pytest.raises(InputError, match="too many to agree on"):
        agree(many)


@pytest.mark.parametrize(
    "said", [{"bound": "nonsense"}, {"bound": ["x"]}, {"bound": None, "pending": True}], ids=str
)
def test_who_is_never_bound_does_not_keep_the_others_waiting(
    said: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gather, "LOOK_S", 0.0)
    monkeypatch.setattr(gather, "ASK_AGAIN_S", 0.0)
    room = Lying(owners(tmp_path, clients=3), tmp_path / "state", join=said)
    lines: list[str] = []
    plan = dataclasses.replace(PLAN, join_timeout=20.0)
    assert Server(plan, room, lines.append).begin().agreement.names == ("east", "south")
    assert any(line.startswith("Refused north: it did not accept the agreement") for line in lines)


SQUARES = {"loss": 1.0, "rows": 10, "spread": 1.0, "mean": 0.0}


@pytest.mark.parametrize(
    "scores",
    [
        SCORES | {"info": {"inner_residual": 1.0}},
        SCORES | {"info": {HALF: 1.0}},
        SCORES | {"info": {"inner_residual": 1e308, "inner_steps": 1e308}},
        SCORES | {"test": {}, "train": {}},
        SCORES | {"test": {}},
        SCORES | {"train": {"personal": SUMS}},
        SCORES | {"test": {"global": SQUARES}},
        SCORES | {"test": {"global": SQUARES}, "train": {"global": SQUARES}},
        SCORES | {"test": {"global": SUMS | {"spread": 1e308}}},
    ],
)
def test_scores_of_a_client_do_not_end_the_run(scores: Words, tmp_path: Path):
    room = Room(owners(tmp_path, clients=2), tmp_path / "state", share=False)
    room.scores["north"] = scores
    out = deployed(tmp_path, Plan(algorithm=PFedMe(**QUICK), model=MLR(), rounds=1, min_clients=2), room)
    assert json.loads((out / "record.json").read_text())["status"] == "finished"
    assert "north shares impossible scores" in (out / "server.log").read_text()
    assert not scores_shape(scores, "classification")


def test_a_reason_is_short_whatever_was_uploaded():
    w = np.zeros(3, np.float32)
    wide = np.zeros(1, np.dtype([(f"field {k}", "f4") for k in range(500)]))
    assert len(unfit(Content({}, {"w": wide}), {"w": w}, weighted=False)) < 200
    assert len(unfit(Content({}, {"w": w.reshape((1,) * 30 + (3,))}), {"w": w}, weighted=False)) < 200


def test_a_name_that_is_claimed_is_a_short_line():
    pytest.importorskip("flwr")
    from pfedme.deploy import app

    trusting = app.FlowerChannel(None, {1: "north"})  # type: ignore[arg-type]
    for name in WILD[:-1]:
        error = trusting._checked(1, Reply(Content({"name": name}, {}))).error
        assert error.isprintable()
        assert "its key is that of 'north'" in error
        assert len(error) < 200


def test_a_name_without_a_key_must_be_one_that_the_others_accept(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("flwr")
    from pfedme.deploy import app

    names = ["north", HALF, "x" * 201, "", "a\nb", "\x1b[2J"]
    grid: Any = SimpleNamespace(get_node_ids=lambda: range(len(names)))
    channel = app.FlowerChannel(grid, None)
    asked: list[int] = []

    def exchange(kind: str, contents: Mapping[int, Content], deadline: float) -> dict[int, Reply]:
        asked.extend(contents)
        return {node: Reply(Content({"name": names[node]}, {})) for node in contents}

    monkeypatch.setattr(channel, "_exchange", exchange)
    assert channel.present() == channel.present() == ["north"]
    assert asked == list(range(len(names)))


def test_a_client_that_was_turned_away_and_is_silent_delays_nobody(tmp_path: Path):
    waited: list[float] = []

    class Silent(Room):
        """A room whose clients do not answer that they have heard a refusal."""

        def ask(self, kind: Kind, contents: Any, deadline: float, enough: Any = never) -> Any:
            if kind != "refuse":
                return super().ask(kind, contents, deadline, enough)
            seconds = 0.0
            while seconds < deadline and not enough(set(contents), seconds):
                seconds += 1.0
            waited.append(seconds)
            return {}

    room = Silent(owners(tmp_path, clients=2), tmp_path / "state")
    gather.Gathering(PLAN, room, print).refuse({"north": "it came late"})
    assert waited[0] <= 15
