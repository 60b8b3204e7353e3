"""Docstrings, which are written as plain text with `code` in backticks, as reStructuredText; and types that
tell how a number is bounded as plain numbers."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import typing
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"`+([^`]+)`+")
FLOATS, INTS = ("Positive", "NonNegative", "Share"), ("Count", "Index", "Seed")
CHOICES = {
    "Aggregation": "pfedme.algorithms.base",
    "Order": "pfedme.core.problem",
    "Solver": "pfedme.core.prox",
}
"""Names for a few words to choose from, and the modules that they are of."""
BOUNDED = re.compile(r"Annotated\[(int|float), .*\]$")
SPECIAL = re.compile(r"([|*\\])")


def setup(app: Sphinx) -> dict[str, Any]:
    """Makes autodoc pass docstrings through `rewrite`, and types through `plain`."""
    app.connect("builder-inited", lambda _: [simplify(cls) for cls in classes()], priority=900)
    app.connect("autodoc-process-docstring", rewrite)
    return {"parallel_read_safe": True}


def modules() -> list[ModuleType]:
    """The modules of pfedme but for those that need Flower."""
    package = importlib.import_module("pfedme")
    found = pkgutil.walk_packages(package.__path__, "pfedme.")
    return [importlib.import_module(name.name) for name in found if ".deploy" not in name.name]


def classes() -> list[type]:
    """The classes that these modules define."""
    return [
        thing
        for module in modules()
        for thing in vars(module).values()
        if inspect.isclass(thing) and thing.__module__ == module.__name__
    ]


def simplify(cls: type) -> None:
    """Makes the types of a class's fields plain."""
    for owner in (cls, cls.__init__):
        for name, kind in inspect.get_annotations(owner).items():
            if isinstance(kind, str):
                owner.__annotations__[name] = plain(kind)


def plain(kind: str) -> str:
    """A type without the bounds of its numbers, and with the words that can be chosen.

    >>> plain("Positive | None"), plain("Annotated[int, Bound(least=1)]")
    ('float | None', 'int')
    """
    kind = BOUNDED.sub(r"\1", kind)
    return re.sub(r"\b[A-Z]\w+\b", lambda match: kinds().get(match[0], match[0]), kind)


@functools.cache
def kinds() -> dict[str, str]:
    """What stands for names of types that a reader need not know."""
    known = dict.fromkeys(FLOATS, "float") | dict.fromkeys(INTS, "int")
    for name, module in CHOICES.items():
        words = typing.get_args(getattr(importlib.import_module(module), name))
        known[name] = f"Literal[{', '.join(map(repr, words))}]"
    return known


def rewrite(_: Sphinx, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Rewrites the lines of a docstring in place."""
    lines[:] = [line for block in blocks(lines) for line in converted(block)]


def blocks(lines: list[str]) -> list[list[str]]:
    """The lines in groups that empty lines separate."""
    groups: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            groups[-1].append(line)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def converted(block: list[str]) -> list[str]:
    """A doctest as it is, an indented block (a formula, a command) literally, and a paragraph's marks
    rewritten."""
    first = block[0].lstrip()
    if first == "Arguments:":
        return [*arguments(block[1:]), ""]
    if first.startswith((">>>", ".. ", ":")):
        return [*block, ""]
    if block[0].startswith("    "):
        return ["::", "", *block, ""]
    if first.startswith("- "):
        return [*(marked(line) for line in block), ""]
    return [*(marked(line.strip()) for line in block), ""]


def arguments(lines: list[str]) -> list[str]:
    """A list of arguments as fields.

    >>> arguments(["    key: randomness", "        of its own.", "    w: the model."])
    [':param key: randomness', '    of its own.', ':param w: the model.']
    """
    fields = []
    for line in lines:
        name, colon, about = line.strip().partition(": ")
        new = colon and name.isidentifier() and len(line) - len(line.lstrip()) == 4
        fields.append(f":param {name}: {marked(about)}" if new else f"    {marked(line.strip())}")
    return fields


def marked(line: str) -> str:
    """A line of text: `code` becomes a literal, and what reStructuredText would take for markup is escaped.

    >>> marked("|D| rows of `x`")
    '\\\\|D\\\\| rows of ``x``'
    """
    parts = CODE.split(line)
    return "".join(f"``{part}``" if k % 2 else SPECIAL.sub(r"\\\1", part) for k, part in enumerate(parts))
