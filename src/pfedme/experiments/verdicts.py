"""How often the verdict is wrong, and how often it detects a true gain, if the true gain is known."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Alone, FedAvg, PFedMe
from pfedme.core.models import MLR, Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.exchange import first_model
from pfedme.engine.measure import ACCURACY
from pfedme.engine.verdict import Verdict
from pfedme.experiments.study import Study, markdown
from pfedme.personalization.finished import Watch
from pfedme.runs.run import Run
from pfedme.runs.scores import KINDS, Scored, between, preferred
from pfedme.training.execute import execute
from pfedme.training.execution import Result

FIRST_SEED = 1000
"""First seed of the repetitions; the seeds below were not looked at when the rule was designed."""
FURTHER = 2000
"""Further rows of each client, beyond those of the federation, on which the true gain is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A federation with a known law: x ~ N(0, I), and y = 1 with probability 1/(1 + exp(−⟨w_i, x⟩))."""

    name: ClassVar[str] = "drawn"

    law: Literal["pool", "tasks", "shuffled"]
    """One w for all clients, one for each, or none, in which case labels are coin flips."""
    clients: int
    train: int
    """Rows of each client to train on."""
    test: int
    features: int = 5
    seed: int = 0

    def _weights(self) -> np.ndarray:
        """w_i, with ‖w_i‖ = 3, one row per client."""
        own = np.random.default_rng([self.seed, 0]).standard_normal((self.clients, self.features))
        own = own[:1] if self.law == "pool" else own
        own = np.zeros_like(own) if self.law == "shuffled" else 3 * own / np.linalg.norm(own, axis=1)[:, None]
        return np.broadcast_to(own, (self.clients, self.features))

    def draw(self, rows: int, stream: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each client, and the probability of label 1 for each."""
        x = np.random.default_rng([self.seed, stream]).standard_normal((self.clients, rows, self.features))
        return x.astype(np.float32), 1 / (1 + np.exp(-np.einsum("ird,id->ir", x, self._weights())))

    def load(self) -> Federation:
        """The federation."""
        rows = self.train + self.test
        x, p = self.draw(rows, 1)
        y = np.random.default_rng([self.seed, 2]).random(p.shape) < p
        return Federation.split(
            np.full(self.clients, rows), x.reshape(-1, self.features), y.ravel().astype(np.int32), classes=2,
            train=self.train / rows,
        )  # fmt: skip


class Setting(NamedTuple):
    """A kind of federation, repeated with many seeds."""

    name: str
    about: str
    data: Drawn


SETTINGS = (
    Setting(
        "pool",
        "clients drawn from one pool, enough rows for each",
        Drawn(law="pool", clients=10, train=300, test=100),
    ),
    Setting("tasks", "clients with different tasks", Drawn(law="tasks", clients=10, train=100, test=100)),
    Setting("shuffled", "labels shuffled", Drawn(law="shuffled", clients=10, train=100, test=100)),
    Setting(
        "helps-10",
        "one pool, few rows: joining helps; 10 clients, 100 test rows each",
        Drawn(law="pool", clients=10, train=60, test=100),
    ),
    Setting(
        "helps-30",
        "the same; 30 clients, 200 test rows each",
        Drawn(law="pool", clients=30, train=60, test=200),
    ),
)


class Repetition(NamedTuple):
    """The verdict on one federation, and the truth."""

    setting: str
    seed: int
    verdict: Verdict
    truth: float
    """The mean over clients of the true gain in accuracy, for the same models that the verdict compared."""

    @property
    def false(self) -> bool:
        """Whether the verdict is a yes without a true gain, or a no without a true loss."""
        return {"yes": self.truth <= 0, "no": self.truth >= 0, "cannot tell": False}[self.verdict.verdict]

    @property
    def covered(self) -> bool:
        """Whether the interval covers the true gain."""
        assert self.verdict.low is not None
        assert self.verdict.high is not None
        return self.verdict.low <= self.truth <= self.verdict.high


def runs(data: Drawn) -> list[Run]:
    """The runs to compare: the defaults of `pfedme compare pfedme fedavg alone`."""
    return [
        Run(algorithm=algorithm, data=data, model=MLR(), eval_every=Run.budget)
        for algorithm in (PFedMe(), FedAvg(), Alone())
    ]


def repeat(setting: Setting, seed: int) -> Repetition:
    """Trains on one federation, computes the verdict as `pfedme compare` does, and finds the truth."""
    data = dataclasses.replace(setting.data, seed=seed)
    scored = [(model, result) for run in runs(data) for result in [execute(run)] for model in _models(result)]
    alone, joined = (
        preferred([model for model, _ in scored if (model.method == "alone") is side])
        for side in (True, False)
    )
    results = [result for _, result in scored]
    improving = any(result.record.get("auto", {}).get("improving") for result in results)
    verdict = between(joined, alone, ACCURACY, improving=improving)
    mine, own = (
        _true_accuracy(data, result, side.kind)
        for side in (joined, alone)
        for model, result in scored
        if model is side
    )
    return Repetition(setting.name, seed, verdict, mine - own)


