"""`pfedme resume`: resumes an interrupted run or comparison."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedme.cli.hosts import add_hosts, place, resumed, together
from pfedme.cli.options import add_debug, add_json, new_parser, parsed
from pfedme.errors import InputError

EXAMPLES = """\
examples:
  pfedme resume runs/my-run                     a run or a comparison that was interrupted"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme resume`."""
    about = "Resumes an interrupted run or comparison. The result is bit for bit the same."
    made = new_parser("resume", about, EXAMPLES)
    made.add_argument("folder", metavar="DIR", type=Path, help="the folder that was given to --out")
    add_hosts(made)
    add_json(made)
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Resumes the run or comparison in the folder and prints the result."""
    args = parsed(parser(), argv)
    where = place(args)
    if not args.folder.is_dir() and not (where and where.host):
        raise InputError(f"There is no folder {args.folder}.")

    from pfedme.engine.devices import agreed, keep_compiled_programs
    from pfedme.runs.plan import PLAN

    keep_compiled_programs()
    with together(where, resumed(args.folder)):
        resume = _comparison if agreed((args.folder / PLAN).exists()) else _run
        return resume(args.folder, as_json=args.json)


def _comparison(folder: Path, *, as_json: bool) -> int:
    """Resumes a comparison."""
    from pfedme.cli.results import show_comparison
    from pfedme.cli.screen.bars import Bar
    from pfedme.engine.devices import is_first
    from pfedme.training.compare import plan_of, resume_comparison

    rounds = [job["config"]["rounds"] for job in plan_of(folder)]
    with Bar(total=sum(rounds) if all(rounds) else None, shown=is_first()) as bar:
        comparison = resume_comparison(folder, watch=bar)
    return show_comparison(comparison, folder, as_json=as_json)


def _run(path: Path, *, as_json: bool) -> int:
    """Resumes a run or, if it has finished, the steps that were to follow it."""
    from pfedme.cli.results import show_run
    from pfedme.cli.screen.bars import Bar
    from pfedme.engine.devices import agreed, is_first
    from pfedme.personalization.afterwards import left_to_do, page_is_late
    from pfedme.runs.folder import Folder
    from pfedme.training.execute import resume

    folder = Folder(path)
    record = folder.read_by_all()
    finished = record.get("status") == "finished"
    if finished and (any(left_to_do(path, record["config"])) or agreed(page_is_late(path))):
        if is_first():
            folder.checkpoint.unlink(missing_ok=True)
        return show_run(record, None, path, as_json=as_json)
    with Bar(total=record["config"].get("rounds", 1) or None, shown=is_first()) as bar:
        result = resume(path, watch=lambda p: bar(path.name, 0, p))
    return show_run(result.record, result.federation, path, as_json=as_json)
