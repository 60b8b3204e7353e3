"""Labels that are numbers: squared loss, RMSE and R² against closed forms and plain NumPy."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from laws import (
    FEATURES,
    PAPERS,
    RAGGED,
    assert_close,
    double_precision,
    flat,
    held_out,
    problem,
    start_at,
    there,
    tiny,
    train_rows,
)
from oracles import Rows, network_logits, with_one
from stops import stop_at

from pfedme.algorithms import Algorithm, Alone, FedAvg, PerFedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import MODELS, Model, Network
from pfedme.core.problem import Loss
from pfedme.core.prox import descend, prox
from pfedme.core.spec import build
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.table import Table
from pfedme.engine.choices import (
    Line,
    Personalize,
    Start,
    candidates,
    choose,
    for_all,
    personalize,
    row_score,
    with_own_lambdas,
)
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.engine.path import lambda_path, own_steps
from pfedme.engine.personalized import Candidate
from pfedme.engine.simulate import Simulation
from pfedme.engine.store import Store
from pfedme.errors import InputError
from pfedme.personalization.finished import summary
from pfedme.report.describe import describe
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.execute import execute
from pfedme.training.execution import Progress
from pfedme.training.pilot import with_l2

every_algorithm = pytest.mark.parametrize(
    "cls",
    [
        pytest.param(cls, marks=[pytest.mark.slow] * (name not in ("pfedme", "alone")))
        for name, cls in PAPERS.items()
    ],
    ids=PAPERS,
)
L2 = 0.1


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def federation(
    sizes: Sequence[tuple[int, int]] = RAGGED, *, seed: int = 0, dtype: type = np.float32
) -> Federation:
    """Clients of different sizes, each with a line of its own and noise around it."""
    rng = np.random.default_rng(seed)
    n_train, n_test = np.array(sizes).T
    owner = np.repeat(np.arange(len(sizes)), n_train + n_test)
    x = rng.normal(size=(len(owner), FEATURES))
    slope, height = 1 + 0.5 * rng.normal(size=(len(sizes), FEATURES)), rng.normal(size=len(sizes))
    y = (x * slope[owner]).sum(axis=1) + height[owner] + 0.1 * rng.normal(size=len(owner))
    return Federation(
        x=x.astype(dtype), y=y.astype(dtype), n_train=n_train, n_test=n_test, classes=0,
        ids=np.arange(len(sizes), dtype=np.uint32),
    ).checked()  # fmt: skip


def ridge(l2: float = L2) -> Network:
    return Network(features=FEATURES, l2=l2)


def quadratic(rows: Rows, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """H and c of the loss ½ θᵀHθ − cᵀθ + constant: mean of ½ ((x, 1)·θ − y)², and l2/2 ‖θ‖²."""
    x = with_one(rows.x)
    return x.T @ x / len(x) + l2 * np.eye(x.shape[1]), x.T @ rows.y / len(x)


def steps(A: np.ndarray, c: np.ndarray, start: np.ndarray, size: float, many: int) -> np.ndarray:
    """Where `many` gradient steps on ½ θᵀAθ − cᵀθ lead: θ* + (I − size A)^many (start − θ*)."""
    end = np.linalg.solve(A, c)
    return end + np.linalg.matrix_power(np.eye(len(c)) - size * A, many) @ (start - end)


# --- Training against closed forms -------------------------------------------------------------------


def test_alone_goes_straight_to_the_ridge_solution_of_each_clients_rows():
    with double_precision():
        fed, w = federation(dtype=np.float64), normal(1, FEATURES + 1)
        sim = Simulation(Alone(R=40, B=0, eta=0.2, l2="model"), ridge(), fed, cohort=1)
        state = start_at(sim, w)
        for many in (40, 80):
            state, _ = sim.advance(state, 1)
            for theta, rows in zip(flat(state.clients, True), train_rows(fed), strict=True):
                H, c = quadratic(rows, L2)
                np.testing.assert_allclose(theta, steps(H, c, w, 0.2, many), rtol=1e-9, atol=1e-11)
        state, _ = sim.advance(state, 60)
        for theta, rows in zip(flat(state.clients, True), train_rows(fed), strict=True):
            np.testing.assert_allclose(theta, np.linalg.solve(*quadratic(rows, L2)), rtol=1e-7, atol=1e-9)


def test_a_clients_own_l2_is_on_its_weights_alone():
    """∇f(θ) + l2 (W, 0) = 0: ridge regression with a bias that is free."""
    with double_precision():
        fed = federation(dtype=np.float64)
        sim = Simulation(Alone(R=300, B=0, eta=0.2), ridge(0.0), fed, cohort=1)
        strengths = np.array([0.01, 0.1, 1.0, 3.0, 0.3])
        state, _ = sim.advance(with_l2(start_at(sim, normal(1, FEATURES + 1)), strengths), 10)
        for theta, rows, l2 in zip(flat(state.clients[0], True), train_rows(fed), strengths, strict=True):
            H, c = quadratic(rows, 0.0)
            want = np.linalg.solve(H + l2 * np.diag([1.0] * FEATURES + [0.0]), c)
            np.testing.assert_allclose(theta, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nu", [None, 1e-24])
def test_pfedmes_personal_model_is_a_linear_solve(nu: float | None):
    """θ = (H + λI)⁻¹ (c + λw), or K steps towards it; w_i = w − ηλ (w − θ)."""
    lam, alpha, eta, K = 2.0, 0.05, 0.03, 7
    with double_precision():
        fed, w = federation(dtype=np.float64), normal(1, FEATURES + 1)
        algorithm = PFedMe(lam=lam, alpha=alpha, eta=eta, K=K, nu=nu, R=1, B=0)
        sim = Simulation(algorithm, ridge(), fed, cohort=1)
        models, _ = sim.answer(start_at(sim, w))
        for i, rows in enumerate(train_rows(fed)):
            H, c = quadratic(rows, L2)
            A, b = H + lam * np.eye(len(w)), c + lam * w
            want = np.linalg.solve(A, b) if nu else steps(A, b, w, alpha, K)
            np.testing.assert_allclose(flat(models.personal, True)[i], want, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(
                flat(models.local, True)[i], w - eta * lam * (w - want), rtol=1e-8, atol=1e-10
            )


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_a_round_of_fedavg_is_the_mean_of_closed_forms(aggregation: Any):
    with double_precision():
        fed, w = federation(dtype=np.float64), normal(1, FEATURES + 1)
        algorithm = FedAvg(R=9, B=0, eta=0.1, beta=1.0, aggregation=aggregation)
        sim = Simulation(algorithm, ridge(), fed, cohort=fed.clients)
        state, _ = sim.advance(start_at(sim, w), 1)
        weights = fed.n_train if aggregation == "samples" else None
        own = [steps(*quadratic(rows, L2), w, 0.1, 9) for rows in train_rows(fed)]
        want = np.average(own, axis=0, weights=weights)
        np.testing.assert_allclose(flat(state.server), want, rtol=1e-9, atol=1e-11)


def test_per_fedavgs_step_has_the_hessian():
    """∇F(w) = (I − αH)(H (w − α∇f(w)) − c), and the personal model is w − α∇f(w)."""
    alpha, eta = 0.1, 0.05
    with double_precision():
        fed, w = federation(dtype=np.float64), normal(1, FEATURES + 1)
        sim = Simulation(PerFedAvg(R=1, B=0, alpha=alpha, eta=eta), ridge(), fed, cohort=1)
        models, _ = sim.answer(start_at(sim, w))
        for i, rows in enumerate(train_rows(fed)):
            H, c = quadratic(rows, L2)
            adapted = w - alpha * (H @ w - c)
            meta = (np.eye(len(w)) - alpha * H) @ (H @ adapted - c)
            np.testing.assert_allclose(flat(models.personal, True)[i], adapted, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(flat(models.local, True)[i], w - eta * meta, rtol=1e-9, atol=1e-11)


@every_algorithm
def test_smaller_steps_at_the_end_move_w_less_and_leave_personal_models_alone(cls: type[Algorithm]):
    """With one local round from the same w: a quarter of the way, and the same answer to it."""
    with double_precision():
        fed, w = federation(dtype=np.float64), normal(1, FEATURES + 1)
        given = {"R": 1, "B": 0, "eta": 0.01, "alpha": 0.05, "l2": "model"}
        known = {field.name for field in dataclasses.fields(cls)}
        algorithm = cls(**{name: value for name, value in given.items() if name in known})
        ways, answers = [], []
        for quarter_at in ((), (2,)):
            sim = Simulation(algorithm, ridge(), fed, cohort=fed.clients, quarter_at=quarter_at)
            state = start_at(sim, w)._replace(t=2)
            answers.append(sim.answer(state)[0])
            after, _ = sim.advance(state, 1)
            moved = after.server if algorithm.has_global else after.clients
            ways.append(flat(moved, not algorithm.has_global) - w)
        np.testing.assert_allclose(ways[1], ways[0] / 4, rtol=1e-9)
        assert_close(*answers, rtol=1e-12)


@pytest.mark.parametrize("solver", ["gradient", "nesterov"])
def test_the_prox_of_a_network_in_sample_space_is_the_plain_one(solver: Any):
    model = Network(features=FEATURES, hidden=(5, 4), l2=0.02)
    with double_precision():
        f = Loss(model, jnp.asarray(normal(0, 8, FEATURES)), jnp.asarray(normal(1, 8)))
        w, start = (model.init(jax.random.key(k)).map(lambda a: a.astype(jnp.float64)) for k in (0, 1))
        quick = jax.jit(lambda f: prox(f, w, start, lam=3.0, alpha=0.02, K=6, solver=solver).theta)(f)
        plain = jax.jit(lambda f: descend(f, w, start, 3.0, 0.02, 6, None, solver).theta)(f)
    assert_close(quick, plain, rtol=1e-10, atol=1e-12)


def test_the_loss_of_a_network_is_half_the_mean_squared_error():
    model = Network(features=FEATURES, hidden=(5,))
    theta, x, y = model.init(jax.random.key(3)), normal(1, 6, FEATURES), normal(2, 6)
    got = Loss(model, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))(theta)
    want = np.mean((network_logits(theta.tree, x)[:, 0] - y) ** 2) / 2
    np.testing.assert_allclose(float(got), want, rtol=1e-5)


@every_algorithm
@pytest.mark.parametrize("hidden", [pytest.param((), marks=pytest.mark.slow), (4,)], ids=["mlr", "dnn"])
def test_every_algorithm_lowers_the_error_of_every_model(cls: type[Algorithm], hidden: tuple[int, ...]):
    model = Network(features=FEATURES, hidden=hidden)
    sim = Simulation(tiny(cls), model, federation(), cohort=3)
    start = sim.start()
    later, finite = sim.advance(start, 40)
    assert finite
    before, after = (sim.evaluate(state)[0].entry() for state in (start, later))
    for kind in sim.evaluate(start)[0].test:
        assert after[kind]["train_loss"] < before[kind]["train_loss"]
        assert after[kind]["r2"] > before[kind]["r2"]


def test_a_pair_of_functions_is_a_regression_if_it_says_so():
    linear = Model(
        init_fn=lambda key: {"w": jnp.zeros((FEATURES, 1))},
        apply_fn=lambda tree, x: x @ tree["w"],
        classes=0,
    )
    rows = train_rows(federation())[3]
    f = problem(federation(), linear, 3).sample(jax.random.key(0), 0)
    np.testing.assert_allclose(float(f(linear.init(jax.random.key(0)))), np.mean(rows.y**2) / 2, rtol=1e-5)


# --- RMSE and R² -------------------------------------------------------------------------------------


def errors(y: np.ndarray, told: np.ndarray) -> tuple[float, float]:
    """RMSE and R² of predictions; NaN where labels are alike."""
    squares, spread = np.sum((y - told) ** 2), np.sum((y - np.mean(y)) ** 2)
    return float(np.sqrt(squares / len(y))), float(1 - squares / spread) if np.ptp(y) else np.nan


@pytest.mark.parametrize("kind", ["global", "personal"])
def test_scores_are_numpys(kind: str):
    fed = federation()
    sim = Simulation(tiny(PFedMe), ridge(), fed, cohort=3)
    state, _ = sim.advance(sim.start(), 5)
    evaluation, models = sim.evaluate(state)
    theta = np.tile(flat(state.server), (fed.clients, 1)) if kind == "global" else flat(models.personal, True)
    told = [with_one(rows.x) @ own for rows, own in zip(held_out(fed), theta, strict=True)]
    scores, entry = evaluation.test[kind], evaluation.entry()[kind]
    labels = [rows.y.astype(np.float64) for rows in held_out(fed)]
    own = [errors(y, z) if len(y) else (np.nan, np.nan) for y, z in zip(labels, told, strict=True)]
    np.testing.assert_allclose(scores.rmse, [e[0] for e in own], rtol=1e-4)
    np.testing.assert_allclose(scores.r2, [e[1] for e in own], rtol=1e-4)
    rmse, r2 = errors(np.concatenate(labels), np.concatenate(told))
    np.testing.assert_allclose([entry["rmse"], entry["r2"]], [rmse, r2], rtol=1e-4)
    assert entry["accuracy"] is None
    known = np.sort([e[1] for e in own if not np.isnan(e[1])])
    assert len(known) == 3, "one client has no test row, and one a single one"
    np.testing.assert_allclose(
        [entry["clients"][name] for name in ("mean", "std", "min")],
        [known.mean(), known.std(), known[0]],
        rtol=1e-4,
    )


def test_the_mean_of_a_clients_labels_has_r2_0_and_the_labels_have_1():
    fed = federation(((4, 6), (4, 6)))
    constant = ridge().init(jax.random.key(0)).map(jnp.zeros_like)
    sim = Simulation(FedAvg(), ridge(), dataclasses.replace(fed, y=fed.y - fed.y[4:10].mean()), cohort=1)
    scores = sim.evaluate(sim.start()._replace(server=constant))[0].test["global"]
    np.testing.assert_allclose(scores.r2[0], 0, atol=1e-5)
    perfect = dataclasses.replace(fed, y=np.zeros_like(fed.y) + fed.x[:, 0])
    right = constant.like(jnp.array([1.0, 0, 0, 0]))
    scores = Simulation(FedAvg(), ridge(), perfect, cohort=1).evaluate(sim.start()._replace(server=right))[0]
    np.testing.assert_array_equal(scores.test["global"].r2, [1, 1])
    np.testing.assert_array_equal(scores.test["global"].rmse, [0, 0])


def test_adding_to_all_labels_and_to_the_bias_changes_no_score():
    fed, w = federation(), np.array([0.5, -1, 2, 0.25], np.float32)
    entries = []
    for shift in (0.0, 64.0):
        moved = dataclasses.replace(fed, y=fed.y + np.float32(shift))
        sim = Simulation(FedAvg(R=1), ridge(), moved, cohort=1)
        entries.append(
            sim.evaluate(start_at(sim, w + np.array([0, 0, 0, shift], np.float32)))[0].entry()["global"]
        )
    for key in ("rmse", "r2"):
        np.testing.assert_allclose(entries[0][key], entries[1][key], rtol=1e-4)


# --- From a table to a record ------------------------------------------------------------------------

CLIENTS = ("north", "south", "east", "flat", "few")


def write_table(path: Path, seed: int, each: int, flat_label: bool = False) -> list[dict[str, Any]]:
    """A CSV of stays in days; those of client `flat` are all alike, and `few` has a row or two."""
    rng, rows = np.random.default_rng(seed), []
    for k, client in enumerate(CLIENTS):
        for _ in range(each if client != "few" else 2):
            age, dose = rng.normal(60, 12), rng.normal(5, 2)
            stay = 100 + (1 + k / 2) * age - 7 * dose + 5 * k + rng.normal()
            rows.append(
                {"hospital": client, "age": age, "dose": dose, "stay": 150.5 if client == "flat" else stay}
            )
    if flat_label:
        rows = [{**row, "stay": 123.25} for row in rows]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return rows


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The rows of train.csv and of test.csv in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return [write_table(tmp_path / "train.csv", 0, 24), write_table(tmp_path / "test.csv", 1, 12)]


TABLE = "--data train.csv --test test.csv --client hospital --label stay"
SMALL = "--R 5 --B 5 --rounds 4 --budget 6 --eta 0.05"


def pfedme(line: str) -> int:
    return main(shlex.split(line))


def columns(rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whose each row is, its features and its label."""
    x = np.array([[row["age"], row["dose"]] for row in rows])
    return np.array([row["hospital"] for row in rows]), x, np.array([row["stay"] for row in rows])


