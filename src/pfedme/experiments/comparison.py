"""Figures 6 and 7: the three algorithms with equal settings, and once more at equal cost."""

from __future__ import annotations

import csv
import dataclasses
import io

import numpy as np

from pfedme.experiments.finding import Finding, failing, judge
from pfedme.experiments.paper import SAME, Scale, Version, algorithms, run_of
from pfedme.experiments.study import Estimate, PlannedRun, Study, last, markdown
from pfedme.report.figures import Curve, panels

SEEDS = 3
VERSIONS: tuple[Version, ...] = ("released", "written")

RIVALS = (("pfedme", "global"), ("per-fedavg", "personal"), ("fedavg", "global"))
"""The models with which the paper compares pFedMe's personal models."""

LINES = (
    ("pfedme", "personal"), ("pfedme", "global"), ("per-fedavg", "personal"), ("fedavg", "global"),
    ("fedavg", "local"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One figure, and the gaps in points that the paper reads off it."""

    number: int
    data: str
    printed: dict[str, tuple[float, float, float]]
    """By model: how far pFedMe's personal models are above each of RIVALS."""

    def wish(self, scale: Scale, model: str, version: Version, name: str) -> PlannedRun:
        """The run of an algorithm."""
        algorithm = algorithms(SAME[self.data, model], version, beta=1.0)[name]
        run = run_of(scale, self.data, model, algorithm, version, evaluations=20)
        return PlannedRun(run, scale.seeds_of(SEEDS), train_loss=True)

    def wishes(self, scale: Scale) -> list[PlannedRun]:
        """All runs of the figure."""
        return [
            self.wish(scale, model, version, name)
            for model in scale.kinds(self.data)
            for version in VERSIONS
            for name in ("pfedme", "fedavg", "per-fedavg")
        ]

    def write(self, study: Study, scale: Scale) -> list[Finding]:
        """Writes the figure and a page with the gaps, and returns what they show."""
        seeds = scale.seeds_of(SEEDS)
        for version in VERSIONS:
            columns = {
                model.upper(): [
                    Curve(
                        f"{name} {kind}",
                        self.histories(study, scale, model, version, name),
                        kind,
                        place,
                        place,
                    )
                    for place, (name, kind) in enumerate(LINES)
                ]
                for model in scale.kinds(self.data)
            }
            suffix = "" if version == "written" else "-released"
            study.write(f"figure{self.number}{suffix}.png", panels(columns), seeds)
        lines, checks, numbers = [], {}, []
        for version in VERSIONS:
            for model in scale.kinds(self.data):
                mine = study.values(self.wish(scale, model, version, "pfedme"), "personal", last)
                for (name, kind), paper in zip(RIVALS, self.printed[model], strict=True):
                    theirs = study.values(self.wish(scale, model, version, name), kind, last)
                    gap = Estimate.of([a - b for a, b in zip(mine, theirs, strict=False)])
                    lines.append([version, model, f"{name} {kind}", f"{paper:+.1f}", str(gap)])
                    checks[f"{model} against {name} {kind} as {version}"] = gap.mean > 0
                    numbers.append(f"{version} {model} against {name} {kind} {gap} (paper {paper:+.1f})")
        header = ["version", "model", "rival", "paper", "ours"]
        page = (
            f"# Figure {self.number}\n\nHow many points pFedMe's personal models are above each rival after "
            f"the last round, on {self.data} with equal settings; paired by seed, mean ± 95 % interval.\n\n"
        )
        study.write(f"figure{self.number}.md", page + markdown(header, lines) + study.footer(seeds), seeds)
        said = {model: "/".join(f"{gap:g}" for gap in gaps) for model, gaps in self.printed.items()}
        found = [
            Finding(
                f"Figure {self.number}: {self.data} with equal settings",
                "With equal settings, pFedMe's personal models are more accurate than its global model, "
                f"Per-FedAvg and FedAvg: by {said['mlr']} points with MLR and by {said['dnn']} with DNN.",
                f"Both versions (results/figure{self.number}.md and .png); the gap is paired by seed.",
                "; ".join(numbers) + ".",
                judge(checks),
                failing(checks),
            )
        ]
        if self.data == "synthetic":
            found.append(self._losses(study, scale))
        return found

    def _losses(self, study: Study, scale: Scale) -> Finding:
        """Checks whether pFedMe's personal models have the smallest training loss and its global one lags."""
        checks, numbers = {}, []
        for version in VERSIONS:
            for model in scale.kinds(self.data):
                loss, accuracy = {}, {}
                for name, kind in LINES[:4]:
                    records = study.records(self.wish(scale, model, version, name))
                    finals = [record["final"][kind] for record in records if record["final"]]
                    loss[f"{name} {kind}"] = float(np.mean([f["train_loss"] for f in finals]))
                    accuracy[f"{name} {kind}"] = float(np.mean([f["accuracy"] for f in finals]))
                checks[f"{model} as {version}: smallest loss"] = (
                    min(loss, key=loss.__getitem__) == "pfedme personal"
                )
                checks[f"{model} as {version}: global model last"] = (
                    min(accuracy, key=accuracy.__getitem__) == "pfedme global"
                )
                numbers.append(
                    f"{version} {model}: "
                    + ", ".join(f"{k} loss {loss[k]:.3f} accuracy {100 * accuracy[k]:.2f}" for k in loss)
                )
        return Finding(
            "Figure 7: training loss, and the global model",
            "On Synthetic with equal settings, pFedMe's global model does worse than the others, while its "
            "personal models have the smallest training loss.",
            "The runs of figure 7.",
            "; ".join(numbers) + ".",
            judge(checks),
            failing(checks),
        )

    def histories(self, study: Study, scale: Scale, model: str, version: Version, name: str) -> list:
        """The evaluations of an algorithm, one list for each seed that did not diverge."""
        return [r["history"] for r in study.records(self.wish(scale, model, version, name)) if r["final"]]


COMPARISONS = {
    "figure6": Comparison(6, "mnist", {"mlr": (1.1, 1.3, 1.5), "dnn": (0.9, 0.9, 1.3)}),
    "figure7": Comparison(7, "synthetic", {"mlr": (6.1, 3.8, 5.2), "dnn": (3.9, 0.7, 3.1)}),
}


def write_cost(study: Study, scale: Scale) -> Finding:
    """Writes cost.csv, cost.md and cost.png: figures 6 and 7 as written, at equal gradients and bytes."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        [
            "data",
            "model",
            "algorithm",
            "evaluated",
            "equal",
            "round",
            "gradients",
            "megabytes",
            "mean",
            "ci95",
        ]
    )
    seeds = scale.seeds_of(SEEDS)
    lines: list[list[str]] = []
    checks: dict[str, bool] = {}
    columns: dict[str, list[Curve]] = {}
    for comparison in COMPARISONS.values():
        for model in scale.kinds(comparison.data):
            cell = f"{comparison.data} {model}"
            runs = {name: comparison.wish(scale, model, "written", name).run for name, _ in LINES}
            budget = min(run.algorithm.gradients * run.rounds for run in runs.values())
            size = runs["pfedme"].prepare()[1].start().server.ravel().size
            at: dict[tuple[str, str], Estimate] = {}
            for place, (name, kind) in enumerate(LINES):
                each = runs[name].algorithm.gradients
                histories = comparison.histories(study, scale, model, "written", name)
                columns.setdefault(cell, []).append(
                    Curve(f"{name} {kind}", histories, kind, place, place, each)
                )
                shown = []
                for equal, rounds in (("gradients", budget // each), ("bytes", runs[name].rounds)):
                    reached = [[e for e in h if e["round"] <= rounds][-1] for h in histories]
                    value = Estimate.of([100 * e[kind]["accuracy"] for e in reached])
                    t = reached[0]["round"] if reached else 0
                    megabytes = 2 * 4 * size * t / 1e6  # to the client and back, in float32
                    numbers = [t, each * t, f"{megabytes:.1f}", f"{value.mean:.4f}", f"{value.ci95:.4f}"]
                    table.writerow([comparison.data, model, name, kind, equal, *numbers])
                    shown.append(str(value))
                    if equal == "gradients":
                        at[name, kind] = value
                lines.append([cell, f"{name} {kind}", *shown])
            for rival in (("per-fedavg", "personal"), ("fedavg", "local")):
                won = at["pfedme", "personal"].mean > at[rival].mean
                checks[f"{cell} against {' '.join(rival)}"] = won
    study.write("cost.csv", text.getvalue(), seeds)
    study.write("cost.png", panels(columns, "gradients of a client", ("accuracy",)), seeds)
    page = (
        "# At equal cost\n\nTest accuracy in percent in the runs of figures 6 and 7, as written: when a "
        "client has computed as many mini-batch gradients as in all rounds of FedAvg, and when as many bytes "
        "have been sent, which is after the same number of rounds for all. A round costs a client R "
        "gradients in FedAvg, 4 R in Per-FedAvg (a Hessian-vector product counts as two), R K in pFedMe.\n\n"
    )
    header = ["", "model", "equal gradients", "equal bytes"]
    study.write("cost.md", page + markdown(header, lines) + study.footer(seeds), seeds)
    return Finding(
        "Cheaper and faster than Per-FedAvg",
        "pFedMe converges faster and computes less than Per-FedAvg, because it needs no Hessian.",
        "The runs of figures 6 and 7, as written, when a client has computed the same number of mini-batch "
        "gradients (results/cost.md); FedAvg's local model is included.",
        "; ".join(f"{cell} {name}: {equal}" for cell, name, equal, _ in lines) + ".",
        judge(checks),
        failing(checks),
    )
