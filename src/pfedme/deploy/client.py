"""The client's side: its own table, its part of a round, and the models that stay with it.

The server is not trusted. The client's policy says what the server may ask for. The plan is pinned once the
owner has approved it, and the agreement once it has been checked against the table. A message contains the
hash of that agreement, a round, what the algorithm sends in it, and which of the client's uploads was the
last to count; anything else in it is ignored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedme import __version__
from pfedme.algorithms.base import Models, Update
from pfedme.core.models import Model
from pfedme.core.private_mean import clipped, length_of
from pfedme.core.tree import Params, from_vectors, leaves, to_vectors, vector_shapes
from pfedme.data.federation import Federation
from pfedme.data.fitting import Told
from pfedme.data.hashing import ids_of_names
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.deploy.agreement import to_words
from pfedme.deploy.audit_log import AuditLog
from pfedme.deploy.budget import Cost, Exhausted
from pfedme.deploy.declared import Declared, Description
from pfedme.deploy.encoded import Encoded
from pfedme.deploy.ending import KEPT, Ending, how_pinned, to_pin, why_not
from pfedme.deploy.log import one_line
from pfedme.deploy.memory import Memory
from pfedme.deploy.messages import (
    FROM_ROWS,
    NOISY,
    SCHEMA_FILE,
    SHARED,
    STARTED_OVER,
    Content,
    Refusal,
    Words,
    misfit,
)
from pfedme.deploy.pins import Pins
from pfedme.deploy.plan import Plan, built, offered
from pfedme.deploy.policy import LONGEST_TEXT, Policy
from pfedme.deploy.private import (
    Releases,
    calibrated,
    check_budget,
    cost_of,
    fresh_key,
    refuse_uncovered,
    row_plan,
)
from pfedme.deploy.shared_scores import scores_told
from pfedme.engine.choices import Personalize
from pfedme.engine.exchange import Exchange, exchange, first_state
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.export import Predictor
from pfedme.files import atomic_write, writing
from pfedme.privacy.units import Clients, Rows

MODEL = "model"
"""The folder with the client's model, in its state folder."""
DONE, REFUSED, SCORES, CHOICE = "done", "refused.json", "scores.json", "choice.json"
"""Files in the state folder. The first two hold the server's last message: that the run is over, or why the
client cannot take part. The third has the scores of the client's models, the last which model it has chosen
and why."""
MOST_CLIENTS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Client:
    """A data owner that takes part in a federation."""

    table: Table
    """Its rows, which all belong to it."""
    state: Path
    """The folder with its models and what it is bound by."""
    share_metrics: bool = False
    """Whether the server may know how many test rows its models predict correctly."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    """What a server may ask for."""
    run: str = ""
    """The number of the run in Flower, if only Flower knows when a run begins."""
    personalize: Personalize | None = None
    """How it chooses its model when the run is over; if None, it keeps the algorithm's."""

    @property
    def pins(self) -> Pins:
        """What the client is bound by."""
        return Pins(self.state, self.run)

    @property
    def log(self) -> AuditLog:
        """The client's own log."""
        return AuditLog(self.state)

    @property
    def encoded(self) -> Encoded:
        """The table as numbers, in the state folder."""
        return Encoded(self.table, self.state)

    @property
    def told(self) -> Told:
        """What the client shares about its table, after a check that it may."""
        return self._told()

    def _told(self, *, pay: bool = False) -> Told:
        """`told`; with `pay`, means and deviations with noise are computed if they are not there yet."""
        declared = self.declared
        told, rows = self._read(declared)
        self.policy.check_table(rows, [*told.numbers, *told.categories])
        if declared:
            description = Description(self.log, self.policy, declared, self.encoded.fingerprint())
            description.check(rows)
            told = declared.told(told, description.once(told) if pay else description.stored())
        return dataclasses.replace(told, most_classes=self.policy.most_classes(told))

    @property
    def declared(self) -> Declared | None:
        """The file that says what is told instead of what the rows say, if there is one."""
        return Declared.read(Path(self.policy.schema)) if self.policy.schema else None

    def calibrated(self, plan: Plan, rows: int) -> Words | None:
        """The noise for a plan, if it is private; see `private.calibrated`."""
        declared = self.declared
        return calibrated(plan, self.policy, rows, declared.share if declared else 0.0)

    @property
    def rows(self) -> int:
        """Number of training rows of the client."""
        return self._read(self.declared)[1]

    def _read(self, declared: Declared | None) -> tuple[Told, int]:
        """What the table tells, and its number of training rows."""
        return self.encoded.told(self.policy.min_count, declared.ranges if declared else {})

    def approved(self, words: Any) -> Plan | None:
        """The plan that a server offers, if it is within the limits and approved; None until it is
        approved."""
        plan = offered(words)
        self.policy.check_plan(plan)
        return plan if self.pins.approved(words, self.policy.approve) else None

    def agree(self, asked: Content) -> Content:
        """What the federation must know about the table to agree on columns, classes and scaling.

        Nothing leaves before the owner has approved the plan.
        """
        plan = self.approved(asked.words.get("plan"))
        if plan is None:
            return Content({"pending": True}, {})
        refuse_uncovered(plan, shares=self.share_metrics, chooses=self.personalize is not None)
        rows, declared = self.rows, self.declared
        check_budget(plan, self.calibrated(plan, rows), "", self.log, self.policy)
        source = FROM_ROWS
        if declared:
            source = NOISY if declared.ranges else SCHEMA_FILE
        about: Words = {} if source == FROM_ROWS else {"source": source}
        told = to_words(self._told(pay=True))
        self.log.append("agreement", source=source, min_count=self.policy.min_count)
        return Content({"version": __version__, **told, **about}, {})

    def join(self, asked: Content) -> Content:
        """Binds the client to an agreement that fits its table and its limits."""
        agreement = asked.words.get("agreement")
        if not (isinstance(agreement, dict) and set(agreement) == {"plan", "schema", "names"}):
            raise Refusal("the server's agreement cannot be read")
        if self.approved(agreement["plan"]) is None:
            return Content({"pending": True}, {})
        bound, rows = Bound(self, agreement), self.rows
        refuse_uncovered(bound.plan, shares=self.share_metrics, chooses=self.personalize is not None)
        self.policy.check_schema(bound.schema, self.told)
        self.policy.check_size(bound.numbers)
        self.policy.check_clients(bound.clients)
        self.policy.check_table(rows, (), bound.plan)
        noise = self.calibrated(bound.plan, rows)
        own = to_pin(self.personalize, rows, bound.plan, self.policy) | ({"noise": noise} if noise else {})
        sha = self.pins.bind(agreement, self.encoded.fingerprint(), own)
        pinned = self.pins.bound(sha)
        check_budget(bound.plan, pinned.get("noise"), pinned["id"], self.log, self.policy)
        return Content({"bound": sha}, {})

    def train(self, asked: Content) -> Content:
        """The client's part of a round; the personal model stays here."""
        task, made = Task(self, asked, train=True), list[Models]()

        def make() -> Content:
            update = self._shortened(task, task.simulation.reply(task.t, task.sent, task.kept))
            task.memory.expect(task.t, update.state)
            made.append(update.models)
            weighted = task.simulation.algorithm.aggregation == "samples"
            rows = {"rows": int(task.federation.n_train[0])} if weighted else {}
            return Content(rows | task.told, to_vectors(update.upload))

        content = make() if task.private is None else self._released(task, make)
        for models in made:  # none if the reply is one that was made before
            self.keep(task, models)
        return content

    def _shortened(self, task: Task, update: Update) -> Update:
        """An update whose upload is as long as the plan's differential privacy of clients allows."""
        privacy = task.bound.plan.privacy
        if not isinstance(privacy, Clients):
            return update
        self.log.append(
            "shortened", round=task.t + 1, run=task.run, length=float(length_of(update.upload)),
            longest=privacy.clip,
        )  # fmt: skip
        return update._replace(upload=clipped(update.upload, privacy.clip)[0])

    def _released(self, task: Task, make: Callable[[], Content]) -> Content:
        """The upload of a private plan, which is made once and charged."""
        try:
            return Releases(self.log, self.policy, task.run).once(task.t, task.cost("train"), make)
        except Exhausted as exhausted:
            self._leave(str(exhausted))
            raise

    def finish(self, asked: Content) -> Content:
        """Makes the models in response to w; they stay here, as do their scores unless they may be shared.

        A client that chooses its model does so afterwards (`choosing.choose`), from what is kept here.
        """
        task = Task(self, asked, train=False)
        if task.private is not None and not self._may_finish(task, last=asked.words.get("last") is True):
            return Content(task.told, {})
        simulation = task.simulation
        stacked, info = simulation.reply_models(task.t, task.sent, task.kept)
        # On all training rows, so that counts do not show whether some are kept for the client's choice.
        evaluation = task.whole.score(task.t, task.shared, stacked, info, np.zeros(1, int))
        models = Models(*(None if model is None else model[0] for model in stacked))
        entry = evaluation.entry()
        with writing(self.state):
            atomic_write(self.state / SCORES, json.dumps(entry, indent=1) + "\n")
            if asked.words.get("last") is True:
                self.keep(task, models)
                (self.state / CHOICE).unlink(missing_ok=True)
                why = why_not(task.pinned, self.personalize)
                if task.how or why:
                    arrays = asked.arrays | leaves(KEPT, task.kept)
                    Ending(task.pinned, task.t, arrays, why).save(self.state)
                self.pins.end()
                atomic_write(self.state / DONE, f"{task.t}\n")
        scores = {"scores": scores_told(evaluation, task.federation)} if self.share_metrics else {}
        return Content(scores | task.told, {})

    def _may_finish(self, task: Task, *, last: bool) -> bool:
        """Charges for the models of a private plan; returns whether they must still be made.

        Raises a refusal if there is no budget for them.
        """
        if not last:
            raise Refusal("with differential privacy, it makes its models only at the end")
        try:
            before = Releases(self.log, self.policy, task.run).final(task.t, task.cost("finish"))
        except Exhausted as exhausted:
            self._leave(str(exhausted))
            raise
        return not (before and (self.state / DONE).exists())

    def _leave(self, reason: str) -> None:
        """Records that the client leaves the run, for the process that supervises it."""
        with writing(self.state):
            words = {"reason": reason, "over": False, "own": True}
            atomic_write(self.state / REFUSED, json.dumps(words) + "\n")

    def keep(self, task: Task, models: Models) -> None:
        """Writes the personal model (or else the local one) into the state folder, with its round."""
        which = "personal" if models.personal is not None else "local"
        theta = models.personal if models.personal is not None else models.local
        assert theta is not None
        origin = {"client": self.table.owner, "which": which, "round": task.t}
        predictor = Predictor(task.simulation.model, theta, task.bound.schema, origin=origin)
        with writing(self.state):
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        predictor.save(self.state / MODEL, force=True)

    def refused(self, asked: Content) -> Content:
        """Records why the client cannot take part, or that the run has failed, for the person who started
        it."""
        reason, over = one_line(asked.words.get("reason", ""), 1000), asked.words.get("over") is True
        with writing(self.state):
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if over:
                self.pins.end()
            atomic_write(self.state / REFUSED, json.dumps({"reason": reason, "over": over}) + "\n")
        return Content({}, {})


