"""Several hosts carry out a run as one process with as many devices does, each with its own rows alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedme.cli import main
from pfedme.cli.hosts import Place, place
from pfedme.data.federation import Federation
from pfedme.data.synthetic import Synthetic
from pfedme.errors import InputError

DRIVER = """
import sys
import pfedme.training.execute, pfedme.training.execution
if sys.argv.pop(1) == "slowly":  # a checkpoint after every round
    pfedme.training.execute.CALL_S = pfedme.training.execution.CHECKPOINT_EVERY_S = 0.0
from pfedme.cli import main
sys.exit(main())
"""
DATA = ["--data", "synthetic:clients=7,rows=30,features=6,classes=3", "--model", "dnn:hidden=5"]
STEPS = ["--R", "2", "--B", "5", "--eta", "0.01", "--alpha", "0.02"]
SHORT = ["run", "pfedme", *DATA, *STEPS, "--rounds", "5", "--cohort", "3", "--eval-every", "5"]
COMPARED = ["compare", "fedavg", "alone:l2=model", *DATA, *STEPS[:6], "--rounds", "2", "--cohort", "3",
            "--seeds", "2", "--personalize", "auto:steps=2,folds=2"]  # fmt: skip
LOST = re.compile(r"pfedme: Another host has ended or cannot be reached; .* 'pfedme resume \S+' continues")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(words: Sequence[str], devices: int = 1, pace: str = "usual") -> subprocess.Popen[str]:
    """pfedme in a process of its own with so many devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, pace, *words], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@contextlib.contextmanager
