"""The channel from a server to its clients, independent of its implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pfedme.deploy.messages import Content, Kind, Reply

Enough = Callable[[set[str], float], bool]
"""Whether to stop waiting for clients, given the seconds since they were asked."""


def never(waiting: set[Any], seconds: float) -> bool:
    """Waits until all have answered, or the deadline has passed."""
    return False


class Channel(Protocol):
    """The channel to the clients."""

    def present(self) -> list[str]:
        """The names of the clients that are connected."""
        ...

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        """The replies of clients, each with its own request, that arrive within `deadline` seconds.

        Stops waiting once `enough` is true for the clients that have not answered.
        """
        ...
