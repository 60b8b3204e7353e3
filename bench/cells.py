"""The four cells of the paper's experiments, and how our rounds are timed."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import jax

from pfedme.algorithms import Algorithm, FedAvg, PerFedAvg, PFedMe
from pfedme.core.models import Network, parse_model
from pfedme.data import parse_data
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.privacy.rows import RowPlan
from pfedme.runs.run import load


@dataclasses.dataclass(frozen=True)
class Cell:
    """A federation, a model and the paper's cohort; R = 20, K = 5, |D| = 20 throughout."""

    data: str
    model: str
    cohort: int

    def federation(self) -> Federation:
        """The clients."""
        return load(parse_data(self.data))

    def network(self) -> Network:
        """The model."""
        return parse_model(self.model).build(self.federation().features, self.federation().classes)

    def plain_flop(self, K: int = 5, R: int = 20, B: int = 20) -> float:
        """Operations of a round of pFedMe with everyone training, as the plain algorithm counts them.

        Every inner step multiplies each weight matrix with the batch forwards, and backwards for the weights'
        gradient, and (all but the first layer) for the inputs' gradient: 2 |D| m n operations each.
        """
        net = self.network()
        sizes = (net.features, *net.hidden, net.classes)
        products = sum(
            2 * B * m * n * (2 if k == 0 else 3) for k, (m, n) in enumerate(itertools.pairwise(sizes))
        )
        return float(self.federation().clients * R * K * products)


CELLS = {
    "mnist-mlr": Cell("mnist", "mlr:l2=0", 5),
    "mnist-dnn": Cell("mnist", "dnn", 5),
    "synthetic-mlr": Cell("synthetic", "mlr:l2=0", 10),
    "synthetic-dnn": Cell("synthetic", "dnn", 10),
}

ALGORITHMS: dict[str, Algorithm] = {
    "pfedme": PFedMe(eta=0.01, alpha=0.01),
    "fedavg": FedAvg(eta=0.01, aggregation="uniform"),
    "per_fedavg": PerFedAvg(eta=0.001, alpha=0.01),
}


def ours(
    cell: Cell, algorithm: Algorithm, cohort: int, rounds: int, privacy: RowPlan | None = None
) -> Callable[[], float]:
    """A function that trains for `rounds` rounds and returns the seconds per round; compiled already."""
    simulation = Simulation(algorithm, cell.network(), cell.federation(), cohort=cohort, privacy=privacy)
    state, _ = simulation.advance(simulation.start(), 1)

    def measure() -> float:
        begin = time.perf_counter()
        after, finite = simulation.advance(state, rounds)
        jax.block_until_ready(after.server)
        assert finite
        return (time.perf_counter() - begin) / rounds

    return measure


def interleaved(measures: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Each measurement `repetitions` times, in turn, so that a busy moment meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            times[name].append(measure())
    return times


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)
