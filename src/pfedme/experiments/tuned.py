"""All algorithms on a range of federations: each tuned on validation rows with the same number of trials."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax

from pfedme import __version__
from pfedme.algorithms import OURS, Algorithm, Alone, FedAvg
from pfedme.core.models import Model, parse_model
from pfedme.data import parse_data
from pfedme.engine.baseline import baseline
from pfedme.engine.cost import size_of
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.experiments.study import PlannedRun, Study
from pfedme.files import atomic_write, writing
from pfedme.personalization.finished import Watch
from pfedme.report.tables import KINDS
from pfedme.runs.run import Run, load
from pfedme.training.pilot import FOLDS

TRIALS = 6
"""Settings that are tried for every method on every federation."""
FLATTER = {6: (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), 3: (2.0, 8.0, 32.0), 2: (2.0, 16.0), 1: (8.0,)}
"""By what the curvature L is divided before step sizes are derived from it, for each number of trials that a
point of a method's other hyperparameters has. L is measured at the first model, and is smaller later on."""
METHODS: tuple[type[Algorithm], ...] = tuple(cls for cls in OURS if cls.name != "hypcluster")
"""All algorithms; hypcluster is another name for ifca."""
MAJORITY = "majority"
"""The name of the baseline that always predicts the most frequent class."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A federation of the study."""

    name: str
    data: str
    """Its source; `{seed}` stands for the seed of the repetition."""
    about: str
    model: str = "mlr"
    rounds: int = 60
    cohort: int | None = None
    """Clients drawn in each round; all if not given."""

    def length(self, scale: Scale) -> int:
        """The number of rounds."""
        return max(2, self.rounds // scale.divide)

    def run(self, algorithm: Algorithm, seed: int, scale: Scale) -> Run:
        """The run of an algorithm, evaluated after the last round."""
        rounds = self.length(scale)
        return Run(
            algorithm=algorithm, data=parse_data(self.data.format(seed=seed)), model=parse_model(self.model),
            rounds=rounds, cohort=self.cohort, seed=seed, eval_every=rounds,
        )  # fmt: skip


def _dirichlet(alpha: float, rows: int = 50, model: str = "mlr") -> Setting:
    name = f"mnist-dirichlet-{alpha:g}" + ("" if model == "mlr" else "-network")
    data = f"mnist:partition=dirichlet,alpha={alpha:g},clients=20,cap={2 * rows},train=0.5,seed={{seed}}"
    about = f"MNIST, labels by Dirichlet({alpha:g}), 20 clients with {rows} training rows"
    return Setting(name, data, about, model)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "synthetic", "synthetic", "the paper's Synthetic(0.5, 0.5), 10 of 100 clients in a round",
        rounds=100, cohort=10,
    ),
    Setting("mnist-two-labels", "mnist", "the paper's MNIST, 20 clients with two labels each"),
    _dirichlet(0.1),
    _dirichlet(0.3),
    Setting(
        "mnist-rotated", "mnist:partition=rotated,clients=32,cap=100,train=0.5,seed={seed}",
        "MNIST rotated by four angles, 32 clients with 50 training rows",
    ),
    Setting("medpar", "medpar", "whether a patient dies, 54 hospitals with 1 to 69 training rows"),
    _dirichlet(0.3, 200, "dnn-bn:hidden=30"),
)  # fmt: skip
"""To add a federation, add a line. Labels must be classes."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the study is carried out."""

    seeds: int = 3
    divide: int = 1
    """Rounds are divided by this."""
    settings: tuple[Setting, ...] = SETTINGS
    methods: tuple[type[Algorithm], ...] = METHODS
    published: bool = True
    """Whether published numbers are reproduced too."""

    @property
    def steps(self) -> int:
        """The number of steps that are shown: the trials of a method on a federation, or one run."""
        return len(self.settings) * len(self.methods) * (1 + self.seeds)


QUICK_METHODS = ("pfedme", "fedavg", "fedavg-ft", "ditto", "label-prior", "ifca", "alone", "pooled")
FULL = Scale()
QUICK = Scale(
    seeds=1, divide=5, published=False,
    settings=tuple(s for s in SETTINGS if s.name in ("mnist-dirichlet-0.1", "mnist-rotated")),
    methods=tuple(cls for cls in METHODS if cls.name in QUICK_METHODS),
)  # fmt: skip


class Entry(NamedTuple):
    """A line of relatives.csv."""

    federation: str
    method: str
    evaluated: str
    """Which of its models: `global`, `local` or `personal`."""
    seed: int
    accuracy: float
    """Over all clients' test rows, a fraction."""
    worst_decile: float
    """The mean over the tenth of the clients that does worst."""
    gradients: int
    """Mini-batch gradients in training, as a mean over clients; fine-tuning is included."""
    bytes: int
    """Bytes sent and received in training, as a mean over clients."""


