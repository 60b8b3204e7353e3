"""Tables and sentences from the results of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfedme.engine.measure import ACCURACY, Measure, measure_of
from pfedme.engine.metrics import mean_interval
from pfedme.engine.verdict import PERCENT, Gains, Interval, Verdict, signed

if TYPE_CHECKING:
    from pfedme.engine.personalized import Personalized
    from pfedme.personalization.finished import Level
    from pfedme.runs.scores import Recommended

KINDS = ("global", "local", "personal")
Finals = Sequence[Mapping[str, Any]]
"""The `final` entries of runs that differ only in their seed."""


def data_name(data: Mapping[str, Any]) -> str:
    """A readable name for the data that a record describes: a name, or a table's file and its label.

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
    return f"{Path(data['path']).name}{label}" if data["name"] in ("table", "mapped") else data["name"]


def measure(results: Mapping[str, Finals]) -> Measure:
    """The metric by which the models of a comparison are judged."""
    return next((measure_of(final) for finals in results.values() for final in finals), ACCURACY)


def seed_values(finals: Finals, kind: str, of_clients: str | None = None) -> list[float] | None:
    """A model's accuracy in percent, or another metric, one value per seed; or a statistic `of_clients`, such
    as their `worst_decile`. None if it does not exist."""
    values = []
    for final in finals:
        entry, what = final.get(kind, {}), measure_of(final)
        value = what.of_clients(entry, of_clients) if of_clients else what.of(entry)
        if value is None:
            return None
        values.append(value)
    return values or None


def mean_std(finals: Finals, kind: str, of_clients: str | None = None) -> tuple[float, float] | None:
    """Mean and standard deviation of `seed_values`; None if they do not exist."""
    values = seed_values(finals, kind, of_clients)
    if values is None:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def mean_half(finals: Finals, kind: str, of_clients: str | None = None) -> tuple[float, float] | None:
    """The mean over seeds, and the half-width of its 95 % interval by Student's t."""
    values = seed_values(finals, kind, of_clients)
    return None if values is None else mean_interval(np.array(values))


def shown(value: tuple[float, float] | None, seeds: int, what: Measure = ACCURACY) -> str:
    """`83.21` or `83.21 ± 0.12`; a dash for None."""
    if value is None:
        return "–"
    return " ± ".join(what.text(number) for number in (value if seeds > 1 else value[:1]))


def rows(results: Mapping[str, Finals], best: Set[tuple[str, str]] = frozenset()) -> list[list[str]]:
    """For each algorithm: its name, the metric of its three models, and that of the worst tenth with the last
    model; then the baseline. Each (algorithm, model) in `best` has a star."""
    table, what = [], measure(results)
    starred = {kind for _, kind in best}
    stars = {kind: ("  ", " *") if kind in starred else ("", "") for kind in KINDS}
    for name, finals in results.items():
        if not finals:
            table.append([name, *["diverged"] * 4])
            continue
        last = [kind for kind in KINDS if kind in finals[0]][-1]
        values = [shown(mean_half(finals, kind), len(finals), what) for kind in KINDS]
        values = [v + stars[kind][(name, kind) in best] for v, kind in zip(values, KINDS, strict=True)]
        table.append([name, *values, shown(mean_half(finals, last, "worst_decile"), len(finals), what)])
    first = next((final for finals in results.values() for final in finals if "baseline" in final), None)
    if first is not None:
        table.append([baseline_name(first), *baseline_cells(first)])
    return table


def baseline_name(final: Mapping[str, Any]) -> str:
    """The name of the baseline, which needs no learning.

    >>> baseline_name({"baseline": {"label": "no"}}), baseline_name({"baseline": {"label": 3.25}})
    ("always 'no'", 'the mean')
    """
    label = final["baseline"]["label"]
    return f"always '{label}'" if isinstance(label, str) else "the mean"


def baseline_cells(final: Mapping[str, Any]) -> list[str]:
    """The numbers of the baseline in `rows`."""
    what, entry = measure_of(final), final["baseline"]
    return [what.text(what.of(entry)), "–", "–", what.text(what.of_clients(entry, "worst_decile"))]


def header(results: Mapping[str, Finals]) -> list[str]:
    """The columns of `rows`."""
    return ["algorithm", *(f"{title} {measure(results).sign}" for title in (*KINDS, "worst tenth"))]


