"""The sentences of a page: what was run, and whether joining pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfedme.engine.measure import ACCURACY, R2
from pfedme.report.html.groups import Group, data_text, estimate, number, option
from pfedme.report.html.read import Columns, Told
from pfedme.report.tables import choice_sentences

UNSHARED = "Clients did not share their scores"


POOLED = "what one central table would give (simulation only)"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def about(groups: Sequence[Group], tables: Sequence[Columns | None]) -> list[str]:
    """What was run, in words; up to three sentences for each problem."""
    said = []
    for problem in dict.fromkeys(group.problem for group in groups):
        own = [k for k, group in enumerate(groups) if group.problem == problem]
        runs = [told for k in own for told in groups[k].runs]
        first = runs[0]
        kind = first.record["config"]["model"]["name"]
        linear = "Linear regression" if groups[own[0]].usual is R2 else "Softmax regression"
        networks = {
            "dnn": "A neural network",
            "dnn-bn": "A neural network with batch normalisation",
            "cnn": "A convolutional network",
        }
        if not any(groups[k].entries for k in own) and first.deployed:
            linear = "A linear model"  # Only scores would show which of the two it is.
        model = {"mlr": linear, **networks}.get(kind, "A model")
        names = list(dict.fromkeys(groups[k].name for k in own))
        rounds = sorted({told.run.rounds for told in runs})
        cohort = sorted({told.run.cohort or 0 for told in runs if told.run.algorithm.federated} - {0})
        drawn = f", {_span(cohort)} clients drawn for each" if cohort else ""
        seeds = sorted({told.run.seed for told in runs})
        text = (
            f"{model} ({option(first, '--model')}) on {data_text(first)}, trained with {_and(names)} "
            f"for {_span(rounds)} rounds{drawn}; seed{'s' if len(seeds) > 1 else ''} "
            f"{_and([str(s) for s in seeds])}."
        )
        if first.run.holdout_clients:
            text += f" Held out as newcomers: {first.run.held_out}."
        table = next((tables[k] for k in own if tables[k] is not None), None)
        if table is not None and len(table["client"]):
            n = table["n_train"]
            who = (
                f"client{'' if len(n) == 1 else 's'}{' that shared their scores,' if first.deployed else ''}"
            )
            text += (
                f" {len(n):,} {who} with {_span(n.tolist())} training rows each "
                f"({n.sum():,.0f} in total), judged on {table['n_test'].sum():,.0f} test rows."
            )
        said.append(text)
    return said


def headline(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Whether joining pays, as far as these runs show: for each problem its verdicts, a leading sentence if
    there are none, and further sentences."""
    said = []
    for problem in dict.fromkeys(group.problem for group in groups):
        every = [group for group in groups if group.problem == problem]
        own = [group for group in every if group.finals]
        silent = [group for group in every if group.finished and not group.finals]
        verdicts = _verdicts(own)
        lines = [line for group in own for told in group.finished for line in _chosen(group, told)]
        if len(own) == 1 and not verdicts:
            lines += _standing(own[0])
        if silent:
            lines.append(f"{UNSHARED}: only they know how well {_and([g.label for g in silent])} does.")
        own = own or silent
        if not own:
            continue
        lead = [] if verdicts else [_unknown(own)] if own[0].finals or not silent else []
        if own[0].deployed:
            lines.append("Each client can see whether joining pays by comparing with what it reaches alone.")
            lead = []
        lines = [*lead, *lines]
        where = own[0].where.strip()
        said.append(
            {
                "where": where[:1].upper() + where[1:],
                "verdicts": verdicts,
                "lead": None if verdicts else lines[0],
                "rest": lines if verdicts else lines[1:],
                "improving": _improving(own),
            }
        )
    nothing = "There is no result yet: none of these runs has finished."
    return said or [{"where": "", "verdicts": [], "lead": nothing, "rest": [], "improving": ""}]


def _verdicts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The verdicts of comparisons, and of models that clients chose."""
    compared = {
        told.compared.path: told.compared.verdict
        for group in groups
        for told in group.finished
        if told.compared and told.compared.verdict
    }
    found = [(verdict, "") for verdict in compared.values()]
    found += [
        (told.verdict, f"the model that each client of {group.one(told)} chose")
        for group in groups
        for told in group.finished
        if told.verdict
    ]
    return [
        {
            **{key: verdict.get(key) for key in ("verdict", "clients", "gaining", "losing")},
            **{key: number(verdict.get(key)) for key in ("gain", "low", "high", "level")},
            "metric": str(verdict.get("metric") or ACCURACY.key),
            "joined": str(verdict.get("joined") or joined),
            "why": str(verdict.get("why") or ""),
        }
        for verdict, joined in found
    ]


def _unknown(groups: Sequence[Group]) -> str:
    """Why finished runs have no verdict."""
    unknown = "These runs cannot show whether joining pays"
    names = [group.name for group in groups]
    offered = any(told.offered for group in groups for told in group.finished)
    if "alone" not in names and not offered:
        takes = f"'pfedme compare {names[0]} alone', or --personalize auto"
        return f"{unknown}: that needs runs of alone to compare with, as in {takes}."
    return f"{unknown}: they have no interval for the gain over clients; 'pfedme compare' computes one."


def _improving(groups: Sequence[Group]) -> str:
    """Which runs were still getting better when training ended."""
    names = [
        group.label
        for group in groups
        if any((told.record.get("auto") or {}).get("improving") for told in group.finished)
    ]
    if not names:
        return ""
    verb = "was" if len(names) == 1 else "were"
    return f"{_and(names)} {verb} still improving when training ended: more rounds may change the answer."


def _chosen(group: Group, told: Told) -> list[str]:
    """What clients chose."""
    if told.offered is None:
        return []
    return choice_sentences(told.offered["choice"].tolist(), {})


def _standing(group: Group) -> list[str]:
    """How well the models of a single method do."""
    what, said = group.measure, []
    for kind in reversed(group.kinds):
        value, _ = estimate([what.of(entry[kind]) for entry in group.finals])
        if value is not None:
            one = kind == "global"
            verb = "" if said else " reaches" if one else " reach"
            owner = "its" if said else f"{group.name}'s"
            said.append(f"{owner} {kind} model{'' if one else 's'}{verb} {what.told(value)}")
    if not said:
        return ["No client has test rows, so no model can be judged."]
    return [f"Over all test rows, {_and(said)}."]
