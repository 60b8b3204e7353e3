"""Agreement before training: columns, classes and scaling, from what clients share about their tables.

A client shares the number of its training rows, the mean and the spread of their numbers, and the categories
and classes that occur. It reveals no row, and of test rows only the classes. Its statements are checked:
those that are impossible, or far beyond those of the others, are left out.

A region answers for its clients: what it says is what one client with the rows of all of them would.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from pfedme import __version__
from pfedme.data.fitting import MOST_CATEGORIES, Moments, Sums, Told, combine
from pfedme.data.schema import Column, Schema, Task, is_number, listed
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import FROM_ROWS, NOISY, SCHEMA_FILE, Words, sha256
from pfedme.deploy.policy import LONGEST_TEXT
from pfedme.errors import InputError

MOST_ROWS = 10**9
"""The largest number of rows that a client may claim; row weights are added as floats."""
LARGEST = 1e15
"""The largest mean or standard deviation that a column may have."""
MOST_COLUMNS = 100_000
FEW_TEXTS = 20
"""Number of classes, or categories of a column, that a client may always have,"""
MANY_TEXTS = 5
"""and as a multiple of the median of all clients."""
FAR = 10.0
"""Limit, in multiples of the usual deviation, on the distance of a client's mean from the median of all, and
on its own deviation: a client beyond it is left out of the column's scaling."""
HEAVY = 100.0
"""Limit on the weight of a client's rows in the scaling, as a multiple of the median."""
SOURCES = (FROM_ROWS, SCHEMA_FILE, NOISY)
"""Where what a client tells may come from."""
UNTOLD = 1e30
"""The scale of a column about which no client shares anything, because all numbers are equal or too few: its
features are zeros."""


def to_words(told: Told) -> Words:
    """What a client shares, as JSON values."""
    return dataclasses.asdict(told)


def from_words(words: Any) -> Told:
    """The inverse of `to_words`; raises an error for anything else."""
    if isinstance(words, dict) and words.get("version") != __version__:
        raise InputError(
            f"it has pfedme {one_line(words.get('version'), 20)}, but the server has {__version__}; both "
            "sides must have the same version."
        )
    try:
        if len(words["numbers"]) + len(words["categories"]) > MOST_COLUMNS:
            raise ValueError("too many columns")
        told = Told(
            label=_text(words["label"]),
            task=words["task"],
            impute=words["impute"] is True,
            numbers={_text(name): _moments(values) for name, values in words["numbers"].items()},
            categories={_text(name): _texts(names) for name, names in words["categories"].items()},
            classes=_texts(words["classes"]),
            quantity=None if words["quantity"] is None else _moments(words["quantity"]),
            most_classes=words["most_classes"],
        )
        if type(told.most_classes) is not int or told.most_classes < 0:
            raise ValueError("impossible limit")
        if (told.task == "regression") != (told.quantity is not None) or told.task not in get_args(Task):
            raise ValueError("impossible task")
        if told.task == "classification" and not told.classes:
            raise ValueError("no classes")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise InputError("what it says about its table is impossible.") from None
    return told


def _text(value: Any) -> str:
    if not (isinstance(value, str) and len(value) <= LONGEST_TEXT):
        raise ValueError("impossible text")
    value.encode()  # raises an error for half a character, which JSON can contain but files cannot
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or len(values) > MOST_CATEGORIES:
        raise ValueError("too many texts")
    return tuple(_text(value) for value in values)


def _moments(values: Any) -> Moments:
    count, mean, spread = values
    if type(count) is not int or any(type(value) not in (int, float) for value in (mean, spread)):
        raise ValueError("numbers that cannot be")
    if not (0 <= count <= MOST_ROWS and abs(mean) <= LARGEST and 0 <= spread <= LARGEST**2):
        raise ValueError("numbers that cannot be")
    return Moments(count, float(mean), float(spread))


