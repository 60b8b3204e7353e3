"""A client that a server tries to rob: each attack is refused by the default limits, and works without them.

And a server that clients lie to: what is impossible or far off is left out, and its sender is named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attack
import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from live import table as live_table
from test_deploy import NAMES, QUICK, Room, deployed, ledger, owners

from pfedme import __version__
from pfedme.algorithms import Algorithm, FedAvg, PFedMe
from pfedme.core.models import DNN, MLR
from pfedme.core.tree import Params, to_vectors
from pfedme.data.federation import Federation
from pfedme.data.hashing import ids_of_names
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.deploy import agreement as agreements
from pfedme.deploy import judge
from pfedme.deploy.client import Client
from pfedme.deploy.messages import Content, Kind, Refusal, Reply, Words, sha256
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy, read_policy
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import DeploymentRecord
from pfedme.deploy.server import Server
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.runs.ledger import Part, ledger_csv

SAFE = Policy(approve="any")
OPEN = Policy(
    approve="any", min_rows=1, min_count=1, min_batch=0, min_steps=1, max_step=1e9, max_draws=1e9,
    max_classes=10**6, max_rounds=10**6, batch_key="seed", models=("mlr", "dnn"),
)  # fmt: skip
"""Limits that were lowered until they limit nothing."""


# --- a malicious server


def robbed(tmp_path: Path, rows: attack.Rows, policy: Policy) -> Client:
    """A client whose table has these rows, all of which are trained on."""
    columns = {f"x{k}": values for k, values in enumerate(rows.x.astype(float).T)}
    sick = np.array(["no", "yes"])[rows.y] if rows.y.dtype == np.int32 else rows.y.astype(float)
    table = pl.DataFrame({**columns, "sick": sick})
    table.write_csv(tmp_path / "rows.csv")
    table[:4].write_csv(tmp_path / "test.csv")
    own = Table(path=str(tmp_path / "rows.csv"), test=str(tmp_path / "test.csv"), label="sick", owner="north")
    return Client(own, tmp_path / "state", policy=policy)


def rob(client: Client, rounds: int = 2000) -> attack.Respond:
    """What a server gets from an unmodified client that it sends a plan, an agreement and w of its choice."""
    joined: dict[tuple[Algorithm, Any], str] = {}
    answered = -1

    def respond(ask: attack.Ask, w: np.ndarray) -> np.ndarray:
        nonlocal answered
        key = ask.algorithm, ask.model
        if key not in joined:
            client.pins.begin()
            (client.state / "agreement.json").unlink(missing_ok=True)
            model = DNN(hidden=ask.model.hidden) if ask.model.hidden else MLR(l2=ask.model.l2)
            plan = Plan(algorithm=ask.algorithm, model=model, rounds=rounds).offer()
            told = client.agree(Content({"plan": plan}, {})).words
            (schema, names) = _schema(json.loads(json.dumps(told)), ask.model.classes)
            words = {"plan": plan, "schema": schema.to_json(), "names": names}
            joined[key] = client.join(Content({"agreement": words}, {})).words["bound"]
            answered = -1
        answered = max(ask.round, answered + 1)  # no round is answered twice
        asked = Content({"agreement": joined[key], "round": answered}, {"w": w.astype(np.float32)})
        return w + client.train(asked).arrays["w"]

    return respond


def _schema(told: Words, classes: int) -> tuple[Schema, list[str]]:
    """The honest agreement with one client, but for classes that the server has invented."""
    found = agreements.agree({"north": told})
    labels = [*found.schema.labels, *(f"invented {k}" for k in range(classes - len(found.schema.labels)))]
    return dataclasses.replace(found.schema, labels=tuple(labels)), ["north"]


N = 300
ATTACKS: dict[str, tuple[Callable[[attack.Respond], np.ndarray], int, int, str]] = {
    "R = 1, all rows in a batch, 15,625 classes": (
        lambda ask: attack.invented_classes(ask, N, 2, 3, 25, FedAvg(eta=1e3, R=1, B=0)),
        N, int(0.8 * N), "the plan's B is 0, but its limit is 16",
    ),
    "R = B = 20, 15,625 classes": (
        lambda ask: attack.invented_classes(ask, N, 2, 3, 25, FedAvg(eta=1.0)),
        N, int(0.2 * N), "the plan's B is 0, but its limit is 16",
    ),
    "R = B = 1": (
        lambda ask: attack.one_row(ask, attack.Network(features=3, classes=2), 1),
        N, 1, "the plan's B is 1, but its limit is 16",
    ),
    "mini-batches that the server knows": (
        lambda ask: attack.linear_system(
            ask, FedAvg(eta=1e-6), attack.Network(features=3, classes=2, l2=0.001), 0, 60, 70
        ),
        60, 60, "",
    ),
    "a hidden layer of traps": (
        lambda ask: attack.trapped(
            ask, FedAvg(eta=1e-5), attack.Network(features=3, classes=2, hidden=(100,)), N, 1,
            attack.Trap(1e-3),
        ),
        N, 10, "its policy allows the model mlr, but not dnn",
    ),
}  # fmt: skip
"""Attacks, how many rows their client has, how many of them at least come back if nothing is limited, and the
sentence with which the default limits refuse; without one the attack is carried out, in vain."""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_server_cannot_rob_a_client_that_has_the_default_limits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run, n, least, why = ATTACKS[name]
    monkeypatch.setattr(attack, "ID", int(ids_of_names(["north"])[0]))
    rows = attack.patients(n, features=3)
    (tmp_path / "open").mkdir()
    found = attack.score(run(rob(robbed(tmp_path / "open", rows, OPEN))), rows)
    (tmp_path / "safe").mkdir()
    safe = robbed(tmp_path / "safe", rows, SAFE)
    with capsys.disabled():
        print(f"\n{name}: {found.near} of {n} rows without limits")
    assert found.near >= least
    if why:
        with pytest.raises(Refusal, match=why) as refusal:
            run(rob(safe))
        with capsys.disabled():
            print(f"  refused: {refusal.value}")
        assert not (safe.state / "model").exists()
    else:
        assert attack.score(run(rob(safe, rounds=1000)), rows).exact == 0


def test_invented_classes_are_refused_whatever_the_settings(tmp_path: Path):
    client = robbed(tmp_path, attack.patients(N, features=3), SAFE)
    model = attack.Network(features=3, classes=15_625)
    with pytest.raises(Refusal, match=r"has 15,625 classes, but its limit is 2 \(--max-classes"):
        rob(client, rounds=50)(attack.Ask(FedAvg(), model), np.zeros(4 * 15_625))


class Bound:
    """A client that is bound by an honest agreement, and what its server sends."""

    def __init__(self, tmp_path: Path, policy: Policy = SAFE) -> None:
        tables = owners(tmp_path, clients=2)
        self.room = Room(tables, tmp_path / "state")
        self.room.clients = {
            name: dataclasses.replace(one, policy=policy) for name, one in self.room.clients.items()
        }
        algorithm, model = PFedMe(lam=5.0, K=3, **QUICK), MLR(l2=0.001)
        self.plan = Plan(algorithm=algorithm, model=model, rounds=4, min_clients=2)
        for one in self.room.clients.values():
            one.pins.begin()
        self.progress = Server(self.plan, self.room, print).begin()
        self.client = self.room.clients["east"]
        self.sha = self.progress.agreement.sha256(self.plan.offer())

    def train(self, t: int, w: np.ndarray | None = None, sha: str | None = None) -> Content:
        """The client's answer to a round."""
        w = to_vectors(self.progress.server)["w"] if w is None else w
        return self.client.train(Content({"agreement": sha or self.sha, "round": t}, {"w": w}))

    def join(self, **changes: Any) -> Content:
        """The client's answer to another agreement."""
        words = self.progress.agreement.words(self.plan.offer()) | changes
        return self.client.join(Content({"agreement": json.loads(json.dumps(words))}, {}))

    def files(self) -> str:
        """A hash of the client's model."""
        model = sorted((self.client.state / "model").iterdir())
        return hashlib.sha256(b"".join(path.read_bytes() for path in model)).hexdigest()


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Bound:
    """For tests in which everything is refused: the client has answered no round."""
    return Bound(tmp_path_factory.mktemp("bound"))


