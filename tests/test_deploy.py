"""Both sides of a deployed federation, with no network between them: the same numbers as in a simulation, and
what becomes of clients that fail."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from pfedme.algorithms import ALGORITHMS, Algorithm, Alone, FedAvg, FedAvgFT, PerFedAvg, PFedMe
from pfedme.core.models import DNN, MLR
from pfedme.data.table import Table
from pfedme.deploy.channel import Channel, Enough, never
from pfedme.deploy.client import Client
from pfedme.deploy.judge import scores_shape, unfit
from pfedme.deploy.messages import GONE, Content, Kind, Refusal, Reply
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy
from pfedme.deploy.progress import Stopped
from pfedme.deploy.record import DeploymentRecord, carry_out, note
from pfedme.deploy.server import Server
from pfedme.errors import InputError
from pfedme.export import load, model_of
from pfedme.runs.run import Run
from pfedme.training.execute import execute

NAMES = ("east", "north", "south", "süd-west", "west")


def owners(folder: Path, *, quantity: bool = False, clients: int = 5, without: str = "") -> Path:
    """A folder with a file for each client; they have rows, means and categories of their own."""
    rng = np.random.default_rng(3)
    (folder / "tables").mkdir(parents=True)
    for k, name in enumerate(NAMES[:clients]):
        n = 80  # the same for all, so that they share compiled programs
        age, dose = rng.normal(50 + 5 * k, 10, n), rng.normal(1e6, 3, n)
        ward = rng.choice(["a", "b", "c"][: 2 + k % 2], n)
        risk = (age - 55) / 10 + (ward == "a") - (dose - 1e6) / 3 + rng.normal(size=n)
        label = 7 + 0.5 * risk if quantity else np.where(risk > 0, "yes", "no")
        frame = pl.DataFrame({"age": age, "ward": ward, "dose": dose, "sick": label})
        if name != without:
            frame.write_csv(folder / "tables" / f"{name}.csv")
    return folder / "tables"


ANSWER_S = 5.0
"""Seconds, of a room's clock, after which its clients answer."""


class Room(Channel):
    """Clients in the same room as the server."""

    def __init__(
        self, tables: Path, state: Path, *, share: bool = True, algorithms: tuple[str, ...] = ()
    ) -> None:
        self.clients = {
            file.stem: Client(
                Table(path=str(file), label="sick", owner=file.stem),
                state / file.stem,
                share_metrics=share,
                policy=Policy(
                    approve="any",
                    batch_key="seed",
                    models=("mlr", "dnn", "dnn-bn"),
                    max_classes=10,
                    algorithms=algorithms,
                ),
            )
            for file in sorted(tables.glob("*.csv"))
        }
        self.gone: set[str] = set()
        self.tricks: dict[str, Callable[[Content], Content | None]] = {}
        """What some clients make of what they should upload; None if they hang."""
        self.scores: dict[str, object] = {}
        """What some clients say that their scores are."""
        self.waited: list[float] = []
        """How many seconds, of a clock of this room's own, clients were waited for in each round."""
        self.sent: list[tuple[str, str, Content]] = []

    def present(self) -> list[str]:
        return [name for name in self.clients if name not in self.gone]

    def work(self, client: Client, kind: Kind) -> Callable[[Content], Content]:
        return {
            "agree": client.agree, "join": client.join, "train": client.train, "finish": client.finish,
            "refuse": client.refused,
        }[kind]  # fmt: skip

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        replies = self.answers(kind, contents)
        hanging, seconds = set(contents) - set(replies), 0.0
        while seconds < deadline and not enough(set(contents) if seconds < ANSWER_S else hanging, seconds):
            if seconds >= ANSWER_S and not hanging:
                break
            seconds += 1.0
        if kind == "train":
            self.waited.append(seconds)
        return replies

    def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
        replies = {}
        for name, content in contents.items():
            own = self.clients[name]
            # Through text, as on a wire.
            asked = Content(json.loads(json.dumps(content.words)), content.arrays)
            try:
                answer = self.work(own, kind)(asked)
            except InputError as error:
                replies[name] = Reply(None, str(error))
                continue
            if kind == "train" and name in self.tricks:
                answer = self.tricks[name](answer)
            if kind == "finish" and name in self.scores:
                answer = Content({"scores": self.scores[name]} if self.scores[name] else {}, {})
            if answer is not None:
                told = Content(json.loads(json.dumps(answer.words)), answer.arrays)
                self.sent.append((kind, name, told))
                replies[name] = Reply(told)
        return replies


