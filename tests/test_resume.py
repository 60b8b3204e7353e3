"""Interrupted runs: whatever stops one, going on gives the uninterrupted run's result to the bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from laws import PAPERS
from stops import DATA, Results, interrupted, stop_at, tiny

from pfedme.cli import main
from pfedme.errors import InputError
from pfedme.runs.run import Run
from pfedme.training.compare import compare
from pfedme.training.execute import execute, resume
from pfedme.training.execution import Progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """An uninterrupted run of each algorithm."""
    folder = tmp_path_factory.mktemp("whole")
    for name in PAPERS:
        execute(tiny(name), folder / name)
    return {name: Results(folder / name) for name in PAPERS}


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_pilot_begins_it_again(tmp_path: Path):
    run = tiny("alone", rounds=0, budget=12, eval_every=None)
    execute(run, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(run, tmp_path / "run", watch=stop_at(5, pilot=True))
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert Results(tmp_path / "run") == Results(tmp_path / "whole")


# --- Interrupted by hand -----------------------------------------------------------------------------


MOMENTS = [(0, True), (1, False), (2, True), (3, False), (4, True), (6, False), (6, True)]


@pytest.mark.parametrize(
    ("name", "round", "evaluated"),
    [
        pytest.param("alone", *moment, marks=[pytest.mark.slow] * (moment not in MOMENTS[1:3]))
        for moment in MOMENTS
    ]
    + [(name, *moment) for name in PAPERS if name != "alone" for moment in MOMENTS[2:3]],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    whole: dict[str, Results], tmp_path: Path, name: str, round: int, evaluated: bool
):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        execute(tiny(name), out, watch=stop_at(round, evaluated=evaluated))
    assert json.loads((out / "record.json").read_text())["status"] == "running"
    assert (out / "checkpoint.safetensors").exists()
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole[name]


@pytest.mark.parametrize("name", ["pfedme", "alone"])
def test_a_run_may_be_interrupted_again_and_again(whole: dict[str, Results], tmp_path: Path, name: str):
    def watch(progress: Progress) -> None:
        if progress.round < progress.rounds:
            raise KeyboardInterrupt

    out, times = tmp_path / "run", 0
    with pytest.raises(KeyboardInterrupt):
        execute(tiny(name), out, watch=watch)
    while json.loads((out / "record.json").read_text())["status"] == "running":
        times += 1
        assert times < 20
        try:
            resume(out, watch=watch)
        except KeyboardInterrupt:
            continue
    assert times > 4
    assert Results(out) == whole[name]


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(
    whole: dict[str, Results], tmp_path: Path
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    (out / "checkpoint.safetensors").unlink()
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole["alone"]


def test_leftovers_of_a_killed_write_do_not_matter(whole: dict[str, Results], tmp_path: Path):
    out = interrupted(tmp_path / "run", tiny("alone"))
    for name in ("record.json", "checkpoint.safetensors", "model.safetensors", "clients.csv", "curves.png"):
        (out / f".{name}.8x0_ab3q").write_bytes(b'{"status": "fin')
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole["alone"]


def test_resume_prints_the_result_as_json(
    whole: dict[str, Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    assert main(["resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final"] == whole["alone"].final


# --- What cannot be resumed --------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What `pfedme resume` says about a folder that it refuses and leaves as it is."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    status = main(["resume", str(folder)])
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("pfedme: ")
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return err


def test_a_finished_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    execute(tiny("alone"), tmp_path / "run")
    assert main(["resume", str(tmp_path / "run")]) == 0  # its page was missing
    assert (tmp_path / "run" / "report.html").exists()
    capsys.readouterr()
    assert "is finished; there is nothing to resume" in refused(capsys, tmp_path / "run")


def test_a_diverged_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["run", "alone", "--data", "synthetic:clients=4,rows=40,features=5,classes=3", "--rounds", "6"]
    argv += ["--cohort", "2", "--R", "2", "--B", "5", "--eta", "1e38", "--model", "mlr:l2=0.001"]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 1
    capsys.readouterr()
    assert "diverged, and would again" in refused(capsys, tmp_path / "run")


def test_an_empty_folder_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run").mkdir()
    err = refused(capsys, tmp_path / "run")
    assert str(tmp_path / "run") in err
    assert "no record.json" in err


def test_a_missing_folder_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert f"no folder {tmp_path / 'run'}" in refused(capsys, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run").write_text("x")
    assert f"no folder {tmp_path / 'run'}" in refused(capsys, tmp_path / "run")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "{}", '{"status": "running"}', "\x80"])
def test_a_damaged_record_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_bytes(content.encode("latin-1"))
    assert str(tmp_path / "run") in refused(capsys, tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"config": {}},
        {"config": {"algorithm": {"name": "alone"}}},
        {"version": "0.0.0"},
        {"version": None},
    ],
    ids=["no-config", "empty-config", "half-a-config", "other-version", "no-version"],
)
def test_a_record_that_does_not_describe_a_run_of_this_version_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    record = json.loads((out / "record.json").read_text())
    (out / "record.json").write_text(json.dumps(record | change))
    refused(capsys, out)


@pytest.mark.parametrize(
    ("place", "value"),
    [("rounds", 2.5), ("rounds", "many"), ("cohort", 9), ("seed", -1), ("rounds", None), ("seed", None)],
)
def test_a_record_with_a_wrong_number_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, value: Any
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    (out / "checkpoint.safetensors").unlink()
    record = json.loads((out / "record.json").read_text())
    record["config"][place] = value
    (out / "record.json").write_text(json.dumps(record))
    assert place in refused(capsys, out)


def test_a_truncated_checkpoint_is_refused_with_a_cure_that_works(
    whole: dict[str, Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    path = out / "checkpoint.safetensors"
    content = path.read_bytes()
    for size in (0, 5, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        err = refused(capsys, out)
        assert str(path) in err
        assert "delete checkpoint.safetensors" in err
    path.unlink()
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole["alone"]


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(tmp_path: Path):
    out = interrupted(tmp_path / "run", tiny("alone"))
    path = out / "checkpoint.safetensors"
    content = path.read_bytes()
    places = [*range(0, 60), *range(60, len(content), 41), len(content) - 1]
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(InputError, match=r"checkpoint\.safetensors"):
            resume(out)


def test_a_damaged_checkpoint_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = interrupted(tmp_path / "run", tiny("alone"))
    path = out / "checkpoint.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 8]) + content[-2:])
    err = refused(capsys, out)
    assert "checksum does not match" in err
    assert "delete checkpoint.safetensors" in err


@pytest.mark.parametrize(
    "other",
    [
        tiny("alone", seed=1),
        tiny("alone", rounds=7),
        tiny("alone", data=dataclasses.replace(DATA, seed=1)),
        tiny("fedavg"),
    ],
    ids=["seed", "rounds", "data", "algorithm"],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: Run
):
    one = interrupted(tmp_path / "one", tiny("alone"))
    another = interrupted(tmp_path / "other", other)
    shutil.copy(another / "checkpoint.safetensors", one / "checkpoint.safetensors")
    assert "belongs to another run" in refused(capsys, one)


# --- Comparisons -------------------------------------------------------------------------------------


JOBS = [tiny("fedavg"), tiny("alone")]


@pytest.fixture(scope="module")
def whole_comparison(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of an uninterrupted comparison."""
    out = tmp_path_factory.mktemp("whole") / "compare"
    compare(JOBS, 2, out)
    return (out / "compare.csv").read_bytes()