def changed(schema: Words, **changes: Any) -> Words:
    """A schema with the first column, or the labels, changed."""
    first, *rest = schema["columns"]
    own = {key: value for key, value in changes.items() if key != "labels"}
    return {**schema, "columns": [{**first, **own}, *rest], "labels": changes.get("labels", schema["labels"])}


def test_a_round_is_answered_once_and_for_one_w(tmp_path: Path):
    bound = Bound(tmp_path)
    first = bound.train(1)
    model, other = bound.files(), to_vectors(bound.progress.server)["w"] + np.float32(0.1)
    np.testing.assert_array_equal(bound.train(1).arrays["w"], first.arrays["w"])  # a try that is repeated
    for t, w, why in (
        (0, None, "round 1 has passed; it has answered round 2"),
        (1, other, "it has answered round 2 for another w"),
        (4, None, "the plan has no round 4"),
        (-1, None, "the plan has no round -1"),
        (2, other[1:], "what the server sent does not match the agreement"),
        (2, other.astype(np.float64), "what the server sent does not match the agreement"),
        (2, other * np.float32("nan"), "what the server sent does not match the agreement"),
    ):
        with pytest.raises(Refusal, match=why):
            bound.train(t, w)
        assert bound.files() == model
    assert bound.train(2, other).arrays
    assert bound.files() != model
    asked = Content({"agreement": bound.sha, "round": 2, "last": True}, to_vectors(bound.progress.server))
    with pytest.raises(Refusal, match="it has answered round 3 for another w"):
        bound.client.finish(asked)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: {**plan, "seed": 7},
        lambda plan: {**plan, "rounds": 40},
        lambda plan: {**plan, "algorithm": {**plan["algorithm"], "eta": 0.06}},
        lambda plan: {**plan, "algorithm": {**plan["algorithm"], "R": 20}},
        lambda plan: {**plan, "model": {**plan["model"], "l2": 0.05}},
    ],
)
def test_a_plan_is_pinned(change: Callable[[Words], Words], tmp_path: Path):
    bound = Bound(tmp_path)
    bound.train(0)
    model, plan = bound.files(), change(bound.plan.offer())
    with pytest.raises(Refusal, match=r"it was offered the plan .* its owner must restart it"):
        bound.client.agree(Content({"plan": plan}, {}))
    with pytest.raises(Refusal, match="it was offered the plan"):
        bound.join(plan=plan)
    words = bound.progress.agreement.words(plan)
    with pytest.raises(Refusal, match="is bound by the agreement"):
        bound.train(1, sha=sha256(words))
    assert bound.files() == model
    assert bound.train(1).arrays


