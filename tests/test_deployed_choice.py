"""The choice of a deployed client is the one that a simulation makes with the same rows kept out of
training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_deploy import QUICK, STRICT, Room, deployed, ledger, owners, w_of

from pfedme.algorithms import IFCA, Algorithm, Ditto, FedAvg, FedPer, LabelPrior, PFedMe
from pfedme.core.models import DNN, MLR, Description
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.table import Table
from pfedme.deploy import choosing
from pfedme.deploy.choosing import choose, sentences
from pfedme.deploy.client import Client
from pfedme.deploy.ending import BEGAN_WITHOUT, FILE, choice_text, parse_choice
from pfedme.deploy.plan import Plan
from pfedme.deploy.progress import Stopped
from pfedme.engine.choices import Line, Personalize, Start, for_all, personalize
from pfedme.engine.label_shift import frequencies
from pfedme.engine.personalized import Personalized
from pfedme.engine.simulate import Simulation
from pfedme.errors import Diverged, InputError
from pfedme.export import load
from pfedme.personalization.lines import alone_recipe
from pfedme.runs.run import Run

HOW = Personalize(folds=3, steps=20, eta=0.05, pooled=0.0, small=0)
ROUNDS, SEED, BUDGET = 3, 5, 12


@pytest.fixture(autouse=True)
def short_training_alone(monkeypatch: pytest.MonkeyPatch):
    """Clients spend a few rounds on the model that they train alone."""
    monkeypatch.setattr(Run, "budget", BUDGET)


def choosers(
    folder: Path, *, how: Personalize | None = HOW, quantity: bool = False, least: int = 20, clients: int = 5
) -> Room:
    """Clients that choose their models."""
    room = Room(owners(folder, quantity=quantity, clients=clients), folder / "state")
    for name, client in room.clients.items():
        policy = dataclasses.replace(client.policy, min_rows=least)
        room.clients[name] = dataclasses.replace(client, personalize=how, policy=policy)
    return room


def plan_for(algorithm: Algorithm, model: Description | None = None, clients: int = 5, **other: Any) -> Plan:
    return Plan(
        algorithm=algorithm, model=model or MLR(), rounds=ROUNDS, seed=SEED, min_clients=clients, clip=0.0,
        **other,
    )  # fmt: skip


def simulated(tables: Path, algorithm: Algorithm, model: Description) -> tuple[Federation, Personalized]:
    """The choice of all clients at once, whose shared models have not seen the first part of their rows."""
    data = Table(path=str(tables), label="sick")
    whole = Run(algorithm=algorithm, data=data, model=model, rounds=ROUNDS, seed=SEED).prepare()[1]
    federation, made = whole.federation, whole.model
    held = federation.hold_out(0, HOW.folds)
    part = Simulation(algorithm, made, held, cohort=federation.clients, seed=SEED)
    state, finite = part.advance(part.start(), ROUNDS)
    assert finite

    def personal(rows: Federation) -> Params:
        found = (whole if rows is federation else part).answer(state)[0].personal
        assert found is not None
        return found

    lines = []
    if (w := part.shared(state)) is not None:
        known = frequencies(held).mean(axis=0) if isinstance(algorithm, LabelPrior) else None
        lines.append(Line("global", lambda rows: Start(for_all(w, rows.clients), known)))
    if isinstance(algorithm, IFCA):
        lines.append(Line("cluster", lambda rows: Start(personal(rows))))
    elif algorithm.name in ("ditto", "fedper"):
        lines.append(Line(algorithm.name, lambda rows: Start(personal(rows)), path=False))
    every = range(federation.clients)
    recipes = [alone_recipe(made, federation.take([i]), SEED, BUDGET)[0] for i in every]

    def alone(rows: Federation) -> Params:
        models = [recipe.personal(rows.take([i])) for i, recipe in enumerate(recipes)]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *models)

    lam = algorithm.lam if isinstance(algorithm, PFedMe) else None
    return federation, personalize(HOW, made, federation, lines, alone, seed=SEED, given=lam)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "model", "quantity"),
    [
        (LabelPrior(**QUICK), MLR(), False),
        pytest.param(FedAvg(**QUICK), MLR(), True, marks=pytest.mark.slow),
        pytest.param(IFCA(clusters=2, warmup=1, **QUICK), MLR(), False, marks=pytest.mark.slow),
        pytest.param(Ditto(lam=1.0, **QUICK), MLR(), True, marks=pytest.mark.slow),
        pytest.param(PFedMe(lam=5.0, K=3, alpha=0.01, **QUICK), MLR(), False, marks=pytest.mark.slow),
        pytest.param(FedPer(**QUICK), DNN(hidden=(4,)), False, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_deployed_clients_choose_what_they_choose_in_a_simulation(
    algorithm: Algorithm, model: Description, quantity: bool, tmp_path: Path
):
    many = 3 if isinstance(algorithm, IFCA) else 2
    room = choosers(tmp_path, quantity=quantity, clients=many)
    deployed(tmp_path, plan_for(algorithm, model, clients=many), room)
    federation, want = simulated(tmp_path / "tables", algorithm, model)
    assert federation.names == tuple(room.clients)
    theta, choices = np.asarray(want.theta.ravel(1)), set()
    for i, client in enumerate(room.clients.values()):
        choose(client)
        got = json.loads((client.state / "choice.json").read_text())
        assert [(c["name"], c["label"]) for c in got["candidates"]] == [
            (c.name, c.label) for c in want.candidates
        ]
        scores = np.array([c["score"] for c in got["candidates"]])
        np.testing.assert_allclose(scores, want.score[i], atol=2e-4)
        chosen = want.candidates[want.choice[i]]
        assert (got["choice"], got["name"]) == (chosen.label, chosen.name)
        assert got["rows"] == federation.n_train[i] // HOW.folds
        mine = load(client.state / "model")
        assert (mine.origin["which"], mine.origin["choice"]) == ("recommended", chosen.label)
        np.testing.assert_allclose(mine.theta.ravel(), theta[i], atol=1e-5 * max(1, np.abs(theta[i]).max()))
        if not quantity:  # R² of one client has the spread of its own labels
            for name, value in got["test"].items():
                assert value == pytest.approx(want.own(name)[i])
            gain, half = want.gain(want.of("alone"))
            told = got["gain"]["alone"]
            assert [told[k] for k in ("gain", "low", "high")] == pytest.approx(
                [gain[i], gain[i] - half[i], gain[i] + half[i]]
            )
        choices.add(chosen.label)
        assert not (client.state / FILE).exists()
        assert choose(client) is None, "there is nothing left to choose"


def test_the_server_learns_nothing_of_the_choice(tmp_path: Path):
    sent = []
    for how in (None, HOW):
        folder = tmp_path / str(how is None)
        folder.mkdir()
        room = choosers(folder, how=how, clients=2)
        plan = plan_for(FedAvg(aggregation="samples", **QUICK), clients=2, eval_every=1)
        out = deployed(folder, plan, room)
        assert {line["rows"] for line in ledger(out)} == {"60"}
        sent.append([(kind, name, _shape(told.words), sorted(told.arrays)) for kind, name, told in room.sent])
    assert sent[0] == sent[1]


def _shape(words: Any) -> Any:
    """JSON values without those that depend on a model."""
    if isinstance(words, dict):
        return {k: _shape(v) for k, v in words.items() if k not in ("loss", "right", "bound", "info")}
    return words


def test_a_client_that_was_stopped_chooses_later_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    room = choosers(tmp_path, clients=2)
    deployed(tmp_path, plan_for(LabelPrior(**QUICK), clients=2), room)
    client = room.clients["east"]
    assert load(client.state / "model").origin["which"] == "personal"

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(choosing, "personalize", stopped)
        with pytest.raises(KeyboardInterrupt):
            choose(client)
    assert load(client.state / "model").origin["which"] == "personal"
    assert not (client.state / "choice.json").exists()
    client.pins.begin()  # as `pfedme client` does
    first = choose(client)
    assert first
    assert load(client.state / "model").origin["which"] == "recommended"

    def diverged(*_: object, **__: object) -> None:
        raise Diverged("alone diverged in round 3.")

    other = room.clients["north"]
    monkeypatch.setattr(choosing, "personalize", diverged)
    words = choose(other)
    assert words is not None
    assert sentences(words) == [
        "No model was chosen: alone diverged in round 3; the algorithm's model is kept."
    ]
    assert load(other.state / "model").origin["which"] == "personal"


@pytest.mark.slow
def test_a_choice_needs_the_rows_of_the_run(tmp_path: Path):
    room = choosers(tmp_path, clients=2)
    deployed(tmp_path, plan_for(FedAvg(**QUICK), clients=2), room)
    client = room.clients["east"]
    path = Path(client.table.path)
    rows = path.read_text()
    path.write_text(rows + rows.splitlines()[-1] + "\n")
    with pytest.raises(InputError, match="rows have changed since the run"):
        choose(client)
    path.write_text(rows)
    assert choose(client)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Ditto(lam=1.0, **QUICK)], ids=["ditto"])
def test_what_is_kept_stays_kept_when_clients_and_server_are_restarted(algorithm: Algorithm, tmp_path: Path):
    """A client that is missing stops the run; it comes back with other options, which do not count now."""
    plan = Plan(algorithm=algorithm, model=MLR(), seed=SEED, clip=0.0, **STRICT)
    calm = choosers(tmp_path)
    deployed(tmp_path, plan, calm, name="calm")
    folder = tmp_path / "again"
    folder.mkdir()
    room = choosers(folder)
    room.tricks["west"] = lambda _: (room.gone.add("west"), None)[1]
    with pytest.raises(Stopped):
        deployed(folder, plan, room)
    room.tricks, room.gone = {}, set()
    for name, how in (("west", None), ("north", dataclasses.replace(HOW, folds=7))):
        room.clients[name] = dataclasses.replace(room.clients[name], personalize=how)
        room.clients[name].pins.begin()
    deployed(folder, plan, room, resume=True)
    for name in ("west", "north"):
        first, later = choose(calm.clients[name]), choose(room.clients[name])
        assert first == later
        assert first
        assert first["rows"] == 20
        assert first["candidates"][-2]["name"] == "ditto"


def refusing(folder: Path, how: Personalize, least: int = 20) -> list[str]:
    """What a client says that takes part but cannot choose."""
    folder.mkdir()
    room = choosers(folder, how=how, least=least, clients=2)
    out = deployed(folder, plan_for(FedAvg(**QUICK), clients=2), room)
    assert {line["outcome"] for line in ledger(out)} == {"counted"}
    client = room.clients["east"]
    said = sentences(choose(client) or {})
    assert json.loads((client.state / "choice.json").read_text())["choice"] is None
    assert load(client.state / "model").origin["which"] == "local"
    return said


def test_a_client_with_too_few_rows_takes_part_with_all_of_them(tmp_path: Path):
    plain = choosers(tmp_path, how=None, clients=2)
    want = w_of(deployed(tmp_path, plan_for(FedAvg(**QUICK), clients=2), plain, name="plain"))
    many = dataclasses.replace(HOW, folds=61)
    (few,) = refusing(tmp_path / "few", many)
    assert few == (
        "No model was chosen: 60 training rows are too few to keep one of 61 parts for the choice."
    )
    (limit,) = refusing(tmp_path / "limit", HOW, least=50)
    assert "fewer training rows than its limit of 50 (--min-rows)" in limit
    for name in ("few", "limit"):
        np.testing.assert_array_equal(w_of(tmp_path / name / "deployed"), want)


def test_a_run_that_began_without_a_choice_has_none(tmp_path: Path):
    room = choosers(tmp_path, how=None, clients=2)
    plan = Plan(
        algorithm=FedAvg(**QUICK), model=MLR(), clip=0.0, **{**STRICT, "min_clients": 2, "min_replies": 2}
    )
    room.tricks["north"] = lambda _: (room.gone.add("north"), None)[1]
    with pytest.raises(Stopped):
        deployed(tmp_path, plan, room)
    room.tricks, room.gone = {}, set()
    client = dataclasses.replace(room.clients["north"], personalize=HOW)
    room.clients["north"] = client
    deployed(tmp_path, plan, room, resume=True)
    assert sentences(choose(client) or {}) == [f"No model was chosen: {BEGAN_WITHOUT}."]
    assert choose(room.clients["east"]) is None
    assert not (room.clients["east"].state / "choice.json").exists()


@pytest.mark.slow
def test_a_client_without_test_rows_chooses_too(tmp_path: Path):
    room = choosers(tmp_path, clients=2)
    for name, client in room.clients.items():
        table = dataclasses.replace(client.table, train=1.0)
        room.clients[name] = dataclasses.replace(client, table=table)
    deployed(tmp_path, plan_for(FedAvg(**QUICK), clients=2), room)
    words = choose(room.clients["east"])
    assert words
    assert words["test_rows"] == 0
    assert set(words["test"].values()) == {None}
    said = sentences(words)
    assert len(said) == 2
    assert said[0].startswith("Chosen: ")
    assert "label frequencies are not known here" in said[1]


def test_options_of_a_choice_that_only_a_simulation_has_are_refused():
    with pytest.raises(InputError, match="pooled=5 is for simulations"):
        parse_choice("auto:pooled=5")
    with pytest.raises(InputError, match="small=10 is for simulations"):
        parse_choice("auto:small=10")
    with pytest.raises(InputError, match="folds"):
        parse_choice("auto:folds=1")
    assert parse_choice(choice_text(HOW)) == HOW
    assert parse_choice("auto") == Personalize(pooled=0.0, small=0)
    assert parse_choice(None) is None


def test_a_damaged_file_names_its_cure(tmp_path: Path):
    room = choosers(tmp_path, clients=2)
    client: Client = room.clients["east"]
    client.state.mkdir(parents=True)
    (client.state / FILE).write_bytes(b"nothing")
    with pytest.raises(InputError, match="remove it to keep the algorithm's model"):
        choose(client)
