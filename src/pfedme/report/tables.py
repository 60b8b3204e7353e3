"""Tables and sentences from the results of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pfedme.offer import Level
    from pfedme.personalize import Personalized

KINDS = ("global", "local", "personal")
Finals = Sequence[Mapping[str, Any]]
"""The `final` entries of runs that differ only in their seed."""


def mean_std(finals: Finals, kind: str, measure: str = "accuracy") -> tuple[float, float] | None:
    """Mean and standard deviation over seeds of a model's measure, in percent; None if it does not exist."""
    values = []
    if not finals:
        return None
    for final in finals:
        entry = final.get(kind)
        if entry is None or entry["accuracy"] is None:
            return None
        values.append(entry["accuracy"] if measure == "accuracy" else entry["clients"][measure])
    return 100 * float(np.mean(values)), 100 * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def percent(value: tuple[float, float] | None, seeds: int) -> str:
    """`83.21` or `83.21 ± 0.12`; a dash for nothing."""
    if value is None:
        return "–"
    return f"{value[0]:.2f} ± {value[1]:.2f}" if seeds > 1 else f"{value[0]:.2f}"


def rows(results: Mapping[str, Finals]) -> list[list[str]]:
    """For each algorithm: its name, the accuracy of its three models, and the worst tenth's of the last."""
    table = []
    for name, finals in results.items():
        if not finals:
            table.append([name, *["diverged"] * 4])
            continue
        last = [kind for kind in KINDS if kind in finals[0]][-1]
        values = [mean_std(finals, kind) for kind in KINDS] + [mean_std(finals, last, "worst_decile")]
        table.append([name, *(percent(v, len(finals)) for v in values)])
    return table


HEADER = ["algorithm", "global %", "local %", "personal %", "worst tenth %"]


def comparison_csv(results: Mapping[str, Finals]) -> str:
    """algorithm, evaluated, mean, std, worst_decile, seeds: a row for each model, accuracies as fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["algorithm", "evaluated", "mean", "std", "worst_decile", "seeds"])
    for name, finals in results.items():
        for kind in KINDS:
            accuracy, worst = mean_std(finals, kind), mean_std(finals, kind, "worst_decile")
            if accuracy and worst:
                numbers = [f"{v / 100:.6f}" for v in (*accuracy, worst[0])]
                table.writerow([name, kind, *numbers, len(finals)])
    return text.getvalue()


def sentences(results: Mapping[str, Finals]) -> list[str]:
    """What the numbers of a comparison say, in two or three sentences."""
    best = {
        name: max((value[0], kind) for kind in KINDS if (value := mean_std(finals, kind)))
        for name, finals in results.items()
        if any(mean_std(finals, kind) for kind in KINDS)
    }
    said = []
    together = {name: value for name, value in best.items() if name != "alone"}
    if "alone" in best and together:
        name = max(together, key=lambda n: together[n][0])
        accuracy, kind = together[name]
        gain = accuracy - best["alone"][0]
        verdict = (
            f"clients are better off alone, by {-gain:.1f} points"
            if gain < -0.05
            else f"joining pays, by {gain:.1f} points"
            if gain > 0.05
            else "joining changes nothing on average"
        )
        said.append(
            f"A client that trains alone reaches {best['alone'][0]:.1f} %, and the best federated model, "
            f"{name}'s {kind} one, {accuracy:.1f} %: on this federation {verdict}."
        )
    if "pfedme" in results and (own := mean_std(results["pfedme"], "personal")):
        shared = mean_std(results["pfedme"], "global")
        assert shared is not None
        text = f"pFedMe's personal models are {_apart(own[0] - shared[0])} its own global model"
        if "fedavg" in results and (local := mean_std(results["fedavg"], "local")):
            text += (
                f" and {_apart(own[0] - local[0])} FedAvg's local models, their like: both have been adapted "
                "to the client, for a K-th of the gradients in FedAvg's case"
            )
        said.append(text + ".")
    if max(map(len, results.values()), default=0) == 1:
        said.append("This is one seed; --seeds 10 shows how much of a difference is chance.")
    return said


def offer_sentences(found: Personalized) -> list[str]:
    """What clients chose and gain, and what `harmed` means."""
    chosen = [found.candidates[k].name for k in found.choice]
    kinds = {
        "alone": "train alone",
        "global": "take the global model as it is",
        "fine-tuned": "fine-tune it",
        "given": "take pFedMe's model at the given λ",
        "personal": "take pFedMe's model at a λ of their own",
    }
    counts = [f"{chosen.count(kind)} {text}" for kind, text in kinds.items() if kind in chosen]
    said = [f"By their own validation rows {', '.join(counts)}."]
    for name in ("alone", "global"):
        gain, interval = found.gain(found.of(name))
        mean, half = found.mean_gain(name)
        tested = found.tested
        sure = int((gain - interval > 0)[tested].sum()), int((gain + interval < 0)[tested].sum())
        said.append(
            f"The recommended models are {_apart(100 * mean)} {name} (± {100 * half:.1f}) in the mean over "
            f"clients; {sure[0]} of {tested.sum()} gain and {sure[1]} lose beyond their own 95 % interval."
        )
    said.append("Harmed are clients more than one point below alone, beyond that interval.")
    return said


def newcomer_sentence(levels: Sequence[Level]) -> str:
    """Where joining pays for newcomers."""
    paying = [v.rows for v in levels if v.methods["recommended"]["mean"] >= v.methods["alone"]["mean"] + 0.01]
    tried = ", ".join(str(v.rows) for v in levels)
    if not paying:
        return f"Of {tried} rows, joining pays (a point or more above alone) with none."
    if len(paying) == len(levels):
        return f"Joining pays (a point or more above alone) with every number of rows tried: {tried}."
    return f"Of {tried} rows, joining pays (a point or more above alone) with {', '.join(map(str, paying))}."


def _apart(points: float) -> str:
    if abs(points) < 0.05:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"
