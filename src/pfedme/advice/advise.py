"""Advice on a federation: whether clients should train together, with which method, and what each gains."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pfedme.advice.trials import Trial, Trials, Watch, methods_for, question, search
from pfedme.algorithms import IFCA, FedAvg
from pfedme.core.models import MODELS
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.table import Table
from pfedme.engine.choices import Line, Personalize, personalize
from pfedme.engine.differences import Differences, differences
from pfedme.engine.measure import metric_for
from pfedme.engine.personalized import Personalized
from pfedme.engine.simulate import Simulation
from pfedme.engine.verdict import IMPROVING, Verdict
from pfedme.errors import InputError
from pfedme.export import Predictor
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.personalization.finished import methods, write
from pfedme.personalization.lines import cluster_line, clusters_in, global_line, personal_line
from pfedme.runs.foreign import name_of
from pfedme.runs.run import Run

SEARCH = 0.5
"""The share of the time for trying methods; the rest is for the clients' choice."""
READY = 2
"""At most so many algorithms' personal models are offered as they are."""
STATE = "trials.json"
"""The file from which an interrupted search continues."""
ALONE = "alone"
IMPROVING_HERE = "losses were still falling when training ended; give more --minutes"
"""Instead of the verdict's advice, which names options of another command."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """What the owners of the rows should do, and the evidence."""

    run: Run
    federation: Federation
    differences: Differences | None
    trials: Sequence[Trial]
    """The last trial of each method, the best first."""
    found: Personalized
    """Each client's choice."""
    verdict: Verdict
    method: str
    """The method for all: `alone` if joining does not pay."""
    command: str
    """Trains it here."""
    deployed: list[str]
    """Commands for a federation of separate machines; empty if there is nothing to join."""
    left: list[str]
    """What more time would be used for."""
    seconds: float
    """The time that it took, without interruptions."""

    @property
    def join(self) -> bool:
        """Whether joining pays."""
        return self.verdict.verdict == "yes"

    def answer(self) -> str:
        """The advice in a sentence."""
        told = self.verdict.sentence.partition(": ")[2].replace(IMPROVING[1:], IMPROVING_HERE[1:])
        if self.join:
            return f"Join, with {self.method}: {told}"
        if self.verdict.verdict == "no":
            return f"Do not join: {told}"
        if self.method == ALONE:
            return "Train alone: no method that was tried is better on the rows that models are chosen by."
        best = f"On the rows that models are chosen by, {self.method} is best."
        return f"Cannot tell whether joining pays: {told} {best}"

    def clients(self) -> list[dict[str, Any]]:
        """Each client's choice, its score with it, alone and with the global model, and what it gains over
        alone, with a 95 % interval; None for what is undefined."""
        found = self.found
        score, alone, shared = (found.own(name) for name in ("recommended", ALONE, "global"))
        gains = found.gains(ALONE)
        low, high = gains.ends(found.measure)
        columns = {"score": score, "alone": alone, "global": shared}
        columns |= {"gain": gains.each, "low": low, "high": high}
        rows = []
        for i in range(found.clients):
            values = {name: _known(column[i]) for name, column in columns.items()}
            choice = found.candidates[found.choice[i]].label
            rows.append({"client": self.federation.name(i), "choice": choice, **values})
        return rows

    def to_json(self) -> dict[str, Any]:
        """The content of advice.json."""
        differ = self.differences
        return {
            "join": self.join,
            "verdict": self.verdict.verdict,
            "method": self.method,
            "metric": self.found.measure.key,
            "gain": {k: getattr(self.verdict, k) for k in ("gain", "low", "high")},
            "sentence": self.answer(),
            "command": self.command,
            "deployed": self.deployed,
            "differ": differ.kind if differ else None,
            "tried": [
                {"method": t.method, "score": None if t.loss is None else -t.loss, "seconds": t.seconds}
                for t in self.trials
            ],
            "methods": methods(self.found),
            "left": self.left,
            "seconds": self.seconds,
            "clients": self.clients(),
        }


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def advise(
    run: Run, out: Path, *, minutes: float, force: bool = False, watch: Watch = lambda *_: None
) -> Advice:
    """Finds the best model for every client within about so many minutes, and writes all of it to a folder.

    `run` has the data, the model, the seed and the metric; its algorithm is not used. If it is interrupted,
    the same call continues.
    """
    refuse_file(out)
    if not minutes > 0:
        raise InputError(f"--minutes must be positive, not {minutes:g}.")
    run, simulation = dataclasses.replace(run, algorithm=FedAvg()).prepare()
    federation = simulation.federation
    _check(federation, simulation)
    if force and (out / STATE).exists():
        (out / STATE).unlink()
    elif _has_files(out) and not (out / STATE).exists():
        raise InputError(f"{out} is not empty and holds no advice; choose another --out, or --force.")
    trials = Trials(out / STATE, question(run.to_json()))
    began = time.monotonic()
    watch("how clients differ", 0, 1)
    found = differences(federation.hold_out(0, Personalize.folds))
    suited = methods_for(simulation.model, federation, found)
    left = search(suited, trials, simulation, budget=run.budget, seconds=SEARCH * 60 * minutes, watch=watch)
    shared, w, lines = _lines(trials, simulation, found)
    rest = 60 * minutes - trials.seconds
    each = sum(trial.seconds for trial, _ in lines)
    how = Personalize()
    if each > rest:
        raise InputError(
            f"No time is left for the clients' choice: trials took {trials.seconds:.0f} s of "
            f"{60 * minutes:g} s, and the choice needs about {each:.0f} s. The same command with --minutes "
            f"{math.ceil((trials.seconds + 2 * each) / 60)} continues."
        )
    # Noted, so that it is the same after an interruption.
    if trials.note(f"one part in {minutes:g} minutes", (how.folds + 1) * each > rest):
        how = dataclasses.replace(how, small=0)
        left = [*left, "choosing by all training rows in turn instead of a fifth of them"]
    alone = trials.of(ALONE)
    assert alone is not None
    measure, _ = metric_for(federation, run.metric)
    chosen = personalize(
        how, simulation.model, federation, [line for _, line in lines],
        alone.recipe(simulation.model, federation.clients, run.seed).personal, seed=run.seed,
        measure=measure, positive=federation.positive, watch=watch,
    )  # fmt: skip
    falling = not (alone.converged and shared.converged)
    chosen = dataclasses.replace(chosen, improving=falling)
    verdict = chosen.verdict()
    method, trial = _method(
        chosen, shared, [t for t, _ in lines], federation.n_train, join=verdict.verdict == "yes"
    )
    if verdict.verdict == "no" or method == ALONE:
        method, trial = ALONE, alone
    # A trial of `alone` has the loss of each client's best l2 in hindsight; this one was chosen before.
    honest = dataclasses.replace(alone, loss=-float(np.nanmean(chosen.score[:, -1])))
    tried = sorted([honest if t is alone else t for t in trials.best()], key=lambda t: t.loss or 0.0)
    advised = Advice(
        run, federation, found, tried, chosen, verdict, method,
        _command(run, trial), _deployed(run, method, trial, federation), left,
        trials.seconds + time.monotonic() - began,
    )  # fmt: skip
    _write(advised, simulation, w, how, out)
    return advised