Settings = dict[str, float]
"""Fields of an algorithm, and their values."""


class Trial(NamedTuple):
    """Settings that were tried, judged on validation rows."""

    settings: Settings
    accuracy: float | None
    """Of the personal model, or the global one if there is none; None if training diverged."""
    loss: float | None


@dataclasses.dataclass(frozen=True)
class Found:
    """What the study has found."""

    scale: Scale
    entries: tuple[Entry, ...]
    chosen: dict[tuple[str, str], Algorithm]
    """A method with the settings that it uses on a federation."""
    left_out: dict[tuple[str, str], str]
    """Why a method is missing on a federation."""

    @cached_property
    def models(self) -> dict[tuple[str, str], dict[str, list[Entry]]]:
        """The lines of each federation and method, by model."""
        models: dict[tuple[str, str], dict[str, list[Entry]]] = {}
        for entry in self.entries:
            own = models.setdefault((entry.federation, entry.method), {})
            own.setdefault(entry.evaluated, []).append(entry)
        return models

    def methods(self, federation: str) -> list[str]:
        """The methods with results on a federation, baselines included."""
        return [method for where, method in self.models if where == federation]

    def by_seed(self, federation: str, method: str, kind: str, field: str = "accuracy") -> dict[int, float]:
        """An accuracy in percent with each seed; empty if there is no such model."""
        lines = self.models.get((federation, method), {}).get(kind, [])
        return {entry.seed: 100 * getattr(entry, field) for entry in lines}

    def values(self, federation: str, method: str, kind: str, field: str = "accuracy") -> list[float]:
        """The same values, without the seeds."""
        return list(self.by_seed(federation, method, kind, field).values())

    def in_use(self, federation: str, method: str) -> str:
        """The model that clients would use: the personal one, or the global one if there is none."""
        return "personal" if "personal" in self.models[federation, method] else "global"


