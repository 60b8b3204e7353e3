"""The plan of a comparison: its runs, and where they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pfedme.errors import InputError
from pfedme.runs.run import Run

PLAN = "compare.json"


def read_plan(out: Path) -> list[dict[str, Any]]:
    """The runs of a comparison: `label`, `folder` and `config` of each.

    They are the list `runs` in compare.json; files from before there were verdicts contain only this list.
    """
    try:
        document = json.loads((out / PLAN).read_text())
        jobs = document if isinstance(document, list) else document["runs"]
        for job in jobs:
            Run.from_json(job["config"])
            if not (isinstance(job["label"], str) and isinstance(job["folder"], str)):
                raise TypeError("label and folder must be strings")
        if not jobs:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(out, error) from None
    return jobs


def damaged(out: Path, why: Exception) -> InputError:
    """The error for a plan that cannot be read."""
    return InputError(f"{out / PLAN} cannot be read ({why}); start the comparison again.")
