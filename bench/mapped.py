"""Training from more rows than memory: time per round and memory, beside the same cohort in memory.

    python bench/mapped.py --gb 40            needs as much room in --at, the folder for temporary files
    python bench/mapped.py --gb 0.2           a check that it runs

Rows have 784 features, as MNIST's. The rows of a client are 4 MB, and a cohort has 100 clients. The file is
deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

from pfedme.algorithms import PFedMe
from pfedme.core.models import DNN, MLR
from pfedme.data.federation import Federation, aligned
from pfedme.data.mapped import open_federation, write
from pfedme.engine.simulate import Simulation
from pfedme.files import atomic_folder

FEATURES, CLASSES, ROWS, COHORT, ROUNDS = 784, 10, 1_280, 100, 100
INFORMATIVE = 16
"""Features that labels depend on."""
BYTES = 4 * FEATURES * ROWS
"""Size of a client."""
IN_MEMORY = 1_000
"""The largest number of clients whose rows are in memory for comparison."""


class Memory:
    """The most memory that this process has had, without and with pages of files, in GiB."""

    def __init__(self) -> None:
        self.peak = [0.0, 0.0]
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            for k, key in enumerate(("RssAnon:", "VmRSS:")):
                self.peak[k] = max(self.peak[k], int(status.split(key)[1].split()[0]) / 2**20)
            time.sleep(0.02)


def make(path: Path, clients: int) -> None:
    """Writes the federation: every client has its own mean and its own rule for labels."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((16 * ROWS, FEATURES), np.float32)
    rule = rng.standard_normal((INFORMATIVE, CLASSES), np.float32)
    block, y = np.empty((ROWS, FEATURES), np.float32), np.empty(clients * ROWS, np.int32)
    with atomic_folder(path) as folder:
        with (folder / "x.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": (clients * ROWS, FEATURES)}
            )
            for i in range(clients):
                at = rng.integers(len(noise) - ROWS)
                np.add(noise[at : at + ROWS], rng.standard_normal(FEATURES, np.float32), out=block)
                own = rule + rng.standard_normal(rule.shape, np.float32)
                y[i * ROWS : (i + 1) * ROWS] = np.argmax(block[:, :INFORMATIVE] @ own, axis=1)
                file.write(block.data)
        x = np.load(folder / "x.npy", mmap_mode="r")
        n_train = np.full(clients, ROWS * 3 // 4)
        whole = Federation(
            x=x, y=y, n_train=n_train, n_test=ROWS - n_train, classes=CLASSES,
            ids=np.arange(clients, dtype=np.uint32),
        )  # fmt: skip
        write(whole, folder, {})


def first(federation: Federation, clients: int, *, mapped: bool) -> Federation:
    """The first clients of a mapped federation, mapped or in memory."""
    rows = clients * ROWS
    x = federation.x[:rows]
    if not mapped:
        x = aligned(x.shape, x.dtype)
        np.copyto(x, federation.x[:rows])
    return Federation(
        x=x, y=np.array(federation.y[:rows]), n_train=federation.n_train[:clients],
        n_test=federation.n_test[:clients], classes=CLASSES, ids=federation.ids[:clients],
        mapped=federation.mapped if mapped else (),
    )  # fmt: skip


def train(path: Path, what: str, model: str) -> dict[str, float | str]:
    """Trains for 100 rounds and evaluates 1,000 clients."""
    memory, begin = Memory(), time.perf_counter()
    federation = open_federation(path)
    if what != "all, cold":
        mapped = what != "some, in memory"
        federation = first(federation, min(IN_MEMORY, federation.clients), mapped=mapped)
        if mapped:  # into the page cache
            for at in range(0, len(federation.x), ROWS):
                federation.x[at : at + ROWS].sum()
    else:
        with (path / "x.npy").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    simulation = Simulation(
        PFedMe(lam=15.0, eta=0.005, alpha=0.005),
        (MLR(l2=0.001) if model == "mlr" else DNN()).build(FEATURES, CLASSES),
        federation,
        cohort=min(COHORT, federation.clients),
    )
    state, _ = simulation.advance(simulation.start(), 1)
    opened = time.perf_counter() - begin
    times = []
    for _ in range(ROUNDS // 10):
        begin = time.perf_counter()
        state, finite = simulation.advance(state, 10)
        jax.block_until_ready(state.server)
        assert finite
        times.append((time.perf_counter() - begin) / 10)
    begin = time.perf_counter()
    who = simulation.evaluated(min(IN_MEMORY, federation.clients))
    evaluation, _ = simulation.evaluate(state, who, train=False)
    return {
        "what": what, "clients": federation.clients, "gb": federation.x.nbytes / 1e9, "start": opened,
        "round": float(np.mean(times)), "median": float(np.median(times)),
        "evaluate": time.perf_counter() - begin, "memory": memory.peak[0], "with pages": memory.peak[1],
        "accuracy": evaluation.entry()["personal"]["accuracy"],
    }  # fmt: skip


def child(*words: str) -> dict[str, float | str]:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Makes the file, measures, prints, and deletes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=40.0)
    parser.add_argument("--model", choices=["mlr", "dnn"], default="mlr")
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    clients = max(COHORT, round(args.gb * 1e9 / BYTES))
    if args.only == "make":
        memory, begin = Memory(), time.perf_counter()
        make(args.at, clients)
        print(json.dumps({"seconds": time.perf_counter() - begin, "memory": memory.peak[0]}))
        return
    if args.only:
        print(json.dumps(train(args.at, args.only, args.model)))
        return
    with tempfile.TemporaryDirectory(dir=args.at) as name:
        path = Path(name) / "federation"
        words = ["--at", str(path), "--gb", str(args.gb), "--model", args.model]
        made = child(*words, "--only", "make")
        print(f"{clients:,} clients, written in {made['seconds']:.0f} s with {made['memory']:.2f} GiB\n")
        print("| rows | GB | start | a round, mean | median | evaluation | memory | and pages of files |")
        print("|---|---|---|---|---|---|---|---|")
        for what in ("all, cold", "some, mapped", "some, in memory"):
            m = child(*words, "--only", what)
            print(
                f"| {what} | {m['gb']:.1f} | {m['start']:.1f} s | {1e3 * float(m['round']):.0f} ms | "
                f"{1e3 * float(m['median']):.0f} ms | {m['evaluate']:.1f} s | {m['memory']:.2f} GiB | "
                f"{m['with pages']:.2f} GiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
