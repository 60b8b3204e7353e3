"""`pfedme tune`: searches for an algorithm's hyperparameters."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.arguments import given_in, searching
from pfedme.cli.hosts import add_hosts, folder_for, place, together
from pfedme.cli.interrupts import same_command_resumes
from pfedme.cli.options import add_debug, add_json, add_out, new_parser, parsed
from pfedme.cli.training import (
    JSON_ALONE,
    OUT,
    add_hyperparameters,
    add_simulation,
    algorithm_names,
    given_hyperparameters,
    new_folder,
    runs,
)
from pfedme.errors import InputError

if TYPE_CHECKING:
    from pfedme.tuning.tune import Tuning

EXAMPLES = """\
hyperparameters that are given are fixed, and the others are searched; run the same command again to
resume a search that was stopped, or with a larger --trials to extend it; test rows are never read

examples:
  pfedme tune pfedme --data synthetic --rounds 200 --cohort 10 --trials 30 --out runs/tuned
  pfedme tune pfedme --data mnist --lam 15 --R 20 --search grid --trials 40 --out runs/grid
  pfedme tune fedavg --data synthetic --model dnn --rounds 100 --json > best.json"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme tune`."""
    made = new_parser("tune", "Searches for an algorithm's hyperparameters.", EXAMPLES)
    made.set_defaults(eval_every=None)
    add_simulation(made)
    add_out(made, OUT)
    add_json(made, JSON_ALONE)
    add_debug(made)
    made.add_argument("algorithm", metavar="ALGORITHM", help=algorithm_names())
    made.add_argument(
        "--trials", type=int, metavar="N", help="number of trials (30; with grid, all of its points)"
    )
    made.add_argument(
        "--search", choices=("tpe", "grid"), default="tpe",
        help="tpe, which learns from the trials so far, or a grid in a random order drawn from --seed (tpe)",
    )  # fmt: skip
    add_hosts(made)
    add_hyperparameters(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Searches and prints the best trials."""
    args = parsed(parser(), argv)
    Search, tune = searching()
    if args.trials is not None and args.trials < 1:
        raise InputError(f"--trials must be at least 1, not {args.trials}.")
    (run,) = runs(args, [args.algorithm])
    fixed = {*given_in(args.algorithm), *given_hyperparameters(args)}
    where = place(args)
    out = folder_for(args.out, where, lambda: new_folder(f"tune-{run.algorithm.name}"))

    from pfedme.cli.screen.bars import SearchBar
    from pfedme.cli.screen.tuning import print_tuning
    from pfedme.engine.devices import keep_compiled_programs

    keep_compiled_programs()
    try:
        again = "The same command resumes the search"
        with together(where, again) as first, SearchBar(shown=first) as bar:
            search = Search.over(run, fixed, args.search, lambda t: bar.pilot(run.algorithm.name, t))
            tuning = tune(search, args.trials, out, watch=bar)
    except KeyboardInterrupt:
        return same_command_resumes(["tune", *argv, *([] if args.out else ["--out", str(out)])])
    if not first:
        return 0
    if args.json:
        print(_as_json(tuning, out))
    else:
        print_tuning(tuning, out)
    return 0


def _as_json(tuning: Tuning, out: Path) -> str:
    """The best settings and all trials, with scores named after the metric."""
    best, key = tuning.best[0], tuning.measure.key
    trials = [dataclasses.asdict(trial) for trial in tuning.trials]
    return json.dumps({
        "out": str(out), "best": best.settings, "model": best.model, f"validation_{key}": best.accuracy,
        "mattered": tuning.mattered, "command": tuning.run.command(),
        "trials": [{key if k == "accuracy" else k: v for k, v in trial.items()} for trial in trials],
    })  # fmt: skip
