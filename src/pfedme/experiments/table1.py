"""Table 1, as released and as written, and what each difference between the two is worth."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence

from pfedme.algorithms import PerFedAvg
from pfedme.data import parse_data
from pfedme.experiments.finding import Finding, failing, judge
from pfedme.experiments.paper import (
    PRINTED,
    TUNED,
    Data,
    Kind,
    Scale,
    Version,
    algorithms,
    baselines,
    data_text,
    model_of,
    run_of,
)
from pfedme.experiments.study import Estimate, PlannedRun, Study, best, last, markdown
from pfedme.report.tables import KINDS

VERSIONS: tuple[Version, ...] = ("released", "written")
ALONE_STEPS = 5000
"""Steps of a client that trains alone; a client that joins takes 4,000 on average on MNIST, 1,200 on
Synthetic."""
STEP_SEEDS = 3
"""Seeds of the runs between the two versions."""


def cell_wishes(scale: Scale, data: Data, kind: Kind, version: Version) -> dict[str, PlannedRun]:
    """The runs of one cell of the table, by algorithm."""
    tuned = TUNED[data, kind]
    chosen = algorithms(tuned, version)
    if version == "written":
        chosen |= baselines(tuned)
    evaluations = 40 if version == "released" else 4
    wishes = {}
    for name, algorithm in chosen.items():
        rounds = max(4, ALONE_STEPS // algorithm.R // scale.divide) if name == "alone" else None
        run = run_of(scale, data, kind, algorithm, version, evaluations=evaluations, rounds=rounds)
        wishes[name] = PlannedRun(run, scale.seeds_of(10))
    return wishes


def wishes(scale: Scale) -> list[PlannedRun]:
    """All runs of the table, and those between its versions."""
    table = [
        wish
        for version in VERSIONS
        for data, kind in scale.cells
        for wish in cell_wishes(scale, data, kind, version).values()
    ]
    between = [
        wish
        for data, kind in scale.stepwise
        for name in ("pfedme", "fedavg", "per-fedavg")
        for _, wish, _, _ in ladder(scale, data, kind, name)
    ]
    return table + between + [larger_step(scale, *cell) for cell in scale.cells]


def larger_step(scale: Scale, data: Data, kind: Kind) -> PlannedRun:
    """Per-FedAvg as released, with steps as large as the personal ones: α̂ where the paper prints β̂."""
    run = cell_wishes(scale, data, kind, "released")["per-fedavg"].run
    algorithm = dataclasses.replace(run.algorithm, eta=TUNED[data, kind].per_fedavg[0])
    return PlannedRun(dataclasses.replace(run, algorithm=algorithm), scale.seeds_of(STEP_SEEDS))


def pick_of(version: Version) -> Callable[[Sequence[float]], float]:
    """The round whose accuracy is reported: as released the best on test rows, as written the last."""
    return best if version == "released" else last


def printed(version: Version, data: Data, kind: Kind, algorithm: str, model: str) -> float | None:
    """The paper's number to compare a model's with.

    What the released code prints as pFedMe's personalized model is the local one, so as released the number
    is compared with both.
    """
    if version == "released" and (algorithm, model) == ("pfedme", "local"):
        model = "personal"
    return PRINTED.get((data, kind, algorithm, model))


Table = dict[tuple[Version, Data, Kind, str, str], Estimate]
"""Accuracies by version, data, model, algorithm and which of its models."""


def estimates(study: Study, scale: Scale) -> Table:
    """The accuracy of every model in the table."""
    found = {}
    for version in VERSIONS:
        for data, kind in scale.cells:
            for name, wish in cell_wishes(scale, data, kind, version).items():
                for model in KINDS:
                    value = study.accuracy(wish, model, pick_of(version))
                    if value.seeds:
                        found[version, data, kind, name, model] = value
    return found


def write(study: Study, scale: Scale) -> list[Finding]:
    """Writes table1.csv, table1.md, differences.csv and differences.md, and returns what they show."""
    table = estimates(study, scale)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["version", "data", "model", "algorithm", "evaluated", "paper", "mean", "ci95", "seeds"])
    for (version, data, kind, name, model), value in table.items():
        paper = printed(version, data, kind, name, model)
        numbers = [f"{value.mean:.4f}", f"{value.ci95:.4f}", value.seeds]
        rows.writerow([version, data, kind, name, model, "" if paper is None else paper, *numbers])
    seeds = scale.seeds_of(10)
    study.write("table1.csv", text.getvalue(), seeds)
    study.write("table1.md", _page(table) + study.footer(seeds), seeds)
    steps = write_differences(study, scale)
    return [*_findings(table), steps, _steps_of_per_fedavg(study, scale, table)]


def _steps_of_per_fedavg(study: Study, scale: Scale, table: Table) -> Finding:
    """Checks whether Per-FedAvg's numbers come from the step sizes that are printed next to them."""
    checks, larger, numbers = {}, [], []
    for data, kind in scale.cells:
        paper = PRINTED[data, kind, "per-fedavg", "personal"]
        mine = table["released", data, kind, "per-fedavg", "personal"]
        other = study.accuracy(larger_step(scale, data, kind), "personal", best)
        checks[f"{data} {kind}"] = abs(mine.mean - paper) < 1
        if abs(other.mean - paper) < 1 and not checks[f"{data} {kind}"]:
            larger.append(f"{data} {kind}")
        numbers.append(f"{data} {kind}: paper {paper:.2f}, with β̂ {mine}, with α̂ {other}")
    found = (
        f" With steps as large as α̂, the result is within a point of the paper for {', '.join(larger)}."
        if larger
        else ""
    )
    return Finding(
        "Table 1: the steps of Per-FedAvg",
        "Per-FedAvg's numbers come from a personal step α̂ and a step β̂ of the shared model, as printed.",
        "Per-FedAvg as released with the printed β̂, and with α̂ instead.",
        "; ".join(numbers) + ".",
        judge(checks),
        failing(checks) + found,
    )


