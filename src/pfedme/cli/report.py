"""`pfedme report`: puts runs and comparisons on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedme.cli.options import add_debug, new_parser, parsed

EXAMPLES = """\
examples:
  pfedme report runs/my-run -o my-run.html
  pfedme report runs/first runs/my-run -o both.html     runs and comparisons on one page"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme report`."""
    about = "Puts runs and comparisons on one self-contained HTML page."
    made = new_parser("report", about, EXAMPLES)
    made.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+", help="the folder of a run or of a comparison"
    )
    made.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (report.html)"
    )
    made.add_argument("--force", action="store_true", help="overwrite the file")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Writes the page."""
    args = parsed(parser(), argv)

    from pfedme.report.html.page import report

    report(args.folders, args.out, force=args.force)
    print(f"Report: {args.out}")
    return 0