class Bound:
    """What an agreement means for a client: its plan, its columns, and its model."""

    def __init__(self, client: Client, agreement: Words) -> None:
        self.plan = offered(agreement["plan"])
        client.policy.check_plan(self.plan)
        names = agreement["names"]
        try:
            self.schema = Schema.from_json(agreement["schema"])
            columns = [text for column in self.schema.columns for text in (column.name, column.kind)]
            fine = (
                isinstance(names, list)
                and len(names) <= MOST_CLIENTS
                and all(isinstance(text, str) and len(text) <= LONGEST_TEXT for text in (*names, *columns))
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            fine = False
        if not fine:
            raise Refusal("the server's agreement cannot be read")
        if names.count(client.table.owner) != 1:
            raise Refusal(f"the agreement does not include the client '{client.table.owner}'")
        self.id = int(ids_of_names(names)[names.index(client.table.owner)])
        self.clients = len(names)

    @cached_property
    def model(self) -> Model:
        """The model for the columns that were agreed on."""
        return built(self.plan.model, self.schema.features, len(self.schema.labels))

    @cached_property
    def parameters(self) -> Any:
        """The shapes of the model's parameters."""
        return jax.eval_shape(self.model.init, jax.random.key(0))

    @cached_property
    def exchange(self) -> Exchange:
        """The shapes of what is exchanged in a round."""
        return exchange(self.plan.algorithm, self.model, self.schema.features, self.clients)

    @property
    def numbers(self) -> int:
        """How many numbers the client has to hold, of what it is sent or of its own."""
        parts = (self.exchange.sent, self.exchange.state, self.exchange.message)
        return max(sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)


class Task:
    """What a message asks a client for, after a check that the client is bound to do it."""

    def __init__(self, client: Client, asked: Content, *, train: bool) -> None:
        pinned = client.pins.bound(asked.words.get("agreement"))
        self.bound = bound = Bound(client, pinned["agreement"])
        if not client.pins.approved(pinned["agreement"]["plan"], client.policy.approve):
            raise Refusal("its owner has not approved the plan")
        client.policy.check_size(bound.numbers)
        t = asked.words.get("round")
        last = bound.plan.rounds - 1 if train else bound.plan.rounds
        if type(t) is not int or not 0 <= t <= last:
            raise Refusal(f"the plan has no round {str(t)[:20]}")
        shared, sent = received(asked.arrays, bound)
        try:
            self.federation = rows_of(client, bound, pinned["fingerprint"])
        except InputError:
            raise Refusal("its rows have changed since the agreement; restore them") from None
        self.pinned, self.how = pinned, how_pinned(pinned)
        """What binds the client, and how it chooses its model when the run is over."""
        self.run: str = pinned["id"]
        """The agreement's own number,"""
        self.private: Words | None = pinned.get("noise")
        """and the noise that was pinned with it, if the plan is private."""
        if (self.private is None) == isinstance(bound.plan.privacy, Rows):
            raise Refusal("its noise is not in its state folder; its owner has to check that")
        self.whole = simulation_of(client, bound, self.federation, pinned)
        """The client with all its training rows,"""
        self.simulation = self.whole
        """and with those that it trains on."""
        if self.how:
            part = self.federation.hold_out(0, self.how.folds)
            self.simulation = simulation_of(client, bound, part, pinned)
        columns = [column.name for column in bound.schema.columns]
        trained = int(self.simulation.federation.n_train[0])
        client.policy.check_table(trained, columns, bound.plan)
        client.pins.enter(pinned["sha256"], t, asked.arrays, train=train)
        self.t, self.sent = t, from_vectors(sent, bound.exchange.sent)
        """The round, and what the server has sent."""
        self.shared: Params | None = None
        """The shared model, if there is one."""
        if bound.plan.algorithm.has_global:
            self.shared = from_vectors(shared, bound.parameters) if shared else self.sent
        start_over = client.policy.lost_state == "start-over"
        self.memory = Memory(client.state, pinned["id"], bound.exchange.state, start_over=start_over)

        def first() -> Any:
            return first_state(bound.plan.algorithm, bound.model, bound.plan.seed, self.sent)

        self.kept = self.memory.recall(asked.words.get("counted"), first)
        """What the client has kept since its last part."""
        self.told: Words = {STARTED_OVER: True} if self.memory.started_over else {}
        """What the server is told about that."""

    def cost(self, kind: str) -> Cost:
        """What a reply of some kind costs of the budget."""
        assert self.private is not None
        return cost_of(self.bound.plan, self.private, self.run, kind)


def rows_of(client: Client, bound: Bound, fingerprint: str) -> Federation:
    """The client's rows as numbers; raises an error if they are no longer those with this fingerprint."""
    rows = client.encoded.rows(bound.schema, fingerprint)
    return dataclasses.replace(rows, ids=np.array([bound.id], np.uint32))


def simulation_of(client: Client, bound: Bound, federation: Federation, pinned: Words) -> Simulation:
    """The client's part of the run with the training rows of a federation, which are its own.

    If the plan is private, mini-batches and noise come from a key that nobody has ever seen.
    """
    noise: Words | None = pinned.get("noise")
    key = secret_key(pinned["secret"]) if client.policy.batch_key == "secret" else None
    return Simulation(
        bound.plan.algorithm, bound.model, federation, cohort=1, seed=bound.plan.seed,
        key=key if noise is None else fresh_key(), total=bound.clients,
        privacy=None if noise is None else row_plan(noise),
    )  # fmt: skip


def received(arrays: Mapping[str, np.ndarray], bound: Bound) -> tuple[dict[str, np.ndarray], ...]:
    """The vectors of the shared model, if it is sent separately, and of what the algorithm sends.

    Raises a refusal unless they match the agreement.
    """
    shared = {name.removeprefix(SHARED): a for name, a in arrays.items() if name.startswith(SHARED)}
    sent = {name: a for name, a in arrays.items() if not name.startswith(SHARED)}
    wrong = misfit(sent, vector_shapes(bound.exchange.sent))
    if shared and not wrong:
        wrong = misfit(shared, vector_shapes(bound.parameters))
    if wrong:
        raise Refusal("what the server sent does not match the agreement")
    return shared, sent


def secret_key(secret: str) -> jax.Array:
    """The key from which a client draws its mini-batches: a server that knew them could solve for the rows,
    because it sees how uploads change with the rows that are drawn."""
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(bytes.fromhex(secret), np.uint32)))
