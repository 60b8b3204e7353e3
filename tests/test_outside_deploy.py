"""Relatives, and algorithms of another package, in a deployed federation: what the server and each client
keep is what a simulation has, whatever becomes of uploads, of the server and of clients."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import INSTALLED, installed
from laws import PAPERS, assert_close, there
from outside import OUTSIDE, Control, Head, Momentum, Narrow, build
from test_deploy import QUICK, Room, ledger, owners, w_of

from pfedme.algorithms import ALGORITHMS, Algorithm, FedBN, Mocha
from pfedme.algorithms.base import Cohort
from pfedme.core.models import DNN, MLR, MODELS, Description, MadeModel, Model, NormalisedDNN
from pfedme.core.spec import field_types
from pfedme.core.tree import record, vector_shapes
from pfedme.data.table import Table
from pfedme.deploy.channel import Enough, never
from pfedme.deploy.memory import Memory
from pfedme.deploy.messages import Content, Kind, Refusal, Reply
from pfedme.deploy.plan import Plan, offered
from pfedme.deploy.policy import Policy
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.server import Server
from pfedme.engine.exchange import server_key
from pfedme.engine.simulate import Simulation, State
from pfedme.errors import InputError
from pfedme.export import load, model_of
from pfedme.runs.run import Run

pytestmark = pytest.mark.usefixtures("outside_installed")

ROUNDS, COHORT = 5, 3


class Killed(BaseException):
    """Ends a server as if it had been killed."""


@dataclasses.dataclass(frozen=True)
class Troubles:
    """What goes wrong in rounds, which count from 0."""

    dropped: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Whose upload is not finite."""
    late: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Who trains and does not answer."""
    killed: int | None = None
    """Before which round's uploads are counted, and after clients have trained, the server is killed."""

    def counts(self, t: int, name: str) -> bool:
        """Whether a client's upload of a round counts."""
        return name not in (self.dropped.get(t), self.late.get(t))


class Troubled(Room):
    """A room with troubles, which notes what is on the wire."""

    def __init__(self, tables: Path, state: Path, troubles: Troubles) -> None:
        super().__init__(tables, state, algorithms=tuple(OUTSIDE))
        self.troubles, self.asked = troubles, list[tuple[Kind, Content]]()

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        self.asked += [(kind, content) for content in contents.values()]
        replies = super().ask(kind, contents, deadline, enough)
        if kind != "train":
            return replies
        t = next(iter(contents.values())).words["round"]
        if t == self.troubles.killed:
            raise Killed
        if (name := self.troubles.dropped.get(t)) in replies:
            content = replies[name].content
            assert content is not None
            spoilt = {key: a * np.nan if key == "w" else a for key, a in content.arrays.items()}
            replies[name] = Reply(Content(content.words, spoilt))
        return {name: reply for name, reply in replies.items() if name != self.troubles.late.get(t)}


class Watched(Server):
    """A server whose last state is kept."""

    last: Progress

    def finish(self, progress: Progress, *, last: bool) -> dict[str, Content]:
        self.last = progress
        return super().finish(progress, last=last)


def deployed(plan: Plan, room: Room, out: Path, *, resume: bool = False) -> Watched:
    """The server of a deployed run, when it has ended."""
    out.mkdir(exist_ok=True)
    if not resume:
        for client in room.clients.values():
            client.pins.begin()
    book = DeploymentRecord(plan, out, "pfedme server")
    server = Watched(plan, room, book.tell)
    carry_out(server, book, resume=resume)
    return server


def simulated(sim: Simulation, troubles: Troubles) -> Iterator[State]:
    """The states of a simulation before each round and after the last, where some uploads are lost."""
    state = sim.start()
    yield state
    for t in range(ROUNDS):
        who = np.array([i for i in sim.cohort_of(t) if troubles.counts(t, sim.federation.name(i))])
        update = sim.update(state, who)
        rows = jnp.asarray(sim.federation.n_train[who])
        cohort = Cohort(server_key(sim.key, t), jnp.asarray(who), rows, sim.federation.clients)
        server = jax.jit(sim.algorithm.server_update)(state.server, update.upload, cohort)
        clients = jax.tree.map(lambda kept, new, who=who: kept.at[who].set(new), state.clients, update.state)
        state = State(t + 1, server, clients)
        yield state


def kept(room: Room, server: Watched, name: str, first: Any) -> Any:
    """What a client keeps."""
    client, progress = room.clients[name], server.last
    pinned = client.pins.bound(progress.agreement.sha256(server.plan.offer()))
    memory = Memory(client.state, pinned["id"], server.exchange(progress.agreement).state)
    return memory.recall(progress.counted.get(name, 0), lambda: first)


DEPLOYABLE = {
    name: cls
    for name, cls in ALGORITHMS.items()
    if name not in PAPERS and name != "hypcluster" and cls.federated and not cls.simulated
}
"""The relatives that can be deployed."""


