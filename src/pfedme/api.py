"""The functions of the command line, for Python."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pfedme import arguments
from pfedme.algorithms import Algorithm
from pfedme.core.models import Description, Model
from pfedme.data import Source
from pfedme.engine.choices import Personalize
from pfedme.errors import InputError
from pfedme.personalization.afterwards import Offer, offer, write_page
from pfedme.personalization.finished import FinishedRun
from pfedme.privacy.units import Privacy
from pfedme.report.html.page import NAME, report
from pfedme.report.tables import header, rows
from pfedme.runs.run import Run
from pfedme.training.compare import Comparison
from pfedme.training.compare import compare as carry_out_comparison
from pfedme.training.execute import execute
from pfedme.training.execution import Progress, Result

if TYPE_CHECKING:
    from pfedme.tuning.tune import Tuning

Watch = Callable[[Progress], None]


def train(
    algorithm: Algorithm | str,
    data: Source | str | os.PathLike[str],
    *,
    model: Description | Model | str = "mlr",
    rounds: int = Run.rounds,
    budget: int = Run.budget,
    cohort: int | None = None,
    seed: int = 0,
    eval_every: int | None = None,
    eval_clients: int | None = None,
    holdout_clients: float | Sequence[str] | str | None = None,
    personalize: Personalize | str | None = None,
    privacy: Privacy | str | None = None,
    out: os.PathLike[str] | str | None = None,
    force: bool = False,
    watch: Watch = lambda _: None,
) -> Result:
    """Trains one algorithm on a federation, as `pfedme run` does.

    Algorithm, data and model are strings as on the command line (`"pfedme:lam=15"`) or objects, including
    your own subclasses of `Algorithm` and `Model`. `personalize` lets each client choose its model, and
    `holdout_clients` (a share, or names) holds clients out to see how they fare as newcomers; the outcome
    is the result's `offer`. `privacy`, as in `"rows:epsilon=3"`, trains with differential privacy. With
    `out`, the run's folder is written, including `report.html`. `watch` is called every few rounds with the
    progress.

    >>> from pfedme import PFedMe, train
    >>> result = train(PFedMe(lam=15.0, R=5), "synthetic:clients=5,rows=60", rounds=3, eval_every=1)
    >>> sorted(result.record["final"].keys() & {"global", "local", "personal"})
    ['global', 'local', 'personal']
    >>> [entry["round"] for entry in result.record["history"]]
    [0, 1, 2, 3]
    """
    run = _run(
        algorithm, data, model, rounds=rounds, budget=budget, cohort=cohort, seed=seed, eval_every=eval_every,
        eval_clients=eval_clients, holdout_clients=holdout_clients, personalize=personalize,
        privacy=privacy,
    )  # fmt: skip
    folder = arguments.folder(out)
    result = execute(run, folder, force=force, watch=arguments.function("watch", watch))
    if result.run.personalize or result.run.holdout_clients:
        found = offer(_finished(result), out=folder, members=result.run.personalize is not None)
        result = dataclasses.replace(result, offer=found)
    if folder:
        report([folder], folder / NAME, force=True)
    return result


@dataclasses.dataclass(frozen=True)
class Compared:
    """Several algorithms side by side."""

    records: dict[str, list[dict[str, Any]]]
    """The record of each algorithm's runs, a list over seeds."""
    verdict: dict[str, Any] | None
    """Whether joining pays, as in compare.json; None if these runs cannot show it."""
    table: str
    """The results as text."""
    failures: list[str]
    """Why runs diverged, if any did."""

    def __str__(self) -> str:
        return self.table


def compare(
    algorithms: Sequence[Algorithm | str],
    data: Source | str | os.PathLike[str],
    *,
    seeds: int = 1,
    model: Description | Model | str = "mlr",
    rounds: int = Run.rounds,
    budget: int = Run.budget,
    cohort: int | None = None,
    seed: int = 0,
    eval_every: int | None = None,
    eval_clients: int | None = None,
    privacy: Privacy | str | None = None,
    out: os.PathLike[str] | str | None = None,
    force: bool = False,
) -> Compared:
    """Trains several algorithms on the same data, as `pfedme compare` does; `out` is a folder for results.

    >>> import pfedme
    >>> compared = pfedme.compare(["fedavg", "alone"], "synthetic:clients=5,rows=60", rounds=3, budget=6)
    >>> list(compared.records), len(compared.records["fedavg"])
    (['fedavg', 'alone'], 1)
    """
    if isinstance(algorithms, str) or not isinstance(algorithms, Sequence) or not algorithms:
        raise InputError(f"algorithms must be a list of algorithms, not {arguments.told(algorithms)}.")
    runs = [
        _run(
            algorithm, data, model, rounds=rounds, budget=budget, cohort=cohort, seed=seed,
            eval_every=eval_every, eval_clients=eval_clients, privacy=privacy,
        )
        for algorithm in algorithms
    ]  # fmt: skip
    with _folder(out) as folder:
        found = carry_out_comparison(runs, arguments.count("seeds", seeds), folder, force=force)
        report([folder], folder / NAME, force=True)
        verdict = arguments.read_verdict(folder)
    return Compared(found.records, verdict, _text(found), found.failures)


