"""What the owner of a table sees before anything leaves the machine: the plan, and what will leave."""

from __future__ import annotations

from collections.abc import Sequence

from pfedme.algorithms import ALGORITHMS
from pfedme.data.fitting import Moments, Told
from pfedme.deploy.declared import Declared
from pfedme.deploy.messages import Words
from pfedme.deploy.policy import Policy

SHOWN = 12
"""Number of texts that are shown for a column."""


def plan_lines(plan: Words, sha: str) -> list[str]:
    """A plan, in readable form."""
    settings = ", ".join(
        f"{name} {value}" for name, value in plan["algorithm"].items() if name != "name" and value is not None
    )
    model = ", ".join(f"{name} {value}" for name, value in plan["model"].items() if name != "name" and value)
    cohort = plan["cohort"] or "at most 10"
    lines = [
        "The server offers this plan:",
        f"  algorithm  {plan['algorithm']['name']}: {settings}",
        f"  model      {plan['model']['name']}{': ' + model if model else ''}",
        f"  rounds     {plan['rounds']}, cohorts of {cohort}, at least {plan['min_clients']} clients",
        f"  seed       {plan['seed']}",
        f"  sends      {sends(plan)}",
    ]
    if privacy := plan.get("privacy"):
        how = {
            "rows": "gradients of rows clipped at {clip:g}; this machine adds noise",
            "clients": "what is sent shortened to {clip:g}; the server adds noise and has to be trusted",
        }[privacy["unit"]]
        lines.append(
            f"  privacy    of {privacy['unit']}: epsilon {privacy['epsilon']:g} at delta "
            f"{privacy['delta']:g}, {how.format(clip=privacy['clip'])}"
        )
    if plan["eval_every"]:
        lines.append(f"  evaluated  every {plan['eval_every']} rounds")
    return [*lines, f"  SHA-256    {sha}"]


def sends(plan: Words) -> str:
    """What leaves a client in each round."""
    name = plan["algorithm"]["name"]
    return ALGORITHMS[name].sends if name in ALGORITHMS and ALGORITHMS[name].sends else f"what {name} defines"


def told_lines(told: Told, policy: Policy, declared: Declared | None = None) -> list[str]:
    """What leaves a client for the agreement, item by item."""
    source = f", from {policy.schema}" if policy.schema else ""
    noisy = declared.ranges if declared else {}

    def moments(name: str | None, own: Moments | None) -> str:
        return "mean and standard deviation, with noise" if name in noisy else _moments(own)

    lines = [
        f"To agree on columns, classes and scaling, this will leave this machine{source}:",
        f"  label '{told.label}', {told.task}"
        + (f": {_listed(told.classes)}" if told.classes else f": {moments(None, told.quantity)}"),
    ]
    lines += [f"  numbers '{name}': {moments(name, own)}" for name, own in told.numbers.items()]
    lines += [f"  text '{name}': {_listed(own) or 'none'}" for name, own in told.categories.items()]
    if told.classes:
        lines.append(f"  that this client accepts at most {told.most_classes} classes")
    if declared and noisy:
        share = f"epsilon {declared.share:g} of the budget"
        lines.append(f"What has noise is computed from rows once, which costs {share}.")
    if policy.min_count > 1 and not policy.schema:
        lines.append(
            f"Text values that occur in fewer than {policy.min_count} training rows are not revealed, nor "
            "are numbers that are all equal; for numbers with few distinct values, only one digit is."
        )
    return [*lines, "In each round only what the plan sends leaves, and no row."]


def _moments(own: Moments | None) -> str:
    if own is None or not own.values:
        return "nothing"
    return f"{own.values:,.0f} values, mean {own.mean:.10g}, standard deviation {own.spread**0.5:.6g}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