def started(
    hosts: int, words: Sequence[str], *, devices: int = 1, late: float = 0.0, pace: str = "usual"
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on several hosts on loopback, the last of them so many seconds `late`."""
    port, processes = free_port(), list[subprocess.Popen[str]]()
    try:
        for k in range(hosts):
            time.sleep(late if k == hosts - 1 else 0)
            where = ["--hosts", str(hosts), "--host", str(k), "--coordinator", f"127.0.0.1:{port}"]
            processes.append(start([*words, *where], devices, pace))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finished(hosts: int, words: Sequence[str], **how: Any) -> list[str]:
    """What several hosts print on standard output, when all of them end well."""
    with started(hosts, words, **how) as processes:
        ended = [(*process.communicate(timeout=1500), process.returncode) for process in processes]
    assert [status for *_, status in ended] == [0] * hosts, [error for _, error, _ in ended]
    return [output for output, *_ in ended]


def contents(out: Path) -> dict[str, Any]:
    """All that a finished run or comparison leaves behind, but for its time, its machine and its page."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = str(path.relative_to(out))
        found[name] = path.read_bytes() if path.name != "report.html" else None
        if path.name == "record.json":
            found[name] = record = json.loads(path.read_bytes())
            assert record.pop("status") == "finished"
            assert record.pop("timing")
            assert record.pop("environment")
    return found


def alone(words: Sequence[str], out: Path, devices: int) -> dict[str, Any]:
    """What one process with so many devices leaves behind."""
    process = start([*words, "--out", str(out)], devices)
    _, error = process.communicate(timeout=1500)
    assert process.returncode == 0, error
    return contents(out)


def test_two_hosts_compare_and_personalize_as_one_process_with_two_devices_does(tmp_path: Path):
    """Of three clients in a round, two or three may have their rows on one host, and two seeds of an
    algorithm are trained in one program."""
    printed = finished(2, [*COMPARED, "--out", str(tmp_path / "two"), "--json"])
    assert printed[1] == ""
    assert json.loads(printed[0])["results"].keys() == {"fedavg", "alone", "recommended"}
    found = contents(tmp_path / "two")
    for seed in (0, 1):
        assert f"alone/seed-{seed}/record.json" in found
        assert f"fedavg/seed-{seed}/personalized.safetensors" in found
    assert found == alone(COMPARED, tmp_path / "one", 2)


MORE = {
    "cohort": SHORT,
    "everyone": ["run", "pfedme", *DATA, *STEPS, "--rounds", "4", "--cohort", "7"],
    "state": ["run", "scaffold", *DATA, *STEPS[:6], "--rounds", "6", "--cohort", "3"],
    "quantized": ["run", "fedavg-ft", *DATA, "--F", "2", *STEPS[:6], "--rounds", "4", "--cohort", "3",
                  "--codec", "fedpaq"],
    "auto": ["run", "alone", *DATA, "--R", "3", "--budget", "40"],
    "some evaluated": [*SHORT, "--eval-clients", "3"],
    "held out": ["run", "fedavg", *DATA, *STEPS[:6], "--rounds", "2", "--budget", "20", "--cohort", "3",
                 "--holdout-clients", "0.4", "--personalize", "auto:steps=2,folds=2"],
    "own lambdas": [*SHORT, "--rechoose", "2"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_runs_on_two_hosts_are_the_same_to_the_bit(name: str, tmp_path: Path):
    finished(2, [*MORE[name], "--out", str(tmp_path / "two")])
    assert contents(tmp_path / "two") == alone(MORE[name], tmp_path / "one", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "devices", "words"), [(4, 1, SHORT), (2, 2, SHORT), (4, 1, COMPARED), (2, 2, COMPARED)]
)
def test_four_devices_on_several_hosts_do_what_they_do_in_one_process(
    hosts: int, devices: int, words: list[str], tmp_path: Path
):
    finished(hosts, [*words, "--out", str(tmp_path / "several")], devices=devices)
    assert contents(tmp_path / "several") == alone(words, tmp_path / "one", 4)


@pytest.mark.slow
def test_several_hosts_personalize_a_finished_run_of_a_table(tmp_path: Path):
    """Clients with opposite rules fall into clusters, and the columns of a table have an importance."""
    random = np.random.default_rng(0)
    rows = ["hospital,age,stage,outcome"]
    for k in range(240):
        age, stage = random.normal(50, 10), random.choice(["a", "b", "c"])
        likely = (age > 50) == (k % 6 % 2 == 0)
        rows.append(f"h{k % 6},{age:.1f},{stage},{'yes' if likely else 'no'}")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    table = ["--data", str(tmp_path / "table.csv"), "--client", "hospital", "--label", "outcome"]
    run = tmp_path / "run"
    alone(["run", "fedavg", *table, *STEPS[:6], "--rounds", "4", "--budget", "20"], run, 2)
    for data in ([], table[:2]):
        words = ["personalize", str(run), *data, "--personalize", "auto:steps=2,folds=2"]
        several, one = (tmp_path / f"{name}{len(data)}" for name in ("several", "one"))
        finished(2, [*words, "--out", str(several)])
        found = contents(several)
        assert {"columns.csv", "personalized.csv", "personalized.safetensors"} <= found.keys()
        assert found == alone(words, one, 2)


@pytest.mark.slow
@pytest.mark.parametrize("search", ["tpe", "grid"])
def test_several_hosts_search_as_one_process_does(search: str, tmp_path: Path):
    """Trials are pruned after five; the last two are made by processes that resume the search."""
    words = ["tune", "fedavg", *DATA, "--R", "2", "--B", "5", "--rounds", "16", "--search", search]
    for out, hosts in (("several", 2), ("one", 1)):
        for trials in ("6", "8"):
            own = [*words, "--trials", trials, "--out", str(tmp_path / out)]
            if hosts == 2:
                printed = finished(2, [*own, "--json"])
                assert len(json.loads(printed[0])["trials"]) == int(trials)
                assert printed[1] == ""
            else:
                process = start(own, 2)
                assert process.communicate(timeout=1500)[1] is not None
                assert process.returncode == 0
    for name in ("tune.json", "trials.csv", "tune.md"):
        assert (tmp_path / "several" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


LONG = ["run", "pfedme", *DATA, *STEPS, "--rounds", "400", "--cohort", "3", "--eval-every", "400"]


def until_saved(out: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits for a checkpoint."""
    deadline = time.monotonic() + 1000
    while not (out / "checkpoint.safetensors").exists():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_host_that_falls_silent_ends_the_others(tmp_path: Path):
    """Its connections stay open, as if its network had gone."""
    with started(2, [*LONG, "--out", str(tmp_path / "run")], pace="slowly") as processes:
        until_saved(tmp_path / "run", processes)
        processes[1].send_signal(signal.SIGSTOP)
        _, error = processes[0].communicate(timeout=400)
    assert processes[0].returncode == 1
    assert LOST.search(error), error
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_killed_ends_the_others_and_fewer_resume(victim: int, tmp_path: Path):
    out = tmp_path / "run"
    with started(2, [*LONG, "--out", str(out)], pace="slowly") as processes:
        until_saved(out, processes)
        processes[victim].send_signal(signal.SIGKILL)
        _, error = processes[1 - victim].communicate(timeout=600)
    assert processes[1 - victim].returncode == 1
    assert LOST.search(error), error
    assert "Traceback" not in error
    assert error.count("\n") < 10
    assert json.loads((out / "record.json").read_text())["status"] == "running"
    resumed = start(["resume", str(out)], devices=2)
    _, error = resumed.communicate(timeout=1500)
    assert resumed.returncode == 0, error
    assert contents(out) == alone(LONG, tmp_path / "one", 2)


@pytest.mark.slow
def test_one_process_stops_and_two_hosts_resume_without_the_folder_on_the_second(tmp_path: Path):
    out = tmp_path / "run"
    process = start([*LONG, "--out", str(out)], devices=2, pace="slowly")
    until_saved(out, [process])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    port = free_port()
    places = [["--hosts", "2", "--host", str(k), "--coordinator", f"127.0.0.1:{port}"] for k in range(2)]
    processes = [start(["resume", str(folder), *where]) for folder, where in
                 zip((out, tmp_path / "absent"), places, strict=True)]  # fmt: skip
    errors = [process.communicate(timeout=1500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not (tmp_path / "absent").exists()
    assert contents(out) == alone(LONG, tmp_path / "one", 2)


@pytest.mark.slow
def test_all_hosts_stop_when_one_is_told_to(tmp_path: Path):
    out = tmp_path / "run"
    with started(2, [*LONG, "--out", str(out)], pace="slowly") as processes:
        until_saved(out, processes)
        processes[1].send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [130, 130]
    assert f"'pfedme resume {out}' continues where it stopped" in errors[0]
    assert all("Traceback" not in error for error in errors)


@pytest.mark.slow
def test_a_host_that_is_30_seconds_late_is_waited_for(tmp_path: Path):
    finished(2, [*SHORT, "--out", str(tmp_path / "two")], late=30)
    assert contents(tmp_path / "two") == alone(SHORT, tmp_path / "one", 2)


@pytest.mark.slow
def test_wrong_input_is_said_by_all_hosts(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with started(2, [*SHORT, "--out", str(tmp_path)]) as processes:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    assert all(f"{tmp_path} is not empty and holds no run" in error for error in errors)


MEMORY = """
import gc, sys
from pathlib import Path
import jax
from pfedme.data.synthetic import Synthetic
from pfedme.engine.store import Store
from pfedme.runs.run import load
hosts, host, port = map(int, sys.argv[1:])
if hosts > 1:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, hosts, host, coordinator_bind_address=address)
def held():
    gc.collect()
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024
jax.devices()
before = held()
federation = load(Synthetic(clients=20, rows=8000, features=200, classes=3))
store = jax.block_until_ready(Store.of(federation))
print(held() - before, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_two_hosts_hold_half_of_the_rows_each():
    """The rows are 122 MiB, and all cores of a host share them."""

    def held(hosts: int) -> list[float]:
        environment, port = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}, free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", MEMORY, str(hosts), str(host), str(port)],
                env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
            for host in range(hosts)
        ]  # fmt: skip
        return [float(process.communicate(timeout=1500)[1].splitlines()[-1]) for process in processes]

    (whole,) = held(1)
    assert 120 < whole < 140
    assert all(0.48 * whole < own < 0.56 * whole for own in held(2))


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Seven clients of different sizes."""
    return Synthetic(clients=7, rows=30, features=4, classes=3).load()


def gathered(parts: Sequence[Federation]) -> np.ndarray:
    """The features of all clients, each from the host that has them, in the order of the federation."""
    f = parts[0]
    assert f.home is not None
    own = [
        parts[h].x[s : s + n] for h, s, n in zip(f.home, f.local_start, f.count, strict=True)
    ]  # fmt: skip
    return np.concatenate(own)


@pytest.mark.parametrize("hosts", [2, 3, 7])
def test_hosts_have_all_rows_between_them_and_each_once(hosts: int, federation: Federation):
    parts = [federation.of_host(k, hosts) for k in range(hosts)]
    np.testing.assert_array_equal(gathered(parts), federation.x)
    assert sum(np.any(part.x, axis=1).sum() for part in parts) == len(federation.x)
    assert parts[0].home is not None
    counts = np.bincount(parts[0].home)
    assert counts.max() - counts.min() <= 1
    assert len({part.x.shape for part in parts}) == 1


def test_parts_of_a_federation_change_as_the_whole_does(federation: Federation):
    parts = [federation.of_host(k, 3) for k in range(3)]
    for change in (
        lambda f: f.hold_out(1, 4),
        lambda f: f.take([5, 2, 3]),
        lambda f: f.limit(15),
        lambda f: f.take([6, 0, 1]).hold_out(0, 3),
    ):
        whole, own = change(federation), [change(part) for part in parts]
        np.testing.assert_array_equal(gathered(own), whole.x)
        for part in own:
            np.testing.assert_array_equal(part.y, whole.y)
            np.testing.assert_array_equal(part.n_train, whole.n_train)


def where(*words: str, **environment: str) -> Place | None:
    """The place that options and variables describe."""
    from pfedme.cli.run import parser

    return place(parser().parse_args(["pfedme", *words]), environment)


SLURM = {
    "SLURM_JOB_ID": "4100", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[007-009],big",
}  # fmt: skip


def test_a_place_comes_from_options_then_variables_then_the_scheduler():
    given = ("--hosts", "4", "--host", "1", "--coordinator", "10.0.0.1:7171")
    assert where(*given) == Place(4, 1, "10.0.0.1:7171")
    assert where(*given, **SLURM) == Place(4, 1, "10.0.0.1:7171")
    assert where(**SLURM) == Place(4, 3, f"node007:{61440 + 4102 % 4096}")
    assert where(**{**SLURM, "SLURM_STEP_NODELIST": "big,node1"}) == Place(4, 3, f"big:{61440 + 6}")
    kubernetes = {"PFEDME_HOSTS": "2", "PFEDME_COORDINATOR": "train-0.train:7171"}
    assert where(**kubernetes, JOB_COMPLETION_INDEX="1") == Place(2, 1, "train-0.train:7171")


def test_one_host_needs_no_place():
    assert where() is None
    assert where("--hosts", "1", **SLURM) is None
    assert where(PFEDME_HOSTS="1", **SLURM) is None
    assert where(JOB_COMPLETION_INDEX="3") is None  # a Job of runs that have nothing to do with each other
    assert where(SLURM_NTASKS="4", SLURM_PROCID="0") is None  # a batch script, not one of its steps


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["--hosts", "0"], "at least 1, not '0'"),
        (["--hosts", "two"], "at least 1, not 'two'"),
        (["--host", "1"], "--host needs --hosts"),
        (["--hosts", "2"], "--hosts 2 needs --host, the number of this one"),
        (["--hosts", "2", "--host", "0"], "needs --coordinator"),
        (["--hosts", "2", "--host", "2", "--coordinator", "a:1"], "one of 0 to 1"),
        (["--hosts", "2", "--host", "0", "--coordinator", "a"], "such as 10.0.0.1:7171, not 'a'"),
        (["--hosts", "2", "--host", "0", "--coordinator", "a:0"], "such as 10.0.0.1:7171, not 'a:0'"),
    ],
)
def test_a_place_that_cannot_be(words: list[str], cure: str):
    with pytest.raises(InputError, match=re.escape(cure)):
        where(*words)


def test_pooled_is_refused_on_several_hosts(capsys: pytest.CaptureFixture[str]):
    hosts = ["--hosts", "2", "--host", "0", "--coordinator", "127.0.0.1:1"]
    assert main(["compare", "fedavg", "pooled", *DATA, *hosts]) == 2
    assert "pooled trains on all rows in one place; run it on one host" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["study", "advise", "reproduce", "audit"])
def test_commands_for_one_host_refuse_a_step_of_several(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert main([command]) == 2
    assert f"'pfedme {command}' works on one host, and this is one of 4" in capsys.readouterr().err
