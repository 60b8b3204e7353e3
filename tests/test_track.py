"""Trackers: each number is where TensorBoard and MLflow look for it, once, whatever happens to the run."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from stops import Results, files_of_at_most, stop_at, tiny

from pfedme.algorithms import FedAvg
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.data.table import Table
from pfedme.errors import Diverged, InputError, Interrupted, RunError
from pfedme.training.compare import compare
from pfedme.training.execute import execute, resume
from pfedme.training.execution import Progress
from pfedme.training.track import parse_trackers
from pfedme.training.trackers import Mlflow

RUN = tiny("pfedme")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of the test's own, where nothing is said about MLflow."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(variable)


def record_of(folder: Path) -> dict[str, Any]:
    """The record in a run's folder."""
    return json.loads((folder / "record.json").read_text())


def flat(tree: dict[str, Any], joint: str) -> dict[str, Any]:
    """The leaves of a tree, by paths."""
    leaves, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return {joint.join(step.key for step in path): leaf for path, leaf in leaves}


def expected(record: dict[str, Any]) -> dict[tuple[str, int], float]:
    """The numbers of the record's history, by name and round."""
    return {
        (name, entry["round"]): value
        for entry in record["history"]
        for name, value in flat({k: v for k, v in entry.items() if k != "round"}, "/").items()
        if isinstance(value, int | float)
    }


def events(folder: Path) -> list[Any]:
    """All events in a folder; every checksum is right. Like TensorBoard, it leaves one that is cut off."""
    Event = importlib.import_module("tensorboardX.proto.event_pb2").Event
    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            if len(data) < 16 + length:
                break
            body, (check,) = data[12 : 12 + length], struct.unpack_from("<I", data, 12 + length)
            assert masked_crc(data[:8]) == struct.unpack_from("<I", data, 8)[0]
            assert masked_crc(body) == check
            found.append(Event.FromString(body))
            data = data[16 + length :]
    return found


def masked_crc(data: bytes) -> int:
    """The checksum of TFRecord: CRC-32C (Castagnoli), turned by 15 bits and moved."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """TensorBoard's numbers but for times; none is there twice."""
    values = [
        ((value.tag, event.step), value.simple_value)
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    assert len(dict(values)) == len(values)
    return {key: value for key, value in values if not key[0].startswith("time/")}


def texts(folder: Path, tag: str) -> list[str]:
    """What TensorBoard is told in words."""
    values = [value for event in events(folder) for value in event.summary.value]
    return [v.tensor.string_val[0].decode() for v in values if v.tag == f"{tag}/text_summary"]


def client(uri: str) -> Any:
    """MLflow's own reader."""
    return importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)


def in_mlflow(folder: Path) -> tuple[Any, Any]:
    """A client, and the run that the record in a folder tells of."""
    (about,) = [one for one in record_of(folder)["track"] if one["name"] == "mlflow"]
    reader = client(about["uri"])
    return reader, reader.get_run(about["run"])


def metrics(folder: Path) -> dict[tuple[str, int], float]:
    """MLflow's numbers but for times; none is there twice."""
    reader, run = in_mlflow(folder)
    values = [
        ((name, metric.step), metric.value)
        for name in run.data.metrics
        for metric in reader.get_metric_history(run.info.run_id, name)
    ]
    assert len(dict(values)) == len(values)
    return {key: value for key, value in values if not key[0].startswith("time/")}


def assert_tracked(folder: Path) -> None:
    """Both trackers have the record's numbers, TensorBoard's as float32."""
    want = expected(record_of(folder))
    assert metrics(folder) == want
    assert scalars(folder / "tensorboard") == {key: float(np.float32(value)) for key, value in want.items()}


BOTH = ["tensorboard", "mlflow"]


