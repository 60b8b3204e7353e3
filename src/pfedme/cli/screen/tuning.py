"""The result of a search for hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.screen.layout import print_table, standard_output
from pfedme.report import tables, trials

if TYPE_CHECKING:
    from pfedme.tuning.tune import Tuning


def print_tuning(tuning: Tuning, out: Path) -> None:
    """Prints the best trials of a search, how the others ended, and how to train with the best settings."""
    run = tuning.search.run
    data = tables.data_name(run.to_json()["data"])
    title = f"{run.algorithm.name} on {data}: the best trials, judged on validation rows"
    console = standard_output()
    best = [trials.row(trial, tuning) for trial in tuning.best[:5]]
    print_table(console, title, trials.header(tuning), best, spare=("state", "rounds", "trial"))
    console.print(trials.counts(tuning), highlight=False)
    if tuning.mattered:
        console.print(trials.what_mattered(tuning), highlight=False)
    console.print(
        f"The {tuning.measure.name} is that of the {tuning.best[0].model} model. To train with the best "
        "settings:"
    )
    console.print(f"  {tuning.run.command()}", highlight=False, soft_wrap=True)
    console.print(f"All trials: {out}/tune.md, {out}/trials.csv", highlight=False, soft_wrap=True)
