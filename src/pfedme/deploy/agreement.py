"""Agreement before training: columns, classes and scaling, from what clients tell of their tables.

A client tells how many training rows it has, the mean and the spread of their numbers, and which categories
and classes occur. It shows no row; of test rows only the classes are told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from pfedme.data.fitting import MOST_CATEGORIES, Moments, Sums, Told, combine
from pfedme.errors import InputError
from pfedme.schema import Column, Schema, Task, is_number, listed

Words = dict[str, Any]


def to_words(told: Told) -> Words:
    """What a client tells, as JSON values."""
    return dataclasses.asdict(told)


def from_words(words: Any) -> Told:
    """The inverse of `to_words`; raises an error for anything else."""
    try:
        told = Told(
            label=str(words["label"]),
            task=words["task"],
            impute=bool(words["impute"]),
            numbers={str(name): _moments(values) for name, values in words["numbers"].items()},
            categories={str(n): tuple(map(str, names)) for n, names in words["categories"].items()},
            classes=tuple(map(str, words["classes"])),
            quantity=None if words["quantity"] is None else _moments(words["quantity"]),
        )
        if any(len(names) > MOST_CATEGORIES for names in (told.classes, *told.categories.values())):
            raise ValueError("more than a table may have")
        if (told.task == "regression") != (told.quantity is not None) or told.task not in get_args(Task):
            raise ValueError("a task that cannot be")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            "what it tells of its table cannot be read; do both sides have one version?"
        ) from None
    return told


def shape(told: Told) -> tuple[Any, ...]:
    """What must be the same for all clients."""
    return told.label, told.task, tuple(sorted(told.numbers)), tuple(sorted(told.categories)), told.impute


def _moments(values: Any) -> Moments:
    moments = Moments(*map(float, values))
    if not (np.isfinite(tuple(moments)).all() and moments.values >= 0 and moments.spread >= 0):
        raise ValueError("numbers that cannot be")
    return moments


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What clients have agreed on, who they are, and who could not agree and why."""

    schema: Schema
    names: tuple[str, ...]
    """Sorted, as in a simulation."""
    refused: dict[str, str]

    def to_json(self) -> Words:
        """As JSON values."""
        return {"schema": self.schema.to_json(), "names": list(self.names), "refused": self.refused}

    @classmethod
    def from_json(cls, words: Words) -> Agreement:
        """The inverse of `to_json`."""
        return cls(Schema.from_json(words["schema"]), tuple(words["names"]), dict(words["refused"]))


def agree(said: Mapping[str, Any]) -> Agreement:
    """The agreement of clients that tell these words; those who differ from most others are refused.

    >>> kind = {"label": "sick", "task": "classification", "impute": False}
    >>> ages = Moments(3, 50.0, 4.0), Moments(1, 54.0, 0.0)
    >>> north = Told(**kind, numbers={"age": ages[0]}, categories={"sex": ("f",)}, classes=("no", "yes"))
    >>> south = Told(**kind, numbers={"age": ages[1]}, categories={"sex": ("m",)}, classes=("no",))
    >>> found = agree({"north": to_words(north), "south": to_words(south), "west": {}})
    >>> found.schema.columns[0].mean, round(found.schema.columns[0].scale ** 2, 9)
    (51.0, 6.0)
    >>> found.schema.columns[1].categories, found.names, list(found.refused)
    (('f', 'm'), ('north', 'south'), ['west'])
    """
    told, refused = dict[str, Told](), dict[str, str]()
    for name in sorted(said):
        try:
            told[name] = from_words(said[name])
        except InputError as error:
            refused[name] = str(error)
    if not told:
        raise InputError("No client has told what its table is like.")
    usual = Counter(shape(one) for one in told.values()).most_common(1)[0][0]
    example = next(one for one in told.values() if shape(one) == usual)
    for name, one in list(told.items()):
        if shape(one) != usual:
            refused[name] = difference(one, example)
            del told[name]
    columns = [
        _number(name, [one.numbers[name] for one in told.values()]) for name in example.numbers
    ]  # fmt: skip
    for name in example.categories:
        occur = sorted(set().union(*(one.categories[name] for one in told.values())))
        _refuse_too_many(f"Column '{name}'", occur)
        columns.append(Column(name, "category", categories=tuple(occur)))
    schema = Schema(tuple(columns), example.label, None, example.task, impute=example.impute)
    if example.task == "classification":
        labels = sorted(set().union(*(one.classes for one in told.values())))
        labels = sorted(labels, key=float) if all(map(is_number, labels)) else labels
        _refuse_too_many(f"The label '{example.label}'", labels)
        if len(labels) < 2:
            raise InputError(
                f"All clients have '{example.label}' = {labels[0]} alone; there is nothing to learn."
            )
        schema = dataclasses.replace(schema, labels=tuple(labels))
    else:
        label = _number(example.label, [one.quantity for one in told.values() if one.quantity])
        schema = dataclasses.replace(schema, label_mean=label.mean, label_scale=label.scale)
    return Agreement(schema, tuple(told), refused)


def _refuse_too_many(what: str, names: list[str]) -> None:
    if len(names) > MOST_CATEGORIES:
        raise InputError(
            f"{what} has {len(names):,} different values over all clients, too many to agree on."
        )


def _number(name: str, told: list[Moments]) -> Column:
    """A column of numbers from what clients tell of it."""
    count, mean, spread = (np.array(values)[:, None] for values in zip(*told, strict=True))
    # Counted from one of the means, because squares of large numbers lose what makes these different.
    zero = float(mean[np.argmax(count), 0])
    away = mean - zero
    n, own, scale = combine([Sums(count, count * away, count * (spread + away**2))])
    if n[0] == 0:
        raise InputError(
            f"Column '{name}' has no value in any client's training rows; leave it out with --drop."
        )
    return Column(name, "number", zero + float(own[0]), float(scale[0]), near=zero)


def difference(one: Told, usual: Told) -> str:
    """What sets a client's table apart from the usual one, and the cure."""
    for what, own, theirs in (("label", one.label, usual.label), ("task", one.task, usual.task)):
        if own != theirs:
            return f"its {what} is '{own}' and that of the others '{theirs}'; give --{what} {theirs}."
    mine, others = {*one.numbers, *one.categories}, {*usual.numbers, *usual.categories}
    if lacking := sorted(others - mine):
        return (
            f"its table has no column {listed(lacking)}, which the others have; add it, or let all --drop it."
        )
    if extra := sorted(mine - others):
        return (
            f"its table has a column {listed(extra)}, which the others do not have; leave it out with --drop."
        )
    odd = sorted(set(one.numbers) ^ set(usual.numbers))
    if odd:
        kinds = ("numbers", "text") if odd[0] in one.numbers else ("text", "numbers")
        return (
            f"its column '{odd[0]}' holds {kinds[0]}, and that of the others {kinds[1]}; see that they agree."
        )
    return (
        "it is to impute missing values, and the others are not, or the other way round; see that they agree."
    )
