"""What a page says in words: its title, what was run, and whether joining pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme.report.html.groups import Group, data_text, estimate, option
from pfedme.report.html.read import Columns, Told
from pfedme.report.measure import ACCURACY, R2
from pfedme.report.tables import choice_sentences, data_name, sentences

UNSHARED = "Clients did not share their scores"


def title(runs: Sequence[Told]) -> str:
    """Which algorithms ran on which data."""
    names = list(dict.fromkeys(told.run.algorithm.name for told in runs))
    data = list(dict.fromkeys(data_name(told.record["config"]["data"]) for told in runs))
    return f"{_and(names)} on {_and(data)}"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def about(groups: Sequence[Group], tables: Sequence[Columns | None]) -> list[str]:
    """What was run, in words; a sentence or three for each problem."""
    said = []
    for problem in dict.fromkeys(group.problem for group in groups):
        own = [k for k, group in enumerate(groups) if group.problem == problem]
        runs = [told for k in own for told in groups[k].runs]
        first = runs[0]
        kind = first.record["config"]["model"]["name"]
        linear = "Linear regression" if groups[own[0]].measure is R2 else "Softmax regression"
        networks = {"dnn": "A neural network", "cnn": "A convolutional network"}
        if not any(groups[k].entries for k in own) and first.deployed:
            linear = "A linear model"  # Which of the two only scores would tell.
        model = {"mlr": linear, **networks}.get(kind, "A model")
        names = list(dict.fromkeys(groups[k].name for k in own))
        rounds = sorted({told.run.rounds for told in runs})
        cohort = sorted({told.run.cohort or 0 for told in runs if told.run.algorithm.has_global} - {0})
        drawn = f", {_span(cohort)} clients drawn for each" if cohort else ""
        seeds = sorted({told.run.seed for told in runs})
        text = (
            f"{model} ({option(first, '--model')}) on {data_text(first)}, trained by {_and(names)} "
            f"for {_span(rounds)} rounds{drawn}; seed{'s' if len(seeds) > 1 else ''} "
            f"{_and([str(s) for s in seeds])}."
        )
        if first.run.holdout_clients:
            text += f" {100 * first.run.holdout_clients:g} % of the clients were held out as newcomers."
        table = next((tables[k] for k in own if tables[k] is not None), None)
        if table is not None and len(table["client"]):
            n = table["n_train"]
            who = (
                f"client{'' if len(n) == 1 else 's'}{' that shared their scores,' if first.deployed else ''}"
            )
            text += (
                f" {len(n):,} {who} with {_span(n.tolist())} training rows each "
                f"({n.sum():,.0f} in all), judged by {table['n_test'].sum():,.0f} test rows."
            )
        said.append(text)
    return said


def headline(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Whether joining pays, as far as these runs tell: for each problem a sentence that leads, and others."""
    said = []
    for problem in dict.fromkeys(group.problem for group in groups):
        own = [group for group in groups if group.problem == problem and group.finals]
        offers = [(group, told) for group in own for told in group.finished if told.offered]
        lines = [line for group, told in offers for line in _offer(group, told, len(offers) > 1)]
        names = [group.name for group in own]
        compared = {g.name if names.count(g.name) == 1 else g.label: g.finals for g in own}
        if len(own) > 1:
            # Another seed of a deployed run is not to be had by an option.
            lines += [line for line in sentences(compared) if not (own[0].deployed and "--seeds" in line)]
        elif own:
            lines += _standing(own[0])
        silent = [g for g in groups if g.problem == problem and g.finished and not g.finals]
        if silent:
            lines.append(f"{UNSHARED}: how well {_and([g.label for g in silent])} does, only they know.")
        own = own or silent
        if own and own[0].deployed:
            lines.append("Whether joining pays is for each client to see, beside what it reaches alone.")
        elif own and not offers and "alone" not in names:
            lines.append(
                "Whether joining pays these runs do not tell: that takes alone beside them, as in 'pfedme "
                f"compare {names[0]} alone', or --personalize auto."
            )
        if lines:
            where = own[0].where.strip()
            said.append({"where": where[:1].upper() + where[1:], "lead": lines[0], "rest": lines[1:]})
    nothing = {"where": "", "lead": "There is no result yet: none of these runs has finished.", "rest": []}
    return said or [nothing]


def _offer(group: Group, told: Told, several: bool) -> list[str]:
    assert told.offered is not None
    tested = ~np.isnan(told.offered["gain_over_alone"])
    if not tested.any():
        return []
    over = {
        name: [told.offered[f"gain_over_{name}{suffix}"][tested] for suffix in ("", "_ci95")]
        for name in ("alone", "global")
    }
    choices = choice_sentences(told.offered["choice"].tolist(), over)
    if group.measure is not ACCURACY:
        return choices[:1]
    mean = float(over["alone"][0].mean())
    verdict = (
        "joining changes nothing on average"
        if ACCURACY.level(100 * mean)
        else f"{'joining pays' if mean > 0 else 'clients are better off alone'}, by "
        f"{ACCURACY.apart(100 * mean)} in the mean over clients"
    )
    where = f" ({group.one(told)})" if several else ""
    return [f"With the model that each client chooses for itself, {verdict}{where}.", *choices]


def _standing(group: Group) -> list[str]:
    """Where the models of a single method stand."""
    what, said = group.measure, []
    for kind in reversed(group.kinds):
        value, _ = estimate([what.of(entry[kind]) for entry in group.finals])
        if value is not None:
            one = kind == "global"
            verb = "" if said else " reaches" if one else " reach"
            owner = "its" if said else f"{group.name}'s"
            said.append(f"{owner} {kind} model{'' if one else 's'}{verb} {what.told(value)}")
    if not said:
        return ["No client has test rows, so that no model can be judged."]
    return [f"Over all test rows {_and(said)}."]
