"""`pfedme resume`: resumes an interrupted run or comparison."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedme.cli.hosts import Place, add_hosts, place, together
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

    from pfedme.engine.devices import keep_compiled_programs
    from pfedme.runs.plan import PLAN

    keep_compiled_programs()
    if where:
        return _on_several_hosts(args.folder, where, as_json=args.json)
    resumed = _comparison if (args.folder / PLAN).exists() else _run
    return resumed(args.folder, as_json=args.json)


def _comparison(folder: Path, *, as_json: bool) -> int:
    """Resumes a comparison."""
    from pfedme.cli.results import show_comparison
    from pfedme.cli.screen.bars import Bar
    from pfedme.runs.plan import read_plan
    from pfedme.training.compare import resume_comparison

    rounds = [job["config"]["rounds"] for job in read_plan(folder)]
    with Bar(total=sum(rounds) if all(rounds) else None) as bar:
        comparison = resume_comparison(folder, watch=bar)
    return show_comparison(comparison, folder, as_json=as_json)


def _run(path: Path, *, as_json: bool) -> int:
    """Resumes a run or, if it has finished, the steps that were to follow it."""
    from pfedme.cli.results import show_run
    from pfedme.cli.screen.bars import Bar
    from pfedme.personalization.afterwards import left_to_do, page_is_late
    from pfedme.runs.folder import Folder
    from pfedme.training.execute import resume

    folder = Folder(path)
    record = folder.read()
    finished = record.get("status") == "finished"
    if finished and (any(left_to_do(path, record["config"])) or page_is_late(path)):
        folder.checkpoint.unlink(missing_ok=True)
        return show_run(record, None, path, as_json=as_json)
    with Bar(total=record["config"].get("rounds", 1) or None) as bar:
        result = resume(path, watch=lambda p: bar(path.name, 0, p))
    return show_run(result.record, result.federation, path, as_json=as_json)


def _on_several_hosts(path: Path, where: Place, *, as_json: bool) -> int:
    """Resumes a run; only the first host needs its folder."""
    from pfedme.cli.results import show_run
    from pfedme.cli.screen.bars import Bar
    from pfedme.training.execute import resume

    with together(where, path) as first, Bar(total=None, shown=first) as bar:
        result = resume(path, watch=lambda p: bar(path.name, 0, p))
    return show_run(result.record, result.federation, path, as_json=as_json) if first else 0
