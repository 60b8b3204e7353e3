"""Which model in a column is best beyond noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pfedme.engine.measure import MEASURES
from pfedme.engine.verdict import interval
from pfedme.report.html.groups import Group, number_of

REFERENCES = ("pooled",)
"""Algorithms that are shown for reference, and do not compete with the others."""


def best(groups: Sequence[Group]) -> list[dict[str, bool]]:
    """For each group, the kinds of model in which it is better than all others on its problem.

    Better means: with every seed, above the baseline, and with the 98 % interval of the difference over
    clients and seeds, the one of the verdict, above zero. If the folders do not have clients' scores, nothing
    is marked.
    """
    found: list[dict[str, bool]] = []
    for group in groups:
        rivals = [other for other in groups if other is not group and _competes(other, group)]
        mine: dict[str, bool] = {}
        for kind in group.kinds if group.finals and group.name not in REFERENCES else []:
            others = [other for other in rivals if kind in other.kinds]
            ahead = (_always(group, other, kind) and _beyond(group, other, kind) for other in others)
            mine[kind] = bool(others) and _learned(group, kind) and all(ahead)
        found.append(mine)
    return found


def _competes(other: Group, group: Group) -> bool:
    return other.problem == group.problem and bool(other.finals) and other.name not in REFERENCES


def _learned(group: Group, kind: str) -> bool:
    """Whether a model is above the baseline wherever there is one."""
    sign, key = group.measure.orientation, group.measure.key
    for final in group.finals:
        mine, least = number_of(final[kind], key), number_of(final.get("baseline") or {}, key)
        if mine is None or (least is not None and sign * mine <= sign * least):
            return False
    return True


def _always(group: Group, other: Group, kind: str) -> bool:
    """Whether a model is better over all rows than another group's, with every seed that both have."""
    if group.measure is not other.measure:
        return False
    sign, key = group.measure.orientation, group.measure.key
    theirs = {told.run.seed: told.record["final"] for told in other.finished}
    values = [
        (number_of(told.record["final"][kind], key), number_of(theirs[told.run.seed][kind], key))
        for told in group.finished
        if told.run.seed in theirs
    ]
    return bool(values) and all(a is not None and b is not None and sign * (a - b) > 0 for a, b in values)


def _beyond(group: Group, other: Group, kind: str) -> bool:
    """Whether the interval of the difference over clients and seeds lies above zero."""
    theirs = {told.run.seed: told.clients for told in other.finished}
    pairs = [(told.clients, theirs[told.run.seed]) for told in group.finished if told.run.seed in theirs]
    tables = [table for pair in pairs for table in pair]
    columns = [group.measure.key, *(["rmse"] if group.measure.key == "r2" else [])]
    there = [key for key in columns if all(t is not None and f"{kind}_{key}" in t for t in tables)]
    if not pairs or not there:
        return False
    everyone = np.unique(np.concatenate([table["client"] for table in tables if table]).astype(str))
    gains = np.full((len(pairs), len(everyone)), np.nan)
    for row, pair in zip(gains, pairs, strict=True):
        scores = [np.full(len(everyone), np.nan) for _ in pair]
        for score, table in zip(scores, pair, strict=True):
            assert table is not None
            score[np.searchsorted(everyone, table["client"].astype(str))] = table[f"{kind}_{there[0]}"]
        row[:] = MEASURES[there[0]].orientation * (scores[0] - scores[1])
    gains = gains[:, ~np.isnan(gains).all(axis=0)]
    return gains.shape[1] > 1 and interval(gains).sign > 0