def _models(result: Result) -> Iterator[Scored]:
    """The models of a run that a client can keep, with each client's accuracy."""
    for kind in KINDS:
        if kind in result.evaluation.test:
            found = result.evaluation.test[kind]
            own = zip(found.own.tolist(), found.count.tolist(), strict=True)
            loss = result.record.get("auto", {}).get("validation", {}).get(kind)
            yield Scored(
                result.run.algorithm.name, kind, {0: {str(i): pair for i, pair in enumerate(own)}}, loss
            )


def _true_accuracy(data: Drawn, result: Result, kind: str) -> float:
    """The mean true probability of the labels that a model predicts for further rows."""
    x, p = data.draw(FURTHER, 3)
    vector = result.w if kind == "global" else result.theta
    assert vector is not None
    points = first_model(result.model, 0).like(jnp.broadcast_to(vector, (data.clients, vector.shape[-1])))
    ones = np.asarray(_predict(result.model, points, x)) == 1
    return float(np.where(ones, p, 1 - p).mean())


@jax.jit
def _predict(model: Model, points: Params, x: jax.Array) -> jax.Array:
    """The label that each client's model gives to each of its rows."""
    return jax.vmap(lambda theta, rows: jnp.argmax(model.scores(theta, rows), axis=0))(points, x)


def study_verdicts(study: Study, repetitions: int, watch: Watch = lambda *_: None) -> list[Summary]:
    """Repeats every setting, and writes the verdicts, the truth and the page about them."""
    done: list[Repetition] = []
    for k, setting in enumerate(SETTINGS):
        for n in range(repetitions):
            watch(setting.name, k * repetitions + n, len(SETTINGS) * repetitions)
            done.append(repeat(setting, FIRST_SEED + n))
    found = [Summary.of(setting, [r for r in done if r.setting == setting.name]) for setting in SETTINGS]
    study.write("verdict.csv", _csv(done), repetitions)
    study.write("verdict.md", page(found) + study.footer(repetitions), repetitions)
    return found


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of how often each verdict was given in a setting, and how often it was false."""

    setting: Setting
    repetitions: int
    gain: float
    """The mean of the true gains, in points."""
    yes: int
    no: int
    false: int
    covered: int
    """Repetitions whose interval covers the true gain."""

    @classmethod
    def of(cls, setting: Setting, done: Sequence[Repetition]) -> Summary:
        """The summary of all repetitions of a setting."""
        said = [r.verdict.verdict for r in done]
        return cls(
            setting, len(done), 100 * float(np.mean([r.truth for r in done])), said.count("yes"),
            said.count("no"), sum(r.false for r in done), sum(r.covered for r in done),
        )  # fmt: skip


def _csv(done: Sequence[Repetition]) -> str:
    """One row per repetition; gains are fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["federation", "seed", "joined", "verdict", "gain", "low", "high", "true_gain", "false"])
    for r in done:
        v = r.verdict
        numbers = [f"{number:.6f}" for number in (v.gain, v.low, v.high, r.truth)]
        table.writerow([r.setting, r.seed, v.joined, v.verdict, *numbers, int(r.false)])
    return text.getvalue()


def page(found: Sequence[Summary]) -> str:
    """The content of docs/results/verdict.md."""
    table = markdown(
        ["federation", "true gain", "yes", "no", "cannot tell", "false", "interval covers the truth"],
        [[f"{s.setting.name}: {s.setting.about}", f"{s.gain:+.2f}", *_shares(s)] for s in found],
    )
    repetitions = found[0].repetitions
    return f"""\
# How often is the verdict wrong?

`pfedme compare pfedme fedavg alone` with its defaults on federations whose distribution is known,
{repetitions} repetitions of each, every one with new data. Verdicts are in percent of the repetitions, true
gains in points of accuracy, as a mean over repetitions.

{table}
The true gain is that of the same models that a verdict compares: the difference in the true probability of
the predicted labels, over {FURTHER:,} further rows of each client. A yes is false if the true gain is not
positive, a no if it is not negative. With shuffled labels it is exactly zero, so any yes or no is false. The
joined model to compare with alone is chosen as in [verdict.md](../verdict.md), without test rows. All
repetitions: [verdict.csv](verdict.csv).
"""


def _shares(s: Summary) -> list[str]:
    counts = (s.yes, s.no, s.repetitions - s.yes - s.no, s.false, s.covered)
    return [f"{100 * count / s.repetitions:.1f} %" for count in counts]
