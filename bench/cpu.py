"""Processor time of a round, of all threads and on one device: it says more than wall time on a busy machine.

python bench/cpu.py mnist-dnn:5 mnist-dnn:50 synthetic-mlr:5:cohort    cell, K and who trains
python bench/cpu.py mnist-dnn:fedavg                                   or another algorithm
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time

os.environ["JAX_NUM_CPU_DEVICES"] = "1"

import jax
from cells import ALGORITHMS, CELLS, interleaved

from pfedme.algorithms import PFedMe
from pfedme.engine.simulate import Simulation

REPETITIONS = int(os.environ.get("REPETITIONS", "9"))


def measure(spec: str):
    """A function that returns the milliseconds of processor time of a round."""
    name, what, *who = spec.split(":")
    cell, pfedme = CELLS[name], ALGORITHMS["pfedme"]
    assert isinstance(pfedme, PFedMe)
    algorithm = dataclasses.replace(pfedme, K=int(what)) if what.isdigit() else ALGORITHMS[what]
    federation = cell.federation()
    cohort, rounds = (cell.cohort, 10) if who == ["cohort"] else (federation.clients, 3)
    simulation = Simulation(algorithm, cell.network(), federation, cohort=cohort)
    state, _ = simulation.advance(simulation.start(), 1)

    def once() -> float:
        begin = time.process_time()
        after, finite = simulation.advance(state, rounds)
        jax.block_until_ready(after.server)
        assert finite
        return 1e3 * (time.process_time() - begin) / rounds

    return once


if __name__ == "__main__":
    for spec, times in interleaved({s: measure(s) for s in sys.argv[1:]}, REPETITIONS).items():
        print(f"{spec:28s} least {min(times):8.2f}  median {statistics.median(times):8.2f} ms")
