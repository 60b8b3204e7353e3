"""The way from a server to its clients, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pfedme.deploy.messages import Content, Kind, Reply

Enough = Callable[[set[str], float], bool]
"""Whether to wait no longer for clients, so many seconds after they were asked."""


def never(waiting: set[Any], seconds: float) -> bool:
    """The answer of those who wait until all have answered, or the deadline has come."""
    return False


class Channel(Protocol):
    """The way to the clients."""

    def present(self) -> list[str]:
        """The names of the clients that are connected."""
        ...

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        """The replies of clients, each asked for its own content, that come within `deadline` seconds.

        Waits no longer once `enough` is true of the clients that have not answered.
        """
        ...
