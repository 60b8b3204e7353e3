"""The content of a page, as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme import __version__
from pfedme.algorithms import PFedMe
from pfedme.engine.cost import gradients
from pfedme.engine.measure import MEASURES
from pfedme.report.html import clients
from pfedme.report.html.best import REFERENCES, best
from pfedme.report.html.find import find
from pfedme.report.html.groups import Group, estimate, grouped, number, numbers
from pfedme.report.html.ledger import OUTCOMES, took_part
from pfedme.report.html.metrics import baseline, calibration, final, others, training
from pfedme.report.html.privacy import privacy
from pfedme.report.html.question import title
from pfedme.report.html.read import Columns, Told
from pfedme.report.html.words import POOLED, UNSHARED, about, headline
from pfedme.runs.run import Run

POINTS = 200
"""At most this many points of a curve are shown."""
POINTS_IN_ALL = 6000


def document(runs: Sequence[Told]) -> dict[str, Any]:
    """The document of a page about these runs."""
    groups, notices = grouped(runs)
    problems = list(dict.fromkeys(group.problem for group in groups))
    tables = [clients.of_clients(group) for group in groups]
    offers = [(place, told) for place, group in enumerate(groups) for told in group.finished if told.offered]
    most = min(clients.MOST, clients.MOST_IN_ALL // max(1, len(groups) + len(offers)))
    beside = [(k, table) for k, group in enumerate(groups) if (table := _beside_alone(group, groups))]
    marks = best(groups)
    return {
        "version": __version__,
        "title": title(runs, groups, tables),
        "about": about(groups, tables) if groups else ["None of these runs has begun."],
        "headline": headline(groups),
        "notices": notices,
        "measures": {
            m.key: {
                "name": m.name,
                "title": m.title,
                "sign": m.sign,
                "axis": m.axis,
                "scale": m.scale,
                "digits": m.digits,
                "lower": m.lower,
            }
            for m in MEASURES.values()
        },
        "baselines": [baseline([g for g in groups if g.problem == problem]) for problem in problems],
        "groups": [
            {
                "label": group.label,
                "problem": problems.index(group.problem),
                "algorithm": group.name,
                "measure": group.measure.key,
                "of_client": group.of_client,
                "usual": group.usual.key,
                "aside": POOLED if group.name in REFERENCES else None,
                **{key: group.about_metric.get(key) or "" for key in ("why", "positive")},
                "seeds": [told.run.seed for told in group.runs],
                "finished": len(group.finished),
                "status": group.runs[0].record["status"],
                "deployed": group.deployed,
                "kinds": group.kinds,
                "final": final(group),
                "best": marked,
                "metrics": others(group),
                "calibration": calibration(group),
                "training": training(group),
                "curves": curves(group, max(20, min(POINTS, POINTS_IN_ALL // len(groups)))),
                "clients": clients.listed(table, most) if table else None,
                "cost": cost(group),
                "commands": [command(told) for told in group.runs],
            }
            for group, table, marked in zip(groups, tables, marks, strict=True)
        ],
        "unshared": UNSHARED,
        "outcomes": OUTCOMES,
        "parts": [
            {"label": group.one(told), **parts}
            for group in groups
            for told in group.runs
            if told.deployed and (parts := took_part(told))
        ],
        "find": find(groups, tables, offers, beside),
        "gains": gains(groups, offers, beside, most),
        "worst": clients.worst(groups, tables),
        "chosen": [
            {"label": groups[k].one(told), "group": k, "counts": clients.chosen(told)} for k, told in offers
        ],
        "methods": [
            {
                "label": groups[k].one(told),
                "measure": (told.verdict or {}).get("metric") or groups[k].usual.key,
                "usual": groups[k].usual.key,
                "methods": told.methods,
            }
            for k, told in offers
            if told.methods
        ],
        "columns": [{"label": groups[k].one(told), **told.columns} for k, told in offers if told.columns],
        "newcomers": [
            {"label": group.one(told), "group": k, "measure": group.usual.key, **clients.newcomers(told)}
            for k, group in enumerate(groups)
            for told in group.finished
            if told.newcomers
        ],
        "privacy": [claim for group in groups if (claim := privacy(group))],
        "environments": environments(groups),
    }


def command(told: Told) -> str:
    """The command that repeats a run; for a deployed run, the command that was given."""
    return str(told.record.get("command") or "") if told.deployed else told.run.command()


def curves(group: Group, most: int) -> dict[str, Any]:
    """The evaluations round by round: for each model and measure, the mean over seeds and its interval."""
    at = sorted({entry["round"] for history in group.histories for entry in history})
    if len(at) > most:
        at = [at[k] for k in np.unique(np.linspace(0, len(at) - 1, most).round().astype(int))]
    by_round = [{entry["round"]: entry for entry in history} for history in group.histories]
    found: dict[str, Any] = {"rounds": at}
    for kind in group.kinds:
        found[kind] = {}
        for key in (group.measure.key, "train_loss"):
            there = [[own[t].get(kind, {}).get(key) for own in by_round if t in own] for t in at]
            means = [estimate(values) for values in there]
            if any(mean is not None for mean, _ in means):
                found[kind][key] = numbers(mean for mean, _ in means)
                if any(ci is not None for _, ci in means):
                    found[kind][f"{key}_ci"] = numbers(ci for _, ci in means)
    return found


def _bytes_sent(run: Run, cost: dict[str, Any] | None, size: int | None) -> int | None:
    """Bytes that all rounds send to the clients of the cohort and back. A record without costs comes from an
    algorithm that sends a model of `size` numbers both ways."""
    if not run.algorithm.federated:
        return 0
    each = cost["down"] + cost["up"] if cost else 2 * 4 * size if size else None
    return None if each is None else run.rounds * (run.cohort or 0) * each


def cost(group: Group) -> dict[str, Any] | None:
    """Mean seconds over seeds; bytes sent by all; and gradients of a client in one round and in total."""
    if not group.finished:
        return None
    run = group.finished[0].run
    size = group.finished[0].size
    each: float = float("nan") if (told := gradients(run.algorithm)) is None else told
    if isinstance(run.algorithm, PFedMe) and run.algorithm.nu:
        steps, _ = estimate([(entry.get("inner") or {}).get("steps") for entry in group.finals])
        each = float("nan") if steps is None else run.algorithm.R * steps
    sent = _bytes_sent(run, group.finished[0].record.get("cost"), size)
    return {
        **{
            key: number(estimate([told.record["timing"][key] for told in group.finished])[0])
            # The clients of a deployed run compile and evaluate in their own time.
            if key == "train_s" or not group.deployed
            else None
            for key in ("compile_s", "train_s", "eval_s")
        },
        "size": size,
        "bytes": sent,
        "gradients": number(each),
        "gradients_in_all": number(each * run.rounds),
    }


def gains(
    groups: Sequence[Group],
    offers: Sequence[tuple[int, Told]],
    beside: Sequence[tuple[int, Columns]],
    most: int,
) -> list[dict[str, Any]]:
    """Each client's gain over training alone: with the model it chose, and with runs next to `alone`."""
    found = []
    for place, told in offers:
        key = clients.measure_of_offer(told, groups[place])
        label = f"{groups[place].one(told)}: the model each client chose"
        panel = clients.panel(clients.gain_of_offer(told, key), most)
        paired = clients.is_paired(told, key)
        found.append({"label": label, "group": place, "measure": key, "paired": paired, **panel})
    for place, table in beside:
        group = groups[place]
        label = f"{group.label}: {group.kinds[-1]} model"
        panel = clients.panel(table, most)
        found.append({"label": label, "group": place, "measure": group.of_client, "paired": False, **panel})
    return [panel for panel in found if panel["mean"] is not None]