def deployed(tmp_path: Path, plan: Plan, room: Room, *, resume: bool = False, name: str = "deployed") -> Path:
    """The folder of a run of the plan with the clients of a room."""
    out = tmp_path / name
    out.mkdir(exist_ok=True)
    if not resume:
        for client in room.clients.values():
            client.pins.begin()
    record = DeploymentRecord(plan, out, "pfedme server")
    carry_out(Server(plan, room, record.tell), record, resume=resume)
    return out


def ledger(out: Path) -> list[dict[str, str]]:
    """The lines of the ledger."""
    with (out / "ledger.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def w_of(out: Path) -> np.ndarray:
    """The shared model of a run."""
    return np.asarray(model_of(out).theta.ravel())


QUICK = {"eta": 0.05, "R": 10, "B": 16}
STRICT: dict[str, Any] = {
    "rounds": 4, "min_clients": 5, "min_replies": 5, "max_attempts": 2, "deadline": 0.2,
}  # fmt: skip
"""A plan that stops as soon as a client is missing."""


@pytest.mark.parametrize(
    ("algorithm", "quantity"),
    [
        (PFedMe(lam=5.0, K=3, alpha=0.01, **QUICK), False),
        pytest.param(PFedMe(lam=5.0, K=3, alpha=0.01, **QUICK), True, marks=pytest.mark.slow),
        pytest.param(FedAvg(**QUICK, aggregation="samples"), False, marks=pytest.mark.slow),
        pytest.param(PerFedAvg(eta=0.05, R=10, B=16, alpha=0.02), False, marks=pytest.mark.slow),
        pytest.param(FedAvgFT(F=5, **QUICK), True, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", "quantity" if value else "classes"),
)
def test_a_deployed_run_is_the_simulated_one(algorithm: Algorithm, quantity: bool, tmp_path: Path):
    tables = owners(tmp_path, quantity=quantity)
    room = Room(tables, tmp_path / "state")
    plan = Plan(
        algorithm=algorithm,
        model=DNN(hidden=(4,)),
        rounds=4,
        cohort=3,
        seed=5,
        min_clients=5,
        eval_every=2,
        clip=0.0,
    )
    out = deployed(tmp_path, plan, room)
    run = Run(
        algorithm=algorithm, data=Table(path=str(tables), label="sick"), model=DNN(hidden=(4,)), rounds=4,
        cohort=3, seed=5, eval_every=2,
    )  # fmt: skip
    simulated = execute(run, tmp_path / "simulated")
    w = np.asarray(simulated.w)
    np.testing.assert_allclose(w_of(out), w, rtol=1e-5, atol=1e-5 * np.abs(w).max())
    assert simulated.federation.names == tuple(room.clients)
    for name in room.clients:
        mine = load(tmp_path / "state" / name / "model")
        if simulated.theta is not None:
            theta = np.asarray(model_of(tmp_path / "simulated", client=name).theta.ravel())
            np.testing.assert_allclose(mine.theta.ravel(), theta, rtol=1e-5, atol=1e-5 * np.abs(theta).max())
            assert mine.origin["which"] == "personal"
    record = json.loads((out / "record.json").read_text())
    assert [entry["round"] for entry in record["history"]] == [0, 2, 4]
    for kind in ("global", "local", "personal"):
        for mine, theirs in zip(record["history"], simulated.record["history"], strict=True):
            assert (kind in mine) == (kind in theirs)
            # What takes more than sums, such as AUC, a server does not have.
            for key, value in ((k, v) for k, v in theirs.get(kind, {}).items() if k in mine.get(kind, {})):
                same = value if value is None else pytest.approx(value, rel=1e-4)
                assert mine[kind][key] == same, (kind, key)
    assert (out / "clients.csv").read_text().count("\n") == 6


@pytest.mark.slow
def test_what_the_room_is_asked_for_is_what_a_simulation_draws(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=3, cohort=2, seed=1, min_clients=5)
    out = deployed(tmp_path, plan, room)
    run = Run(algorithm=FedAvg(**QUICK), data=Table(path=str(tmp_path / "tables"), label="sick"), model=MLR(),
              rounds=3, cohort=2, seed=1)  # fmt: skip
    simulation = run.prepare()[1]
    for t in range(3):
        mine = {line["client"] for line in ledger(out) if line["round"] == str(t + 1)}
        assert mine == {simulation.federation.name(i) for i in simulation.cohort_of(t)}


@pytest.mark.parametrize("share", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_but_what_is_listed_leaves_a_client(share: bool, tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state", share=share)
    plan = Plan(algorithm=PFedMe(**QUICK), model=MLR(), rounds=2, min_clients=5)
    deployed(tmp_path, plan, room)
    size = w_of(tmp_path / "deployed").size
    for kind, _, content in room.sent:
        if kind == "train":
            assert content.words == {}
            assert {name: a.shape for name, a in content.arrays.items()} == {"w": (size,)}
        elif kind == "agree":
            assert set(content.words) == {
                "version", "label", "task", "impute", "numbers", "categories", "classes", "quantity",
                "most_classes",
            }  # fmt: skip
            assert all(len(values) == 3 for values in content.words["numbers"].values())
            assert content.arrays == {}
        elif kind == "join":
            assert (set(content.words), content.arrays) == ({"bound"}, {})
        else:
            assert set(content.words) == ({"scores"} if share else set())
            assert content.arrays == {}
    weighted = dataclasses.replace(plan, algorithm=PFedMe(**QUICK, aggregation="samples"))
    room.sent.clear()
    deployed(tmp_path, weighted, room, name="weighted")
    assert {tuple(content.words) for kind, _, content in room.sent if kind == "train"} == {("rows",)}


def scaled(factor: float) -> Callable[[Content], Content]:
    """An upload that is multiplied."""
    return lambda content: Content(content.words, {"w": (factor * content.arrays["w"]).astype(np.float32)})


@pytest.mark.parametrize(
    ("trick", "outcome", "reason"),
    [
        (scaled(float("nan")), "dropped", "not finite"),
        (scaled(1e6), "dropped", "far beyond the usual"),
        (lambda c: Content(c.words, {"w": c.arrays["w"][1:]}), "dropped", "of shape"),
        pytest.param(
            lambda c: Content(c.words, {"w": c.arrays["w"].astype(np.float64)}),
            "dropped",
            "float64",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda c: Content(c.words, {}), "dropped", "it lacks w", marks=pytest.mark.slow),
        (lambda c: None, "late", "no reply within"),
    ],
)
def test_a_bad_upload_is_dropped_and_the_others_go_on(
    trick: Callable[[Content], Content | None], outcome: str, reason: str, tmp_path: Path
):
    room = Room(owners(tmp_path), tmp_path / "state")
    room.tricks["north"] = trick
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=2, min_clients=5)
    out = deployed(tmp_path, plan, room)
    lines = [line for line in ledger(out) if line["client"] == "north"]
    assert [line["outcome"] for line in lines] == [outcome] * 2
    assert reason in lines[0]["reason"]
    assert f"north {outcome}" in (out / "server.log").read_text()
    assert np.isfinite(w_of(out)).all()
    counted = [line for line in ledger(out) if line["outcome"] == "counted"]
    assert len(counted) == 8


@pytest.mark.parametrize("rows", ["x", 0, -3, 2**31, None, 1.5])
def test_nobody_can_claim_to_have_any_number_of_rows(rows: object):
    w = np.zeros(3, np.float32)
    assert unfit(Content({"rows": rows}, {"w": w}), {"w": w}, weighted=True)
    assert not unfit(Content({"rows": rows}, {"w": w}), {"w": w}, weighted=False)


SUMS = {"loss": 1.0, "rows": 10, "right": 5}
SCORES = {"n_train": 10, "n_test": 10, "info": {}, "test": {"global": SUMS}, "train": {"global": SUMS}}


@pytest.mark.parametrize(
    "scores",
    [
        1,
        {},
        SCORES | {"info": 3},
        SCORES | {"n_test": -1},
        SCORES | {"test": {"global": "x"}},
        SCORES | {"test": {"global": {}}},
        SCORES | {"test": {"global": SUMS | {"loss": float("nan")}}},
        SCORES | {"test": {"global": SUMS | {"right": "5"}}},
        SCORES | {"test": {"global": SUMS | {"right": 11}}},
        SCORES | {"test": {"global": SUMS | {"right": True}}},
        SCORES | {"test": {"global": SUMS | {"right": -1}}},
        SCORES | {"test": {"global": SUMS | {"rows": 11}}},
        SCORES | {"test": {"global": SUMS | {"loss": -1.0}}},
        SCORES | {"test": {"global": SUMS | {"loss": 10**400}}},
        SCORES | {"test": {"=global": SUMS}},
        SCORES | {"n_train": True},
        SCORES | {"n_train": 10**12},
        SCORES | {"info": {str(k): 0.0 for k in range(1000)}},
    ],
)
def test_scores_that_cannot_be_have_no_shape(scores: object):
    assert scores_shape(scores) == ()
    assert scores_shape(SCORES)


def test_scores_that_are_not_like_the_others_are_left_out(tmp_path: Path):
    room = Room(owners(tmp_path, clients=3), tmp_path / "state")
    room.scores["east"] = SCORES
    room.tricks["north"] = lambda content: Content({"rows": "x"}, content.arrays)
    plan = Plan(algorithm=FedAvg(**QUICK, aggregation="samples"), model=MLR(), rounds=1, min_clients=3)
    out = deployed(tmp_path, plan, room)
    assert {line["client"]: line["outcome"] for line in ledger(out)}["north"] == "dropped"
    assert "east shares impossible scores" in (out / "server.log").read_text()
    with (out / "clients.csv").open(newline="") as file:
        assert [line["client"] for line in csv.DictReader(file)] == ["north", "south"]


def test_the_owner_of_a_table_decides_which_columns_are_used(tmp_path: Path):
    tables = owners(tmp_path, clients=2)
    room = Room(tables, tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=2)
    agreement = Server(plan, room, print).begin().agreement
    asked = Content({"agreement": agreement.words(plan.offer())}, {})
    own = room.clients["east"]
    for fields in ({"drop": ("ward",)}, {"features": ("age", "dose")}, {"label": "ward"}):
        client = dataclasses.replace(own, table=dataclasses.replace(own.table, **fields))
        with pytest.raises(Refusal, match=r"other columns than its table|not about the label"):
            client.join(asked)
    narrow = dataclasses.replace(own.policy, columns=("age", "dose"))
    with pytest.raises(Refusal, match="does not allow the column 'ward'"):
        dataclasses.replace(own, policy=narrow).agree(Content({"plan": plan.offer()}, {}))


def test_a_category_that_only_test_rows_have_is_as_in_a_simulation(tmp_path: Path):
    tables = owners(tmp_path, clients=2)
    path = tables / "east.csv"
    frame = pl.read_csv(path)
    for row in range(frame.height):
        rare = pl.when(pl.int_range(frame.height) == row).then(pl.lit("rare")).otherwise(pl.col("ward"))
        frame.with_columns(rare.alias("ward")).write_csv(path)
        if "rare" not in Table(path=str(path), label="sick", owner="east").tell().categories["ward"]:
            break
    algorithm = FedAvg(**QUICK)
    plan = Plan(algorithm=algorithm, model=MLR(), rounds=1, min_clients=2, clip=0.0)
    out = deployed(tmp_path, plan, Room(tables, tmp_path / "state"))
    run = Run(
        algorithm=algorithm, data=Table(path=str(tables), label="sick"), model=MLR(), rounds=1, cohort=2
    )
    simulated = execute(run, tmp_path / "simulated")
    np.testing.assert_allclose(w_of(out), np.asarray(simulated.w), rtol=1e-5, atol=1e-6)
    mine = json.loads((out / "record.json").read_text())["final"]["local"]["accuracy"]
    assert mine == simulated.record["history"][-1]["local"]["accuracy"]


def test_who_mends_its_table_is_taken(tmp_path: Path):
    tables = owners(tmp_path, clients=3)
    good = (tables / "east.csv").read_text()
    (tables / "east.csv").write_text(good.replace("age,", "years,", 1))

    class Mending(Room):
        """A room in which the client that was turned away leaves, and comes back with another table."""

        left = 0

        def present(self) -> list[str]:
            if (self.clients["east"].state / "refused.json").exists() and self.left < 2:
                self.left += 1
                (tables / "east.csv").write_text(good)
                return ["north", "south"]
            return super().present()

    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=3)
    agreement = Server(plan, Mending(tables, tmp_path / "state"), print).begin().agreement
    assert (agreement.names, agreement.refused) == (("east", "north", "south"), {})


def test_after_a_resume_clients_are_waited_for_before_they_are_judged(tmp_path: Path):
    tables = owners(tmp_path, clients=3)
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=3, deadline=20.0)

    class Slow(Room):
        """A room into which clients come one after the other."""

        looks = 0

        def present(self) -> list[str]:
            self.looks += 1
            return super().present()[: self.looks]

    progress = Server(plan, Room(tables, tmp_path / "state"), print).begin()
    told = Server(plan, Slow(tables, tmp_path / "state"), print).finish(progress, last=True)
    assert set(told) == {"east", "north", "south"}


def test_nobody_writes_more_than_a_line_into_the_log(tmp_path: Path):
    note(tmp_path, "a\n2026-01-01 Round 9 of 9 is done\x1b[2J")
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]


def test_what_goes_wrong_at_a_client_is_told_at_its_own_console(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    app = pytest.importorskip("pfedme.deploy.app")
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)

    def failing(*_: object) -> Content:
        raise ValueError("row 7 is 'Mrs X'")

    message = Message(content=app.packed(Content({}, {})), message_type="train", dst_node_id=1)
    config = {"name": "north", "data": "x.csv", "state-dir": str(tmp_path)}
    context = SimpleNamespace(run_id=1, node_config=config)
    monkeypatch.setitem(app.work.WORK, "train", failing)
    reply = app.unpacked(app.answered("train")(message, context).content)
    assert reply.words == {"name": "north", "error": "its program failed; its own console says why"}
    said = capsys.readouterr().out
    assert "\npfedme: row 7 is 'Mrs X'\n" in said
    assert "Traceback" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "waited"), [(4, [60.0, 9.0, 9.0, 5.0]), (5, [60.0, 60.0, 60.0, 5.0, 5.0, 5.0, 5.0])]
)
def test_who_was_late_is_waited_for_twice_as_long_as_the_others_unless_it_is_needed(
    least: int, waited: list[float], tmp_path: Path
):
    room = Room(owners(tmp_path), tmp_path / "state")
    times = iter([None] * 3)
    room.tricks["north"] = lambda content: next(times, content)
    plan = Plan(
        algorithm=FedAvg(**QUICK), model=MLR(), rounds=4, min_clients=5, min_replies=least, deadline=60.0
    )
    out = deployed(tmp_path, plan, room)
    assert room.waited == waited
    lines = [line for line in ledger(out) if line["client"] == "north"]
    assert [line["outcome"] for line in lines[:4]] == ["late", "late", "late", "counted"]
    within = ["60", "8" if least == 4 else "60"]
    assert [line["reason"] for line in lines[:2]] == [f"no reply within {s} seconds" for s in within]


