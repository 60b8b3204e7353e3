"""A plan as the run configuration of the Flower app, and back.

`pfedme server` writes the algorithm and the model as JSON with all their fields. By hand, an algorithm is
described by its name and separate keys for its hyperparameters, or as on the command line:

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
from pfedme.core.spec import build, field_types, parse, parse_names, to_json
from pfedme.data.table import joined
from pfedme.deploy import BUNDLE
from pfedme.deploy.messages import Words
from pfedme.deploy.plan import REGION, Plan, model_words
from pfedme.errors import InputError, unknown
from pfedme.privacy.units import Privacy

T = TypeVar("T")

APP = ("out", "names", "limit", "command", "resume", "upper")
"""Keys that describe a run but are not part of its plan."""
ROUNDS = "num-server-rounds"
"""The name of the number of rounds in Flower's own apps."""
NUMBERS = [
    name for name in field_types(Plan)
    if name not in ("algorithm", "model", "rounds", "privacy", "regions")
]  # fmt: skip


def declared() -> Words:
    """The keys that Flower lets a run set, with their defaults; an empty string means our default."""
    return tomllib.loads((BUNDLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def refuse_undeclared(config: Mapping[str, Any]) -> None:
    """Raises an error if Flower would not let a run set all of this."""
    if foreign := sorted(config.keys() - declared().keys()):
        raise InputError(
            f"The run's configuration has the unknown key '{foreign[0]}': another version of pfedme created "
            "it. Start a new run."
        )


def config_of(plan: Plan) -> Words:
    """The complete configuration that describes a plan."""
    numbers = {name.replace("_", "-"): getattr(plan, name) for name in NUMBERS}
    return {
        "algorithm": json.dumps({"name": plan.algorithm.name, **to_json(plan.algorithm)}),
        "model": json.dumps(model_words(plan.model)),
        ROUNDS: plan.rounds,
        "privacy": "" if plan.privacy is None else str(plan.privacy),
        "regions": joined(plan.regions),
        **{key: value for key, value in numbers.items() if value is not None},
    }


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan that a configuration describes; an unknown setting is an error."""
    given = {
        key.replace("-", "_"): value
        for key, value in config.items()
        if value != "" and key not in (*APP, ROUNDS)
    }
    algorithm, model = str(given.pop("algorithm")), str(given.pop("model"))
    privacy, regions = str(given.pop("privacy", "")), parse_names(str(given.pop("regions", "")))
    numbers = {name: given.pop(name) for name in NUMBERS if name in given}
    return Plan(
        algorithm=_algorithm(algorithm, given),
        model=_described(model, MODELS, "model"),
        rounds=config[ROUNDS],
        privacy=Privacy.from_text(privacy, "privacy") if privacy else None,
        regions=regions,
        **numbers,
    ).checked()


def region_of(config: Mapping[str, Any]) -> Words:
    """What a region decides for its own clients, in a configuration that describes one."""
    given = {name: config[key] for name in REGION if config[key := name.replace("_", "-")] != ""}
    return given | {"regions": parse_names(str(given.get("regions", "")))}


def _algorithm(text: str, given: Words) -> Algorithm:
    """The algorithm that a text and separate hyperparameters describe."""
    if text in ALGORITHMS:
        return build(ALGORITHMS[text], given, f"algorithm '{text}'")
    found = _described(text, ALGORITHMS, "algorithm")
    if given:
        raise InputError(f"{next(iter(given))} is given in addition to '{text[:60]}'; put it into that text.")
    return found


def _described(text: str, known: Mapping[str, type[T]], what: str) -> T:
    """The object that JSON, or `name:field=value,...`, describes."""
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
