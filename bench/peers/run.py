"""Our rounds and those of public libraries: `make bench-peers`. Writes peers.json and peers.md in bench/.

python bench/peers/run.py            everything
python bench/peers/run.py --quick    one repetition: a check that it runs

FedAvg (and pFedMe of fluke-fl) on the four cells of bench/cells.py: R = 20 local steps, batches of 20 rows,
step size 0.01, no evaluation, the first round not counted. Each library runs in its own environment, and
ours runs right after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from cells import ALGORITHMS, CELLS, Cell, median, ours
from common import Task, write_task
from environments import Peer, peers

from pfedme.engine.devices import cores
from pfedme.files import atomic_write

BENCH = Path(__file__).parents[1]
PEER_ROUNDS = {"everyone": 2, "cohort": 6}
OUR_ROUNDS = {"everyone": 20, "cohort": 100}
OURS = {"FedAvg": "fedavg", "pFedMe": "pfedme"}
LIMIT = 600.0
"""Seconds after which a library's process is ended."""
ERROR = re.compile(r"\b\w*(Error|Exception|ERROR): ")

Seconds = dict[str, dict[str, float]]
"""Seconds per round, by what was run ('FedAvg', 'pFedMe') and who trained ('everyone', 'cohort')."""


class Failed(Exception):
    """A library did not install or run; one line says why."""


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def task(cell: Cell) -> Task:
    """The cell's training rows, one client after the other, and what to do with them."""
    f, net = cell.federation(), cell.network()
    rows = np.concatenate([np.arange(a, a + n) for a, n in zip(f.start, f.n_train, strict=True)])
    sizes = (net.features, *net.hidden, net.classes)
    return Task(f.x[rows], f.y[rows], f.n_train, sizes, cell.cohort, PEER_ROUNDS)


def reason(output: str) -> str:
    """One line of a failed program's output: the last that names an error, or else the last."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    # torchrun ends with an error of its own, which only says that there was one.
    errors = [line for line in lines if ERROR.search(line) and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][:300]


def install(peer: Peer) -> None:
    """Makes the library's environment."""
    try:
        peer.install()
    except subprocess.CalledProcessError as error:
        raise Failed(f"not installed: {reason(error.stderr)}") from error


def run_peer(peer: Peer, folder: Path, cell: str) -> Seconds:
    """One repetition of a library in a process of its own."""
    out = folder / f"{cell}.{peer.name}.json"
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(BENCH),
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
    }
    process = subprocess.Popen(
        peer.command(str(folder / f"{cell}.npz"), str(out)),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not finished after {LIMIT:.0f} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0 or not out.is_file():
        raise Failed(f"failed: {reason(output)}")
    return json.loads(out.read_text())


def our_measures(cell: Cell) -> dict[tuple[str, str], Callable[[], float]]:
    """Our measurements of a cell, compiled, by algorithm and who trains."""
    trains = {"everyone": cell.federation().clients, "cohort": cell.cohort}
    return {
        (name, who): ours(cell, ALGORITHMS[key], trains[who], OUR_ROUNDS[who])
        for name, key in OURS.items()
        for who in trains
    }


def summary(values: list[float]) -> dict[str, Any]:
    """Median and spread."""
    return {"median_s": median(values), "spread_s": [min(values), max(values)]}


def compared(theirs: list[Seconds], mine: list[Seconds]) -> dict[str, Any]:
    """Both sides of all that was measured, and how many times faster ours is."""
    result: dict[str, Any] = {}
    for name, by_who in theirs[0].items():
        result[name] = {}
        for who in by_who:
            peer = summary([seconds[name][who] for seconds in theirs])
            our = summary([seconds[name][who] for seconds in mine])
            times = peer["median_s"] / our["median_s"]
            result[name][who] = {"peer": peer, "ours": our, "times_faster": times}
    return result


class Comparison:
    """A library's repetitions on one cell, ours after each of them."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.theirs: list[Seconds] = []
        self.mine: list[Seconds] = []
        self.reason: str | None = None

    def repeat(self, folder: Path, cell: str, our: dict[tuple[str, str], Callable[[], float]]) -> None:
        """One repetition; none after a failure."""
        if self.reason is not None:
            return
        begin = time.perf_counter()
        try:
            theirs = run_peer(self.peer, folder, cell)
        except Failed as error:
            self.reason = str(error)
            say(f"{cell}: {self.peer.name}: {self.reason}")
            return
        mine = {
            name: {who: our[name.split(",")[0], who]() for who in by_who} for name, by_who in theirs.items()
        }
        self.theirs.append(theirs)
        self.mine.append(mine)
        say(f"{cell}: {self.peer.name} in {time.perf_counter() - begin:.0f} s")

    def result(self) -> dict[str, Any]:
        """What is stored."""
        measured = None if self.reason is not None else compared(self.theirs, self.mine)
        return {"result": measured, "reason": self.reason}


def measure(name: str, cell: Cell, able: list[Peer], repetitions: int) -> dict[str, Any]:
    """All libraries on one cell."""
    comparisons = [Comparison(peer) for peer in able]
    our = our_measures(cell)
    with tempfile.TemporaryDirectory() as scratch:
        write_task(Path(scratch) / f"{name}.npz", task(cell))
        for _ in range(repetitions):
            for comparison in comparisons:
                comparison.repeat(Path(scratch), name, our)
    return {comparison.peer.name: comparison.result() for comparison in comparisons}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| cell | library | algorithm | everyone | ours | times faster | cohort | ours | times faster |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    failures = []
    for cell, by_peer in results["cells"].items():
        for peer, outcome in by_peer.items():
            label = results["peers"][peer]["label"]
            if outcome["result"] is None:
                failures.append(f"- {label}, {cell}: {outcome['reason']}")
                continue
            for name, by_who in outcome["result"].items():
                cells = " | ".join(
                    f"{1e3 * t['peer']['median_s']:.1f} ms | {1e3 * t['ours']['median_s']:.1f} ms "
                    f"| {t['times_faster']:.1f}"
                    for t in (by_who["everyone"], by_who["cohort"])
                )
                lines.append(f"| {cell} | {label} | {name} | {cells} |")
    failures += [
        f"- {peer['label']}: {peer['reason']}" for peer in results["peers"].values() if peer["reason"]
    ]
    if failures:
        lines += ["", "Without a result:", "", *failures]
    lines += [
        "",
        f"Time per round, median of {results['repetitions']}, on {results['machine']['cores']} cores; R = 20 "
        "local steps, batches of 20 rows, no evaluation. Libraries with PyTorch use one thread a process.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--out", type=Path, default=BENCH, help="folder for peers.json and peers.md")
    args = parser.parse_args()
    repetitions = 1 if args.quick else 3
    results: dict[str, Any] = {
        "machine": {"cores": cores()},
        "repetitions": repetitions,
        "peers": {},
        "cells": {},
    }
    able = []
    for peer in peers(processes=min(cores(), *(cell.cohort for cell in CELLS.values()))):
        failure = None
        try:
            install(peer)
            able.append(peer)
        except Failed as error:
            failure = str(error)
            say(f"{peer.name}: {failure}")
        results["peers"][peer.name] = {"label": peer.label, "pins": peer.pins, "reason": failure}
    for name, cell in CELLS.items():
        results["cells"][name] = measure(name, cell, able, repetitions)
    args.out.mkdir(parents=True, exist_ok=True)
    atomic_write(args.out / "peers.json", json.dumps(results, indent=1))
    atomic_write(args.out / "peers.md", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