def small(cls: type[Algorithm]) -> tuple[Algorithm, Description]:
    """A short form of an algorithm, and a small model that it can train."""
    few = {"clusters": 2, "warmup": 1, "F": 4, **QUICK}
    few |= (
        {"alpha": 0.05} if "alpha" in cls.steps else {}
    )  # what is not given, a server does not find in rows
    model = NormalisedDNN(hidden=(4,)) if cls is FedBN else MLR() if cls is Mocha else DNN(hidden=(4,))
    return cls(**{name: value for name, value in few.items() if name in field_types(cls)}), model


@pytest.mark.parametrize(
    "cls",
    [
        *(pytest.param(cls, marks=[pytest.mark.slow] * (cls is not Control)) for cls in OUTSIDE.values()),
        *(pytest.param(cls, marks=pytest.mark.slow) for cls in DEPLOYABLE.values()),
    ],
    ids=[*OUTSIDE, *DEPLOYABLE],
)
def test_server_and_clients_keep_what_a_simulation_does_whatever_goes_wrong(
    cls: type[Algorithm], tmp_path: Path
):
    tables, (algorithm, model) = owners(tmp_path, clients=4), small(cls)
    run = Run(
        algorithm=algorithm, data=Table(path=str(tables), label="sick"), model=model, rounds=ROUNDS,
        cohort=COHORT, seed=5,
    )  # fmt: skip
    sim = run.prepare()[1]
    drawn = [[sim.federation.name(i) for i in sim.cohort_of(t)] for t in range(ROUNDS)]
    # One that took part before is dropped and is there again in the next round, and another one is late.
    troubles = Troubles(dropped={1: drawn[1][0]}, late={2: drawn[2][1], 4: drawn[4][0]}, killed=3)
    plan = Plan(
        algorithm=algorithm, model=model, rounds=ROUNDS, cohort=COHORT, seed=5, min_clients=4, clip=0.0,
    )  # fmt: skip
    first = Troubled(tables, tmp_path / "state", troubles)
    with pytest.raises(Killed):
        deployed(plan, first, tmp_path / "out")
    troubles = dataclasses.replace(troubles, killed=None)
    room = Troubled(tables, tmp_path / "state", troubles)
    server = deployed(plan, room, tmp_path / "out", resume=True)

    states = list(simulated(sim, troubles))
    assert_close(server.last.server, states[-1].server, rtol=1e-5, atol=1e-5)
    models, _ = sim.answer(states[-1])
    own = []
    for i, name in enumerate(there(sim.federation.names)):
        begun, ended = (jax.tree.map(lambda a, i=i: a[i], states[t].clients) for t in (0, -1))
        own.append(kept(room, server, name, begun))
        assert_close(own[-1], ended, rtol=1e-5, atol=1e-5)
        used = load(tmp_path / "state" / name / "model").theta
        theta = models.personal if models.personal is not None else models.local
        assert theta is not None
        assert_close(used, theta[i], rtol=1e-5, atol=1e-5)
    if (w := sim.shared(states[-1])) is not None:
        np.testing.assert_allclose(w_of(tmp_path / "out"), w.ravel(), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(InputError, match=r"has no global model"):
            model_of(tmp_path / "out")

    exchange = server.exchange(server.last.agreement)
    uploads = [content.arrays for kind, _, content in (*first.sent, *room.sent) if kind == "train"]
    downloads = [content.arrays for kind, content in (*first.asked, *room.asked) if kind == "train"]
    assert {sizes(one) for one in uploads} == {sizes(vector_shapes(exchange.message))}
    assert {sizes(one) for one in downloads} == {sizes(vector_shapes(exchange.sent))}
    if cls is Head:  # whose last layer is never on the wire
        body = 4 * (server.last.agreement.schema.features + 1)
        seen = [content.arrays for _, content in room.asked] + [content.arrays for *_, content in room.sent]
        assert {sizes(one) for one in seen} == {(), (("w", (body,)),)}
    if cls is Control:  # whose c is the mean of the clients' c_i
        c = server.last.server[1].ravel()
        np.testing.assert_allclose(np.mean([c_i.ravel() for c_i in own], axis=0), c, atol=1e-6)
        assert np.abs(c).max() > 0.01


def sizes(arrays: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of arrays."""
    return tuple(sorted((name, a.shape) for name, a in arrays.items()))


def test_a_client_without_the_package_or_the_leave_to_use_it_refuses(tmp_path: Path):
    plan = Plan(algorithm=Momentum(**QUICK), model=Narrow(width=2), rounds=1)
    offer = plan.offer()
    assert offer["algorithm"]["name"] == "momentum"
    assert offer["model"] == {"name": "narrow", "width": 2, "l2": 0.0}
    assert offered(offer) == plan
    with pytest.raises(Refusal, match=r"allows pfedme, .* but not momentum \(--algorithms\)"):
        Policy().check_plan(plan)
    allowed = Policy(algorithms=("momentum",), models=("narrow",)).checked()
    allowed.check_plan(plan)
    with (
        installed(),
        pytest.raises(Refusal, match="'momentum'; the package that provides it must be installed"),
    ):
        offered(offer)
    with installed(INSTALLED):
        offered(offer)


@record
class Functions(Description):
    """A model that is made of functions."""

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Model:
        """The model."""
        return build(features, classes)


def test_a_model_that_no_file_can_hold_is_for_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="outside:build is for simulations"):
        Plan(algorithm=Momentum(**QUICK), model=MadeModel(path="outside:build")).checked()
    monkeypatch.setitem(MODELS.others, "functions", Functions)
    room = Troubled(owners(tmp_path, clients=2), tmp_path / "state", Troubles())
    room.clients = {
        name: dataclasses.replace(client, policy=dataclasses.replace(client.policy, models=("functions",)))
        for name, client in room.clients.items()
    }
    plan = Plan(algorithm=Momentum(**QUICK), model=Functions(), rounds=1, min_clients=2, join_timeout=0.1)
    with pytest.raises(
        InputError, match="'functions' is made of functions, which cannot be stored in a file"
    ):
        deployed(plan, room, tmp_path / "out")


LOST = (
    "what it keeps of this run after round 2 is not in its state folder; its owner can put the folder back, "
    "or let it start over (--lost-state start-over)"
)
ANEW = "it had lost what it kept, and started over"
UNKNOWN = "it has no agreement; its state folder is new"


@pytest.mark.parametrize(
    ("cls", "policy", "want"),
    [
        (Control, "refuse", [("failed", UNKNOWN), ("failed", LOST), ("failed", LOST)]),
        (Control, "start-over", [("failed", UNKNOWN), ("counted", ANEW), ("counted", "")]),
        (Momentum, "refuse", [("failed", UNKNOWN), ("counted", ""), ("counted", "")]),
    ],
    ids=["refuses", "starts-over", "keeps-nothing"],
)
def test_a_client_that_has_lost_what_it_kept_says_so(
    cls: type[Algorithm], policy: Literal["refuse", "start-over"], want: list[tuple[str, str]], tmp_path: Path
):
    tables = owners(tmp_path, clients=2)
    plan = Plan(
        algorithm=cls(**QUICK), model=MLR(), rounds=ROUNDS, seed=5, min_clients=2, min_replies=1, clip=0.0,
    )  # fmt: skip
    with pytest.raises(Killed):
        deployed(plan, Troubled(tables, tmp_path / "state", Troubles(killed=2)), tmp_path / "out")
    shutil.rmtree(tmp_path / "state/north")
    room = Troubled(tables, tmp_path / "state", Troubles())
    own = room.clients["north"]
    room.clients["north"] = dataclasses.replace(
        own, policy=dataclasses.replace(own.policy, lost_state=policy).checked()
    )
    own.pins.begin()
    deployed(plan, room, tmp_path / "out", resume=True)
    lines = [line for line in ledger(tmp_path / "out") if int(line["round"]) > 2]
    assert [(li["outcome"], li["reason"]) for li in lines if li["client"] == "north"] == want
    assert [(li["outcome"], li["reason"]) for li in lines if li["client"] == "east"] == [("counted", "")] * 3
    log = (tmp_path / "out/server.log").read_text()
    assert (f"Round 4: north failed ({LOST})." in log) == (policy == "refuse" and cls is Control)
    assert (f"Round 4: north counted ({ANEW})." in log) == (policy == "start-over")
    assert ("north has not responded to the shared model" in log) == (policy == "refuse" and cls is Control)


def test_a_client_recalls_what_it_kept_after_the_round_that_counted_last(tmp_path: Path):
    def memory(*, start_over: bool = False, agreement: str = "a") -> Memory:
        return Memory(tmp_path, agreement, np.zeros(2, np.float32), start_over=start_over)

    def value(x: float) -> np.ndarray:
        return np.full(2, x, np.float32)

    def recalled(counted: Any, **given: Any) -> tuple[float, bool]:
        own = memory(**given)
        return float(own.recall(counted, lambda: value(-1))[0]), own.started_over

    assert recalled(0) == (-1, False)
    with pytest.raises(Refusal, match="after round 3 is not in its state folder"):
        recalled(3)
    assert recalled(3, start_over=True) == (-1, True)
    own = memory()
    own.recall(0, lambda: value(-1))
    own.expect(4, value(5))
    assert (recalled(0), recalled(5), recalled(5, start_over=True)) == ((-1, False), (5, False), (5, False))
    for counted in (4, 6, None, "5", [5]):  # neither before nor after: an old copy of the folder, or a lie
        with pytest.raises(Refusal, match="is not in its state folder"):
            recalled(counted)
    with pytest.raises(Refusal, match="after round 5 is not in its state folder"):
        recalled(5, agreement="b")
    with pytest.raises(Refusal, match="is not in its state folder"):
        recalled(None, start_over=True)
    # It has started over until an upload of it counts.
    own = memory(start_over=True)
    own.recall(6, lambda: value(-1))
    own.expect(7, value(8))
    assert (recalled(6), recalled(8)) == ((-1, True), (8, False))
    # One that is late does not undo a later round.
    late = memory()
    late.recall(6, lambda: value(-1))
    with pytest.raises(Refusal, match="round 7 has passed"):
        late.expect(6, value(7))
    assert recalled(8) == (8, False)
