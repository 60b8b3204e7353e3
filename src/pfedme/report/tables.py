"""Tables and sentences from the results of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfedme.metrics import mean_interval
from pfedme.report.measure import ACCURACY, Measure, measure_of

if TYPE_CHECKING:
    from pfedme.offer import Level
    from pfedme.personalize import Personalized

KINDS = ("global", "local", "personal")
Finals = Sequence[Mapping[str, Any]]
"""The `final` entries of runs that differ only in their seed."""


def data_name(data: Mapping[str, Any]) -> str:
    """What a reader calls the data that a record describes: a name, or a table's file and what it predicts.

    >>> data_name({"name": "table", "path": "/home/me/patients.csv", "label": "outcome"})
    "patients.csv ('outcome')"
    >>> data_name({"name": "deployed", "clients": 5, "label": "outcome"})
    "a deployed federation of 5 clients ('outcome')"
    """
    label = f" ('{data['label']}')" if data.get("label") else ""
    if data["name"] == "deployed":
        clients = data["clients"]
        many = f" of {clients:,} client{'' if clients == 1 else 's'}" if clients else ""
        return f"a deployed federation{many}{label}"
    return f"{Path(data['path']).name}{label}" if data["name"] == "table" else data["name"]


def measure(results: Mapping[str, Finals]) -> Measure:
    """What the models of a comparison are judged by."""
    return next((measure_of(final) for finals in results.values() for final in finals), ACCURACY)


def mean_std(finals: Finals, kind: str, of_clients: str | None = None) -> tuple[float, float] | None:
    """Mean and standard deviation over seeds of a model's accuracy in percent, or of its R²; or of a number
    `of_clients`, such as their `worst_decile`. None if it does not exist."""
    values = []
    if not finals:
        return None
    for final in finals:
        entry, what = final.get(kind), measure_of(final)
        if entry is None or (own := what.of(entry)) is None or (of_clients and not entry["clients"]):
            return None
        values.append(what.scale * entry["clients"][of_clients] if of_clients else own)
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def shown(value: tuple[float, float] | None, seeds: int, what: Measure = ACCURACY) -> str:
    """`83.21` or `83.21 ± 0.12`; a dash for nothing."""
    if value is None:
        return "–"
    return " ± ".join(what.text(number) for number in (value if seeds > 1 else value[:1]))


def rows(results: Mapping[str, Finals]) -> list[list[str]]:
    """For each algorithm: its name, the accuracy (or R²) of its three models, and the worst tenth's of the
    last."""
    table, what = [], measure(results)
    for name, finals in results.items():
        if not finals:
            table.append([name, *["diverged"] * 4])
            continue
        last = [kind for kind in KINDS if kind in finals[0]][-1]
        values = [mean_std(finals, kind) for kind in KINDS] + [mean_std(finals, last, "worst_decile")]
        table.append([name, *(shown(v, len(finals), what) for v in values)])
    return table


def header(results: Mapping[str, Finals]) -> list[str]:
    """The columns of `rows`."""
    return ["algorithm", *(f"{title} {measure(results).sign}" for title in (*KINDS, "worst tenth"))]


def comparison_csv(results: Mapping[str, Finals]) -> str:
    """algorithm, evaluated, mean, std, worst_decile, seeds: a row for each model, accuracies as fractions.

    In a regression they are R², and the mean of `rmse` over seeds follows.
    """
    text, what = io.StringIO(), measure(results)
    table = csv.writer(text, lineterminator="\n")
    extra = [] if what is ACCURACY else ["rmse"]
    table.writerow(["algorithm", "evaluated", "mean", "std", "worst_decile", "seeds", *extra])
    for name, finals in results.items():
        for kind in KINDS:
            value, worst = mean_std(finals, kind), mean_std(finals, kind, "worst_decile")
            if value is None:
                continue
            numbers = ["" if v is None else f"{v / what.scale:.6f}" for v in (*value, worst and worst[0])]
            errors = [f"{np.mean([final[kind][key] for final in finals]):.6g}" for key in extra]
            table.writerow([name, kind, *numbers, len(finals), *errors])
    return text.getvalue()


def sentences(results: Mapping[str, Finals]) -> list[str]:
    """What the numbers of a comparison say, in two or three sentences."""
    what = measure(results)
    best = {
        name: max((value[0], kind) for kind in KINDS if (value := mean_std(finals, kind)))
        for name, finals in results.items()
        if any(mean_std(finals, kind) for kind in KINDS)
    }
    said = []
    together = {name: value for name, value in best.items() if name != "alone"}
    if "alone" in best and together:
        name = max(together, key=lambda n: together[n][0])
        value, kind = together[name]
        gain = value - best["alone"][0]
        verdict = (
            "joining changes nothing on average"
            if what.level(gain)
            else f"{'joining pays' if gain > 0 else 'clients are better off alone'}, by {what.apart(gain)}"
        )
        said.append(
            f"A client that trains alone reaches {what.told(best['alone'][0])}, and the best federated "
            f"model, {name}'s {kind} one, {what.told(value)}: on this federation {verdict}."
        )
    if "pfedme" in results and (own := mean_std(results["pfedme"], "personal")):
        shared = mean_std(results["pfedme"], "global")
        assert shared is not None
        text = f"pFedMe's personal models are {_apart(own[0] - shared[0], what)} its own global model"
        if "fedavg" in results and (local := mean_std(results["fedavg"], "local")):
            text += (
                f" and {_apart(own[0] - local[0], what)} FedAvg's local models, their like: both have been "
                "adapted to the client, for a K-th of the gradients in FedAvg's case"
            )
        said.append(text + ".")
    if max(map(len, results.values()), default=0) == 1:
        said.append("This is one seed; --seeds 10 shows how much of a difference is chance.")
    return said


def offer_sentences(found: Personalized) -> list[str]:
    """What clients chose and gain, and what `harmed` means."""
    tested = ~np.isnan(found.accuracy(found.recommended))
    gains = {name: [a[tested] for a in found.gain(found.of(name))] for name in ("alone", "global")}
    return [
        *choice_sentences([found.candidates[k].name for k in found.choice], gains),
        "Harmed are clients more than one point below alone, beyond that interval.",
    ]


def choice_sentences(chosen: Sequence[str], gains: Mapping[str, Sequence[np.ndarray]]) -> list[str]:
    """What clients chose, and the gain of those who can be tested, with the half-width of its interval, over
    each of the models that `gains` names."""
    kinds = {
        "alone": "train alone",
        "global": "take the global model as it is",
        "fine-tuned": "fine-tune it",
        "given": "take pFedMe's model at the given λ",
        "personal": "take pFedMe's model at a λ of their own",
    }
    counts = [f"{chosen.count(kind)} {text}" for kind, text in kinds.items() if kind in chosen]
    said = [f"By their own validation rows {', '.join(counts)}."]
    for name, (gain, interval) in gains.items():
        mean, half = mean_interval(gain)
        sure = int((gain - interval > 0).sum()), int((gain + interval < 0).sum())
        said.append(
            f"The recommended models are {_apart(100 * mean)} {name} (± {100 * half:.1f}) in the mean over "
            f"clients; {sure[0]} of {len(gain)} gain and {sure[1]} lose beyond their own 95 % interval."
        )
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


def _apart(difference: float, what: Measure = ACCURACY) -> str:
    if what.level(difference):
        return "level with"
    return f"{what.apart(difference)} {'above' if difference > 0 else 'below'}"