def test_an_agreement_is_pinned_once_a_round_was_answered(tmp_path: Path):
    bound = Bound(tmp_path)
    schema = bound.progress.agreement.schema.to_json()
    other = changed(schema, mean=schema["columns"][0]["mean"] + 0.1)
    # Before that the others may still change it, as when one of them leaves.
    assert bound.join(schema=other).words["bound"] != bound.sha
    assert bound.join().words["bound"] == bound.sha
    bound.train(0)
    model = bound.files()
    for changes in ({"schema": other}, {"names": ["east"]}, {"names": ["east", "north", "mallory"]}):
        with pytest.raises(Refusal, match="and has answered a round of it"):
            bound.join(**changes)
    bound.client.pins.begin()  # nor does that change when the client is started again
    with pytest.raises(Refusal, match="and has answered a round of it"):
        bound.join(schema=other)
    assert bound.files() == model


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": ["no", "yes", "perhaps"]}, "has 3 classes, but its limit is 2"),
        ({"labels": ["no", "perhaps"]}, "leaves out values of its label"),
        ({"labels": ["no", "no"]}, "leaves out values of its label"),
        ({"labels": [7, "no"]}, "values of the label 'sick' are impossible"),
        ({"scale": 1e-9}, "the agreed scaling of 'age' is far from that of its rows"),
        ({"mean": 1e9}, "the agreed scaling of 'age' is far from that of its rows"),
        ({"scale": 0.0}, "the agreed scaling of 'age' is impossible"),
        ({"scale": "x"}, "the agreed scaling of 'age' is impossible"),
        ({"name": "weight"}, "other columns than its table"),
        ({"kind": "category"}, "other columns than its table"),
        ({"kind": "spell"}, "other columns than its table"),
    ],
)
def test_an_agreement_must_fit_the_table(changes: dict[str, Any], why: str, bound: Bound):
    with pytest.raises(Refusal, match=why):
        bound.join(schema=changed(bound.progress.agreement.schema.to_json(), **changes))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({}, "cannot be read"),
        ({"names": []}, "does not include the client 'east'"),
        ({"names": ["east", "east"]}, "does not include the client 'east'"),
        ({"names": [["east"]]}, "cannot be read"),
        ({"schema": {}}, "cannot be read"),
        ({"schema": None}, "cannot be read"),
        ({"plan": None}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
    ],
)
def test_an_agreement_that_is_none_is_refused(words: Words, why: str, bound: Bound):
    if not words:
        with pytest.raises(Refusal, match=why):
            bound.client.join(Content({}, {}))
        return
    with pytest.raises(Refusal, match=why):
        bound.join(**words)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"algorithms": ("fedavg",)}, "its policy allows fedavg, but not pfedme"),
        ({"min_batch": 17}, "the plan's B is 16, but its limit is 17 (--min-batch)"),
        ({"min_steps": 11}, "the plan's R is 10, but its limit is 11 (--min-steps)"),
        ({"max_step": 0.2}, "the plan's eta times lam is 0.25, but its limit is 0.2 (--max-step)"),
        ({"max_l2": 1e-4}, "the plan's l2 is 0.001, but its limit is 0.0001 (--max-l2)"),
        ({"max_draws": 2.0}, "a round of the plan draws each of its rows more often than its limit of 2"),
        ({"max_rounds": 3}, "the plan's rounds is 4, but its limit is 3 (--max-rounds)"),
        ({"models": ("dnn",)}, "its policy allows the model dnn, but not mlr"),
        ({"approve": "0" * 64}, "its owner has approved the plan 000000000000…, but this is "),
        ({"min_rows": 61}, "fewer training rows than its limit of 61"),
        ({"max_megabytes": 1e-5}, "the model has 12 parameters, above its limit"),
    ],
)
def test_a_limit_holds_at_every_message(limits: dict[str, Any], why: str, bound: Bound):
    strict = dataclasses.replace(bound.client, policy=dataclasses.replace(SAFE, **limits))
    words = bound.progress.agreement.words(bound.plan.offer())
    with pytest.raises(Refusal) as refusal:
        strict.join(Content({"agreement": words}, {}))
    assert why in str(refusal.value)
    assert not (strict.state / "model").exists()


