"""Differential privacy of clients in deployed runs: what the server draws and adds, and what clients shorten,
require and refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_audit_log import LoggedRoom
from test_deploy import QUICK, deployed, ledger, owners, w_of

from pfedme.algorithms import FedAvg, FedAvgM
from pfedme.algorithms.aggregate import FedPAQ
from pfedme.core.models import MLR
from pfedme.data.table import Table
from pfedme.deploy import central
from pfedme.deploy.audit_log import check_log
from pfedme.deploy.central import Central
from pfedme.deploy.config import config_of
from pfedme.deploy.config import plan_of as plan_of_config
from pfedme.deploy.messages import Content, Refusal
from pfedme.deploy.plan import Plan, offered
from pfedme.deploy.policy import Policy, read_policy
from pfedme.engine.exchange import server_key
from pfedme.errors import InputError, RunError
from pfedme.privacy.clients import ClientPlan
from pfedme.privacy.units import Clients, Rows
from pfedme.report.html.page import report
from pfedme.runs.run import Run
from pfedme.training.execute import execute

pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")

UNIFORM = FedAvg(**QUICK, aggregation="uniform")
PRIVATE = Plan(
    algorithm=UNIFORM, model=MLR(), rounds=3, min_clients=3, seed=5,
    privacy=Clients(epsilon=3.0, delta=1e-2, clip=0.05),
)  # fmt: skip
SITE = Policy(approve="any", batch_key="seed", dp="clients", max_epsilon=3.0, max_delta=0.1)


def room(tmp_path: Path, *, clients: int = 3, policy: Policy = SITE) -> LoggedRoom:
    """Clients with these limits."""
    made = LoggedRoom(owners(tmp_path, clients=clients), tmp_path / "state", share=False)
    made.clients = {who: dataclasses.replace(client, policy=policy) for who, client in made.clients.items()}
    return made


def uploads(here: LoggedRoom) -> list[np.ndarray]:
    """What clients have uploaded."""
    return [content.arrays["w"] for kind, _, content in here.sent if kind == "train"]


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise from the seed, as in a simulation."""
    rounds = itertools.count()
    monkeypatch.setattr(central, "fresh_key", lambda: server_key(jax.random.key(5), next(rounds)))


def test_with_the_noise_of_a_simulation_it_is_the_simulation(tmp_path: Path, seeded: None):
    """So all that differs in a deployed run with everyone is where randomness comes from."""
    here = room(tmp_path)
    out = deployed(tmp_path, PRIVATE, here)
    run = Run(
        algorithm=UNIFORM, data=Table(path=str(tmp_path / "tables"), label="sick"), model=MLR(), rounds=3,
        cohort=3, seed=5, eval_every=3, privacy=PRIVATE.privacy,
    )  # fmt: skip
    w = np.asarray(execute(run, tmp_path / "simulated").w)
    np.testing.assert_allclose(w_of(out), w, rtol=1e-4, atol=1e-4 * np.abs(w).max())
    lengths = [float(np.linalg.norm(sent)) for sent in uploads(here)]
    assert max(lengths) <= 0.05
    assert min(lengths) == pytest.approx(0.05, rel=1e-4)  # all of them were longer


