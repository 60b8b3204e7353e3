"""What privacy costs: accuracy against ε, for clients alone, one shared model, and personal models.

Everything is trained with private gradients of rows (`pfedme.core.private`), clipped and on Poisson batches.
Only the noise depends on ε; without noise, ε is infinite.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedme import __version__
from pfedme.algorithms import MRMTL, Algorithm, Alone, FedAvg, PFedMe
from pfedme.algorithms.base import Models
from pfedme.core.models import Model, parse_model
from pfedme.data import parse_data
from pfedme.data.federation import Federation, Part
from pfedme.engine.simulate import Simulation, advance
from pfedme.experiments.gain import Job
from pfedme.experiments.study import Study
from pfedme.personalization.finished import Watch
from pfedme.privacy.accounting import Event, spent
from pfedme.privacy.rows import RowPlan, plan_rows
from pfedme.privacy.units import Rows
from pfedme.runs.run import load

DELTA = 1e-5
"""δ of every run."""
FOLDS = 5
"""One of this many parts of each client's training rows is kept for validation."""
MEASURING = 2
"""To be raised when runs are carried out in another way: all of them are repeated."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A federation of the study."""

    name: str
    data: str
    """Its source; `{seed}` stands for the seed of the repetition."""
    about: str
    steps: tuple[float, ...]
    """Step sizes to try."""
    limit: int = 0
    """Clients keep this many training rows, and those with fewer are left out; 0 keeps all."""
    B: int = 0
    """Expected rows of a mini-batch; 0 for all rows in every batch."""

    def federation(self, seed: int) -> Federation:
        """The clients, with a part of their training rows kept for validation."""
        found = load(parse_data(self.data.format(seed=seed)))
        return (found.limit(self.limit) if self.limit else found).hold_out(0, FOLDS)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "mnist-dirichlet", "mnist:partition=dirichlet,alpha=0.3,clients=12,cap=500,train=0.8,seed={seed}",
        "MNIST, labels by Dirichlet(0.3)", (0.03, 0.1, 0.3, 1.0), B=32,
    ),
    Setting(
        "mnist-rotated", "mnist:partition=rotated,clients=12,cap=500,train=0.8,seed={seed}",
        "MNIST rotated by four angles", (0.03, 0.1, 0.3, 1.0), B=32,
    ),
    Setting(
        "rodents", "rodents:seed={seed}", "the genus of rodents, by plot", (0.1, 0.5, 2.0, 8.0), limit=199,
        B=16,
    ),
    Setting(
        "contraception", "contraception:seed={seed}", "contraception, by district", (0.1, 0.5, 2.0, 8.0),
        limit=24,
    ),
)  # fmt: skip


class Method(NamedTuple):
    """An algorithm, the values of λ that it may have, and the one that it has if λ is not chosen."""

    algorithm: type[Algorithm]
    evaluated: str
    """The model that clients use."""
    lams: tuple[float, ...] = ()
    fixed: float | None = None

    @property
    def name(self) -> str:
        """The name of the algorithm."""
        return self.algorithm.name

    def at(self, scale: Scale, setting: Setting, step: float, lam: float | None) -> Algorithm:
        """The algorithm with step sizes for losses of curvature 1/step."""
        own: dict[str, Any] = {} if lam is None else {"lam": lam}
        own |= {"l2": "model"} if self.algorithm is Alone else {}
        own |= {"K": scale.K} if self.algorithm is PFedMe else {}
        return self.algorithm(R=scale.R, B=setting.B, **own).with_steps(1 / step)


METHODS: tuple[Method, ...] = (
    Method(Alone, "personal"),
    Method(FedAvg, "global"),
    Method(MRMTL, "personal", (0.02, 0.1, 0.5, 2.0), 0.5),
    Method(PFedMe, "personal", (2.0, 15.0), 15.0),
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the study is carried out."""

    seeds: int = 8
    rounds: int = 15
    R: int = 5
    """Mini-batches of a client in a round."""
    K: int = 2
    """pFedMe's gradients on each mini-batch."""
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 8.0, math.inf)
    settings: tuple[Setting, ...] = SETTINGS
    methods: tuple[Method, ...] = METHODS

    @property
    def jobs(self) -> int:
        """The number of jobs."""
        runs = sum(self.seeds * max(1, len(method.lams)) for method in self.methods)
        return sum(runs + len(setting.steps) * len(self.methods) for setting in self.settings)


