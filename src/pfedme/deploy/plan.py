"""The plan of a deployed run: everything that its server decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pfedme import __version__
from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.algorithms.aggregate import Mean, Plain
from pfedme.algorithms.cautious import with_cautious_steps
from pfedme.core.models import MODELS, Description, Model, model_from_json
from pfedme.core.spec import Count, Index, NonNegative, Positive, Seed, build, check, to_json
from pfedme.deploy.messages import Refusal, Words
from pfedme.errors import InputError
from pfedme.privacy import clients, rows
from pfedme.privacy.units import ADAPTIVE, Clients, Privacy, Rows
from pfedme.runs.foreign import name_of

PORT = 9092
"""The port that clients connect to in Flower's guides, and that firewalls may know."""
OWN = ("min_clients", "min_replies", "deadline", "max_attempts", "clip", "max_norm_ratio", "join_timeout")
"""The fields of a plan that only a server with clients elsewhere has,"""
REGION = ("min_clients", "min_replies", "clip", "max_norm_ratio", "regions")
"""and those that a region decides for its own clients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a deployed run, except for the clients' tables."""

    algorithm: Algorithm
    model: Description
    rounds: Count = 100
    """T: communication rounds."""
    cohort: Count | None = None
    """S: clients drawn in each round; 10, or all if there are fewer."""
    seed: Seed = 0
    """Seed of the initial model, the cohorts and the mini-batches."""
    min_clients: Count = 2
    """Clients that must be connected before training begins."""
    min_replies: Count | None = None
    """Valid replies that a round needs, otherwise it is repeated; half of the cohort if not given."""
    deadline: Positive = 120.0
    """Seconds that a client has for its part of a round."""
    max_attempts: Count = 5
    """How often a round is tried before the run stops; it can be resumed."""
    clip: NonNegative = 1.0
    """An update longer than this many times the median length of its round and earlier rounds is shortened
    to that; 0 shortens none."""
    max_norm_ratio: Positive = 10.0
    """An update longer than this many times the median length is dropped."""
    join_timeout: Positive = 3600.0
    """Seconds to wait for enough clients."""
    eval_every: Index = 0
    """Rounds between two evaluations, each of which costs another exchange; 0 for only at the end."""
    privacy: Privacy | None = None
    """Differential privacy: of rows, for which each client adds noise, or of clients, for which the server
    does; none if not given."""
    regions: tuple[str, ...] = ()
    """Names of clients that may be regions, separated by commas: servers that answer for clients of their own
    and weigh as much as these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", with_cautious_steps(self.algorithm))

    def checked(self) -> Plan:
        """This plan, after a check that it can be carried out."""
        check(self, "the run")
        if why := self.algorithm.simulated or (not self.algorithm.federated and "nothing is shared"):
            raise InputError(f"{self.algorithm.name} is for simulations and cannot be deployed: {why}.")
        model_words(self.model)
        if self.privacy is not None:
            check(self.privacy, f"--dp {self.privacy.name}")
        if isinstance(self.privacy, Rows):
            self._check_rows()
        elif isinstance(self.privacy, Clients):
            self._check_clients(self.privacy)
        if self.regions:
            check_sums(self)
        if getattr(self.algorithm, "rechoose", 0):
            raise InputError("--rechoose is for simulations; leave it out.")
        if (stand_in := _of_one_feature(self.model)) is not None:
            self.algorithm.check_fit(stand_in, self.min_clients)
        return self

    def _check_clients(self, privacy: Clients) -> None:
        """Raises an error if something about the plan is not covered by differential privacy of clients."""
        clients.check_algorithm(self.algorithm)
        if privacy.clip == 0:
            raise InputError(
                f"--dp-clip {ADAPTIVE} is for simulations; give the length to which clients shorten what "
                "they send, such as --dp-clip 1."
            )
        if type(self.algorithm.codec) is not Plain:
            raise InputError(
                f"--codec {self.algorithm.codec.name} changes the length of what clients send after they "
                "have shortened it for --dp clients; leave it out."
            )

    def _check_rows(self) -> None:
        """Raises an error if something about the plan is not covered by differential privacy of rows."""
        rows.check_algorithm(self.algorithm)
        if self.algorithm.aggregation == "samples":
            raise InputError(
                "--aggregation samples makes clients send the number of their rows, which --dp rows does not "
                "cover; use --aggregation uniform."
            )
        if self.eval_every:
            raise InputError(
                "--eval-every makes clients use their rows between rounds, which would spend their budgets "
                "on nothing with --dp rows; leave it out."
            )

    def offer(self) -> Words:
        """What clients learn about the plan, and what they approve: its hash is that of these words."""
        return {
            "version": __version__,
            "algorithm": {"name": self.algorithm.name, **to_json(self.algorithm)},
            "model": model_words(self.model),
            **{
                name: getattr(self, name)
                for name in ("rounds", "cohort", "seed", "min_clients", "eval_every")
            },
            **(
                {}
                if self.privacy is None
                else {"privacy": {"unit": self.privacy.name, **to_json(self.privacy)}}
            ),
        }


def check_sums(plan: Plan) -> None:
    """Raises an error if a server needs what each client sends: a region sends the sum for its clients."""
    algorithm = plan.algorithm
    if not algorithm.averages:
        raise InputError(
            f"A region sends the sum of what its clients send, but the server of {algorithm.name} needs what "
            f"each of them sends; choose one of {', '.join(clients.supported())}, or leave out the regions."
        )
    for option, part, kind in (("combine", algorithm.combine, Mean), ("codec", algorithm.codec, Plain)):
        if type(part) is not kind:
            raise InputError(
                f"A region sends the sum of what its clients send, but --{option} {part.name} needs what "
                "each of them sends; leave it out."
            )
    if isinstance(plan.privacy, Clients):
        raise InputError(
            "A region sends the sum of what its clients send, but with --dp clients the server has to draw "
            "each client and check the length of what it sends; leave out the regions."
        )


def model_words(model: Description) -> Words:
    """The description of a model as JSON values."""
    names = [name for name, cls in MODELS.items() if type(model) is cls]
    if not names:
        raise InputError(
            f"{name_of(model)} is for simulations: remote clients do not import code that a server names. "
            "Register it as a model on both sides, with an entry point."
        )
    return {"name": names[0], **to_json(model)}


def built(model: Description, features: int, classes: int) -> Model:
    """The model for the columns that were agreed on, after a check that it can be stored in a file."""
    made = model.with_defaults(features).build(features, classes)
    try:
        model_from_json(made.to_json())
    except (NotImplementedError, InputError):
        raise Refusal(
            f"the model '{model_words(model)['name']}' is made of functions, which cannot be stored in a "
            "file; it is for simulations"
        ) from None
    return made


def _of_one_feature(model: Description) -> Model | None:
    """The model for a table with one feature and two classes, while none is known: it has the layers of any
    other. None if these depend on the rows, or if the model is another package's."""
    try:
        return model.with_defaults(1).build(1, 2) if type(model) in MODELS.own.values() else None
    except InputError:
        return None


