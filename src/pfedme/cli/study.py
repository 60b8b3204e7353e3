"""`pfedme study`: measures what joining is worth, how often the verdict is wrong, which algorithm is good for
what, and what privacy costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path

from pfedme.cli.interrupts import same_command_resumes
from pfedme.cli.options import add_debug, add_json, add_out, new_parser, parsed
from pfedme.errors import InputError, Interrupted, unknown

EXAMPLES = """\
examples:
  pfedme study gain --quick                     a few minutes, one seed
  pfedme study gain --out docs                  docs/gain.md and docs/results/gain.csv
  pfedme study gain --federations medpar,ames   only these; others can be measured at the same time
  pfedme study verdict --out docs               docs/results/verdict.md: how often the verdict is wrong
  pfedme study relatives --quick                some algorithms on two federations, about three minutes
  pfedme study relatives --out docs             docs/relatives.md: which algorithm for which federation
  pfedme study privacy --quick                  one federation and seed, about two minutes
  pfedme study privacy --out docs               docs/results/privacy.md: what privacy costs"""
ABOUT = {
    "gain": "what joining is worth to clients, on a range of federations",
    "verdict": "how often the verdict is wrong, on federations whose true gain is known",
    "relatives": "all algorithms on a range of federations, each tuned with the same budget",
    "privacy": "accuracy against ε, for clients alone, one shared model, and personal models",
}
QUICK = {
    "gain": "a fifth of the rounds and steps, one seed",
    "verdict": "10 repetitions instead of 200",
    "relatives": "eight algorithms on two federations, a fifth of the rounds, one seed",
    "privacy": "one federation, three values of ε, one seed",
}


def parser() -> argparse.ArgumentParser:
    """The options of the studies."""

    def each(texts: dict[str, str]) -> str:
        return "; ".join(f"{name}: {text}" for name, text in texts.items())

    about = (
        "Measures what joining is worth, how often the verdict is wrong, which algorithm is good for what, "
        "or what privacy costs."
    )
    made = new_parser("study", about, EXAMPLES)
    made.add_argument("study", metavar="{" + ",".join(ABOUT) + "}", help=each(ABOUT))
    made.add_argument("--quick", action="store_true", help=each(QUICK))
    made.add_argument(
        "--federations", metavar="NAME,NAME",
        help="gain: measure only these; the page is written once all have been measured",
    )  # fmt: skip
    made.add_argument("--seeds", type=int, metavar="N", help="gain: number of repetitions (3)")
    add_out(made, "folder for the results (study)", Path("study"))
    add_json(made, "print the table as JSON on standard output")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Runs the named study."""
    args = parsed(parser(), argv)
    name = args.study
    if name not in ABOUT:
        raise unknown("study", name, ABOUT)

    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.files import refuse_file

    if args.federations is not None and name != "gain":
        raise InputError(f"--federations is an option of 'study gain', not of 'study {name}'; leave it out.")
    if args.seeds is not None and (name != "gain" or args.seeds < 1):
        raise InputError("--seeds is an option of 'study gain', at least 1.")
    keep_compiled_programs()
    refuse_file(args.out)
    words = ["study", name, *(["--quick"] if args.quick else [])]
    studies = {"gain": _gain, "verdict": _verdict, "relatives": _relatives, "privacy": _privacy}
    return studies[name](args, words)


def _gain(args: argparse.Namespace, words: list[str]) -> int:
    """What joining is worth."""
    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_gain
    from pfedme.experiments.gain import study_gain
    from pfedme.experiments.gain_federations import FULL, QUICK, named
    from pfedme.experiments.study import Study

    scale = QUICK if args.quick else FULL
    if args.seeds:
        scale, words = dataclasses.replace(scale, seeds=args.seeds), [*words, "--seeds", str(args.seeds)]
    study = Study(args.out, shlex.join(["pfedme", *words]))
    some = named(args.federations)
    try:
        with Steps() as steps:
            rows, missing = study_gain(study, scale, some, steps)
    except KeyboardInterrupt:
        chosen = ["--federations", args.federations] if args.federations else []
        return same_command_resumes([*words, *chosen, "--out", str(args.out)])
    if args.json:
        federations = {r.setting.name: r.mean for r in rows}
        print(json.dumps({"out": str(args.out), "federations": federations, "missing": missing}))
    else:
        print_gain(rows, missing, args.out)
    return 0


def _verdict(args: argparse.Namespace, words: list[str]) -> int:
    """How often the verdict is wrong."""
    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_verdicts
    from pfedme.experiments.study import Study
    from pfedme.experiments.verdicts import study_verdicts

    study = Study(args.out, shlex.join(["pfedme", *words]))
    try:
        with Steps() as steps:
            found = study_verdicts(study, 10 if args.quick else 200, steps)
    except KeyboardInterrupt:
        raise Interrupted(None, "nothing was written") from None
    if args.json:
        federations = {s.setting.name: dataclasses.asdict(s) | {"setting": s.setting.about} for s in found}
        print(json.dumps({"out": str(args.out), "federations": federations}))
    else:
        print_verdicts(found, args.out)
    return 0


def _relatives(args: argparse.Namespace, words: list[str]) -> int:
    """Which algorithm is good for what."""
    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_relatives
    from pfedme.experiments import relatives, tuned
    from pfedme.experiments.study import Study

    study = Study(args.out, shlex.join(["pfedme", *words]))
    try:
        with Steps() as steps:
            found = relatives.study_relatives(study, tuned.QUICK if args.quick else tuned.FULL, steps)
    except KeyboardInterrupt:
        return same_command_resumes([*words, "--out", str(args.out)])
    if args.json:
        print(json.dumps({"out": str(args.out), "entries": [entry._asdict() for entry in found.entries]}))
    else:
        print_relatives(found, args.out)
    return 0


def _privacy(args: argparse.Namespace, words: list[str]) -> int:
    """What privacy costs."""
    from pfedme.cli.screen.bars import Steps
    from pfedme.cli.screen.studies import print_privacy
    from pfedme.experiments import privacy_cost
    from pfedme.experiments.privacy_page import study_privacy
    from pfedme.experiments.study import Study

    study = Study(args.out, shlex.join(["pfedme", *words]))
    try:
        with Steps() as steps:
            found = study_privacy(study, privacy_cost.QUICK if args.quick else privacy_cost.FULL, steps)
    except KeyboardInterrupt:
        return same_command_resumes([*words, "--out", str(args.out)])
    if args.json:
        entries = [e._asdict() | {"epsilon": f"{e.epsilon:g}"} for e in found.entries]
        print(json.dumps({"out": str(args.out), "entries": entries}))
    else:
        print_privacy(found, args.out)
    return 0
