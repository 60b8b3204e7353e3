"""What joining is worth to a client, on federations from similar to dissimilar, with few and many rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedme import __version__
from pfedme.core.spec import to_json
from pfedme.engine.differences import differences
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.engine.simulate import State
from pfedme.experiments.gain_federations import SETTINGS, Scale, Setting
from pfedme.experiments.gain_page import Row, Unit, csv_of, mean_levels, newcomers_csv, page
from pfedme.experiments.study import Study
from pfedme.files import atomic_write, writing
from pfedme.personalization.finished import FinishedRun, Watch, newcomer_curve, summary
from pfedme.report.gain import gain_study_figure, newcomer_figure
from pfedme.runs.run import Run
from pfedme.training.pilot import pilot

NEWCOMER_ROWS = (5, 20, 100, 400)
"""Numbers of training rows that newcomers are given."""
MENU = 6
"""To be raised when clients choose from other models, or in another way: all units are measured again."""
NAMING = 1
"""To be raised when kinds of difference are named in another way: all are named again."""


class Job(NamedTuple):
    """A part of the study, carried out once and kept in a file named after everything that determines it."""

    about: str
    path: Path
    make: Callable[[], Any]

    def kept(self) -> Any | None:
        """The result, or None if there is none yet."""
        try:
            return json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:  # damaged; it is made again
            self.path.unlink(missing_ok=True)
            return None

    def carry_out(self) -> None:
        """Makes the result unless there is one."""
        if self.kept() is None:
            text = json.dumps(self.make())
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(self.path, text)


def measure(setting: Setting, seed: int, scale: Scale) -> Unit:
    """Runs all methods on one federation with one seed."""
    how = scale.how(setting.how)
    finished = FinishedRun.trained(settled(setting.run(seed, scale=scale)))
    found = finished.to_members(how)
    counts = Counter(candidate.name for candidate in found.candidates)
    single = [name for name, times in counts.items() if times == 1]  # not the many of a path
    right = {name: found.of(name) for name in (*single, "own-lambda", "recommended")}
    if setting.rounds:
        right.setdefault("pfedme", _algorithm_one(setting.run(seed, scale=scale, pfedme=True)))
    who = np.flatnonzero(found.tested)
    unit: Unit = {
        "methods": {name: summary(found, own) for name, own in right.items()},
        "rows": finished.simulation.federation.n_train[who].tolist(),
        "lam": [None if np.isinf(lam) else float(lam) for lam in found.lam[who]],
        "chosen": [found.candidates[k].name for k in found.choice[who]],
        "gain": {name: found.gain(right[name])[0][who].tolist() for name in ("alone", "global")},
    }
    if setting.newcomers:
        finished = FinishedRun.trained(settled(setting.run(seed, scale=scale, newcomers=True)))
        newcomers = finished.run.parties()[1]
        assert newcomers is not None
        unit["newcomers"] = [
            dataclasses.asdict(v) for v in newcomer_curve(finished, newcomers, how, rows=NEWCOMER_ROWS)
        ]
    return unit


def settled(run: Run) -> Run:
    """The run with the rounds and steps that are best on validation rows, if it has no number of rounds."""
    if run.rounds:
        return run
    found = pilot(run.algorithm, run.prepare()[1], budget=run.budget)
    return dataclasses.replace(
        run, algorithm=found.algorithm, rounds=found.rounds, quarter_at=found.quarter_at
    )


def _algorithm_one(run: Run) -> np.ndarray:
    """Whether the personal models of Algorithm 1, with its own w and λ, predict each test row correctly."""
    finished = FinishedRun.trained(run)
    s = finished.simulation
    models, _ = s.answer(State(run.rounds, finished.w, s.start().clients))
    assert models.personal is not None
    return outcomes(
        s.model, models.personal, s.store.x, s.store.y, Blocks.cut(*s.federation.rows("test"))
    ).right


def named(run: Run) -> str | None:
    """The kind of difference that the clients' training rows show."""
    found = differences(run.prepare()[1].federation)
    return found and found.kind


def jobs(study: Study, setting: Setting, scale: Scale) -> tuple[list[Job], Job | None]:
    """One job for each seed of a federation; and one to name the kind of difference, if it is known."""

    def job(about: str, prefix: str, what: Sequence[Any], make: Callable[[], Any]) -> Job:
        text = json.dumps([*what, __version__], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Job(about, study.runs / f"{prefix}-{digest}.json", make)

    units = []
    for seed in range(scale.seeds):
        run, other = (setting.run(seed, scale=scale, pfedme=pfedme) for pfedme in (False, True))
        rows = NEWCOMER_ROWS if setting.newcomers else ()
        what = [run.digest(), other.digest(), to_json(scale.how(setting.how)), rows, MENU]
        make = lambda seed=seed: measure(setting, seed, scale)  # noqa: E731
        units.append(job(f"{setting.name}, seed {seed}", "gain", what, make))
    if not setting.known:
        return units, None
    run = setting.run(0, scale=scale)
    what = [run.digest(), NAMING]
    return units, job(f"{setting.name}, kind", "kind", what, lambda: {"kind": named(run)})


def study_gain(
    study: Study, scale: Scale, only: Sequence[Setting] = SETTINGS, watch: Watch = lambda *_: None
) -> tuple[list[Row], list[str]]:
    """Carries out whatever is not kept yet of some federations. If all the others are kept too, it writes the
    tables, the figures and the page.

    Returns the rows of the federations that are complete, and the names of those that are not.
    """
    planned = {setting.name: jobs(study, setting, scale) for setting in SETTINGS}
    by_seed = [planned[s.name][0][seed] for seed in range(scale.seeds) for s in only]
    plan = [*(job for s in only if (job := planned[s.name][1])), *by_seed]
    for k, job in enumerate(plan):
        watch(job.about, k, len(plan))
        job.carry_out()
        jax.clear_caches()  # a process can map only so many compiled programs
    watch("writing", len(plan), len(plan))
    rows, every, missing = [], {}, []
    for setting in SETTINGS:
        of_seeds, naming = planned[setting.name]
        units = [unit for job in of_seeds if (unit := job.kept()) is not None]
        name = naming and naming.kept()
        if len(units) < len(of_seeds) or (naming and name is None):
            missing.append(setting.name)
            continue
        every[setting.name] = units
        rows.append(Row.of(setting, units, name and name["kind"]))
    if not missing:
        _write(study, scale, rows, every)
    return rows, missing


def _write(study: Study, scale: Scale, rows: list[Row], units: dict[str, list[Unit]]) -> None:
    curves = {s.name: mean_levels(units[s.name]) for s in SETTINGS if s.newcomers}
    study.write("gain.csv", csv_of(units), scale.seeds)
    study.write("gain.png", gain_study_figure(units), scale.seeds)
    study.write("newcomers.png", newcomer_figure(curves), scale.seeds)
    study.write("newcomers.csv", newcomers_csv(units), scale.seeds)
    with writing(study.out):
        atomic_write(study.out / "gain.md", page(rows, curves, units) + study.footer(scale.seeds))