def test_a_run_is_tracked_with_all_that_its_record_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status = main([
        "run", "pfedme", "--data", "synthetic:clients=4,rows=40,features=5,classes=3", "--rounds", "6",
        "--cohort", "2", "--eval-every", "2", "--R", "2", "--B", "5",
        "--track", "tensorboard", "--track", "mlflow:experiment=trial", "--out", "runs/a", "--json",
    ])  # fmt: skip
    said = capsys.readouterr()
    assert status == 0, said.err
    assert json.loads(said.out)["out"] == "runs/a"
    out = tmp_path / "runs" / "a"
    record = record_of(out)
    assert_tracked(out)

    reader, run = in_mlflow(out)
    assert (tmp_path / "mlflow.db").exists()
    assert reader.get_experiment(run.info.experiment_id).name == "trial"
    assert run.info.run_name == "runs/a"
    assert run.info.status == "FINISHED"
    assert run.data.tags["pfedme.status"] == "finished"
    assert run.data.tags["pfedme.command"] == record["command"]
    assert run.data.tags["environment.jax"] == record["environment"]["jax"]
    written = {k: "none" if v is None else str(v) for k, v in flat(record["config"], ".").items()}
    assert run.data.params == written
    assert {name: run.data.metrics[f"time/{name}"] for name in ("train_s", "eval_s", "compile_s")} == {
        name: value for name, value in record["timing"].items() if name != "rounds"
    }
    kept = {file.path for file in reader.list_artifacts(run.info.run_id)}
    assert kept == {"record.json", "clients.csv", "curves.png", "report.html"}
    downloaded = Path(reader.download_artifacts(run.info.run_id, "record.json"))
    assert json.loads(downloaded.read_text()) == record

    assert texts(out / "tensorboard", "status") == ["finished"]
    (about,) = texts(out / "tensorboard", "run")
    assert f"| algorithm.lam | {record['config']['algorithm']['lam']} |" in about
    tags = [value.tag for event in events(out / "tensorboard") for value in event.summary.value]
    assert tags.count("_hparams_/session_start_info") == tags.count("_hparams_/session_end_info") == 1


@pytest.mark.slow
def test_tracking_changes_no_result(tmp_path: Path):
    execute(RUN, tmp_path / "plain")
    execute(RUN, tmp_path / "tracked", track=parse_trackers(BOTH))
    assert Results(tmp_path / "plain") == Results(tmp_path / "tracked")
    assert "track" not in record_of(tmp_path / "plain")


