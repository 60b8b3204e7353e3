"""The options of an audit."""

from __future__ import annotations

import dataclasses

from pfedme.core.spec import Count, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to audit."""

    client: str | None = None
    """The client that gets canaries; if not given, the one with the most training rows."""
    canaries: Count | None = None
    """Rows to plant, each with probability 1/2; if not given, 500, or half of the client's training rows if
    it has fewer than 1,000."""
    seed: Seed = 0
    """Seed of the audit's coins and of its noise."""
