"""Specifications: `name:field=value,field=value` ⇄ a frozen dataclass ⇄ JSON.

Algorithms, data and models are all described by frozen dataclasses whose fields are their options. This
module is the only place where text becomes an object and its numbers are checked. The type of a field says
what it may hold: `Positive`, `Count`, `Literal["uniform", "samples"]`, ...
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pfedme.errors import InputError, unknown

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower and an upper bound; `above` and `below` are strict."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    def violated_by(self, value: float) -> str | None:
        """What is wrong with `value`, or None."""
        if self.above is not None and not value > self.above:
            return "must be positive" if self.above == 0 else f"must be above {self.above}"
        if self.least is not None and not value >= self.least:
            return f"must be at least {self.least}"
        if self.below is not None and not value < self.below:
            return f"must be below {self.below}"
        if self.most is not None and not value <= self.most:
            return f"must be at most {self.most}"
        return None


Positive = Annotated[float, Bound(above=0)]
NonNegative = Annotated[float, Bound(least=0)]
Count = Annotated[int, Bound(least=1, most=2**31 - 1)]
Index = Annotated[int, Bound(least=0, most=2**31 - 1)]
Seed = Annotated[int, Bound(least=0, below=2**32)]
Share = Annotated[float, Bound(above=0, below=1)]


class Part:
    """One of several dataclasses that a field can hold, written `name` or `name:field=value,...`.

    A direct subclass starts a family; the classes derived from that subclass are listed by name in `known`.
    """

    name: ClassVar[str]
    known: ClassVar[dict[str, type]]

    def __init_subclass__(cls) -> None:
        """Starts a family, or joins one."""
        if Part in cls.__bases__:
            cls.known = {}
        else:
            cls.known[cls.name] = cls

    @classmethod
    def from_text(cls, text: str, what: str) -> Any:
        """The member of the family that a text describes."""
        return parse(text, cls.known, what)

    def __str__(self) -> str:
        """The text that describes this one."""
        given = ",".join(f"{name}={value}" for name, value in to_json(self).items())
        return f"{self.name}:{given}" if given else self.name


def parse(text: str, known: Mapping[str, type[T]], what: str) -> T:
    """The object that `name:field=value,...` describes, where `known` maps names to dataclasses.

    >>> from pfedme.data.synthetic import Synthetic
    >>> parse("synthetic:clients=7", {"synthetic": Synthetic}, "data").clients
    7
    """
    name, _, rest = text.partition(":")
    if name not in known:
        raise unknown(what, name, known)
    given = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"'{pair}' in '{text}' is not of the form field=value.")
        if key.strip() in given:
            raise InputError(f"{key.strip()} is given twice in '{text}'.")
        given[key.strip()] = value.strip()
    return build(known[name], given, f"{what} '{name}'")


def build(cls: type[T], given: Mapping[str, Any], owner: str) -> T:
    """An instance of `cls` from texts or JSON values, each converted to its field's type and checked."""
    hints = field_types(cls)
    for key in given:
        if key not in hints:
            raise unknown(f"option of {owner}", key, hints)
    return check(cls(**{k: _convert(v, hints[k], k, owner) for k, v in given.items()}), owner)


def check(thing: T, owner: str) -> T:
    """`thing` itself, after a check that every field is within its bounds."""
    for name, kind in field_types(type(thing)).items():
        _check(getattr(thing, name), kind, name, owner)
    return thing