def clearly_best(values: Mapping[str, np.ndarray], lower: bool = False) -> str | None:
    """The method that is better than every other beyond noise, from one value for each client; None if there
    is no such method.

    The difference from each other method is paired over the clients for which both have a value, and the
    lower end of the 95 % interval of its mean must be above zero.

    >>> clearly_best({"a": np.array([3.0, 4, 5]), "b": np.array([1.0, 2.1, 2.9]), "c": np.zeros(3)})
    'a'
    >>> clearly_best({"a": np.array([3.0, 4, 5]), "b": np.array([1.0, 9, 1])}) is None
    True
    """
    if len(values) < 2:
        return None
    sign = -1 if lower else 1

    def beats(mine: np.ndarray, other: np.ndarray) -> bool:
        difference = sign * (mine - other)
        difference = difference[~np.isnan(difference)]
        if len(difference) < 2:
            return False
        mean, half = mean_interval(difference)
        return mean - half > 0

    return next(
        (
            name
            for name, mine in values.items()
            if all(beats(mine, other) for rival, other in values.items() if rival != name)
        ),
        None,
    )


def comparison_csv(results: Mapping[str, Finals]) -> str:
    """algorithm, evaluated, mean, std, worst_decile, seeds: a row for each model, accuracies as fractions.

    If models are judged by another metric, the numbers are of that one; the last column names the metric. In
    a regression there is also the mean of `rmse` over seeds. `half_width` is that of a 95 % interval of the
    mean.
    """
    text, what = io.StringIO(), measure(results)
    table = csv.writer(text, lineterminator="\n")
    extra = [] if what.task == "classification" else ["rmse"]
    table.writerow(
        ["algorithm", "evaluated", "mean", "std", "worst_decile", "seeds", *extra, "half_width", "metric"]
    )
    for name, finals in results.items():
        for kind in KINDS:
            value, worst = mean_std(finals, kind), mean_std(finals, kind, "worst_decile")
            half = mean_half(finals, kind)
            if value is None or half is None:
                continue
            numbers = ["" if v is None else f"{v / what.scale:.6f}" for v in (*value, worst and worst[0])]
            errors = []
            for key in extra:
                known = [final[kind][key] for final in finals if key in final[kind]]
                errors.append(f"{np.mean(known):.6g}" if known else "")
            table.writerow(
                [name, kind, *numbers, len(finals), *errors, f"{half[1] / what.scale:.6f}", what.key]
            )
    return text.getvalue()


def sentences(results: Mapping[str, Finals], verdict: Verdict | None = None) -> list[str]:
    """What the numbers of a comparison say besides its verdict; no difference is claimed here."""
    what, said = measure(results), []
    if verdict and verdict.gaining is not None:
        said.append(f"{_clients_beyond(verdict.gaining, verdict.losing or 0, verdict.clients)}.")
    together = [name for name in results if name not in ("alone", "pooled", "recommended")]
    if (alone := _best(results, ["alone"])) and (other := _best(results, together)):
        said.append(
            f"Over all test rows, training alone reaches {what.told(alone[0])}, and the best federated "
            f"model, {other[1]}'s {other[2]} model, reaches {what.told(other[0])}."
        )
    if "pfedme" in results and (own := mean_std(results["pfedme"], "personal")):
        shared = mean_std(results["pfedme"], "global")
        assert shared is not None
        text = f"pFedMe's personal models reach {what.told(own[0])}, its global model {what.told(shared[0])}"
        if "fedavg" in results and (local := mean_std(results["fedavg"], "local")):
            text += (
                f", and FedAvg's local models, the fair comparison, which use 1/K of the gradients, "
                f"{what.told(local[0])}"
            )
        said.append(text + ".")
    if max(map(len, results.values()), default=0) == 1:
        said.append("This is one seed; --seeds 5 shows how much depends on the seed.")
    return said


def recommended_sentence(found: Recommended) -> str:
    """What the models are that clients have chosen, and what they gain over the others that were offered."""
    what, gains = found.measure, []
    for name in ("alone", "global"):
        seeds = [document["gain"][name] for document in found.documents]
        if not all(seeds):
            continue
        mean = float(np.mean([gain["mean"] for gain in seeds]))
        text = f"{what.points.format(signed(mean, what))} over {name}"
        if len(seeds) == 1:
            low, high = (signed(mean + side * seeds[0]["ci95"], what) for side in (-1, 1))
            text += f" (95 % interval {low} to {high})"
        gains.append(text)
    return (
        f"recommended: what each client chooses on validation rows, from {found.method}'s shared model, "
        f"models near it, and its own; {', '.join(gains) or 'its gain is not known'}."
    )


