"""Where federations come from. To add a source, write a dataclass with `load()` and add a line to this list.
Other packages register theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from pfedme.core.plugins import Known
from pfedme.core.spec import build, parse
from pfedme.data.deployed import Deployed
from pfedme.data.federation import Federation
from pfedme.data.mnist import Mnist
from pfedme.data.reading import is_table
from pfedme.data.synthetic import Synthetic
from pfedme.data.table import OPTIONS, Table
from pfedme.errors import InputError, unknown


@runtime_checkable
class Source(Protocol):
    """A description of a federation, complete enough to recreate it."""

    name: ClassVar[str]

    def load(self) -> Federation:
        """The federation."""
        ...


BUILT_IN: dict[str, type[Source]] = {cls.name: cls for cls in (Synthetic, Mnist)}
DATA = Known[Source]("data", {**BUILT_IN, Table.name: Table, Deployed.name: Deployed}, Source, traced=False)


def named() -> dict[str, type[Source]]:
    """The sources that are selected by name: our own, and those of other packages."""
    return BUILT_IN | DATA.others


def parse_data(text: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source that `synthetic`, `mnist:partition=dirichlet,alpha=0.3`, ... or a table's path describes.

    `options` are fields of `Table`, as text; other sources have no use for them.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    name, known = text.partition(":")[0], named()
    if name not in known and text and (is_table(Path(text)) or Path(text).exists()):
        return build(Table, {**given, "path": text}, "the table").pinned()
    if name in known and given:
        raise InputError(
            f"{OPTIONS[next(iter(given))]} only applies to your own tables, and --data {name} is not one; "
            "leave the option out."
        )
    if name not in known:
        raise unknown("data", name, [*known, "or the path of a table"])
    return parse(text, known, "data")


def pinned(source: Source) -> Source:
    """The source, with a fingerprint of the user's files if it reads any."""
    return source.pinned() if isinstance(source, Table) else source