@pytest.mark.slow
def test_who_is_late_again_and_again_has_all_the_time_now_and_then(tmp_path: Path):
    room = Room(owners(tmp_path, clients=3), tmp_path / "state")
    room.tricks["north"] = lambda _: None
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=7, min_clients=3, deadline=60.0)
    deployed(tmp_path, plan, room)
    assert room.waited == [60.0, 9.0, 9.0, 9.0, 9.0, 60.0, 9.0]


@pytest.mark.slow
def test_the_ledger_tells_what_each_client_did_to_the_step(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    samples = FedAvg(**QUICK, aggregation="samples")
    plan = Plan(algorithm=samples, model=MLR(), rounds=1, min_clients=5, clip=0.0)
    out = deployed(tmp_path, plan, room)
    uploads = {
        name: content.arrays["w"].astype(float) for kind, name, content in room.sent if kind == "train"
    }
    rows = {line["client"]: int(line["rows"]) for line in ledger(out)}

    def step(names: list[str]) -> float:
        total = sum(rows[n] for n in names)
        return float(np.linalg.norm(sum(rows[n] / total * uploads[n] for n in names)))

    for line in ledger(out):
        others = [name for name in uploads if name != line["client"]]
        assert float(line["norm"]) == pytest.approx(np.linalg.norm(uploads[line["client"]]), rel=1e-4)
        assert float(line["step"]) == pytest.approx(step(list(uploads)), rel=1e-3)
        assert float(line["without"]) == pytest.approx(step(others), rel=1e-3)


@pytest.mark.slow
def test_a_round_with_too_few_replies_is_repeated_and_does_not_count(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    plan = Plan(
        algorithm=PFedMe(**QUICK), model=MLR(), rounds=3, min_clients=5, min_replies=5, max_attempts=3
    )
    undisturbed = w_of(deployed(tmp_path, plan, room, name="undisturbed"))
    times = iter([None, None])

    def twice_nothing(content: Content) -> Content | None:
        return next(times, content)

    room.tricks["south"] = twice_nothing
    out = deployed(tmp_path, plan, room)
    np.testing.assert_array_equal(w_of(out), undisturbed)
    first = [line for line in ledger(out) if line["round"] == "1"]
    assert [line["attempt"] for line in first] == ["1"] * 5 + ["2"] * 5 + ["3"] * 5
    assert {line["outcome"] for line in first[:10]} == {"failed", "late"}


@pytest.mark.slow
def test_a_run_that_stops_goes_on_from_its_last_round(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    plan = Plan(algorithm=PFedMe(**QUICK), model=MLR(), **STRICT)
    undisturbed = w_of(deployed(tmp_path, plan, room, name="undisturbed"))
    asked = []

    def gone_after_two(content: Content) -> Content | None:
        asked.append(content)
        return content if len(asked) <= 2 else None

    room.tricks["east"] = gone_after_two
    with pytest.raises(Stopped, match="Round 3 had too few good replies 2 times"):
        deployed(tmp_path, plan, room)
    record = json.loads((tmp_path / "deployed" / "record.json").read_text())
    assert (record["status"], record["deployment"]["round"]) == ("stopped", 2)
    assert [line["outcome"] for line in ledger(tmp_path / "deployed")].count("late") == 2
    del room.tricks["east"]
    out = deployed(tmp_path, plan, room, resume=True)
    np.testing.assert_array_equal(w_of(out), undisturbed)
    counted = [line["round"] for line in ledger(out) if line["outcome"] == "counted"]
    assert counted == [str(t) for t in range(1, 5) for _ in range(5)]


def test_a_ledger_that_lost_lines_is_not_filled_up(tmp_path: Path):
    """On resuming, the ledger is cut to the last saved round; it must not be lengthened to it."""
    room = Room(owners(tmp_path, clients=2), tmp_path / "state")
    two: dict[str, Any] = STRICT | {"cohort": 2, "min_clients": 2, "min_replies": 2}
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), **two)
    record = DeploymentRecord(plan, tmp_path / "deployed", "")
    server = Server(plan, room, record.tell)
    record.folder.path.mkdir()
    progress = record.save(server.round(server.begin()))
    path = record.folder.path / "ledger.csv"
    whole = path.read_bytes()
    path.write_bytes(whole + b"2,1,ea")
    found = record.restore(server)
    assert (found and found.t, path.read_bytes()) == (progress.t, whole)
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="shorter than at the last round"):
        record.restore(server)


