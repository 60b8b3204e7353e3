"""`pfedme log verify`: checks that a client's log was not changed. `pfedme log show`: prints it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from pfedme.cli.options import add_debug, add_json, new_parser, parsed
from pfedme.errors import InputError, unknown

EXAMPLES = """\
the exit status of 'verify' is 1 if a line does not fit, which is then named; 'show' prints the lines

examples:
  pfedme log verify state
  pfedme log verify state --head 0f3c91aa       also checks that the log still has this hash
  pfedme log show state"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme log verify` and `pfedme log show`."""
    made = new_parser(
        "log verify", "Checks, or shows, the log of what a client has received and sent.", EXAMPLES
    )
    made.add_argument("path", type=Path, metavar="PATH", help="a client's state folder, or its audit.jsonl")
    made.add_argument("--head", default="", metavar="HASH", help="a hash that was noted earlier")
    add_json(made, "print the result, or the lines, as JSON")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Checks a log, and prints a summary or its lines."""
    which = argv[0] if argv else ""
    if which not in ("verify", "show", "-h", "--help"):
        raise unknown("log command", which, ["verify", "show"])
    args = parsed(parser(), argv[1:] if which in ("verify", "show") else argv)

    from pfedme.deploy.audit_log import BrokenLog, check_log, shown, summary

    if args.head and not re.fullmatch("[0-9a-f]{8,64}", args.head):
        raise InputError(f"--head must be a hash, or its first 8 digits or more, not '{args.head[:80]}'.")
    try:
        chain = check_log(args.path, args.head)
    except BrokenLog as broken:
        if args.json:
            print(json.dumps({"fits": False, "line": broken.line, "reason": broken.why}))
        else:
            print(f"{args.path}: {broken}.")
        return 1
    if args.json:
        lines = list(chain.lines)
        told = {"fits": True, "lines": len(lines), "head": chain.head}
        print(json.dumps(lines if which == "show" else told))
    else:
        print("\n".join(shown(chain) if which == "show" else summary(chain)))
    return 0
