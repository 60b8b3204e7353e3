"""The policy of a data owner: what a server may ask its client for.

A file `policy.toml` next to the table sets limits, and options of `pfedme client` override them:

    min-rows = 200
    min-batch = 32
    algorithms = ["fedavg", "pfedme"]
    approve = "3f2a..."
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pfedme.algorithms import ALGORITHMS
from pfedme.algorithms.cautious import LARGEST_STEP
from pfedme.core.models import MODELS
from pfedme.core.spec import Count, Index, NonNegative, Positive, Share, build, field_types
from pfedme.data.fitting import MOST_CATEGORIES, Moments, Told
from pfedme.data.forms import PLAIN
from pfedme.data.schema import Column, Schema
from pfedme.deploy.messages import Refusal
from pfedme.deploy.plan import Plan, model_words
from pfedme.errors import InputError, unknown

FILE = "policy.toml"
FAR = 10.0
"""Limit, in agreed standard deviations, on the distance of a client's mean from the agreed one, and on its
own standard deviation: pooled over N clients of equal size, no honest mean is farther than √N. A column that
is stretched much more reveals single rows."""
MANY_FEATURES, FEW_FEATURES = 10, 1000
"""An agreement may have this multiple of the features of a client's own table, plus a constant."""
MOST_DRAWN = 10
"""Clients in a round if a plan does not say how many."""
LONGEST_TEXT = 200
"""Limit on the characters of a name, a class or a category."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What the owner of a table allows a server to ask for."""

    approve: str = "ask"
    """How a plan is approved: 'ask' asks at the terminal, 'any' accepts any plan within the limits, and the
    SHA-256 of a plan accepts only that plan."""
    min_rows: Count = 50
    """Smallest number of training rows with which this client takes part."""
    min_count: Count = 5
    """Text values that occur in fewer training rows are not revealed; columns of numbers with fewer distinct
    values are described only roughly."""
    min_batch: Index = 16
    """Smallest mini-batch, B; 0 also allows plans that use all rows at once (B = 0)."""
    min_steps: Count = 10
    """Smallest number of local steps in a round, R."""
    max_draws: Positive = 20.0
    """How often a round may draw each training row, on average: R times B divided by the number of
    rows."""
    max_step: Positive = LARGEST_STEP
    """Largest step size: η, α, ηλ and αλ/2."""
    max_l2: NonNegative = 0.1
    """Largest l2 strength of a model; with a large one, each step forgets the steps before it."""
    max_classes: Count | None = None
    """Largest number of classes that the label may have; if not given, as many as this client's rows have."""
    max_rounds: Count = 1000
    """Largest number of rounds in a plan."""
    max_seconds: Positive = 600.0
    """Longest time to work on one message."""
    max_megabytes: Positive = 256.0
    """Largest message, and so the largest model."""
    batch_key: Literal["secret", "seed"] = "secret"
    """What mini-batches are drawn from: a secret of this client, or the plan's seed, which makes a run equal
    to a simulation but lets a server solve for the rows."""
    lost_state: Literal["refuse", "start-over"] = "refuse"
    """What to do in the middle of a run if what this client keeps for the algorithm is no longer in its state
    folder: refuse, or start over and tell the server."""
    models: tuple[str, ...] = ("mlr",)
    """Models that may be trained, separated by commas. In other models, a server can set hidden units so that
    they capture single rows."""
    algorithms: tuple[str, ...] = ()
    """Algorithms that may be used, separated by commas; if not given, all that are part of pfedme, but none
    from other packages."""
    columns: tuple[str, ...] = ()
    """Columns that may be used, separated by commas; if not given, all that --features and --drop leave."""
    schema: str = ""
    """File with the means, deviations, categories and classes to tell for the agreement, instead of those of
    the rows."""
    dp: Literal["none", "rows", "clients"] = "none"
    """Differential privacy that a plan must have: none is required, or that of this client's rows, for which
    it adds noise itself, or that of clients, for which the server adds noise and has to be trusted."""
    max_epsilon: Positive | None = None
    """Largest ε. With --dp rows, that of this client's rows over all runs in its state folder; the message
    that would exceed it is refused, and this client adds the noise of a smaller ε than the plan's, if need
    be. With --dp clients, that of each plan."""
    max_delta: Share = 1e-5
    """Largest δ of a plan with differential privacy; the ε of all runs is that at this δ."""
    min_cohort: Count = 1
    """Smallest number of clients in a round and in the federation, this one included."""
    secure_aggregation: Literal["optional", "required"] = "optional"
    """Whether uploads must be added up without the server seeing each of them. This version cannot do that:
    if it is required, every plan is refused."""

    def checked(self) -> Policy:
        """This policy, after a check that it makes sense."""
        if self.approve not in ("ask", "any") and not re.fullmatch("[0-9a-f]{64}", self.approve):
            raise InputError(
                f"--approve must be ask, any or the SHA-256 of a plan (64 digits, 0-9 and a-f), not "
                f"'{self.approve[:80]}'."
            )
        if self.dp == "rows" and self.max_epsilon is None:
            raise InputError(
                "--dp rows needs the largest epsilon of this client's rows over all runs; add --max-epsilon, "
                "such as 3."
            )
        if self.dp == "clients" and self.max_epsilon is None:
            raise InputError(
                "--dp clients needs the largest epsilon of a plan; add --max-epsilon, such as 3."
            )
        if self.dp == "none" and self.max_epsilon is not None:
            raise InputError(
                "--max-epsilon limits nothing if plans need not be private; add --dp rows or --dp clients, "
                "or leave it out."
            )
        for what, names, known in (
            ("algorithm", self.algorithms, ALGORITHMS),
            ("model", self.models, MODELS),
        ):
            for name in names:
                if name not in known:
                    raise unknown(what, name, known)
        return self

    def check_table(self, rows: int, columns: Sequence[str], plan: Plan | None = None) -> None:
        """Raises a refusal if a table with this many training rows and these columns may not be used, or not
        for this plan."""
        if rows < self.min_rows:
            raise Refusal(f"it has fewer training rows than its limit of {self.min_rows} (--min-rows)")
        if plan and self.max_draws * rows < plan.algorithm.R * plan.algorithm.B:
            raise Refusal(
                f"a round of the plan draws each of its rows more often than its limit of {self.max_draws:g} "
                "times (--max-draws)"
            )
        if self.columns and (other := [name for name in columns if name not in self.columns]):
            raise Refusal(f"its policy does not allow the column '{other[0]}'; its owner can --drop it")

    def check_plan(self, plan: Plan) -> None:
        """Raises a refusal if a plan asks for more than this policy allows."""
        algorithm = plan.algorithm
        self._check_privacy(plan)
        if (drawn := plan.cohort or MOST_DRAWN) < self.min_cohort:
            raise Refusal(
                f"the plan draws {drawn} clients for a round, but its limit is {self.min_cohort} "
                "(--min-cohort)"
            )
        allowed = self.algorithms or tuple(ALGORITHMS.own)
        if algorithm.name not in allowed:
            raise Refusal(f"its policy allows {', '.join(allowed)}, but not {algorithm.name} (--algorithms)")
        if (model := model_words(plan.model)["name"]) not in self.models:
            raise Refusal(f"its policy allows the model {', '.join(self.models)}, but not {model} (--models)")
        if algorithm.batches != "random" and self.batch_key == "secret":
            raise Refusal("the plan does not draw mini-batches at random (--batch-key seed would allow it)")
        eta, lam = algorithm.eta, getattr(algorithm, "lam", 0.0)
        batch, steps, l2 = algorithm.B, algorithm.R, getattr(plan.model, "l2", 0.0)
        limits: list[tuple[str, bool, float, str]] = [
            ("B", batch >= self.min_batch, batch, "min_batch"),
            ("R", steps >= self.min_steps, steps, "min_steps"),
            ("rounds", plan.rounds <= self.max_rounds, plan.rounds, "max_rounds"),
            ("l2", l2 <= self.max_l2, l2, "max_l2"),
        ]
        alpha = getattr(algorithm, "alpha", 0.0)
        sizes = {"eta": eta, "alpha": alpha, "eta times lam": eta * lam}
        sizes["alpha times lam, halved,"] = alpha * lam / 2
        limits += [(name, value <= self.max_step, value, "max_step") for name, value in sizes.items()]
        for name, fine, value, limit in limits:
            if not fine:
                option = f"--{limit.replace('_', '-')}"
                raise Refusal(
                    f"the plan's {name} is {value:g}, but its limit is {getattr(self, limit):g} ({option})"
                )

    def _check_privacy(self, plan: Plan) -> None:
        if self.secure_aggregation == "required":
            raise Refusal(
                "it requires secure aggregation, which this version of pfedme does not have "
                "(--secure-aggregation)"
            )
        if self.dp != "none" and plan.privacy is None:
            raise Refusal(f"the plan has no differential privacy, which it requires (--dp {self.dp})")
        if self.dp != "none" and plan.privacy is not None and plan.privacy.name != self.dp:
            raise Refusal(
                f"the plan's differential privacy is that of {plan.privacy.name}, but it requires that of "
                f"{self.dp} (--dp {self.dp})"
            )
        most = self.max_epsilon if self.dp == "clients" else None
        if plan.privacy is not None and most is not None and plan.privacy.epsilon > most:
            raise Refusal(
                f"the plan's epsilon is {plan.privacy.epsilon:g}, but its limit is {most:g} (--max-epsilon)"
            )
        if plan.privacy is not None and plan.privacy.delta > self.max_delta:
            raise Refusal(
                f"the plan's delta is {plan.privacy.delta:g}, but its limit is {self.max_delta:g} "
                "(--max-delta)"
            )

    def check_clients(self, count: int) -> None:
        """Raises a refusal if a federation has too few clients."""
        if count < self.min_cohort:
            raise Refusal(
                f"the agreement is among {count} clients, but its limit is {self.min_cohort} (--min-cohort)"
            )

    def most_classes(self, told: Told) -> int:
        """How many classes the label may have, for a client that shares this."""
        return self.max_classes or len(told.classes)

    def check_schema(self, schema: Schema, told: Told) -> None:
        """Raises a refusal if a schema does not fit what this client has shared about its table."""
        if (schema.label, schema.task, schema.impute) != (told.label, told.task, told.impute):
            raise Refusal("the agreement is not about the label and the task of its table")
        if len(schema.columns) != len(told.numbers) + len(told.categories):
            raise Refusal("the agreement has other columns than its table")
        forms = [schema.label_form, *(column.form for column in schema.columns)]
        if schema.na or any(column.of for column in schema.columns) or any(f != PLAIN for f in forms):
            raise Refusal("the agreement is not about plain numbers and categories")
        features = len(told.numbers) + sum(map(len, told.categories.values()))
        if schema.features > MANY_FEATURES * features + FEW_FEATURES:
            raise Refusal(f"the agreement turns its {features:,} features into {schema.features:,}")
        for kind, own in (("number", told.numbers), ("category", told.categories)):
            names = [column.name for column in schema.columns if column.kind == kind]
            if sorted(names) != sorted(own):
                raise Refusal("the agreement has other columns than its table")
        for column in schema.columns:
            if column.kind == "number":
                _check_scaling(column, told.numbers[column.name])
            else:
                own = told.categories[column.name]
                _check_texts(f"column '{column.name}'", column.categories, own, MOST_CATEGORIES)
        if schema.task == "regression":
            label = Column(schema.label, "number", schema.label_mean, schema.label_scale)
            _check_scaling(label, told.quantity or Moments(0, 0.0, 0.0))
            return
        most = self.most_classes(told)
        if len(schema.labels) > most:
            raise Refusal(
                f"the agreement has {len(schema.labels):,} classes, but its limit is {most} (--max-classes, "
                "if the label can have more than occur in its rows)"
            )
        _check_texts(f"label '{schema.label}'", schema.labels, told.classes, most)

    def check_size(self, parameters: int) -> None:
        """Raises a refusal if a model with this many parameters is too large."""
        if 4 * parameters > 1e6 * self.max_megabytes:
            raise Refusal(
                f"the model has {parameters:,} parameters, above its limit of {self.max_megabytes:g} "
                "megabytes (--max-megabytes)"
            )


