"""Everything that a page shows about each client, for readers who look for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme.report.html.clients import gain_of_offer, measure_of_offer, sample, short
from pfedme.report.html.groups import Group, numbers
from pfedme.report.html.read import Columns, Told

AT_LEAST = 10_000
"""At least this many clients can be searched, however many numbers each has."""
CELLS = 150_000
"""Numbers in the whole list; if clients have few numbers each, more of them can be searched."""


def find(
    groups: Sequence[Group],
    tables: Sequence[Columns | None],
    offers: Sequence[tuple[int, Told]],
    gains: Sequence[tuple[int, Columns]],
) -> list[dict[str, Any]]:
    """For each problem its clients, their rows, their scores with each model, and their gains over alone.

    `gains` are those over runs of alone, with the index of their group.
    """
    found = []
    for problem in dict.fromkeys(group.problem for group in groups):
        own = [k for k, group in enumerate(groups) if group.problem == problem]
        parts = [table for k in own if (table := tables[k]) is not None]
        parts += [told.offered for k, told in offers if k in own and told.offered is not None]
        parts = [table for table in parts if len(table["client"])]
        if not parts:
            continue
        everyone = _everyone(parts)
        columns: list[dict[str, Any]] = []
        for k in own:
            for kind in groups[k].kinds if tables[k] is not None else []:
                column = {"group": k, "kind": kind, "measure": groups[k].of_client}
                columns.append({**column, "table": tables[k]})
        lists: list[dict[str, Any]] = []
        for k, told in offers:
            if k in own:
                key = measure_of_offer(told, groups[k])
                label = f"{groups[k].one(told)}: the model it chose"
                lists.append({"label": label, "measure": key, "table": gain_of_offer(told, key)})
        for k, table in gains:
            if k in own:
                label = f"{groups[k].label}: {groups[k].kinds[-1]} model"
                lists.append({"label": label, "measure": groups[k].of_client, "table": table})
        width = 3 + len(columns) + 4 * len(lists)
        shown, clients = sample(everyone, max(AT_LEAST, CELLS // width))
        names = shown["client"]
        found.append(
            {
                "where": groups[own[0]].where.strip(),
                "of": clients,
                "client": [short(str(name)) for name in names],
                "n_train": numbers(shown["n_train"].tolist()),
                "n_test": numbers(shown["n_test"].tolist()),
                "scores": [
                    {
                        "group": column["group"], "kind": column["kind"], "measure": column["measure"],
                        "values": _placed(column["table"], column["kind"], names),
                    }
                    for column in columns
                ],
                "gains": [
                    {
                        "label": entry["label"],
                        "measure": entry["measure"],
                        **{
                            key: _placed(entry["table"], key, names)
                            for key in ("mine", "alone", "gain", "ci", "choice")
                            if key in entry["table"]
                        },
                    }
                    for entry in lists
                ],
            }
        )  # fmt: skip
    return found


def _everyone(tables: Sequence[Columns]) -> Columns:
    """The clients of all tables, by name, with the numbers of rows from the first table with the client."""
    names = np.concatenate([table["client"] for table in tables]).astype(str)
    client, first = np.unique(names, return_index=True)
    rows = {key: np.concatenate([t[key] for t in tables])[first] for key in ("n_train", "n_test")}
    return {"client": client.astype(object), **rows}


def _placed(table: Columns, key: str, names: np.ndarray) -> list[Any]:
    """A column of a table in the order of names; None for clients that are not in the table."""
    client, first = np.unique(table["client"].astype(str), return_index=True)
    if not len(client):
        return [None] * len(names)
    wanted = names.astype(str)
    at = np.minimum(np.searchsorted(client, wanted), len(client) - 1)
    there = client[at] == wanted
    values = table[key][first[at]]
    if table[key].dtype == object:
        return [str(v) if known else None for v, known in zip(values, there, strict=True)]
    short_ones = [float(f"{v:.4g}") for v in np.where(there, values, np.nan)]
    return numbers(short_ones)