FULL = Scale()
QUICK = Scale(seeds=1, epsilons=(1.0, 8.0, math.inf), settings=SETTINGS[3:])
TINY = Scale(
    seeds=2, rounds=2, R=2, epsilons=(1.0, math.inf),
    settings=(
        Setting(
            "tiny", "synthetic:clients=4,rows=40,features=4,classes=3,train=0.5,seed={seed}", "four clients",
            (0.1,),
        ),
    ),
)  # fmt: skip


class Point(NamedTuple):
    """Accuracies of one run, on validation rows and on test rows; NaN if it diverged."""

    validation: float
    test: float


class Entry(NamedTuple):
    """A line of privacy.csv."""

    federation: str
    method: str
    epsilon: float
    seed: int
    evaluated: str
    accuracy: float
    """Over all clients' test rows, a fraction."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the study has found."""

    scale: Scale
    entries: tuple[Entry, ...]
    lams: dict[tuple[str, str, float], list[float]]
    """The λ that is best on validation rows, by federation, method and ε, one for each seed."""
    steps: dict[tuple[str, str, float], float]
    """The step size in use, by federation, method and ε."""
    price: dict[tuple[str, str, float], float]
    """ε of all runs together from which λ is chosen, by federation, method and ε of one run."""
    noise: dict[tuple[str, float], float]
    """The noise multiplier of one gradient per mini-batch, by federation and ε."""
    clients: dict[str, tuple[int, int, int]]
    """Clients, training rows of each, and test rows of all, by federation."""

    def values(self, federation: str, method: str, epsilon: float) -> dict[int, float]:
        """The accuracy in percent with each seed."""
        return {
            e.seed: 100 * e.accuracy
            for e in self.entries
            if (e.federation, e.method, e.epsilon) == (federation, method, epsilon)
        }

    @property
    def names(self) -> list[str]:
        """All methods, λ fixed and chosen apart."""
        return list(dict.fromkeys(e.method for e in self.entries))


def plan(scale: Scale, algorithm: Algorithm, federation: Federation, epsilon: float) -> RowPlan:
    """The noise of each client; none for an infinite ε.

    Clients take part in all rounds. pFedMe's personal models take one round more at the end.
    """
    finite = [e for e in scale.epsilons if math.isfinite(e)] or [1.0]
    spec = Rows(epsilon=min(epsilon, max(finite)), delta=DELTA)
    rounds = scale.rounds + (algorithm.name == PFedMe.name)
    clients = federation.clients
    made = plan_rows(spec, algorithm, federation.n_train, np.full(clients, rounds), np.zeros(clients, int))
    if math.isinf(epsilon):
        made = dataclasses.replace(made, noise=0 * made.noise, epsilon=np.full(clients, np.inf))
    return made


def model_for(federation: Federation) -> Model:
    """Multinomial logistic regression for a federation's rows."""
    described = parse_model("mlr").with_defaults(federation.features, federation.shape)
    return described.build(federation.features, federation.classes)


def train(
    scale: Scale, federation: Federation, algorithms: Sequence[Algorithm], evaluated: str, seed: int
) -> list[Point]:
    """Trains one algorithm for each ε of the study, all in one program."""
    plans = [
        plan(scale, algorithm, federation, epsilon)
        for algorithm, epsilon in zip(algorithms, scale.epsilons, strict=True)
    ]
    most, model = max(p.most for p in plans), model_for(federation)
    simulations = [
        Simulation(
            algorithm, model, federation, cohort=federation.clients, seed=seed,
            privacy=dataclasses.replace(own, most=most),
        )
        for algorithm, own in zip(algorithms, plans, strict=True)
    ]  # fmt: skip
    states = [s.start() for s in simulations]
    finite = [True] * len(states)
    while all(finite) and states[0].t < scale.rounds:
        after = advance(simulations, states, scale.rounds - states[0].t)
        states, finite = [state for state, _ in after], [ok for _, ok in after]
    if not all(finite):  # one run has diverged: each on its own
        pairs = zip(simulations, states, strict=True)
        after = [simulation.advance(state, scale.rounds - state.t) for simulation, state in pairs]
        states, finite = [state for state, _ in after], [ok for _, ok in after]
    who = np.arange(federation.clients)
    points = []
    for simulation, state, ok in zip(simulations, states, finite, strict=True):
        if not ok:
            points.append(Point(math.nan, math.nan))
            continue
        models, info = simulation.answer(state) if evaluated == "personal" else (Models(), {})
        shared = simulation.shared(state) if evaluated == "global" else None
        parts: tuple[Part, Part] = ("validation", "test")
        scored = [simulation.score(state.t, shared, models, info, who, on=p, train=False) for p in parts]
        overall = [scores.test[evaluated].overall for scores in scored]
        points.append(Point(*(math.nan if score is None else score for score in overall)))
    return points


