"""The user's own algorithms, models and data in a record.

Anything that this package knows by name, its own or registered by another package, is recorded by that name.
A model that a function builds is recorded as `module:function`, and anything else as `module:Class`, with its
fields. Reading such a record imports it. If that is impossible, as for a class that was defined inside a
function or a package that is no longer installed, a stand-in takes the recorded name and fields: it can be
shown but not run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pfedme.algorithms import Algorithm
from pfedme.core.models import MadeModel, Model, OwnModel, imported
from pfedme.core.plugins import Known
from pfedme.core.spec import build, to_json
from pfedme.errors import InputError


class StandIn:
    """Stands in for recorded code that cannot be imported."""

    name: ClassVar[str]
    recorded: ClassVar[str]
    """Its name in the record."""

    def load(self) -> Any:
        """Raises an error."""
        raise self.refused()

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> Any:
        """Raises an error."""
        raise self.refused()

    def client_update(self, *_: Any) -> Any:
        """Raises an error."""
        raise self.refused()

    @classmethod
    def refused(cls) -> InputError:
        """The error that says why it cannot be run."""
        where = "where it is defined" if ":" in cls.recorded else "where its package is installed"
        return InputError(
            f"{cls.recorded}, which this run uses, cannot be imported here; resume the run {where}, or start "
            "it again."
        )


def refuse_stand_ins(*parts: Any) -> None:
    """Raises an error if one of the parts cannot be run."""
    for part in parts:
        if isinstance(part, StandIn):
            raise part.refused()


def name_of(thing: Any, known: Mapping[str, type] | None = None) -> str:
    """The name of a thing in a record: its name if it is known, else `module:Class` or `module:function`."""
    if isinstance(thing, StandIn):
        return thing.recorded
    if isinstance(thing, OwnModel | MadeModel):
        return thing.path
    names = [name for name, cls in (known or {}).items() if type(thing) is cls]
    return names[0] if names else f"{type(thing).__module__}:{type(thing).__qualname__}"


def recorded(thing: Any, known: Mapping[str, type]) -> dict[str, Any]:
    """A thing as JSON values: its name and its fields."""
    if isinstance(thing, MadeModel):
        return {"name": thing.path}
    own = thing.model if isinstance(thing, OwnModel) else thing
    return {"name": name_of(thing, known), **{k: _json(v) for k, v in to_json(own).items()}}


def _json(value: Any) -> Any:
    """The value, or a string that describes it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}:{value.__qualname__}"
        return repr(value)[:200]


def from_record(what: str, document: Mapping[str, Any], known: Known[Any]) -> Any:
    """The inverse of `recorded` for an `algorithm`, `model` or `data`; a stand-in if it is not importable."""
    fields = dict(document)
    name = fields.pop("name")
    if name in known.own:
        return build(known[name], fields, f"{what} '{name}'")
    cls = known[name] if name in known else _imported(name)
    if what == "model" and callable(cls) and not isinstance(cls, type):
        return MadeModel(path=name)
    try:
        if what == "model" and issubclass(cls, Model):
            return OwnModel(model=build(cls, fields, f"{what} '{name}'"))
        if hasattr(cls, "load") if what == "data" else issubclass(cls, known.kind):
            return build(cls, fields, f"{what} '{name}'")
    except (InputError, TypeError):
        pass
    return _stand_in(what, name, fields)


def _imported(name: str) -> Any:
    """The object called `module:Class` or `module:function`, or None."""
    try:
        return imported(name) if ":" in name else None
    except Exception:  # a foreign module can raise anything
        return None


def _stand_in(what: str, name: str, fields: Mapping[str, Any]) -> Any:
    bases = (StandIn, Algorithm) if what == "algorithm" else (StandIn,)
    shown = name.rpartition(":")[2].rpartition(".")[2] if ":" in name else name
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    own = [(k, Any, dataclasses.field(default_factory=lambda v=v: v)) for k, v in values.items()]
    named = {"name": shown, "recorded": name}
    return dataclasses.make_dataclass(shown, own, bases=bases, frozen=True, kw_only=True, namespace=named)()