def _has_files(folder: Path) -> bool:
    """Whether there is anything but what an interrupted write leaves."""
    return folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir())


def _check(federation: Federation, simulation: Simulation) -> None:
    """Raises an error if there is nothing to advise on."""
    if federation.clients < 2:
        raise InputError(
            f"There is a single client, {federation.name(0)}, so there is nobody to join; give the column "
            "that tells clients apart with --client."
        )
    if not np.any(federation.n_test):
        raise InputError(
            "No client has test rows, so no gain can be measured; clients need more rows, or a smaller "
            "--train."
        )
    try:
        simulation.model.to_json()
    except NotImplementedError:
        raise InputError(
            "Models that are your own code cannot be exported; use mlr, dnn, dnn-bn or cnn."
        ) from None


def _lines(
    trials: Trials, simulation: Simulation, found: Differences | None
) -> tuple[Trial, Params, list[tuple[Trial, Line]]]:
    """The trial of the best shared model, this model, and the models that clients are offered: paths around
    it and around those of clusters, and the best personal models of other algorithms."""
    s = simulation
    best = trials.best()
    shared = [t for t in best if t.algorithm.federated and not t.algorithm.personal]
    if not shared:
        raise InputError(
            "Every shared model that was tried diverged; check the table's columns for outliers."
        )
    first = min(shared, key=lambda t: t.shared_loss or 0.0)
    recipe = first.recipe(s.model, s.cohort, s.seed)
    w = recipe.shared(s.federation)

    def train(federation: Federation) -> Params:
        return w if federation is s.federation else recipe.shared(federation)

    lines = [(first, global_line(train, recipe))]
    level = first.shared_loss or 0.0
    groups = [t for t in best if _has_clusters(t)]
    if groups and (clusters_in(found) or (groups[0].loss or 0.0) < level):
        lines.append((groups[0], cluster_line(groups[0].recipe(s.model, s.cohort, s.seed))))
    others = [t for t in best if t.algorithm.federated and t.algorithm.personal]
    others = [t for t in others if not isinstance(t.algorithm, IFCA)]
    ready = [t for t in others if (t.loss or 0.0) < level][:READY]
    return first, w, [*lines, *((t, personal_line(t.recipe(s.model, s.cohort, s.seed))) for t in ready)]


