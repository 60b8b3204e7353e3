"""The server's side: rounds with clients that are elsewhere, some of whom fail."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Cohort
from pfedme.core.models import Model
from pfedme.core.tree import Params, from_vectors, to_vectors, vector_shapes
from pfedme.data.hashing import ids_of_names
from pfedme.data.schema import Schema
from pfedme.deploy.agreement import Agreement, agree
from pfedme.deploy.judge import TRAILING, Upload, clipped, scores_shape, unfit
from pfedme.deploy.messages import GONE, SHARED, UNBOUND, Content, Kind, Reply, Words
from pfedme.deploy.plan import Plan, built
from pfedme.engine.simulate import Exchange, draw_cohort, exchange, first_server, server_key
from pfedme.errors import RunError
from pfedme.runs.ledger import Part

PATIENCE = 2.0
"""How many times as long as for the others to wait for a client that was late the last time,"""
FULL_WAIT = 5
"""but for one in so many times, when it has all the time again."""
REFUSE_S = 10.0
"""Seconds to wait for a client to say that it has heard why it was turned away."""
MOST_FAILURES = 3
"""How often a client may agree and then not accept the agreement before it is turned away."""
LOOK_S, ASK_AGAIN_S = 0.5, 5.0
"""Seconds between two looks at who is there, and between two questions to a client whose owner has not yet
approved the plan."""


Enough = Callable[[set[str], float], bool]
"""Whether to wait no longer for clients, so many seconds after they were asked."""


def never(waiting: set[Any], seconds: float) -> bool:
    """The answer of those who wait until all have answered, or the deadline has come."""
    return False


class Channel(Protocol):
    """The way to the clients."""

    def present(self) -> list[str]:
        """The names of the clients that are connected."""
        ...

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        """The replies of clients, each asked for its own content, that come within `deadline` seconds.

        Waits no longer once `enough` is true of the clients that have not answered.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a deployed run stands after `t` rounds; with the plan it determines what follows."""

    t: int
    server: Any
    """What the algorithm's server keeps: mostly the shared model."""
    agreement: Agreement
    ledger: tuple[Part, ...] = ()
    """Lines that are not yet written."""
    attempt: int = 0
    """How often the next round was tried in vain."""
    norms: tuple[float, ...] = ()
    """Lengths of the last updates that counted."""
    lates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How often clients were late since they last were not."""
    counted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The last round in which each client's upload counted; the first is 1."""
    history: tuple[dict[str, Any], ...] = ()

    def noting(self, parts: Sequence[Part]) -> Progress:
        """This state with more lines of the ledger, and what follows from them."""
        lates = {**self.lates}
        for part in parts:
            lates[part.client] = lates.get(part.client, 0) + 1 if part.outcome == "late" else 0
        good = [part for part in parts if part.outcome == "counted"]
        norms = [part.norm for part in good if part.norm is not None]
        return dataclasses.replace(
            self, ledger=(*self.ledger, *parts), lates=lates, norms=(*self.norms, *norms)[-TRAILING:],
            counted={**self.counted, **{part.client: part.round for part in good}},
        )  # fmt: skip


class Stopped(RunError):
    """Too few clients, or too few good replies too often; the run can be resumed from `progress`."""

    def __init__(self, why: str, progress: Progress | None = None) -> None:
        super().__init__(why)
        self.progress = progress


Tell = Callable[[str], None]
"""What is done with a line for the people at the server."""


