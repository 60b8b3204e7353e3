"""`pfedme reproduce`: runs the paper's experiments."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from pfedme.cli.interrupts import same_command_resumes
from pfedme.cli.options import add_debug, add_json, add_out, new_parser, parsed
from pfedme.errors import Interrupted

EXAMPLES = """\
what: table1, figure1 ... figure7, cost (figures 6 and 7 at equal cost), theory, audit, all

examples:
  pfedme reproduce table1 --quick               a tenth of the rounds, two seeds
  pfedme reproduce all --out docs               everything
finished runs are kept in OUT/runs and are not repeated; delete them to start over"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme reproduce`."""
    about = "Runs the paper's experiments: tables, figures and verdicts."
    made = new_parser("reproduce", about, EXAMPLES)
    made.add_argument(
        "what", metavar="WHAT", nargs="+", help="table1, figure1 ... figure7, cost, theory, audit, all"
    )
    made.add_argument("--quick", action="store_true", help="a tenth of the rounds, two seeds")
    add_out(made, "folder for the results (reproduction)", Path("reproduction"))
    add_json(made, "print the findings as JSON on standard output")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Runs the experiments and prints what they say about the paper's claims."""
    args = parsed(parser(), argv)

    from pfedme.cli.screen.bars import Bar
    from pfedme.cli.screen.studies import print_findings
    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.experiments import paper
    from pfedme.experiments.reproduce import expand, reproduce, wishes
    from pfedme.experiments.study import Study
    from pfedme.files import refuse_file

    keep_compiled_programs()
    expand(args.what)
    refuse_file(args.out)
    scale = paper.QUICK if args.quick else paper.FULL
    words = ["reproduce", *args.what, *(["--quick"] if args.quick else [])]
    command = shlex.join(["pfedme", *words])
    plan = wishes(args.what, scale)
    try:
        with Bar(total=max(1, Study(args.out, command).rounds(plan))) as bar:
            findings = reproduce(args.what, scale, args.out, command, bar)
    except Interrupted:
        return same_command_resumes([*words, "--out", str(args.out)])
    if args.json:
        said = [{"claim": f.claim, "verdict": f.verdict, "numbers": f.numbers} for f in findings]
        print(json.dumps({"out": str(args.out), "findings": said}, ensure_ascii=False))
    else:
        print_findings(findings, args.out)
    return 0
