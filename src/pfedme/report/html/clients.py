"""What a page shows about single clients: how they do, what they gain, what they chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme.engine.choices import Personalize, candidates
from pfedme.engine.measure import MEASURES
from pfedme.engine.personalized import Candidate
from pfedme.engine.verdict import SHARES, interval, row_noise
from pfedme.report.html.groups import Group, number, numbers
from pfedme.report.html.read import Columns, Told

MOST = 2000
"""At most this many clients in a chart; with more, it shows a sample."""
MOST_IN_ALL = 10_000
"""At most this many points in all such charts together, to keep the page small."""
WORST = 10
LONGEST = 80
"""At most this many characters of a client's name are shown."""


def joined(tables: Sequence[Columns], columns: Sequence[str]) -> Columns:
    """One row per client: the means of columns over the tables in which the client has a value."""
    names = np.concatenate([table["client"] for table in tables])
    client, first, place = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first)  # in order of first appearance
    out: Columns = {"client": client[order]}
    for column in ("n_train", "n_test", *columns):
        values = np.concatenate([table[column] for table in tables])
        known = ~np.isnan(values)
        count = np.bincount(place[known], minlength=len(client))
        total = np.bincount(place[known], values[known], len(client))
        out[column] = np.where(count > 0, total / np.maximum(count, 1), np.nan)[order]
    return out


def sample(table: Columns, most: int) -> tuple[Columns, int]:
    """At most so many of the clients, drawn at random but the same ones each time, and how many there are."""
    clients = len(table["client"])
    if clients <= most:
        return table, clients
    some = np.sort(np.random.default_rng(0).choice(clients, most, replace=False))
    return {name: column[some] for name, column in table.items()}, clients


def listed(table: Columns, most: int) -> dict[str, Any]:
    """A table for the page: `of` clients, and lists of those that are shown."""
    shown, clients = sample(table, most)
    return {
        "of": clients,
        **{
            name: [short(v) for v in column] if column.dtype == object else numbers(column.tolist())
            for name, column in shown.items()
        },
    }


def short(name: str) -> str:
    """A client's name, truncated if it is very long."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def of_clients(group: Group) -> Columns | None:
    """Each client's mean score over seeds with each model; None if the folders do not have the scores."""
    tables = [told.clients for told in group.finished if told.clients]
    columns = [f"{kind}_{group.of_client}" for kind in group.kinds]
    if not tables or not all(column in table for table in tables for column in columns):
        return None
    found = joined(tables, columns)
    for kind, column in zip(group.kinds, columns, strict=True):
        found[kind] = found.pop(column)
    return found


def gain_over_alone(group: Group, alone: Group) -> Columns | None:
    """What each client gains with a group's most personal model, from runs with the same seeds.

    The interval is the one that the verdict uses, `row_noise`: as wide as if the errors of the two models
    were independent. Usually they are not, so it is wider than necessary.
    """
    mine, theirs = f"{group.kinds[-1]}_{group.of_client}", f"{alone.kinds[-1]}_{alone.of_client}"
    others = {told.run.seed: told.clients for told in alone.finished}
    tables = []
    for told in group.finished:
        own, other = told.clients, others.get(told.run.seed)
        if own is None or other is None or mine not in own or theirs not in other:
            continue
        _, here, there = np.intersect1d(own["client"], other["client"], return_indices=True)
        here, there = here[np.argsort(here)], there[np.argsort(here)]
        table = {name: own[name][here] for name in ("client", "n_train", "n_test")}
        tables.append(table | {"mine": own[mine][here], "alone": other[theirs][there]})
    if not tables:
        return None
    found = joined(tables, ("mine", "alone"))
    p, q, n = found["mine"], found["alone"], found["n_test"]
    found["gain"] = MEASURES[group.of_client].orientation * (p - q)
    if group.of_client in SHARES:
        found["ci"] = 1.96 * row_noise(p, q, n)
    return found


def measure_of_offer(told: Told, group: Group) -> str:
    """The metric of personalized.csv: the group's measure if it is there, otherwise the one that is."""
    assert told.offered is not None
    keys = (group.measure.key, group.usual.key, "rmse")
    return next((key for key in keys if f"recommended_{key}" in told.offered), group.usual.key)


def is_paired(told: Told, measure: str) -> bool:
    """Whether gains in this measure in personalized.csv have intervals that are paired over rows."""
    return told.offered is not None and f"gain_over_alone_{measure}" not in told.offered


