"""What other installed packages add: algorithms, models and data sources, by entry points.

    [project.entry-points."pfedme.algorithms"]
    momentum = "my_package:Momentum"

The groups are `pfedme.algorithms`, `pfedme.models` and `pfedme.data`. One that cannot be used is left out,
and a sentence on standard error says why.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


def registered(group: str) -> list[EntryPoint]:
    """The entry points of a group, by name; none of them is imported."""
    return sorted(entry_points(group=f"pfedme.{group}"), key=lambda entry: (entry.name, package_of(entry)))


def package_of(entry: EntryPoint) -> str:
    """The package that an entry point is of."""
    return entry.dist.name if entry.dist else entry.module.partition(".")[0]


class Known(Mapping[str, type[T]]):
    """Classes by their names: our own, and then those that other packages register.

    These are imported when the list is first looked at, and not before: they import this package too.
    """

    def __init__(self, group: str, own: Mapping[str, type[T]], kind: type, *, traced: bool = True) -> None:
        """Those of a group must be of a `kind`; what is `traced` goes through compiled programs."""
        self.group, self.own, self.kind, self.traced = group, dict(own), kind, traced

    @cached_property
    def others(self) -> dict[str, type[T]]:
        """Those of other packages."""
        found: dict[str, type[T]] = {}
        for entry in registered(self.group):
            try:
                if entry.name in self.own or entry.name in found:
                    raise ValueError("there is one of that name already")
                found[entry.name] = self._checked(entry)
            except Exception as error:  # whatever a module of somebody else raises
                why = " ".join(str(error).split()) or type(error).__name__
                print(
                    f"pfedme: '{entry.name}' of the package {package_of(entry)} is left out of "
                    f"pfedme.{self.group}: {why}.",
                    file=sys.stderr,
                )
        return found

    def _checked(self, entry: EntryPoint) -> type[T]:
        """The class of an entry point, once it is known to be one that can be used."""
        if not re.fullmatch(r"\w[\w.-]*", entry.name):
            raise ValueError("a name has letters, digits, '-', '_' and '.' only")
        cls: Any = entry.load()
        if not (isinstance(cls, type) and "__dataclass_fields__" in vars(cls)):
            raise TypeError(f"{entry.value} is no class with the decorator @pfedme.record")
        made = cls()
        hash(made)
        if not isinstance(made, self.kind):
            raise TypeError(f"{entry.value} is no {self.kind.__name__}")
        if self.traced and not _is_traced(made):
            raise TypeError(f"{entry.value} needs the decorator @pfedme.record")
        if (own := getattr(cls, "name", entry.name)) != entry.name:
            raise ValueError(f"{entry.value} calls itself '{own}'")
        return cls

    def __getitem__(self, name: str) -> type[T]:
        return self.own[name] if name in self.own else self.others[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.own, *self.others])

    def __len__(self) -> int:
        return len(self.own) + len(self.others)


def _is_traced(made: Any) -> bool:
    import jax

    return dataclasses.is_dataclass(made) and not jax.tree_util.all_leaves([made])
