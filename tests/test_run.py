"""A run and its folder: what the record, the tables and the models say, and that it can be run again."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from laws import PAPERS
from safetensors import safe_open

from pfedme import __version__
from pfedme.algorithms import ALGORITHMS
from pfedme.cli import main
from pfedme.core.models import parse_model
from pfedme.core.spec import build
from pfedme.data.federation import Federation
from pfedme.data.synthetic import Synthetic
from pfedme.runs.folder import write_safetensors
from pfedme.runs.run import Run
from pfedme.training.execute import execute

TINY = shlex.split(
    "--data synthetic:clients=4,rows=40,features=5,classes=3 --rounds 3 --cohort 2 --R 2 --B 5"
)
MODELS_OF = {
    "pfedme": {"global", "local", "personal"},
    "fedavg": {"global", "local"},
    "per-fedavg": {"global", "local", "personal"},
    "alone": {"personal"},
    "pooled": {"global"},
    "fedavg-ft": {"global", "local", "personal"},
}
JOBS = {name: [name, *TINY, *(["--F", "3"] if name == "fedavg-ft" else [])] for name in PAPERS}
# Hidden layers, and clients of unequal size.
JOBS["dnn"] = [
    "fedavg", *TINY, "--data", "synthetic:clients=4,features=5,classes=3,iid=true", "--eta", "0.1",
    "--model", "dnn:hidden=4-3,l2=0.01", "--seed", "5", "--aggregation", "samples",
]  # fmt: skip


class Finished:
    """What a finished run has left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / "record.json").read_text())
        self.clients = list(csv.DictReader(io.StringIO((folder / "clients.csv").read_text())))
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            self.about: dict[str, Any] = json.loads(file.metadata()["pfedme"])
            names = list(file.keys())
            self.tensors: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in names}

    @property
    def federation(self) -> Federation:
        """The data of the run, made again from the record."""
        fields = {k: v for k, v in self.record["config"]["data"].items() if k != "name"}
        return build(Synthetic, fields, "data").load()

    def logits(self, vector: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The model of these coordinates at rows x, in plain NumPy."""
        shape = self.about["model"]
        sizes = [shape["features"], *shape["hidden"], shape["classes"]]
        z, at = x.astype(np.float64), 0
        for layer, (a, b) in enumerate(itertools.pairwise(sizes)):
            W, bias = vector[at : at + a * b].reshape(b, a), vector[at + a * b : at + a * b + b]
            z = (np.maximum(z, 0) if layer else z) @ W.T + bias
            at += a * b + b
        assert at == len(vector)
        return z


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """A tiny run of each algorithm, and one of a network on clients of unequal size."""
    folder = tmp_path_factory.mktemp("runs")
    for name, argv in JOBS.items():
        assert main(["run", *argv, "--out", str(folder / name)]) == 0
    return {name: Finished(folder / name) for name in JOBS}


@pytest.mark.parametrize("job", JOBS)
def test_the_folder_holds_what_the_contract_names_and_nothing_else(finished: dict[str, Finished], job: str):
    names = {path.name for path in finished[job].folder.iterdir()}
    written = {"record.json", "clients.csv", "model.safetensors", "curves.png", "report.html"}
    assert names == written | {"test_rows.csv"}


@pytest.mark.parametrize("job", JOBS)
def test_the_record_has_the_keys_of_the_contract(finished: dict[str, Finished], job: str):
    record = finished[job].record
    assert {"config", "environment", "timing", "history", "final", "command", "status"} <= set(record)
    assert record["status"] == "finished"
    assert record["version"] == __version__
    assert {"compile_s", "train_s", "eval_s", "rounds"} <= set(record["timing"])
    assert record["timing"]["rounds"] == 3
    assert all(record["timing"][k] >= 0 for k in ("compile_s", "train_s", "eval_s"))
    assert {"python", "jax", "numpy", "devices"} <= set(record["environment"])
    assert ("proximal_steps" in record["environment"]) == (record["config"]["algorithm"]["name"] == "pfedme")
    assert {"algorithm", "data", "model", "rounds", "cohort", "seed"} <= set(record["config"])
    assert [entry["round"] for entry in record["history"]] == [0, 1, 2, 3]
    assert record["final"] == record["history"][-1]


@pytest.mark.parametrize("job", JOBS)
def test_an_entry_has_the_models_that_the_algorithm_has(finished: dict[str, Finished], job: str):
    record = finished[job].record
    for entry in (*record["history"], record["final"]):
        kinds = {"global", "local", "personal"} & set(entry)
        assert kinds == MODELS_OF[record["config"]["algorithm"]["name"]]
        for kind in kinds:
            assert {"accuracy", "loss", "train_loss", "clients", "log_loss", "brier"} <= set(entry[kind])
            assert set(entry[kind]["clients"]) == {"mean", "std", "worst_decile", "min"}
            assert 0 <= entry[kind]["accuracy"] <= 1
            assert entry[kind]["loss"] > 0
            assert entry[kind]["train_loss"] > 0


@pytest.mark.parametrize("job", JOBS)
def test_numbers_over_clients_are_those_of_the_clients_in_the_table(finished: dict[str, Finished], job: str):
    run = finished[job]
    columns = ["client", "n_train", "n_test", "global_accuracy", "local_accuracy", "personal_accuracy"]
    assert list(run.clients[0])[:6] == columns
    assert [int(row["client"]) for row in run.clients] == [0, 1, 2, 3]
    f = run.federation
    assert [int(row["n_train"]) for row in run.clients] == f.n_train.tolist()
    assert [int(row["n_test"]) for row in run.clients] == f.n_test.tolist()
    for kind in ("global", "local", "personal"):
        cells = [row[f"{kind}_accuracy"] for row in run.clients]
        if kind not in run.record["final"]:
            assert cells == [""] * 4
            continue
        own, entry = np.array([float(c) for c in cells]), run.record["final"][kind]
        assert entry["accuracy"] == pytest.approx(np.average(own, weights=f.n_test))
        assert entry["clients"]["mean"] == pytest.approx(own.mean())
        assert entry["clients"]["std"] == pytest.approx(own.std())
        assert entry["clients"]["min"] == own.min()
        assert entry["clients"]["worst_decile"] == own.min()  # the worst tenth of four is one


@pytest.mark.parametrize("job", JOBS)
def test_stored_models_make_the_predictions_that_were_scored(finished: dict[str, Finished], job: str):
    run, f = finished[job], finished[job].federation
    stored = {"global": "w", "personal": "theta"}
    kinds = MODELS_OF[run.record["config"]["algorithm"]["name"]] & set(stored)
    assert set(run.tensors) == {stored[kind] for kind in kinds}
    for kind in kinds:
        hits, losses, train_losses = [], [], []
        for i in range(4):
            vector = run.tensors["w"] if kind == "global" else run.tensors["theta"][i]
            rows = np.arange(f.start[i], f.start[i] + f.count[i])
            logits, y = run.logits(vector, f.x[rows]), f.y[rows]
            top = logits.max(axis=1)
            loss = top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(y)), y]
            n = f.n_train[i]
            hits.append((np.argmax(logits[n:], axis=1) == y[n:]).mean())
            losses.append(loss[n:])
            train_losses.append(loss[:n])
        table = [float(row[f"{kind}_accuracy"]) for row in run.clients]
        np.testing.assert_allclose(table, hits, atol=1e-12)
        entry = run.record["final"][kind]
        assert entry["loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-4)
        assert entry["train_loss"] == pytest.approx(np.concatenate(train_losses).mean(), rel=1e-4)


def test_the_model_file_says_what_is_needed_to_use_it(finished: dict[str, Finished]):
    run = finished["dnn"]
    assert run.about["model"] == {"features": 5, "classes": 3, "hidden": [4, 3]}
    assert run.tensors["w"].shape == ((5 * 4 + 4) + (4 * 3 + 3) + (3 * 3 + 3),)
    run = finished["pfedme"]
    assert run.about["model"] == {"features": 5, "classes": 3, "hidden": []}
    assert run.about["clients"] == [0, 1, 2, 3]
    assert run.tensors["theta"].shape == (4, 5 * 3 + 3)


@pytest.mark.parametrize("job", JOBS)
def test_curves_are_a_png(finished: dict[str, Finished], job: str):
    image = (finished[job].folder / "curves.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 5000


@pytest.mark.parametrize("job", JOBS)
def test_the_command_in_the_record_makes_the_same_run_to_the_bit(
    finished: dict[str, Finished], job: str, tmp_path: Path
):
    run = finished[job]
    program, *argv = shlex.split(run.record["command"])
    assert program == "pfedme"
    assert main([*argv, "--out", str(tmp_path / "again")]) == 0
    again = Finished(tmp_path / "again")
    for key in ("final", "history", "config", "command"):
        assert again.record[key] == run.record[key]
    for name in ("model.safetensors", "clients.csv"):
        assert (again.folder / name).read_bytes() == (run.folder / name).read_bytes()


@pytest.mark.parametrize("job", JOBS)
def test_the_config_in_the_record_is_the_run(finished: dict[str, Finished], job: str):
    config = finished[job].record["config"]
    assert Run.from_json(config).to_json() == config
    result = execute(Run.from_json(config))
    assert result.record["final"] == finished[job].record["final"]


def test_json_prints_one_object_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    assert main(["run", *JOBS["pfedme"], "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert printed.count("\n") == 1
    assert result["final"] == json.loads((out / "record.json").read_text())["final"]
    assert result["out"] == str(out)


def test_the_words_printed_have_the_numbers_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    assert main(["run", *JOBS["pfedme"], "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    final = json.loads((out / "record.json").read_text())["final"]
    for kind in ("global", "local", "personal"):
        (line,) = [line for line in printed.splitlines() if line.split()[:1] == [kind]]
        numbers = [float(word) for word in line.split()[1:] if word != "±"]
        own = final[kind]["clients"]
        halves = final[kind]["half_width"]["accuracy"], final[kind]["by_client"]["accuracy"]["half_width"]
        want = [
            100 * final[kind]["accuracy"],
            100 * halves[0],
            final[kind]["loss"],
            final[kind]["train_loss"],
        ]
        want += [100 * v for v in (own["mean"], halves[1], own["worst_decile"], own["min"])]
        np.testing.assert_allclose(numbers, want, atol=0.006)
    assert "alone" in printed
    assert str(out) in printed


def test_progress_is_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["run", *JOBS["pfedme"], "--out", str(tmp_path / "run"), "--json"])
    err = capsys.readouterr().err
    assert "pfedme round 0/3: global " in err
    assert "pfedme round 3/3: global " in err


def test_results_go_to_a_new_folder_below_runs_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *JOBS["pfedme"], "--json"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("pfedme-")
    assert json.loads(capsys.readouterr().out)["out"] == f"runs/{folder.name}"
    assert (folder / "record.json").exists()


def test_force_overwrites_a_finished_run(tmp_path: Path):
    out = tmp_path / "run"
    assert main(["run", *JOBS["pfedme"], "--out", str(out)]) == 0
    assert main(["run", *JOBS["fedavg"], "--out", str(out), "--force"]) == 0
    assert Finished(out).record["config"]["algorithm"]["name"] == "fedavg"


def test_evaluations_come_as_often_as_asked_and_at_the_end(tmp_path: Path):
    out = tmp_path / "run"
    argv = [*JOBS["fedavg"], "--rounds", "7", "--eval-every", "3", "--out", str(out)]
    assert main(["run", *argv]) == 0
    assert [entry["round"] for entry in Finished(out).record["history"]] == [0, 3, 6, 7]


def test_evaluating_more_often_changes_no_number(tmp_path: Path):
    finals = []
    for every in (1, 5):
        out = tmp_path / str(every)
        argv = [*JOBS["pfedme"], "--rounds", "5", "--eval-every", str(every), "--out", str(out)]
        assert main(["run", *argv]) == 0
        finals.append(Finished(out).record["final"])
    assert finals[0] == finals[1]


def test_the_cohort_is_a_hundred_or_everybody_by_default(tmp_path: Path):
    few = Run(
        algorithm=ALGORITHMS["fedavg"](R=2, B=5), data=Synthetic(clients=4, rows=8), model=parse_model("mlr")
    )
    assert few.prepare()[0].cohort == 4
    many = Run(
        algorithm=ALGORITHMS["fedavg"](R=2, B=5),
        data=Synthetic(clients=104, rows=8),
        model=parse_model("mlr"),
    )
    assert many.prepare()[0].cohort == 100


def test_another_seed_makes_another_run_of_the_same_data(tmp_path: Path):
    finals = []
    for seed in ("0", "1"):
        out = tmp_path / seed
        assert main(["run", *JOBS["pfedme"], "--seed", seed, "--out", str(out)]) == 0
        finals.append(Finished(out).record["final"]["global"]["train_loss"])
    assert finals[0] != finals[1]


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = Run(
        algorithm=ALGORITHMS["fedavg"](R=2, B=5),
        data=Synthetic(clients=4, rows=40, features=5, classes=3),
        model=parse_model("mlr"),
        rounds=1,
        cohort=2,
    )
    result = execute(run)
    assert result.record["status"] == "finished"
    assert result.w is not None
    assert result.theta is None
    assert not list(tmp_path.iterdir())


# --- Divergence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ["1", "5", "100", "1e4", "1e10", "1e30"])
def test_an_unstable_inner_step_never_ends_in_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alpha: str
):
    out = tmp_path / "run"
    status = main(["run", *JOBS["pfedme"], "--alpha", alpha, "--out", str(out)])
    record = json.loads((out / "record.json").read_text())
    if status == 0:  # unstable, but still finite after so few rounds
        assert record["status"] == "finished"
        return
    assert status == 1
    assert record["status"] == "diverged"
    assert "2/(L + λ)" in capsys.readouterr().err


@pytest.fixture
def diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """A run that diverges after some rounds, and what was said of it."""
    out = tmp_path / "run"
    long = ["--rounds", "400", "--eval-every", "400", "--model", "mlr:l2=0.001", "--out", str(out)]
    assert main(["run", *JOBS["pfedme"], *long, "--eta", "20", "--alpha", "0.01"]) == 1
    printed, err = capsys.readouterr()
    assert printed == ""
    return out, err


def test_a_diverging_run_ends_with_advice(diverged: tuple[Path, str]):
    out, err = diverged
    said = err.splitlines()[-1]
    assert "Traceback" not in err
    assert said.startswith("pfedme: pfedme diverged in round ")
    assert "2/(L + λ)" in said
    assert "lower --eta" in said
    assert str(out / "checkpoint.safetensors") in said


def test_a_diverging_run_is_recorded_as_such_with_its_last_finite_state(diverged: tuple[Path, str]):
    out, err = diverged
    record = json.loads((out / "record.json").read_text())
    assert record["status"] == "diverged"
    assert record["final"] is None
    assert record["reason"] in err
    assert [entry["round"] for entry in record["history"]] == [0]
    with safe_open(out / "checkpoint.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["pfedme"])
        w = file.get_tensor("server.0")
    assert 0 < about["round"] < 400
    assert f"in round {about['round']}:" in err
    assert np.isfinite(w).all()
    assert np.abs(w).max() > 1e3


@pytest.mark.parametrize("job", ["fedavg", "per-fedavg", "alone", "fedavg-ft"])
def test_a_diverging_rival_is_told_about_its_own_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str
):
    assert main(["run", *JOBS[job], "--eta", "1e38", "--out", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert f"{job} diverged in round " in err
    assert "2/L" in err
    assert "lower --eta" in err


def test_the_advice_knows_the_smoothness_of_softmax_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["run", *JOBS["pfedme"], "--alpha", "1e10", "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    L = float(said.split("L ≈ ")[1].split(")")[0])
    limit = float(said.split("2/(L + λ) = ")[1].split(" ")[0])
    assert limit == pytest.approx(2 / (L + 15), rel=0.05)
    # The Hessian of softmax regression is at most λ_max(Σ xxᵀ/n)/2, with x extended by 1.
    f = Synthetic(clients=4, rows=40, features=5, classes=3).load()
    top = 0.0
    for i in range(4):
        x = f.x[f.start[i] : f.start[i] + f.n_train[i]].astype(np.float64)
        x = np.c_[x, np.ones(len(x))]
        top = max(top, float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]))
    assert 0 < L < 1.2 * (top / 2 + 0.001)
    assert not math.isnan(L)


@pytest.mark.parametrize("names", [("theta", "w"), ("w",), ()])
def test_models_are_written_as_safetensors_writes_them(names: tuple[str, ...]):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(3, len(name))).astype(np.float32) for name in reversed(names)}
    mixed = {"a": np.arange(5, dtype=np.int32), "b": np.array([np.pi]), "c": np.zeros((0, 2), np.float32)}
    for metadata in ({"pfedme": '{"names": ["Zürich"]}'}, {"pfedme": "1234567"}):
        file = io.BytesIO()
        write_safetensors(file, tensors, metadata)
        assert file.getvalue() == safetensors.numpy.save(tensors, metadata)
        file = io.BytesIO()
        write_safetensors(file, mixed, metadata)
        for name, a in safetensors.numpy.load(file.getvalue()).items():
            np.testing.assert_array_equal(a, mixed[name])
            assert a.dtype == mixed[name].dtype
