"""`pfedme budget`: shows what a client has spent of its privacy budget."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pfedme.cli.options import add_debug, add_json, new_parser, parsed

EXAMPLES = """\
examples:
  pfedme budget state
  pfedme budget state --json"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme budget`."""
    about = "Shows what the rows of a client have cost in differential privacy, by run, and what is left."
    made = new_parser("budget", about, EXAMPLES)
    made.add_argument("state", type=Path, metavar="STATE", help="a client's state folder")
    add_json(made, "print the result as JSON")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Prints what was spent; the exit status is 1 if the log was changed."""
    args = parsed(parser(), argv)

    from pfedme.deploy.audit_log import BrokenLog
    from pfedme.deploy.budget import report, report_lines

    try:
        found = report(args.state)
    except BrokenLog as broken:
        print(f"The log in {args.state} was changed: {broken}.")
        return 1
    print(json.dumps(found) if args.json else "\n".join(report_lines(found)))
    return 0
