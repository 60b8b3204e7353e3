"""`pfedme compare`: trains several algorithms on the same data and compares them."""

from __future__ import annotations

import argparse

from pfedme.arguments import how
from pfedme.cli.hosts import add_hosts, folder_for, place, resumed, together
from pfedme.cli.options import PERSONALIZE, new_parser, parsed
from pfedme.cli.training import add_hyperparameters, add_recorded_training, algorithm_names, new_folder, runs
from pfedme.errors import InputError

EXAMPLES = """\
an option applies to every algorithm that has it; NAME:field=value,... sets one for NAME alone

examples:
  pfedme compare pfedme fedavg alone --data synthetic --rounds 200 --eta 0.01 --seeds 5
  pfedme compare fedavg pfedme alone --data mnist --personalize auto
  pfedme compare pfedme:lam=20,beta=2 pfedme:lam=5,beta=2 fedavg:eta=0.02 --data mnist"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme compare`."""
    about = "Trains several algorithms on the same data and compares them in one table and one figure."
    made = new_parser("compare", about, EXAMPLES)
    add_recorded_training(made)
    made.add_argument("algorithms", metavar="ALGORITHM", nargs="+", help=algorithm_names())
    made.add_argument(
        "--seeds", type=int, metavar="N", default=1, help="repetitions with seeds --seed, --seed + 1, ... (1)"
    )
    made.add_argument(
        "--personalize", metavar="HOW",
        help=f"{PERSONALIZE}; the first algorithm with a shared model offers it, and 'recommended' shows it",
    )  # fmt: skip
    add_hosts(made)
    add_hyperparameters(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Trains all of them and prints one table."""
    args = parsed(parser(), argv)
    if args.seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {args.seeds}.")
    described, where = runs(args, args.algorithms), place(args)
    out = folder_for(args.out, where, lambda: new_folder("compare"))

    from pfedme.cli.results import show_comparison
    from pfedme.cli.screen.bars import Bar
    from pfedme.cli.screen.federations import print_notes
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.runs.run import load
    from pfedme.training.compare import compare, with_choice
    from pfedme.training.track import parse_trackers

    keep_compiled_programs()
    described = with_choice(described, how(args.personalize or None))
    for run in described if where else ():
        run.check_hosts()
    rounds = [run.rounds for run in described]
    with together(where, resumed(out)) as first:
        track = parse_trackers(args.track) if first else ()
        with Bar(total=sum(rounds) * args.seeds if all(rounds) else None, shown=first) as bar:
            comparison = compare(described, args.seeds, out, force=args.force, watch=bar, track=track)
        status = show_comparison(comparison, out, as_json=args.json)
        if first and not args.json:
            print_notes(load(described[0].data).notes)
    return status
