"""Runs stopped by the machine: killed, told to stop, or out of disk; each goes on to the same result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stops import Results, files_of_at_most, interrupted, tiny

import pfedme.training.execution
from pfedme.algorithms import Alone
from pfedme.cli import main
from pfedme.training.execute import execute


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A short run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    execute(tiny("alone"), folder)
    return Results(folder)


LONG = tiny("alone", algorithm=Alone(R=2, B=5, l2="model"), rounds=12_000, eval_every=600)

DRIVER = """
import resource, sys
import pfedme.training.execution
pfedme.training.execution.CHECKPOINT_EVERY_S = float(sys.argv[1])
if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from pfedme.cli import main
sys.exit(main(sys.argv[3:]))
"""


def command(*argv: str, every: float = 0.02, limit: int = 0) -> list[str]:
    """pfedme with so many seconds between checkpoints, and with files of at most `limit` bytes."""
    return [sys.executable, "-c", DRIVER, str(every), str(limit), *argv]


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """pfedme in a process of its own, which ends with the block."""
    # A shell lets what it starts in the background ignore SIGINT, and so would what the tests start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], seen: Callable[[], bool]) -> None:
    """Waits until something is seen of the process."""
    deadline = time.monotonic() + 240
    while not seen():
        assert process.poll() is None, "the process ended before it was to be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def versions(path: Path, wanted: int) -> Callable[[], bool]:
    """Whether `wanted` versions of the file have been there."""
    seen: set[int] = set()

    def enough() -> bool:
        try:
            seen.add(path.stat().st_mtime_ns)
        except FileNotFoundError:
            return False
        return len(seen) >= wanted

    return enough


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, list[str]]:
    """An uninterrupted longer run, and the words that start it."""
    folder = tmp_path_factory.mktemp("long") / "run"
    result = execute(LONG, folder)
    return Results(folder), result.record["command"].split()[1:]


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_as_if_it_had_not_been(
    long: tuple[Results, list[str]], tmp_path: Path
):
    want, words = long
    out = tmp_path / "run"
    moments = [
        ([*words, "--out", str(out)], lambda: (out / "record.json").exists),
        (["resume", str(out)], lambda: versions(out / "checkpoint.safetensors", 1)),
        (["resume", str(out)], lambda: versions(out / "checkpoint.safetensors", 4)),
    ]
    for argv, moment in moments:
        with started(*argv) as process:
            wait_for(process, moment())
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    assert json.loads((out / "record.json").read_text())["status"] == "running"
    assert main(["resume", str(out)]) == 0
    assert Results(out) == want


@pytest.fixture(
    scope="module",
    params=[signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=["SIGINT", "SIGTERM"],
)
def signalled(
    request: pytest.FixtureRequest,
    long: tuple[Results, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, int, str, str]:
    """The folder of a run that was told to stop, its exit status, and what it printed."""
    out = tmp_path_factory.mktemp("signalled") / "run"
    with started(*long[1], "--out", str(out)) as process:
        wait_for(process, versions(out / "checkpoint.safetensors", 2))
        process.send_signal(request.param)
        printed, err = process.communicate()
    return out, process.returncode, printed, err


def test_a_run_that_is_told_to_stop_says_so(signalled: tuple[Path, int, str, str]):
    _, status, printed, err = signalled
    assert status == 130
    assert printed == ""
    assert "Traceback" not in err
    assert "interrupted" in err.splitlines()[-1]


def test_a_run_that_is_told_to_stop_names_the_folder_to_resume(signalled: tuple[Path, int, str, str]):
    out, _, _, err = signalled
    assert f"pfedme resume {out}" in err.splitlines()[-1]


def test_a_run_that_is_told_to_stop_can_be_resumed(
    signalled: tuple[Path, int, str, str], long: tuple[Results, list[str]]
):
    assert main(["resume", str(signalled[0])]) == 0
    assert Results(signalled[0]) == long[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("alone", {}), ("fedavg", {"rounds": 0, "budget": 12, "eval_every": None})],
    ids=["l2", "rounds"],
)
def test_a_run_stopped_in_its_pilot_ends_as_if_it_had_not_been(
    name: str, options: dict[str, Any], tmp_path: Path
):
    run = tiny(name, **options)
    execute(run, tmp_path / "whole")
    out = interrupted(tmp_path / "run", run, pilot=True)
    assert {p.name for p in out.iterdir()} == {"record.json"}
    assert main(["resume", str(out)]) == 0
    assert Results(out) == Results(tmp_path / "whole")
    told, want = (json.loads((p / "record.json").read_text())["auto"] for p in (out, tmp_path / "whole"))
    assert told == want
    assert told["found"] == ["eta"]


# --- A full disk -------------------------------------------------------------------------------------


def test_a_full_disk_ends_a_run_with_a_sentence_and_spares_the_checkpoint(whole: Results, tmp_path: Path):
    out = interrupted(tmp_path / "run", tiny("alone"))
    path = out / "checkpoint.safetensors"
    before = path.read_bytes()
    limited = command("resume", str(out), every=0, limit=len(before) // 2)
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert f"{path} could not be written: File too large." in done.stderr
    assert f"'pfedme resume {out}'" in done.stderr
    assert path.read_bytes() == before
    assert {p.name for p in out.iterdir()} == {"record.json", "checkpoint.safetensors"}
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole


@pytest.mark.slow
@pytest.mark.parametrize("limit", [500, 3_000, 10_000, 30_000])
def test_wherever_the_disk_fills_up_the_run_can_go_on(
    whole: Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    monkeypatch.setattr(pfedme.training.execution, "CHECKPOINT_EVERY_S", 0.0)
    with files_of_at_most(limit):
        status = main(["resume", str(out)])
    err = capsys.readouterr().err
    assert status == 1
    assert "could not be written: File too large." in err
    assert "Traceback" not in err
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole


def test_a_disk_that_is_full_from_the_start_leaves_a_folder_that_can_be_used(
    whole: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    argv = ["run", "alone", "--data", "synthetic:clients=4,rows=40,features=5,classes=3", "--rounds", "6"]
    argv += ["--cohort", "2", "--R", "2", "--B", "5", "--eval-every", "2", "--out", str(out)]
    with files_of_at_most(100):
        assert main(argv) == 1
    err = capsys.readouterr().err
    assert "could not be written: File too large." in err
    assert main(argv) == 0
    assert Results(out) == whole


@pytest.mark.slow  # tests/test_personalize.py stops one at the same place, without a process of its own
def test_a_run_killed_while_its_clients_choose_is_resumed(tmp_path: Path):
    data = "synthetic:clients=6,rows=30,features=4,classes=3"
    line = ["run", "fedavg", "--data", data, "--rounds", "3", "--R", "2", "--B", "5", "--budget", "6"]
    line += ["--personalize", "auto:steps=3,folds=2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with started(*line, "--out", str(killed)) as process:
        assert process.stderr is not None
        assert any(said.startswith("choice: step 2") for said in process.stderr)
        process.kill()
    assert json.loads((killed / "record.json").read_text())["status"] == "finished"
    assert not (killed / "personalized.json").exists()
    assert main([*line, "--out", str(whole)]) == 0
    assert main(["resume", str(killed)]) == 0
    names = {path.name for path in whole.iterdir()}
    assert names == {path.name for path in killed.iterdir()}
    for name in names - {"record.json", "report.html"}:  # which tell of seconds
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
