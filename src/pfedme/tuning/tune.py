"""Carries out a search for hyperparameters, which can be stopped at any time and resumed.

A part of each client's training rows is held out. A trial trains on the others, and its score is the
accuracy, or another metric, of the model that matters over all clients' held-out rows: the personal model if
there is one, otherwise the global one. Test rows are never read.

The next trial is addressed, not threaded: it is a function of the seed and of the trials that have finished,
no matter what was interrupted between them. So a search that was killed ends as if it had not been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, Trial, TrialState

from pfedme.engine.devices import agreed, from_first
from pfedme.engine.measure import ACCURACY, R2, Measure, metric_for
from pfedme.engine.metrics import Blocks
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError, RunError
from pfedme.files import atomic_write, writing
from pfedme.report.trials import trials_csv, trials_md
from pfedme.runs.run import Run
from pfedme.training.execute import check_same
from pfedme.tuning.search import Search
from pfedme.tuning.study_storage import check_same_search, opened

TRIALS = 30
"""Default number of trials of a TPE search."""
ENOUGH = 20
"""Complete trials needed to say which hyperparameters mattered."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A trial that has ended."""

    number: int
    state: Literal["complete", "pruned", "diverged", "interrupted"]
    settings: dict[str, Any]
    accuracy: float | None
    """On validation rows, after `rounds` rounds; R² in a regression, or the chosen metric. None if the trial
    diverged or was interrupted."""
    rounds: int
    model: str | None
    """Which model was judged, `personal` or `global`; None if the trial was stopped."""

    @classmethod
    def of(cls, trial: FrozenTrial, search: Search, measure: Measure) -> Tried:
        """Converts a trial of Optuna, for which higher is always better."""
        about = trial.user_attrs
        accuracy = None if trial.value is None else measure.orientation * trial.value
        rounds = max(trial.intermediate_values, default=0)
        if trial.state == TrialState.FAIL:
            state = "interrupted"
        elif "diverged" in about:
            state, accuracy, rounds = "diverged", None, about["diverged"]
        else:
            state = "complete" if trial.state == TrialState.COMPLETE else "pruned"
        return cls(trial.number, state, search.settings(trial.params), accuracy, rounds, about.get("model"))


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a search has found so far."""

    search: Search
    trials: tuple[Tried, ...]
    mattered: dict[str, float]
    """Each hyperparameter's importance for the best trials, as a share; empty if too few are complete."""
    measure: Measure = ACCURACY
    """The metric by which trials are judged."""

    @property
    def best(self) -> list[Tried]:
        """The complete trials, best first; of two that tie, the earlier one comes first."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        return sorted(complete, key=lambda trial: -self.measure.orientation * (trial.accuracy or 0.0))

    @property
    def finished(self) -> int:
        """How many trials count: all but those that were interrupted."""
        return sum(trial.state != "interrupted" for trial in self.trials)

    @property
    def run(self) -> Run:
        """The run with the best settings, which trains on all training rows."""
        return self.search.run_with(self.best[0].settings)


@dataclasses.dataclass(frozen=True)
class Step:
    """The progress of a search, reported after every evaluation."""

    finished: int
    trials: int
    round: int
    """The current round of the current trial."""
    rounds: int
    best: float | None
    """The best score of a complete trial."""
    measure: Measure = ACCURACY


Watch = Callable[[Step], None]


def tune(search: Search, trials: int | None, out: Path, *, watch: Watch = lambda _: None) -> Tuning:
    """Carries out or resumes a search in the folder `out`, until so many trials have finished.

    The default is 30 trials, or all points of the grid.
    """
    check_same(search.run)
    from_first(lambda: check_same_search(out, search))
    bench = Bench(search)
    grid = search.grid() if search.how == "grid" else []
    wanted = min(trials or len(grid), len(grid)) if grid else trials or TRIALS
    with contextlib.ExitStack() as folder:
        folder.enter_context(writing(out, " Free some space, then run the same command to resume."))
        study: optuna.Study | None = None  # of several hosts, the first has it
        trial: Trial | None = None

        def begin() -> None:
            nonlocal study
            study = folder.enter_context(opened(out, search))

        def turn() -> bytes:
            nonlocal trial
            assert study is not None
            so_far = report(study, search, out, bench.measure)
            trial = None if so_far.finished >= wanted else ask(study, search, grid, so_far.finished)
            trials = [dataclasses.asdict(tried) for tried in so_far.trials]
            settings = None if trial is None else search.settings(trial.params)
            return json.dumps([trials, so_far.mattered, settings]).encode()

        from_first(begin)
        while True:
            trials_so_far, shares, settings = json.loads(from_first(turn))
            ended = tuple(Tried(**tried) for tried in trials_so_far)
            tuning = Tuning(search, ended, shares, bench.measure)
            if settings is None:
                break
            best = tuning.best[0].accuracy if tuning.best else None
            step = Step(tuning.finished, wanted, 0, search.run.rounds, best, bench.measure)
            attempt = Attempt(settings, trial)
            score = bench.attempt(attempt, lambda t, step=step: watch(dataclasses.replace(step, round=t)))
            if study is not None and trial is not None:
                study.tell(trial, score, TrialState.PRUNED if score is None else TrialState.COMPLETE)
    if not tuning.best:
        raise RunError(f"All {tuning.finished} trials diverged; fix a smaller step, such as --eta 0.001.")
    return tuning


def report(study: optuna.Study, search: Search, out: Path, measure: Measure) -> Tuning:
    """The results so far, which are also written to the folder."""
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    tried = tuple(Tried.of(trial, search, measure) for trial in ended)
    tuning = Tuning(search, tried, mattered(study, search), measure)
    atomic_write(out / "trials.csv", trials_csv(tuning))
    atomic_write(out / "tune.md", trials_md(tuning))
    return tuning


def ask(study: optuna.Study, search: Search, grid: list[dict[str, Any]], finished: int) -> Trial:
    """The next trial after so many finished ones."""
    if grid and not study.get_trials(states=(TrialState.WAITING,)):
        study.enqueue_trial(grid[finished])
    elif not grid:
        seed = int(np.random.SeedSequence([search.run.seed, finished]).generate_state(1)[0])
        with quiet():
            # Sampled jointly, because the step sizes that are stable depend on each other and on λ.
            study.sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=search.drawn, multivariate=True, constant_liar=False
            )
    return study.ask(search.space)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A trial that is carried out."""

    settings: dict[str, Any]
    trial: Trial | None
    """Its place in the study; of several hosts, the first has it."""

    def note(self, name: str, value: Any) -> None:
        """Keeps something about the trial."""
        if self.trial is not None:
            self.trial.set_user_attr(name, value)

    def scored(self, score: float, t: int) -> bool:
        """Keeps its score after round t. The value is whether it should stop, the same on all hosts."""
        if self.trial is not None:
            self.trial.report(score, t)
        return bool(agreed(self.trial is not None and self.trial.should_prune()))