def _cells(table: Table) -> list[tuple[Data, Kind]]:
    return list(dict.fromkeys(key[1:3] for key in table))


def _page(table: Table) -> str:
    """The table in Markdown, with a part for each version."""
    said = {
        "released": "As released: overlapping MNIST, aggregation weighted by rows, weight decay in pFedMe's "
        "inner step only, batches cycled in a fixed order, Per-FedAvg adapted on test rows, and the best "
        "round chosen on test rows. What the released code calls pFedMe's personalized model is the local "
        "one.",
        "written": "As written: disjoint MNIST, uniform aggregation, fresh mini-batches, θ evaluated, "
        "Per-FedAvg's step on training rows, the last round. With the baselines that the paper leaves out.",
    }
    parts = [
        "# Table 1\n\nTest accuracy in percent over all clients' rows, mean ± 95 % interval over seeds; "
    ]
    parts.append("the paper's number in brackets.\n")
    for version in VERSIONS:
        lines = []
        for data, kind in _cells(table):
            names = list(dict.fromkeys(key[3] for key in table if key[:3] == (version, data, kind)))
            for name in names:
                cells = []
                for model in KINDS:
                    value = table.get((version, data, kind, name, model))
                    paper = printed(version, data, kind, name, model)
                    shown = "–" if value is None else str(value)
                    cells.append(f"{shown} ({paper:.2f})" if paper is not None else shown)
                lines.append([f"{data} {kind}", name, *cells])
        header = ["", "algorithm", "global", "local", "personal"]
        parts.append(f"\n## {version.capitalize()}\n\n{said[version]}\n\n{markdown(header, lines)}")
    return "".join(parts)


