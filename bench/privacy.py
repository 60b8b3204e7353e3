"""What a round with differential privacy of rows costs, compared with a plain one in the same run.

    python bench/privacy.py [CELL...]

Prints a Markdown table: medians of interleaved repetitions, everyone training, R = 20 and |D| = 20.
A plain round of pFedMe takes its K = 5 inner steps in the span of the mini-batch. With noise, which leaves
that span, it takes them in all parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from cells import CELLS, interleaved, median, ours

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.privacy.rows import RowPlan, plan_rows
from pfedme.privacy.units import Rows

NAMES = ("fedavg", "mr-mtl", "pfedme")
REPETITIONS, ROUNDS = 15, 5


def planned(algorithm: Algorithm, rows: np.ndarray) -> RowPlan:
    """Privacy with ε = 8 over 100 rounds."""
    took_part = np.full(len(rows), 100)
    return plan_rows(Rows(epsilon=8.0, clip=1.0), algorithm, rows, took_part, 0 * took_part)


def main() -> None:
    """Measures and prints."""
    for cell_name in sys.argv[1:] or ("mnist-mlr", "mnist-dnn"):
        cell, measures = CELLS[cell_name], dict[str, Callable[[], float]]()
        federation = cell.federation()
        for name in NAMES:
            algorithm = ALGORITHMS[name]().with_steps(100.0)
            plan = planned(algorithm, federation.n_train)
            measures[name] = ours(cell, algorithm, federation.clients, ROUNDS)
            measures[f"private {name}"] = ours(cell, algorithm, federation.clients, ROUNDS, plan)
        times = {label: median(values) for label, values in interleaved(measures, REPETITIONS).items()}
        print(f"\n{cell_name}: {federation.clients} clients\n")
        print("| algorithm | plain, ms | private, ms | ratio |\n|---|---|---|---|")
        for name in NAMES:
            plain, private = (1e3 * times[label] for label in (name, f"private {name}"))
            print(f"| {name} | {plain:.1f} | {private:.1f} | {private / plain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