def test_two_runs_with_one_seed_have_different_noise_and_the_record_says_what_is_claimed(tmp_path: Path):
    ends, here = [], room(tmp_path)
    for name in ("one", "two"):
        out = deployed(tmp_path, PRIVATE, here, name=name)
        ends.append(w_of(out))
    assert not np.any(ends[0] == ends[1])
    record = json.loads((tmp_path / "two" / "record.json").read_text())
    claim = record["deployment"]["privacy"]
    assert (claim["unit"], claim["simulated"], claim["clip"]) == ("clients", False, 0.05)
    assert claim["spent"] <= 3
    assert any("who took part in which round" in line for line in claim["not_covered"])
    lines = ledger(tmp_path / "two")
    assert {line["outcome"] for line in lines} == {"counted"}
    assert {line["without"] for line in lines} == {""}  # no leave-one-out steps
    report([tmp_path / "two"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Differential privacy of clients" in page
    assert '"parts":[]' in re.sub(r"\s", "", page)
    assert "Noise drowns the signal" in (tmp_path / "two" / "server.log").read_text()


@pytest.mark.slow
def test_clients_shorten_what_they_send_and_log_it(tmp_path: Path):
    here = room(tmp_path)
    deployed(tmp_path, dataclasses.replace(PRIVATE, algorithm=FedAvgM(**QUICK, aggregation="uniform")), here)
    for client in here.clients.values():
        lines = [line for line in check_log(client.state).lines if line["what"] == "shortened"]
        assert [line["round"] for line in lines] == [1, 2, 3]
        assert all(line["longest"] == 0.05 < line["length"] for line in lines)


def test_an_upload_that_was_not_shortened_is_left_out_whatever_the_others_send(tmp_path: Path):
    here = room(tmp_path)
    work = here.work

    def longer(client: Any, kind: Any) -> Any:
        def made(asked: Content) -> Content:
            content = work(client, kind)(asked)
            if kind == "train" and client.table.owner == "east":
                return Content(content.words, {name: 1.01 * a for name, a in content.arrays.items()})
            return content

        return made

    here.work = longer  # type: ignore[method-assign]
    out = deployed(tmp_path, PRIVATE, here)
    found = {(line["client"], line["outcome"]) for line in ledger(out)}
    assert found == {("east", "dropped"), ("north", "counted"), ("south", "counted")}
    assert "was not shortened to 0.05" in next(x["reason"] for x in ledger(out) if x["client"] == "east")


# --- cohorts


def drawing(clients: int, cohort: int, most: int) -> Central:
    spec = Clients(epsilon=1.0)
    plan = ClientPlan(spec, clients, cohort, 1, 1, 1.0, 1.0, most)
    return Central(plan, tuple(map(str, range(clients))), None)


def test_cohorts_are_drawn_by_coins_that_no_seed_gives():
    made = drawing(50, 10, 50)
    cohorts = [made.draw() for _ in range(400)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(50 * 0.2 * 0.8 / 400)
    assert sizes.var() == pytest.approx(8, rel=5 * np.sqrt(2 / 400))
    assert len({tuple(cohort) for cohort in cohorts}) > 390
    assert drawing(3, 3, 3).draw() == ["0", "1", "2"]
    assert max(len(drawing(50, 10, 5).draw()) for _ in range(100)) == 5


def test_rounds_without_anyone_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cohorts = iter([[], ["east"], ["north", "south"], []])
    monkeypatch.setattr(Central, "draw", lambda _: next(cohorts))
    here = room(tmp_path)
    plan = dataclasses.replace(PRIVATE, cohort=1, rounds=4)
    out = deployed(tmp_path, plan, here)
    took = [(line["round"], line["client"]) for line in ledger(out)]
    assert took == [("2", "east"), ("3", "north"), ("3", "south")]
    assert np.isfinite(w_of(out)).all()


def test_a_repeated_round_asks_the_same_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cohorts = iter([["east", "north"], ["east"], ["south"]])
    monkeypatch.setattr(Central, "draw", lambda _: next(cohorts))
    here = room(tmp_path)
    tries = itertools.count()
    work = here.work

    def failing(client: Any, kind: Any) -> Any:
        def made(asked: Content) -> Content:
            if kind == "train" and next(tries) < 2:
                raise Refusal("not now")
            return work(client, kind)(asked)

        return made

    here.work = failing  # type: ignore[method-assign]
    out = deployed(tmp_path, dataclasses.replace(PRIVATE, cohort=1), here)
    lines = [(line["round"], line["attempt"], line["client"]) for line in ledger(out)]
    assert lines[:4] == [("1", "1", "east"), ("1", "1", "north"), ("1", "2", "east"), ("1", "2", "north")]


# --- limits and refusals


@pytest.mark.parametrize(
    ("changed", "plan", "reason"),
    [
        ({}, {"privacy": None}, "the plan has no differential privacy, which it requires (--dp clients)"),
        ({}, {"privacy": Rows(epsilon=1.0)}, "is that of rows, but it requires that of clients"),
        ({"dp": "rows"}, {}, "is that of clients, but it requires that of rows"),
        ({"max_epsilon": 2.0}, {}, "the plan's epsilon is 3, but its limit is 2 (--max-epsilon)"),
        ({"max_delta": 1e-5}, {}, "the plan's delta is 0.01, but its limit is 1e-05 (--max-delta)"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused(
    changed: dict[str, Any], plan: dict[str, Any], reason: str, tmp_path: Path
):
    policy = dataclasses.replace(SITE, **changed)
    with pytest.raises(Refusal, match=re.escape(reason)):
        policy.check_plan(dataclasses.replace(PRIVATE, **plan))
    SITE.check_plan(PRIVATE)


def test_a_policy_needs_the_largest_epsilon(tmp_path: Path):
    with pytest.raises(InputError, match="--dp clients needs the largest epsilon of a plan"):
        read_policy(tmp_path / "x.csv", {"dp": "clients"})


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"algorithm": FedAvg(**QUICK)}, "use --aggregation uniform"),
        ({"algorithm": dataclasses.replace(UNIFORM, codec=FedPAQ())}, "--codec fedpaq changes the length"),
        ({"privacy": Clients(epsilon=1.0, clip=0.0)}, "--dp-clip adaptive is for simulations"),
        ({"privacy": Clients(epsilon=0.0)}, "epsilon"),
        ({"privacy": Clients(epsilon=float("nan"))}, "epsilon"),
        ({"privacy": Clients(epsilon=1.0, delta=1.0)}, "delta"),
    ],
)
def test_a_plan_that_cannot_be_private_is_an_error(plan: dict[str, Any], error: str):
    with pytest.raises(InputError, match=error):
        dataclasses.replace(PRIVATE, **plan).checked()
    with pytest.raises(Refusal):
        offered(json.loads(json.dumps(dataclasses.replace(PRIVATE, **plan).offer())))


def test_a_private_plan_is_offered_and_configured_with_all_that_it_says():
    words = json.loads(json.dumps(PRIVATE.offer()))
    assert words["privacy"] == {"unit": "clients", "epsilon": 3.0, "delta": 1e-2, "clip": 0.05}
    assert offered(words) == dataclasses.replace(PRIVATE)
    assert plan_of_config(config_of(PRIVATE)) == PRIVATE


def test_a_delta_that_is_too_large_for_so_few_clients_stops_the_run(tmp_path: Path):
    plan = dataclasses.replace(PRIVATE, privacy=Clients(epsilon=3.0, delta=0.5))
    here = room(tmp_path, policy=dataclasses.replace(SITE, max_delta=0.9))
    with pytest.raises((InputError, RunError), match=r"choose --delta below 0\.3"):
        deployed(tmp_path, plan, here)
