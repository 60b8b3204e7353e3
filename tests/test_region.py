"""A tree of servers without a network between them: it has the models of a federation with one server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
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
from pfedme.deploy.messages import Content, Kind, Reply
from pfedme.deploy.plan import Plan
from pfedme.deploy.progress import Stopped
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.region import Region
from pfedme.deploy.server import Server
from pfedme.errors import InputError
from pfedme.privacy.units import Clients

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

    def __init__(self, tables: Path, state: Path, names: Sequence[str]) -> None:
        super().__init__(tables, state)
        self.clients = {name: self.clients[name] for name in names}
        for client in self.clients.values():
            client.pins.begin()


class Regions(Channel):
    """Regions, and perhaps clients of the upper server itself, in the same room as that."""

    def __init__(self, regions: Mapping[str, Region], room: Some | None = None) -> None:
        self.regions, self.room = dict(regions), room
        self.gone: set[str] = set()
        self.sent: list[tuple[str, str, Content]] = []
        self.clients = {} if room is None else room.clients

    def present(self) -> list[str]:
        return [name for name in (*self.regions, *self.clients) if name not in self.gone]

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        replies = {}
        own = {name: content for name, content in contents.items() if name in self.clients}
        if self.room is not None and own:
            replies |= self.room.ask(kind, own, deadline, enough)
        for name in contents.keys() - own.keys():
            asked = Content(json.loads(json.dumps(contents[name].words)), contents[name].arrays)
            answer = self.regions[name].reply(kind, asked)
            told = Content(json.loads(json.dumps(answer.words)), answer.arrays)
            self.sent.append((kind, name, told))
            error = told.words.get("error")
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
    fields: dict[str, Any] = {"rounds": 2, "seed": 5, "clip": 0.0, "min_clients": least, **more}
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
        pytest.param(Ditto(**QUICK), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name,
)
def test_a_tree_has_the_model_of_one_server_also_if_a_client_is_late(
    algorithm: Algorithm, aggregation: Aggregation, tables: Path, tmp_path: Path
):
    algorithm = dataclasses.replace(algorithm, aggregation=aggregation)
    flat = Some(tables, tmp_path / "flat", ALL)
    once_late(flat, "dora")
    # A client that was late must be waited for, or flat and tree would not have the same rounds.
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
