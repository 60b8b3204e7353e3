"""Time per round of a deployed federation, compared with Flower's own FedAvg with the same model.

    python bench/federation.py [--clients 3] [--rounds 6] [--repeats 3]

On this machine, in turns: Flower's app and ours on the same bare SuperLink and SuperNodes, and the commands
`pfedme server` and `pfedme client`, with TLS and keys. The first round of each run, in which programs are
compiled or read from the cache, is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import datetime
from pathlib import Path

import numpy as np

from pfedme.deploy import BUNDLE
from pfedme.deploy.processes import free_port

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
FEATURES, CLASSES, ROWS = 20, 3, 400


@contextlib.contextmanager
def process(*words: str, log: Path, env: dict[str, str]):
    """A program in a process group of its own, which ends with the block."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]], stdout=file, stderr=file, env=env, start_new_session=True
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def write_tables(folder: Path, clients: int) -> list[Path]:
    """A table for each client."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(FEATURES, CLASSES))
    paths = []
    for k in range(clients):
        x = rng.normal(size=(ROWS, FEATURES))
        y = np.argmax(x @ truth + rng.normal(size=(ROWS, CLASSES)), axis=1)
        path = folder / f"client{k}.csv"
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*(f"x{j}" for j in range(FEATURES)), "y"])
            table.writerows([*(f"{v:.5f}" for v in row), label] for row, label in zip(x, y, strict=True))
        paths.append(path)
    return paths


def submit(app: Path, config: dict[str, object], env: dict[str, str]) -> str:
    """Starts a run; returns its id."""
    words = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(app), "here", "--format", "json", "-c", words],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)["run-id"]


def app(out: Path, rounds: int, clients: int, env: dict[str, str]) -> list[float]:
    """Seconds of each round of our app but the first."""
    config = {"algorithm": "fedavg", "num-server-rounds": rounds, "min-clients": clients, "cohort": clients}
    config |= {"min-replies": clients, "eta": 0.05, "out": str(out)}
    submit(BUNDLE, config, env)
    return round_times(out)


def commands(out: Path, tables: list[Path], rounds: int, env: dict[str, str]) -> list[float]:
    """Seconds of each round but the first with our commands on both sides."""
    names, port = [table.stem for table in tables], free_port()
    keys, clients = out.with_name(f"{out.name}-keys"), str(len(names))
    words = [str(BIN / "pfedme"), "keys", "--server", "localhost", "--clients", *names, "-o", str(keys)]
    subprocess.run(words, env=env, capture_output=True, check=True)
    with contextlib.ExitStack() as stack:
        words = ["pfedme", "server", "--algorithm", "fedavg", "--eta", "0.05", "--rounds", str(rounds)]
        words += ["--cohort", clients, "--min-clients", clients, "--min-replies", clients]
        words += ["--keys", str(keys), "--listen", f"127.0.0.1:{port}", "--out", str(out)]
        stack.enter_context(process(*words, log=out.with_suffix(".log"), env=env))
        for name, table in zip(names, tables, strict=True):
            words = [
                "pfedme",
                "client",
                "--server",
                f"127.0.0.1:{port}",
                "--data",
                str(table),
                "--label",
                "y",
            ]
            words += ["--keys", str(keys / "clients" / name), "--approve", "any"]
            words += ["--state", str(out.with_name(f"{out.name}-{name}"))]
            stack.enter_context(process(*words, log=out.with_name(f"{out.name}-{name}.log"), env=env))
        return round_times(out)


def round_times(out: Path) -> list[float]:
    """Seconds of each round but the first of a run of ours, once it has ended."""
    record = out / "record.json"
    wait_for(lambda: record.exists() and json.loads(record.read_text())["status"] != "running")
    assert json.loads(record.read_text())["status"] == "finished", (out / "server.log").read_text()
    lines = re.findall(r"^(.{23}) Round \d+ of \d+ is done", (out / "server.log").read_text(), re.MULTILINE)
    times = [datetime.fromisoformat(line).timestamp() for line in lines]
    return np.diff(times).tolist()


def flowers(out: Path, rounds: int, env: dict[str, str]) -> list[float]:
    """Seconds of each round of Flower's app but the first."""
    out.mkdir()
    times = out / "times.json"
    submit(
        HERE / "flower",
        {"num-server-rounds": rounds, "features": FEATURES, "classes": CLASSES, "times": str(times)},
        env,
    )
    wait_for(times.exists)
    time.sleep(0.5)
    return json.loads(times.read_text())[1:]


def wait_for(seen, seconds: float = 600.0) -> None:
    """Waits until something is seen."""
    until = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.1)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pfedme-bench-"))
    port = free_port()
    env = {
        **os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(folder),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(HERE / "flower"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    try:
        with contextlib.ExitStack() as stack:
            link = ("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
            link += ("--disable-runtime-dependency-installation",)
            stack.enter_context(process(*link, log=folder / "link.log", env=env))
            wait_for(lambda: healthy(port), 60)
            tables = write_tables(folder, args.clients)
            for k, table in enumerate(tables):
                node = f"name='client{k}' data='{table}' label='y' state-dir='{folder / f'state{k}'}'"
                node += " approve='any'"
                words = ("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}")
                words += ("--port", str(free_port()), "--node-config", node)
                stack.enter_context(process(*words, log=folder / f"node{k}.log", env=env))
            rows = []
            for k in range(args.repeats):
                row = [
                    flowers(folder / f"flowers{k}", args.rounds, env),
                    app(folder / f"app{k}", args.rounds, args.clients, env),
                    commands(folder / f"commands{k}", tables, args.rounds, env),
                ]
                rows.append([statistics.median(times) for times in row])
                print(f"repetition {k + 1}:", *(f"{seconds:.2f} s" for seconds in rows[-1]), flush=True)
        print("\n| clients | program | seconds a round | of Flower's |\n|---|---|---|---|")
        for j, what in enumerate(
            ("Flower's FedAvg", "our app by `flwr run`", "`pfedme server` and `pfedme client`")
        ):
            seconds = statistics.median(row[j] for row in rows)
            ratio = statistics.median(row[j] / row[0] for row in rows)
            print(f"| {args.clients} | {what} | {seconds:.2f} | {ratio:.2f} |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def healthy(port: int) -> bool:
    """Whether the SuperLink answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