def shape(told: Told) -> tuple[Any, ...]:
    """What must be the same for all clients."""
    return told.label, told.task, tuple(sorted(told.numbers)), tuple(sorted(told.categories)), told.impute


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What clients have agreed on, their names, and which clients could not agree and why."""

    schema: Schema
    names: tuple[str, ...]
    """Sorted, as in a simulation."""
    refused: dict[str, str]
    left_out: tuple[str, ...] = ()
    """What was left out of the scaling, and why."""
    declared: tuple[str, ...] = ()
    """Clients that told what their owners have written into a file, instead of what their rows say,"""
    noisy: tuple[str, ...] = ()
    """and those that told some of it from rows, with noise."""
    members: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Who is connected to this server, each with the clients that it stands for: a client with itself, and a
    region with its clients. By default, all clients are connected themselves."""

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", {name: (name,) for name in self.names})

    @property
    def clients(self) -> list[str]:
        """The clients of this server: in a region, only some of those in the agreement."""
        return sorted(client for clients in self.members.values() for client in clients)

    def words(self, plan: Words) -> Words:
        """What clients are bound by under a plan; every message contains the hash of these words."""
        return {"plan": plan, "schema": self.schema.to_json(), "names": list(self.names)}

    def sha256(self, plan: Words) -> str:
        """The hash of these words."""
        return sha256(self.words(plan))

    def to_json(self) -> Words:
        """As JSON values."""
        names, left_out = list(self.names), list(self.left_out)
        return {
            "schema": self.schema.to_json(),
            "names": names,
            "refused": self.refused,
            "left_out": left_out,
            "declared": list(self.declared),
            "noisy": list(self.noisy),
            "members": {name: list(clients) for name, clients in self.members.items()},
        }

    @classmethod
    def from_json(cls, words: Words) -> Agreement:
        """The inverse of `to_json`."""
        schema, names = Schema.from_json(words["schema"]), tuple(words["names"])
        left_out, declared, noisy = (tuple(words.get(key, ())) for key in ("left_out", "declared", "noisy"))
        members = {name: tuple(clients) for name, clients in words.get("members", {}).items()}
        return cls(schema, names, dict(words["refused"]), left_out, declared, noisy, members)


@dataclasses.dataclass(frozen=True)
class Fitting:
    """Clients, and regions, whose words fit together, and why the others do not."""

    told: dict[str, Told]
    members: dict[str, dict[str, str]]
    """The clients for which each of them stands, and where what these have told comes from."""
    refused: dict[str, str]

    @property
    def sources(self) -> dict[str, str]:
        """Where what each client has told comes from."""
        return {name: source for clients in self.members.values() for name, source in clients.items()}

    def by(self, source: str) -> tuple[str, ...]:
        """The clients that have told what comes from this source."""
        return tuple(sorted(name for name, own in self.sources.items() if own == source))

    def region(self) -> Words:
        """What a region says for these clients."""
        return {"version": __version__, **to_words(together(self.told)), "clients": self.sources}


def fitting(said: Mapping[str, Any], regions: Collection[str] = ()) -> Fitting:
    """Those that say these words and fit together. Only `regions` may stand for others."""
    told, refused = dict[str, Told](), dict[str, str]()
    members, taken = dict[str, dict[str, str]](), set[str]()
    for name in sorted(said):
        try:
            own = _clients(name, said[name], regions)
            if twice := sorted(taken & set(own)):
                raise InputError(f"it has a client '{twice[0]}', but another client has that name.")
            told[name], members[name] = from_words(said[name]), own
            taken |= set(own)
        except InputError as error:
            refused[name] = str(error)
    if told:
        usual = Counter(shape(one) for one in told.values()).most_common(1)[0][0]
        example = next(one for one in told.values() if shape(one) == usual)
        for name, one in list(told.items()):
            if shape(one) != usual:
                refused[name] = difference(one, example)
                del told[name]
        _refuse_inventors(told, refused)
        _refuse_strange_classes(told, refused)
    return Fitting(told, {name: members[name] for name in told}, refused)


def _clients(name: str, words: Any, regions: Collection[str]) -> dict[str, str]:
    """The clients for which somebody answers, and where what these have told comes from."""
    if not (isinstance(words, dict) and "clients" in words):
        return {name: str(words.get("source", FROM_ROWS)) if isinstance(words, dict) else FROM_ROWS}
    if name not in regions:
        raise InputError(f"it is a region, which the server does not expect; add --regions '{name}' there.")
    own = words["clients"]
    try:
        fine = isinstance(own, dict) and len(own) > 0
        fine = fine and all(_text(client) and source in SOURCES for client, source in own.items())
    except (ValueError, TypeError):
        fine = False
    if not fine:
        raise InputError("what it says about its clients is impossible.")
    return own


def together(told: Mapping[str, Told]) -> Told:
    """What one client with the rows of all of these would tell.

    Those that are far off are left out of means and deviations, and of what has no mean, nothing is told.
    """
    example = next(iter(told.values()))

    def pooled(name: str, own: Mapping[str, Moments]) -> Moments:
        return _pooled(list(_near(name, own, []).values()))

    quantities = {who: one.quantity for who, one in told.items() if one.quantity}
    return dataclasses.replace(
        example,
        numbers={
            name: pooled(name, {who: one.numbers[name] for who, one in told.items()})
            for name in example.numbers
        },
        categories={
            name: tuple(sorted(set().union(*(one.categories[name] for one in told.values()))))
            for name in example.categories
        },
        classes=tuple(sorted(set().union(*(one.classes for one in told.values())))),
        quantity=pooled(example.label, quantities) if quantities else None,
        most_classes=_middle([one.most_classes for one in told.values()]),
    )


