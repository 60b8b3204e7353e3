"""Runs and comparisons that find everything out by themselves, killed in any phase: the same to the byte."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_stopped import started, wait_for

import pfedme.files
import pfedme.training.execute
import pfedme.training.execution
from pfedme.cli import main
from pfedme.data.table import Table

SEED = 15
"""Of the moments at which processes are killed."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of six sites with two classes."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("table") / "sites.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["site", "age", "dose", "smoker", "outcome"])
        for site in "abcdef":
            effect = rng.normal()
            for _ in range(24):
                age, dose, smoker = rng.normal(60, 9), rng.random(), rng.choice(["yes", "no"])
                ill = (age - 60) / 9 + effect * dose + (smoker == "yes") + rng.normal(0, 0.7) > 0.5
                rows.writerow([site, f"{age:.1f}", f"{dose:.2f}", smoker, "ill" if ill else "well"])
    return path


def words(table: Path, *command: str) -> list[str]:
    """A command on the table that leaves rounds and step sizes open."""
    return [*command, "--data", str(table), "--client", "site", "--label", "outcome", "--R", "5"]


def contents(out: Path) -> dict[str, Any]:
    """Everything that a finished run or comparison leaves behind, but for what tells of time."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "record.json":
            record = json.loads(path.read_text())
            assert record.pop("status") == "finished"
            assert record.pop("timing")
            found[name] = record
        elif path.is_file() and not path.name.startswith("."):  # what a killed write leaves
            found[name] = path.read_bytes() if path.name != "report.html" else None
    return found


def begun(out: Path) -> bool:
    """Whether there is something to resume."""
    return (out / "record.json").exists() or (out / "compare.json").exists()


def phase(out: Path) -> str:
    """How far a command that can be resumed had come."""
    records = [json.loads(path.read_text()) for path in out.rglob("record.json")]
    running = [record for record in records if record["status"] == "running"]
    if running:
        return "training" if "auto" in running[0] else "pilot"
    if (out / "compare.json").exists():
        return "comparing"
    wanted = "personalize" in records[0]["config"] and not (out / "personalized.json").exists()
    return "choosing" if wanted else "page"


def kill_after(argv: list[str], out: Path, seconds: float) -> str:
    """Kills a command so many seconds after its folder can be resumed; the phase that it was in."""
    with started(*argv) as process:
        wait_for(process, lambda: begun(out))
        try:
            process.wait(seconds)
            return "done"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return phase(out)


def duration(argv: list[str], out: Path) -> float:
    """Seconds from when its folder can be resumed to the end of a command that nobody stops."""
    with started(*argv) as process:
        wait_for(process, lambda: begun(out))
        start = time.monotonic()
        assert process.wait() == 0
        return time.monotonic() - start


COMMANDS = {
    "run": ("run", "fedavg"),
    "personalize": ("run", "fedavg", "--personalize", "auto"),
    "compare": ("compare", "fedavg", "alone"),
}


class Killed(BaseException):
    """Ends a command as if it had been killed: nothing handles it."""


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every round, so that the writes of a command are always the same."""
    monkeypatch.setattr(pfedme.training.execute, "CALL_S", 0.0)
    monkeypatch.setattr(pfedme.training.execution, "CHECKPOINT_EVERY_S", 0.0)


def kill_after_write(number: int, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Kills a command right after so many files have been written, if it writes as many; how many it wrote.

    What is on the disk only changes by these writes, and by checkpoints that are deleted.
    """
    written = 0

    def replace(scratch: str, path: Path) -> None:
        nonlocal written
        os.rename(scratch, path)
        written += 1
        if written == number:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(pfedme.files.os, "replace", replace)
        with contextlib.suppress(Killed):
            assert main(argv) == 0
    return written


def assert_resumed_alike(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int] = ()
) -> dict[str, Any]:
    """Kills a command after each of its writes, or after those with these numbers, and resumes it: it ends as
    if it had not been. What it leaves behind is returned."""
    writes = kill_after_write(0, [*line, "--out", str(tmp_path / "whole")], monkeypatch)
    want = contents(tmp_path / "whole")
    for number in numbers or range(1, writes + 1):
        out = tmp_path / f"killed-{number}"
        assert kill_after_write(number, [*line, "--out", str(out)], monkeypatch) == number
        nothing_left = number == writes and line[0] == "run"
        assert main(["resume", str(out)]) == (2 if nothing_left else 0)
        assert contents(out) == want, f"killed after write {number} of {writes}"
    return want


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param(
            "personalize", [2], marks=pytest.mark.slow
        ),  # the pilot has ended, and there is no checkpoint
        ("compare", [20]),
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in COMMANDS),
    ],
)
def test_killed_after_a_write_and_resumed(
    name: str, numbers: Sequence[int], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    line = [*words(table, *COMMANDS[name]), "--budget", "9", "--eval-every", "2"]
    assert_resumed_alike(line, tmp_path, monkeypatch, numbers)


@pytest.mark.usefixtures("steady")
@pytest.mark.slow
def test_killed_while_steps_become_smaller_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The curvature of a client that is not among those looked at is hundreds of times the others'."""
    table, rows = tmp_path / "sites.csv", np.random.default_rng(0).normal(size=(40, 8, 2))

    def write() -> None:
        lines = [f"{site:02},{a:.3f},{b:.3f},{a - b:.3f}" for site in range(40) for a, b in rows[site]]
        table.write_text("\n".join(["site,a,b,y", *lines]) + "\n")

    write()
    federation = Table(path=str(table), client="site", label="y").load()
    assert 4 not in np.linspace(0, 39, 32).astype(int)
    rows[int(federation.name(np.argsort(federation.ids)[4]))] *= 30
    write()
    line = ["run", "fedavg", "--data", str(table), "--client", "site", "--label", "y", "--rounds", "2"]
    want = assert_resumed_alike([*line, "--R", "20", "--B", "4"], tmp_path, monkeypatch, [4, 5])
    assert want["record.json"]["auto"]["retries"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_twice_at_ten_random_moments_and_resumed(name: str, table: Path, tmp_path: Path):
    line = words(table, *COMMANDS[name])
    assert main([*line, "--out", str(tmp_path / "whole")]) == 0
    want = contents(tmp_path / "whole")
    timed = [tmp_path / "timed", tmp_path / "again"]
    lasts = min(duration([*line, "--out", str(out)], out) for out in timed)
    assert [contents(out) == want for out in timed] == [True, True]
    rng, phases = np.random.default_rng(SEED), []
    for k in range(10):
        out = tmp_path / f"killed-{k}"
        begin, again = [*line, "--out", str(out)], ["resume", str(out)]
        seen = kill_after(begin, out, lasts * (k + rng.random()) / 10)
        phases.append(seen)
        if seen != "done":
            seen = kill_after(again, out, lasts * rng.random() / 2)
        if seen != "done":
            assert main(again) in (0, 2)  # 2 if nothing was left to do
        assert contents(out) == want, (k, phases)
    assert len(set(phases) - {"done"}) >= 2, phases
    print(name, phases)