def _findings(table: Table) -> list[Finding]:
    """What the table shows about the paper's claims."""
    cells = _cells(table)

    def mean(version: Version, cell: tuple[Data, Kind], name: str, model: str) -> float:
        value = table.get((version, *cell, name, model))
        return value.mean if value else float("nan")

    def level(version: Version, cell: tuple[Data, Kind]) -> str:
        shown = [
            f"pFedMe personal {mean(version, cell, 'pfedme', 'personal'):.2f}",
            f"pFedMe global {mean(version, cell, 'pfedme', 'global'):.2f}",
            f"Per-FedAvg {mean(version, cell, 'per-fedavg', 'personal'):.2f}",
            f"FedAvg global {mean(version, cell, 'fedavg', 'global'):.2f}",
            f"FedAvg local {mean(version, cell, 'fedavg', 'local'):.2f}",
        ]
        if version == "written":
            shown += [
                f"alone {mean(version, cell, 'alone', 'personal'):.2f}",
                f"FedAvg fine-tuned {mean(version, cell, 'fedavg-ft', 'personal'):.2f}",
            ]
        return f"{cell[0]} {cell[1]}: " + ", ".join(shown)

    def all_levels(version: Version) -> str:
        return "; ".join(level(version, cell) for cell in cells) + "."

    rivals = (("pfedme", "global"), ("per-fedavg", "personal"), ("fedavg", "global"))
    wins = {
        f"{cell[0]} {cell[1]} as {version}": all(
            mean(version, cell, "pfedme", "personal") > mean(version, cell, *rival) for rival in rivals
        )
        for version in VERSIONS
        for cell in cells
    }
    like = {
        f"{cell[0]} {cell[1]}": mean("written", cell, "pfedme", "personal")
        > mean("written", cell, "fedavg", "local")
        for cell in cells
    }
    joins = {
        f"{cell[0]} {cell[1]}": mean("written", cell, "pfedme", "personal")
        > mean("written", cell, "alone", "personal")
        for cell in cells
    }
    synthetic = {
        f"{cell[1]}: {what}": check
        for cell in cells
        if cell[0] == "synthetic"
        for what, check in {
            "above FedAvg": mean("released", cell, "pfedme", "global")
            > mean("released", cell, "fedavg", "global"),
            "below Per-FedAvg": mean("released", cell, "pfedme", "global")
            < mean("released", cell, "per-fedavg", "personal"),
        }.items()
    }
    personal = {
        f"{name} on {cell[0]} {cell[1]}": mean("written", cell, name, "personal")
        > mean("written", cell, "fedavg", "global")
        for cell in cells
        for name in ("pfedme", "per-fedavg")
    }
    return [
        Finding(
            "Table 1: the personalized model is best",
            "With tuned settings, pFedMe's personal models are more accurate than its global model, "
            "Per-FedAvg and FedAvg, on both data sets with both models.",
            "Table 1 in both versions, the last round as written and the best as released.",
            f"As released, {all_levels('released')} As written, {all_levels('written')}",
            judge(wins),
            failing(wins),
        ),
        Finding(
            "Table 1, like with like",
            "Left out of the paper: FedAvg's local model after its R steps is adapted to the client, just as "
            "pFedMe's personal model is, with 1/K of the gradients.",
            "Both models in the same runs, as written.",
            all_levels("written"),
            judge(like),
            "The claim tested is that pFedMe's personal models are more accurate than FedAvg's local ones. "
            + failing(like),
        ),
        Finding(
            "Table 1: the global model on Synthetic",
            "On Synthetic, pFedMe's global model beats only FedAvg's.",
            "Table 1 as released.",
            "; ".join(level("released", cell) for cell in cells if cell[0] == "synthetic") + ".",
            judge(synthetic),
            failing(synthetic),
        ),
        Finding(
            "Personalization beats FedAvg on heterogeneous clients",
            "If clients' data differ, pFedMe and Per-FedAvg are more accurate than FedAvg.",
            "Personal models against FedAvg's global one, as written.",
            all_levels("written"),
            judge(personal),
            failing(personal) + " FedAvg's local models, which are adapted to clients, are in the table too.",
        ),
        Finding(
            "Training alone generalises badly",
            "A client that trains without the others has too little data and generalises worse than with "
            "the federation.",
            "`alone` compared with pFedMe's personal models, as written.",
            all_levels("written"),
            judge(joins),
            "The claim tested is that pFedMe's personal models beat training alone. "
            + failing(joins)
            + " In these federations a client has two labels, or its own task, and enough rows for it.",
        ),
    ]


Step = tuple[str, PlannedRun, str, Callable[[Sequence[float]], float]]
"""A name, the run, the model that is evaluated, and the function that picks the round."""