def offered(words: Any) -> Plan:
    """The plan that a server offers; raises a refusal if this version cannot carry it out."""
    if not isinstance(words, dict):
        raise Refusal("the server's plan cannot be read")
    if words.get("version") != __version__:
        raise Refusal(
            f"it has pfedme {__version__}, but the server has {str(words.get('version'))[:20]}; both sides "
            "must have the same version"
        )
    try:
        fields = dict(words)
        del fields["version"]
        algorithm = _part(fields.pop("algorithm"), ALGORITHMS, "algorithm")
        model = _part(fields.pop("model"), MODELS, "model")
        numbers = {f.name for f in dataclasses.fields(Plan)} & set(fields)
        if numbers != set(fields):
            raise Refusal("the server's plan has settings that this version does not know")
        privacy = offered_privacy(fields.pop("privacy")) if "privacy" in fields else None
        plan = Plan(algorithm=algorithm, model=model, privacy=privacy, **fields).checked()
        if plan.offer() != words:  # such as "10" for 10: the owner sees, and approves, the words
            raise Refusal("the server's plan is not written as this version writes it")
        return plan
    except Refusal:
        raise
    except InputError as error:
        raise Refusal(f"the server's plan is impossible: {error}"[:300]) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Refusal("the server's plan cannot be read") from None


def offered_privacy(words: Any) -> Privacy:
    """The differential privacy of a plan that a server offers."""
    fields = dict(words)
    if (unit := fields.pop("unit")) not in Privacy.known:
        raise Refusal("the plan's unit of differential privacy is neither that of rows nor that of clients")
    return build(Privacy.known[unit], fields, f"differential privacy of {unit}")


def _part(words: Words, known: Mapping[str, Any], what: str) -> Any:
    fields = dict(words)
    name = fields.pop("name")
    if name not in known:
        raise Refusal(
            f"it does not know the {what} '{str(name)[:60]}'; the package that provides it must be installed "
            "on both sides"
        )
    return build(known[name], fields, f"{what} '{name}'")