def parse_names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list; a name that contains a comma is in quotation marks.

    >>> parse_names('age, "height, in cm"')
    ('age', 'height, in cm')
    """
    return tuple(name.strip() for line in csv.reader([text], skipinitialspace=True) for name in line)


def to_json(thing: Any) -> dict[str, Any]:
    """The fields of `thing` as JSON values; `build` is its inverse."""
    return {f.name: _to_json(getattr(thing, f.name)) for f in dataclasses.fields(thing) if _is_recorded(f)}


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Part) else value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass, bounds included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if _is_recorded(f)}


def _is_recorded(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is an option, rather than something that only exists in memory."""
    return field.init and field.metadata.get("recorded", True)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass: its help on the command line.

    >>> from pfedme.algorithms.pfedme import PFedMe
    >>> field_docs(PFedMe)["lam"]
    'λ: how strongly θ_i is pulled towards w.'
    """
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except (OSError, TypeError):  # no source, as for classes of some other packages
            continue
        body = typing.cast(ast.ClassDef, definition).body
        for node, after in itertools.pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[node.target.id] = inspect.cleandoc(after.value.value)
    return docs


def choices(kind: Any) -> tuple[str, ...]:
    """The names that a field of this type can hold, if it has a fixed set of them.

    >>> choices(Literal["uniform", "samples"] | None), choices(Count)
    (('uniform', 'samples'), ())
    """
    plain, _, _ = _unwrap(kind)
    return tuple(map(str, typing.get_args(plain))) if typing.get_origin(plain) is Literal else ()


def metavar(kind: Any) -> str:
    """The placeholder for a field's value in the help: its choices, or the kind of value.

    >>> metavar(Literal["uniform", "samples"]), metavar(Count), metavar(Positive | None), metavar(str)
    ('{uniform,samples}', 'N', 'X', 'TEXT')
    """
    plain, _, _ = _unwrap(kind)
    if names := choices(kind):
        return f"{{{','.join(names)}}}" if len(names) < 4 else "NAME"
    if _is_part(plain):
        return f"{{{','.join(plain.known)}}}[:...]"
    if typing.get_origin(plain) is tuple:
        return "NAME,..." if typing.get_args(plain)[0] is str else "N-..."
    return {int: "N", float: "X", str: "TEXT", bool: "{true,false}"}.get(plain, "VALUE")


def _unwrap(kind: Any, value: Any = None) -> tuple[Any, Bound | None, bool]:
    """A field's plain type, its bound, and whether None is allowed. If there are several types, the one that
    matches `value`, a tuple or not."""
    bound, optional = None, False
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        several = [k for k in typing.get_args(kind) if k is not types.NoneType]
        alike = [k for k in several if (typing.get_origin(k) is tuple) == isinstance(value, tuple | list)]
        kind = (alike or several)[0]
        optional = True
    if typing.get_origin(kind) is Annotated:
        kind, *notes = typing.get_args(kind)
        bound = next((n for n in notes if isinstance(n, Bound)), None)
    return kind, bound, optional


def _is_part(plain: Any) -> bool:
    return isinstance(plain, type) and issubclass(plain, Part)


def _convert(value: Any, kind: Any, name: str, owner: str) -> Any:
    plain, _, optional = _unwrap(kind, value)
    if _is_part(plain):
        return value if isinstance(value, Part) else plain.from_text(str(value), f"{name} of {owner}")
    if value is None or (optional and value == "none"):
        return None
    origin = typing.get_origin(plain)
    try:
        if origin is tuple:
            if not isinstance(value, str):
                return tuple(value)
            if typing.get_args(plain)[0] is str:
                return parse_names(value)
            parts = value.split("-") if value else []
            if not all(part.isdecimal() for part in parts):
                raise ValueError
            return tuple(map(int, parts))
        if plain is bool and isinstance(value, str):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                value.lower()
            ]
        if plain is int and isinstance(value, float):
            raise ValueError
        if origin is Literal:
            return value
        return plain(value)
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{name} of {owner} must be {_in_words(plain)}, not '{value}'.") from None


def _check(value: Any, kind: Any, name: str, owner: str) -> None:
    plain, bound, optional = _unwrap(kind, value)
    if value is None and optional:
        return
    origin = typing.get_origin(plain)
    if _is_part(plain):
        if not isinstance(value, plain):
            raise InputError(f"{name} of {owner} must be one of {', '.join(plain.known)}, not {value!r}.")
        check(value, f"{name} of {owner}")
        return
    if origin is Literal:
        if value not in typing.get_args(plain):
            raise unknown(f"{name} of {owner}", str(value), map(str, typing.get_args(plain)))
        return
    if plain in (int, float):
        allowed = (int,) if plain is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
            raise InputError(f"{name} of {owner} must be {_in_words(plain)}, not {value}.")
        if bound is not None and (wrong := bound.violated_by(value)):
            raise InputError(f"{name} of {owner} {wrong}, not {value}.")
    if origin is tuple and typing.get_args(plain)[0] is str:
        if not (isinstance(value, tuple) and all(isinstance(part, str) and part for part in value)):
            raise InputError(f"{name} of {owner} must be {_in_words(plain)}.")
    elif isinstance(value, tuple) and not all(isinstance(part, int) and part >= 1 for part in value):
        raise InputError(f"{name} of {owner} must be {_in_words(plain)}, each at least 1.")


def _in_words(plain: Any) -> str:
    if typing.get_origin(plain) is tuple:
        if typing.get_args(plain)[0] is str:
            return "names separated by commas"
        return "whole numbers joined by '-', such as 100-50"
    words = {int: "a whole number", float: "a finite number", bool: "true or false"}
    return words.get(plain, "a text")