def tune(
    algorithm: Algorithm | str,
    data: Source | str | os.PathLike[str],
    *,
    trials: int | None = None,
    search: Literal["tpe", "grid"] = "tpe",
    fixed: Sequence[str] | None = None,
    model: Description | Model | str = "mlr",
    rounds: int = Run.rounds,
    budget: int = Run.budget,
    cohort: int | None = None,
    seed: int = 0,
    eval_clients: int | None = None,
    out: os.PathLike[str] | str | None = None,
) -> Tuning:
    """Searches for an algorithm's hyperparameters on validation rows, as `pfedme tune` does.

    Hyperparameters that are `fixed` are not searched; by default these are the ones that are given
    (`"pfedme:lam=15"`) or that differ from their default. The best settings are `tuning.best[0].settings`,
    and `tuning.run` is the run with them: `pfedme.train(tuning.run.algorithm, data)`. If a search with a
    folder `out` was stopped, the same call resumes it.

    >>> import pfedme
    >>> tuning = pfedme.tune("fedavg:R=5", "synthetic:clients=5,rows=60", trials=2, rounds=3)
    >>> sorted(tuning.best[0].settings), tuning.run.algorithm.R
    (['aggregation', 'beta', 'eta'], 5)
    """
    Search, search_for = arguments.searching()
    run = _run(
        algorithm,
        data,
        model,
        rounds=rounds,
        budget=budget,
        cohort=cohort,
        seed=seed,
        eval_clients=eval_clients,
    )
    if search not in ("tpe", "grid"):
        raise InputError(f"search must be 'tpe' or 'grid', not {arguments.told(search)}.")
    known = {field.name: field.default for field in dataclasses.fields(run.algorithm)}
    if fixed is None:
        fixed = [k for k, default in known.items() if getattr(run.algorithm, k) != default]
        fixed += arguments.given_in(algorithm)
    number = None if trials is None else arguments.count("trials", trials)
    with _folder(out) as folder:
        return search_for(Search.over(run, arguments.names("fixed", fixed, known), search), number, folder)


def personalize(
    run: Result | os.PathLike[str] | str,
    data: Source | str | os.PathLike[str] | None = None,
    *,
    how: Personalize | str | None = None,
    out: os.PathLike[str] | str | None = None,
) -> Offer:
    """Finds the right model for each client of a finished run, or for newcomers, like `pfedme personalize`.

    `run` is the result of `train`, or a run's folder; models of the run's own clients are written there.
    Models of newcomers (`data`) are written if there is a folder `out`. The offer's `found` has each client's
    choice, gain and model, and its `to_json()` summarizes them.

    >>> import pfedme
    >>> result = pfedme.train("fedavg", "synthetic:clients=5,rows=60", rounds=3, budget=6)
    >>> offer = pfedme.personalize(result, how="auto:steps=5,folds=2")
    >>> sum(offer.to_json()["personalized"]["chosen"].values())
    5
    """
    chosen, folder = arguments.how(how), arguments.folder(out)
    if isinstance(run, Result):
        finished, home = _finished(run), None
    else:
        home = arguments.folder(run, "run")
        if home is None:
            raise InputError("run must be a run's folder, or the result of train, not None.")
        finished = FinishedRun.open(home)
    newcomers = None if data is None else arguments.source(data)
    where = folder or (home if newcomers is None else None)
    found = offer(finished, chosen, newcomers, out=where)
    if home and where:
        write_page(home, where, newcomers)
    return found


def _run(
    algorithm: Any,
    data: Any,
    model: Any,
    *,
    holdout_clients: Any = None,
    personalize: Any = None,
    privacy: Any = None,
    **numbers: Any,
) -> Run:
    """The run that the arguments describe, after checking the type of each."""
    return Run(
        algorithm=arguments.algorithm(algorithm),
        data=arguments.source(data),
        model=arguments.model(model),
        holdout_clients=arguments.held_out(holdout_clients),
        personalize=arguments.how(personalize),
        privacy=arguments.privacy(privacy),
        **{name: arguments.plain(value) for name, value in numbers.items()},
    )


def _finished(result: Result) -> FinishedRun:
    """A run that has just finished, ready for the steps that follow it."""
    result.run.refuse_to_offer()
    improving = bool(result.record.get("auto", {}).get("improving"))
    return FinishedRun.of(*result.run.prepare(), result.w, improving=improving)


@contextmanager
def _folder(out: Any) -> Iterator[Path]:
    """The folder that was given, or a temporary one."""
    if (folder := arguments.folder(out)) is not None:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="pfedme-") as scratch:
            yield Path(scratch) / "results"


def _text(comparison: Comparison) -> str:
    """The table of a comparison."""
    lines = [header(comparison.finals), *rows(comparison.finals)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
