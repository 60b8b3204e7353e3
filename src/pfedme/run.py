"""One run, described completely: what a record stores and what a command line says."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from pfedme.algorithms import ALGORITHMS, Algorithm, PFedMe
from pfedme.data import DATA, Source, pinned
from pfedme.data.table import Table
from pfedme.errors import InputError, unknown
from pfedme.federation import Federation
from pfedme.models import MODELS, Description
from pfedme.personalize import Personalize
from pfedme.simulate import Simulation
from pfedme.spec import Count, Seed, Share, build, check, to_json

NUMBERS = ("rounds", "cohort", "seed", "eval_every", "eval_clients")
"""The fields of a run that are numbers, by which name they are also options of the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that determines a result."""

    algorithm: Algorithm
    data: Source
    model: Description
    rounds: Count = 100
    """T: communication rounds."""
    cohort: Count | None = None
    """S: clients drawn in each round; 10, or all if there are fewer."""
    seed: Seed = 0
    """Seed of the initial model, the cohorts and the mini-batches."""
    eval_every: Count | None = None
    """Rounds between two evaluations of all models of all clients; a twentieth of all if not given."""

    eval_clients: Count | None = None
    """How many clients are evaluated; all, or 1,000 where there are more than 10,000."""

    holdout_clients: Share | None = None
    """Share of the clients that take no part and come as newcomers when the run has finished."""
    personalize: Personalize | None = None
    """How clients find models of their own when the run has finished; not at all if not given."""

    def to_json(self) -> dict[str, Any]:
        """This run as JSON values."""
        return {
            "algorithm": {"name": self.algorithm.name, **to_json(self.algorithm)},
            "data": {"name": self.data.name, **to_json(self.data)},
            "model": {"name": _name_of(self.model, MODELS), **to_json(self.model)},
            **{name: getattr(self, name) for name in NUMBERS},
            # What came later is left out where it is not used, so that earlier records stay what they are.
            **({"holdout_clients": self.holdout_clients} if self.holdout_clients else {}),
            **({"personalize": to_json(self.personalize)} if self.personalize else {}),
        }

    def digest(self) -> str:
        """A short name made of all that determines this run, which stays the same when options are added."""
        parts = {"algorithm": self.algorithm, "data": self.data, "model": self.model, "run": self}
        told = {
            what: {
                field.name: repr(value)
                for field in dataclasses.fields(part)
                if (value := getattr(part, field.name)) != field.default and field.name not in parts
            }
            for what, part in parts.items()
        }
        named = [self.algorithm.name, self.data.name, _name_of(self.model, MODELS), told]
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Run:
        """The inverse of `to_json`."""

        def part(what: str, known: dict[str, Any]) -> Any:
            fields = dict(config[what])
            name = fields.pop("name")
            if name not in known:
                raise unknown(what, name, known)
            return build(known[name], fields, f"{what} '{name}'")

        how = config.get("personalize")
        return cls(
            algorithm=part("algorithm", ALGORITHMS), data=part("data", DATA), model=part("model", MODELS),
            **{name: config[name] for name in NUMBERS},
            holdout_clients=config.get("holdout_clients"),
            personalize=None if how is None else build(Personalize, how, "personalize"),
        )  # fmt: skip

    def command(self) -> str:
        """The command that makes this run again."""
        words = ["pfedme", "run", self.algorithm.name]
        data = self.data
        words += data.words() if isinstance(data, Table) else ["--data", _text(data.name, data)]
        words += ["--model", _text(_name_of(self.model, MODELS), self.model)]
        if self.personalize:
            words += ["--personalize", _text(self.personalize.name, self.personalize)]
        for name in (*NUMBERS, "holdout_clients"):
            if (value := getattr(self, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        for name, value in to_json(self.algorithm).items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    def program(self) -> Hashable:
        """What two runs have in common if one compiled program can carry out both, at the same pace."""
        shape = jax.tree.structure((self.algorithm, self.model))
        numbers = (getattr(self, name) for name in NUMBERS if name != "seed")
        # Newcomers are drawn by seed: runs that hold clients out have federations of their own.
        return shape, self.data, *numbers, (self.holdout_clients, self.seed if self.holdout_clients else None)

    def prepare(self) -> tuple[Run, Simulation]:
        """This run with every default filled in, and its simulation; loads the data."""
        check(self, "the run")
        check(self.algorithm, f"algorithm '{self.algorithm.name}'")
        if self.personalize or self.holdout_clients:
            self.refuse_to_offer()
        federation = self.parties()[0]
        if self.personalize or self.holdout_clients or self.rechooses:
            refuse_to_choose(federation)
        if self.rechooses:
            federation = federation.hold_out(0, Personalize.folds)
        cohort = self.cohort or min(10, federation.clients)
        eval_clients = self.eval_clients or (federation.clients if federation.clients <= 10_000 else 1_000)
        if eval_clients > federation.clients:
            raise InputError(f"--eval-clients {eval_clients} is more than the {federation.clients} clients.")
        described = self.model.settled(federation.features, federation.shape)
        model = described.build(federation.features, federation.classes)
        eval_every = self.eval_every or max(1, self.rounds // 20)
        full = dataclasses.replace(
            self, data=pinned(self.data), model=described, cohort=cohort, eval_every=eval_every,
            eval_clients=eval_clients,
        )  # fmt: skip
        return full, Simulation(self.algorithm, model, federation, cohort=cohort, seed=self.seed)

    @property
    def rechooses(self) -> bool:
        """Whether clients choose a λ of their own while they train."""
        return isinstance(self.algorithm, PFedMe) and self.algorithm.rechoose > 0

    def refuse_to_offer(self) -> None:
        """Raises an error if clients cannot be offered models when this run has finished."""
        if not self.algorithm.has_global:
            raise InputError(
                f"{self.algorithm.name} trains no shared model that a client could start from; use a run of "
                "another algorithm."
            )
        if self.rechooses:
            raise InputError(
                "A run with --rechoose chooses by the rows that would judge its clients' models afterwards; "
                "personalize a run without it."
            )

    def parties(self) -> tuple[Federation, Federation | None]:
        """The clients that take part, and those that come later, if any do."""
        federation = load(self.data)
        if self.holdout_clients is None:
            return federation, None
        later = round(self.holdout_clients * federation.clients)
        if not 0 < later < federation.clients:
            raise InputError(
                f"--holdout-clients {self.holdout_clients} of {federation.clients} clients leaves "
                f"{later} newcomers and {federation.clients - later} to train with; both must be there."
            )
        order = np.random.default_rng([self.seed, 2**33]).permutation(federation.clients)
        return federation.take(np.sort(order[later:])), federation.take(np.sort(order[:later]))


def refuse_to_choose(federation: Federation) -> None:
    """Raises an error if clients cannot choose among models by their rows: if labels are numbers."""
    if federation.classes == 0:
        raise InputError(
            "The label is a quantity, and clients choose their models (--personalize, --holdout-clients, "
            "--rechoose) by the probability of classes; leave that out, and see by 'pfedme compare pfedme "
            "fedavg-ft alone' what suits them."
        )


def load(source: Source) -> Federation:
    """The federation of a source; the last two are kept."""
    return _load(pinned(source))


@lru_cache(maxsize=2)
def _load(source: Source) -> Federation:
    return source.load()


def _name_of(thing: Any, known: dict[str, Any]) -> str:
    return next(name for name, cls in known.items() if type(thing) is cls)


def _text(name: str, thing: Any) -> str:
    """`name:field=value,...` with the fields that are not at their defaults."""
    pairs = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if value != field.default:
            shown = "-".join(map(str, value)) if isinstance(value, tuple) else value
            pairs.append(f"{field.name}={shown}")
    return name + (":" + ",".join(pairs) if pairs else "")
