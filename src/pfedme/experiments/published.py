"""Numbers that others have published about the relatives, and ours beside them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from pfedme.algorithms import APFL, IFCA, QFFL, Algorithm, Alone, Ditto, FedAvg, PFedMe
from pfedme.core.models import DNN, MLR, Description
from pfedme.core.spec import Count, Seed
from pfedme.core.tree import record
from pfedme.data import Source
from pfedme.data.fashion import FashionMnist
from pfedme.data.federation import Federation, aligned
from pfedme.data.mnist import Mnist, decoded
from pfedme.data.synthetic import Synthetic
from pfedme.experiments.study import Estimate, PlannedRun, Study, markdown
from pfedme.runs.run import Run

Measure = Literal["accuracy", "mean", "worst_decile"]
"""Accuracy over all rows, the mean of the clients' accuracies, or the mean over the worst tenth of them."""
WITHIN = 1.0
"""Points by which a reproduced number may differ."""


@record
class TurnedMnist:
    """MNIST as in the experiments of IFCA's authors: all 60,000 training images at each of several angles, in
    equal shares; pixels are between 0 and 1, and test rows come from the 10,000 test images."""

    name: ClassVar[str] = "turned-mnist"

    clients: Count = 2400
    """N; one in `turns` of them has images at the first angle, the next ones at the second, and so on."""
    turns: Count = 4
    """Angles, each a quarter turn after the one before."""
    rows: Count = 100
    """Training rows of each client."""
    tests: Count = 16
    """Test rows of each client."""
    seed: Seed = 0
    """Seed for drawing the clients' images."""

    def load(self) -> Federation:
        """The federation."""
        images, labels = decoded(Mnist().fetched())
        rng = np.random.default_rng([self.seed, 60_000])
        size, group = self.rows + self.tests, self.clients // self.turns
        x = aligned((self.clients * size, 784), np.float32)
        y = np.empty(self.clients * size, np.int32)
        for turn in range(self.turns):
            train = rng.permutation(60_000)[: group * self.rows].reshape(group, -1)
            test = 60_000 + rng.permutation(10_000)[: group * self.tests].reshape(group, -1)
            rows = np.concatenate([train, test], axis=1).ravel()
            part = slice(turn * len(rows), (turn + 1) * len(rows))
            turned = np.rot90(images[rows].reshape(-1, 28, 28), turn, axes=(1, 2))
            np.divide(turned.reshape(len(rows), -1), np.float32(255), out=x[part])
            y[part] = labels[rows]
        counts = np.full(self.clients, size)
        return Federation.split(counts, x, y, classes=10, train=self.rows / size, shape=(28, 28))


