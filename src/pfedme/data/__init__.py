"""Where federations come from. A new source is a dataclass with `load()` and a line in this list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pfedme.core.spec import build, parse
from pfedme.data.deployed import Deployed
from pfedme.data.federation import Federation
from pfedme.data.mnist import Mnist
from pfedme.data.reading import is_table
from pfedme.data.synthetic import Synthetic
from pfedme.data.table import OPTIONS, Table
from pfedme.errors import InputError, unknown


class Source(Protocol):
    """A description of a federation, complete enough to make it again."""

    name: ClassVar[str]

    def load(self) -> Federation:
        """The federation."""
        ...


BUILT_IN: dict[str, type[Source]] = {cls.name: cls for cls in (Synthetic, Mnist)}
DATA: dict[str, type[Source]] = {**BUILT_IN, Table.name: Table, Deployed.name: Deployed}


def parse_data(text: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source that `synthetic`, `mnist:partition=dirichlet,alpha=0.3`, ... or a table's path describes.

    `options` are fields of `Table`, as texts, and of no use to other sources.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    name = text.partition(":")[0]
    if name not in BUILT_IN and text and (is_table(Path(text)) or Path(text).exists()):
        return build(Table, {**given, "path": text}, "the table").pinned()
    if name in BUILT_IN and given:
        raise InputError(
            f"{OPTIONS[next(iter(given))]} is for tables of your own, and --data {name} is built in; leave "
            "the option out."
        )
    if name not in BUILT_IN:
        raise unknown("data", name, [*BUILT_IN, "or the path of a table"])
    return parse(text, BUILT_IN, "data")


def pinned(source: Source) -> Source:
    """The source, with the fingerprint of its files if it reads any of the user's own."""
    return source.pinned() if isinstance(source, Table) else source
