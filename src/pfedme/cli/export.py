"""`pfedme export`: exports one model of a finished run for prediction."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from pfedme.cli.options import add_debug, add_json, new_parser, parsed

EXAMPLES = """\
examples:
  pfedme export runs/my-run --client Dayton -o models/dayton
  pfedme export runs/my-run -o models/shared    the shared model
  pfedme export runs/my-run --client Dayton --which personal -o models/dayton"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme export`."""
    made = new_parser(
        "export", "Writes one model of a finished run, with everything needed to use it.", EXAMPLES
    )
    made.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished run")
    made.add_argument("--client", metavar="ID", help="client whose model to export (default: the shared one)")
    made.add_argument(
        "--which", choices=("recommended", "personal", "global"),
        help="if not given, the model recommended to the client, else its personal one, else the shared one",
    )  # fmt: skip
    made.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the model")
    made.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    add_json(made, "print what was written as JSON")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Writes the model, and prints how to use it."""
    args = parsed(parser(), argv)

    from pfedme.export import model_of

    model = model_of(args.run, args.client, args.which)
    model.save(args.out, force=args.force)
    which = model.origin["which"]
    if args.json:
        print(json.dumps({"out": str(args.out), **model.origin}))
        return 0
    whose = "shared model" if which == "global" else f"{which} model of {model.origin['client']}"
    missing = args.client is not None and which == "global" and args.which is None
    print(f"The {whose} is in {args.out}." + (" The run has no personal models." if missing else ""))
    print(f"To use it: pfedme predict {shlex.quote(str(args.out))} --data TABLE -o predictions.csv")
    return 0
