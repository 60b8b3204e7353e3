"""What a round with differential privacy of rows costs, compared with a plain one in the same run.

    python bench/privacy.py [CELL...]

Prints a Markdown table: medians of interleaved repetitions, everyone training, R = 20 and |D| = 20. Ratios
are medians too, of each private measurement over the plain one just before it; those of processor time hardly
depend on what else the machine does.
Where `ziglang` is installed, the inner steps of plain pFedMe are machine code, and with PLAIN=xla they are
not; private ones never are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
from cells import CELLS, median, ours

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.core import native
from pfedme.privacy.rows import RowPlan, plan_rows
from pfedme.privacy.units import Rows

NAMES = ("fedavg", "mr-mtl", "pfedme")
REPETITIONS, ROUNDS = 15, 5


def planned(algorithm: Algorithm, rows: np.ndarray) -> RowPlan:
    """Privacy with ε = 8 over 100 rounds."""
    took_part = np.full(len(rows), 100)
    return plan_rows(Rows(epsilon=8.0, clip=1.0), algorithm, rows, took_part, 0 * took_part)


def timed(measure: Callable[[], float]) -> np.ndarray:
    """Seconds of a round, and the processor's seconds."""
    began = time.process_time()
    seconds = measure()
    return np.array([seconds, (time.process_time() - began) / ROUNDS])


def main() -> None:
    """Measures and prints."""
    if os.environ.get("PLAIN") == "xla":
        native.registered = lambda: False
    for cell_name in sys.argv[1:] or ("mnist-mlr", "mnist-dnn"):
        cell = CELLS[cell_name]
        federation = cell.federation()
        pairs = dict[str, tuple[Callable[[], float], Callable[[], float]]]()
        for name in NAMES:
            algorithm = ALGORITHMS[name]().with_steps(100.0)
            plan = planned(algorithm, federation.n_train)
            pairs[name] = (
                ours(cell, algorithm, federation.clients, ROUNDS),
                ours(cell, algorithm, federation.clients, ROUNDS, plan),
            )
        found = {name: [] for name in NAMES}
        for _ in range(REPETITIONS):
            for name, pair in pairs.items():
                found[name].append([timed(measure) for measure in pair])
        print(f"\n{cell_name}: {federation.clients} clients\n")
        print(
            "| algorithm | plain, ms | private, ms | ratio | ratio of processor time |\n|---|---|---|---|---|"
        )
        for name, values in found.items():
            times = np.array(values)  # repetition, plain or private, seconds or the processor's
            plain, private = (1e3 * median(list(times[:, k, 0])) for k in (0, 1))
            ratio, of_processor = (median(list(times[:, 1, k] / times[:, 0, k])) for k in (0, 1))
            print(f"| {name} | {plain:.1f} | {private:.1f} | {ratio:.2f} | {of_processor:.2f} |", flush=True)


if __name__ == "__main__":
    main()
