"""What an experiment says about a claim of the paper."""

from __future__ import annotations

import dataclasses
from typing import Literal

Verdict = Literal["holds", "holds in part", "does not hold", "not visible"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A claim in our words, how it was tested, and the outcome."""

    claim: str
    statement: str
    experiment: str
    numbers: str
    verdict: Verdict
    explanation: str


def judge(checks: dict[str, bool]) -> Verdict:
    """The verdict on a claim with several parts.

    >>> judge({"MLR": True, "DNN": False})
    'holds in part'
    """
    if all(checks.values()):
        return "holds"
    return "holds in part" if any(checks.values()) else "does not hold"


def failing(checks: dict[str, bool]) -> str:
    """A sentence that says which parts do not hold."""
    wrong = [name for name, right in checks.items() if not right]
    return f"It fails for {', '.join(wrong)}." if wrong else "It holds in every part that was tested."
