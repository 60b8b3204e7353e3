"""Which methods suit a federation, and how good each is on validation rows, within a given time.

Methods are tried with few rounds first. The better half is tried again with more, and the best few until they
have converged (successive halving). Every trial is kept in a file, so that an interrupted search continues,
and a longer one starts where a shorter one ended. Time decides how much is tried, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedme import __version__
from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.core.models import Model
from pfedme.core.spec import parse
from pfedme.data.federation import Federation
from pfedme.engine.differences import Differences
from pfedme.engine.simulate import Simulation
from pfedme.errors import Diverged, InputError
from pfedme.files import atomic_write, writing
from pfedme.personalization.lines import Recipe, clusters_in
from pfedme.training.pilot import pilot

BASES = ("alone", "fedavg")
"""Methods that are always tried, and with every budget."""
RELATIVES = ("scaffold", "ditto", "apfl", "mr-mtl", "aruba", "fedper", "fedrep", "fedbn")
"""Other methods to try, as far as they suit the model."""
CLUSTERS = (2, 4)
"""Numbers of clusters to try besides the one that the rows suggest."""
WARMUP = 10
"""Rounds before clusters are formed; fewer than by default, so that short trials show what they do."""
BUDGETS = (48, 200, 1500)
"""The largest number of rounds in each stage of the search."""
BEST = 3
"""How many methods, besides the bases, are tried with the largest budget."""

Watch = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of a method with a budget."""

    method: str
    """As on the command line, such as ifca:clusters=4."""
    budget: int
    seconds: float
    loss: float | None = None
    """The mean loss on validation rows of the model that clients would use; None if training diverged."""
    shared_loss: float | None = None
    """That of the shared model, if there is one."""
    rounds: int = 0
    quarter_at: tuple[int, ...] = ()
    steps: dict[str, float] = dataclasses.field(default_factory=dict)
    """The step sizes that were found."""
    converged: bool = False
    l2: tuple[float, ...] | None = None
    """The strength that each client has chosen, for `alone`."""
    l2_without: tuple[tuple[float, ...], ...] | None = None
    """The same without each part of the rows."""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm with its step sizes."""
        return dataclasses.replace(parse(self.method, ALGORITHMS, "algorithm"), **self.steps)

    def recipe(self, model: Model, cohort: int, seed: int) -> Recipe:
        """How it was trained."""
        l2, without = (None if own is None else np.array(own) for own in (self.l2, self.l2_without))
        return Recipe(self.algorithm, model, cohort, seed, self.rounds, self.quarter_at, l2, without)


def methods_for(model: Model, federation: Federation, found: Differences | None) -> list[str]:
    """The methods that suit a model and a federation, by their names on the command line.

    They are the bases, clusters with at least two clients each on average, and relatives that can train the
    model.
    """
    numbers = sorted({*CLUSTERS, clusters_in(found)} - {0})
    several = [f"ifca:clusters={k},warmup={WARMUP}" for k in numbers if 2 * k <= federation.clients]
    wanted = [*BASES, *several, *RELATIVES]
    suited = []
    for text in wanted:
        try:
            parse(text, ALGORITHMS, "algorithm").check_fit(model, federation.clients)
        except InputError:
            continue
        suited.append(text)
    return suited


class Trials:
    """Trials in a file, and the seconds that all work has taken, across interruptions."""

    def __init__(self, path: Path, question: dict[str, Any]) -> None:
        """`question` is what is asked; a file about another question is refused."""
        self.path, self.question = path, question
        self.trials: list[Trial] = []
        self.notes: dict[str, Any] = {}
        if path.exists():
            try:
                document = json.loads(path.read_text())
                asked, kept = document["question"], document["trials"]
                self.trials = [Trial(**{name: _tuples(value) for name, value in t.items()}) for t in kept]
                self.notes = dict(document["notes"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} is damaged ({error}); delete it to start over.") from None
            if asked != json.loads(json.dumps(question)):
                raise InputError(
                    f"{path.parent} holds advice on another question, or of another version; choose another "
                    "--out, or --force to start over."
                )

    @property
    def seconds(self) -> float:
        """The time that all trials have taken."""
        return sum(trial.seconds for trial in self.trials)

    def of(self, method: str, most: float = math.inf) -> Trial | None:
        """The trial of a method with the largest budget, but at most so many rounds, if there is one."""
        tried = [trial for trial in self.trials if trial.method == method and trial.budget <= most]
        return max(tried, key=lambda trial: trial.budget, default=None)

    def best(self, most: float = math.inf) -> list[Trial]:
        """The last trial, with a budget of at most so many rounds, of each method that did not diverge, the
        one with the least loss first."""
        last = [self.of(method, most) for method in dict.fromkeys(trial.method for trial in self.trials)]
        return sorted((t for t in last if t and t.loss is not None), key=lambda t: t.loss or 0.0)

    def add(self, trial: Trial) -> None:
        """Keeps a trial."""
        self.trials.append(trial)
        self.write()

    def note(self, name: str, value: Any) -> Any:
        """The value noted under a name, which is this one if there is none yet."""
        if name not in self.notes:
            self.notes[name] = value
            self.write()
        return self.notes[name]

    def write(self) -> None:
        """Writes the file."""
        document = {
            "question": self.question,
            "notes": self.notes,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
        }
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, json.dumps(document, indent=1) + "\n")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def question(config: dict[str, Any]) -> dict[str, Any]:
    """What identifies a question: the run that it is about, and this version."""
    return {"version": __version__, "config": config}


def search(
    methods: Sequence[str],
    trials: Trials,
    simulation: Simulation,
    *,
    budget: int,
    seconds: float,
    watch: Watch = lambda *_: None,
) -> list[str]:
    """Tries methods for at most about so many seconds, and returns what was left out for want of time.

    `alone` and FedAvg are tried with the smallest budget whatever the time. `simulation` has the model, the
    federation, the cohort and the seed.
    """
    budgets = sorted({min(b, budget) for b in BUDGETS} | ({budget} if budget > BUDGETS[-1] else set()))
    kept, left = list(methods), []
    for stage, most in enumerate(budgets):
        for place, method in enumerate(kept):
            watch(
                f"{method}, at most {most} rounds", stage * len(methods) + place, len(budgets) * len(methods)
            )
            before = trials.of(method)
            if before and (before.budget >= most or before.converged or before.loss is None):
                continue
            likely = before.seconds * most / before.budget if before else 0.0
            needed = method in BASES and stage == 0
            if not needed and trials.seconds + likely > seconds:
                left.append(f"{method} with up to {most} rounds")
                continue
            trials.add(_tried(method, simulation, most))
        # Longer trials, from before an interruption, do not count: the order must be as without it.
        others = [t.method for t in trials.best(most) if t.method in kept and t.method not in BASES]
        many = max(BEST, math.ceil(len(others) / 2)) if stage + 2 < len(budgets) else BEST
        kept = [*(m for m in kept if m in BASES), *others[:many]]
    return left


def _tried(method: str, simulation: Simulation, budget: int) -> Trial:
    """Trains a method until it has converged on validation rows, for at most so many rounds."""
    s, asked, began = simulation, parse(method, ALGORITHMS, "algorithm"), time.monotonic()
    try:
        own = Simulation(asked, s.model, s.federation, cohort=s.cohort, seed=s.seed)
        found = pilot(asked, own, budget=budget)
    except Diverged:
        return Trial(method, budget, time.monotonic() - began)
    losses = found.validation
    return Trial(
        method,
        budget,
        time.monotonic() - began,
        loss=losses.get("personal", losses.get("global")),
        shared_loss=losses.get("global"),
        rounds=found.rounds,
        quarter_at=found.quarter_at,
        steps={name: getattr(found.algorithm, name) for name in found.algorithm.steps},
        converged=found.converged,
        l2=None if found.l2 is None else _tuples(found.l2.tolist()),
        l2_without=None if found.l2_without is None else _tuples(found.l2_without.tolist()),
    )
