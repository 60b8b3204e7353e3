"""What a client tells about its table from a file that its owner has written, instead of from its rows.

    rows = 1000
    classes = ["no", "yes"]
    numbers.age = {mean = 50, deviation = 20}
    categories.ward = ["a", "b"]

Nothing in it is computed from rows, so that it reveals nothing about them that its owner has not decided to
publish. The columns must be those of the table. Numbers may have a range instead of a mean and a deviation:

    epsilon = 0.5
    numbers.age = {lowest = 0, highest = 120}

Then these two are computed from rows, with noise that costs ε of the client's budget (`Description`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import secrets
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pfedme.data.fitting import Moments, Told
from pfedme.data.schema import listed
from pfedme.deploy.audit_log import AuditLog, Chain
from pfedme.deploy.budget import Budget, Cost
from pfedme.deploy.policy import Policy
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing
from pfedme.privacy.accounting import Event, check_epsilon, noise_for
from pfedme.privacy.rows import CUT

KEYS = ("rows", "classes", "quantity", "numbers", "categories", "epsilon")
ROWS = 1000
"""The weight of the file in the scaling that clients agree on, as a number of rows."""
FLOOR = 0.01
"""The smallest deviation that is told of a column with a range, as a share of half of it."""
TOLD = "told.json"

Ranges = dict[str | None, tuple[float, float]]
"""The lowest and the highest value of columns, and of the label (None) if it is a quantity."""
Pairs = dict[str | None, tuple[float, float]]
"""The mean and the deviation of such columns, with noise."""


@dataclasses.dataclass(frozen=True)
class Declared:
    """A file about a table."""

    path: Path
    words: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Declared:
        """The file; raises an error if it has something that no table has."""
        try:
            words = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from None
        if foreign := [key for key in words if key not in KEYS]:
            raise InputError(f"{path} has '{foreign[0]}'; it may have {', '.join(KEYS)}.")
        return cls(path, words)

    @cached_property
    def rows(self) -> int:
        """The weight in the scaling."""
        rows = self.words.get("rows", ROWS)
        if type(rows) is not int or rows < 1:
            raise InputError(f"{self.path}: rows must be a whole number of at least 1, not {rows!r}.")
        return rows

    @cached_property
    def ranges(self) -> Ranges:
        """The ranges of columns that have one, and of the label."""
        numbers = self.words.get("numbers", {})
        own: dict[str | None, Any] = dict(numbers) if isinstance(numbers, dict) else {}
        own |= {None: self.words["quantity"]} if "quantity" in self.words else {}
        found = {
            name: _pair(self.path, _where(name), said, "lowest", "highest", lambda a, b: a < b)
            for name, said in own.items()
            if isinstance(said, dict) and set(said) & {"lowest", "highest"}
        }
        if found and self.epsilon is None:
            names = ", ".join(map(_where, found))
            raise InputError(
                f"{self.path}: with a range, the mean and the deviation of {names} are computed from rows; "
                "add epsilon, their share of the budget, such as 0.5."
            )
        return found

    @cached_property
    def epsilon(self) -> float | None:
        """The share of the budget for all columns with a range; None if the file has none."""
        if (epsilon := self.words.get("epsilon")) is None:
            return None
        try:
            check_epsilon(epsilon)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None
        return float(epsilon)

    @property
    def share(self) -> float:
        """ε that it costs in all."""
        return self.epsilon or 0.0

    def told(self, own: Told, pairs: Pairs) -> Told:
        """What the file says about a table whose rows say `own`. Nothing is told about columns with a range
        that are not among the `pairs`."""
        numbers, categories = self.words.get("numbers", {}), self.words.get("categories", {})
        for kind, said, needed in (
            ("numbers", numbers, own.numbers),
            ("categories", categories, own.categories),
        ):
            if not isinstance(said, dict) or set(said) != set(needed):
                raise InputError(
                    f"{self.path}: [{kind}] must have the columns {listed(list(needed)) or '(none)'}, which "
                    f"the table has. Leave columns out with --drop."
                )

        def moments(name: str | None, said: Any) -> Moments:
            if name in self.ranges:
                mean, deviation = pairs.get(name, (0.0, 0.0))
                return Moments(self.rows if name in pairs else 0, mean, deviation**2)
            mean, deviation = _pair(self.path, _where(name), said, "mean", "deviation", lambda _, b: b > 0)
            return Moments(self.rows, mean, deviation**2)

        return dataclasses.replace(
            own,
            numbers={name: moments(name, numbers[name]) for name in own.numbers},
            categories={
                name: _texts(self.path, f"categories.{name}", categories[name]) for name in own.categories
            },
            classes=_classes(self.path, self.words, own),
            quantity=moments(None, self.words.get("quantity")) if own.task == "regression" else None,
        )


def _where(name: str | None) -> str:
    """A column, or the label, as the file has it."""
    return "quantity" if name is None else f"numbers.{name}"


def _classes(path: Path, words: Mapping[str, Any], own: Told) -> tuple[str, ...]:
    if own.task == "regression":
        return ()
    found = _texts(path, "classes", words.get("classes"))
    if lacking := sorted(set(own.classes) - set(found)):
        raise InputError(f"{path}: classes lacks '{lacking[0]}', which occurs in the table.")
    return found


def _texts(path: Path, where: str, said: Any) -> tuple[str, ...]:
    if not isinstance(said, list) or not said or not all(isinstance(text, str) for text in said):
        raise InputError(f'{path}: {where} must be a list of texts, such as ["a", "b"].')
    return tuple(sorted(set(said)))


def _pair(
    path: Path, where: str, said: Any, first: str, second: str, fits: Callable[[float, float], bool]
) -> tuple[float, float]:
    try:
        a, b = (float(said[key]) for key in (first, second))
        if set(said) != {first, second} or not (math.isfinite(a) and math.isfinite(b) and fits(a, b)):
            raise ValueError("impossible")
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{path}: {where} must be such as {{mean = 50, deviation = 20}}, or a range such as "
            "{lowest = 0, highest = 120}."
        ) from None
    return a, b


class Description:
    """The means and deviations of columns with a range, which are computed once, with noise.

    A value's place in the range is u ∈ [−1, 1], with values outside moved to the nearest end. If a row is
    added or removed, the sums of 1, u and u² over the rows that have a value change by a vector of length at
    most √3, and those of m columns together by √(3m). All of them get noise N(0, 3m z²) from the operating
    system's entropy, and what is told is computed from them. They are kept in the state folder, and told
    again without further cost as long as the file and the table stay the same.
    """

    def __init__(self, log: AuditLog, policy: Policy, declared: Declared, fingerprint: str) -> None:
        self.log, self.policy, self.declared = log, policy, declared
        about = {"file": declared.words, "table": fingerprint}
        self.key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def check(self, rows: int) -> None:
        """Raises an error if the share of the budget makes no sense for a table with this many rows."""
        share, limit = self.declared.epsilon, self.policy.max_epsilon
        if share is None:
            return
        if limit is None:
            raise InputError(
                f"{self.declared.path}: epsilon is a share of a budget, and there is none; add --dp rows and "
                "--max-epsilon, or leave it out."
            )
        if self.policy.max_delta * rows >= 1:
            raise InputError(
                f"--max-delta {self.policy.max_delta:g} is not below 1 divided by the {rows:,} training "
                f"rows, as a share of the budget ({self.declared.path}) needs; choose a smaller one."
            )
        if share >= limit:
            raise InputError(
                f"{self.declared.path}: epsilon {share:g} leaves nothing of the limit of {limit:g} "
                "(--max-epsilon) for training; choose a smaller one."
            )

    def stored(self, chain: Chain | None = None) -> Pairs:
        """What was computed, and paid for, before; nothing if that was something else."""
        try:
            text = (self.log.state / TOLD).read_text(encoding="utf-8")
            found = json.loads(text)
            pairs: Pairs = {name: (float(mean), float(other)) for name, mean, other in found["pairs"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        paid = [line.get("sha256") for line in Budget.of(chain or self.log.read()).lines]
        known = found.get("key") == self.key and hashlib.sha256(text.encode()).hexdigest() in paid
        return pairs if known else {}

    def once(self, own: Told) -> Pairs:
        """The means and deviations; computed from `own`, and charged, unless that was done before.

        Raises a refusal if the budget does not allow it.
        """
        ranges, epsilon = self.declared.ranges, self.declared.epsilon
        if not ranges or epsilon is None:
            return {}
        with self.log.turn():
            chain = self.log.read()
            if pairs := self.stored(chain):
                return pairs
            delta = self.policy.max_delta
            z = noise_for(epsilon, (1 - CUT) * delta, 1.0, 1)
            cost = Cost(secrets.token_hex(8), Event(1.0, z, 1), delta, epsilon)
            words = Budget.of(chain).charge(cost, self.policy)
            exact: dict[str | None, Moments] = {**own.numbers, None: own.quantity or Moments(0, 0.0, 0.0)}
            pairs = noisy(exact, ranges, z)
            text = json.dumps({"key": self.key, "pairs": [[name, *pair] for name, pair in pairs.items()]})
            with writing(self.log.state):
                atomic_write(self.log.state / TOLD, text)
            sha = hashlib.sha256(text.encode()).hexdigest()
            self.log.append_in_turn(chain, "spent", kind="agreement", round=None, sha256=sha, **words)
            return pairs


def noisy(own: Mapping[str | None, Moments], ranges: Ranges, z: float) -> Pairs:
    """Means and deviations from the moments of columns whose values are within their ranges, by sums with
    noise multiplier z."""
    draw, deviation, found = random.SystemRandom().gauss, z * math.sqrt(3 * len(ranges)), {}
    for name, (lowest, highest) in ranges.items():
        middle, half = (lowest + highest) / 2, (highest - lowest) / 2
        n, mean, spread = own[name]
        mean = (mean - middle) / half if n else 0.0
        sums = n, n * mean, n * (spread / half**2 + mean**2)
        count, total, squares = (value + draw(0.0, deviation) for value in sums)
        count = max(count, 1.0)
        mean = min(max(total / count, -1.0), 1.0)
        spread = min(max(squares / count - mean**2, FLOOR**2), 1.0)
        found[name] = middle + half * mean, half * math.sqrt(spread)
    return found
