"""Algorithms, models and data sources that other installed packages add through entry points.

    [project.entry-points."pfedme.algorithms"]
    momentum = "my_package:Momentum"

The groups are `pfedme.algorithms`, `pfedme.models` and `pfedme.data`. An entry that cannot be used is
skipped, with the reason on standard error.
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
    """The entry points of a group, sorted by name; none is imported."""
    return sorted(entry_points(group=f"pfedme.{group}"), key=lambda entry: (entry.name, package_of(entry)))


def package_of(entry: EntryPoint) -> str:
    """The package that an entry point belongs to."""
    return entry.dist.name if entry.dist else entry.module.partition(".")[0]


class Known(Mapping[str, type[T]]):
    """Classes by name: our own first, then those that other packages register.

    The latter are imported on first use, not earlier, because they import this package too.
    """

    def __init__(self, group: str, own: Mapping[str, type[T]], kind: type, *, traced: bool = True) -> None:
        """Classes must be of this `kind`; if `traced`, JAX must be able to trace their instances."""
        self.group, self.own, self.kind, self.traced = group, dict(own), kind, traced

    @cached_property
    def others(self) -> dict[str, type[T]]:
        """The classes of other packages."""
        found: dict[str, type[T]] = {}
        for entry in registered(self.group):
            try:
                if entry.name in self.own or entry.name in found:
                    raise ValueError("the name is already taken")
                found[entry.name] = self._checked(entry)
            except Exception as error:  # third-party modules can raise anything
                why = " ".join(str(error).split()) or type(error).__name__
                print(
                    f"pfedme: '{entry.name}' of the package {package_of(entry)} is left out of "
                    f"pfedme.{self.group}: {why}.",
                    file=sys.stderr,
                )
        return found

    def _checked(self, entry: EntryPoint) -> type[T]:
        """The class of an entry point, after a check that it can be used."""
        if not re.fullmatch(r"\w[\w.-]*", entry.name):
            raise ValueError("a name may only contain letters, digits, '-', '_' and '.'")
        cls: Any = entry.load()
        if not (isinstance(cls, type) and "__dataclass_fields__" in vars(cls)):
            raise TypeError(f"{entry.value} is not a class with the decorator @pfedme.record")
        made = cls()
        hash(made)
        if not isinstance(made, self.kind):
            raise TypeError(f"{entry.value} is not a valid {self.kind.__name__}")
        if self.traced and not _is_traced(made):
            raise TypeError(f"{entry.value} needs the decorator @pfedme.record")
        if (own := getattr(cls, "name", entry.name)) != entry.name:
            raise ValueError(f"{entry.value} has the name '{own}'")
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
