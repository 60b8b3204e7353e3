"""Memory with N clients.

python bench/scale.py N                 a line of JSON: seconds per round, and peak memory
python bench/scale.py N --personalize   the same of a run on MNIST, N of whose clients choose their own models
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from pfedme.algorithms import PFedMe
from pfedme.cli import main as pfedme
from pfedme.core.models import MLR
from pfedme.data.synthetic import Synthetic
from pfedme.engine.simulate import Simulation


def peak_gib() -> float:
    """The most memory this process has held; getrusage would count what its parent held before it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def personalize(clients: int) -> dict[str, float]:
    """Trains, evaluates all clients, finds a model for each of them, and writes all files. Rounds and steps
    are few, because memory does not depend on them."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        data = f"mnist:partition=dirichlet,clients={clients}"
        choice = "--personalize auto:folds=2,steps=20 --eval-every 5 --budget 1"
        words = f"run pfedme --data {data} --model mlr --cohort 100 --rounds 5 {choice} --force --out {out}"
        status = pfedme(words.split())
        assert status == 0
        written = sum(path.stat().st_size for path in Path(out).iterdir())
    return {
        "n": clients,
        "peak_rss_gib": peak_gib(),
        "seconds": time.perf_counter() - begin,
        "written_gib": written / 2**30,
    }


def main(clients: int) -> dict[str, float]:
    """Generates the federation, trains 100 rounds with a cohort of 100, evaluates 1,000 clients."""
    begin = time.perf_counter()
    federation = Synthetic(clients=clients, rows=20).load()
    generated = time.perf_counter()
    simulation = Simulation(
        PFedMe(lam=20.0, eta=0.01, alpha=0.01), MLR(l2=0.001).build(60, 10), federation, cohort=100
    )
    state, _ = simulation.advance(simulation.start(), 1)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        state, finite = simulation.advance(state, 10)
        jax.block_until_ready(state.server)
        assert finite
        times.append((time.perf_counter() - start) / 10)
    start = time.perf_counter()
    who = np.sort(np.random.default_rng(0).choice(clients, min(1000, clients), replace=False))
    evaluation, _ = simulation.evaluate(state, who)
    return {
        "n": clients,
        "round_s": float(np.median(times)),
        "peak_rss_gib": peak_gib(),
        "generate_s": generated - begin,
        "evaluate_s": time.perf_counter() - start,
        "evaluated_clients": len(who),
        "personal_accuracy": evaluation.entry()["personal"]["accuracy"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", type=int)
    parser.add_argument("--personalize", action="store_true")
    asked = parser.parse_args()
    print(json.dumps((personalize if asked.personalize else main)(asked.clients)))
