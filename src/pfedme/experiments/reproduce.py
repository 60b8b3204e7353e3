"""`pfedme reproduce`: the paper's experiments, carried out as one plan and written up."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pfedme.errors import unknown
from pfedme.experiments import audit, comparison, table1, theory
from pfedme.experiments.comparison import COMPARISONS
from pfedme.experiments.effects import EFFECTS
from pfedme.experiments.finding import Finding
from pfedme.experiments.paper import Scale
from pfedme.experiments.study import PlannedRun, Study
from pfedme.files import atomic_write, writing
from pfedme.training.compare import Watch


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The runs that an experiment needs, and the function that writes its results."""

    wishes: Callable[[Scale], Sequence[PlannedRun]]
    write: Callable[[Study, Scale], Sequence[Finding]]


def _cost_wishes(scale: Scale) -> list[PlannedRun]:
    return [wish for c in COMPARISONS.values() for wish in c.wishes(scale)]


def _theory(study: Study, scale: Scale) -> list[Finding]:
    """Writes theory.csv and theory.png: the theorems on federations whose constants are known."""
    measured = theory.measure(quick=scale.divide > 1)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(theory.Row._fields)
    table.writerows(row for finding in measured for row in finding.rows)
    study.write("theory.csv", text.getvalue(), 1)
    study.write("theory.png", theory.figure(measured), 1)
    return list(measured)


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(table1.wishes, table1.write),
    **{
        name: Experiment(effect.wishes, lambda study, scale, effect=effect: [effect.write(study, scale)])
        for name, effect in EFFECTS.items()
    },
    **{name: Experiment(each.wishes, each.write) for name, each in COMPARISONS.items()},
    "cost": Experiment(_cost_wishes, lambda study, scale: [comparison.write_cost(study, scale)]),
    "theory": Experiment(lambda _: (), _theory),
}
"""The experiments by their names on the command line."""

KNOWN = (*EXPERIMENTS, "audit", "all")


def expand(names: Sequence[str]) -> list[str]:
    """The experiments that the names stand for, including `all`, and `audit`, which needs all."""
    for name in names:
        if name not in KNOWN:
            raise unknown("experiment", name, KNOWN)
    if {"all", "audit"} & set(names):
        return list(EXPERIMENTS)
    return [name for name in EXPERIMENTS if name in names]


def wishes(names: Sequence[str], scale: Scale) -> list[PlannedRun]:
    """All runs of the experiments."""
    return [wish for name in expand(names) for wish in EXPERIMENTS[name].wishes(scale)]


def reproduce(
    names: Sequence[str], scale: Scale, out: Path, command: str, watch: Watch = lambda *_: None
) -> list[Finding]:
    """Carries out the runs that are not recorded yet, writes the results, and returns what they show."""
    study = Study(out, command)
    study.carry_out(wishes(names, scale), watch)
    findings: list[Finding] = []
    for name in expand(names):
        findings += EXPERIMENTS[name].write(study, scale)
    if {"all", "audit"} & set(names):
        findings = [audit.data_finding(scale), *findings]
        with writing(out):
            atomic_write(out / "audit.md", audit.page(findings, study.footer(scale.seeds)))
    said = [dataclasses.asdict(finding) for finding in findings]
    if not {"all", "audit"} & set(names):
        new = {each["claim"] for each in said}
        said = [each for each in study.read("findings.json", []) if each["claim"] not in new] + said
    study.write("findings.json", json.dumps(said, indent=1, ensure_ascii=False) + "\n", scale.seeds)
    return findings
