"""Checks the arguments of the Python interface; an error says what an argument should have been."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.core.models import Description, Model, OwnModel, parse_model
from pfedme.core.spec import check, parse
from pfedme.data import DATA, Source, parse_data
from pfedme.engine.choices import Personalize
from pfedme.errors import InputError, unknown
from pfedme.privacy.units import Privacy
from pfedme.runs.plan import PLAN
from pfedme.runs.run import parse_held_out

if TYPE_CHECKING:
    from pfedme.tuning.search import Search
    from pfedme.tuning.tune import Tuning

T = TypeVar("T")


def told(value: Any) -> str:
    """Describes a value in a few words.

    >>> told(None), told("ten"), told([1]), told(Algorithm)
    ('None', "'ten'", 'a list', 'the class Algorithm')
    """
    if value is None or isinstance(value, str | int | float):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def algorithm(value: Any) -> Algorithm:
    """An algorithm, given as an object or as in `pfedme:lam=15`."""
    if isinstance(value, str):
        return parse(value, ALGORITHMS, "algorithm")
    if isinstance(value, type) and issubclass(value, Algorithm):
        raise InputError(f"algorithm is the class {value.__name__}; give an instance, {value.__name__}().")
    if not isinstance(value, Algorithm):
        raise InputError(
            f"algorithm must be a string such as 'pfedme:lam=15' or an object such as PFedMe(lam=15), not "
            f"{told(value)}."
        )
    return check(_traceable(value, "algorithm"), f"algorithm '{value.name}'")


def model(value: Any) -> Description:
    """The description of a model, or the user's own model."""
    if isinstance(value, str):
        return parse_model(value)
    if isinstance(value, type) and issubclass(value, Model | Description):
        raise InputError(f"model is the class {value.__name__}; give an instance, {value.__name__}(...).")
    if isinstance(value, Description):
        return check(_traceable(value, "model"), f"model '{type(value).__name__}'")
    if isinstance(value, Model):
        return OwnModel(model=_traceable(value, "model"))
    raise InputError(
        "model must be a string such as 'dnn:hidden=100' or 'my_package:build', a description such as "
        f"DNN(hidden=(100,)), or a Model, not {told(value)}."
    )


def _traceable(value: T, what: str) -> T:
    """The value, after checking that JAX can see its fields."""
    if type(value) in ALGORITHMS.values() or not jax.tree_util.all_leaves([value]):
        return value
    name = type(value).__name__
    raise InputError(f"{what} is an instance of {name}, which needs the decorator @pfedme.record above it.")


def source(value: Any) -> Source:
    """The source of the rows."""
    if isinstance(value, str | os.PathLike):
        return parse_data(os.fspath(value))
    if isinstance(value, type):
        raise InputError(f"data is {told(value)}; give an instance, {value.__name__}(...).")
    if hasattr(value, "columns"):
        raise InputError(
            f"data is {told(value)}; write it to a file and give pfedme.Table(path=..., client=..., "
            "label=...), which says whose rows they are and what to predict."
        )
    if not (hasattr(value, "load") and hasattr(value, "__dataclass_fields__")):
        raise InputError(
            "data must be a string such as 'synthetic' or 'mnist:partition=released', the path of a table, "
            f"or an object such as pfedme.Table(path=..., client=..., label=...), not {told(value)}."
        )
    return check(value, "the data") if type(value) in DATA.values() else value


def how(value: Any) -> Personalize | None:
    """How clients find their own models."""
    if value is None or value is False:
        return None
    if value is True:
        return Personalize()
    if isinstance(value, str):
        return parse(value, {Personalize.name: Personalize}, "personalization")
    if not isinstance(value, Personalize):
        raise InputError(
            f"personalize must be 'auto', 'auto:steps=200,...' or a Personalize(...), not {told(value)}."
        )
    return check(value, "personalize")


def privacy(value: Any) -> Privacy | None:
    """Differential privacy, given as an object or as in `rows:epsilon=3`."""
    if value is None or isinstance(value, Privacy):
        return value if value is None else check(value, "privacy")
    if not isinstance(value, str):
        raise InputError(
            f"privacy must be a string such as 'rows:epsilon=3' or an object such as Rows(epsilon=3.0), not "
            f"{told(value)}."
        )
    return Privacy.from_text(value, "privacy")


def held_out(value: Any) -> float | tuple[str, ...] | None:
    """A share of clients, or clients' names."""
    if isinstance(value, str):
        return parse_held_out(value)
    if isinstance(value, Iterable):
        return tuple(str(plain(name)) for name in value)
    return plain(value)


def folder(value: Any, name: str = "out") -> Path | None:
    """A path, or None."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value)
    raise InputError(f"{name} must be the path of a folder, not {told(value)}.")


def function(name: str, value: Any) -> Callable[..., Any]:
    """A callable."""
    if not callable(value):
        raise InputError(f"{name} must be a function, not {told(value)}.")
    return value


def count(name: str, value: Any) -> int:
    """A positive whole number."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a positive whole number, not {told(value)}.")
    return value


def names(what: str, value: Any, known: Iterable[str]) -> set[str]:
    """A set of names, all of them known."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, Sequence | set | frozenset):
        raise InputError(f"{what} must be a list of names, not {told(value)}.")
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown("hyperparameter", str(name), known)
    return set(given)


def given_in(text: Any) -> list[str]:
    """The fields that are set in `pfedme:lam=15`."""
    pairs = text.partition(":")[2].split(",") if isinstance(text, str) else []
    return [pair.partition("=")[0].strip() for pair in pairs if pair]


def plain(value: Any) -> Any:
    """A NumPy number as a Python number, anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def read_verdict(folder: Path) -> dict[str, Any] | None:
    """The verdict of a comparison, if its plan has one."""
    plan = json.loads((folder / PLAN).read_text())
    return plan.get("verdict") if isinstance(plan, dict) else None


def searching() -> tuple[type[Search], Callable[..., Tuning]]:
    """The class that describes a search and the function that runs it; both need Optuna."""
    try:
        from pfedme.tuning.search import Search
        from pfedme.tuning.tune import tune
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise InputError("pfedme tune needs Optuna: pip install 'pfedme[tune]'.") from None
    return Search, tune
