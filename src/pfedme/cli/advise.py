"""`pfedme advise`: whether and how the owners of a table should train together."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pfedme.cli.interrupts import same_command_resumes
from pfedme.cli.options import (
    add_data,
    add_debug,
    add_field,
    add_json,
    add_out,
    help_of,
    new_parser,
    parsed,
    source,
)
from pfedme.cli.training import JSON_ALONE, add_model

EXAMPLES = """\
examples:
  pfedme advise --data patients.csv --client hospital --label outcome
  pfedme advise --data medpar --minutes 3 --out advice/medpar
  pfedme advise --data contraception --model dnn

It tries the methods that suit the data, lets every client choose its model on rows that no model has seen,
and says whether joining pays, with which method, and what each client gains. If it is stopped, the same
command continues; with more --minutes it tries more."""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme advise`."""
    from pfedme.runs.run import CHOICES, Run

    made = new_parser("advise", "Finds the best model for every client of a federation.", EXAMPLES)
    add, docs = made.add_argument, help_of(Run)
    add_data(made)
    add_model(made)
    add("--minutes", type=float, default=10.0, metavar="N", help="time to use, on this machine (10)")
    add("--seed", type=int, metavar="N", default=0, help=docs["seed"] + " (0)")
    for name in CHOICES:
        add_field(made, Run, name)
    add_out(made, "folder for the advice and the models (advice)", Path("advice"))
    add("--force", action="store_true", help="start over, whatever the folder contains")
    add_json(made, JSON_ALONE)
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Finds the models, and prints the advice."""
    args = parsed(parser(), argv)

    from pfedme.advice.advise import advise
    from pfedme.algorithms import FedAvg
    from pfedme.cli.screen.advice import print_advice
    from pfedme.cli.screen.bars import Steps
    from pfedme.core.models import parse_model
    from pfedme.core.spec import check
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.runs.run import CHOICES, Run

    keep_compiled_programs()
    run = Run(
        algorithm=FedAvg(), data=source(args), model=parse_model(args.model), seed=args.seed,
        **{name: getattr(args, name) for name in CHOICES},
    )  # fmt: skip
    check(run, "the run")
    try:
        with Steps() as steps:
            found = advise(run, args.out, minutes=args.minutes, force=args.force, watch=steps)
    except KeyboardInterrupt:
        return same_command_resumes(["advise", *(word for word in argv if word != "--force")])
    if args.json:
        print(json.dumps({"out": str(args.out), **found.to_json()}))
    else:
        print_advice(found, args.out)
    return 0