def test_clients_that_are_away_are_told_of_and_waited_for(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    room.gone = {"west"}
    plan = Plan(
        algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=5, join_timeout=0.1, deadline=0.2
    )
    with pytest.raises(Stopped, match="4 of at least 5 clients came"):
        deployed(tmp_path, plan, room, name="few")
    room.gone = set()
    server = Server(plan, room, print)
    progress = server.begin()
    room.gone = {"west"}
    after = server.round(progress)
    assert {p.client: p.outcome for p in after.ledger}["west"] == "absent"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.rename({"age": "years"}), "its table has no column 'age'"),
        pytest.param(
            lambda d: d.with_columns(shoe=pl.lit(1)), "its table has a column 'shoe'", marks=pytest.mark.slow
        ),
        (
            lambda d: d.with_columns(ward=pl.lit(3)),
            "its column 'ward' holds numbers, but the others' holds text",
        ),
        (lambda d: d.with_columns(age=pl.Series([None, *d["age"][1:]])), "Values are missing"),
        pytest.param(lambda d: d.drop("sick"), "has no column 'sick'", marks=pytest.mark.slow),
    ],
)
def test_a_table_that_does_not_fit_is_turned_away(
    change: Callable[[pl.DataFrame], pl.DataFrame], why: str, tmp_path: Path
):
    tables = owners(tmp_path)
    file = tables / "east.csv"
    change(pl.read_csv(file)).write_csv(file)
    room = Room(tables, tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=4)
    out = deployed(tmp_path, plan, room)
    assert "Refused east: " in (out / "server.log").read_text()
    assert why in json.loads((out / "record.json").read_text())["deployment"]["refused"]["east"]
    assert why in json.loads((tmp_path / "state/east/refused.json").read_text())["reason"]
    assert {line["client"] for line in ledger(out)} == set(room.clients) - {"east"}


