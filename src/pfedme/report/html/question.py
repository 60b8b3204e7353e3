"""The question that a page answers, which is its title."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedme.data.natural import CATALOGUE
from pfedme.report.html.groups import Group, problem
from pfedme.report.html.read import Columns, Told

KEYS = ("id", "ids", "name", "names", "code", "no", "nr", "number", "key", "index")
"""Last words of a column's name that say how its values identify something, not what they identify."""


def title(runs: Sequence[Told], groups: Sequence[Group], tables: Sequence[Columns | None]) -> str:
    """The question: what is predicted, and for how many clients."""
    found: dict[str, str] = {}
    for told in runs:
        count = None
        for group, table in zip(groups, tables, strict=True):
            if group.problem == problem(told) and table is not None:
                count = max(count or 0, len(table["client"]))
        data = told.record["config"]["data"]
        key = json.dumps(data, sort_keys=True)
        if count is not None or key not in found:
            found[key] = question(data, count)
    questions = list(dict.fromkeys(found.values()))
    more = f", and {len(questions) - 2} other questions" if len(questions) > 3 else ""
    return "; ".join(questions[: 2 if more else 3]) + more


def question(data: Mapping[str, Any], clients: int | None) -> str:
    """The question about the data that a record describes, for so many clients.

    >>> question({"name": "table", "path": "visits.csv", "label": "result", "client": "clinic_id"}, 34)
    'Predicting result at 34 clinics'
    >>> question({"name": "deployed", "clients": 1, "label": "outcome"}, None)
    'Predicting outcome at 1 client'
    >>> question({"name": "medpar"}, 54)
    'Does a patient die in hospital? (54 clients)'
    """
    if entry := CATALOGUE.get(data["name"]):
        return f"{entry.question} ({clients or entry.clients:,} clients)"
    what = {
        "fashion-mnist": "Recognising clothing",
        "mnist": "Recognising handwritten digits",
        "synthetic": "Predicting the class of synthetic rows",
    }.get(data["name"], f"Predicting {data.get('label') or 'the label'}")
    clients = clients or (data.get("clients") if data["name"] == "deployed" else None)
    if not clients:
        return f"{what} from {Path(data['path']).name}" if data["name"] in ("table", "mapped") else what
    return f"{what} at {clients:,} {noun(data.get('client'), clients)}"


def noun(column: str | None, count: int) -> str:
    """A noun for the values of a column, in the singular or plural for `count` of them.

    >>> noun("Clinic_ID", 34), noun("country", 2), noun("branch", 2), noun("hospitals", 3), noun("bus", 1)
    ('clinics', 'countries', 'branches', 'hospitals', 'bus')
    >>> noun(None, 2), noun("x7", 2), noun("id", 1)
    ('clients', 'clients', 'client')
    """
    words = (column or "").replace("_", " ").replace("-", " ").replace(".", " ").split()
    while words and words[-1].lower() in KEYS:
        words.pop()
    if not words or len(words[-1]) < 3 or not all(word.isalpha() for word in words):
        words = ["client"]
    *others, last = [word if word.isupper() else word.lower() for word in words]
    if count != 1 and not last.lower().endswith("s"):
        if last.endswith("y") and last[-2] not in "aeiou":
            last = f"{last[:-1]}ies"
        else:
            last += "es" if last.endswith(("x", "z", "ch", "sh")) else "s"
    return " ".join([*others, last])
