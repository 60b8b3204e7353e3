"""The results of studies and of the paper's experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from pfedme.cli.screen.layout import print_table, standard_output

if TYPE_CHECKING:
    from pfedme.experiments.finding import Finding
    from pfedme.experiments.gain_page import Row
    from pfedme.experiments.privacy_cost import Found as PrivacyFound
    from pfedme.experiments.tuned import Found
    from pfedme.experiments.verdicts import Summary


def print_gain(rows: Sequence[Row], missing: Sequence[str], out: Path) -> None:
    """Prints what joining is worth on each federation, and which have not been measured yet."""
    methods = ("alone", "global", "label-prior", "cluster", "fine-tuned", "recommended")
    header = ["federation", *(f"{m} %" for m in methods), "harmed %"]
    cells = [
        [row.setting.name, *(f"{row.mean[m]:.2f}" if m in row.mean else "–" for m in methods),
         f"{row.harmed:.1f}"]
        for row in rows
    ]  # fmt: skip
    console = standard_output()
    print_table(console, "client mean of test accuracy, or of R²", header, cells)
    if missing:
        console.print(f"The page is not written yet; still to be measured: {', '.join(missing)}.")
    else:
        console.print(f"What it means: {out}/gain.md   Table: {out}/results/gain.csv", soft_wrap=True)


def print_verdicts(found: Sequence[Summary], out: Path) -> None:
    """Prints how often a verdict was given, and how often it was false, on each kind of federation."""
    header = ["federation", "true gain", "yes", "no", "false", "interval covers the truth", "of"]
    rows = [
        [s.setting.name, f"{s.gain:+.2f}", *map(str, (s.yes, s.no, s.false, s.covered, s.repetitions))]
        for s in found
    ]
    console = standard_output()
    print_table(console, "verdicts on federations whose true gain is known", header, rows)
    console.print(f"What it means: {out}/results/verdict.md   All: {out}/results/verdict.csv", soft_wrap=True)


def print_relatives(found: Found, out: Path) -> None:
    """Prints the accuracy of the model that clients would use, for each algorithm on each federation."""
    federations = [setting.name for setting in found.scale.settings]
    methods = dict.fromkeys(method for _, method in found.models)
    rows = [[method, *(_mean(found, where, method) for where in federations)] for method in methods]
    console = standard_output()
    print_table(console, "test accuracy in percent", ["algorithm", *federations], rows)
    console.print(f"What it means: {out}/relatives.md   All: {out}/results/relatives.csv", soft_wrap=True)


def _mean(found: Found, federation: str, method: str) -> str:
    if (federation, method) not in found.models:
        return "–"
    values = found.values(federation, method, found.in_use(federation, method))
    return f"{sum(values) / len(values):.2f}"


def print_privacy(found: PrivacyFound, out: Path) -> None:
    """Prints the accuracy of every method at every ε, on each federation."""
    rows = []
    for setting in found.scale.settings:
        for epsilon in found.scale.epsilons:
            values = [found.values(setting.name, method, epsilon).values() for method in found.names]
            rows.append([setting.name, f"{epsilon:g}", *(f"{sum(v) / len(v):.2f}" for v in values)])
    console = standard_output()
    print_table(console, "test accuracy in percent", ["federation", "ε", *found.names], rows)
    page = out / "results" / "privacy.md"
    console.print(f"What it means: {page}   All: {out}/results/privacy.csv", soft_wrap=True)


def print_findings(findings: Sequence[Finding], out: Path) -> None:
    """Prints each claim with its verdict, and where the results are."""
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("claim")
    table.add_column("verdict")
    for finding in findings:
        table.add_row(finding.claim, finding.verdict)
    console.print(table)
    page = out / "audit.md"
    console.print(f"Results in {out / 'results'}" + (f", every number in {page}." if page.exists() else "."))
