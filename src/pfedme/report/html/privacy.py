"""What runs claim about privacy, and what the claim does not cover."""

from __future__ import annotations

from typing import Any

from pfedme.report.html.groups import Group

UNITS = {"rows": "one row of one client", "clients": "one client with all its rows"}
FACTS = {
    "relation": "neighbours", "sampling": "sampling", "clip": "clipping length", "batches": "mini-batches",
    "gradients_per_batch": "gradients on each mini-batch", "noise": "noise multiplier", "spent": "ε spent",
    "covered": "covered", "accountant": "accountant",
}  # fmt: skip
"""Fields of a record, and what the page calls them."""
SIMULATED = (
    "The noise of this simulation comes from its seed, which is known: ε is that of the same run with secret "
    "noise."
)


def privacy(group: Group) -> dict[str, Any] | None:
    """What the first run of a group says about its differential privacy; None if it has none."""
    told = group.runs[0]
    found = told.record.get("privacy") or told.deployment.get("privacy")
    if not isinstance(found, dict):
        return None
    unit = UNITS.get(str(found.get("unit")), str(found.get("unit")))
    epsilon, delta = (_shown(found.get(key)) for key in ("epsilon", "delta"))
    claim = f"Protected is {unit}: ε is at most {epsilon} at δ = {delta}, over the whole run."
    facts = [[name, _shown(found[key])] for key, name in FACTS.items() if key in found]
    if sources := told.deployment.get("agreed_from"):
        told_by = {source: [n for n, s in sources.items() if s == source] for source in sources.values()}
        shown = "; ".join(f"{source}: {', '.join(names)}" for source, names in told_by.items())
        facts.append(["told before training", shown])
    return {
        "label": group.label,
        "claim": f"{claim} {SIMULATED}" if found.get("simulated") else claim,
        "facts": facts,
        "not_covered": [str(line) for line in found.get("not_covered", ())],
    }


def _shown(value: Any) -> str:
    """A value of a record; of a spread over clients, the smallest and the largest.

    >>> _shown(1e-05), _shown({"min": 1.0, "median": 1.5, "max": 2.0}), _shown({"min": 3.0, "max": 3.0})
    ('1e-05', '1 to 2', '3')
    """
    if isinstance(value, dict):
        low, high = (_shown(value.get(key)) for key in ("min", "max"))
        return low if low == high else f"{low} to {high}"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