@record
class UnevenSynthetic:
    """Synthetic(1, 1) with the sizes of q-FFL's authors, 50 + ⌊lognormal(4, 2)⌋ rows, a fifth of ours; 80 %
    are for training and 10 % for testing."""

    name: ClassVar[str] = "uneven-synthetic"

    seed: Seed = 0
    """Seed of the data."""

    def load(self) -> Federation:
        """The federation."""
        f = Synthetic(alpha=1.0, beta=1.0, seed=self.seed).load()
        counts = f.count // 5
        rows = np.repeat(f.start - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        f = Federation.split(counts, f.x[rows], f.y[rows], classes=f.classes, train=0.9)
        validation = f.n_train // 9
        return dataclasses.replace(f, n_val=validation, n_train=f.n_train - validation)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published number."""

    about: str
    source: str
    value: float
    """In percent."""
    note: str
    """What is different here, or why it is not reproduced."""
    wishes: tuple[PlannedRun, ...] = ()
    """The runs whose results are averaged; none if it is not reproduced."""
    kind: str = "global"
    measure: Measure = "accuracy"

    def ours(self, study: Study) -> Estimate:
        """Our number, in percent."""
        finals = [r["final"] for wish in self.wishes for r in study.records(wish) if r["final"]]
        scores = [final[self.kind] for final in finals]
        if self.measure == "accuracy":
            return Estimate.of([100 * score["accuracy"] for score in scores])
        return Estimate.of([100 * score["clients"][self.measure] for score in scores])

    def verdict(self, ours: Estimate) -> str:
        """Whether our number is within a point."""
        gap = ours.mean - self.value
        return "yes" if abs(gap) <= WITHIN else f"no, {gap:+.1f}"


def _wish(
    algorithm: Algorithm, data: Source, model: Description, rounds: int, cohort: int | None, seed: int = 0
) -> PlannedRun:  # fmt: skip
    run = Run(
        algorithm=algorithm, data=data, model=model, rounds=rounds, cohort=cohort, eval_every=rounds
    )  # fmt: skip
    return PlannedRun(run, 1, first=seed)


GHOSH = "Ghosh et al., 2020, table 1 (m = 2400, n = 100)"
LI = "Li et al., 2020 (q-FFL), table 1 (Synthetic)"
FLOWER = "Flower's baseline niid_bench, MNIST"
ROTATED = "rotated MNIST: 2,400 clients, 100 images each at one of four angles, one hidden layer of 200"
FEW = "Here 40 of the 2,400 clients take part in a round, there all of them."
UNEVEN = (
    "The authors' data is a download; here it is drawn by their rule, five times. All clients take 10 steps "
    "in each of 8,000 rounds, not one epoch in each of 20,000."
)
NO_MOMENTUM = (
    "Not reproduced: its clients use momentum, which ours do not have, and 50 rounds of 10 epochs of a "
    "convolutional network take hours on two cores."
)
PFLLIB = "PFLlib's page, Fashion-MNIST, two labels per client"
OTHER_PAIRS = "A hidden layer of 100 here, a convolutional network there; other pairs of labels; 100 rounds."
GHOSH_STEPS, LI_STEPS = {"eta": 0.1, "R": 10, "B": 0}, {"eta": 0.1, "R": 10, "B": 10}
ONE_LAYER = DNN(hidden=(200,))


def _rotated(algorithm: Algorithm) -> tuple[PlannedRun, ...]:
    return (_wish(algorithm, TurnedMnist(), ONE_LAYER, 300, 40),)


def _fair(algorithm: Algorithm) -> tuple[PlannedRun, ...]:
    return tuple(
        _wish(algorithm, UnevenSynthetic(seed=seed), MLR(), 8000, 10, seed=seed) for seed in range(5)
    )


def _clothing(algorithm: Algorithm) -> tuple[PlannedRun, ...]:
    return (_wish(algorithm, FashionMnist(), DNN(), 100, None),)


Q0 = _fair(FedAvg(**LI_STEPS))
Q1 = _fair(QFFL(q=1.0, aggregation="samples", **LI_STEPS))

CLAIMS: tuple[Claim, ...] = (
    Claim(
        f"IFCA on {ROTATED}", GHOSH, 95.05,
        f"{FEW} Clients choose their model by training rows here, and by test rows there.",
        _rotated(IFCA(start="random", **GHOSH_STEPS)), "personal",
    ),
    Claim("one global model on the same", GHOSH, 88.65, FEW, _rotated(FedAvg(**GHOSH_STEPS))),
    Claim(
        "each client alone on the same", GHOSH, 73.66,
        "120 of the clients. As there, each takes only 100 steps, which is far from convergence.",
        (_wish(Alone(l2="model", **GHOSH_STEPS), TurnedMnist(clients=120, tests=80), ONE_LAYER, 10, None),),
        "personal",
    ),
    Claim(
        "FedAvg on MNIST in 100 equal shares, two hidden layers of 200, after 87 rounds of 10 clients",
        "McMahan et al., 2017, table 1 (2NN, IID, B = 10, E = 1, C = 0.1)", 97.0,
        "The paper counts rounds until 97 %, with the best of several step sizes; here η = 0.1.",
        (
            _wish(
                FedAvg(eta=0.1, R=60, B=10), TurnedMnist(clients=100, turns=1, rows=600, tests=100),
                DNN(hidden=(200, 200)), 87, 10,
            ),
        ),
    ),
    Claim(
        "q = 0 on Synthetic(1, 1), mean over clients", LI, 80.8,
        f"{UNEVEN} Clients are drawn in proportion to their rows there, and weighted by them here.",
        Q0, measure="mean",
    ),
    Claim("q = 0, worst tenth of the clients", LI, 18.8, "As above.", Q0, measure="worst_decile"),
    Claim("q = 1 on the same, mean over clients", LI, 79.0, "As above.", Q1, measure="mean"),
    Claim("q = 1, worst tenth of the clients", LI, 31.1, "As above.", Q1, measure="worst_decile"),
    Claim("FedAvg on Dirichlet(0.5), 10 clients", FLOWER, 98.89, NO_MOMENTUM),
    Claim("SCAFFOLD on Dirichlet(0.5), 10 clients", FLOWER, 99.07, NO_MOMENTUM),
    Claim("FedAvg with two labels per client, 10 clients", FLOWER, 96.86, NO_MOMENTUM),
    Claim("FedAvg", PFLLIB, 80.41, OTHER_PAIRS, _clothing(FedAvg(eta=0.02))),
    Claim(
        "pFedMe", PFLLIB, 99.35, "As above.", _clothing(PFedMe(lam=1.0, alpha=0.02, eta=1.0)), "personal"
    ),
    Claim("Ditto", PFLLIB, 99.44, "As above.", _clothing(Ditto(lam=0.1, eta=0.02)), "personal"),
    Claim("APFL", PFLLIB, 99.41, "As above.", _clothing(APFL(eta=0.02)), "personal"),
    Claim(
        "FedAMP, whose regulariser has no gradient there, so that clients train alone", PFLLIB, 99.42,
        "Clients that train alone. Otherwise as above.", _clothing(Alone(l2="model", eta=0.02)), "personal",
    ),
)  # fmt: skip
"""The claims, in the order of the page. Those of pFedMe's paper are the subject of `pfedme reproduce`."""


def wishes() -> list[PlannedRun]:
    """The runs of all claims, each once."""
    return list(dict.fromkeys(wish for claim in CLAIMS for wish in claim.wishes))


def section(study: Study) -> str:
    """The claims as a part of the page, with our numbers."""
    lines = []
    for claim in CLAIMS:
        ours = claim.ours(study) if claim.wishes and all(map(study.has, claim.wishes)) else None
        shown = ["–", "–"] if ours is None else [str(ours), claim.verdict(ours)]
        lines.append([claim.about, f"{claim.value:g}", *shown, claim.source, claim.note])
    table = markdown(["claim", "published %", "ours %", "within a point", "source", "remarks"], lines)
    return f"""\
## Published numbers

Settings are those of the sources as far as possible; the last column says where they are not. A dash means
that nothing was run.

{table}"""
