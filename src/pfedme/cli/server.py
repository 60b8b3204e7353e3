"""`pfedme server`: trains with clients on their own machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pfedme.cli.deployment import add_trust, need_flower
from pfedme.cli.options import Parser, add_debug, add_json, add_out, flag, help_of, new_parser, parsed
from pfedme.cli.training import (
    JSON_ALONE,
    OUT,
    add_hyperparameters,
    add_model,
    add_privacy,
    add_record,
    algorithm_names,
    algorithms,
    new_folder,
    privacy,
)
from pfedme.deploy.plan import OWN, PORT, Plan

FORMER = {"max_norm_ratio": "--far", "max_attempts": "--tries", "join_timeout": "--wait"}
"""Former names of options, which still work but are hidden."""
EXAMPLES = """\
examples:
  pfedme server --algorithm pfedme --lam 15 --rounds 50 --cohort 5 --min-clients 5 --keys keys --out runs/fed
  pfedme server --resume runs/fed               resumes from the last round
  pfedme server --upper fed.example.org:9092 --upper-keys north --min-clients 4 --keys keys --out runs/north
  pfedme server --insecure --min-clients 2      a trial on this machine only"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme server`."""
    made = new_parser("server", "Trains with clients on their own machines.", EXAMPLES)
    docs = help_of(Plan)
    add = made.add_argument
    add_model(made)
    add("--rounds", type=int, metavar="N", default=100, help=docs["rounds"] + " (100)")
    add("--cohort", type=int, metavar="N", help=docs["cohort"])
    add("--seed", type=int, metavar="N", default=0, help=docs["seed"] + " (0)")
    add_out(made, OUT)
    add_record(made, docs["eval_every"])
    add_json(made, JSON_ALONE)
    add_debug(made)
    add("--algorithm", default="pfedme", help=f"{algorithm_names()} (pfedme)")
    _add_own(made)
    add("--regions", metavar="NAMES", default="", help=docs["regions"])
    add(
        "--upper", metavar="HOST:PORT",
        help="be a region: take part in the run of this server, with the sum of what clients send here; the "
        "plan is that server's",
    )  # fmt: skip
    add(
        "--upper-keys", type=Path, metavar="DIR",
        help="folder with a region's key for the upper server, from 'pfedme keys --own', and that server's "
        "ca.crt",
    )  # fmt: skip
    add("--listen", metavar="HOST:PORT", help=f"address that clients connect to (0.0.0.0:{PORT})")
    add(
        "--resume", type=Path, metavar="DIR",
        help="resume the run in this folder; only --listen, --json and the trust options can be given too",
    )  # fmt: skip
    add_privacy(made)
    add_trust(made, "folder with the server's certificate and the clients' public keys, from 'pfedme keys'")
    add_hyperparameters(made)
    return made


def _add_own(parser: Parser) -> None:
    """Adds the options that only a server with remote clients has."""
    docs = help_of(Plan)
    for name in OWN:
        default = getattr(Plan, name)
        shown = "" if default is None else f" ({default:g})"
        kind = int if isinstance(default, int | None) else float
        parser.add_argument(flag(name), type=kind, default=default, help=docs[name] + shown)
        if name in FORMER:
            parser.add_argument(
                FORMER[name], dest=name, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def carry_out(argv: list[str]) -> int:
    """Trains, or resumes training, and prints the result."""
    made = parser()
    args = parsed(made, argv)
    need_flower("server")

    from pfedme.deploy import commands
    from pfedme.engine.devices import keep_compiled_programs

    keep_compiled_programs()
    plan = None
    if args.resume is not None or args.upper is not None:
        commands.refuse_changes(args, made.parse_args([]))
        args.out = args.out or new_folder("region")
    else:
        (algorithm,) = algorithms(args, [args.algorithm])
        plan = commands.plan_of(args, algorithm, privacy(args))
        args.out = args.out or new_folder(f"server-{algorithm.name}")
    record, out = commands.server(args, plan, argv)
    _show(record, out, as_json=args.json)
    return 0


def _show(record: dict[str, Any], out: Path, *, as_json: bool) -> None:
    """Prints the result, without scores if no client has shared any."""
    from pfedme.cli.screen.runs import print_run
    from pfedme.deploy.serve import summary

    if as_json:
        told = {key: record[key] for key in ("final", "timing", "deployment")}
        print(json.dumps({"out": str(out), **told}))
    elif any(kind in record["final"] for kind in ("global", "local", "personal")):
        print_run(record, out, None)
    else:
        print("\n".join(summary(record, out)))