def _pooled(moments: Sequence[Moments]) -> Moments:
    """The number, the mean and the spread of the values of several clients.

    >>> _pooled([Moments(3, 50.0, 4.0), Moments(1, 54.0, 0.0)])
    Moments(values=4, mean=51.0, spread=6.0)
    """
    if not moments:
        return Moments(0, 0.0, 0.0)
    count, mean, spread = map(np.array, zip(*moments, strict=True))
    # Measured from one of the means, because squares of large numbers lose small differences.
    zero = float(mean[np.argmax(count)])
    share = count / count.sum()
    shift = float(share @ (mean - zero))
    square = float(share @ (spread + (mean - zero) ** 2))
    return Moments(int(count.sum()), zero + shift, max(0.0, square - shift**2))


def agree(said: Mapping[str, Any], regions: Collection[str] = ()) -> Agreement:
    """The agreement of clients that say these words; those that differ from most others are refused. Only
    `regions` may stand for others.

    >>> kind = {"label": "sick", "task": "classification", "impute": False}
    >>> ages = Moments(3, 50.0, 4.0), Moments(1, 54.0, 0.0)
    >>> north = Told(**kind, numbers={"age": ages[0]}, categories={"sex": ("f",)}, classes=("no", "yes"))
    >>> south = Told(**kind, numbers={"age": ages[1]}, categories={"sex": ("m",)}, classes=("no",))
    >>> here = {"version": __version__}
    >>> found = agree({"north": here | to_words(north), "south": here | to_words(south), "west": here})
    >>> found.schema.columns[0].mean, round(found.schema.columns[0].scale ** 2, 9)
    (51.0, 6.0)
    >>> found.schema.columns[1].categories, found.names, list(found.refused)
    (('f', 'm'), ('north', 'south'), ['west'])
    """
    fit = fitting(said, regions)
    told, refused = fit.told, fit.refused
    if not told:
        return Agreement(Schema((), "", None, "classification"), (), refused)
    example = next(iter(told.values()))
    left_out: list[str] = []
    columns = [
        _number(name, {who: one.numbers[name] for who, one in told.items()}, left_out)
        for name in example.numbers
    ]
    for name in example.categories:
        occur = sorted(set().union(*(one.categories[name] for one in told.values())))
        _refuse_too_many(f"Column '{name}'", occur)
        columns.append(Column(name, "category", categories=tuple(occur)))
    schema = Schema(tuple(columns), example.label, None, example.task, impute=example.impute)
    if not schema.features:
        raise InputError("There is no column that clients may share; there is nothing to learn from.")
    if example.task == "classification":
        labels = sorted(set().union(*(one.classes for one in told.values())))
        labels = sorted(labels, key=float) if all(map(is_number, labels)) else labels
        _refuse_too_many(f"The label '{example.label}'", labels)
        if len(labels) < 2:
            raise InputError(
                f"All clients only have '{example.label}' = {labels[0]}; there is nothing to learn."
            )
        schema = dataclasses.replace(schema, labels=tuple(labels))
    else:
        quantities = {who: one.quantity for who, one in told.items() if one.quantity}
        label = _number(example.label, quantities, left_out)
        schema = dataclasses.replace(schema, label_mean=label.mean, label_scale=label.scale)
    members = {name: tuple(sorted(clients)) for name, clients in fit.members.items()}
    names = tuple(sorted(fit.sources))
    return Agreement(schema, names, refused, tuple(left_out), fit.by(SCHEMA_FILE), fit.by(NOISY), members)


def _refuse_inventors(told: dict[str, Told], refused: dict[str, str]) -> None:
    """Refuses clients that report far more classes, or categories of a column, than the others, and those
    that alone make them too many to agree on."""
    kinds: dict[str, Callable[[Told], Sequence[str]]] = {"label": lambda one: one.classes}
    for name in next(iter(told.values())).categories:
        kinds[f"column '{name}'"] = lambda one, name=name: one.categories[name]
    for what, texts in kinds.items():
        count = {name: len(texts(one)) for name, one in told.items()}
        most = max(FEW_TEXTS, MANY_TEXTS * _middle(list(count.values())))
        for name in [name for name, own in count.items() if own > most]:
            refused[name] = (
                f"its {what} has {count[name]:,} different values, but most others have far fewer; at "
                f"most {most:.0f} are accepted."
            )
            del told[name]
        if len(told) > 2 and len(set().union(*map(texts, told.values()))) > MOST_CATEGORIES:
            rest = {name: set().union(*(texts(one) for n, one in told.items() if n != name)) for name in told}
            name = min(rest, key=lambda name: len(rest[name]))
            if len(rest[name]) <= MOST_CATEGORIES:
                refused[name] = (
                    f"its {what} has {len(texts(told[name])):,} different values, which bring the total "
                    f"above the {MOST_CATEGORIES:,} that can be agreed on."
                )
                del told[name]