@pytest.mark.parametrize(
    ("place", "round"), [(1, 3), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((0, 0), (2, 6)))]
)
def test_a_resumed_comparison_is_the_uninterrupted_one(
    whole_comparison: bytes, tmp_path: Path, place: int, round: int
):
    def watch(label: str, at: int, progress: Progress) -> None:
        if at == place and progress.round >= round:
            raise KeyboardInterrupt

    out = tmp_path / "compare"
    with pytest.raises(KeyboardInterrupt):
        compare(JOBS, 2, out, watch=watch)
    assert not (out / "compare.csv").exists()
    assert main(["resume", str(out)]) == 0
    assert (out / "compare.csv").read_bytes() == whole_comparison
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_comparison_that_was_killed_between_two_runs_is_resumed(whole_comparison: bytes, tmp_path: Path):
    out = tmp_path / "compare"
    compare(JOBS, 2, out)
    (out / "compare.csv").unlink()
    shutil.rmtree(out / "alone" / "seed-1")
    (out / "alone" / "seed-0" / "record.json").unlink()
    assert main(["resume", str(out)]) == 0
    assert (out / "compare.csv").read_bytes() == whole_comparison


@pytest.mark.parametrize("content", ["", "[", "{}", '[{"label": "x"}]'])
def test_a_damaged_plan_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str):
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "compare.json").write_text(content)
    assert "compare.json" in refused(capsys, tmp_path / "compare")
