"""`pfedme audit`: measures what a finished run gives away about rows."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.interrupts import rest_is_done_by
from pfedme.cli.options import add_debug, add_field, add_json, add_out, new_parser, parsed
from pfedme.core.spec import build

if TYPE_CHECKING:
    from pfedme.audits.audit import Audit

EXAMPLES = """\
examples:
  pfedme audit runs/my-run                      writes runs/my-run/audit/audit.html
  pfedme audit runs/my-run --client Dayton --canaries 200
  pfedme audit runs/my-run --seed 1 --out second-audit --json

The exit status is 1 if the run gives away more than it claims. The results show rows of the run's data."""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme audit`."""
    from pfedme.audits.settings import Settings

    about = (
        "Measures what a finished run gives away about rows: rows in one upload, membership, a lower bound "
        "on ε from canaries, and whether its noise is what it claims."
    )
    made = new_parser("audit", about, EXAMPLES)
    made.add_argument("run", metavar="RUN", type=Path, help="the folder of a finished run")
    for field in ("client", "canaries", "seed"):
        add_field(made, Settings, field)
    add_out(made, "folder for the results; if not given, 'audit' in the run's folder")
    add_json(made)
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Audits the run, writes the page and prints the result."""
    args = parsed(parser(), argv)

    from pfedme.audits.audit import audit, check_out, write
    from pfedme.audits.settings import Settings
    from pfedme.cli.screen.bars import Steps
    from pfedme.engine.devices import keep_compiled_programs

    given = {name: value for name in ("client", "canaries", "seed") if (value := getattr(args, name))}
    settings = build(Settings, given, "the audit")
    out = args.out or args.run / "audit"
    check_out(out)
    keep_compiled_programs()
    with rest_is_done_by(["audit", *argv]), Steps() as steps:
        found = audit(args.run, settings, steps)
    document = write(found, out)
    if args.json:
        print(json.dumps({"out": str(out), **document}))
    else:
        _print(found, out)
    return 1 if found.exceeded else 0


def _print(found: Audit, out: Path) -> None:
    for part in found.rows:
        error = f"; the closest guess is {part.best:.2g} of the way from a row to its client's mean"
        print(
            f"One upload ({part.server}): {part.near:,} of {part.rows:,} rows recovered, "
            f"{part.chance_near:,} by chance{error if part.pairs else ''}."
        )
    for kind, one in found.membership.items():
        low, high = one.interval()
        print(
            f"Membership, {kind} model{'' if kind == 'global' else 's'}: AUC {one.auc:.3f} ({low:.3f} to "
            f"{high:.3f}), {100 * one.true_positives():.1f} % true positives at 1 % false ones."
        )
    bounds = {"in this run": found.canaries.bound}
    if found.worst_case:
        bounds["given to the mechanism directly"] = found.worst_case.bound
    for name, one in bounds.items():
        print(f"Canaries {name}: {one.correct} of {one.guesses} guesses right, so ε ≥ {one.epsilon:.2f}.")
    for check in found.checks:
        print(f"{'holds' if check.passed else 'FAILS'}: {check.name} ({check.value:.4g}).")
    claim = "nothing" if math.isinf(found.claimed) else f"ε = {found.claimed:g}"
    print(f"Claimed: {claim}. {found.sentence()}")
    print(f"Page: {out}/audit.html (shows rows of the run's data)")