def _refuse_strange_classes(told: dict[str, Told], refused: dict[str, str]) -> None:
    """Refuses clients that alone have a class, if there are more classes than most clients accept: otherwise
    they would make the others leave."""
    most = _middle([one.most_classes for one in told.values()])
    times = Counter(label for one in told.values() for label in set(one.classes))
    if len(times) > most:
        for name in [name for name, one in told.items() if any(times[label] == 1 for label in one.classes)]:
            refused[name] = (
                f"it has classes of '{told[name].label}' that no other client has, and most clients accept "
                f"no more than {most:.0f} (--max-classes)."
            )
            del told[name]


def _middle(values: Sequence[float]) -> float:
    """The median, or the lower of two: one of two clients cannot raise it by lying.

    >>> _middle([1, 9]), _middle([1, 2, 9])
    (1, 2)
    """
    return sorted(values)[(len(values) - 1) // 2]


def _refuse_too_many(what: str, names: list[str]) -> None:
    if len(names) > MOST_CATEGORIES:
        raise InputError(
            f"{what} has {len(names):,} different values over all clients, too many to agree on."
        )


def _number(name: str, told: Mapping[str, Moments], left_out: list[str]) -> Column:
    """A numeric column from what clients share about it; notes clients that are left out because they are far
    off."""
    own = _near(name, told, left_out)
    if not own:
        return Column(name, "number", scale=UNTOLD)
    count, mean, spread = (np.array(values, float)[:, None] for values in zip(*own.values(), strict=True))
    # Measured from one of the means, because squares of large numbers lose small differences.
    zero = float(mean[np.argmax(count), 0])
    away = mean - zero
    _, shift, scale = combine([Sums(count, count * away, count * (spread + away**2))])
    return Column(name, "number", zero + float(shift[0]), float(scale[0]), near=zero)


def _near(name: str, told: Mapping[str, Moments], left_out: list[str]) -> dict[str, Moments]:
    """What clients share about a column, without those that share nothing or are far off, which are noted,
    and with no client far heavier than the others."""
    own = {who: one for who, one in told.items() if one.values}
    if len(own) > 2:
        middle = _middle([one.mean for one in own.values()])
        usual = _middle([abs(one.mean - middle) for one in own.values()])
        usual += _middle([one.spread**0.5 for one in own.values()])
        for who, one in list(own.items()):
            if usual and max(abs(one.mean - middle), one.spread**0.5) > FAR * usual:
                left_out.append(
                    f"{who} is left out of the scaling of '{name}': its mean is {one.mean:.3g} and its "
                    f"deviation {one.spread**0.5:.3g}, but the others' are around {middle:.3g} and "
                    f"{usual:.3g}; do the units agree?"
                )
                del own[who]
    if len(own) > 2:
        most = int(HEAVY * _middle([one.values for one in own.values()]))
        own = {who: one._replace(values=min(one.values, most)) for who, one in own.items()}
    return own


def difference(one: Told, usual: Told) -> str:
    """How a client's table differs from the usual one, and the remedy."""
    for what, own, theirs in (("label", one.label, usual.label), ("task", one.task, usual.task)):
        if own != theirs:
            return f"its {what} is '{own}', but the others have '{theirs}'; give --{what} {theirs}."
    mine, others = {*one.numbers, *one.categories}, {*usual.numbers, *usual.categories}
    if lacking := sorted(others - mine):
        return (
            f"its table has no column {listed(lacking)}, which the others have; add it, or have all clients "
            "--drop it."
        )
    if extra := sorted(mine - others):
        return (
            f"its table has a column {listed(extra)}, which the others do not have; leave it out with --drop."
        )
    odd = sorted(set(one.numbers) ^ set(usual.numbers))
    if odd:
        kinds = ("numbers", "text") if odd[0] in one.numbers else ("text", "numbers")
        return f"its column '{odd[0]}' holds {kinds[0]}, but the others' holds {kinds[1]}; make them agree."
    return "it imputes missing values and the others do not, or the other way round; make them agree."
