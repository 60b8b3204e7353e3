"""Interrupted runs: whatever stops one, going on gives the uninterrupted run's result to the bit."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pfedme.execute
from pfedme.algorithms import ALGORITHMS
from pfedme.cli import main
from pfedme.compare import compare
from pfedme.data.synthetic import Synthetic
from pfedme.errors import InputError
from pfedme.execute import Progress, execute, resume
from pfedme.models import parse_model
from pfedme.run import Run
from pfedme.spec import build

DATA = Synthetic(clients=4, rows=40, features=5, classes=3)


def tiny(name: str, **options: Any) -> Run:
    """A run of a few rounds."""
    given = {"R": 2, "B": 5, **({"F": 3} if name == "fedavg-ft" else {})}
    algorithm = build(ALGORITHMS[name], given, name)
    run = Run(algorithm=algorithm, data=DATA, model=parse_model("mlr"), rounds=6, cohort=2, eval_every=2)
    return dataclasses.replace(run, **options)


class Results:
    """What must not depend on interruptions."""

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / "record.json").read_text())
        assert record["status"] == "finished"
        assert not (folder / "checkpoint.safetensors").exists()
        self.final, self.history, self.config = record["final"], record["history"], record["config"]
        self.model = (folder / "model.safetensors").read_bytes()
        self.clients = (folder / "clients.csv").read_bytes()

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


def stop_at(round: int, *, evaluated: bool | None = None) -> Callable[[Progress], None]:
    """A watcher that interrupts at the first news from `round` or later (of an evaluation, or of none)."""

    def watch(progress: Progress) -> None:
        if progress.round >= round and evaluated in (None, progress.entry is not None):
            raise KeyboardInterrupt

    return watch


def interrupted(folder: Path, run: Run, round: int = 3) -> Path:
    """A folder with a run that was interrupted."""
    with pytest.raises(KeyboardInterrupt):
        execute(run, folder, watch=stop_at(round))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """An uninterrupted run of each algorithm."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ALGORITHMS:
        execute(tiny(name), folder / name)
    return {name: Results(folder / name) for name in ALGORITHMS}


# --- Interrupted by hand -----------------------------------------------------------------------------


MOMENTS = [(0, True), (1, False), (2, True), (3, False), (4, True), (6, False), (6, True)]


@pytest.mark.parametrize(
    ("name", "round", "evaluated"),
    [("alone", *moment) for moment in MOMENTS]
    + [(name, *moment) for name in ALGORITHMS if name != "alone" for moment in MOMENTS[2:4]],
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
    assert "is finished; there is nothing to resume" in refused(capsys, tmp_path / "run")


def test_a_diverged_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["run", "alone", "--data", "synthetic:clients=4,rows=40,features=5,classes=3", "--rounds", "6"]
    argv += ["--cohort", "2", "--R", "2", "--B", "5", "--eta", "1e38", "--out", str(tmp_path / "run")]
    assert main(argv) == 1
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


@pytest.mark.parametrize(("place", "round"), [(0, 0), (1, 3), (2, 6)])
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


# --- Stopped by the machine --------------------------------------------------------------------------

LONG = tiny("alone", rounds=12_000, eval_every=600)

DRIVER = """
import resource, sys
import pfedme.execute
pfedme.execute.CHECKPOINT_EVERY_S = float(sys.argv[1])
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
    process = subprocess.Popen(command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


@pytest.fixture(scope="module", params=[signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
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


# --- A full disk -------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_run_with_a_sentence_and_spares_the_checkpoint(
    whole: dict[str, Results], tmp_path: Path
):
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
    assert Results(out) == whole["alone"]


@pytest.mark.parametrize("limit", [500, 3_000, 10_000, 30_000])
def test_wherever_the_disk_fills_up_the_run_can_go_on(
    whole: dict[str, Results],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
):
    out = interrupted(tmp_path / "run", tiny("alone"))
    monkeypatch.setattr(pfedme.execute, "CHECKPOINT_EVERY_S", 0.0)
    with files_of_at_most(limit):
        status = main(["resume", str(out)])
    err = capsys.readouterr().err
    assert status == 1
    assert "could not be written: File too large." in err
    assert "Traceback" not in err
    assert main(["resume", str(out)]) == 0
    assert Results(out) == whole["alone"]


def test_a_disk_that_is_full_from_the_start_leaves_a_folder_that_can_be_used(
    whole: dict[str, Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    argv = ["run", "alone", "--data", "synthetic:clients=4,rows=40,features=5,classes=3", "--rounds", "6"]
    argv += ["--cohort", "2", "--R", "2", "--B", "5", "--eval-every", "2", "--out", str(out)]
    with files_of_at_most(100):
        assert main(argv) == 1
    err = capsys.readouterr().err
    assert "could not be written: File too large." in err
    assert main(argv) == 0
    assert Results(out) == whole["alone"]