def ladder(scale: Scale, data: Data, kind: Kind, name: str) -> list[Step]:
    """The steps from the number that the released code would print to the one that the paper describes."""
    start = cell_wishes(scale, data, kind, "released")[name]
    end = cell_wishes(scale, data, kind, "written")[name].run
    seeds = scale.seeds_of(STEP_SEEDS)
    run, adapted = start.run, "global" if name == "fedavg" else "personal"
    first = "local" if name == "pfedme" else adapted

    def changed(**fields: object) -> PlannedRun:
        nonlocal run
        own = {f.name for f in dataclasses.fields(run.algorithm)}
        inner = {k: v for k, v in fields.items() if k in own}
        outer = {k: v for k, v in fields.items() if k not in own}
        algorithm = dataclasses.replace(run.algorithm, **inner)
        run = dataclasses.replace(run, algorithm=algorithm, eval_every=end.eval_every, **outer)
        return PlannedRun(run, seeds)

    start = dataclasses.replace(start, seeds=seeds)
    steps: list[Step] = [
        ("as released", start, first, best),
        ("the last round, not the best on test rows", start, first, last),
    ]
    if name == "pfedme":
        steps.append(("θ_i evaluated, not w_i", start, adapted, last))
    if data == "mnist":
        disjoint = parse_data(data_text(scale, data, "written"))
        steps.append(("no image shared by clients", changed(data=disjoint), adapted, last))
    steps.append(("uniform aggregation", changed(aggregation="uniform"), adapted, last))
    decay = model_of(kind, run.algorithm, "written")
    if decay != run.model:
        steps.append(("weight decay as written", changed(model=decay), adapted, last))
    steps.append(("fresh mini-batches", changed(batches="random"), adapted, last))
    if isinstance(run.algorithm, PerFedAvg):
        steps.append(("adapted on training rows", changed(adapt_on="train"), adapted, last))
        steps.append(("with the Hessian", changed(hessian="exact"), adapted, last))
    assert run == end
    return steps


def write_differences(study: Study, scale: Scale) -> Finding:
    """Writes differences.csv and differences.md: the accuracy after each step, and what the step changed."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["data", "model", "algorithm", "step", "mean", "ci95", "change", "change_ci95", "seeds"])
    lines, largest = [], {}
    seeds = scale.seeds_of(STEP_SEEDS)
    for data, kind in scale.stepwise:
        for name in ("pfedme", "fedavg", "per-fedavg"):
            before: list[float] | None = None
            for step, wish, model, pick in ladder(scale, data, kind, name):
                values = study.values(wish, model, pick)
                value = Estimate.of(values)
                pairs = zip(values, before, strict=False) if before else ()
                change = Estimate.of([a - b for a, b in pairs])
                row = [f"{x:.4f}" for x in (value.mean, value.ci95, change.mean, change.ci95)]
                table.writerow([data, kind, name, step, *row, value.seeds])
                moved = f"{change.mean:+.2f} ± {change.ci95:.2f}" if change.seeds else ""
                lines.append([f"{data} {kind}", name, step, str(value), moved])
                if change.seeds:
                    largest[f"{step} ({name}, {data} {kind})"] = change.mean
                before = values
    study.write("differences.csv", text.getvalue(), seeds)
    page = (
        "# What each difference is worth\n\nFrom the number that the released code prints to the one that "
        "the paper's text describes, one change at a time, each kept for the next. Test accuracy in percent "
        "(for FedAvg of the global model, otherwise of the personalized one), mean ± 95 % interval over "
        "seeds; the change is paired by seed.\n\n"
    )
    header = ["", "algorithm", "step", "accuracy", "change"]
    study.write("differences.md", page + markdown(header, lines) + study.footer(seeds), seeds)
    top = sorted(largest.items(), key=lambda item: -abs(item[1]))[:6]
    checks = {step: abs(change) < 0.5 for step, change in largest.items()}
    return Finding(
        "The released code is the paper's algorithm",
        "The published numbers come from the algorithm and the data that the paper describes.",
        "From as released to as written, one difference at a time (differences.md).",
        "The largest changes, in points: " + "; ".join(f"{step} {change:+.2f}" for step, change in top) + ".",
        judge(checks),
        f"{sum(not c for c in checks.values())} of {len(checks)} steps move the accuracy by half a point or "
        "more.",
    )
