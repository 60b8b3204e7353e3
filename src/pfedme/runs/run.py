"""The complete description of a run: what a record stores and what a command line specifies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, Literal

import jax
import numpy as np

from pfedme.algorithms import ALGORITHMS, Algorithm, PFedMe
from pfedme.core.models import MODELS, Description, MadeModel, OwnModel
from pfedme.core.spec import Count, Index, Seed, Share, build, check, field_types, parse_names, to_json
from pfedme.data import DATA, Source, pinned
from pfedme.data.federation import Federation
from pfedme.data.mapped import Mapped
from pfedme.data.schema import is_number, listed
from pfedme.data.table import OPTIONS, Table, joined
from pfedme.engine.choices import Personalize
from pfedme.engine.cohorts import evaluated_clients
from pfedme.engine.devices import host, hosts
from pfedme.engine.measure import MetricName, metric_for
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError, unknown
from pfedme.privacy.units import Clients, Privacy, privacy_words
from pfedme.runs.foreign import StandIn, from_record, name_of, recorded, refuse_stand_ins
from pfedme.runs.private import plan, private_algorithm

NUMBERS = ("rounds", "cohort", "seed", "eval_every", "eval_clients")
"""The fields of a run that are numbers; they are also options of the command line, with the same names."""
MOST_COHORT = 100
"""Clients drawn in a round by default."""
CHOICES = ("metric", "class_weights")
"""The fields that take one of a few names, which are options too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that determines a result."""

    algorithm: Algorithm
    data: Source
    model: Description
    rounds: Index = 0
    """T: communication rounds; 0 trains until the loss on validation rows stops falling."""
    cohort: Count | None = None
    """S: clients drawn in each round; 100, or all if there are fewer."""
    seed: Seed = 0
    """Seed of the initial model, the cohorts and the mini-batches."""
    eval_every: Count | None = None
    """Rounds between evaluations of all models of all clients; if not given, a twentieth of all rounds."""

    eval_clients: Count | None = None
    """How many clients are evaluated; by default all, or 1,000 if there are more than 10,000."""

    budget: Count = 1500
    """Maximum number of rounds if training ends when the loss stops falling."""
    quarter_at: tuple[int, ...] = ()
    """Rounds after which the step size eta is divided by four, such as 100-150."""
    holdout_clients: Share | tuple[str, ...] | None = None
    """Share of the clients, or their names, to hold out; they join as newcomers when the run has finished."""
    personalize: Personalize | None = None
    """How clients find their own models when the run has finished; if not given, they do not."""

    metric: MetricName | None = None
    """Metric by which models are judged; if not given, accuracy for classes, AUC if one of two classes is
    rare, and R² for quantities."""
    class_weights: Literal["balanced"] | None = None
    """balanced: every class has the same total weight in training; if not given, every row has the same
    weight."""
    privacy: Privacy | None = None
    """Differential privacy: its unit, ε and δ; if not given, there is none."""

    def to_json(self) -> dict[str, Any]:
        """This run as JSON values."""
        return {
            "algorithm": recorded(self.algorithm, ALGORITHMS),
            "data": recorded(self.data, DATA),
            "model": recorded(self.model, MODELS),
            **{name: getattr(self, name) for name in NUMBERS},
            # Newer fields are left out if they are not used, so that earlier records stay the same.
            **({"budget": self.budget} if not self.rounds or self.budget != Run.budget else {}),
            **({"quarter_at": list(self.quarter_at)} if self.quarter_at else {}),
            **({"holdout_clients": _listed(self.holdout_clients)} if self.holdout_clients else {}),
            **({"personalize": to_json(self.personalize)} if self.personalize else {}),
            **{name: value for name in CHOICES if (value := getattr(self, name)) is not None},
            **({"privacy": str(self.privacy)} if self.privacy else {}),
        }

    def digest(self) -> str:
        """A hash of everything that determines this run, which stays the same when new options are added."""
        parts = {"algorithm": self.algorithm, "data": self.data, "model": self.model, "run": self}
        told = {
            what: {
                field.name: repr(value)
                for field in dataclasses.fields(part)
                if (value := getattr(part, field.name)) != field.default and field.name not in parts
            }
            for what, part in parts.items()
        }
        names = [name_of(self.algorithm, ALGORITHMS), name_of(self.data, DATA), name_of(self.model, MODELS)]
        named = [*names, told]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Run:
        """The inverse of `to_json`."""

        how, later = config.get("personalize"), config.get("holdout_clients")
        return cls(
            algorithm=from_record("algorithm", config["algorithm"], ALGORITHMS),
            data=from_record("data", config["data"], DATA),
            model=from_record("model", config["model"], MODELS),
            **{name: config[name] for name in NUMBERS},
            budget=config.get("budget", cls.budget), quarter_at=tuple(config.get("quarter_at", ())),
            holdout_clients=tuple(later) if isinstance(later, list) else later,
            personalize=None if how is None else build(Personalize, how, "personalize"),
            metric=config.get("metric"), class_weights=config.get("class_weights"),
            privacy=Privacy.from_text(text, "privacy") if (text := config.get("privacy")) else None,
        )  # fmt: skip

    def command(self) -> str:
        """The command that repeats this run; for rows that are not in a file, the call in Python."""
        if isinstance(self.data, Table) and not self.data.path:
            return self._call(self.data)
        options = recorded(self.algorithm, ALGORITHMS)
        name = options.pop("name")
        # A field that only an algorithm of another package has may have the name of another option.
        ours = {field for cls in ALGORITHMS.own.values() for field in field_types(cls)}
        own = [f"{field}={value}" for field, value in options.items() if field not in ours]
        words = ["pfedme", "run", name + (":" + ",".join(own) if own and name in ALGORITHMS else "")]
        data = self.data
        if isinstance(data, Table | Mapped):
            words += data.words()
        else:
            words += ["--data", _text(name_of(data, DATA), data)]
        words += ["--model", _text(name_of(self.model, MODELS), self.model)]
        if self.personalize:
            words += ["--personalize", _text(self.personalize.name, self.personalize)]
        for field in (*NUMBERS, "holdout_clients", *CHOICES):
            if (value := getattr(self, field)) is not None:
                text = joined(value) if isinstance(value, tuple) else str(value)
                words += [f"--{field.replace('_', '-')}", "auto" if field == "rounds" and not value else text]
        if self.privacy:
            words += privacy_words(self.privacy)
        if self.budget != Run.budget or not self.rounds:
            words += ["--budget", str(self.budget)]
        if self.quarter_at:
            words += ["--quarter-at", "-".join(map(str, self.quarter_at))]
        for field, value in options.items():
            if value is not None and (field in ours or name not in ALGORITHMS):
                words += [f"--{field.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def _call(self, table: Table) -> str:
        """The call of `pfedme.train` that repeats this run, where `frame` is the user's data frame."""
        names = (*OPTIONS, "test_frame")
        own = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.name in names}
        given = {
            f.name: own[f.name] for f in dataclasses.fields(table) if own.get(f.name, f.default) != f.default
        }
        held = {"frame": "frame", **{k: k if k == "test_frame" else repr(v) for k, v in given.items()}}
        rows = ", ".join(f"{name}={value}" for name, value in held.items())
        algorithm, model = (
            _text(self.algorithm.name, self.algorithm),
            _text(name_of(self.model, MODELS), self.model),
        )
        numbers = {name: getattr(self, name) for name in ("rounds", "cohort", "seed", "eval_every")}
        rest = ", ".join(f"{name}={value}" for name, value in numbers.items())
        rest += f", privacy={str(self.privacy)!r}" if self.privacy else ""
        return f"pfedme.train({algorithm!r}, pfedme.Table({rows}), model={model!r}, {rest})"

    def program(self) -> Hashable:
        """A key that two runs share if one compiled program can carry out both in step."""
        shape = jax.tree.structure((self.algorithm, self.model))
        numbers = (getattr(self, name) for name in (*NUMBERS, "class_weights") if name != "seed")
        # Newcomers are drawn by seed: runs that hold out clients have different federations.
        numbers = (*numbers, self.privacy)
        return shape, self.data, *numbers, (self.holdout_clients, self.seed if self.holdout_clients else None)

    def prepare(self) -> tuple[Run, Simulation]:
        """This run with every default filled in, and its simulation; loads the data."""
        check(self, "the run")
        if hosts() > 1:
            self.check_hosts()
        if self.quarter_at and not self.rounds:
            raise InputError(
                f"--quarter-at {'-'.join(map(str, self.quarter_at))} needs a given number of rounds; give "
                "--rounds too, or leave it out."
            )
        refuse_stand_ins(self.algorithm, self.data, self.model)
        check(self.algorithm, f"algorithm '{self.algorithm.name}'")
        algorithm = private_algorithm(self) if self.privacy else self.algorithm
        if self.personalize or self.holdout_clients:
            self.refuse_to_offer()
        federation = self.parties()[0]
        if self.rechooses:
            federation = federation.hold_out(0, Personalize.folds)
        cohort = self.cohort or min(MOST_COHORT, federation.clients)
        eval_clients = self.eval_clients or (federation.clients if federation.clients <= 10_000 else 1_000)
        if eval_clients > federation.clients:
            raise InputError(f"--eval-clients {eval_clients} is more than the {federation.clients} clients.")
        described = self.model.with_defaults(federation.features, federation.shape)
        metric_for(federation, self.metric)  # raises an error if it does not fit
        model = described.build(federation.features, federation.classes)
        if self.class_weights:
            model = dataclasses.replace(model, class_weights=balanced_weights(federation))
        full = dataclasses.replace(
            self, algorithm=algorithm, data=pinned(self.data), model=described, cohort=cohort,
            eval_clients=eval_clients,
        )  # fmt: skip
        if self.rounds:
            full = full.lasting(self.rounds)
        who = evaluated_clients(federation.clients, eval_clients, self.seed)
        return full, Simulation(
            algorithm, model, federation, cohort=cohort, seed=self.seed, quarter_at=self.quarter_at,
            privacy=plan(full, algorithm, model, federation, who),
        )  # fmt: skip

    def lasting(self, rounds: int) -> Run:
        """This run with so many rounds."""
        return dataclasses.replace(self, rounds=rounds, eval_every=self.eval_every or max(1, rounds // 20))

    @property
    def rechooses(self) -> bool:
        """Whether clients choose their own λ during training."""
        return isinstance(self.algorithm, PFedMe) and self.algorithm.rechoose > 0

    def refuse_to_offer(self) -> None:
        """Raises an error if this run cannot offer models to clients when it has finished."""
        if not self.algorithm.federated:
            raise InputError(
                f"{self.algorithm.name} trains no shared model that a client could start from; use a run of "
                "another algorithm."
            )
        if self.privacy:
            raise InputError(
                "Clients of a run with --dp would choose their models on rows, outside of its budget; "
                "personalize a run without it."
            )
        if self.rechooses:
            raise InputError(
                "A run with --rechoose has already used the rows that would judge its clients' models; "
                "personalize a run without it."
            )

    def check_hosts(self) -> None:
        """Raises an error if several hosts cannot carry out this run together."""
        if self.algorithm.pools:
            raise InputError(f"{self.algorithm.name} trains on all rows in one place; run it on one host.")
        if isinstance(self.privacy, Clients):
            raise InputError("--dp clients draws cohorts of any size, on one host; leave out --hosts.")

    def parties(self) -> tuple[Federation, Federation | None]:
        """The clients that take part, and those that are held out, if any."""
        federation = load(self.data)
        if self.holdout_clients is None:
            return federation, None
        later = self._later(federation)
        if not 0 < len(later) < federation.clients:
            raise InputError(
                f"--holdout-clients {self.held_out}: of {federation.clients} clients this leaves "
                f"{len(later)} newcomers and {federation.clients - len(later)} to train with; there must be "
                "some of both."
            )
        stay = np.setdiff1d(np.arange(federation.clients), later)
        return federation.take(stay), federation.take(later)

    def _later(self, federation: Federation) -> np.ndarray:
        """The positions in the federation of the clients that are held out."""
        if isinstance(self.holdout_clients, tuple):
            return named_clients(federation, self.holdout_clients)
        later = round((self.holdout_clients or 0) * federation.clients)
        order = np.random.default_rng([self.seed, 2**33]).permutation(federation.clients)
        return np.sort(order[:later])

    @property
    def held_out(self) -> str:
        """The clients that are held out, in words: `20 % of the clients`, or their names."""
        later = self.holdout_clients
        if isinstance(later, tuple):
            return listed(later, quote=False)
        return f"{100 * (later or 0):g} % of the clients"


def parse_held_out(text: str) -> float | tuple[str, ...]:
    """A share of clients, or clients' names separated by commas; a whole number is a name.

    >>> parse_held_out("0.2"), parse_held_out("Dayton,Seattle"), parse_held_out("3")
    (0.2, ('Dayton', 'Seattle'), ('3',))
    """
    return float(text) if is_number(text) and not text.strip().isdecimal() else parse_names(text)


def named_clients(federation: Federation, names: Sequence[str]) -> np.ndarray:
    """The positions of the clients with these names, in the order of the federation."""
    known = {federation.name(i): i for i in range(federation.clients)}
    for name in names:
        if name not in known:
            share = " A share of the clients must be above 0 and below 1." if is_number(name) else ""
            raise InputError(f"--holdout-clients: {unknown('client', name, known)}{share}")
    return np.sort([known[name] for name in set(names)])


def balanced_weights(federation: Federation) -> tuple[float, ...]:
    """Class weights that give every class the same total weight in the training rows of all clients:
    n / (C n_c) if n_c of the n rows have class c and C classes occur. Their mean over these rows is 1."""
    if not federation.classes:
        raise InputError(
            "--class-weights balanced is for classes, and the label is a quantity; leave it out."
        )
    counts = federation.train_labels
    there = counts > 0
    weights = np.where(there, counts.sum() / (there.sum() * np.maximum(counts, 1)), 1.0)
    return tuple(weights.tolist())


def load(source: Source) -> Federation:
    """The federation of a source, of several hosts this one's part; the last two are cached."""
    return _load(pinned(source))


@lru_cache(maxsize=2)
def _load(source: Source) -> Federation:
    return of_this_host(source.load())


def of_this_host(federation: Federation) -> Federation:
    """The part of a federation that this one of several hosts has."""
    return federation if hosts() == 1 else federation.of_host(host(), hosts())


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(name: str, thing: Any) -> str:
    """`name:field=value,...` with the fields that differ from their defaults."""
    pairs = []
    for field in () if isinstance(thing, OwnModel | MadeModel | StandIn) else dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if value != field.default:
            shown = "-".join(map(str, value)) if isinstance(value, tuple) else value
            pairs.append(f"{field.name}={shown}")
    return name + (":" + ",".join(pairs) if pairs else "")