def _has_clusters(trial: Trial) -> bool:
    """Whether it has trained long enough for its clusters to differ."""
    return isinstance(trial.algorithm, IFCA) and trial.rounds > trial.algorithm.warmup + 1


def _method(
    found: Personalized, shared: Trial, offered: Sequence[Trial], rows: np.ndarray, *, join: bool
) -> tuple[str, Trial]:
    """The method of the model that is best for clients on average on the rows that they choose by, where they
    count by their numbers of `rows` as in their choice, and the trial of the algorithm behind it; if clients
    `join`, other than alone, which comes last."""
    weight = np.where(np.isnan(found.score[:, 0]), 0.0, rows / (rows + Personalize.pooled))
    score = weight @ np.nan_to_num(found.score)
    best = found.candidates[int(np.argmax(score[:-1] if join else score))]
    behind = {"global": shared, "label-prior": shared} | {t.algorithm.name: t for t in offered}
    if best.line.startswith("cluster"):
        return best.line, behind["ifca"]
    return (shared.method if best.line == "global" else best.line), behind.get(best.line, shared)


def _command(run: Run, trial: Trial) -> str:
    """The command that trains a method as it was tried, with the same choice for clients."""
    algorithm = trial.algorithm
    how = Personalize() if algorithm.federated else None
    full = dataclasses.replace(
        run, algorithm=algorithm, rounds=trial.rounds, quarter_at=trial.quarter_at, eval_every=None,
        personalize=how,
    )  # fmt: skip
    return full.command()


def _deployed(run: Run, method: str, trial: Trial, federation: Federation) -> list[str]:
    """The commands for a real federation with the same method, in which clients choose their models."""
    if method == ALONE:
        return []
    name, options = trial.algorithm.name, ""
    if method == "label-prior":
        name = "label-prior"
    elif isinstance(trial.algorithm, IFCA):
        options = f" --clusters {trial.algorithm.clusters}"
    named = isinstance(run.data, Table) and run.data.label
    label = f" --label {run.data.label}" if isinstance(run.data, Table) and named else ""
    return [
        "pfedme keys --own NAME -o NAME",
        "pfedme keys --server HOST --add NAME.pub ... -o keys",
        f"pfedme server --algorithm {name}{options} --model {name_of(run.model, MODELS)} "
        f"--rounds {trial.rounds} --min-clients {federation.clients} --keys keys --out runs/federation",
        f"pfedme client --server HOST:PORT --data TABLE{label} --keys NAME --state state --personalize auto",
    ]


def _write(advice: Advice, simulation: Simulation, w: Params, how: Personalize, out: Path) -> None:
    """Writes the choice, the models and advice.json, which is last. `w` is the shared model."""
    from pfedme.report.columns import columns_of, write_columns
    from pfedme.report.differing import differences_figure
    from pfedme.report.html.advice import advice_page

    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write(out, advice.found, simulation.model, advice.federation, how)
        columns = columns_of(simulation.model, advice.federation, w, advice.found.theta)
        if columns:
            write_columns(out, columns)
        if advice.differences:
            atomic_write(out / "differences.png", differences_figure(advice.differences))
        _export(advice, simulation, out / "models")
        document = advice.to_json()
        atomic_write(out / "report.html", advice_page(document, advice, columns, out))
        atomic_write(out / "advice.json", json.dumps(document, indent=1, allow_nan=False) + "\n")


def _export(advice: Advice, simulation: Simulation, path: Path) -> None:
    """Writes the model of each client to a folder of its own."""
    if path.exists():
        shutil.rmtree(path)
    for i in range(advice.federation.clients):
        client = advice.federation.name(i)
        origin = {"client": client, "which": "recommended", "command": advice.command}
        model = Predictor(simulation.model, advice.found.theta[i], advice.federation.schema, origin=origin)
        model.save(path / quote(client, safe=" "), force=True)
