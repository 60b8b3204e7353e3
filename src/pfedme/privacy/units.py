"""What a user asks for: the unit that is protected, ε and δ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pfedme.core.spec import NonNegative, Part, Positive, Share, build
from pfedme.core.tree import record
from pfedme.errors import InputError, unknown

ADAPTIVE = "adaptive"
"""The clipping length on the command line that stands for 0."""


@record
class Privacy(Part):
    """(ε, δ)-differential privacy of some unit: whatever is published has nearly the same distribution with
    the unit as without it."""

    epsilon: Positive = 0.0
    """ε: the largest privacy loss of any unit over the whole run; smaller is more private."""
    delta: Share = 1e-5
    """δ: the probability with which the loss may be larger; below 1 divided by the number of units."""


@record
class Rows(Privacy):
    """The unit is one row of a client; each client adds noise to its own gradients."""

    name: ClassVar[str] = "rows"

    clip: Positive = 1.0
    """c: the gradient of a row is shortened to this length if it is longer."""


@record
class Clients(Privacy):
    """The unit is a client with all its rows; the server adds noise to the sum of what clients send."""

    name: ClassVar[str] = "clients"

    clip: NonNegative = 1.0
    """C: what a client sends is shortened to this length if it is longer; 0, or adaptive, lets C follow the
    median length."""


def privacy_words(privacy: Privacy) -> list[str]:
    """The options of the command line that ask for this privacy.

    >>> privacy_words(Rows(epsilon=3.0))
    ['--dp', 'rows', '--epsilon', '3.0', '--delta', '1e-05']
    """
    words = ["--dp", privacy.name, "--epsilon", str(privacy.epsilon), "--delta", str(privacy.delta)]
    for field in dataclasses.fields(privacy):
        if (
            field.name not in ("epsilon", "delta")
            and (value := getattr(privacy, field.name)) != field.default
        ):
            words += [f"--dp-{field.name}", str(value)]
    return words


def asked_for(unit: str | None, given: Mapping[str, Any]) -> Privacy | None:
    """The privacy that options ask for: a unit, and the values of its fields; None if there is no unit."""
    own = {name: value for name, value in given.items() if value is not None}
    if unit is None:
        if own:
            name = next(iter(own))
            option = f"--{name}" if name in ("epsilon", "delta") else f"--dp-{name}"
            raise InputError(f"{option} needs a unit of privacy; add --dp rows, or --dp clients.")
        return None
    if unit not in Privacy.known:
        raise unknown("unit of privacy", unit, Privacy.known)
    if "epsilon" not in own:
        raise InputError(
            f"--dp {unit} needs the largest privacy loss of any of the {unit}; add --epsilon, such as 3."
        )
    if own.get("clip") == ADAPTIVE:
        if unit != Clients.name:
            raise InputError(f"--dp-clip {ADAPTIVE} is for --dp clients; give a length, such as 1.")
        own["clip"] = 0.0
    return build(Privacy.known[unit], own, f"--dp {unit}")
