"""Prints the results of runs and comparisons, as JSON or for people, after writing their report. Of several
hosts, the first does, and all do what is left to compute before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedme.cli.interrupts import rest_is_done_by
from pfedme.cli.screen.bars import Steps
from pfedme.cli.screen.federations import print_notes
from pfedme.cli.screen.personalization import print_newcomers, print_offer
from pfedme.cli.screen.runs import print_comparison, print_run
from pfedme.engine.devices import is_first
from pfedme.personalization.afterwards import Offer, left_to_do, let_clients_choose, offer, write_page
from pfedme.personalization.finished import FinishedRun
from pfedme.report.html.page import NAME, report
from pfedme.training.track import keep

if TYPE_CHECKING:
    from pfedme.data.federation import Federation
    from pfedme.training.compare import Comparison


def show_run(record: dict[str, Any], federation: Federation | None, out: Path, *, as_json: bool) -> int:
    """Prints a finished run and, if requested, the models that it offers its clients and newcomers."""
    told = is_first() and not as_json
    if is_first():
        report([out], out / NAME, force=True)
    document = {"out": str(out), "final": record["final"], "timing": record["timing"]}
    if told:
        print_run(record, out, federation)
        print_notes(federation.notes if federation else ())
    members, held_out = left_to_do(out, record["config"])
    if members or held_out:
        offered = _offer_what_is_left(out, members=members, held_out=held_out)
        document |= offered.to_json()
        if told:
            print_offered(offered, out)
    if is_first() and "track" in record:
        keep(out, out / NAME)
    if is_first() and as_json:
        print(json.dumps(document))
    return 0


def _offer_what_is_left(out: Path, *, members: bool, held_out: bool) -> Offer:
    """Finds the models that the options of a finished run ask for."""
    with rest_is_done_by(["resume", str(out)]):
        finished = FinishedRun.open(out)
        with Steps(shown=is_first()) as steps:
            offered = offer(finished, out=out, members=members, held_out=held_out, watch=steps)
        if is_first():
            write_page(out, out, None)
    return offered


def print_offered(offered: Offer, out: Path) -> None:
    """Prints the models that were found for clients, and how newcomers fare."""
    if offered.found is not None:
        print_offer(offered.found, out)
    if offered.levels:
        print_newcomers(offered.levels, out)


def show_comparison(comparison: Comparison, out: Path, *, as_json: bool) -> int:
    """Prints a finished comparison, after its clients have chosen their models if requested; the exit status
    shows whether all of its runs have a result."""
    with rest_is_done_by(["resume", str(out)]), Steps(shown=is_first()) as steps:
        comparison = let_clients_choose(out, steps) or comparison
    status = 1 if comparison.failures else 0
    if not is_first():
        return status
    report([out], out / NAME, force=True)
    if as_json:
        verdict = {"verdict": comparison.verdict.to_json()} if comparison.verdict else {}
        chosen = {"recommended": comparison.recommended.to_json()} if comparison.recommended else {}
        print(json.dumps({"out": str(out), "results": comparison.finals, **verdict, **chosen}))
    else:
        print_comparison(comparison, out)
    for reason in comparison.failures:
        print(f"pfedme: {reason}", file=sys.stderr)
    return status
