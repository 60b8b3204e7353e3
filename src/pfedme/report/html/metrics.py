"""The models' scores on a page: the chosen metric, the others, the baseline, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pfedme.engine.measure import R2
from pfedme.report.html.groups import Group, estimate, number, number_of, numbers
from pfedme.report.tables import privacy_sentences

CLASSES = ("accuracy", "log_loss", "auc", "balanced_accuracy", "recall", "precision", "f1", "brier")
QUANTITIES = ("r2", "rmse", "mae")


def final(group: Group) -> dict[str, Any]:
    """The result of each model, with its interval, over all rows and for the worst tenth of clients."""
    key, found = group.measure.key, {}
    for kind in group.kinds if group.finals else []:
        own = [entry[kind] for entry in group.finals]
        value, ci = with_interval(own, key)
        worst, worst_ci = estimate([of_clients(entry, key, "worst_decile") for entry in own])
        found[kind] = {
            "value": number(value), "ci": number(ci), "worst": number(worst), "worst_ci": number(worst_ci),
        }  # fmt: skip
    return found


def with_interval(entries: Sequence[Mapping[str, Any]], key: str) -> tuple[float | None, float | None]:
    """The mean of a metric over seeds and the half-width of its 95 % interval; for a single run, the interval
    over its test rows, if the record has it."""
    named = [{"log_loss": entry.get("loss"), **entry} for entry in entries]
    value, ci = estimate([number_of(entry, key) for entry in named])
    if len(entries) == 1 and value is not None:
        ci = number_of(entries[0].get("half_width") or {}, key)
    return value, ci


def of_clients(entry: Mapping[str, Any], key: str, what: str) -> float | None:
    """A metric's mean over clients, or over the tenth of them for which a model does worst."""
    clients = entry.get("clients") if key in ("accuracy", "r2") else (entry.get("by_client") or {}).get(key)
    return number_of(clients or {}, what)


def others(group: Group) -> dict[str, Any]:
    """Every metric of each model, and the half-width of its interval: `{kind: {key: [value, ci]}}`."""
    keys = QUANTITIES if group.usual is R2 else CLASSES
    found = {}
    for kind in (*group.kinds, "baseline"):
        entries = [final[kind] for final in group.finals if final.get(kind)]
        if entries and len(entries) == len(group.finals):
            found[kind] = {key: numbers(with_interval(entries, key)) for key in keys}
    return found


def baseline(groups: Sequence[Group]) -> dict[str, Any] | None:
    """The baseline, which needs no learning: the majority class or the mean, from the first run with one."""
    for group in groups:
        for entry in group.finals:
            if own := entry.get("baseline"):
                name = "mean" if group.usual is R2 else "majority class"
                label = own.get("label")
                return {
                    "name": name,
                    "label": f"{label:.4g}" if isinstance(label, float) else label and str(label),
                    "measure": group.measure.key,
                    "value": number(number_of(own, group.measure.key)),
                    "of_client": number(number_of(own, group.of_client)),
                    "mean": number(of_clients(own, group.measure.key, "mean")),
                    "worst": number(of_clients(own, group.measure.key, "worst_decile")),
                }
    return None


def calibration(group: Group) -> dict[str, Any]:
    """For each model its bins: predicted and observed frequencies and rows; several seeds are pooled if they
    have the same bins, otherwise the first seed is used."""
    found = {}
    for kind in group.kinds if group.finals else []:
        each = [final[kind].get("calibration") for final in group.finals]
        if not each or not all(each):
            continue
        seeds = [[bin for bin in own if bin["rows"]] for own in each]
        if len({len(own) for own in each}) == 1:
            seeds = [_pooled(bins) for bins in zip(*each, strict=True) if any(b["rows"] for b in bins)]
        else:
            seeds = seeds[0]
        found[kind] = [{key: number(bin[key]) for key in ("predicted", "observed", "rows")} for bin in seeds]
    return {kind: bins for kind, bins in found.items() if bins}


def _pooled(bins: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The bins of several seeds, combined into one."""
    known = [bin for bin in bins if bin["rows"]]
    rows = sum(bin["rows"] for bin in known)
    mean = {key: sum(b["rows"] * b[key] for b in known) / rows for key in ("predicted", "observed")}
    return {**mean, "rows": rows / len(bins)}


def training(group: Group) -> list[dict[str, Any]]:
    """How step sizes and rounds were chosen, in the record's own sentences, and what is claimed about
    privacy; one list for seeds that agree."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for told in group.runs:
        auto = told.record.get("auto") or {}
        private = told.record.get("privacy") or told.deployment.get("privacy")
        claims = privacy_sentences(private) if private else []
        key = (bool(auto.get("improving")), *auto.get("sentences", ()), *claims)
        if auto or claims:
            found.setdefault(key, []).append(told.run.seed)
    return [
        {"seeds": seeds, "improving": improving, "sentences": list(sentences)}
        for (improving, *sentences), seeds in found.items()
    ]
