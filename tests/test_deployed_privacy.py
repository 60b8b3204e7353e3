"""Differential privacy that a deployed client enforces: its noise, its budget, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from test_audit_log import LoggedRoom
from test_deploy import NAMES, QUICK, deployed, ledger, owners, w_of

from pfedme.algorithms import Algorithm, Ditto, FedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.data.fitting import Moments
from pfedme.data.table import Table
from pfedme.deploy import client as client_module
from pfedme.deploy.answer import answer
from pfedme.deploy.audit_log import AuditLog, check_log
from pfedme.deploy.budget import Budget, report
from pfedme.deploy.client import REFUSED, Client
from pfedme.deploy.config import config_of
from pfedme.deploy.config import plan_of as plan_of_config
from pfedme.deploy.console import told_lines
from pfedme.deploy.declared import noisy
from pfedme.deploy.messages import Content, Refusal, Words
from pfedme.deploy.plan import Plan, offered
from pfedme.deploy.policy import Policy, read_policy
from pfedme.deploy.private import REPLY, Releases, calibrated
from pfedme.deploy.server import Server
from pfedme.errors import InputError
from pfedme.export import load
from pfedme.privacy.units import Rows
from pfedme.report.html.document import document
from pfedme.report.html.read import read
from pfedme.runs.run import Run
from pfedme.training.execute import execute

accounting = pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")

UNIFORM = FedAvg(**QUICK, aggregation="uniform")
PRIVATE = Plan(
    algorithm=UNIFORM, model=MLR(), rounds=3, min_clients=2, clip=0.0, privacy=Rows(epsilon=3.0, delta=1e-4)
)
LAX: dict[str, Any] = {"max_delta": 1e-3}
SITE = Policy(approve="any", dp="rows", max_epsilon=3.0, **LAX)


def room(tmp_path: Path, *, clients: int = 2, policy: Policy = SITE, name: str = "state") -> LoggedRoom:
    """Clients with these limits."""
    tables = tmp_path / "tables"
    made = LoggedRoom(
        tables if tables.exists() else owners(tmp_path, clients=clients), tmp_path / name, share=False
    )
    made.clients = {who: dataclasses.replace(client, policy=policy) for who, client in made.clients.items()}
    return made


def uploads(here: LoggedRoom, who: str = "east") -> list[np.ndarray]:
    """What a client has uploaded."""
    return [content.arrays["w"] for kind, name, content in here.sent if (kind, name) == ("train", who)]


def spent(client: Client) -> tuple[Words, ...]:
    """What a client has spent, line by line."""
    return Budget.of(check_log(client.state)).lines


# --- limits of the policy


@pytest.mark.parametrize(
    ("changed", "plan", "reason"),
    [
        ({"secure_aggregation": "required"}, {}, "it requires secure aggregation, which this version"),
        ({}, {"privacy": None}, "the plan has no differential privacy, which it requires"),
        ({"max_delta": 1e-5}, {}, "the plan's delta is 0.0001, but its limit is 1e-05 (--max-delta)"),
        ({"min_cohort": 4}, {"cohort": 3}, "the plan draws 3 clients for a round, but its limit is 4"),
        ({"min_cohort": 11}, {}, "the plan draws 10 clients for a round, but its limit is 11"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused(
    changed: dict[str, Any], plan: dict[str, Any], reason: str, tmp_path: Path
):
    client = room(tmp_path, policy=dataclasses.replace(SITE, **changed)).clients["east"]
    words = json.loads(json.dumps(dataclasses.replace(PRIVATE, **plan).offer()))
    with pytest.raises(Refusal, match=re.escape(reason)):
        client.agree(Content({"plan": words}, {}))
    fine = dataclasses.replace(client, policy=SITE)
    if plan.get("privacy", True):
        assert "label" in fine.agree(Content({"plan": words}, {})).words


def test_an_agreement_among_too_few_clients_is_refused(tmp_path: Path):
    here = room(tmp_path, policy=dataclasses.replace(SITE, min_cohort=3))
    told = list[str]()
    server = Server(dataclasses.replace(PRIVATE, join_timeout=0.1), here, told.append)
    with pytest.raises(Exception, match="of at least 2 clients came"):
        server.begin()
    assert any("the agreement is among 2 clients, but its limit is 3 (--min-cohort)" in line for line in told)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dp": "rows"}, "--dp rows needs the largest epsilon"),
        ({"max_epsilon": 3.0}, "--max-epsilon limits nothing"),
        ({"dp": "rows", "max_epsilon": 0.0}, "must be positive"),
        ({"dp": "rows", "max_epsilon": -1.0}, "must be positive"),
        ({"dp": "rows", "max_epsilon": float("nan")}, "max_epsilon"),
        ({"dp": "rows", "max_epsilon": float("inf")}, "max_epsilon"),
        ({"dp": "rows", "max_epsilon": 1.0, "max_delta": 1.0}, "must be below 1"),
        ({"dp": "patients"}, "patients"),
        ({"min_cohort": 0}, "at least 1"),
        ({"secure_aggregation": "yes"}, "secure_aggregation"),
    ],
)
def test_a_policy_that_makes_no_sense_is_an_error(fields: dict[str, Any], error: str, tmp_path: Path):
    with pytest.raises(InputError, match=error):
        read_policy(tmp_path / "x.csv", fields)


def test_a_policy_file_has_the_new_limits(tmp_path: Path):
    text = 'dp = "rows"\nmax-epsilon = 2\nmax-delta = 1e-6\nmin-cohort = 4\nschema = "told.toml"\n'
    (tmp_path / "policy.toml").write_text(text)
    found = read_policy(tmp_path / "x.csv", {"max_epsilon": 1.5})
    assert (found.dp, found.max_epsilon, found.max_delta, found.min_cohort) == ("rows", 1.5, 1e-6, 4)
    assert found.schema == str(tmp_path / "told.toml")


# --- plans


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"algorithm": FedAvg(**QUICK)}, "--aggregation samples makes clients send the number of their rows"),
        ({"eval_every": 2}, "--eval-every"),
        ({"algorithm": PFedMe(**QUICK, nu=1e-3)}, "--nu"),
        ({"privacy": Rows(epsilon=0.0)}, "epsilon"),
        ({"privacy": Rows(epsilon=float("nan"))}, "epsilon"),
        ({"privacy": Rows(epsilon=1.0, delta=1.0)}, "delta"),
    ],
)
def test_a_plan_that_cannot_be_private_is_an_error(plan: dict[str, Any], error: str):
    with pytest.raises(InputError, match=error):
        dataclasses.replace(PRIVATE, **plan).checked()
    with pytest.raises(Refusal):
        offered(json.loads(json.dumps(dataclasses.replace(PRIVATE, **plan).offer())))


def test_a_private_plan_is_offered_and_configured_with_all_that_it_says():
    words = json.loads(json.dumps(PRIVATE.offer()))
    assert words["privacy"] == {"unit": "rows", "epsilon": 3.0, "delta": 1e-4, "clip": 1.0}
    assert offered(words).privacy == PRIVATE.privacy
    assert plan_of_config(config_of(PRIVATE)) == PRIVATE
    assert "privacy" not in dataclasses.replace(PRIVATE, privacy=None).offer()
    for changed in ({"unit": "patients"}, {"epsilon": "3"}, {"clip": -1.0}, {"noise": 0.1}):
        with pytest.raises(Refusal):
            offered({**words, "privacy": {**words["privacy"], **changed}})


def test_noise_is_that_of_the_smaller_epsilon_and_reveals_no_number_of_rows():
    own, theirs = (calibrated(PRIVATE, dataclasses.replace(SITE, max_epsilon=e), 60) for e in (1.0, 9.0))
    assert own is not None
    assert theirs is not None
    assert (own["spec"]["epsilon"], theirs["spec"]["epsilon"]) == (1.0, 3.0)
    assert own["noise"] > theirs["noise"]
    assert own["epsilon"] <= 1
    assert own["batches"] == QUICK["R"] * (PRIVATE.rounds + 1)
    with pytest.raises(Refusal, match="fewer training rows than a mini-batch") as few:
        calibrated(PRIVATE, SITE, 13)
    with pytest.raises(Refusal, match="delta is not below 1 divided by") as many:
        calibrated(PRIVATE, SITE, 10_001)
    assert "13" not in str(few.value) + str(many.value)


# --- noise


@pytest.mark.parametrize(
    "algorithm",
    [UNIFORM, pytest.param(Ditto(**QUICK, aggregation="uniform"), marks=pytest.mark.slow)],
    ids=lambda a: a.name,
)
def test_with_the_key_of_a_simulation_it_is_the_simulation(
    algorithm: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So all that differs in a deployed run is where randomness comes from."""
    monkeypatch.setattr(client_module, "fresh_key", lambda: jax.random.key(5))
    here = room(tmp_path)
    plan = dataclasses.replace(PRIVATE, algorithm=algorithm, seed=5)
    out = deployed(tmp_path, plan, here)
    run = Run(
        algorithm=algorithm, data=Table(path=str(tmp_path / "tables"), label="sick"), model=MLR(), rounds=3,
        cohort=2, seed=5, eval_every=3, privacy=PRIVATE.privacy,
    )  # fmt: skip
    simulated = execute(run, tmp_path / "simulated")
    w = np.asarray(simulated.w)
    np.testing.assert_allclose(w_of(out), w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


def one_round(client: Client, plan: Plan, w: np.ndarray | None = None) -> Content:
    """A client's reply to the first round of a plan under an honest agreement with it alone."""
    from pfedme.deploy import agreement as agreements

    client.pins.begin()
    words = json.loads(json.dumps(plan.offer()))
    told = client.agree(Content({"plan": words}, {})).words
    found = agreements.agree({client.table.owner: json.loads(json.dumps(told))})
    bound = client.join(Content({"agreement": found.words(words)}, {})).words["bound"]
    size = (found.schema.features + 1) * len(found.schema.labels)
    w = np.zeros(size, np.float32) if w is None else w
    return client.train(Content({"agreement": bound, "round": 0, "counted": 0}, {"w": w}))


def test_noise_has_the_calibrated_deviation_and_two_runs_with_one_seed_have_independent_noise(tmp_path: Path):
    """With a tiny step, w hardly moves within a round, so that an upload is −η Σ_r g_r with
    g_r = (clipped sum + N(0, z²c²I))/B. Differences between two replies are free of the mean gradient: up to
    the sampling of rows, they are N(0, 2 R (η z c/B)² I)."""
    algorithm = dataclasses.replace(UNIFORM, eta=1e-6, R=10)
    plan = dataclasses.replace(
        PRIVATE, algorithm=algorithm, min_clients=1, privacy=Rows(epsilon=0.05, delta=1e-4)
    )
    draws, noise = [], 0.0
    for k in range(12):
        client = room(tmp_path, clients=1, name=f"state-{k}").clients["east"]
        draws.append(one_round(client, plan).arrays["w"].astype(np.float64))
        noise = json.loads((client.state / "agreement.json").read_text())["noise"]["noise"]
    eta, R, B = 1e-6, 10, QUICK["B"]
    unit = eta * noise / B * np.sqrt(R)
    pairs = (np.array(draws[0::2]) - np.array(draws[1::2])).ravel() / (unit * np.sqrt(2))
    assert stats.kstest(pairs, "norm").pvalue > 1e-3
    assert np.var(pairs) == pytest.approx(1, abs=5 * np.sqrt(2 / pairs.size) + 0.02)
    first, second = np.array(draws[:6]).ravel(), np.array(draws[6:]).ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(first.size)
    assert len({draw.tobytes() for draw in draws}) == 12


def test_nothing_private_is_drawn_from_the_seed_or_the_secret(tmp_path: Path):
    """Two clients with the same rows, seed, plan, name and secret give different uploads; without privacy and
    with batches from the seed, equal ones."""
    policies = [dataclasses.replace(SITE, batch_key=key) for key in ("seed", "secret")]
    for policy in policies:
        clients = [
            room(tmp_path, clients=1, policy=policy, name=f"{policy.batch_key}-{k}").clients["east"]
            for k in (1, 2)
        ]
        plan = dataclasses.replace(PRIVATE, min_clients=1)
        first, second = (one_round(client, plan).arrays["w"] for client in clients)
        assert not np.any(first == second)
    policy = Policy(approve="any", batch_key="seed")
    plain = dataclasses.replace(PRIVATE, min_clients=1, privacy=None)
    clients = [room(tmp_path, policy=policy, name=f"plain-{k}").clients["east"] for k in (1, 2)]
    first, second = (one_round(client, plain).arrays["w"] for client in clients)
    assert np.array_equal(first, second)


def test_what_noise_is_drawn_from_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = []

    def noted() -> jax.Array:
        keys.append(np.arange(8, dtype=np.uint8) + 200)
        return jax.random.wrap_key_data(jax.numpy.asarray(keys[-1].view(np.uint32)))

    monkeypatch.setattr(client_module, "fresh_key", noted)
    client = room(tmp_path, clients=1).clients["east"]
    one_round(client, dataclasses.replace(PRIVATE, min_clients=1))
    assert keys
    raw = keys[0].tobytes()
    for path in client.state.rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            assert raw not in text
            assert raw.hex().encode() not in text


# --- the budget


def test_a_run_costs_at_most_its_epsilon_and_says_so_in_its_log_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    here = room(tmp_path)
    out = deployed(tmp_path, PRIVATE, here)
    assert [line["outcome"] for line in ledger(out)] == ["counted"] * 6
    client = here.clients["east"]
    lines = spent(client)
    assert [(line["kind"], line["round"]) for line in lines] == [
        ("train", 1), ("train", 2), ("train", 3), ("finish", 4),
    ]  # fmt: skip
    totals = [line["total"] for line in lines]
    assert totals == sorted(totals)
    assert 0.9 * 3.0 < report(client.state)["runs"][0]["epsilon"] <= 3.0
    np.testing.assert_allclose(np.cumsum([line["epsilon"] for line in lines]), totals)
    sent = [line["epsilon"] for line in check_log(client.state).lines if line["what"] == "sent"]
    assert sent == [None, None, *(line["epsilon"] for line in lines)]
    for kind, _, content in here.sent:
        assert set(content.words) <= {"name"} or kind in ("agree", "join")
    record = json.loads((out / "record.json").read_text())["deployment"]
    assert (record["privacy"]["epsilon"], record["privacy"]["simulated"]) == (3.0, False)
    assert "the number of rows of each client" in record["privacy"]["not_covered"]
    assert record["agreed_from"] == dict.fromkeys(NAMES[:2], "rows, with minimum counts")
    (shown,) = document(read([out]))["privacy"]
    assert "ε is at most 3" in shown["claim"]
    assert "seed" not in shown["claim"]
    assert ["told before training", "rows, with minimum counts: east, north"] in shown["facts"]
    capsys.readouterr()
    assert main(["budget", str(client.state)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^\w{16}  .*Z +3 +1 ", said, re.MULTILINE)
    assert main(["budget", str(client.state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["rounds"] == 3
    assert load(client.state / "model").origin["round"] == 3


def test_the_budget_lasts_over_runs_and_the_round_that_would_overspend_is_refused(tmp_path: Path):
    """In the first run three rounds and the models cost ε = 3; with 4.5 in all, the second ends early."""
    policy = dataclasses.replace(SITE, max_epsilon=4.5, max_delta=1e-4)
    here = room(tmp_path, policy=policy)
    deployed(tmp_path, PRIVATE, here, name="first")
    client = here.clients["east"]
    once = report(client.state)
    assert once["epsilon"] <= 3.0
    for other in here.clients:
        if other != "east":
            here.clients[other] = dataclasses.replace(
                here.clients[other], policy=dataclasses.replace(policy, max_epsilon=100.0)
            )
    before = len(here.sent)
    plan = dataclasses.replace(PRIVATE, rounds=4, min_replies=1, privacy=Rows(epsilon=4.0, delta=1e-4))
    out = deployed(tmp_path, plan, here, name="second")
    lines = [line for line in ledger(out) if line["client"] == "east"]
    done = [line for line in lines if line["outcome"] == "counted"]
    assert 0 < len(done) < 4
    assert "its budget is spent: this would bring epsilon over all its runs to" in lines[-1]["reason"]
    found = report(client.state)
    assert len(found["runs"]) == 2
    assert found["runs"][1]["rounds"] == len(done)
    assert once["epsilon"] < found["epsilon"] <= 4.5
    over = [c for _, who, c in here.sent[before:] if who == "east" and "error" in c.words]
    assert over
    assert all(content.arrays == {} for content in over)
    refusals = [line for line in check_log(client.state).lines if line["what"] == "refused"]
    assert "its budget is spent" in refusals[0]["reason"]
    word = json.loads((client.state / REFUSED).read_text())
    assert (word["own"], "its limit of 4.5 (--max-epsilon)" in word["reason"]) == (True, True)
    assert json.loads((out / "record.json").read_text())["status"] == "finished"


def test_a_client_without_any_budget_left_refuses_before_it_is_asked(tmp_path: Path):
    here = room(tmp_path, policy=dataclasses.replace(SITE, max_epsilon=3.0, max_delta=1e-4))
    deployed(tmp_path, PRIVATE, here, name="first")
    told = list[str]()
    for client in here.clients.values():
        client.pins.begin()
    server = Server(dataclasses.replace(PRIVATE, seed=1, join_timeout=0.1), here, told.append)
    with pytest.raises(Exception, match="of at least 2 clients came"):
        server.begin()
    assert any("even one round would exceed its limit of epsilon 3" in line for line in told)


def test_budgets_compose_as_the_accountant_says():
    """The ε of lines is that of the library's own composition of them, at δ without the share for cut
    batches."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    lines = tuple(
        {"run": run, "kind": "train", "round": t, "q": q, "z": z, "steps": 10, "delta": 1e-5}
        for run, q, z in (("a", 0.05, 1.0), ("b", 0.1, 2.0))
        for t in range(3)
    )
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for line in lines:
        accountant.compose(PoissonSampledDpEvent(line["q"], GaussianDpEvent(line["z"])), line["steps"])
    want = accountant.get_epsilon(1e-5 - 0.01 * 2e-5)
    assert Budget(lines).epsilon(1e-5) == pytest.approx(want, rel=0.01)


# --- a second release


def rounds_of(client: Client, plan: Plan) -> Callable[..., Content]:
    """Asks a bound client for rounds."""
    first = one_round(client, plan)
    sha = json.loads((client.state / "agreement.json").read_text())["sha256"]

    def ask(t: int, w: np.ndarray | None = None, **words: Any) -> Content:
        w = np.zeros_like(first.arrays["w"]) if w is None else w
        asked = Content({"agreement": sha, "round": t, "counted": t, **words}, {"w": w})
        return answer(client, "train", lambda: asked, Client.train)

    return ask


def test_a_repeated_round_gets_the_same_bytes_and_costs_nothing(tmp_path: Path):
    client = room(tmp_path, clients=1).clients["east"]
    ask = rounds_of(client, dataclasses.replace(PRIVATE, min_clients=1))
    first = ask(0).arrays["w"]
    again = ask(0, news={"round": 1, "outcome": "failed", "reason": ""}).arrays["w"]
    assert np.array_equal(first, again)
    assert [(line["kind"], line["round"]) for line in spent(client)] == [("train", 1)]
    last = [line for line in check_log(client.state).lines if line["what"] in ("repeated", "sent")][-2:]
    assert [(line["what"], line["epsilon"]) for line in last] == [("repeated", 0.0), ("sent", 0.0)]
    second = ask(1)
    assert not np.any(second.arrays["w"] == first)
    for t, w, reason in (
        (1, np.ones_like(first), "it has answered round 2 for another w"),
        (0, None, "round 1 has passed"),
    ):
        reply = ask(t, w)
        assert (reply.arrays, reason in reply.words["error"]) == ({}, True)
    (client.state / REPLY).unlink()
    reply = ask(1)
    assert "it has answered round 2 before, and that reply is lost" in reply.words["error"]
    assert reply.arrays == {}
    assert len(spent(client)) == 2


class Killed(BaseException):
    """The end of a process at some point."""


@pytest.mark.parametrize("place", ["_store", "_charge", "reply"])
def test_whenever_it_is_killed_what_left_was_counted_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed after the reply was stored, after it was charged, or after its line and before it left."""
    client = room(tmp_path, clients=1).clients["east"]
    ask = rounds_of(client, dataclasses.replace(PRIVATE, min_clients=1))
    ask(0)
    owner = AuditLog if place == "reply" else Releases
    real = getattr(owner, place)

    def killed(*args: Any, **words: Any) -> None:
        real(*args, **words)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, killed)
        with pytest.raises(Killed):
            ask(1)
    stored = safetensors_bytes(client)
    charged = len(spent(client))
    assert charged == (1 if place == "_store" else 2)
    # No model is there for use before it was charged.
    assert load(client.state / "model").origin["round"] == (1 if place == "reply" else 0)
    reply = ask(1)
    assert (safetensors_bytes(client) == stored) == (place != "_store")
    assert len(spent(client)) == 2
    assert reply.arrays["w"].tobytes() in safetensors_bytes(client)


def safetensors_bytes(client: Client) -> bytes:
    """The stored reply."""
    return (client.state / REPLY).read_bytes()


# --- a server that lowers the noise


@pytest.mark.parametrize(
    "changed",
    [
        {"privacy": None},
        {"privacy": Rows(epsilon=30.0, delta=1e-4)},
        {"privacy": Rows(epsilon=3.0, delta=1e-4, clip=1e-3)},
        {"privacy": Rows(epsilon=3.0, delta=1e-3)},
        {"algorithm": dataclasses.replace(UNIFORM, R=11)},
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_a_server_that_lowers_the_noise_is_refused(
    changed: dict[str, Any], required: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In the middle of a run, whatever the policy says."""
    policy = SITE if required else Policy(approve="any", **LAX)
    client = room(tmp_path, clients=1, policy=policy).clients["east"]
    plan = dataclasses.replace(PRIVATE, min_clients=1)
    ask = rounds_of(client, plan)
    pinned = json.loads((client.state / "agreement.json").read_text())["agreement"]
    other = {**pinned, "plan": json.loads(json.dumps(dataclasses.replace(plan, **changed).offer()))}
    for kind, work, words in (
        ("agree", Client.agree, {"plan": other["plan"]}),
        ("join", Client.join, {"agreement": other}),
    ):
        reply = answer(client, kind, lambda words=words: Content(words, {}), work)
        assert set(reply.words) == {"name", "error"}
        assert reply.arrays == {}
        assert check_log(client.state).lines[-1]["what"] == "refused"
        assert "Refused what the server asked for" in capsys.readouterr().out
    assert "error" not in ask(0).words
    assert len(spent(client)) == 1


def test_models_are_made_only_in_the_end_and_scores_are_not_shared(tmp_path: Path):
    client = room(tmp_path, clients=1).clients["east"]
    rounds_of(client, dataclasses.replace(PRIVATE, min_clients=1))
    sha = json.loads((client.state / "agreement.json").read_text())["sha256"]
    w = {"w": np.zeros(len(load(client.state / "model").theta.ravel()), np.float32)}

    def finish(*, last: bool) -> Content:
        asked = Content({"agreement": sha, "round": 3, "counted": 1, "last": last}, w)
        return answer(client, "finish", lambda: asked, Client.finish)

    assert "only at the end" in finish(last=False).words["error"]
    assert finish(last=True).words == {"name": "east"}
    theta = np.asarray(load(client.state / "model").theta.ravel())
    assert finish(last=True).words == {"name": "east"}
    assert np.array_equal(theta, np.asarray(load(client.state / "model").theta.ravel()))
    assert [line["kind"] for line in spent(client)] == ["train", "finish"]
    sharing = dataclasses.replace(client, share_metrics=True, state=tmp_path / "sharing")
    with pytest.raises(Refusal, match="does not cover the exact scores"):
        one_round(sharing, dataclasses.replace(PRIVATE, min_clients=1))


def test_a_changed_log_ends_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    client = room(tmp_path, clients=1).clients["east"]
    ask = rounds_of(client, dataclasses.replace(PRIVATE, min_clients=1))
    path = client.state / "audit.jsonl"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"steps":10', b'"steps":01'))
    reply = ask(1)
    assert (set(reply.words), reply.arrays) == ({"name", "error"}, {})
    assert "was changed" in reply.words["error"]
    assert main(["budget", str(client.state)]) == 1
    assert "was changed" in capsys.readouterr().out
    path.write_bytes(raw)
    assert "error" not in ask(1).words


# --- the agreement from a file

TOLD = """
classes = ["no", "yes"]
numbers.age = {mean = 50, deviation = 20}
numbers.dose = {mean = 1e6, deviation = 5}
categories.ward = ["a", "b", "c"]
"""


def test_what_is_told_can_come_from_a_file_and_then_does_not_depend_on_rows(tmp_path: Path):
    (tmp_path / "told.toml").write_text(TOLD)
    policy = dataclasses.replace(SITE, schema=str(tmp_path / "told.toml"))
    here = room(tmp_path, policy=policy)
    out = deployed(tmp_path, PRIVATE, here)
    told = [content.words for kind, _, content in here.sent if kind == "agree"]
    (first, second) = ({k: v for k, v in words.items() if k != "name"} for words in told)
    assert first == second
    assert first["source"] == "schema file"
    assert first["numbers"] == {"age": [1000, 50.0, 400.0], "dose": [1000, 1e6, 25.0]}
    record = json.loads((out / "record.json").read_text())["deployment"]
    assert record["agreed_from"] == dict.fromkeys(NAMES[:2], "schema file")
    said = [line for line in check_log(here.clients["east"].state).lines if line["what"] == "agreement"]
    assert [line["source"] for line in said] == ["schema file"]
    assert "Told by their owners' schema files, not by rows: east, north." in (out / "server.log").read_text()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('classes = ["no", "yes"]', 'classes = ["no"]', "classes lacks 'yes', which occurs in the table"),
        ("numbers.dose", "numbers.dosis", "must have the columns"),
        ("deviation = 20", "deviation = 0", "numbers.age must be such as"),
        ("mean = 50", 'mean = "x"', "numbers.age must be such as"),
        ('["a", "b", "c"]', "3", "categories.ward must be a list of texts"),
        ("classes", "rows = 0\nclasses", "rows must be a whole number"),
        ("classes", "extra = 1\nclasses", "has 'extra'"),
        ("classes", "classes =", "cannot be read"),
        ("mean = 50, deviation = 20", "lowest = 0, highest = 120", "add epsilon, their share of the budget"),
        ("mean = 50, deviation = 20", "lowest = 9, highest = 9", "numbers.age must be such as"),
        ("mean = 50, deviation = 20", "lowest = 0, highest = inf", "numbers.age must be such as"),
        ("mean = 50, deviation = 20", "lowest = 0, mean = 50", "numbers.age must be such as"),
        ("classes", "epsilon = 0\nclasses", "epsilon must be a positive finite number"),
        ("classes", "epsilon = -1\nclasses", "epsilon must be a positive finite number"),
        ("classes", "epsilon = nan\nclasses", "epsilon must be a positive finite number"),
        ("classes", 'epsilon = "1"\nclasses', "epsilon must be a positive finite number"),
        ("classes", "epsilon = 3\nclasses", "epsilon 3 leaves nothing of the limit of 3"),
    ],
)
def test_a_file_that_does_not_fit_the_table_is_an_error(old: str, new: str, error: str, tmp_path: Path):
    (tmp_path / "told.toml").write_text(TOLD.replace(old, new, 1))
    client = room(tmp_path, policy=dataclasses.replace(SITE, schema=str(tmp_path / "told.toml"))).clients[
        "east"
    ]
    with pytest.raises(InputError, match=re.escape(error)):
        _ = client.told


# --- the agreement with a share of the budget

RANGES = "epsilon = 0.5\n" + TOLD.replace("{mean = 50, deviation = 20}", "{lowest = 20, highest = 60}")


def sharing(tmp_path: Path, text: str = RANGES, **limits: Any) -> LoggedRoom:
    """Clients that tell what a file says, and some of it with noise."""
    (tmp_path / "told.toml").write_text(text)
    return room(tmp_path, policy=dataclasses.replace(SITE, schema=str(tmp_path / "told.toml"), **limits))


def offer_of(plan: Plan) -> Content:
    """The message that offers a plan."""
    return Content({"plan": json.loads(json.dumps(plan.offer()))}, {})


def test_without_noise_what_is_told_is_the_mean_and_deviation_within_the_range(tmp_path: Path):
    client = sharing(tmp_path).clients["east"]
    declared = client.declared
    assert declared is not None
    own: Any = client.table.tell(5, declared.ranges).numbers
    (pair,) = noisy(own, declared.ranges, 0.0).values()
    federation = client.table.load()
    schema = federation.schema
    assert schema is not None
    k, column = next((k, c) for k, c in enumerate(schema.columns) if c.name == "age")
    ages = column.mean + column.scale * federation.x[: int(federation.n_train[0]), k].astype(np.float64)
    cut = np.clip(ages, 20, 60)
    assert 0 < (cut != ages).mean() < 1
    assert pair == pytest.approx((cut.mean(), cut.std()), rel=1e-4)


def test_noise_of_the_sums_has_the_deviation_of_their_sensitivity():
    """With values in the middle, n times the mean's place in its range is n e_1/(n + e_0) ≈ e_1."""
    n, z = 1e9, 2.0
    ranges: Any = {"a": (-1.0, 1.0), "b": (4.0, 6.0)}
    own: Any = {"a": Moments(n, 0.0, 0.25), "b": Moments(n, 5.0, 0.25)}
    found = np.array([list(noisy(own, ranges, z).values()) for _ in range(4000)])
    noise = n * (found[:, :, 0] - [0.0, 5.0]) / (z * math.sqrt(3 * 2))
    assert noise.var() == pytest.approx(1, abs=5 * math.sqrt(2 / noise.size))
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    squares = n * (found[:, :, 1] ** 2 - 0.25) / (z * math.sqrt(3 * 2))
    # e_2 − e_0/4, because the sum of squares is divided by the noisy count.
    assert squares.var() == pytest.approx(1 + 1 / 16, rel=0.1)


@given(st.lists(st.floats(-2, 2), max_size=20), st.floats(-1e9, 1e9))
def test_one_row_changes_the_sums_by_at_most_the_root_of_three(values: list[float], other: float):
    def sums(values: list[float]) -> np.ndarray:
        n, mean, spread = Moments.of(np.clip(np.array(values), -1, 1))
        return np.array([n, n * mean, n * (spread + mean**2)])

    assert np.linalg.norm(sums([*values, other]) - sums(values)) <= math.sqrt(3) + 1e-9


def test_a_share_of_the_budget_is_charged_once_and_training_has_the_rest(tmp_path: Path):
    here = sharing(tmp_path, max_delta=1e-4)
    out = deployed(tmp_path, PRIVATE, here)
    client = here.clients["east"]
    lines = spent(client)
    assert [line["kind"] for line in lines] == ["agreement", "train", "train", "train", "finish"]
    assert 0.49 < lines[0]["total"] <= 0.5
    assert 2 < lines[-1]["total"] <= 3.0
    chain = check_log(client.state).lines
    source = "schema file, and rows with noise"
    assert [line["source"] for line in chain if line["what"] == "agreement"] == [source]
    assert next(line["epsilon"] for line in chain if line["what"] == "sent") == lines[0]["epsilon"]
    record = json.loads((out / "record.json").read_text())["deployment"]
    assert record["agreed_from"] == dict.fromkeys(NAMES[:2], source)
    assert "and by rows with noise: east, north." in (out / "server.log").read_text()
    first, second = (
        json.loads(json.dumps(content.words["numbers"])) for kind, _, content in here.sent if kind == "agree"
    )
    assert first["age"] != second["age"]
    assert first["dose"] == second["dose"] == [1000, 1e6, 25.0]
    assert first["age"][0] == 1000

    # The next run is told the same, at no further cost; from another file, it is computed anew.
    client = dataclasses.replace(client, policy=dataclasses.replace(client.policy, max_epsilon=50.0))
    client.pins.begin()
    asked = offer_of(PRIVATE)
    assert list(client.agree(asked).words["numbers"]["age"]) == first["age"]
    assert len(spent(client)) == len(lines)
    (tmp_path / "told.toml").write_text(RANGES.replace("highest = 60", "highest = 61"))
    assert list(client.agree(asked).words["numbers"]["age"]) != first["age"]
    assert len(spent(client)) == len(lines) + 1


def test_nothing_is_computed_before_approval_or_without_a_budget(tmp_path: Path):
    client = sharing(tmp_path, approve="ask").clients["east"]
    assert client.told.numbers["age"].values == 0
    assert client.agree(offer_of(PRIVATE)).words == {"pending": True}
    assert client.told.numbers["age"].values == 0
    lines = "\n".join(told_lines(client.told, client.policy, client.declared))
    assert "numbers 'age': mean and standard deviation, with noise" in lines
    assert "costs epsilon 0.5 of the budget" in lines
    with pytest.raises(InputError, match="epsilon is a share of a budget, and there is none"):
        _ = sharing(tmp_path, dp="none", max_epsilon=None).clients["east"].told
    with pytest.raises(InputError, match=r"--max-delta 0\.1 is not below 1 divided by"):
        _ = sharing(tmp_path, max_delta=0.1).clients["east"].told


def test_what_was_computed_but_not_paid_for_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = sharing(tmp_path).clients["east"]

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "append_in_turn", killed)
        with pytest.raises(Killed):
            client.agree(offer_of(PRIVATE))
    path = client.state / "told.json"
    before = path.read_bytes()
    assert client.told.numbers["age"].values == 0
    client.agree(offer_of(PRIVATE))
    assert path.read_bytes() != before
    assert [line["kind"] for line in spent(client)] == ["agreement"]
