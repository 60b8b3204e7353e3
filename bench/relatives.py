"""What a round of each relative costs, compared with FedAvg in the same run.

    python bench/relatives.py [CELL...]

Prints a Markdown table: medians of interleaved repetitions, everyone training. In a round
of IFCA, clients evaluate all of its models on all of their rows to choose one; the last
line is the same round with models that are given, so the difference is what choosing costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from cells import CELLS, interleaved, median, ours

from pfedme.algorithms import ALGORITHMS, IFCA, Algorithm, FedAvg
from pfedme.algorithms.base import Models
from pfedme.core.tree import record
from pfedme.errors import InputError

REPETITIONS, ROUNDS = 9, 10


@record
class Given(IFCA):
    """IFCA in which client i always uses model i mod k."""

    name = "ifca without choosing"

    def send(self, server: Any, i: jax.Array) -> Any:
        """The client's model's number, and all models."""
        return i % self.clusters, server[1]

    def answer(self, key: jax.Array, problem: Any, sent: Any, state: Any) -> Any:
        """Its model."""
        return Models(personal=sent[1][sent[0]]), {"cluster": sent[0]}


def algorithms() -> dict[str, Algorithm]:
    """All that are federated, FedAvg first, with a small step size."""
    others = [
        cls for cls in ALGORITHMS.values() if cls.federated and cls not in (FedAvg, ALGORITHMS["hypcluster"])
    ]
    made = [cls().with_steps(100.0) for cls in (FedAvg, *others, Given)]
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