def test_a_table_is_trained_on_and_judged_in_its_own_units(
    stays: list[list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    assert pfedme(f"run pfedme {TABLE} {SMALL} --out run") == 0
    shown = capsys.readouterr().out
    record = strict(Path("run/record.json").read_text())
    (_, x, y), (client, new_x, new_y) = map(columns, stays)
    models = safetensors.numpy.load_file("run/model.safetensors")
    with open("run/clients.csv") as file:
        table = {row["client"]: row for row in csv.DictReader(file)}
    assert set(table) == set(CLIENTS)
    inputs = with_one((new_x - x.mean(axis=0)) / x.std(axis=0))

    def told(theta: np.ndarray, who: np.ndarray) -> np.ndarray:
        """Predictions in days, from standardised columns."""
        return y.mean() + y.std() * (inputs[who] @ theta.astype(np.float64))

    everyone = np.full(len(new_y), True)
    final = record["final"]
    want = errors(new_y, told(models["w"], everyone))
    np.testing.assert_allclose([final["global"]["rmse"], final["global"]["r2"]], want, rtol=1e-3)
    personal, own_r2 = np.empty_like(new_y), []
    for theta, name in zip(models["theta"], table, strict=True):
        mine = client == name
        personal[mine] = told(theta, mine)
        rmse, r2 = errors(new_y[mine], personal[mine])
        np.testing.assert_allclose(float(table[name]["personal_rmse"]), rmse, rtol=1e-3)
        assert table[name]["personal_accuracy"] == ""
        own_r2 += [] if np.isnan(r2) else [r2]
    want = errors(new_y, personal)
    np.testing.assert_allclose([final["personal"]["rmse"], final["personal"]["r2"]], want, rtol=1e-3)
    assert len(own_r2) == len(CLIENTS) - 1, "the labels of `flat` are alike, so that it has no R²"
    np.testing.assert_allclose(final["personal"]["clients"]["mean"], np.mean(own_r2), rtol=1e-3)
    for kind in ("global", "personal"):
        assert f"{final[kind]['r2']:.4f}" in shown
    assert "RMSE" in shown
    assert "accuracy" not in shown
    assert "R²" in Path("run/report.html").read_text()


@pytest.mark.slow
def test_a_comparison_tells_r2_and_errors(
    stays: list[list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    names = ("fedavg", "alone")
    assert pfedme(f"compare {' '.join(names)} {TABLE} {SMALL} --model dnn --out c") == 0
    shown = capsys.readouterr().out
    assert "test R² over all clients' rows" in shown
    (verdict,) = re.findall(r"whether joining pays: RMSE \w+ by .* interval", shown)
    assert "points" not in verdict
    with open("c/compare.csv") as file:
        rows = {(row["algorithm"], row["evaluated"]): row for row in csv.DictReader(file)}
    for name in names:
        final = strict(Path(f"c/{name}/seed-0/record.json").read_text())["final"]
        for kind in set(final) & {"global", "local", "personal"}:
            row = rows.pop((name, kind))
            np.testing.assert_allclose(float(row["mean"]), final[kind]["r2"], atol=1e-6)
            np.testing.assert_allclose(float(row["rmse"]), final[kind]["rmse"], rtol=1e-5)
    assert not rows


@pytest.mark.slow
def test_an_interrupted_regression_ends_as_if_it_had_not_been(stays: list[list[dict[str, Any]]]):
    assert pfedme(f"run alone {TABLE} {SMALL} --out whole --json") == 0
    run = Run.from_json(Folder(Path("whole")).read()["config"])
    with pytest.raises(KeyboardInterrupt):
        execute(run, Path("broken"), watch=stop_at(2, evaluated=True))
    assert pfedme("resume broken") == 0
    whole, again = (strict(Path(f"{name}/record.json").read_text()) for name in ("whole", "broken"))
    assert whole["history"] == again["history"]
    for name in ("clients.csv", "model.safetensors"):
        assert Path("whole", name).read_bytes() == Path("broken", name).read_bytes()


def test_a_search_is_judged_by_r2_of_validation_rows(
    stays: list[list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    line = f"tune pfedme {TABLE} --R 2 --K 2 --B 5 --rounds 3 --lam 5 --beta 1 --trials 3 --out t"
    assert pfedme(f"{line} --json") == 0
    told = strict(capsys.readouterr().out)
    r2 = [trial["r2"] for trial in told["trials"] if trial["state"] == "complete"]
    assert told["validation_r2"] == max(r2)
    assert all(value < 1 for value in r2)
    assert "validation_r2" in Path("t/trials.csv").read_text()
    assert pfedme(line) == 0
    shown = capsys.readouterr().out
    assert "validation R²" in shown
    assert f"{max(r2):.4f}" in shown


@pytest.mark.slow
def test_labels_that_are_all_alike_leave_r2_out_and_break_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "train.csv", 0, 8)
    write_table(tmp_path / "test.csv", 1, 8, flat_label=True)
    assert pfedme(f"compare pfedme:K=1 alone {TABLE} {SMALL} --out c") == 0
    shown = capsys.readouterr().out
    assert re.search(r"pfedme +– +– +– +–", shown)
    final = strict(Path("c/pfedme/seed-0/record.json").read_text())["final"]
    for kind in ("global", "local", "personal"):
        assert final[kind]["r2"] is final[kind]["clients"] is None
        assert final[kind]["rmse"] > 0


def test_the_description_counts_clients_whose_test_labels_are_alike(stays: list[list[dict[str, Any]]]):
    fed = federation(((4, 3), (4, 1), (4, 0), (4, 5)))
    fed.y[fed.start[3] + 4 :] = 2.5
    said = " ".join(describe(fed)["warnings"])
    assert "2 clients have only one label in the test rows" in said
    assert "1 client has no test rows" in said


@pytest.mark.slow
def test_a_client_with_far_larger_numbers_makes_steps_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The curvature is estimated without it, so that its personal model is not finite at first."""
    monkeypatch.chdir(tmp_path)

    def write(odd: str) -> Federation:
        rng = np.random.default_rng(0)
        with open("table.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["client", "x", "y"])
            for name in map(str, range(60)):
                x = rng.normal(size=8) + (200 if name == odd else 0)
                table.writerows([name, a, a + 0.1 * rng.normal()] for a in x)
        return Table(path="table.csv", client="client", label="y").load()

    fed = write("")
    missed = set(range(60)) - set(np.linspace(0, 59, 32).astype(int).tolist())
    write(fed.name(np.argsort(fed.ids)[min(missed)]))
    about = "--data table.csv --client client --label y --R 1 --K 200"
    line = f"run pfedme {about} --rounds 2 --out run"
    assert pfedme(line) == 0
    auto = strict(Path("run/record.json").read_text())["auto"]
    assert auto["retries"] > 0
    times = 4 ** auto["retries"]
    assert f"Larger steps diverged; these are 1/{times} of what the curv" in capsys.readouterr().out
    assert pfedme(f"{line} --alpha {auto['steps']['alpha'] * times} --force") == 1
    assert "a client's model is no longer finite" in capsys.readouterr().err
    # The number of rounds is found with the steps that are taken in the end.
    told = []

    def watch(progress: Progress) -> None:
        told.append(progress)

    auto = dataclasses.replace(
        Run.from_json(Folder(Path("run")).read()["config"]), algorithm=PFedMe(R=1, K=200), rounds=0, budget=12
    )
    assert execute(auto, watch=watch).record["auto"]["retries"] > 0
    rounds = [progress.round for progress in told if not progress.pilot]
    assert rounds == sorted(rounds), "the run itself did not begin again"


# --- A model for each client -------------------------------------------------------------------------

HOW = "auto:steps=40,folds=2,B=5"


def own_models(fed: Federation) -> Params:
    """A model of its own for each client."""
    return jax.vmap(lambda i: ridge().init(jax.random.fold_in(jax.random.key(2), i)))(fed.ids)


def test_a_point_of_the_path_is_a_linear_solve():
    """θ(λ) = (H + λI)⁻¹ (c + λw), for clients whose rows are all the same, as every batch then is."""
    x = np.repeat(normal(0, 2, FEATURES), 6, axis=0).astype(np.float32)
    fed = Federation.split([6, 6], x, np.repeat(np.array([2, -1], np.float32), 6), classes=0)
    w, how, lams = ridge().init(jax.random.key(1)), Personalize(steps=1500, eta=0.1, B=4), (3.0, 0.3)
    offered = [Candidate("personal", lam, how.steps) for lam in lams]
    walked = lambda_path(
        ridge(),
        fed,
        {"global": for_all(w, 2)},
        offered,
        jax.random.key(0),
        np.arange(2),
        Blocks.cut(*fed.rows("test")),
        np.full(2, how.eta, np.float32),
        how.B,
    )
    for lam, (_, theta) in zip(lams, walked, strict=True):
        for own, rows in zip(flat(theta, True), train_rows(fed), strict=True):
            H, c = quadratic(rows, L2)
            want = np.linalg.solve(H + lam * np.eye(len(c)), c + lam * flat(w))
            np.testing.assert_allclose(own, want, rtol=1e-4, atol=1e-5)


def with_an_outlier(seed: int = 0) -> Federation:
    """64 clients, one of which has a row that is 30 times as far away as all others."""
    x, y = normal(seed, 64 * 8, FEATURES), normal(seed + 1, 64 * 8)
    x[8] *= 30
    return Federation.split(np.full(64, 8), x.astype(np.float32), y.astype(np.float32), classes=0)


def test_a_clients_steps_suit_the_curvature_of_its_own_rows():
    """At most 1/(2L) for L = (1 − 1/B) ‖H‖ + h/B, where h is the curvature on the row farthest from 0."""
    fed, B = with_an_outlier(), 4
    own = []
    for rows in train_rows(fed):
        far = np.argmax((rows.x**2).sum(axis=1))
        (H, _), (one, _) = (quadratic(Rows(rows.x[at], rows.y[at]), L2) for at in (slice(None), [far]))
        own.append((1 - 1 / B) * np.linalg.norm(H, 2) + np.linalg.norm(one, 2) / B)
    found = own_steps(ridge(), fed, 0, B)
    assert (found <= 1.02 / (2 * np.array(own))).all()
    assert found[1] == pytest.approx(1 / (2 * own[1]), rel=0.02)
    most = Simulation(FedAvg(eta=1.0, B=B), ridge(), fed, cohort=1).smoothness()
    want = 1 / (2 * np.maximum(own, most))
    np.testing.assert_allclose(found, want, rtol=0.02)


def test_a_client_with_an_outlying_row_does_not_leave_its_path():
    """f(θ(λ)) + λ/2 ‖θ(λ) − w‖² is at most f(w), as it is for the minimiser."""
    fed, how = with_an_outlier(), Personalize(steps=200, B=4)
    w = ridge().init(jax.random.key(1))
    offered = candidates(how)[1:-1]
    walked = lambda_path(
        ridge(), fed, {"global": for_all(w, 64)}, offered, jax.random.key(0), np.arange(64),
        Blocks.cut(*fed.rows("train")), own_steps(ridge(), fed, 0, how.B), how.B,
    )  # fmt: skip
    for candidate, (_, theta) in zip(offered, walked, strict=True):
        own, rows = flat(theta, True)[1], train_rows(fed)[1]
        H, c = quadratic(rows, L2)
        value, first = (0.5 * v @ H @ v - c @ v for v in (own, flat(w)))
        assert value + candidate.lam / 2 * np.sum((own - flat(w)) ** 2) <= first


@pytest.mark.parametrize("seed", [0, 1])
def test_of_two_models_the_closer_one_is_chosen(seed: int):
    """By −½ (z − y)², in the mean over rows."""
    fed = federation(((40, 1), (30, 1), (50, 1)), seed=seed)
    blocks, store = Blocks.cut(*fed.rows("train")), Store.of(fed)
    lines = np.array([[1, 1, 1, 0.0], [0.5, 1, 1.5, 0.3], [1.5, 0.5, 1, -0.5]], np.float32)
    scores = []
    for line in lines:
        theta = ridge().init(jax.random.key(0)).like(jnp.asarray(line))
        found = outcomes(ridge(), theta, store.x, store.y, blocks)
        z = with_one(fed.x[blocks.rows()]) @ line
        want = np.maximum(-((z - fed.y[blocks.rows()]) ** 2) / 2, np.log(0.01))
        np.testing.assert_allclose(row_score(found), want, rtol=1e-3, atol=1e-5)
        scores.append(want)
    owner = blocks.owner()
    best = [np.argmax([own[owner == i].mean() for own in scores]) for i in range(fed.clients)]
    np.testing.assert_array_equal(choose(np.stack(scores, axis=1), owner, fed.clients, 0.0), best)


def test_r2_of_what_clients_choose_is_numpys():
    fed = federation(((30, 9), (12, 0), (2, 1), (20, 6), (50, 4)))
    w = ridge().init(jax.random.key(1))
    how = Personalize(steps=60, eta=0.1, folds=2, B=5)
    found = personalize(
        how, ridge(), fed, [Line("global", lambda _: Start(for_all(w, fed.clients)))], own_models
    )
    told = [with_one(rows.x) @ own for rows, own in zip(held_out(fed), flat(found.theta, True), strict=True)]
    labels = [rows.y.astype(np.float64) for rows in held_out(fed)]
    y, z = np.concatenate(labels), np.concatenate(told)
    assert summary(found, found.recommended)["r2"] == pytest.approx(errors(y, z)[1], rel=1e-3)
    z = with_one(np.concatenate([rows.x for rows in held_out(fed)])) @ flat(w)
    assert summary(found, found.of("global"))["r2"] == pytest.approx(errors(y, z)[1], rel=1e-3)
    # Over clients, with the variance of all labels.
    squares = [np.mean((a - b) ** 2) if len(a) else np.nan for a, b in zip(labels, told, strict=True)]
    np.testing.assert_allclose(
        found.accuracy(found.recommended), 1 - np.array(squares) / np.var(y), rtol=1e-3
    )
    # Clients with enough rows to learn their lines do.
    assert found.accuracy(found.recommended)[0] > found.accuracy(found.of("global"))[0] + 0.1
    assert found.verdict().metric == "r2"


def test_a_client_takes_a_smaller_lambda_if_the_shared_line_is_not_its_own():
    line, other = np.array([1, 1, 1, 0.0], np.float32), np.array([-1, 1, 1, 0.5], np.float32)
    x = normal(0, 80, FEATURES).astype(np.float32)
    y = np.concatenate([with_one(x[:40]) @ line, with_one(x[40:]) @ other]).astype(np.float32)
    y += 0.1 * normal(1, 80).astype(np.float32)
    fed = Federation.split([40, 40], x, y, classes=0).hold_out(0, 5)
    algorithm = PFedMe(lam=4.0, R=2, B=3, eta=0.005, alpha=0.05, rechoose=2)
    sim = Simulation(algorithm, ridge(0.0), fed, cohort=2)
    after = with_own_lambdas(sim, start_at(sim, line)._replace(t=2), Personalize(steps=100, B=10))
    first, second = np.asarray(after.clients)
    assert first == 4
    assert second < 0.5


@pytest.mark.slow
def test_a_run_finds_models_for_its_clients_and_for_newcomers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    stays = [write_table(tmp_path / "train.csv", 0, 9), write_table(tmp_path / "test.csv", 1, 12)]
    line = f"run pfedme {TABLE} {SMALL} --personalize {HOW} --holdout-clients north --out run"
    assert pfedme(line) == 0
    shown = capsys.readouterr().out
    assert "client mean of test R², by number of training rows" in shown
    assert "recommended R²" in shown
    assert "accuracy" not in shown
    told = strict(Path("run/personalized.json").read_text())
    models = safetensors.numpy.load_file("run/personalized.safetensors")["theta"]
    (_, x, days), (client, new_x, new_y) = map(columns, stays)
    inputs = with_one((new_x - x.mean(axis=0)) / x.std(axis=0))
    with open("run/personalized.csv") as file:
        table = {row["client"]: row for row in csv.DictReader(file)}
    assert set(table) == set(CLIENTS) - {"north"}
    y, z = [], []
    for theta, name in zip(models, table, strict=True):
        mine = client == name
        y.append(new_y[mine])
        z.append(days.mean() + days.std() * (inputs[mine] @ theta.astype(np.float64)))
    assert told["methods"]["recommended"]["r2"] == pytest.approx(
        errors(np.concatenate(y), np.concatenate(z))[1], rel=1e-3
    )
    with open("run/newcomers.csv") as file:
        levels = list(csv.DictReader(file))
    assert {row["clients"] for row in levels} == {"1"}
    assert all(float(row["mean"]) <= 1 for row in levels)
    # Others come later, with a table of their own.
    write_table(Path("later.csv"), 5, 12)
    assert pfedme(f"personalize run --data later.csv --personalize {HOW} --out new") == 0
    assert "R²" in capsys.readouterr().out
    assert "recommended_r2" in Path("new/personalized.csv").read_text()
    assert "R²" in Path("new/report.html").read_text()


@pytest.mark.slow
def test_clients_choose_a_lambda_of_a_quantity_while_they_train(stays: list[list[dict[str, Any]]]):
    assert pfedme(f"compare fedavg pfedme:rechoose=2 {TABLE} {SMALL} --out c") == 0
    final = strict(Path("c/pfedme/seed-0/record.json").read_text())["final"]
    assert final["personal"]["r2"] > final["global"]["r2"]


# --- What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_label_must_be_finite(bad: float):
    fed = federation()
    fed.y[8] = bad
    with pytest.raises(InputError, match="label of row 8 of client 0"):
        fed.checked()


def test_a_cnn_can_predict_a_quantity_too():
    model = build(MODELS["cnn"], {"shape": [2, 4], "channels": [2], "hidden": []}, "it").build(8, 0)
    assert there(model.init(jax.random.key(0))).tree[-1][0].shape == (1, 4)