class Server:
    """A plan being carried out with the clients at the other end of a channel."""

    def __init__(self, plan: Plan, channel: Channel, tell: Tell) -> None:
        self.plan, self.channel, self.tell = plan.checked(), channel, tell
        self.settled = False
        """Whether a round was done since the server started: before that clients may still be coming back."""
        self.refused: dict[str, str] = {}
        """Why clients were turned away,"""
        self.turned_away: set[str] = set()
        """and who of them is still there."""
        self.unbound: set[str] = set()
        """Clients of the agreement that have to be told it again."""
        self.news: dict[str, Words] = {}
        """What became of the clients' last parts."""
        self.hashed: tuple[Agreement, str] | None = None
        """The agreement and its hash,"""
        self.shapes: tuple[Agreement, Exchange] | None = None
        """and the shapes of what is exchanged under it."""

    def begin(self) -> Progress:
        """Waits for clients, agrees with them on columns, classes and scaling, and makes the first model."""
        plan, offer = self.plan, self.plan.offer()
        said, asked_at = dict[str, Words](), dict[str, float]()
        failures = Counter[str]()
        waited, told = time.monotonic(), ""
        while True:
            present, now = self._forget_who_left(), time.monotonic()
            said = {name: words for name, words in said.items() if name in present}
            asked_at = {name: at for name, at in asked_at.items() if name in present}
            new = {
                name: Content({"plan": offer}, {})
                for name in present
                if name not in said
                and name not in self.turned_away
                and now - asked_at.get(name, -ASK_AGAIN_S) >= ASK_AGAIN_S
            }
            if len(present) >= plan.min_clients and new:
                replies = self.channel.ask("agree", new, plan.deadline)
                # Who does not answer, be it too late or gone, is asked again.
                asked_at |= {name: now for name, reply in replies.items() if _pending(reply)}
                said |= {
                    name: reply.content.words
                    for name, reply in replies.items()
                    if reply.content and not _pending(reply)
                }
                self._refuse({n: r.error for n, r in replies.items() if r.error and r.error != GONE})
            if said and len(said) >= plan.min_clients:
                agreement = agree(said)
                self._refuse(agreement.refused)
                said = {name: said[name] for name in agreement.names}
                if len(said) >= plan.min_clients:
                    self.model_for(agreement.schema)  # whatever is wrong with it shows before anyone is bound
                    willing = self._bind(agreement)
                    if willing >= set(said):
                        break
                    failures.update(set(said) - willing)
                    why = "it did not accept the agreement, or did not answer, too often."
                    self._refuse({n: why for n in set(said) - willing if failures[n] >= MOST_FAILURES})
                    said = {name: words for name, words in said.items() if name in willing}
            line = self._waiting(present, asked_at)
            if line != told:
                self.tell(line)
                told = line
            if time.monotonic() - waited > plan.wait:
                here = len(present) - len(self.turned_away)
                raise Stopped(
                    f"{here} of at least {plan.min_clients} clients came within {plan.wait:g} seconds."
                )
            time.sleep(LOOK_S)
        refused = {name: why for name, why in self.refused.items() if name not in agreement.names}
        agreement = dataclasses.replace(agreement, refused=refused)
        for line in agreement.left_out:
            self.tell(f"{line[0].upper()}{line[1:]}")
        names = ", ".join(agreement.names)
        self.tell(f"{len(agreement.names)} clients agree on {agreement.schema.features} features: {names}.")
        self.tell(f"The agreement's SHA-256 is {agreement.sha256(offer)}.")
        return Progress(0, self.first_server(agreement), agreement)

    def first_server(self, agreement: Agreement) -> Any:
        """What the algorithm's server keeps before the first round."""
        model, clients = self.model_for(agreement.schema), len(agreement.names)
        return first_server(self.plan.algorithm, model, self.plan.seed, clients)

    def exchange(self, agreement: Agreement) -> Exchange:
        """The shapes of what is exchanged in a round."""
        if self.shapes is None or self.shapes[0] is not agreement:
            model, clients = self.model_for(agreement.schema), len(agreement.names)
            shapes = exchange(self.plan.algorithm, model, agreement.schema.features, clients)
            self.shapes = agreement, shapes
        return self.shapes[1]

    def shared(self, progress: Progress) -> Params | None:
        """The shared model, if there is one."""
        return self.plan.algorithm.shared(progress.server, None)

    def _waiting(self, present: Sequence[str], asked_at: Mapping[str, float]) -> str:
        here = sum(name not in self.turned_away for name in present)
        line = f"Waiting for clients: {here} of {self.plan.min_clients} are there."
        if asked_at:
            line += f" To be approved by the owners of {', '.join(sorted(asked_at))}."
        return line

    def _bind(self, agreement: Agreement, names: Sequence[str] | None = None) -> set[str]:
        """Those of an agreement's clients, or of `names`, that are bound by it now; the others have refused,
        or have not answered."""
        plan = self.plan.offer()
        sha, content = agreement.sha256(plan), Content({"agreement": agreement.words(plan)}, {})
        replies = self.channel.ask(
            "join", dict.fromkeys(agreement.names if names is None else names, content), self.plan.deadline
        )
        self._refuse({n: r.error for n, r in replies.items() if r.error and r.error != GONE})
        return {
            name
            for name, reply in replies.items()
            if reply.content is not None and reply.content.words.get("bound") == sha
        }

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        reasons = {name: why for name, why in reasons.items() if name not in self.turned_away}
        for name, why in reasons.items():
            self.tell(f"Refused {name}: {why}")
        self.refused |= reasons
        self.turned_away |= set(reasons)
        contents = {name: Content({"reason": why}, {}) for name, why in reasons.items()}
        if contents:
            self.channel.ask("refuse", contents, self.plan.deadline, lambda _, seconds: seconds > REFUSE_S)

    def fail(self, why: str) -> None:
        """Tells all clients that the run has failed, lest they wait for it."""
        content = Content({"reason": why, "over": True}, {})
        present = [name for name in self.channel.present() if name not in self.turned_away]
        if present:
            self.channel.ask("refuse", dict.fromkeys(present, content), self.plan.deadline)

    def _forget_who_left(self) -> list[str]:
        """The clients that are there; who was turned away and left may come back with another table."""
        present = self.channel.present()
        self.turned_away &= set(present)
        return present

    def _turn_away(self, agreement: Agreement) -> None:
        """Tells clients that have come after the agreement that the run goes on without them, each once."""
        new = set(self._forget_who_left()) - {*agreement.names, *self.turned_away}
        late = "the run had begun when it came; it can take part in the next one."
        self._refuse(dict.fromkeys(sorted(new), late))

    def model_for(self, schema: Schema) -> Model:
        """The model for the columns that were agreed on."""
        return built(self.plan.model, schema.features, len(schema.labels))

    def cohort(self, progress: Progress) -> list[str]:
        """The clients of the next round: those that a simulation would draw."""
        names = progress.agreement.names
        size = min(self.plan.cohort or 10, len(names))
        by_id = np.argsort(ids_of_names(names), kind="stable")
        return [names[i] for i in draw_cohort(by_id, size, self.plan.seed, progress.t)]

    def round(self, progress: Progress) -> Progress:
        """The state after one more round, which is tried again as long as too few replies are good."""
        cohort, before, number = self.cohort(progress), progress.attempt, progress.t + 1
        least = self.least(cohort)
        self._turn_away(progress.agreement)
        for attempt in range(before + 1, before + self.plan.tries + 1):
            self._await(cohort, least if self.settled else len(cohort))
            self.settled = True
            parts, uploads = self.collect(progress, cohort, attempt)
            for part in parts:
                if part.outcome != "counted":
                    self.tell(f"Round {number}: {part.client} {part.outcome} ({part.reason}).")
            if len(uploads) >= least:
                server, parts = self.combine(progress, parts, uploads)
                if _finite(server):
                    self._note_news(parts)
                    return dataclasses.replace(
                        progress.noting(parts), t=progress.t + 1, server=server, attempt=0
                    )  # fmt: skip
                raise RunError(f"The shared model diverged in round {number}; lower the step sizes.")
            parts = [
                dataclasses.replace(p, outcome="failed", reason="the round had too few good replies")
                if p.outcome == "counted" else p
                for p in parts
            ]  # fmt: skip
            self._note_news(parts)
            progress = dataclasses.replace(progress.noting(parts), attempt=attempt)
            self.tell(
                f"Round {number} had {len(uploads)} good replies of at least {least}; "
                + ("it is repeated." if attempt < before + self.plan.tries else "that was the last try.")
            )
        raise Stopped(
            f"Round {number} had too few good replies {self.plan.tries} times; its clients must come "
            "back before the run goes on.",
            progress,
        )

    def _note_news(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.news[part.client] = {
                "round": part.round, "outcome": part.outcome, "reason": part.reason,
                "norm": part.norm, "clipped": part.clipped,
            }  # fmt: skip

    def least(self, cohort: Sequence[str]) -> int:
        """Good replies that a round must have."""
        return min(self.plan.min_replies or -(-len(cohort) // 2), len(cohort))

    def _await(self, cohort: Sequence[str], least: int) -> None:
        """Waits, for as long as clients have for a round, until enough of a cohort are there."""
        until = time.monotonic() + self.plan.deadline
        while len(set(cohort) & set(self.channel.present())) < least and time.monotonic() < until:
            time.sleep(0.5)

    def collect(
        self, progress: Progress, cohort: Sequence[str], attempt: int
    ) -> tuple[list[Part], dict[str, Upload]]:
        """What became of each client's part of a round, and the uploads that are good."""
        here = set(self.channel.present()) & set(cohort)
        if again := sorted(self.unbound & here):
            self.unbound -= self._bind(progress.agreement, again)
        replies, waited = self.replies(progress, [name for name in cohort if name in here], cohort, attempt)
        parts, uploads = dict[str, Part](), dict[str, Upload]()
        weighted, codec = self.plan.algorithm.aggregation == "samples", self.plan.algorithm.codec
        message = self.exchange(progress.agreement).message
        shapes = vector_shapes(message)
        for name in cohort:
            part = Part(progress.t + 1, attempt, name, "counted")
            reply = replies.get(name)
            if reply is None and name not in here:
                part = dataclasses.replace(part, outcome="absent", reason="it is not connected")
            elif reply is None:
                why = f"no reply within {round(waited[name], 1):g} seconds"
                part = dataclasses.replace(part, outcome="late", reason=why)
            elif reply.content is None:
                part = dataclasses.replace(part, outcome="failed", reason=reply.error)
                if reply.error == UNBOUND:
                    self.unbound.add(name)
            elif why := unfit(reply.content, shapes, weighted):
                part = dataclasses.replace(part, outcome="dropped", reason=why)
            else:
                upload = codec.decode(from_vectors(reply.content.arrays, message))
                uploads[name] = Upload(upload, reply.content.words["rows"] if weighted else 1)
                rows = uploads[name].rows if weighted else None
                part = dataclasses.replace(part, norm=uploads[name].norm, rows=rows)
            parts[name] = part
        parts, uploads = clipped(parts, uploads, progress.norms, clip=self.plan.clip, far=self.plan.far)
        return list(parts.values()), uploads

    def replies(
        self, progress: Progress, here: Sequence[str], cohort: Sequence[str], attempt: int
    ) -> tuple[dict[str, Reply], dict[str, float]]:
        """What the clients of a cohort that are here answer, and for how long each was waited for.

        One that was late the last time is waited for less, if the others' replies are enough.
        """
        slow = {n for n in here if attempt == 1 and progress.lates.get(n, 0) % FULL_WAIT}
        others = 0.0

        def enough(waiting: set[str], seconds: float) -> bool:
            nonlocal others
            if waiting - slow or len(here) - len(waiting) < self.least(cohort):
                others = seconds
            return seconds > PATIENCE * others

        asked = {name: Content(self.words(progress, name), self.sent(progress, name)) for name in here}
        replies = self.channel.ask("train", asked, self.plan.deadline, enough) if asked else {}
        deadline = self.plan.deadline
        waited = {name: min(deadline, PATIENCE * others) if name in slow else deadline for name in here}
        return replies, waited

    def words(self, progress: Progress, name: str) -> Words:
        """What is in a message beside what the algorithm sends: the agreement by its hash, the round, the
        round in which the client's upload last counted, and what became of its last part."""
        if self.hashed is None or self.hashed[0] is not progress.agreement:
            self.hashed = progress.agreement, progress.agreement.sha256(self.plan.offer())
        news = {"news": self.news[name]} if name in self.news else {}
        counted = progress.counted.get(name, 0)
        return {"agreement": self.hashed[1], "round": progress.t, "counted": counted, **news}

    def sent(self, progress: Progress, name: str, *, shared: bool = False) -> dict[str, np.ndarray]:
        """What the algorithm sends to a client, and if `shared` the shared model, unless that is just it."""
        place = progress.agreement.names.index(name)
        sent, w = self.plan.algorithm.send(progress.server, jnp.int32(place)), self.shared(progress)
        apart = to_vectors(w) if shared and w is not None and w is not sent else {}
        return to_vectors(sent) | {f"{SHARED}{key}": vector for key, vector in apart.items()}

    def combine(
        self, progress: Progress, parts: Sequence[Part], uploads: Mapping[str, Upload]
    ) -> tuple[Any, list[Part]]:
        """What the server keeps after the round, and the parts with what each did to the step."""
        stack = jax.tree.map(lambda *all: jnp.stack(all), *(upload.tree for upload in uploads.values()))
        rows = np.array([upload.rows for upload in uploads.values()], np.float32)
        names = progress.agreement.names
        places = jnp.array([names.index(name) for name in uploads], jnp.int32)
        key = server_key(jax.random.key(self.plan.seed), progress.t)

        def after(rows: np.ndarray) -> Any:
            cohort = Cohort(key, places, jnp.asarray(rows), len(names))
            return _server_update(self.plan.algorithm, progress.server, stack, cohort)

        new = after(rows)
        said = {
            name: _length(after(np.where(np.arange(len(rows)) == k, 0, rows)), progress.server)
            if len(rows) > 1
            else 0.0
            for k, name in enumerate(uploads)
        }
        step = _length(new, progress.server)
        return new, [
            dataclasses.replace(part, step=step, without=said[part.client])
            if part.client in said else part
            for part in parts
        ]  # fmt: skip

    def finish(self, progress: Progress, *, last: bool) -> dict[str, Content]:
        """Asks every client for its models in answer to w; returns what they tell of their scores.

        If it is the `last` time, clients keep these models to use.
        """
        names = progress.agreement.names
        if not self.settled:
            self._await(names, len(names))
            self.settled = True
        present = set(self.channel.present())
        here = [name for name in names if name in present]
        asked = {
            name: Content(
                {**self.words(progress, name), "last": last}, self.sent(progress, name, shared=True)
            )
            for name in here
        }
        replies = self.channel.ask("finish", asked, self.plan.deadline) if asked else {}
        for name in names:
            reply = replies.get(name)
            if reply is None or reply.content is None:
                why = reply.error if reply else "no reply" if name in here else "it is not connected"
                self.tell(f"{name} has not answered the shared model of round {progress.t} ({why}).")
        told = {name: reply.content for name, reply in replies.items() if reply.content is not None}
        shapes = {
            name: scores_shape(content.words["scores"], progress.agreement.schema.task)
            for name, content in told.items()
            if "scores" in content.words
        }
        usual = Counter(shape for shape in shapes.values() if shape).most_common(1)
        for name, shape in shapes.items():
            if not usual or shape != usual[0][0]:
                self.tell(f"{name} shares scores that cannot be; they are left out.")
                told[name] = Content({}, {})
        return told


@jax.jit
def _server_update(algorithm: Algorithm, server: Any, uploads: Any, cohort: Cohort) -> Any:
    return algorithm.server_update(server, uploads, cohort)


def _numbers(server: Any) -> list[np.ndarray]:
    """The arrays of fractions in what a server keeps."""
    leaves = map(np.asarray, jax.tree.leaves(server))
    return [leaf.astype(np.float64) for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)]


def _finite(server: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in _numbers(server))


def _length(new: Any, old: Any) -> float:
    """How far what the server keeps has moved."""
    pairs = zip(_numbers(new), _numbers(old), strict=True)
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)))


def _pending(reply: Reply) -> bool:
    """Whether a client's owner has not yet said whether it takes part."""
    return reply.content is not None and reply.content.words.get("pending") is True
