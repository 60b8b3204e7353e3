"""`pfedme personalize`: finds the right model for each client of a finished run, or for newcomers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pfedme.cli.hosts import add_hosts, place, together
from pfedme.cli.interrupts import rest_is_done_by
from pfedme.cli.options import (
    PERSONALIZE,
    add_data,
    add_debug,
    add_json,
    add_out,
    new_parser,
    parsed,
    source,
)
from pfedme.errors import InputError

EXAMPLES = """\
examples:
  pfedme personalize runs/my-run                its clients: alone, global or their own model
  pfedme personalize runs/my-run --data synthetic:clients=10,seed=1 --out newcomers
  pfedme personalize runs/my-run --personalize auto:steps=200,folds=3"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme personalize`."""
    about = "Finds the right model for each client of a finished run, or for newcomers."
    made = new_parser("personalize", about, EXAMPLES)
    made.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished run")
    add_data(made, None, "newcomers, a federation that was not trained on (if not given, the run's clients)")
    made.add_argument("--personalize", metavar="HOW", help=PERSONALIZE)
    add_out(made, "folder for the results; if not given, the run's folder")
    add_hosts(made)
    add_json(made)
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Finds the models, writes them and prints how well they do."""
    args = parsed(parser(), argv)
    if args.data and not args.out:
        raise InputError("Newcomers' models need a separate folder: give --out DIR.")
    out, where = args.out or args.run, place(args)

    from pfedme.arguments import how
    from pfedme.cli.results import print_offered
    from pfedme.cli.screen.bars import Steps
    from pfedme.engine.devices import from_first, keep_compiled_programs
    from pfedme.personalization.afterwards import offer, write_page
    from pfedme.personalization.finished import FinishedRun

    keep_compiled_programs()
    chosen = how(args.personalize or None)
    again = f"'pfedme personalize {args.run}' starts again"
    with together(where, again) as first, rest_is_done_by(["personalize", *argv]):
        from_first(lambda: _check_folder(out, newcomers=bool(args.data)))
        finished = FinishedRun.open(args.run)
        newcomers = source(args, finished.run.data) if args.data else None
        with Steps(shown=first) as steps:
            offered = offer(finished, chosen, newcomers, out=out, watch=steps)
        if first:
            write_page(args.run, out, newcomers)
    if not first:
        return 0
    if args.json:
        print(json.dumps({"out": str(out), **offered.to_json()}))
        return 0
    print_offered(offered, out)
    if newcomers is not None:
        print(f"Report: {out}/report.html")
    return 0


def _check_folder(out: Path, *, newcomers: bool) -> None:
    """Raises an error unless results can be written to a folder; a run's folder is only for the run's own
    clients."""
    from pfedme.files import refuse_file

    refuse_file(out)
    if newcomers and (out / "record.json").exists():
        raise InputError(f"{out} holds a run; newcomers' models need a separate folder.")