def _beside_alone(group: Group, groups: Sequence[Group]) -> Columns | None:
    """What each client gains with a group's last model over a run of `alone`, if there is one."""
    rival = _alone(group, groups)
    return clients.gain_over_alone(group, rival) if rival else None


def _alone(group: Group, groups: Sequence[Group]) -> Group | None:
    """The runs of `alone` to compare a group with: the most accurate ones, which joining has to beat."""
    if group.name in ("alone", *REFERENCES) or not group.finals:
        return None
    like = [g for g in groups if g.name == "alone" and g.finals and g.problem == group.problem]
    like = [g for g in like if (g.of_client, g.measure) == (group.of_client, group.measure)]
    values = [estimate([g.measure.of(final["personal"]) for final in g.finals])[0] for g in like]
    known = [(value, k) for k, value in enumerate(values) if value is not None]
    return like[max((group.measure.orientation * v, k) for v, k in known)[1]] if known else None


def environments(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The environments that produced the numbers, and the groups that used them."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for told in group.runs:
            about = {"pfedme": told.record.get("version"), **told.record.get("environment", {})}
            facts = {k: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in about.items()}
            own = found.setdefault(json.dumps(facts), {"facts": facts, "groups": []})
            if group.label not in own["groups"]:
                own["groups"].append(group.label)
    return list(found.values())
