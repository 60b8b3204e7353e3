"""The trials of a search as tables and sentences."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.tuning.tune import Tried, Tuning


def header(tuning: Tuning) -> list[str]:
    """The columns of `row`."""
    return ["trial", "state", *tuning.search.space, f"validation {tuning.measure.sign}", "rounds"]


def row(trial: Tried, tuning: Tuning) -> list[str]:
    """A trial as a row of text, with a dash for each missing value."""
    settings = [str(trial.settings.get(name, "–")) for name in tuning.search.space]
    what = tuning.measure
    accuracy = what.text(None if trial.accuracy is None else what.scale * trial.accuracy)
    return [str(trial.number), trial.state, *settings, accuracy, str(trial.rounds)]


def counts(tuning: Tuning) -> str:
    """How the trials ended: `30 trials: 12 complete, 15 stopped early, 3 diverged.`"""
    states = [trial.state for trial in tuning.trials]
    said = {"complete": "complete", "pruned": "stopped early", "diverged": "diverged"}
    text = ", ".join(f"{states.count(state)} {words}" for state, words in said.items())
    again = f" ({states.count('interrupted')} interrupted)" if "interrupted" in states else ""
    return f"{tuning.finished} trials: {text}{again}."


def what_mattered(tuning: Tuning) -> str:
    """Each hyperparameter's importance for the best trials, largest first."""
    shares = sorted(tuning.mattered.items(), key=lambda item: -item[1])
    return "What set the best trials apart: " + ", ".join(f"{n} {100 * v:.0f} %" for n, v in shares) + "."


def trials_csv(tuning: Tuning) -> str:
    """One row per trial, in order; accuracies are fractions, or R² in a regression."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    space = tuning.search.space
    table.writerow(["trial", "state", *space, f"validation_{tuning.measure.key}", "rounds"])
    for trial in tuning.trials:
        cells = [trial.settings.get(name, "") for name in space]
        accuracy = "" if trial.accuracy is None else trial.accuracy
        table.writerow([trial.number, trial.state, *cells, accuracy, trial.rounds])
    return text.getvalue()


def trials_md(tuning: Tuning) -> str:
    """A page with the best settings, how the trials ended, and all trials, best first."""
    run, lines = tuning.search.run, []
    lines.append(f"# Hyperparameters of {run.algorithm.name} on {tables.data_name(run.to_json()['data'])}\n")
    lines.append(f"{counts(tuning)} Judged on validation rows; test rows were not read.\n")
    if tuning.best:
        best, what = tuning.best[0], tuning.measure
        value = what.pattern.format(what.text(what.scale * (best.accuracy or 0.0)))
        lines.append(
            f"Best: {value} with the {best.model} model, in trial {best.number}."
            " To train with these settings on all training rows:\n"
        )
        lines.append(f"```sh\n{tuning.run.command()}\n```\n")
    if tuning.mattered:
        lines.append(f"{what_mattered(tuning)}\n")
    titles = header(tuning)
    others = [trial for trial in tuning.trials if trial.state != "complete"]
    table = [titles, ["---"] * len(titles), *(row(trial, tuning) for trial in [*tuning.best, *others])]
    lines.append("".join(f"| {' | '.join(cells)} |\n" for cells in table))
    return "\n".join(lines)
