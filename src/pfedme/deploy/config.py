"""A plan as the run configuration of the Flower app, and back.

`pfedme server` writes the algorithm and the model as JSON with all their fields. By hand, an algorithm is
described by its name and by hyperparameters with keys of their own, or as on the command line:

    algorithm="fedavg" eta=0.1
    algorithm="fedavg:eta=0.1"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.core.models import MODELS
from pfedme.core.spec import build, field_types, parse, to_json
from pfedme.deploy import BUNDLE
from pfedme.deploy.messages import Words
from pfedme.deploy.plan import Plan, model_words
from pfedme.errors import InputError, unknown

T = TypeVar("T")

APP = ("out", "names", "limit", "command", "resume")
"""Keys that are about a run and no part of its plan."""
ROUNDS = "num-server-rounds"
"""What Flower's own apps call the number of rounds."""
NUMBERS = [name for name in field_types(Plan) if name not in ("algorithm", "model", "rounds")]


def declared() -> Words:
    """The keys that Flower lets a run set, with their defaults; an empty text stands for one of ours."""
    return tomllib.loads((BUNDLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def refuse_undeclared(config: Mapping[str, Any]) -> None:
    """Raises an error if Flower would not let a run set all of this."""
    if foreign := sorted(config.keys() - declared().keys()):
        raise InputError(
            f"The run's configuration has '{foreign[0]}', which there is not: another version of pfedme has "
            "set it up. Start a new run."
        )


def config_of(plan: Plan) -> Words:
    """The configuration that describes a plan, whole."""
    numbers = {name.replace("_", "-"): getattr(plan, name) for name in NUMBERS}
    return {
        "algorithm": json.dumps({"name": plan.algorithm.name, **to_json(plan.algorithm)}),
        "model": json.dumps(model_words(plan.model)),
        ROUNDS: plan.rounds,
        **{key: value for key, value in numbers.items() if value is not None},
    }


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan that a configuration describes; a setting that has no place in it is an error."""
    given = {
        key.replace("-", "_"): value
        for key, value in config.items()
        if value != "" and key not in (*APP, ROUNDS)
    }
    algorithm, model = str(given.pop("algorithm")), str(given.pop("model"))
    numbers = {name: given.pop(name) for name in NUMBERS if name in given}
    return Plan(
        algorithm=_algorithm(algorithm, given),
        model=_described(model, MODELS, "model"),
        rounds=config[ROUNDS],
        **numbers,
    ).checked()


def _algorithm(text: str, given: Words) -> Algorithm:
    """The algorithm that a text and hyperparameters with keys of their own describe."""
    if text in ALGORITHMS:
        return build(ALGORITHMS[text], given, f"algorithm '{text}'")
    found = _described(text, ALGORITHMS, "algorithm")
    if given:
        raise InputError(f"{next(iter(given))} is given beside '{text[:60]}'; put it into that description.")
    return found


def _described(text: str, known: Mapping[str, type[T]], what: str) -> T:
    """What JSON, or `name:field=value,...`, describes."""
    if not text.startswith("{"):
        return parse(text, known, what)
    try:
        fields = json.loads(text)
        name = str(fields.pop("name"))
    except (ValueError, KeyError):
        raise InputError(f"The {what} cannot be read: '{text[:60]}'.") from None
    if name not in known:
        raise unknown(what, name, known)
    return build(known[name], fields, f"{what} '{name}'")
