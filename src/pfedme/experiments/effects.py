"""Figures 1 to 5: what R, K, |D|, λ and β do to pFedMe on MNIST."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pfedme.algorithms import PFedMe
from pfedme.experiments.finding import Finding, failing, judge
from pfedme.experiments.paper import Scale, run_of
from pfedme.experiments.study import Estimate, PlannedRun, Study, last
from pfedme.report.figures import Curve, panels

SEEDS = 2
BASE = PFedMe(lam=15.0, eta=0.005, alpha=0.09, beta=1.0, R=20, K=5, B=20)
KINDS = ("global", "personal")

Speeds = Mapping[tuple[str, str, str], float]
"""Mean accuracy over the run by model, global or personal, and label of the value; NaN if it diverged."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """One figure: the values of a hyperparameter, and what the paper says they do."""

    number: int
    symbol: str
    values: Mapping[str, Mapping[str, Any]]
    """The name of each line, and the fields in which it differs from BASE."""
    statement: str
    checks: Callable[[Speeds], dict[str, bool]]
    quick: tuple[str, ...] = ()
    """The lines of the quick version; all if empty."""
    remark: str = ""
    """A further remark."""

    def seeds(self, scale: Scale) -> int:
        """Repetitions of each line; one in the quick version, because these runs take most of its time."""
        return SEEDS if scale.divide == 1 else 1

    def labels(self, scale: Scale) -> list[str]:
        """The lines that are drawn."""
        return [v for v in self.values if scale.divide == 1 or not self.quick or v in self.quick]

    def wish(self, scale: Scale, model: str, label: str) -> PlannedRun:
        """The run behind a line."""
        algorithm = dataclasses.replace(BASE, **self.values[label])
        rounds = max(4, scale.rounds("mnist") // 2)  # the curves are flat by then
        run = run_of(scale, "mnist", model, algorithm, "written", rounds=rounds, evaluations=20)
        return PlannedRun(run, self.seeds(scale), train_loss=True)

    def wishes(self, scale: Scale) -> list[PlannedRun]:
        """All runs of the figure."""
        return [
            self.wish(scale, model, label) for model in scale.kinds("mnist") for label in self.labels(scale)
        ]

    def write(self, study: Study, scale: Scale) -> Finding:
        """Writes the figure as a PNG, and returns what it shows."""
        columns: dict[str, list[Curve]] = {}
        speeds: dict[tuple[str, str, str], float] = {}
        numbers = []
        for model in scale.kinds("mnist"):
            for place, label in enumerate(self.labels(scale)):
                wish = self.wish(scale, model, label)
                records = study.records(wish)
                diverged = sum(not record["final"] for record in records)
                told = f", {diverged} of {len(records)} diverged" if diverged else ""
                histories = [record["history"] for record in records]
                for dash, kind in enumerate(KINDS):
                    curve = Curve(
                        f"{label} {kind}",
                        histories,
                        kind,
                        place,
                        1 - dash,
                        diverged=label if diverged else "",
                    )
                    columns.setdefault(model.upper(), []).append(curve)
                    over = [
                        100 * float(np.mean([e[kind]["accuracy"] for e in h[1:]]))
                        for h, record in zip(histories, records, strict=True)
                        if record["final"]
                    ]
                    speeds[model, kind, label] = Estimate.of(over).mean
                ends = [str(study.accuracy(wish, kind, last)) for kind in KINDS]
                mean = " and ".join(f"{speeds[model, kind, label]:.2f}" for kind in KINDS)
                ended = diverged < len(records)
                shown = f"last {ends[0]} and {ends[1]}, over the run {mean}" if ended else "no result"
                numbers.append(f"{model} {label}: {shown}{told}")
        study.write(f"figure{self.number}.png", panels(columns), self.seeds(scale))
        checks = self.checks(speeds)
        return Finding(
            f"Figure {self.number}: the effect of {self.symbol}",
            self.statement,
            f"pFedMe on MNIST as written with η = 0.005 and inner step 0.09, half of the paper's rounds "
            f"(results/figure{self.number}.png). Accuracy in percent of the global and the personal models "
            "after the last round, and as a mean over the run, which is larger the faster a run converges.",
            "; ".join(numbers) + ".",
            judge(checks),
            failing(checks) + self.remark,
        )


def _rises(speeds: Speeds, labels: tuple[str, ...], slack: float = 0.05) -> dict[str, bool]:
    """Whether the mean accuracy rises along `labels`, for each model and kind."""
    return {
        f"{model} {kind}": all(
            speeds[model, kind, b] > speeds[model, kind, a] - slack
            for a, b in itertools.pairwise(labels)
            if (model, kind, a) in speeds and (model, kind, b) in speeds
        )
        for model, kind in _lines(speeds)
    }


def _lines(speeds: Speeds) -> list[tuple[str, str]]:
    """The models and kinds that were run."""
    return list(dict.fromkeys((model, kind) for model, kind, _ in speeds))


def _known(speeds: Speeds, model: str, kind: str, label: str) -> float:
    return speeds.get((model, kind, label), float("nan"))


def _effect_of_K(speeds: Speeds) -> dict[str, bool]:
    """K = 5 is better than 1, and 7 or 20 are at most 0.2 points better than 5."""
    checks = {}
    for model, kind in _lines(speeds):
        five = _known(speeds, model, kind, "K = 5")
        checks[f"{model} {kind}: K = 5 above 1"] = five > _known(speeds, model, kind, "K = 1")
        for more in ("K = 7", "K = 20"):
            if (model, kind, more) in speeds:
                no_better = not _known(speeds, model, kind, more) > five + 0.2
                checks[f"{model} {kind}: {more[4:]} no better than 5"] = no_better
    return checks


def _effect_of_batch(speeds: Speeds) -> dict[str, bool]:
    """Larger batches up to 20 are faster, and the largest is slower than some smaller one."""
    rising = {f"{k}: larger is faster": v for k, v in _rises(speeds, ("|D| = 5", "|D| = 20")).items()}
    slows = {
        f"{model} {kind}: 100 slows down": not _known(speeds, model, kind, "|D| = 100")
        >= max(_known(speeds, model, kind, v) for v in ("|D| = 5", "|D| = 20"))
        for model, kind in _lines(speeds)
    }
    return rising | slows


def _effect_of_lam(speeds: Speeds) -> dict[str, bool]:
    """Larger is faster up to 15; 50 diverges, or loses ten points."""
    rising = {
        f"{k}: larger is faster up to 15": v
        for k, v in _rises(speeds, ("λ = 1", "λ = 5", "λ = 10", "λ = 15")).items()
    }
    broken = {
        f"{model} {kind}: 50 breaks": not _known(speeds, model, kind, "λ = 50")
        > _known(speeds, model, kind, "λ = 15") - 10
        for model, kind in _lines(speeds)
    }
    return rising | broken


def _effect_of_beta(speeds: Speeds) -> dict[str, bool]:
    """Larger is faster, especially for the global model; with β = 4 a smaller η does better."""
    rising = {f"{k}: 2 faster than 1": v for k, v in _rises(speeds, ("β = 1", "β = 2"), slack=0.0).items()}
    gains = {
        f"{model}: the global model gains most": _known(speeds, model, "global", "β = 2")
        - _known(speeds, model, "global", "β = 1")
        > _known(speeds, model, "personal", "β = 2") - _known(speeds, model, "personal", "β = 1")
        for model in dict.fromkeys(model for model, _ in _lines(speeds))
    }
    calmer = {
        f"{model} {kind}: β = 4 better with η = 0.003": not _known(speeds, model, kind, "β = 4")
        > _known(speeds, model, kind, "β = 4, η = 0.003")
        for model, kind in _lines(speeds)
    }
    return rising | gains | calmer


EFFECTS: dict[str, Effect] = {
    f"figure{effect.number}": effect
    for effect in (
        Effect(
            1,
            "R",
            {f"R = {v}": {"R": v} for v in (5, 10, 20, 40)},
            "More local rounds R make both the personal and the global model converge faster.",
            lambda s: _rises(s, tuple(f"R = {v}" for v in (5, 10, 20, 40))),
            ("R = 5", "R = 20"),
        ),
        Effect(
            2,
            "K",
            {f"K = {v}": {"K": v} for v in (1, 3, 5, 7, 20)},
            "Three to five inner steps K are enough; seven are no better.",
            _effect_of_K,
            ("K = 1", "K = 5", "K = 20"),
            " With K = 20 the runs break down: the inner step of 0.09 is above 2/(L + λ), where L is about "
            "100, so more of these steps lead further astray.",
        ),
        Effect(
            3,
            "|D|",
            {f"|D| = {v}": {"B": v} for v in (5, 20, 50, 100)},
            "Larger mini-batches converge faster; very large ones slow the convergence down.",
            _effect_of_batch,
            ("|D| = 5", "|D| = 20", "|D| = 100"),
        ),
        Effect(
            4,
            "λ",
            {f"λ = {v}": {"lam": float(v)} for v in (1, 5, 10, 15, 20, 50)},
            "A larger λ converges faster; a very large one diverges.",
            _effect_of_lam,
        ),
        Effect(
            5,
            "β",
            {
                **{f"β = {v}": {"beta": float(v)} for v in (1, 2, 4)},
                "β = 4, η = 0.003": {"beta": 4.0, "eta": 0.003},
            },
            "A larger β converges faster, especially for the global model; a large one needs a smaller η.",
            _effect_of_beta,
        ),
    )
}
