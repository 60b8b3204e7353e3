"""A search for hyperparameters, described completely: what is tried, and what it is judged by."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Set
from typing import Any, Literal

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from pfedme import __version__
from pfedme.algorithms import Algorithm
from pfedme.errors import InputError
from pfedme.run import Run
from pfedme.spec import build, field_types, to_json

How = Literal["tpe", "grid"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """What may be tried of one hyperparameter: a range for TPE, and the values of the grid."""

    range: FloatDistribution | IntDistribution
    grid: tuple[float, ...]
    """A single value is no axis of the grid: the algorithm's own default stays."""


def _log(low: float, high: float) -> FloatDistribution:
    return FloatDistribution(low, high, log=True)


# R, K and F are part of a compiled program, so that each of their values is compiled once; hence few.
AXES: dict[str, Axis] = {
    "lam": Axis(_log(0.1, 100), (5.0, 10.0, 15.0, 20.0, 30.0)),
    "eta": Axis(_log(0.001, 0.3), (0.005, 0.01, 0.02, 0.05, 0.1)),
    "alpha": Axis(_log(0.001, 0.3), (0.01, 0.05, 0.1)),
    "beta": Axis(_log(0.5, 4), (1.0, 2.0)),
    "R": Axis(IntDistribution(10, 40, step=10), (20,)),
    "K": Axis(IntDistribution(3, 7, step=2), (3, 5, 7)),
    "F": Axis(IntDistribution(250, 1000, step=250), (250, 500, 1000)),
}
"""What is tried of an algorithm that has the field; the grid is in the spirit of the paper's settings."""

OWN_AXES: dict[str, dict[str, Axis]] = {
    "pfedme": {"eta": Axis(_log(0.001, 0.1), (0.005, 0.01, 0.02))},
    "per-fedavg": {"eta": Axis(_log(0.0003, 0.1), (0.001, 0.002, 0.003, 0.01))},
}
"""Where an algorithm's steps are of another size than most."""


def axes(algorithm: Algorithm) -> dict[str, Axis]:
    """The axes of an algorithm: one for each of its fields that is known above and has an effect.

    >>> from pfedme.algorithms import Alone, PFedMe
    >>> list(axes(PFedMe())), list(axes(PFedMe(nu=0.1))), list(axes(Alone()))
    (['lam', 'eta', 'alpha', 'beta', 'R', 'K'], ['lam', 'eta', 'alpha', 'beta', 'R'], ['eta', 'R'])
    """
    idle = set() if algorithm.has_global else {"beta"}  # no server, nothing to mix
    idle |= {"K"} if to_json(algorithm).get("nu") else set()
    known = AXES | OWN_AXES.get(algorithm.name, {})
    return {k: axis for k, axis in known.items() if k in field_types(type(algorithm)) and k not in idle}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Everything that determines a search but for how many trials it is given."""

    run: Run
    """What all trials have in common."""
    how: How
    space: dict[str, BaseDistribution]
    """What is tried of each hyperparameter that is not fixed."""
    folds: int = 5
    """One of so many parts of each client's training rows is for validation."""
    evaluations: int = 8
    """How often a trial is judged in the course of its rounds."""
    drawn: int = 10
    """Trials drawn at random before TPE follows the better ones."""
    spared: int = 5
    """Trials that must be complete before another is stopped for being worse than half of them."""
    patience: float = 0.25
    """Share of its rounds in which no trial is stopped, for small steps look worse there than they are."""

    @classmethod
    def over(cls, run: Run, fixed: Set[str], how: How) -> Search:
        """The search over all that is not `fixed` of a run's hyperparameters."""
        own = to_json(run.algorithm)
        if own.get("adapt_on") == "test":
            raise InputError("--adapt-on test reads test rows, which a search must not; leave it out.")
        if own.get("rechoose"):
            raise InputError("--rechoose chooses λ by the rows that a search judges by; leave it out.")
        known = axes(run.algorithm)
        free = {name: axis for name, axis in known.items() if name not in fixed}
        space: dict[str, BaseDistribution] = (
            {name: axis.range for name, axis in free.items()}
            if how == "tpe"
            else {name: CategoricalDistribution(a.grid) for name, a in free.items() if len(a.grid) > 1}
        )
        if not space:
            raise InputError(
                f"There is nothing to search, because each of {', '.join(known)} is given or has one value; "
                "leave an option out, or train with 'pfedme run'."
            )
        return cls(run=run, how=how, space=space)

    def to_json(self) -> dict[str, Any]:
        """This search as JSON values, the content of tune.json; a searched field holds what is tried."""
        run = self.run.to_json()
        tried = {name: json.loads(distribution_to_json(d)) for name, d in self.space.items()}
        numbers = ("folds", "evaluations", "drawn", "spared", "patience")
        own = {name: getattr(self, name) for name in numbers}
        return {
            "version": __version__,
            "search": self.how,
            **own,
            **run,
            "algorithm": run["algorithm"] | tried,
        }

    def settings(self, params: dict[str, Any]) -> dict[str, Any]:
        """What a trial is carried out with: its numbers to three digits, that can be read and typed."""
        return {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in params.items()}

    def run_with(self, settings: dict[str, Any]) -> Run:
        """The run with these settings."""
        own = self.run.algorithm
        algorithm = build(type(own), to_json(own) | settings, f"algorithm '{own.name}'")
        return dataclasses.replace(self.run, algorithm=algorithm)

    def stops(self) -> list[int]:
        """The rounds after which a trial is judged; the last one is the end."""
        return sorted({-(-self.run.rounds * k // self.evaluations) for k in range(1, self.evaluations + 1)})

    def grid(self) -> list[dict[str, Any]]:
        """All points of the grid, in an order drawn by the seed, so that the first few are a fair sample."""
        values = [d.choices for d in self.space.values() if isinstance(d, CategoricalDistribution)]
        points = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
        return [points[k] for k in np.random.default_rng(self.run.seed).permutation(len(points))]
