"""Algorithms, models and data of the user's own in a record.

What this package knows by name is recorded by that name, anything else as `module:Class`, with its fields. To
read such a record the class is imported. Where that cannot be, as for a class that was defined inside a
function, a stand-in has the recorded name and fields: it can be shown, and not run.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from pfedme.algorithms import Algorithm
from pfedme.core.models import Model
from pfedme.core.spec import build, to_json
from pfedme.core.tree import record
from pfedme.errors import InputError, unknown


@record
class OwnModel:
    """The description of a model that is an object, whatever the rows are."""

    model: Model

    @property
    def l2(self) -> float:
        """Strength of the l2 term in every client's loss."""
        return self.model.l2

    def with_defaults(self, features: int, shape: tuple[int, ...] = ()) -> OwnModel:
        """This description: there is nothing to fill in."""
        return self

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Model:
        """The model, once it is known to fit rows of so many features and classes."""
        model = self.model
        if model.classes is None:
            model = dataclasses.replace(model, classes=classes)
        wanted = classes or 1
        try:
            theta = jax.eval_shape(model.init, jax.random.key(0))
            rows = jax.ShapeDtypeStruct((2, features), "float32")
            shape = tuple(jax.eval_shape(model.apply, theta, rows).shape)
        except (TypeError, ValueError, AssertionError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise InputError(
                f"The model {name_of(model)} cannot be applied to rows of {features} numbers: {why}"
            ) from None
        if model.classes != classes or shape != (2, wanted):
            told = f"{classes} classes" if classes else "a quantity (classes=0)"
            raise InputError(
                f"The model {name_of(model)} makes scores of shape {shape} from 2 rows, for "
                f"{model.classes} classes; the data has {told}, so the shape must be (2, {wanted})."
            )
        return model


class StandIn:
    """What a record says of something that cannot be imported."""

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
        """Why it cannot be run."""
        return InputError(
            f"{cls.recorded}, which this run is made with, cannot be imported here; continue it where it is "
            "defined, or start the run again."
        )


def refuse_stand_ins(*parts: Any) -> None:
    """Raises an error if one of them cannot be run."""
    for part in parts:
        if isinstance(part, StandIn):
            raise part.refused()


def name_of(thing: Any, known: Mapping[str, type] | None = None) -> str:
    """What a record calls a thing: its name if it is known, else `module:Class`."""
    if isinstance(thing, StandIn):
        return thing.recorded
    if isinstance(thing, OwnModel):
        thing = thing.model
    names = [name for name, cls in (known or {}).items() if type(thing) is cls]
    return names[0] if names else f"{type(thing).__module__}:{type(thing).__qualname__}"


def recorded(thing: Any, known: Mapping[str, type]) -> dict[str, Any]:
    """A thing as JSON values: its name and its fields."""
    own = thing.model if isinstance(thing, OwnModel) else thing
    return {"name": name_of(thing, known), **{k: _json(v) for k, v in to_json(own).items()}}


def _json(value: Any) -> Any:
    """The value, or a text that tells of it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}:{value.__qualname__}"
        return repr(value)[:200]


def from_record(what: str, document: Mapping[str, Any], known: Mapping[str, type]) -> Any:
    """The inverse of `recorded`, for an `algorithm`, `model` or `data`; a stand-in where there is none."""
    fields = dict(document)
    name = fields.pop("name")
    if name in known:
        return build(known[name], fields, f"{what} '{name}'")
    if ":" not in name:
        raise unknown(what, name, known)
    cls = _imported(name)
    try:
        if what == "algorithm" and issubclass(cls, Algorithm):
            return build(cls, fields, f"{what} '{name}'")
        if what == "model" and issubclass(cls, Model):
            return OwnModel(model=build(cls, fields, f"{what} '{name}'"))
        if what == "data" and hasattr(cls, "load"):
            return build(cls, fields, f"{what} '{name}'")
    except (InputError, TypeError):
        pass
    return _stand_in(what, name, fields)


def _imported(name: str) -> type:
    """The class called `module:Class`, or NoneType."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception:  # whatever a module of somebody else raises
        return type(None)
    return found if isinstance(found, type) else type(None)


def _stand_in(what: str, name: str, fields: Mapping[str, Any]) -> Any:
    bases = (StandIn, Algorithm) if what == "algorithm" else (StandIn,)
    shown = name.rpartition(":")[2].rpartition(".")[2]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    own = [(k, Any, dataclasses.field(default_factory=lambda v=v: v)) for k, v in values.items()]
    named = {"name": shown, "recorded": name}
    return dataclasses.make_dataclass(shown, own, bases=bases, frozen=True, kw_only=True, namespace=named)()
