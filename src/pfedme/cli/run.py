"""`pfedme run`: one algorithm, trained and recorded."""

from __future__ import annotations

import argparse
import dataclasses

from pfedme.arguments import how
from pfedme.cli.hosts import add_hosts, folder_for, place, resumed, together
from pfedme.cli.options import PERSONALIZE, new_parser, parsed
from pfedme.cli.training import add_hyperparameters, add_recorded_training, algorithm_names, new_folder, runs
from pfedme.core.spec import check
from pfedme.runs.run import Run, parse_held_out

EXAMPLES = """\
examples:
  pfedme run pfedme --data synthetic --model mlr --rounds 600 --cohort 10 --lam 20 --eta 0.01 --beta 2
  pfedme run per-fedavg --data mnist --model dnn:hidden=100 --alpha 0.02 --eta 0.001 --out runs/per
  pfedme run pfedme --data synthetic --nu 1e-4 --solver nesterov --json > result.json
  pfedme run pfedme --data patients.csv --client hospital --label outcome
  pfedme run pfedme --data synthetic --track tensorboard --track mlflow:experiment=hospitals"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme run`."""
    made = new_parser("run", "Trains one algorithm on a federation and records the result.", EXAMPLES)
    add_recorded_training(made)
    made.add_argument("algorithm", metavar="ALGORITHM", help=algorithm_names())
    made.add_argument("--personalize", metavar="HOW", help=PERSONALIZE)
    made.add_argument(
        "--holdout-clients", metavar="WHO",
        help="clients to hold out of training, to see how newcomers fare: a share such as 0.2, or names "
        "separated by commas",
    )  # fmt: skip
    add_hosts(made)
    add_hyperparameters(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Trains and prints the result."""
    args = parsed(parser(), argv)
    run, where = _described(args), place(args)
    if where:
        run.check_hosts()
    out = folder_for(args.out, where, lambda: new_folder(run.algorithm.name))

    from pfedme.cli.results import show_run
    from pfedme.cli.screen.bars import Bar
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.training.execute import execute
    from pfedme.training.track import parse_trackers

    keep_compiled_programs()
    with together(where, resumed(out)) as first:
        track = parse_trackers(args.track) if first else ()
        with Bar(total=run.rounds or None, shown=first) as bar:
            result = execute(
                run, out, force=args.force, watch=lambda p: bar(run.algorithm.name, 0, p), track=track
            )
        record, federation = result.record, result.federation
        del result  # its models' memory is needed for those that clients choose
        return show_run(record, federation, out, as_json=args.json)


def _described(args: argparse.Namespace) -> Run:
    """The run that the command line describes, with the personalization that follows it."""
    (run,) = runs(args, [args.algorithm])
    later = None if args.holdout_clients is None else parse_held_out(args.holdout_clients)
    full = dataclasses.replace(run, holdout_clients=later, personalize=how(args.personalize or None))
    return check(full, "the run")