@pytest.mark.slow
def test_who_is_slow_to_agree_or_leaves_meanwhile_is_asked_again(tmp_path: Path):
    class Busy(Room):
        """A room where at first nobody answers, and then one leaves and comes back."""

        asked = 0

        def ask(
            self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
        ) -> dict[str, Reply]:
            self.asked += 1
            replies = super().ask(kind, contents, deadline, enough)
            return (
                {} if self.asked == 1 else replies | ({"west": Reply(None, GONE)} if self.asked == 2 else {})
            )

    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=5)
    agreement = Server(plan, Busy(owners(tmp_path), tmp_path / "state"), print).begin().agreement
    assert (len(agreement.names), agreement.refused) == (5, {})


@pytest.mark.slow
def test_who_comes_after_the_agreement_is_told_so_once(tmp_path: Path):
    room = Room(owners(tmp_path), tmp_path / "state")
    room.gone = {"west"}
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=3, min_clients=4)
    said: list[str] = []
    server = Server(plan, room, said.append)
    progress = server.round(server.begin())
    room.gone = set()
    progress = server.round(server.round(progress))
    why = "the run had already begun; it can take part in the next one."
    assert [line for line in said if line.startswith("Refused")] == [f"Refused west: {why}"]
    told = json.loads((tmp_path / "state/west/refused.json").read_text())
    assert told == {"reason": why, "over": False}
    assert {part.client for part in progress.ledger} == set(room.clients) - {"west"}