class Bench:
    """Carries out trials on the federation with rows held out."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.run, whole = search.run.prepare()
        self.federation = whole.federation.hold_out(0, search.folds)
        self.model, self.cohort = whole.model, whole.cohort
        self.who = whole.evaluated(self.run.eval_clients or whole.federation.clients)
        self.measure, _ = metric_for(whole.federation, search.run.metric)
        self.sums = self.measure in (ACCURACY, R2)  # metrics that do not need every row
        rows = Blocks.of(self.federation, "validation", self.who).rows()
        if not len(rows):
            raise InputError(
                f"No client has {search.folds} training rows, the least from which one can be held out for "
                "validation; give clients more rows, or choose settings by hand with 'pfedme run'."
            )
        alike = ("r2", "auc", "balanced_accuracy", "recall", "precision", "f1")
        if self.measure.key in alike and not np.ptp(self.federation.y[rows]):
            raise InputError(
                "All validation rows have the same label, so trials cannot be judged by "
                f"{self.measure.name}; give clients more rows, or choose settings by hand with 'pfedme run'."
            )

    def attempt(self, trial: Attempt, watch: Callable[[int], None]) -> float | None:
        """The score of a trial; None if it was stopped."""
        run = self.search.run_with(trial.settings)
        simulation = Simulation(
            run.algorithm, self.model, self.federation, cohort=self.cohort, seed=run.seed,
            quarter_at=run.quarter_at,
        )  # fmt: skip
        state, accuracy, kind = simulation.start(), None, None
        for stop in self.search.stops():
            finite = True
            while finite and state.t < stop:
                state, finite = simulation.advance(state, stop - state.t)
            evaluation = None
            if finite:
                evaluation, _ = simulation.evaluate(
                    state, self.who, on="validation", train=False, rows=not self.sums
                )
            if not (evaluation and evaluation.finite):
                # Reported to Optuna as pruned rather than as failed, because TPE learns from pruned trials.
                trial.note("diverged", state.t)
                return None
            kind = "personal" if "personal" in evaluation.test else "global"
            score = evaluation.test[kind].over_all_rows(self.measure.key)
            # An undefined score, such as precision if no row is predicted positive, counts as the worst.
            accuracy = self.measure.orientation * (0.0 if score is None else score)
            watch(state.t)
            if trial.scored(accuracy, state.t) and state.t < run.rounds:
                return None
        trial.note("model", kind)
        return accuracy


def mattered(study: optuna.Study, search: Search) -> dict[str, float]:
    """Each hyperparameter's importance for the best trials, by PED-ANOVA."""
    if len(search.space) < 2 or len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < ENOUGH:
        return {}
    with quiet():
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), params=[*search.space])


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
