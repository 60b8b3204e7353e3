"""A tree of servers without a network between them: it has the models of a federation with one server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from live import LABEL
from test_deploy import QUICK, Room, ledger, w_of

from pfedme.algorithms import IFCA, Ditto, FedAvg, FedAvgM, PFedMe
from pfedme.algorithms.aggregate import RFA, FedPAQ
from pfedme.algorithms.base import Aggregation, Algorithm
from pfedme.core.models import MLR
from pfedme.data.fitting import Moments
from pfedme.deploy.agreement import _pooled, agree, fitting
from pfedme.deploy.channel import Channel, Enough, never
from pfedme.deploy.judge import unfit
from pfedme.deploy.messages import Content, Kind, Reply
from pfedme.deploy.plan import Plan
from pfedme.deploy.progress import Stopped
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.region import Region
from pfedme.deploy.server import Server
from pfedme.errors import InputError
from pfedme.export import load
from pfedme.privacy.units import Clients, Rows

EAST, WEST = ("anna", "berta"), ("carl", "dora", "emil", "süd")
ALL = EAST + WEST


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each client; some have more rows than others."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(3)
    for k, name in enumerate(ALL):
        n = 80 if k % 2 else 120
        age, ward = rng.normal(50 + 5 * k, 10, n), rng.choice(["a", "b", "c"][: 2 + k % 2], n)
        risk = (age - 55) / 10 + (ward == "a") + rng.normal(size=n)
        frame = {"age": age, "ward": ward, LABEL: np.where(risk > 0, "yes", "no")}
        pl.DataFrame(frame).write_csv(folder / f"{name}.csv")
    return folder


class Some(Room):
    """Some of the clients in the same room as their server."""

    def __init__(self, tables: Path, state: Path, names: Sequence[str], *, share: bool = True) -> None:
        super().__init__(tables, state, share=share)
        self.clients = {name: self.clients[name] for name in names}
        for client in self.clients.values():
            client.pins.begin()


class Regions(Channel):
    """Regions, and perhaps clients of the upper server itself, in the same room as that."""

    def __init__(self, regions: Mapping[str, Region], room: Some | None = None) -> None:
        self.regions, self.room = dict(regions), room
        self.gone: set[str] = set()
        self.lost: set[tuple[str, int]] = set()
        """Regions whose replies to a round are lost."""
        self.between: Callable[[], object] = lambda: None
        """What happens before each round."""
        self.clients = {} if room is None else room.clients

    def present(self) -> list[str]:
        return [name for name in (*self.regions, *self.clients) if name not in self.gone]

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        replies = {}
        if kind == "train":
            self.between()
        own = {name: content for name, content in contents.items() if name in self.clients}
        if self.room is not None and own:
            replies |= self.room.ask(kind, own, deadline, enough)
        for name in contents.keys() - own.keys():
            asked = Content(json.loads(json.dumps(contents[name].words)), contents[name].arrays)
            answer = self.regions[name].reply(kind, asked)
            told = Content(json.loads(json.dumps(answer.words)), answer.arrays)
            error = told.words.get("error")
            if kind != "train" or (name, asked.words["round"]) not in self.lost:
                replies[name] = Reply(None, error) if error else Reply(told)
        return replies


def region(name: str, channel: Channel, folder: Path, least: int, **own: Any) -> Region:
    """A region with its own folder."""
    out = folder / name
    out.mkdir(exist_ok=True)
    return Region(name, channel, out, {"min_clients": least, "clip": 0.0, "min_replies": 1, **own})


def carried_out(plan: Plan, channel: Channel, out: Path, *, resume: bool = False) -> Path:
    """The folder of a run of the plan with the clients at the other end of a channel."""
    out.mkdir(exist_ok=True)
    record = DeploymentRecord(plan, out, "pfedme server")
    carry_out(Server(plan, channel, record.tell), record, resume=resume)
    return out


def plan_for(algorithm: Algorithm, least: int, **more: Any) -> Plan:
    fields: dict[str, Any] = {
        "rounds": 2,
        "seed": 5,
        "clip": 0.0,
        "min_clients": least,
        "join_timeout": 9.0,
        **more,
    }
    return Plan(algorithm=algorithm, model=MLR(), **fields)


def same(one: Path, other: Path) -> None:
    """Two runs have the same w, up to rounding."""
    w = w_of(other)
    np.testing.assert_allclose(w_of(one), w, rtol=1e-5, atol=1e-6 * np.abs(w).max())


def two(tables: Path, folder: Path) -> tuple[Regions, dict[str, Some]]:
    """Two regions with two and four clients."""
    (folder / "tree").mkdir()
    rooms = {name: Some(tables, folder / "tree/state", own) for name, own in (("e", EAST), ("w", WEST))}
    own = {name: region(name, room, folder / "tree", len(room.clients)) for name, room in rooms.items()}
    return Regions(own), rooms


def once_late(room: Room, name: str) -> None:
    """Has a client miss the first round."""
    times = iter([None])
    room.tricks[name] = lambda content: next(times, content)


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(**QUICK),
        PFedMe(lam=5.0, K=3, alpha=0.01, **QUICK),
        pytest.param(FedAvgM(**QUICK), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name,
)
def test_a_tree_has_the_model_of_one_server_also_if_a_client_is_late(
    algorithm: Algorithm, aggregation: Aggregation, tables: Path, tmp_path: Path
):
    algorithm = dataclasses.replace(algorithm, aggregation=aggregation)
    flat = Some(tables, tmp_path / "flat", ALL)
    once_late(flat, "dora")
    one = carried_out(plan_for(algorithm, 6), flat, tmp_path / "one")
    regions, rooms = two(tables, tmp_path)
    once_late(rooms["w"], "dora")
    tree = carried_out(plan_for(algorithm, 2, regions=("e", "w")), regions, tmp_path / "upper")
    same(tree, one)
    lines = [line for line in ledger(tree) if line["client"] == "w"]
    assert [line["reason"] for line in lines] == ["for 3 of its 4 clients", ""]
    late = [line for line in ledger(tmp_path / "tree/w") if line["client"] == "dora"]
    assert [line["outcome"] for line in late] == ["late", "counted"]
    assert {line["client"] for line in ledger(tree)} == {"e", "w"}


def test_personal_models_and_scores_are_those_of_one_server(tables: Path, tmp_path: Path):
    """Ditto's clients keep something between rounds, which has to agree with what has counted."""
    algorithm = Ditto(**QUICK)
    flat = Some(tables, tmp_path / "flat", ALL)
    regions, rooms = two(tables, tmp_path)
    for room in (flat, rooms["w"]):
        once_late(room, "dora")
    lost = dict.fromkeys(EAST, True)
    for name in EAST:  # of the flat run: their first replies are lost
        flat.tricks[name] = lambda content, name=name: None if lost.pop(name, False) else content
    regions.lost.add(("e", 0))  # of the tree: so is their region's
    one = carried_out(plan_for(algorithm, 6, rounds=3, min_replies=3), flat, tmp_path / "one")
    tree = carried_out(
        plan_for(algorithm, 2, rounds=3, regions=("e", "w"), min_replies=1), regions, tmp_path / "upper"
    )
    same(tree, one)
    for name in ALL:
        models = (load(tmp_path / place / name / "model") for place in ("flat", "tree/state"))
        theta, wanted = (np.asarray(model.theta.ravel()) for model in models)
        np.testing.assert_allclose(theta, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    lines = [line for line in ledger(tmp_path / "tree/e") if line["round"] == "1"]
    assert [(line["outcome"], line["reason"]) for line in lines] == [
        ("failed", "the upper server did not count the region")
    ] * 2
    own, wanted = (json.loads((out / "record.json").read_text())["final"] for out in (tree, one))
    for kind in ("global", "personal"):
        for key in ("accuracy", "loss", "train_loss"):
            assert own[kind][key] == pytest.approx(wanted[kind][key], rel=1e-4)


def test_a_region_with_one_client_is_that_client(tables: Path, tmp_path: Path):
    """Bit by bit; another client is at the upper server itself."""
    algorithm = PFedMe(lam=5.0, K=3, alpha=0.01, **QUICK)
    plan = plan_for(algorithm, 3, clip=1.0)
    one = carried_out(plan, Some(tables, tmp_path / "flat", ALL[:3]), tmp_path / "one")
    (tmp_path / "tree").mkdir()
    state = tmp_path / "tree/state"
    own = {n: region(n, Some(tables, state, [n]), tmp_path / "tree", 1) for n in EAST}
    tree = Regions(own, Some(tables, state, ALL[2:3]))
    found = carried_out(dataclasses.replace(plan, regions=EAST), tree, tmp_path / "upper")
    np.testing.assert_array_equal(w_of(found), w_of(one))
    norms = [
        [(line["client"], line["norm"], line["clipped"]) for line in ledger(out)] for out in (found, one)
    ]
    assert norms[0] == norms[1]


def test_regions_may_have_regions(tables: Path, tmp_path: Path):
    algorithm = FedAvg(**QUICK)
    one = carried_out(plan_for(algorithm, 6), Some(tables, tmp_path / "flat", ALL), tmp_path / "one")
    place = tmp_path / "tree"
    place.mkdir()
    deep = region("deep", Some(tables, place, WEST[:2]), place, 2)
    middle = Regions({"deep": deep}, Some(tables, place, WEST[2:]))
    west = region("w", middle, place, 3, regions=("deep",))
    tree = Regions({"w": west}, Some(tables, place, EAST))
    found = carried_out(plan_for(algorithm, 3, regions=("w",)), tree, tmp_path / "upper")
    same(found, one)
    bound = {sha_of(file) for file in place.glob("*/agreement.json")}
    assert len(bound) == 1, "all are bound by the same agreement"


def sha_of(agreement: Path) -> str:
    """The hash of the agreement by which a client is bound."""
    return json.loads(agreement.read_text())["sha256"]


def test_what_a_region_tells_is_what_one_client_with_all_rows_would(tables: Path, tmp_path: Path):
    room, offer = Some(tables, tmp_path, ALL), plan_for(FedAvg(**QUICK), 1).offer()
    said = {name: client.agree(Content({"plan": offer}, {})).words for name, client in room.clients.items()}
    parts = {name: fitting({own: said[own] for own in names}).region() for name, names in
             (("e", EAST), ("w", WEST))}  # fmt: skip
    tree, flat = agree(parts, ("e", "w")), agree(said)
    assert tree.names == flat.names == ALL
    assert tree.members == {"e": EAST, "w": WEST}
    assert tree.schema.labels == flat.schema.labels
    for one, other in zip(tree.schema.columns, flat.schema.columns, strict=True):
        assert (one.name, one.kind, one.categories) == (other.name, other.kind, other.categories)
        assert (one.mean, one.scale) == pytest.approx((other.mean, other.scale), rel=1e-12)
    whole = pl.concat([pl.read_csv(tables / f"{name}.csv") for name in EAST])["age"].to_numpy()
    halves = [pl.read_csv(tables / f"{name}.csv")["age"].to_numpy() for name in EAST]
    assert _pooled([Moments.of(half) for half in halves]) == pytest.approx(Moments.of(whole))


REFUSED = [
    (IFCA(**QUICK), {}, "the server of ifca needs what each of them sends"),
    (FedAvg(**QUICK, combine=RFA()), {}, "--combine rfa needs what each of them sends"),
    (FedAvg(**QUICK, codec=FedPAQ()), {}, "--codec fedpaq needs what each of them sends"),
    (
        FedAvg(**QUICK, aggregation="uniform"),
        {"privacy": Clients(epsilon=8.0, delta=1e-4)},
        "with --dp clients the server has to draw each client",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "more", "why"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_needs_single_uploads_is_refused_at_both_ends(
    algorithm: Algorithm, more: dict[str, Any], why: str, tables: Path, tmp_path: Path
):
    with pytest.raises(InputError, match=why):
        plan_for(algorithm, 4, regions=("e",), **more).checked()
    own = region("e", Some(tables, tmp_path, EAST), tmp_path, 2)
    offer = plan_for(algorithm, 4, **more).offer()
    assert why in own.reply("agree", Content({"plan": offer, "deadline": 60.0}, {})).words["error"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "it is a region, which the server does not expect"),
        ({"clients": {}}, "what it says about its clients is impossible"),
        ({"clients": {"x": "rumours"}}, "what it says about its clients is impossible"),
        ({"clients": ["x"]}, "what it says about its clients is impossible"),
        ({"clients": {"carl": "schema file"}}, "it has a client 'carl', but another client has that name"),
    ],
)
def test_nobody_claims_clients_that_it_cannot_have(
    said: dict[str, Any], why: str, tables: Path, tmp_path: Path
):
    room, offer = Some(tables, tmp_path, ("carl", "emil")), plan_for(FedAvg(**QUICK), 1).offer()
    words = {name: client.agree(Content({"plan": offer}, {})).words for name, client in room.clients.items()}
    words["emil"] |= said or {"clients": {"x": "schema file"}}
    assert why in agree(words, ("emil",) if said else ()).refused["emil"]


@pytest.mark.parametrize("clients", [0, 3, 2**40, "2", True, None])
def test_a_region_weighs_no_more_than_its_clients(clients: Any):
    w = np.zeros(3, np.float32)
    assert unfit(Content({"clients": clients}, {"w": w}), {"w": w}, weighted=False, most=2)
    assert not unfit(Content({"clients": 2}, {"w": w}), {"w": w}, weighted=False, most=2)
    assert unfit(Content({"clients": 2}, {"w": w}), {"w": w}, weighted=False), "a client stands for itself"


def test_clients_check_what_a_region_passes_on(tables: Path, tmp_path: Path):
    """A region can no more than a server: it is refused what the upper server has not agreed on."""
    regions, rooms = two(tables, tmp_path)
    plan = plan_for(FedAvg(**QUICK), 2, regions=("e", "w"))
    server = Server(plan, regions, print)
    progress = server.begin()
    sha = progress.agreement.sha256(plan.offer())
    for room in rooms.values():
        for client in room.clients.values():
            assert client.pins.bound(sha)["agreement"] == progress.agreement.words(plan.offer())
    asked = Content(server.words(progress, "e"), server.sent(progress, "e"))
    first = regions.regions["e"].reply("train", asked)
    assert first.words == {"name": "e", "clients": 2, "rows": 150}
    other = Content(asked.words, {"w": asked.arrays["w"] + 1})
    assert "0 of its 2 clients replied" in regions.regions["e"].reply("train", other).words["error"]
    regions.regions["e"].reply("train", asked)
    reasons = {line["reason"] for line in ledger(tmp_path / "tree/e") if line["attempt"] == "2"}
    assert reasons == {"it has answered round 1 for another w"}


def test_a_region_that_was_lost_and_comes_back_continues(tables: Path, tmp_path: Path):
    algorithm, plan = Ditto(**QUICK), {"rounds": 3, "regions": ("e", "w"), "min_replies": 2}
    (tmp_path / "a").mkdir()
    undisturbed, _ = two(tables, tmp_path / "a")
    one = carried_out(plan_for(algorithm, 2, **plan), undisturbed, tmp_path / "one")
    regions, rooms = two(tables, tmp_path)

    def restarted() -> None:
        regions.regions["w"] = region("w", rooms["w"], tmp_path / "tree", 4)

    regions.between = restarted
    found = carried_out(plan_for(algorithm, 2, **plan), regions, tmp_path / "upper")
    np.testing.assert_array_equal(w_of(found), w_of(one))


def test_the_noise_of_clients_passes_through(tables: Path, tmp_path: Path):
    """With differential privacy of rows, no two runs are equal; w is the mean of what clients have sent."""
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    room = Some(tables, tmp_path / "state", EAST, share=False)
    (tmp_path / "tree").mkdir()
    regions = Regions({"e": region("e", room, tmp_path / "tree", 2)})
    private = Rows(epsilon=3.0, delta=1e-5)
    plan = plan_for(FedAvg(**QUICK, aggregation="uniform"), 1, rounds=1, regions=("e",), privacy=private)
    server = Server(plan, regions, print)
    progress = server.begin()
    after = server.round(progress)
    sent = [content.arrays["w"].astype(float) for kind, _, content in room.sent if kind == "train"]
    assert len(sent) == len(EAST)
    step = np.asarray(after.server.ravel(), float) - np.asarray(progress.server.ravel(), float)
    np.testing.assert_allclose(step, np.mean(sent, axis=0), rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_without_a_lost_region_if_that_is_enough(tables: Path, tmp_path: Path):
    regions, _ = two(tables, tmp_path)
    plan = plan_for(FedAvg(**QUICK), 2, regions=("e", "w"), deadline=0.2)
    server = Server(plan, regions, print)
    progress = server.begin()
    regions.gone = {"w"}
    after = server.round(progress)
    assert {part.client: part.outcome for part in after.ledger} == {"e": "counted", "w": "absent"}
    with pytest.raises(Stopped, match="too few good replies"):
        Server(dataclasses.replace(plan, min_replies=2), regions, print).round(progress)


def test_a_failed_run_ends_at_the_clients(tables: Path, tmp_path: Path):
    regions, rooms = two(tables, tmp_path)
    Server(plan_for(FedAvg(**QUICK), 2, regions=("e", "w")), regions, print).begin()
    regions.ask("refuse", dict.fromkeys("ew", Content({"reason": "it diverged", "over": True}, {})), 1.0)
    for room in rooms.values():
        for client in room.clients.values():
            told = json.loads((client.state / "refused.json").read_text())
            assert told == {"reason": "the upper server says: it diverged", "over": True}