def test_nothing_leaves_before_the_owner_has_approved(tmp_path: Path):
    tables = owners(tmp_path, clients=1)
    own = Room(tables, tmp_path / "state").clients["east"]
    client = dataclasses.replace(own, policy=Policy())
    client.pins.begin()
    plan = Plan(algorithm=FedAvg(), model=MLR()).offer()
    asked = Content({"plan": plan}, {})
    assert client.agree(asked) == Content({"pending": True}, {})
    found = client.pins.offered()
    assert found is not None
    assert (found["sha256"], found["plan"], found["approved"]) == (sha256(plan), plan, False)
    client.pins.approve(sha256(plan))
    assert "numbers" in client.agree(asked).words
    by_hash = dataclasses.replace(client, policy=Policy(approve=sha256(plan)))
    client.pins.begin()
    assert "numbers" in by_hash.agree(asked).words
    with pytest.raises(Refusal, match="its owner has approved the plan"):
        by_hash.agree(Content({"plan": {**plan, "seed": 1}}, {}))


def test_a_version_that_differs_is_noticed_at_both_ends(tmp_path: Path):
    tables = owners(tmp_path, clients=2)
    room = Room(tables, tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=1, join_timeout=5.0)
    with pytest.raises(Refusal, match=r"it has pfedme .*, but the server has 9\.9; both sides"):
        room.clients["east"].agree(Content({"plan": plan.offer() | {"version": "9.9"}}, {}))

    class Old(Room):
        """A room with one client of another version."""

        def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
            replies = super().answers(kind, contents)
            if kind == "agree" and replies["north"].content:
                replies["north"].content.words["version"] = "0.0.1"
            return replies

    found = Server(plan, Old(tables, tmp_path / "state"), print).begin().agreement
    assert found.names == ("east",)
    assert "it has pfedme 0.0.1, but the server has " + __version__ in found.refused["north"]


def test_rows_that_changed_in_the_middle_of_a_run_are_noticed(tmp_path: Path):
    bound = Bound(tmp_path)
    bound.train(0)
    model, path = bound.files(), Path(bound.client.table.path)
    rows = path.read_text()
    path.write_text(rows.replace("yes", "no", 1))
    with pytest.raises(Refusal, match="its rows have changed since the agreement"):
        bound.train(1)
    assert bound.files() == model
    path.write_text(rows)
    assert bound.train(1).arrays


