"""The options of an audit."""

from __future__ import annotations

import dataclasses

from pfedme.core.spec import Count, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to audit."""

    client: str | None = None
    """The only client that gets canaries; if not given, as many of the clients with the most training rows as
    it takes."""
    canaries: Count | None = None
    """Rows to plant, each with probability 1/2; if not given, 500, or half as many as training rows if there
    are fewer than 1,000."""
    seed: Seed = 0
    """Seed of the audit's coins and of its noise."""