def gain_of_offer(told: Told, measure: str) -> Columns:
    """What each client gains with the model that it chose, from personalized.csv."""
    assert told.offered is not None
    found = {name: told.offered[name] for name in ("client", "n_train", "n_test", "choice")}
    nothing = np.full(len(found["client"]), np.nan)
    found["mine"] = told.offered.get(f"recommended_{measure}", nothing)
    found["alone"] = told.offered.get(f"alone_{measure}", nothing)
    if is_paired(told, measure):
        found["gain"], ci = (told.offered[f"gain_over_alone{suffix}"] for suffix in ("", "_ci95"))
    else:
        found["gain"], ci = told.offered[f"gain_over_alone_{measure}"], nothing
        if measure in SHARES:
            ci = 1.96 * row_noise(found["mine"], found["alone"], found["n_test"])
    found |= {} if np.isnan(ci).all() else {"ci": ci}
    found["choice"] = np.array([candidate.label for candidate in _choices(told)], object)
    return found


def _choices(told: Told) -> list[Candidate]:
    """The model that each client chose, from personalized.csv."""
    assert told.offered is not None
    pairs = zip(told.offered["choice"].tolist(), told.offered["lam"].tolist(), strict=True)
    return [Candidate(name, 0.0 if np.isnan(lam) else lam) for name, lam in pairs]


def panel(found: Columns, most: int) -> dict[str, Any]:
    """Gains for the page, smallest first: their mean, how many are certain, and a sample of them."""
    found = {name: column[~np.isnan(found["gain"])] for name, column in found.items()}
    order = np.argsort(found["gain"], kind="stable")
    found = {name: column[order] for name, column in found.items()}
    gain, ci = found["gain"], found.get("ci")
    sure = {} if ci is None else {"up": int((gain - ci > 0).sum()), "down": int((gain + ci < 0).sum())}
    noise = None if ci is None or np.isnan(ci).any() else ci / 1.96
    over = interval(gain, noise) if len(gain) else None
    return {
        "mean": number(over and over.mean),
        "mean_ci": number(over and over.high - over.mean),
        "above": int((gain > 0).sum()),
        "below": int((gain < 0).sum()),
        **sure,
        "clients": listed(found, most),
    }


def worst(groups: Sequence[Group], tables: Sequence[Columns | None]) -> list[dict[str, Any]]:
    """The clients for which each group does worst, next to what the other groups reach for them."""
    found = []
    for place, (group, table) in enumerate(zip(groups, tables, strict=True)):
        if table is None:
            continue
        value = table[group.kinds[-1]]
        known = np.flatnonzero(~np.isnan(value))
        bad = MEASURES[group.of_client].orientation * value
        # Of two equal values, the one with more test rows comes first: it says more.
        some = known[np.lexsort((-table["n_test"][known], bad[known]))][:WORST]
        side = [k for k, g in enumerate(groups) if g.problem == group.problem and tables[k] is not None]
        side = [k for k in side if groups[k].of_client == group.of_client]
        found.append(
            {
                "group": place,
                "beside": side,
                "clients": [
                    {
                        "client": short(str(table["client"][i])),
                        "n_train": number(float(table["n_train"][i])),
                        "n_test": number(float(table["n_test"][i])),
                        "values": [
                            _of(tables[k], groups[k].kinds[-1], str(table["client"][i])) for k in side
                        ],
                    }
                    for i in some
                ],
            }
        )
    return found


def _of(table: Columns | None, kind: str, client: str) -> float | int | None:
    at = np.flatnonzero(table["client"] == client) if table is not None else []
    return number(float(table[kind][at[0]])) if table is not None and len(at) else None


def chosen(told: Told) -> list[dict[str, Any]]:
    """How many clients chose which model, the most shared one first."""
    own = _choices(told)
    every = sorted({*candidates(Personalize()), *own}, key=lambda c: (-c.lam, c.name == "alone", c.name))
    counts = dict.fromkeys((c.label for c in every), 0) | Counter(c.label for c in own)
    return [{"label": label, "clients": count} for label, count in counts.items()]


def newcomers(told: Told) -> dict[str, Any]:
    """How newcomers fare with each method, by the number of their rows."""
    table = told.newcomers
    assert table is not None
    rows = sorted(set(table["rows"].tolist()))
    methods = {}
    for name in dict.fromkeys(table["method"].tolist()):
        of = {
            r: v for r, v, m in zip(table["rows"], table["mean"], table["method"], strict=True) if m == name
        }
        methods[name] = numbers(of.get(r) for r in rows)
    clients = dict(zip(table["rows"].tolist(), table["clients"].tolist(), strict=True))
    return {
        **({"measure": str(table["metric"][0])} if "metric" in table and rows else {}),
        "rows": numbers(rows),
        "clients": numbers(clients[r] for r in rows),
        "methods": methods,
    }
