"""What a round of each relative costs, compared with FedAvg in the same run.

    python bench/relatives.py [CELL...]

Prints a Markdown table: medians of interleaved repetitions, everyone training. For IFCA, the time in which
clients choose one of the four models is subtracted; it is given in a column of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
from cells import CELLS, Cell, interleaved, median, ours

from pfedme.algorithms import ALGORITHMS, IFCA, Algorithm, FedAvg
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError

REPETITIONS, ROUNDS = 9, 10


def algorithms() -> dict[str, Algorithm]:
    """All that are federated, FedAvg first, with a small step size."""
    others = [
        cls for cls in ALGORITHMS.values() if cls.federated and cls not in (FedAvg, ALGORITHMS["hypcluster"])
    ]
    made = [cls().with_steps(100.0) for cls in (FedAvg, *others)]
    return {algorithm.name: algorithm for algorithm in made}


def choosing(cell: Cell) -> Callable[[], float]:
    """A function that returns the seconds in which all clients choose one of IFCA's models."""
    federation = cell.federation()
    simulation = Simulation(IFCA(eta=0.01), cell.network(), federation, cohort=federation.clients)
    state = simulation.start()
    jax.block_until_ready(simulation.answer(state))

    def measure() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(simulation.answer(state))
        return time.perf_counter() - begin

    return measure


def main() -> None:
    """Measures and prints."""
    for name in sys.argv[1:] or CELLS:
        cell, measures = CELLS[name], dict[str, Callable[[], float]]()
        for label, algorithm in algorithms().items():
            try:
                measures[label] = ours(cell, algorithm, cell.federation().clients, ROUNDS)
            except InputError:  # it cannot train this model
                continue
        measures["choosing"] = choosing(cell)
        times = {label: median(values) for label, values in interleaved(measures, REPETITIONS).items()}
        choice = times.pop("choosing")
        print(f"\n{name}: FedAvg {1e3 * times['fedavg']:.2f} ms per round\n")
        print("| algorithm | times FedAvg's | choosing, times FedAvg's |\n|---|---|---|")
        for label, seconds in times.items():
            extra = choice if label == "ifca" else 0.0
            chosen = f"{extra / times['fedavg']:.2f}" if extra else ""
            print(f"| {label} | {(seconds - extra) / times['fedavg']:.2f} | {chosen} |", flush=True)


if __name__ == "__main__":
    main()
