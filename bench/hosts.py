"""Seconds per round of one process with two devices and of two processes with one each, in turn.

python bench/hosts.py            MNIST DNN, everyone; adds `hosts` to bench/results.json
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import jax
from cells import ALGORITHMS, CELLS, median, ours

from pfedme.files import atomic_write

HERE = Path(__file__).parent
DEVICES = 2
REPETITIONS = 7


def worker(processes: int, number: int, port: int) -> None:
    """One of so many processes: measures a few rounds for each line on standard input."""
    if processes > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, processes, number, coordinator_bind_address=address)
    cell = CELLS["mnist-dnn"]
    measure = ours(cell, ALGORITHMS["pfedme"], cell.federation().clients, rounds=5)
    measure()
    out = os.fdopen(os.dup(2), "w")  # Gloo writes on standard output
    for _ in sys.stdin:
        print(measure(), file=out, flush=True)


def started(processes: int) -> list[subprocess.Popen[str]]:
    """So many workers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(DEVICES // processes)}
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(processes), str(number), str(port)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for number in range(processes)
    ]  # fmt: skip


def seconds(stream: IO[str]) -> float:
    """The next number among the messages of a worker."""
    for line in stream:
        if line.strip().replace(".", "", 1).replace("e-", "", 1).isdecimal():
            return float(line)
    raise RuntimeError("a worker has ended")


def measured(repetitions: int = REPETITIONS) -> list[dict[str, float]]:
    """The seconds per round for each number of processes."""
    groups = {processes: started(processes) for processes in (1, DEVICES)}
    times: dict[int, list[float]] = {processes: [] for processes in groups}
    for _ in range(repetitions):
        for processes, group in groups.items():
            for worker in group:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            times[processes].append(max(seconds(worker.stderr) for worker in group if worker.stderr))
    for group in groups.values():
        for worker in group:
            worker.kill()
            worker.communicate()
    print(json.dumps(times), file=sys.stderr)
    return [{"processes": processes, "round_s": median(own)} for processes, own in times.items()]


def main() -> None:
    """Measures, prints and stores."""
    path = HERE / "results.json"
    results = json.loads(path.read_text())
    results["hosts"] = measured()
    atomic_write(path, json.dumps(results, indent=1))
    print(json.dumps(results["hosts"]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(*map(int, sys.argv[1:]))
    else:
        main()
