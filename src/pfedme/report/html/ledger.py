"""What a page shows about who took part in the rounds of a deployed run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np

from pfedme.report.html.clients import short
from pfedme.report.html.groups import number
from pfedme.report.html.read import Told
from pfedme.runs.ledger import Outcome

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
COLUMNS = 60
"""At most this many columns of a grid; with more rounds, a column stands for several."""
ROWS = 60
"""At most this many clients in a grid."""
CELLS = 2000
"""At most this many rectangles in a grid."""
LISTED = 500
"""At most this many clients in the table."""
NAMED = 12
"""At most this many lines in a list of problems."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A client's contribution to a round over all attempts; the last one counts."""

    client: str
    round: int
    tries: int
    outcome: Outcome
    reason: str
    rows: float
    norm: float
    """‖w_i − w‖ as it arrived; NaN if nothing did."""
    clipped: float
    """The norm that it was shortened to; NaN if it was not."""
    effect: float
    """(‖step‖ − ‖step without the client‖) / ‖step‖; NaN if it was not counted."""


def shares(told: Told) -> list[Share]:
    """The contributions in a ledger, in the order in which they were first requested."""
    table = told.ledger or {}
    lines: dict[tuple[str, int], list[int]] = {}
    for place, key in enumerate(zip(table.get("client", ()), table.get("round", ()), strict=True)):
        lines.setdefault((str(key[0]), int(key[1])), []).append(place)
    found = []
    for (client, t), tries in lines.items():
        last = {name: column[tries[-1]] for name, column in table.items()}
        step = last["step"]
        found.append(
            Share(
                client, t, len(tries), last["outcome"], last["reason"], last["rows"], last["norm"],
                last["clipped"], (step - last["without"]) / step if step > 0 else float("nan"),
            )
        )  # fmt: skip
    return found


def took_part(told: Told) -> dict[str, Any] | None:
    """Who took part in a run: a grid, a table, and who was refused or dropped; None if unknown."""
    if (told.deployment.get("privacy") or {}).get("unit") == "clients":
        return None  # who took part in which round must stay at the server
    all_shares = shares(told)
    refused = told.deployment.get("refused", {})
    if not all_shares and not refused:
        return None
    members = told.deployment.get("members") or told.deployment.get("clients", ())  # a region is a member
    names = list(dict.fromkeys([*members, *(s.client for s in all_shares)]))
    own: dict[str, list[Share]] = {name: [] for name in names}
    for share in all_shares:
        own[share.client].append(share)
    # If there is no room for all, clients with problems come first.
    wrong = {name: sum(s.outcome != "counted" for s in parts) for name, parts in own.items()}
    first = sorted(names, key=lambda name: -wrong[name])
    kept = set(first[:LISTED])
    tries: dict[int, int] = {}
    for share in all_shares:
        tries[share.round] = max(share.tries, tries.get(share.round, 0))
    return {
        "rounds": len(tries),
        "repeated": sum(count > 1 for count in tries.values()),
        "outcomes": _counts(all_shares),
        "clients": len(names),
        "grid": grid(own, [name for name in names if name in set(first[:ROWS])]),
        "table": [_line(name, own[name]) for name in names if name in kept],
        "refused": _listed({"client": short(name), "reason": why} for name, why in refused.items()),
        **{outcome: _listed(named(told, outcome)) for outcome in ("dropped", "failed")},
        "shortened": sum(not np.isnan(share.clipped) for share in all_shares),
    }


def _counts(parts: Iterable[Share]) -> list[int]:
    outcomes = [share.outcome for share in parts]
    return [outcomes.count(outcome) for outcome in OUTCOMES]


def _mean(values: Iterable[float]) -> float | int | None:
    known = [v for v in values if not np.isnan(v)]
    return number(float(np.mean(known))) if known else None


def _rows(parts: Sequence[Share]) -> float | int | None:
    return next((number(s.rows) for s in reversed(parts) if not np.isnan(s.rows)), None)


def _line(name: str, parts: Sequence[Share]) -> dict[str, Any]:
    counted = [share for share in parts if share.outcome == "counted"]
    return {
        "client": short(name),
        "asked": len(parts),
        "outcomes": _counts(parts),
        "rows": _rows(counted),
        "norm": _mean(share.norm for share in counted),
        "shortened": sum(not np.isnan(share.clipped) for share in counted),
        "effect": _mean(share.effect for share in counted),
    }


def grid(own: dict[str, list[Share]], names: Sequence[str]) -> dict[str, Any]:
    """Clients' contributions by round, or by groups of rounds if that is needed to keep the grid readable."""
    end = max((share.round for name in names for share in own[name]), default=0)
    each = 1
    while True:
        cells: dict[tuple[int, int], list[Share]] = {}
        for row, name in enumerate(names):
            for share in own[name]:
                cells.setdefault((row, (share.round - 1) // each), []).append(share)
        drawn = len(cells) * (1 if each == 1 else 2)
        if -(-end // each) <= COLUMNS and drawn <= CELLS:
            break
        each += 1
    return {
        "clients": [short(name) for name in names],
        "rounds": end,
        "each": each,
        "cells": [
            {
                "row": row,
                "column": column,
                "outcomes": _counts(parts),
                "tries": sum(share.tries for share in parts),
                "reason": next((s.reason for s in reversed(parts) if s.reason), ""),
                "rows": _rows(parts),
                "norm": _mean(share.norm for share in parts),
                "clipped": _mean(share.clipped for share in parts),
                "effect": _mean(share.effect for share in parts),
            }
            for (row, column), parts in cells.items()
        ],
    }


def named(told: Told, outcome: Outcome) -> Iterable[dict[str, Any]]:
    """Uploads of any attempt that were dropped, or errors that arrived instead, by client and reason.

    Reasons that differ only in their numbers count as one, in its last form; the most frequent come first.
    """
    table = told.ledger or {}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for place in np.flatnonzero(table["outcome"] == outcome) if table else ():
        if outcome == "failed" and not np.isnan(table["norm"][place]):
            continue  # Its upload was good, but too few others arrived.
        client, reason = str(table["client"][place]), str(table["reason"][place])
        key = client, re.sub(r"\d[\d.e+-]*|\b(inf|nan)\b", "#", reason)
        line = found.setdefault(key, {"client": short(client), "times": 0, "rounds": []})
        line["times"] += 1
        line["reason"] = reason
        line["rounds"].append(int(table["round"][place]))
    often = sorted(found.values(), key=lambda line: -line["times"])
    return [{**line, "rounds": spans(line["rounds"])} for line in often]


def spans(rounds: Sequence[int], most: int = 6) -> str:
    """Rounds in words.

    >>> spans([4]), spans([1, 2, 3, 3, 7]), spans(range(2, 40, 2))
    ('round 4', 'rounds 1–3, 7', 'rounds 2, 4, 6, 8, 10, 12, …')
    """
    own = sorted(set(rounds))
    starts = [t for t in own if t - 1 not in own]
    ends = [t for t in own if t + 1 not in own]
    said = [str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)]
    more = ["…"] if len(said) > most else []
    return f"round{'s' if len(own) > 1 else ''} {', '.join([*said[:most], *more])}"


def _listed(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    everything = list(lines)
    return {"of": len(everything), "lines": everything[:NAMED]}
