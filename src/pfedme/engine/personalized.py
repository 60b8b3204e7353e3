"""What clients have chosen, and how good the chosen models are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pfedme.core.tree import Params
from pfedme.engine.measure import ACCURACY, R2, Measure
from pfedme.engine.rowmetrics import Value
from pfedme.engine.verdict import (
    SHARES,
    Gains,
    Verdict,
    judge,
    least_noise,
    row_noise,
)


class Candidate(NamedTuple):
    """A model that a client can choose; more shared ones come earlier in the list."""

    name: str
    """A shared model: `global`, `cluster` for that of the client's cluster, and the same with the client's
    label frequencies, `label-prior` and `cluster-label-prior`. On a path: `personal`, `given` for the run's λ
    and `fine-tuned` for λ = 0 around the global model, `near-cluster` and so on around the others. Otherwise
    the name of the algorithm that trains it, such as `alone`."""
    lam: float
    steps: int = 0

    @property
    def label(self) -> str:
        """What people call it: the name, or λ if there are several of that name."""
        if self.name in ("personal", "given"):
            return f"λ = {self.lam:g}"
        return f"{self.line}, λ = {self.lam:g}" if self.name.startswith("near-") else self.name

    @property
    def line(self) -> str:
        """The model that it starts from."""
        if self.name in ("personal", "given", "fine-tuned"):
            return "global"
        return self.name.removeprefix("near-")

    @property
    def on_path(self) -> bool:
        """Whether it is one of several values of λ."""
        return self.name == "personal" or self.name.startswith("near-")


@dataclasses.dataclass(frozen=True)
class Personalized:
    """Every client's models and choice."""

    candidates: list[Candidate]
    choice: np.ndarray
    """The candidate that each client has chosen, by its index in the list."""
    joined: np.ndarray
    """The candidate that it would choose if training alone were not an option."""
    score: np.ndarray
    """The mean `row_score` of each candidate (column) on the rows that each client (row) uses to choose; NaN
    if there are none."""
    theta: Params
    """The chosen models, fitted to all training rows, stacked."""
    right: np.ndarray
    """Whether each candidate (column) is right about each test row; for a quantity 1 − (z − y)²/σ², whose
    mean is R², with the variance σ² of all test rows' labels."""
    owner: np.ndarray
    """The client of each test row."""
    improving: bool = False
    """Whether the loss of the shared or of the clients' own models was still falling when training ended."""
    metric: Measure | None = None
    """The main metric, if it is neither accuracy nor R²."""
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """This metric for each method on the test rows, by its name as in `of`."""

    @property
    def usual(self) -> Measure:
        """The metric that `right` gives: accuracy, or R²."""
        return ACCURACY if self.right.dtype == bool else R2

    @property
    def measure(self) -> Measure:
        """The main metric."""
        return self.metric or self.usual

    @property
    def clients(self) -> int:
        """N."""
        return len(self.choice)

    def of(self, name: str) -> np.ndarray:
        """Whether a method is right about each test row: a candidate by its name, `recommended` for what each
        client has chosen, `own-lambda` for what it would choose if training alone were not an option."""
        if name in ("recommended", "own-lambda"):
            chosen = self.choice if name == "recommended" else self.joined
            return self.right[np.arange(len(self.owner)), chosen[self.owner]]
        (place,) = [k for k, c in enumerate(self.candidates) if c.name == name]
        return self.right[:, place]

    @property
    def recommended(self) -> np.ndarray:
        """Whether the client's chosen model is right about each test row."""
        return self.of("recommended")

    @property
    def lam(self) -> np.ndarray:
        """The λ that each client chose: ∞ for the global model, 0 for its own."""
        return np.array([c.lam for c in self.candidates])[self.choice]

    def accuracy(self, right: np.ndarray) -> np.ndarray:
        """Each client's accuracy; NaN for a client without test rows."""
        correct = np.bincount(self.owner, right, self.clients)
        return np.where(self.tested, correct / np.maximum(self.rows, 1), np.nan)

    def own(self, name: str) -> np.ndarray:
        """Each client's score with a method, by the main metric; NaN where it is undefined."""
        return self.values[name].own if self.metric else self.accuracy(self.of(name))

    @property
    def rows(self) -> np.ndarray:
        """The number of test rows of each client."""
        return np.bincount(self.owner, minlength=self.clients)

    @property
    def tested(self) -> np.ndarray:
        """Which clients have test rows."""
        return self.rows > 0

    def gains(self, name: str) -> Gains:
        """What each client gains over a method by the main metric; NaN where that is undefined.

        For accuracy and R² the noise is paired over the client's test rows. For other metrics it is computed
        as in a comparison, as if the two models erred independently.
        """
        if self.metric is None:
            gain, half = self.gain(self.of(name))
            return Gains(np.where(self.tested, gain, np.nan), half / 1.96)
        mine, other = self.own("recommended"), self.own(name)
        gain = self.metric.orientation * (mine - other)
        if self.metric.key not in SHARES:
            return Gains(gain)
        return Gains(gain, row_noise(mine, other, self.rows), least_noise(gain, self.rows))

    def verdict(self) -> Verdict:
        """Whether the recommended models are better than alone, by the main metric."""
        noise = None if self.metric else self.gains("alone").noise
        return judge(
            self.own("recommended"), self.own("alone"), rows=self.rows, noise=noise,
            improving=self.improving, measure=self.measure, name="the models that clients choose",
        )  # fmt: skip

    def harmed(self, right: np.ndarray) -> np.ndarray:
        """Which clients are more than one point worse with a method than alone, beyond their interval."""
        gain, interval = paired(right, self.of("alone"), self.owner, self.clients)
        return gain < -0.01 - interval

    def gain(self, over: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How much more accurate the recommended model is for each client, with the half-width of a 95 %
        interval, paired over the client's test rows."""
        return paired(self.recommended, over, self.owner, self.clients)


def paired(
    mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """Each client's accuracy with `mine` minus that with `theirs`, and 1.96 standard errors of it under the
    hypothesis of no difference (McNemar's).

    With b rows where only one is right and c where only the other is, n rows in all: (b − c)/n, and
    √(b + c + 1)/n, in which the 1 stands for what a few rows that agree cannot rule out. Around a large
    difference this is wider than necessary. If rows have numbers instead, it is Student's interval of their
    differences without its degrees of freedom.
    """
    n = np.maximum(np.bincount(owner, minlength=clients), 1)
    if mine.dtype != bool:
        apart = mine - theirs
        mean = np.bincount(owner, apart, clients) / n
        square = np.bincount(owner, (apart - mean[owner]) ** 2, clients)
        return mean, 1.96 * np.sqrt((square + mean**2) / (np.maximum(n - 1, 1) * n))
    b = np.bincount(owner, mine & ~theirs, clients)
    c = np.bincount(owner, theirs & ~mine, clients)
    return (b - c) / n, 1.96 * np.sqrt(b + c + 1) / n