def test_a_client_whose_state_is_lost_is_told_the_agreement_again(tmp_path: Path):
    room = Room(owners(tmp_path, clients=2), tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=3, min_clients=2, min_replies=2)
    said: list[str] = []
    server = Server(plan, room, said.append)
    progress = server.round(server.begin())
    for path in sorted(room.clients["east"].state.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    progress = server.round(progress)
    assert progress.t == 2
    assert any("Round 2: east failed (it has no agreement" in line for line in said)


def test_mini_batches_are_the_clients_secret(tmp_path: Path):
    bound = Bound(tmp_path)
    uploads = [bound.train(0).arrays["w"]]
    (bound.client.state / "agreement.json").unlink()
    bound.join()
    uploads.append(bound.train(0).arrays["w"])
    open_key = dataclasses.replace(SAFE, batch_key="seed")
    own = dataclasses.replace(bound.client, policy=open_key)
    asked = Content({"agreement": bound.sha, "round": 1}, to_vectors(bound.progress.server))
    uploads.append(own.train(asked).arrays["w"])
    assert not np.array_equal(uploads[0], uploads[1])
    assert not np.array_equal(uploads[1], uploads[2])
    cycled = Plan(algorithm=FedAvg(batches="cycled", **QUICK), model=MLR())
    with pytest.raises(Refusal, match="does not draw mini-batches at random"):
        SAFE.check_plan(cycled)
    open_key.check_plan(cycled)


def test_a_policy_beside_the_table_and_options_that_set_it_anew(tmp_path: Path):
    (tmp_path / "policy.toml").write_text('min-rows = 200\nalgorithms = ["fedavg"]\nmax-step = 0.5\n')
    policy = read_policy(tmp_path / "my.csv", {"min_rows": "300", "models": "mlr,dnn"})
    assert (policy.min_rows, policy.algorithms, policy.max_step) == (300, ("fedavg",), 0.5)
    assert policy.models == ("mlr", "dnn")
    for text, why in (
        ("min-rows = 0", "min_rows of .*policy.toml must be at least 1"),
        ("minrows = 3", "There is no option of .* 'minrows'; did you mean 'min_rows'"),
        ('algorithms = ["fedavgg"]', "There is no algorithm 'fedavgg'"),
        ('approve = "yes"', "--approve must be ask, any or the SHA-256"),
        ("min-rows = ", "policy.toml cannot be read"),
    ):
        (tmp_path / "policy.toml").write_text(text)
        with pytest.raises(InputError, match=why):
            read_policy(tmp_path / "my.csv", {})


# --- what the agreement tells


def hospital(folder: Path, n: int = 900) -> Path:
    """A table with names, a rare category, a constant column, a column of zeros and ones, and one with few
    values."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    name = [
        f"{first} {last}" for first, last in zip(rng.integers(0, 60, n), rng.integers(0, 30, n), strict=True)
    ]
    ward = np.array(["a", "b"], object)[rng.integers(0, 2, n)]
    ward[:3] = "isolation"
    frame = pl.DataFrame({
        "name": [f"patient {one}" for one in name], "ward": ward, "clinic": np.full(n, 17.0),
        "smoker": (rng.random(n) < 0.137).astype(int), "age": rng.normal(50, 10, n),
        "biopsy": np.where(np.arange(n) < 3, rng.normal(size=n), np.nan),
        "sick": np.array(["no", "yes"])[rng.integers(0, 2, n)],
    }).with_columns(pl.col("biopsy").fill_nan(None))  # fmt: skip
    frame.write_csv(folder / "north.csv")
    return folder / "north.csv"


def test_the_agreement_tells_no_names_nothing_rare_and_no_exact_count(tmp_path: Path):
    path = hospital(tmp_path)
    table = Table(path=str(path), label="sick", owner="north", impute="mean")
    client = Client(table, tmp_path / "state", policy=SAFE)
    plan = Content({"plan": Plan(algorithm=FedAvg(), model=MLR()).offer()}, {})
    client.pins.begin()
    with pytest.raises(InputError, match=r"Column 'name' .* may identify people\. Please leave it out"):
        client.agree(plan)
    without = dataclasses.replace(client, table=dataclasses.replace(table, drop=("name",)))
    told = json.loads(json.dumps(without.agree(plan).words))
    rows = pl.read_csv(path)
    assert told.pop("version") == __version__
    assert told["categories"] == {"ward": ["a", "b"]}
    assert told["numbers"]["clinic"] == [0, 0.0, 0.0]
    assert told["numbers"]["biopsy"] == [0, 0.0, 0.0]
    count, mean, spread = told["numbers"]["smoker"]
    exact = rows["smoker"].mean()
    assert isinstance(exact, float)
    assert (count % 5, mean, spread**0.5) == (0, pytest.approx(round(mean, 1)), pytest.approx(0.3, abs=0.11))
    assert told["numbers"]["age"][0] == 675
    assert told["classes"] == ["no", "yes"]
    everything = json.dumps(told)
    for hidden in ("patient", "isolation", "17", repr(exact)):
        assert hidden not in everything, hidden
    # The search would find them: without a limit they are told.
    bare = dataclasses.replace(client, policy=dataclasses.replace(SAFE, min_count=1))
    bare.pins.begin()
    (bare.state / "plan.json").unlink()
    spilt = json.dumps(bare.agree(plan).words)
    assert spilt.count("patient") > 400
    assert "isolation" in spilt


def test_a_column_that_nobody_tells_of_is_no_feature(tmp_path: Path):
    tables = owners(tmp_path, clients=2)
    for path in tables.iterdir():
        pl.read_csv(path).with_columns(clinic=pl.lit(1e6)).write_csv(path)
    room = Room(tables, tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=2)
    out = deployed(tmp_path, plan, room)
    assert {line["outcome"] for line in ledger(out)} == {"counted"}
    assert max(float(line["norm"]) for line in ledger(out)) < 10


def test_a_small_table_tells_nothing(tmp_path: Path):
    own = Room(owners(tmp_path, clients=1), tmp_path / "state").clients["east"]
    pl.read_csv(own.table.path)[:60].write_csv(own.table.path)
    with pytest.raises(Refusal, match="fewer training rows than its limit of 50"):
        own.agree(Content({"plan": Plan(algorithm=FedAvg(), model=MLR()).offer()}, {}))


# --- clients that lie to the server


class Lying(Room):
    """A room whose clients tell what they like of their tables."""

    lies: Mapping[str, Callable[[Words], Words]] = {}

    def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
        replies = super().answers(kind, contents)
        for name, lie in self.lies.items():
            if kind == "agree" and name in replies and (content := replies[name].content):
                replies[name] = Reply(Content(lie(content.words), {}))
        return replies


def telling(*moments: object) -> Callable[[Words], Words]:
    """A lie about the age."""
    return lambda words: {**words, "numbers": {**words["numbers"], "age": list(moments)}}


IMPOSSIBLE: dict[str, tuple[Callable[[Words], Words], str]] = {
    "a count of 1e308": (telling(1e308, 50.0, 100.0), "is impossible"),
    "a count that is no integer": (telling(True, 50.0, 100.0), "is impossible"),
    "a mean of 1e30": (telling(60, 1e30, 100.0), "is impossible"),
    "a spread of 1e300": (telling(60, 50.0, 1e300), "is impossible"),
    "a mean that is a text": (telling(60, "x", 1.0), "is impossible"),
    "999 invented classes": (
        lambda words: {**words, "classes": ["no", "yes", *(f"class {k}" for k in range(999))]},
        "is impossible",
    ),
    "900 invented classes": (
        lambda words: {**words, "classes": ["no", "yes", *(f"class {k}" for k in range(900))]},
        "its label has 902 different values, but most others have far fewer",
    ),
    "900 invented categories": (
        lambda words: {**words, "categories": {"ward": [f"ward {k}" for k in range(900)]}},
        "its column 'ward' has 900 different values",
    ),
    "a class name of 50 MB": (
        lambda words: {**words, "classes": ["no", "yes", "x" * 50_000_000]},
        "is impossible",
    ),
    "a third class": (
        lambda words: {**words, "classes": ["no", "yes", "perhaps"], "most_classes": 1000},
        "it has classes of 'sick' that no other client has, and most clients accept no more than 2",
    ),
    "no class": (lambda words: {**words, "classes": []}, "is impossible"),
}  # fmt: skip


PLAIN = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=4)


@pytest.fixture(scope="module")
def without_north(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    """What the others agree on if one client has never been there."""
    folder = tmp_path_factory.mktemp("honest")
    room = Room(owners(folder, without="north"), folder / "state")
    return Server(PLAIN, room, print).begin().agreement.schema


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_who_tells_the_impossible_is_named_and_left_out(name: str, without_north: Schema, tmp_path: Path):
    lie, why = IMPOSSIBLE[name]
    room = Lying(owners(tmp_path), tmp_path / "state")
    room.lies = {"north": lie}
    room.clients = {n: dataclasses.replace(one, policy=SAFE) for n, one in room.clients.items()}
    found = Server(PLAIN, room, print).begin().agreement
    assert found.names == tuple(n for n in NAMES if n != "north")
    assert why in found.refused["north"]
    assert found.schema == without_north


@pytest.mark.slow
def test_who_tells_what_is_far_off_has_no_part_in_the_scaling(tmp_path: Path):
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=1, min_clients=5)
    honest = Server(plan, Room(owners(tmp_path), tmp_path / "honest"), print).begin().agreement
    for lie in (telling(60, 1e9, 100.0), telling(60, 50.0, 1e9), telling(10**9, 1e6, 1e6)):
        room = Lying(tmp_path / "tables", tmp_path / f"state {id(lie)}")
        room.lies = {"north": lie}
        said: list[str] = []
        found = Server(plan, room, said.append).begin().agreement
        assert found.names == NAMES
        assert any(line.startswith("North is left out of the scaling of 'age'") for line in said)
        age, fair = (one.schema.columns[0] for one in (found, honest))
        assert abs(age.mean - fair.mean) < fair.scale
        assert 0.5 < age.scale / fair.scale < 2
    # A count alone, with numbers that could be, moves the scaling by little.
    room = Lying(tmp_path / "tables", tmp_path / "heavy")
    room.lies = {"north": lambda words: telling(10**9, *words["numbers"]["age"][1:])(words)}
    age = Server(plan, room, print).begin().agreement.schema.columns[0]
    assert 0.3 < age.scale / honest.schema.columns[0].scale < 3


def accuracy(federation: Federation, attackers: int, clip: float, *, bad: bool = True) -> float:
    """The shared model's accuracy, in percent, at the honest clients after 60 rounds in which the first ones
    flip their updates and make them three times as long as is usual, if they are `bad`."""
    clients = federation.clients
    model = MLR().build(federation.features, federation.classes)
    simulation = Simulation(FedAvg(eta=0.1), model, federation, cohort=clients)
    state, norms = simulation.start(), list[float]()
    like = jax.eval_shape(model.init, jax.random.key(0))
    for t in range(60):
        w = np.asarray(state.server.ravel())
        uploads = np.array(simulation.update(state, np.arange(clients)).upload.ravel(1))
        lengths = np.linalg.norm(uploads, axis=1)
        if bad:
            uploads[:attackers] *= -3 * np.median(lengths[attackers:]) / lengths[:attackers, None]
        lengths = np.linalg.norm(uploads.astype(float), axis=1)
        parts = {str(k): Part(t + 1, 1, str(k), "counted", norm=float(n)) for k, n in enumerate(lengths)}
        sent = {str(k): judge.Upload(Params(upload), 1) for k, upload in enumerate(uploads)}
        parts, sent = judge.clipped(parts, sent, norms, clip=clip, max_norm_ratio=10.0)
        norms += lengths.tolist()
        mean = w + np.mean([upload.tree.tree for upload in sent.values()], axis=0, dtype=float)
        state = state._replace(t=t + 1, server=like.like(jnp.asarray(mean, jnp.float32)))
    return 100 * simulation.evaluate(state, np.arange(attackers, clients))[0].entry()["global"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "attackers", "within"), [(4, 1, 2), (5, 2, 4)])
def test_flipped_updates_of_three_times_the_usual_length_do_little(
    clients: int, attackers: int, within: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for k, name in enumerate(NAMES[:clients]):
        live_table(k).write_csv(tmp_path / f"{name}.csv")
    federation = Table(path=str(tmp_path), label="sick").load()
    honest = accuracy(federation, attackers, 0.0, bad=False)
    clipped, bare = (accuracy(federation, attackers, clip) for clip in (1.0, 0.0))
    with capsys.disabled():
        print(
            f"\n{attackers} of {clients} flip their updates: {clipped:.1f} %, without clipping {bare:.1f} %, "
            f"without attackers {honest:.1f} %"
        )
    assert clipped > honest - within
    assert bare < honest - 15


class Listening(Room):
    """A room in which is written down what clients are told of their last parts."""

    def __init__(self, tables: Path, state: Path) -> None:
        super().__init__(tables, state)
        self.news: list[tuple[str, Words]] = []

    def answers(self, kind: Kind, contents: Mapping[str, Content]) -> dict[str, Reply]:
        self.news += [(name, c.words["news"]) for name, c in contents.items() if "news" in c.words]
        return super().answers(kind, contents)


def test_what_was_clipped_or_dropped_is_told_to_its_client_and_stands_in_the_ledger(tmp_path: Path):
    room = Listening(owners(tmp_path), tmp_path / "state")
    room.tricks["north"] = lambda content: Content(
        content.words, {"w": content.arrays["w"] * np.float32(1e9)}
    )
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=2, min_clients=5)
    lines = ledger(deployed(tmp_path, plan, room))
    first = {line["client"]: line for line in lines if line["round"] == "1"}
    norms = {name: float(line["norm"]) for name, line in first.items()}
    median = sorted(norms.values())[2]
    for name, line in first.items():
        if name == "north":
            assert (line["outcome"], line["clipped"]) == ("dropped", "")
        else:
            assert line["outcome"] == "counted"
            assert line["clipped"] == (f"{median:.6g}" if norms[name] > median else "")
    told = {name: news for name, news in room.news if news["round"] == 1}
    assert {name: news["outcome"] for name, news in told.items()} == {
        name: line["outcome"] for name, line in first.items()
    }
    assert "far beyond the usual" in told["north"]["reason"]
    assert [n for n, news in told.items() if news["clipped"]] == [n for n in told if first[n]["clipped"]]


def test_scores_that_are_impossible_do_not_cost_the_run_its_report(tmp_path: Path):
    room = Room(owners(tmp_path, clients=3), tmp_path / "state")
    sums = {"loss": 1.0, "rows": True, "right": 100_000}
    room.scores["north"] = {
        "n_train": True, "n_test": True, "info": {"inner_residual": 0.0, "inner_steps": 1.0},
        "test": dict.fromkeys(("global", "local", "personal"), sums), "train": {},
    }  # fmt: skip
    plan = Plan(algorithm=PFedMe(**QUICK), model=MLR(), rounds=1, min_clients=3)
    out = deployed(tmp_path, plan, room)
    assert "north shares impossible scores" in (out / "server.log").read_text()
    assert (out / "report.html").exists()
    assert json.loads((out / "record.json").read_text())["final"]["global"]["accuracy"] <= 1


def test_a_run_that_fails_tells_its_clients(tmp_path: Path):
    tables = owners(tmp_path, clients=2)
    for path in tables.iterdir():
        pl.read_csv(path).with_columns(sick=pl.lit("no")).write_csv(path)
    room = Room(tables, tmp_path / "state")
    with pytest.raises(InputError, match="there is nothing to learn"):
        deployed(tmp_path, Plan(algorithm=FedAvg(**QUICK), model=MLR(), min_clients=2), room)
    for name in room.clients:
        told = json.loads((tmp_path / "state" / name / "refused.json").read_text())
        assert told["over"] is True
        assert "there is nothing to learn" in told["reason"]


def test_the_ledger_grows_by_what_is_new_and_a_round_that_was_not_saved_leaves_nothing(tmp_path: Path):
    room = Room(owners(tmp_path, clients=2), tmp_path / "state")
    plan = Plan(algorithm=FedAvg(**QUICK), model=MLR(), rounds=4, min_clients=2)
    for client in room.clients.values():
        client.pins.begin()
    (tmp_path / "run").mkdir()
    record = DeploymentRecord(plan, tmp_path / "run", "pfedme server")
    server = Server(plan, room, print)
    progress = record.save(server.begin())
    path, sizes = tmp_path / "run/ledger.csv", []
    record.write_record("running", progress)
    for _ in range(2):
        progress = record.save(server.round(progress))
        assert progress.ledger == ()
        sizes.append(path.stat().st_size)
    whole = path.read_text()
    with path.open("a") as file:
        file.write("3,1,east,counted,,,,,,\n")  # and then the server was killed
    again = DeploymentRecord(plan, tmp_path / "run", "pfedme server").restore(server)
    assert again is not None
    assert path.read_text() == whole
    assert (again.t, again.norms, dict(again.lates)) == (2, progress.norms, dict(progress.lates))
    assert whole.count("\n") == 5
    checkpoint = (tmp_path / "run/checkpoint.safetensors").stat().st_size
    big = dataclasses.replace(progress, ledger=tuple(Part(3, k, "east", "late") for k in range(5000)))
    record.save(big)
    assert (tmp_path / "run/checkpoint.safetensors").stat().st_size < checkpoint + 100


def test_a_ledger_is_safe_in_a_spreadsheet():
    text = ledger_csv([Part(1, 1, "=cmd|' /C calc'!A0", "failed", "@SUM(1)"), Part(1, 1, "-x", "late", "+1")])
    for cell in ("'=cmd|' /C calc'!A0", "'@SUM(1)", "'-x", "'+1"):
        assert f",{cell}," in text


def test_progress_has_what_a_round_needs_of_the_ledger():
    progress = Progress(
        0, np.zeros(1, np.float32), agreements.Agreement(Schema((), "", None, "regression"), (), {})
    )
    for t in range(40):
        progress = progress.noting([Part(t, 1, "a", "counted", norm=float(t)), Part(t, 1, "b", "late")])
    assert (len(progress.norms), progress.norms[-1], progress.lates) == (30, 39.0, {"a": 0, "b": 40})
