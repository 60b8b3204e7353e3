"""Where federations come from. A new source is a dataclass with `load()` and a line in this list."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pfedme.data.mnist import Mnist
from pfedme.data.synthetic import Synthetic
from pfedme.federation import Federation
from pfedme.spec import parse


class Source(Protocol):
    """A description of a federation, complete enough to make it again."""

    name: ClassVar[str]

    def load(self) -> Federation:
        """The federation."""
        ...


DATA: dict[str, type[Source]] = {cls.name: cls for cls in (Synthetic, Mnist)}


def parse_data(text: str) -> Source:
    """The source that `synthetic`, `mnist:partition=dirichlet,alpha=0.3`, ... describes."""
    return parse(text, DATA, "data")