def test_a_client_with_one_class_takes_part(tmp_path: Path):
    tables = owners(tmp_path)
    file = tables / "east.csv"
    pl.read_csv(file).with_columns(sick=pl.lit("no")).write_csv(file)
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=5)
    out = deployed(tmp_path, plan, Room(tables, tmp_path / "state"))
    assert {line["client"] for line in ledger(out) if line["outcome"] == "counted"} >= {"east"}


@pytest.mark.parametrize(
    "algorithm",
    [
        *(cls() for cls in ALGORITHMS.values() if cls.federated and not cls.simulated),
        *(PFedMe(lam=lam) for lam in (1e-3, 0.3, 1.0, 3.0, 10.0, 15.0, 17.5438596491229, 200.0, 1e5)),
        PFedMe(lam=1e3, alpha=1e-4),
        PerFedAvg(alpha=0.5),
    ],
    ids=str,
)
def test_steps_that_are_not_given_are_within_every_clients_limits(algorithm: Algorithm):
    plan = Plan(algorithm=algorithm, model=MLR())
    Policy().check_plan(plan)
    assert all(getattr(plan.algorithm, step) > 0 for step in plan.algorithm.steps)
    assert Plan(algorithm=plan.algorithm, model=MLR()) == plan


def test_steps_that_are_given_are_taken_as_they_are():
    plan = Plan(algorithm=PFedMe(eta=0.2, lam=15.0), model=MLR())
    assert plan.algorithm.eta == 0.2
    with pytest.raises(Refusal, match="eta times lam is 3, but its limit is 1"):
        Policy().check_plan(plan)


def test_plans_that_make_no_sense_are_refused():
    for plan, why in (
        (Plan(algorithm=Alone(), model=MLR()), "cannot be deployed: nothing is shared"),
        (Plan(algorithm=PFedMe(rechoose=3), model=MLR()), "--rechoose"),
        (Plan(algorithm=PFedMe(), model=MLR(), deadline=0.0), "deadline"),
    ):
        with pytest.raises(InputError, match=why):
            plan.checked()