def _check_scaling(column: Column, own: Moments) -> None:
    numbers = (column.mean, column.scale, column.zero)
    if not all(type(number) in (int, float) and abs(number) <= sys.float_info.max for number in numbers):
        raise Refusal(f"the agreed scaling of '{column.name}' is impossible")
    if column.scale <= 0:
        raise Refusal(f"the agreed scaling of '{column.name}' is impossible")
    if own.values and max(abs(own.mean - column.mean), own.spread**0.5) > FAR * column.scale:
        raise Refusal(f"the agreed scaling of '{column.name}' is far from that of its rows")
    # Numbers must be measured from a value near them: from afar, rounding hides all but what a server wants.
    if abs(column.zero - column.mean) > FAR * column.scale:
        raise Refusal(f"the agreed scaling of '{column.name}' is impossible")


def _check_texts(what: str, texts: Sequence[str], own: Sequence[str], most: int) -> None:
    if len(texts) > most or not all(isinstance(t, str) and len(t) <= LONGEST_TEXT for t in texts):
        raise Refusal(f"the agreed values of the {what} are impossible")
    if len(set(texts)) != len(texts) or not set(own) <= set(texts):
        raise Refusal(f"the agreement leaves out values of its {what}, or has one twice")


def read_policy(data: Path, given: Mapping[str, Any]) -> Policy:
    """The policy in policy.toml next to a table, overridden by what is `given` on the command line."""
    path = (data if data.is_dir() else data.parent) / FILE
    fields: dict[str, Any] = {}
    if path.is_file():
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}.") from None
        fields = {name.replace("-", "_"): value for name, value in found.items()}
        for name, value in fields.items():
            if name in field_types(Policy) and isinstance(value, list):
                fields[name] = tuple(map(str, value))
    if fields.get("schema"):
        fields["schema"] = str(path.parent / str(fields["schema"]))
    found = build(Policy, {**fields, **given}, str(path) if fields else "the policy").checked()
    return dataclasses.replace(found, schema=str(Path(found.schema).absolute()) if found.schema else "")
