"""The complete description of a search for hyperparameters: what is tried, and how it is judged."""

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
from pfedme.core.spec import build, field_types, to_json
from pfedme.errors import InputError
from pfedme.runs.run import Run
from pfedme.training.pilot import Watch, pilot

How = Literal["tpe", "grid"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """The values to try for one hyperparameter: a range for TPE, and the values of the grid."""

    range: FloatDistribution | IntDistribution | CategoricalDistribution
    grid: tuple[float | str, ...]
    """With a single value, the grid does not vary this hyperparameter: the algorithm's default stays."""


def _log(low: float, high: float) -> FloatDistribution:
    return FloatDistribution(low, high, log=True)


def around(step: float) -> Axis:
    """The values to try for a step size, around one that is stable.

    >>> around(0.6)
    Axis(range=FloatDistribution(high=1.8, log=True, low=0.02, step=None), grid=(0.06, 0.18, 0.6))
    """
    return Axis(
        _log(_three_digits(step / 30), _three_digits(3 * step)),
        tuple(_three_digits(share * step) for share in (0.1, 0.3, 1)),
    )


def _three_digits(value: float) -> float:
    """The number rounded to three significant digits, which is easy to read and type."""
    return float(f"{value:.3g}")


# R, K and F are part of a compiled program, and each of their values is compiled once; hence few values.
AXES: dict[str, Axis] = {
    "lam": Axis(_log(0.1, 100), (5.0, 10.0, 15.0, 20.0, 30.0)),
    "eta": around(1.0),
    "alpha": around(1.0),
    "beta": Axis(_log(0.5, 4), (1.0, 2.0)),
    "R": Axis(IntDistribution(10, 40, step=10), (20,)),
    "K": Axis(IntDistribution(3, 7, step=2), (3, 5, 7)),
    "F": Axis(IntDistribution(250, 1000, step=250), (250, 500, 1000)),
    "aggregation": Axis(CategoricalDistribution(("uniform", "samples")), ("uniform", "samples")),
}
"""The values to try for each field that an algorithm may have; step sizes are multiples of a stable one. The
grid is in the spirit of the paper's settings."""


def axes(algorithm: Algorithm) -> dict[str, Axis]:
    """The axes of an algorithm: one for each of its fields that is in `AXES` and has an effect.

    >>> from pfedme.algorithms import Alone, PFedMe
    >>> list(axes(PFedMe())), list(axes(PFedMe(nu=0.1))), list(axes(Alone()))
    (['lam', 'eta', 'alpha', 'beta', 'R', 'K', 'aggregation'],
     ['lam', 'eta', 'alpha', 'beta', 'R', 'aggregation'], ['eta', 'R'])
    """
    idle = set() if algorithm.federated else {"beta", "aggregation"}  # no server, nothing to mix
    idle |= {"K"} if to_json(algorithm).get("nu") else set()
    idle |= {"eta", "alpha"} - set(algorithm.steps)
    fields = [name for name in AXES if name in field_types(type(algorithm)) and name not in idle]
    own = {name: among(values) for name, values in algorithm.tuned.items() if name != "lam"}
    return {name: AXES[name] for name in fields} | own


def among(values: tuple[float, ...]) -> Axis:
    """The values to try for a hyperparameter, in a range that they span.

    >>> among((0.1, 1.0, 10.0)).range
    FloatDistribution(high=10.0, log=True, low=0.1, step=None)
    """
    return Axis(_log(min(values), max(values)), values)


def _trained_enough(run: Run, watch: Watch) -> tuple[Run, dict[str, float]]:
    """The run, with as many rounds as it takes to converge if none are given; and its stable step sizes."""
    _, simulation = run.prepare()
    steps = {name: getattr(simulation.algorithm, name) for name in run.algorithm.steps}
    if not run.rounds:
        found = pilot(run.algorithm, simulation, budget=run.budget, watch=watch)
        run = dataclasses.replace(run, rounds=found.rounds, quarter_at=found.quarter_at)
    return run, steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Everything that determines a search, except the number of trials."""

    run: Run
    """The settings that all trials share."""
    how: How
    space: dict[str, BaseDistribution]
    """The values to try for each hyperparameter that is not fixed."""
    folds: int = 5
    """One fold out of this many of each client's training rows is used for validation."""
    evaluations: int = 8
    """How often a trial is evaluated during its rounds."""
    drawn: int = 10
    """Trials drawn at random before TPE follows the better ones."""
    spared: int = 5
    """Trials that must be complete before another is stopped for being worse than half of them."""
    patience: float = 0.25
    """Initial share of its rounds in which no trial is stopped, because small steps look worse there than
    they are."""

    @classmethod
    def over(cls, run: Run, fixed: Set[str], how: How, watch: Watch = lambda _: None) -> Search:
        """The search over all of a run's hyperparameters that are not `fixed`.

        `watch` is called with the rounds of the pilot that finds out how many rounds a trial needs.
        """
        own = to_json(run.algorithm)
        if own.get("adapt_on") == "test":
            raise InputError("--adapt-on test reads test rows, which a search must not; leave it out.")
        if run.privacy:
            raise InputError(
                "tune cannot be combined with --dp: every trial uses rows again, outside of the budget; tune "
                "on public data of the same kind, or leave --dp out."
            )
        if own.get("rechoose"):
            raise InputError("--rechoose chooses λ on the rows that a search judges by; leave it out.")
        known = axes(run.algorithm)
        free = {name: axis for name, axis in known.items() if name not in fixed}
        if how == "grid":
            free = {name: axis for name, axis in free.items() if len(axis.grid) > 1}
        if not free:
            raise InputError(
                f"There is nothing to search: each of {', '.join(known)} is given or has only one value; "
                "leave an option out, or train with 'pfedme run'."
            )
        run, stable = _trained_enough(run, watch)
        free |= {name: around(step) for name, step in stable.items() if name in free}
        space: dict[str, BaseDistribution] = {
            name: axis.range if how == "tpe" else CategoricalDistribution(axis.grid)
            for name, axis in free.items()
        }
        return cls(run=run, how=how, space=space)

    def to_json(self) -> dict[str, Any]:
        """This search as JSON values, the content of tune.json; a searched field holds the values to try."""
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
        """The settings that a trial uses: its numbers rounded to three digits."""
        return {k: _three_digits(v) if isinstance(v, float) else v for k, v in params.items()}

    def run_with(self, settings: dict[str, Any]) -> Run:
        """The run with these settings."""
        own = self.run.algorithm
        algorithm = build(type(own), to_json(own) | settings, f"algorithm '{own.name}'")
        return dataclasses.replace(self.run, algorithm=algorithm)

    def stops(self) -> list[int]:
        """The rounds after which a trial is evaluated; the last one is the end."""
        return sorted({-(-self.run.rounds * k // self.evaluations) for k in range(1, self.evaluations + 1)})

    def grid(self) -> list[dict[str, Any]]:
        """All points of the grid, in an order drawn by the seed, so that the first few are a fair sample."""
        values = [d.choices for d in self.space.values() if isinstance(d, CategoricalDistribution)]
        points = [dict(zip(self.space, point, strict=True)) for point in itertools.product(*values)]
        return [points[k] for k in np.random.default_rng(self.run.seed).permutation(len(points))]
