"""The process in which a client works: it stays, and it ends when it hangs or has nothing to do."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live import LABEL
from live import table as live_table

from pfedme.algorithms import FedAvg
from pfedme.core.models import MLR
from pfedme.deploy import worker as workers
from pfedme.deploy.messages import Content
from pfedme.deploy.plan import Plan
from pfedme.deploy.worker import Failed, Worker

HELLO = Content({}, {})
NAME = {"name": "north"}
if sys.platform != "linux":
    pytest.skip("processes are looked at in /proc", allow_module_level=True)


def config_in(folder: Path) -> Path:
    """The file from which a worker makes a client."""
    live_table(0).write_csv(folder / "north.csv")
    words = {"data": str(folder / "north.csv"), "label": LABEL, "state-dir": str(folder / "state")}
    config = folder / "client.json"
    config.write_text(json.dumps({**words, **NAME, "max-seconds": 600.0, "approve": "any"}))
    return config


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(config_in(tmp_path_factory.mktemp("worker")))
    yield worker
    worker.stop()


def pid_of(worker: Worker) -> int:
    assert worker.process is not None
    return worker.process.pid


def state(pid: int) -> str:
    """The state of a process, as in /proc; Z if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def soon(true) -> bool:
    until = time.monotonic() + 60
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


def test_one_process_answers_one_message_after_the_other(worker: Worker):
    assert worker.ask("hello", "1", HELLO).words == NAME
    first = pid_of(worker)
    # What is wrong with a message, or with the work on it, is answered and does not end the process.
    assert worker.ask("train", "1", Content({"agreement": "x", "round": 0}, {})).words == {
        **NAME, "error": "it has no agreement; its state folder is new"
    }  # fmt: skip
    for kind, asked in (("hello", None), ("train", Content({"round": []}, {})), ("what", HELLO)):
        assert set(worker.ask(kind, "1", asked).words) == {"name", "error"}
    plan = Plan(algorithm=FedAvg(eta=0.05), model=MLR()).offer()
    told = worker.ask("agree", "2", Content({"plan": plan}, {})).words
    assert json.loads(json.dumps(told)) == told  # nothing but JSON values
    assert pid_of(worker) == first


def test_a_worker_that_hangs_is_ended_and_another_takes_its_place(worker: Worker):
    worker.start()
    stopped, limit = pid_of(worker), worker.limit
    os.kill(stopped, signal.SIGSTOP)  # unlike a long computation, not even its own timer runs
    worker.limit = 0.5
    with pytest.raises(Failed, match="too long"):
        worker.ask("hello", "1", Content({}, {"w": np.zeros(10**6)}))  # more than a socket holds
    assert state(stopped) == "Z"
    worker.limit = limit
    assert worker.ask("hello", "1", HELLO).words == NAME
    assert pid_of(worker) != stopped


def test_a_worker_that_is_killed_at_work_is_known_at_once(worker: Worker):
    worker.start()
    killed = pid_of(worker)
    os.kill(killed, signal.SIGSTOP)
    later = threading.Timer(0.5, os.kill, (killed, signal.SIGKILL))
    later.start()
    with pytest.raises(Failed, match="it ended"):
        worker.ask("hello", "1", HELLO)
    later.join()
    assert state(killed) == "Z"


@pytest.mark.skipif(not importlib.util.find_spec("flwr"), reason="pfedme[flower] is not installed")
def test_the_server_learns_at_once_that_a_worker_has_failed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    from pfedme.deploy.app import read_reply
    from pfedme.deploy.envelope import packed
    from pfedme.deploy.node import _reply

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    worker.start()
    os.kill(pid_of(worker), signal.SIGSTOP)
    monkeypatch.setattr(worker, "limit", 0.5)
    message = Message(packed(HELLO), message_type="query.hello", dst_node_id=1)
    assert read_reply(_reply(message, worker)).error == "its program failed (it took too long)"
    assert "could not be answered: the program for it failed (it took too long)." in capsys.readouterr().out
    other = Message(packed(HELLO), message_type="query.other", dst_node_id=1)
    assert "does not know this kind of message" in read_reply(_reply(other, worker)).error


@pytest.mark.skipif(not importlib.util.find_spec("flwr"), reason="pfedme[flower] is not installed")
def test_the_connection_of_a_client_needs_no_jax():
    code = "import sys, pfedme.deploy.flower, pfedme.deploy.node; print({'jax', 'polars'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_worker_is_ended_after_a_while_without_work(worker: Worker):
    worker.start()
    idle = pid_of(worker)
    worker.rest()
    assert state(idle) != "Z"
    worker.busy -= workers.REST_S
    worker.rest()
    assert state(idle) == "Z"
    worker.rest()


def test_a_worker_does_not_outlive_the_process_that_started_it(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from pfedme.deploy.worker import Worker\n"
        "worker = Worker(Path(sys.argv[1])); worker.start(); print(worker.process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(config_in(tmp_path))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert state(pid) != "Z"
        holder.kill()
        holder.stdout.close()
    assert soon(lambda: state(pid) == "Z")
