"""The data of a deployed federation, which stays with its owners."""

from __future__ import annotations

from typing import ClassVar

from pfedme.core.spec import Index
from pfedme.core.tree import record
from pfedme.data.federation import Federation
from pfedme.errors import InputError


@record
class Deployed:
    """Tables that never left their owners: a record can name them, but nobody can load them."""

    name: ClassVar[str] = "deployed"

    clients: Index = 0
    """Number of clients."""
    label: str = ""
    """Column to predict."""

    def load(self) -> Federation:
        """Raises an error."""
        raise InputError(
            "The rows of a deployed federation are with its clients; use 'pfedme server --resume DIR' to "
            "resume a stopped run."
        )
