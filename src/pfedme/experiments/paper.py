"""The paper's settings and printed results, and the runs that they describe."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from pfedme.algorithms import Algorithm, Alone, FedAvg, FedAvgFT, PerFedAvg, PFedMe
from pfedme.core.models import DNN, MLR
from pfedme.data import parse_data
from pfedme.runs.run import Run

Version = Literal["released", "written"]
Data = str
"""`mnist` or `synthetic`."""
Kind = str
"""`mlr` or `dnn`."""

CELLS: tuple[tuple[Data, Kind], ...] = (
    ("mnist", "mlr"), ("mnist", "dnn"), ("synthetic", "mlr"), ("synthetic", "dnn"),
)  # fmt: skip
ROUNDS = {"mnist": 800, "synthetic": 600}
COHORT = {"mnist": 5, "synthetic": 10}
DECAY = 0.001
"""The released code's weight decay, which the paper does not print."""


class Tuned(NamedTuple):
    """The settings of table 1 for one cell."""

    lam: float
    eta: float
    alpha: float
    """The inner step, which the table does not print."""
    fedavg: float
    per_fedavg: tuple[float, float]
    """α̂ and β̂."""


TUNED: dict[tuple[Data, Kind], Tuned] = {
    ("mnist", "mlr"): Tuned(15, 0.01, 0.1, 0.02, (0.03, 0.003)),
    ("mnist", "dnn"): Tuned(30, 0.01, 0.05, 0.02, (0.02, 0.001)),
    ("synthetic", "mlr"): Tuned(20, 0.01, 0.01, 0.02, (0.02, 0.002)),
    ("synthetic", "dnn"): Tuned(30, 0.01, 0.01, 0.03, (0.01, 0.001)),
}
SAME: dict[tuple[Data, Kind], Tuned] = {
    (data, kind): Tuned(
        15 if data == "mnist" else 20,
        0.005,
        {("mnist", "mlr"): 0.1, ("mnist", "dnn"): 0.09}.get((data, kind), 0.01),
        0.005,
        (0.005, 0.001),
    )
    for data, kind in CELLS
}
"""The settings of figures 6 and 7."""

PRINTED: dict[tuple[Data, Kind, str, str], float] = {
    (data, kind, algorithm, model): value
    for (data, kind), values in {
        ("mnist", "mlr"): (93.96, 94.37, 94.18, 95.62),
        ("mnist", "dnn"): (98.79, 98.90, 99.16, 99.46),
        ("synthetic", "mlr"): (77.62, 81.49, 78.65, 83.20),
        ("synthetic", "dnn"): (83.64, 85.01, 84.17, 86.36),
    }.items()
    for (algorithm, model), value in zip(
        (("fedavg", "global"), ("per-fedavg", "personal"), ("pfedme", "global"), ("pfedme", "personal")),
        values,
        strict=True,
    )
}
"""Table 1: accuracy in percent by data, model, algorithm and which of its models."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of an experiment is carried out."""

    divide: int = 1
    """The paper's numbers of rounds are divided by this."""
    seeds: int = 10
    """Maximum number of seeds; some experiments use fewer."""
    evaluations: int = 40
    """Maximum number of evaluations of a run; they take longer than a tenth of the rounds."""
    tiny: bool = False
    """Uses a few random rows instead of the paper's data, to check that an experiment runs at all."""

    def rounds(self, data: Data) -> int:
        """T."""
        return max(4, ROUNDS[data] // self.divide)

    @property
    def cells(self) -> tuple[tuple[Data, Kind], ...]:
        """The data and models to run."""
        return (CELLS[0], CELLS[3]) if self.tiny else CELLS

    @property
    def stepwise(self) -> tuple[tuple[Data, Kind], ...]:
        """The cells on which differences are tested one at a time; each is a program to compile."""
        return self.cells if self.divide == 1 or self.tiny else (CELLS[0], CELLS[2])

    def kinds(self, data: Data) -> list[Kind]:
        """The models to run on the data."""
        return [kind for own, kind in self.cells if own == data]

    def seeds_of(self, wanted: int) -> int:
        """The number of seeds of an experiment that asks for `wanted`."""
        return min(wanted, self.seeds)


FULL, QUICK = Scale(), Scale(divide=10, seeds=2, evaluations=5)
TINY = Scale(divide=200, seeds=2, evaluations=5, tiny=True)


def algorithms(tuned: Tuned, version: Version, *, beta: float = 2.0) -> dict[str, Algorithm]:
    """The paper's three algorithms with these settings; `beta` is pFedMe's."""
    common: dict[str, Any] = {"aggregation": "uniform"}
    released = version == "released"
    if released:
        common = {"aggregation": "samples", "batches": "cycled"}
    alpha_hat, beta_hat = tuned.per_fedavg
    return {
        "pfedme": PFedMe(lam=tuned.lam, eta=tuned.eta, alpha=tuned.alpha, beta=beta, **common),
        "fedavg": FedAvg(eta=tuned.fedavg, **common),
        "per-fedavg": PerFedAvg(
            alpha=alpha_hat,
            eta=beta_hat,
            hessian="first-order" if released else "exact",
            adapt_on="test" if released else "train",
            **common,
        ),
    }


def baselines(tuned: Tuned) -> dict[str, Algorithm]:
    """The baselines that the paper leaves out: each client alone, and FedAvg fine-tuned."""
    return {
        "alone": Alone(eta=tuned.fedavg, l2="model"),
        "fedavg-ft": FedAvgFT(eta=tuned.fedavg, aggregation="uniform"),
    }


def model_of(kind: Kind, algorithm: Algorithm, version: Version) -> MLR | DNN:
    """The model with the weight decay that the version gives this algorithm.

    As written, softmax regression is regularised in every algorithm. As released, the decay is only in
    pFedMe's inner step, for both models.
    """
    if version == "released":
        decay = DECAY if isinstance(algorithm, PFedMe) else 0.0
    else:
        decay = DECAY if kind == "mlr" else 0.0
    return MLR(l2=decay) if kind == "mlr" else DNN(l2=decay)


def run_of(
    scale: Scale,
    data: Data,
    kind: Kind,
    algorithm: Algorithm,
    version: Version,
    *,
    evaluations: int = 40,
    rounds: int | None = None,
) -> Run:
    """One run of a cell, evaluated so many times; with the paper's number of rounds by default."""
    rounds = rounds or scale.rounds(data)
    evaluations = min(evaluations, scale.evaluations)
    return Run(
        algorithm=algorithm,
        data=parse_data(data_text(scale, data, version)),
        model=model_of(kind, algorithm, version),
        rounds=rounds,
        cohort=2 if scale.tiny else COHORT[data],
        eval_every=max(1, rounds // evaluations),
    )


def data_text(scale: Scale, data: Data, version: Version) -> str:
    """The federation: MNIST is overlapping as released and disjoint as written."""
    if scale.tiny:
        overlapping = ",iid=true" if version == "released" and data == "mnist" else ""
        clients = 4 if data == "mnist" else 5
        return f"synthetic:clients={clients},rows=40,features=5,classes=3{overlapping}"
    return "mnist:partition=released" if (data, version) == ("mnist", "released") else data
