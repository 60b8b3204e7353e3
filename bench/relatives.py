"""What a round of each relative costs, compared with FedAvg in the same run.

    python bench/relatives.py [CELL...]

Prints a Markdown table: medians of interleaved repetitions, everyone training. IFCA's
rounds include the evaluation of all its models on all rows, by which clients choose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from cells import CELLS, interleaved, median, ours

from pfedme.algorithms import ALGORITHMS, Algorithm, FedAvg
from pfedme.errors import InputError

REPETITIONS, ROUNDS = 9, 10


def algorithms() -> dict[str, Algorithm]:
    """All that are federated, FedAvg first, with a small step size."""
    others = [
        cls for cls in ALGORITHMS.values() if cls.federated and cls not in (FedAvg, ALGORITHMS["hypcluster"])
    ]
    made = [cls().with_steps(100.0) for cls in (FedAvg, *others)]
    return {algorithm.name: algorithm for algorithm in made}


def main() -> None:
    """Measures and prints."""
    for name in sys.argv[1:] or CELLS:
        cell, measures = CELLS[name], dict[str, Callable[[], float]]()
        for label, algorithm in algorithms().items():
            try:
                measures[label] = ours(cell, algorithm, cell.federation().clients, ROUNDS)
            except InputError:  # it cannot train this model
                continue
        times = {label: median(values) for label, values in interleaved(measures, REPETITIONS).items()}
        print(f"\n{name}: FedAvg {1e3 * times['fedavg']:.2f} ms per round\n")
        print("| algorithm | times FedAvg's |\n|---|---|")
        for label, seconds in times.items():
            print(f"| {label} | {seconds / times['fedavg']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