def _best(results: Mapping[str, Finals], names: Sequence[str]) -> tuple[float, str, str] | None:
    """The highest score of the models of some methods, with the method and the kind of model."""
    known = [
        (value[0], name, kind)
        for name in names
        for kind in KINDS
        if name in results and (value := mean_std(results[name], kind))
    ]
    return max(known, default=None)


def offer_sentences(found: Personalized) -> list[str]:
    """What clients chose and what they gain, and what `harmed` means."""
    gains = {name: found.gains(name) for name in ("alone", "global")}
    point, beyond = "point", "that interval"
    if found.metric:
        point, beyond = f"point of {found.usual.name}", "the 95 % interval of their own test rows"
    return [
        *choice_sentences([found.candidates[k].name for k in found.choice], gains, found.measure),
        f"Harmed: clients more than one {point} below alone, beyond {beyond}.",
    ]


def privacy_sentences(told: dict[str, Any]) -> list[str]:
    """What the section `privacy` of a record claims, in words."""
    unit, spent = told["unit"], told.get("spent", told["epsilon"])
    largest = spent["max"] if isinstance(spent, dict) else spent
    said = [
        f"Differential privacy of {unit}: ε = {largest:.4g} of at most {told['epsilon']:g}, at δ = "
        f"{told['delta']:g}, over the whole run ({told['relation']})."
        + (" It is simulated: the noise comes from the seed, which is known." if told["simulated"] else ""),
        f"Sampling: {told['sampling']}. Accountant: {told['accountant']}.",
        *([f"Covered: {told['covered']}."] if "covered" in told else []),
        f"Not covered: {'; '.join(told['not_covered'])}.",
    ]
    return said + ([told["warning"]] if told.get("warning") else [])


def choice_sentences(
    chosen: Sequence[str], gains: Mapping[str, Gains], what: Measure = ACCURACY
) -> list[str]:
    """What clients chose, and the gain over each of the models in `gains` for the clients for which it is
    known."""
    kinds = {
        "alone": "train alone",
        "global": "take the global model as it is",
        "label-prior": "take it with their own label frequencies",
        "near-label-prior": "take a model near that one",
        "cluster": "take the model of their cluster",
        "cluster-label-prior": "take that with their own label frequencies",
        "near-cluster": "take a model near that of their cluster",
        "near-cluster-label-prior": "take a model near that of their cluster with their label frequencies",
        "fine-tuned": "fine-tune it",
        "given": "take pFedMe's model at the given λ",
        "personal": "take pFedMe's model at their own λ",
    }
    kinds |= {name: f"take {name}'s personal model" for name in sorted({*chosen} - {*kinds})}
    counts = [f"{chosen.count(kind)} {text}" for kind, text in kinds.items() if kind in chosen]
    said = [f"Judged on their own validation rows, {', '.join(counts)}."]
    for name, every in gains.items():
        if (found := every.mean()) is None:
            continue
        gain, noise, _ = every.known()
        mean, low, high = (signed(value, what) for value in found)
        unit = what.points.format("").strip() or f"in {what.name}"
        size = f"a gain of {mean} {unit}" if what.lower else f"{mean} {unit}"
        side = {1: "better than", -1: "worse than"} if what.lower else {1: "above", -1: "below"}
        where = (
            f"are {what.apart(what.scale * found.mean)} {side[found.sign]} {name} on average over clients,"
            if found.sign
            else f"cannot be distinguished from {name} on average over clients: {size},"
        )
        said.append(f"The recommended models {where} {PERCENT} interval {low} to {high}.")
        if noise is not None:
            gaining, losing = (int((side > 1.96 * noise).sum()) for side in (gain, -gain))
            said[-1] += f" {_clients_beyond(gaining, losing, len(gain))}."
    return said


def _clients_beyond(gaining: int, losing: int, clients: int) -> str:
    return (
        f"{gaining} of {clients} clients gain and {losing} lose{'s' if losing == 1 else ''} beyond the 95 % "
        "interval of their own test rows"
    )


def newcomer_sentence(levels: Sequence[Level]) -> str:
    """With how many rows joining pays for newcomers, as far as the intervals show."""
    signs = {level.rows: Interval(**level.gain).sign if level.gain else 0 for level in levels}

    def rows(sign: int) -> str:
        return ", ".join(str(n) for n, own in signs.items() if own == sign)

    said = [
        f"{text} {rows(sign)} rows"
        for sign, text in (
            (1, "joining pays for newcomers with"),
            (-1, "alone is better with"),
            (0, "it is undecided with"),
        )
        if rows(sign)
    ]
    return f"By the {PERCENT} interval over newcomers, {'; '.join(said)}."