class Bench:
    """The jobs of one federation, each carried out once and kept in a file."""

    def __init__(self, study: Study, scale: Scale, setting: Setting) -> None:
        self.study, self.scale, self.setting = study, scale, setting
        self._loaded: dict[int, Federation] = {}

    def federation(self, seed: int) -> Federation:
        """The federation of a seed, loaded once."""
        if seed not in self._loaded:
            self._loaded = {seed: self.setting.federation(seed)}
        return self._loaded[seed]

    def points(self, method: Method, steps: Sequence[float], lam: float | None, seed: int) -> list[Point]:
        """The accuracies for each ε, with a step size for each."""
        scale, setting = self.scale, self.setting
        algorithms = [method.at(scale, setting, step, lam) for step in steps]
        what = [
            setting.data, setting.limit, [repr(a) for a in algorithms], method.evaluated, scale.epsilons,
            scale.rounds, DELTA, FOLDS, seed, MEASURING, __version__,
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

        def make() -> list[Point]:
            return train(scale, self.federation(seed), algorithms, method.evaluated, seed)

        about = f"{setting.name}: {method.name}, seed {seed}"
        job = Job(about, self.study.runs / f"privacy-{method.name}-{digest}.json", make)
        job.carry_out()
        return [Point(*values) for values in job.kept() or []]

    def best_steps(self, method: Method, seed: int = 0) -> list[float]:
        """For each ε the step size that is best on validation rows with λ fixed, the smaller of equals."""
        steps, each = sorted(self.setting.steps), len(self.scale.epsilons)
        tried = [self.points(method, [step] * each, method.fixed, seed) for step in steps]
        scores = np.nan_to_num([[point.validation for point in points] for points in tried], nan=-1.0)
        return [steps[k] for k in np.argmax(scores, axis=0)]


def study_cost(study: Study, scale: Scale, watch: Watch = lambda *_: None) -> Found:
    """Carries out whatever is not kept yet."""
    entries: list[Entry] = []
    lams: dict[tuple[str, str, float], list[float]] = {}
    steps: dict[tuple[str, str, float], float] = {}
    price: dict[tuple[str, str, float], float] = {}
    noise: dict[tuple[str, float], float] = {}
    clients: dict[str, tuple[int, int, int]] = {}
    done, total = 0, scale.jobs
    for setting in scale.settings:
        bench, name = Bench(study, scale, setting), setting.name
        first = bench.federation(0)
        clients[name] = first.clients, int(first.n_train.max()), int(first.n_test.sum())
        for method in scale.methods:
            watch(f"{name}: {method.name}, step sizes", done, total)
            found = bench.best_steps(method)
            steps |= {(name, method.name, e): step for e, step in zip(scale.epsilons, found, strict=True)}
            done += len(setting.steps)
            for seed in range(scale.seeds):
                tried: dict[float | None, list[Point]] = {}
                for lam in method.lams or (None,):
                    watch(f"{name}: {method.name}, seed {seed}", done, total)
                    tried[lam] = bench.points(method, found, lam, seed)
                    done += 1
                for k, epsilon in enumerate(scale.epsilons):
                    own = {lam: points[k] for lam, points in tried.items()}
                    line = (epsilon, seed, method.evaluated)
                    entries.append(Entry(name, method.name, *line, own[method.fixed].test))
                    if method.lams:
                        lam = chosen(own)
                        lams.setdefault((name, method.name, epsilon), []).append(lam)
                        entries.append(Entry(name, f"{method.name}-chosen", *line, own[lam].test))
            for epsilon in scale.epsilons:
                made = plan(scale, method.at(scale, setting, found[0], method.fixed), first, epsilon)
                if method.algorithm is Alone:
                    noise[name, epsilon] = float(made.noise.max())
                if method.lams:
                    price[name, method.name, epsilon] = price_of(made, len(method.lams))
        # The programs of a federation fit no other.
        jax.clear_caches()
    return Found(scale, tuple(entries), lams, steps, price, noise, clients)


def chosen(points: dict[float | None, Point]) -> float:
    """The λ with the best accuracy on validation rows; of equals the largest, which shares the most."""
    ranked = [(point.validation, lam) for lam, point in points.items() if lam is not None]
    return max((-1.0 if math.isnan(score) else score, lam) for score, lam in ranked)[1]


def price_of(made: RowPlan, runs: int) -> float:
    """ε of several runs with the same noise together, for the client with the largest."""
    if not np.all(made.noise):
        return math.inf
    events = {made.event(i) for i in range(len(made.rows))}
    return max(spent([Event(e.q, e.z, runs * e.steps)], DELTA) for e in events)