@pytest.mark.slow
def test_a_regression_is_tracked_by_r2_and_rmse(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = [f"{'ab'[k % 2]},{x:.4f},{2 * x + 0.1 * k:.4f}" for k, x in enumerate(rng.normal(size=40))]
    (tmp_path / "t.csv").write_text("\n".join(["who,x,y", *rows]))
    data = Table(path=str(tmp_path / "t.csv"), client="who", label="y")
    execute(tiny("fedavg", data=data), tmp_path / "run", track=parse_trackers(BOTH))
    assert_tracked(tmp_path / "run")
    names = {name for name, _ in metrics(tmp_path / "run")}
    assert {"global/r2", "global/rmse", "global/loss", "global/clients/worst_decile"} <= names
    assert "global/accuracy" not in names


@pytest.mark.slow
def test_numbers_can_be_seen_while_the_run_is_under_way(tmp_path: Path):
    seen = []

    def watch(progress: Progress) -> None:
        if progress.entry:
            there = {step for _, step in scalars(tmp_path / "run" / "tensorboard")}
            assert there == {step for _, step in metrics(tmp_path / "run")}
            assert in_mlflow(tmp_path / "run")[1].info.status == "RUNNING"
            seen.append(sorted(there))

    execute(RUN, tmp_path / "run", watch=watch, track=parse_trackers(BOTH))
    assert seen == [[0], [0, 2], [0, 2, 4], [0, 2, 4, 6]]


# --- Stopped, and gone on ------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_same_place_with_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        execute(RUN, out, watch=stop_at(3), track=parse_trackers(BOTH))
    run = in_mlflow(out)[1]
    assert run.info.status == "KILLED"
    assert run.data.tags["pfedme.status"] == "interrupted"
    assert texts(out / "tensorboard", "status") == ["interrupted"]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert main(["resume", str(out)]) == 0
    assert in_mlflow(out)[1].info.run_id == run.info.run_id
    assert in_mlflow(out)[1].info.status == "FINISHED"
    assert {step for _, step in scalars(out / "tensorboard")} == {0, 2, 4, 6}
    assert texts(out / "tensorboard", "status") == ["interrupted", "finished"]
    assert_tracked(out)


@pytest.mark.slow
def test_what_a_tracker_has_beyond_the_checkpoint_is_not_written_again(tmp_path: Path):
    """As after kill -9, or when the checkpoint was deleted."""
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        execute(RUN, out, watch=stop_at(4, evaluated=True), track=parse_trackers(BOTH))
    (out / "checkpoint.safetensors").unlink()
    resume(out)
    assert_tracked(out)


@pytest.mark.slow
def test_what_a_tracker_lacks_of_the_history_is_written_when_the_run_goes_on(tmp_path: Path):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        execute(RUN, out, watch=stop_at(3), track=parse_trackers(BOTH))
    assert {step for _, step in metrics(out)} == {0, 2}
    (file,) = (out / "tensorboard").iterdir()
    last, status = (len(event.SerializeToString()) + 16 for event in events(out / "tensorboard")[-2:])
    assert last > status
    file.write_bytes(file.read_bytes()[: -status - last // 2])
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as base, base:
        base.execute("delete from metrics where step = 2")
    assert {step for _, step in metrics(out)} == {step for _, step in scalars(out / "tensorboard")} == {0}
    resume(out)
    assert_tracked(out)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["diverged", "failed"])
def test_a_run_that_ends_badly_says_so(tmp_path: Path, stop: str):
    out = tmp_path / "run"

    def watch(progress: Progress) -> None:
        if stop == "failed" and progress.round:
            raise RunError("the machine is on fire")

    algorithm = FedAvg(R=2, B=5, eta=1e30 if stop == "diverged" else 0.01)
    run = tiny("fedavg", algorithm=algorithm, model=MLR(l2=0.001))
    with pytest.raises(Diverged if stop == "diverged" else RunError):
        execute(run, out, watch=watch, track=parse_trackers(BOTH))
    told = in_mlflow(out)[1]
    assert told.info.status == "FAILED"
    assert told.data.tags["pfedme.status"] == stop
    assert texts(out / "tensorboard", "status") == [stop]


@pytest.mark.slow
def test_each_run_of_a_comparison_is_tracked_by_itself(tmp_path: Path):
    out = tmp_path / "both"
    track = parse_trackers(["tensorboard:dir=events", "mlflow"])

    def stop(label: str, place: int, progress: Progress) -> None:
        if place and progress.round >= 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        compare([tiny("fedavg"), tiny("alone")], 1, out, watch=stop, track=track)
    assert main(["resume", str(out)]) == 0
    for label in ("fedavg", "alone"):
        record = record_of(out / label / "seed-0")
        assert metrics(out / label / "seed-0") == expected(record)
        there = scalars(tmp_path / "events" / label / "seed-0")
        assert there == {key: float(np.float32(value)) for key, value in expected(record).items()}
    names = {in_mlflow(out / label / "seed-0")[1].info.run_name for label in ("fedavg", "alone")}
    assert names == {str(out / "fedavg" / "seed-0"), str(out / "alone" / "seed-0")}


# --- What can be wrong ---------------------------------------------------------------------------------


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def watch(progress: Progress) -> None:
        if progress.round == 2 and progress.entry:
            shutil.rmtree(tmp_path / "store")

    (tmp_path / "store").mkdir()
    track = parse_trackers(["mlflow:uri=sqlite:///store/a.db", "tensorboard"])
    execute(RUN, tmp_path / "run", watch=watch, track=track)
    execute(RUN, tmp_path / "plain")
    assert Results(tmp_path / "run") == Results(tmp_path / "plain")
    told = capsys.readouterr().err
    assert told.startswith("pfedme: mlflow no longer tracks the run, which continues: ")
    assert told.count("\n") == 1
    assert len({step for _, step in scalars(tmp_path / "run" / "tensorboard")}) == 4


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, full = tmp_path / "run", contextlib.ExitStack()

    def watch(progress: Progress) -> None:
        if progress.entry and progress.round == 2:
            (file,) = (out / "tensorboard").iterdir()
            full.enter_context(files_of_at_most(file.stat().st_size + 10))
        if progress.entry and progress.round == progress.rounds:
            full.close()

    with full:
        execute(RUN, out, watch=watch, track=parse_trackers(["tensorboard"]))
    told = capsys.readouterr().err
    assert (
        told == "pfedme: tensorboard no longer tracks the run, which continues: [Errno 27] File too large.\n"
    )
    assert record_of(out)["status"] == "finished"
    assert {step for _, step in scalars(out / "tensorboard")} == {0, 2}


def test_a_missing_package_is_told_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, package in (("tensorboard", "tensorboardX"), ("mlflow", "mlflow")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert main(["run", "pfedme", "--track", name, "--out", "run"]) == 2
        assert f"pip install 'pfedme[{name}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["wandb"], "There is no tracker 'wandb'"),
        (["mlflow:url=x"], "did you mean 'uri'?"),
        (["mlflow", "mlflow"], "given twice"),
        (["mlflow:uri=postgresql://me:secret@host/db"], "MLFLOW_TRACKING_URI"),
        (["mlflow:uri=sqlite:///taken/a.db"], "--track mlflow does not work here: "),
    ],
)
def test_wrong_trackers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
):
    options = [word for text in given for word in ("--track", text)]
    (tmp_path / "taken").touch()
    few = ["--data", "synthetic:clients=2,rows=10", "--rounds", "1"]
    assert main(["run", "alone", *few, "--out", "run", *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "secret" not in told
    assert not (tmp_path / "run").exists()


def test_events_of_another_run_are_kept_unless_forced(tmp_path: Path):
    track = parse_trackers(["tensorboard:dir=events"])
    execute(RUN, tmp_path / "first", track=track)
    before = scalars(tmp_path / "events")
    with pytest.raises(InputError, match="contains events of another run"):
        execute(tiny("alone"), tmp_path / "second", track=track)
    assert scalars(tmp_path / "events") == before
    execute(tiny("alone"), tmp_path / "second", track=track, force=True)
    assert {name.partition("/")[0] for name, _ in scalars(tmp_path / "events")} == {"personal", "baseline"}


def test_mlflow_is_where_its_own_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///from-env.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    here = f"sqlite:///{tmp_path}/from-env.db"
    assert parse_trackers(["mlflow"]) == (Mlflow(uri=here, experiment="named"),)
    given = parse_trackers(["mlflow:uri=http://127.0.0.1:9,experiment=e"])
    assert given == (Mlflow(uri="http://127.0.0.1:9", experiment="e"),)


def test_a_password_in_the_environment_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:secret@host/db")
    assert parse_trackers(["mlflow"]) == (Mlflow(uri=None, experiment="pfedme"),)


def test_nothing_is_reported_to_anyone_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch):
    parse_trackers(["mlflow"])
    utils = importlib.import_module("mlflow.telemetry.utils")
    for testing in ("_IS_IN_CI_ENV_OR_TESTING", "_IS_MLFLOW_DEV_VERSION"):
        monkeypatch.setattr(utils, testing, False)
    assert utils.is_telemetry_disabled()
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    parse_trackers(["mlflow"])
    assert not utils.is_telemetry_disabled()