def grid(cls: type[Algorithm]) -> list[tuple[Settings, float]]:
    """The trials of an algorithm: values of its main hyperparameters, and a divisor of L for step sizes.

    >>> from pfedme.algorithms import Ditto
    >>> grid(Ditto)[:3]
    [({'lam': 0.05}, 2.0), ({'lam': 0.05}, 16.0), ({'lam': 0.5}, 2.0)]
    """
    points = [dict(zip(cls.tuned, values, strict=True)) for values in itertools.product(*cls.tuned.values())]
    return list(itertools.product(points, FLATTER[TRIALS // len(points)]))


def given(cls: type[Algorithm], rounds: int, cohort: int) -> Algorithm:
    """The algorithm with the settings that are not tried: its defaults, but for those that depend on the
    length of training or would make it far more expensive than others."""
    own: dict[str, Any] = {
        # As many steps in a round as all clients of a cohort take together.
        "pooled": {"R": cohort * Algorithm.R},
        # As many steps in a round as others take, on average.
        "l2gd": {"p": 1 / (1 + Algorithm.R)},
        "ifca": {"warmup": rounds // 4},
    }.get(cls.name, {})
    return cls(**own)


def candidates(algorithm: Algorithm, L: float) -> list[Settings]:
    """The settings of all trials, with step sizes for losses whose gradients are L-Lipschitz."""
    found = []
    for values, flatter in grid(type(algorithm)):
        made = dataclasses.replace(algorithm, **values).with_steps(L / flatter)
        found.append(values | {name: getattr(made, name) for name in made.steps})
    return found


def tried(run: Run) -> list[Trial]:
    """All trials of a run's algorithm: trained without a fifth of each client's training rows, and judged
    on it. Test rows are not used.

    Clients that train alone do without l2 here; in the run itself, each chooses its own.
    """
    run, whole = run.prepare()
    held = whole.federation.hold_out(0, FOLDS)
    algorithm = run.algorithm
    if isinstance(algorithm, Alone):
        algorithm = dataclasses.replace(algorithm, l2="model")
    found = []
    for settings in candidates(algorithm, whole.smoothness()):
        simulation = Simulation(
            dataclasses.replace(algorithm, **settings), whole.model, held, cohort=whole.cohort, seed=run.seed
        )  # fmt: skip
        state, finite = simulation.advance(simulation.start(), run.rounds)
        judged = simulation.evaluate(state, on="validation", train=False)[0] if finite else None
        if not (judged and judged.finite):
            found.append(Trial(settings, None, None))
            continue
        scores = judged.test["personal" if "personal" in judged.test else "global"]
        found.append(Trial(settings, scores.overall, scores.mean_loss))
    return found


def best(trials: Sequence[Trial]) -> Settings | None:
    """The settings with the highest accuracy, or the smallest loss of several; None if all diverged."""
    judged = [
        (-trial.accuracy, trial.loss, place)
        for place, trial in enumerate(trials)
        if trial.accuracy is not None and trial.loss is not None
    ]
    return trials[min(judged)[2]].settings if judged else None


def recorded(study: Study, run: Run) -> list[Trial]:
    """The trials of a run's algorithm, carried out unless they are recorded."""
    what = [run.digest(), grid(type(run.algorithm)), FOLDS, __version__]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    path = study.runs / f"trials-{run.algorithm.name}-{digest}.json"
    if path.exists():
        try:
            return [Trial(**trial) for trial in json.loads(path.read_text())]
        except (ValueError, TypeError):
            path.unlink()  # damaged; they are carried out again
    trials = tried(run)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps([trial._asdict() for trial in trials]))
    return trials


class Ground(NamedTuple):
    """What the runs of all methods on a federation share."""

    setting: Setting
    scale: Scale
    model: Model
    clients: int
    cohort: int

    @classmethod
    def of(cls, setting: Setting, scale: Scale) -> Ground:
        """Loads the federation, as it is drawn with seed 0."""
        _, simulation = setting.run(FedAvg(eta=1.0), 0, scale).prepare()
        return cls(setting, scale, simulation.model, simulation.federation.clients, simulation.cohort)

    def base(self, cls: type[Algorithm]) -> Run:
        """The run of a method with seed 0, before step sizes and main hyperparameters are chosen."""
        run = self.setting.run(cls(), 0, self.scale)
        return dataclasses.replace(run, algorithm=given(cls, run.rounds, self.cohort))

    def choose(self, study: Study, cls: type[Algorithm]) -> Algorithm | str:
        """The method with the settings that are best on validation rows, or why it is left out."""
        base = self.base(cls)
        try:
            base.algorithm.check_fit(self.model, self.clients)
        except InputError as error:
            return str(error)
        settings = best(recorded(study, base))
        if settings is None:
            return f"All {TRIALS} trials diverged."
        return dataclasses.replace(base.algorithm, **settings)

    def train(self, study: Study, algorithm: Algorithm, seed: int) -> list[Entry]:
        """Trains on all training rows, unless that is recorded; a line for each model, or none if it
        diverged."""
        wish = PlannedRun(self.setting.run(algorithm, seed, self.scale), 1, first=seed)
        study.carry_out([wish])
        (record,) = study.records(wish)
        gradients, sent = self.cost(algorithm, record)
        final = record["final"] or {}
        return [
            Entry(
                self.setting.name, algorithm.name, kind, seed, final[kind]["accuracy"],
                final[kind]["clients"]["worst_decile"], round(gradients), round(sent),
            )
            for kind in KINDS
            if kind in final
        ]  # fmt: skip

    def cost(self, algorithm: Algorithm, record: dict[str, Any]) -> tuple[float, float]:
        """Gradients and bytes of a whole run, as means over clients."""
        per_round, rounds = record["cost"], record["config"]["rounds"]
        taking_part = self.cohort if algorithm.federated else 1 if algorithm.pools else self.clients
        rounds *= taking_part / self.clients
        gradients = rounds * per_round["gradients"] + getattr(algorithm, "F", 0)
        if algorithm.name == "one-shot":  # sends its model once, at the end
            return gradients, size_of(jax.eval_shape(self.model.init, jax.random.key(0)))
        return gradients, rounds * (per_round["down"] + per_round["up"])

    def majority(self, seed: int) -> Entry:
        """The line of the baseline that always predicts the most frequent class of the training rows."""
        told = baseline(load(self.setting.run(FedAvg(), seed, self.scale).data))
        worst = told["clients"]["worst_decile"]
        return Entry(self.setting.name, MAJORITY, "global", seed, told["accuracy"], worst, 0, 0)


def measure(study: Study, scale: Scale, watch: Watch = lambda *_: None) -> Found:
    """Tunes and trains every method on every federation, unless that is recorded."""
    entries: list[Entry] = []
    chosen: dict[tuple[str, str], Algorithm] = {}
    left_out: dict[tuple[str, str], str] = {}
    total = scale.steps
    steps = iter(range(total))
    for setting in scale.settings:
        ground, name = Ground.of(setting, scale), setting.name
        for cls in scale.methods:
            watch(f"{name}: {cls.name}, trials", next(steps), total)
            found = ground.choose(study, cls)
            if isinstance(found, str):
                left_out[name, cls.name] = found
            else:
                chosen[name, cls.name] = found
        # Seed by seed, because the data of a seed is loaded once.
        for seed in range(scale.seeds):
            for cls in scale.methods:
                watch(f"{name}: {cls.name}, seed {seed}", next(steps), total)
                if algorithm := chosen.get((name, cls.name)):
                    entries += ground.train(study, algorithm, seed)
            entries.append(ground.majority(seed))
        # The programs of a federation fit no other, and a process can hold only so many of them.
        jax.clear_caches()
    return Found(scale, tuple(entries), chosen, left_out)
