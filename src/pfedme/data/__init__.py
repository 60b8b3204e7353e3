"""Where federations come from. To add a source, write a dataclass with `load()` and add a line to this list,
or, for a table in a package, an entry to the catalogue in natural.py. Other packages register theirs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from pfedme.core.plugins import Known
from pfedme.core.spec import build, parse
from pfedme.data.deployed import Deployed
from pfedme.data.fashion import FashionMnist
from pfedme.data.federation import Federation
from pfedme.data.mapped import Mapped, is_mapped
from pfedme.data.mnist import Mnist
from pfedme.data.natural import CATALOGUE, NATURAL, Natural
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


BUILT_IN: dict[str, type[Source]] = {
    **{cls.name: cls for cls in (Synthetic, Mnist, FashionMnist)},
    **NATURAL,
}
OTHERS = {cls.name: cls for cls in (Table, Mapped, Deployed)}
DATA = Known[Source]("data", {**BUILT_IN, **OTHERS}, Source, traced=False)


def named() -> dict[str, type[Source]]:
    """The sources that are selected by name: our own, and those of other packages."""
    return BUILT_IN | DATA.others


def listing() -> list[dict[str, Any]]:
    """What the sources with a name are: their `question`, or a description, and what is known of the rows."""
    found = []
    for name, cls in named().items():
        entry = CATALOGUE.get(name)
        about = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        told = {"rows": entry.rows, "clients": entry.clients} if entry else {"rows": None, "clients": None}
        licence = entry.package.licence if entry else getattr(cls, "licence", None)
        found.append({"name": name, **told, "question": about, "licence": licence})
    return found


def parse_data(text: str, options: Mapping[str, Any] | None = None) -> Source:
    """The source that `synthetic`, `mnist:partition=dirichlet,alpha=0.3`, ... or a table's path describes.

    `options` are fields of `Table`, as text; other sources have no use for them.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    name, known, path = text.partition(":")[0], named(), Path(text)
    mapped = name not in known and is_mapped(path)
    if mapped and not given:
        return Mapped(path=text).pinned()
    if name not in known and not mapped and text and (is_table(path) or path.exists()):
        return build(Table, {**given, "path": text}, "the table").pinned()
    if (name in known or mapped) and given:
        own = f", or write ./{text} for the table of that name" if not mapped and path.exists() else ""
        raise InputError(
            f"{OPTIONS[next(iter(given))]} only applies to your own tables, and --data {name} is not one; "
            f"leave the option out{own}."
        )
    if name not in known:
        raise InputError(f"{str(unknown('data', name, known))[:-1]}, or the path of a table.")
    return parse(text, known, "data")


def table_of(source: Source) -> Table | None:
    """The table that a source reads, if it reads one."""
    return source.table if isinstance(source, Natural) else source if isinstance(source, Table) else None


def pinned(source: Source) -> Source:
    """The source, with a fingerprint of the user's files if it reads any."""
    return source.pinned() if isinstance(source, Table | Mapped) else source
