"""The server's side: an agreement, then rounds with remote clients, some of which may fail."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Cohort
from pfedme.core.models import Model
from pfedme.core.tree import Params, to_vectors
from pfedme.data.hashing import ids_of_names
from pfedme.data.schema import Schema
from pfedme.deploy.agreement import Agreement
from pfedme.deploy.central import Central
from pfedme.deploy.channel import Channel
from pfedme.deploy.gather import Gathering, Tell
from pfedme.deploy.judge import Upload, clipped, judged, scores_shape, unanswered
from pfedme.deploy.messages import LOST, SHARED, STARTED_OVER, UNBOUND, Content, Reply, Words
from pfedme.deploy.plan import Plan, built
from pfedme.deploy.progress import Progress, Stopped
from pfedme.engine.cohorts import draw_cohort
from pfedme.engine.exchange import Exchange, exchange, first_server, server_key
from pfedme.errors import RunError
from pfedme.runs.ledger import Part

PATIENCE = 2.0
"""How long to wait for a client that was late the last time, as a multiple of the others' time."""
FULL_WAIT = 5
"""Every this many times, such a client gets the full time again."""
LOOK_S = 0.5
"""Seconds between two checks of which clients are connected."""


class Server:
    """Carries out a plan with the clients at the other end of a channel."""

    def __init__(self, plan: Plan, channel: Channel, tell: Tell) -> None:
        self.plan, self.channel, self.tell = plan.checked(), channel, tell
        self.gathering = Gathering(self.plan, channel, tell)
        self.settled = False
        """Whether a round has been started since the server started: before that, clients may still be coming
        back."""
        self.unbound: set[str] = set()
        """Clients of the agreement to which it must be sent again."""
        self.news: dict[str, Words] = {}
        """The outcomes of the clients' last parts."""
        self.hashed: tuple[Agreement, str] | None = None
        """The agreement and its hash."""
        self.shapes: tuple[Agreement, Exchange] | None = None
        """The agreement and the shapes of what is exchanged under it."""
        self.privacy: tuple[Agreement, Central | None] | None = None
        """The agreement and what the server does under it for the privacy of clients."""
        self.drawn: tuple[int, list[str]] | None = None
        """The last round for which clients were drawn for their privacy, and these clients."""

    def begin(self) -> Progress:
        """Waits for clients that agree, and makes the initial model."""
        agreement = self.gathering.agreement()
        if (central := self.central(agreement)) and central.plan.warning:
            self.tell(central.plan.warning)
        return Progress(0, self.first_server(agreement), agreement)

    def fail(self, why: str) -> None:
        """Tells all clients that the run has failed, so that they do not wait for it."""
        self.gathering.fail(why)

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

    def central(self, agreement: Agreement) -> Central | None:
        """What the server does for the privacy of clients; None if the plan has none."""
        if self.privacy is None or self.privacy[0] is not agreement:
            self.privacy = agreement, Central.of(self.plan, agreement)
        return self.privacy[1]

    def shared(self, progress: Progress) -> Params | None:
        """The shared model, if there is one."""
        return self.plan.algorithm.shared(progress.server, None)

    def model_for(self, schema: Schema) -> Model:
        """The model for the columns that were agreed on."""
        return built(self.plan.model, schema.features, len(schema.labels))

    def cohort(self, progress: Progress) -> list[str]:
        """The clients of the next round: those that a simulation would draw, or, for the privacy of clients,
        some that nobody can compute."""
        if central := self.central(progress.agreement):
            if self.drawn is None or self.drawn[0] != progress.t:
                self.drawn = progress.t, central.draw()
            return self.drawn[1]
        names = list(progress.agreement.members)
        size = min(self.plan.cohort or 10, len(names))
        by_id = np.argsort(ids_of_names(names), kind="stable")
        return [names[i] for i in draw_cohort(by_id, size, self.plan.seed, progress.t)]

    def round(self, progress: Progress) -> Progress:
        """The state after one more round, which is repeated if too few replies are good."""
        cohort, before, number = self.cohort(progress), progress.attempt, progress.t + 1
        least = self.least(cohort)
        self.gathering.refuse_latecomers(progress.agreement)
        for attempt in range(before + 1, before + self.plan.max_attempts + 1):
            self.wait(cohort, least)
            parts, uploads = self.collect(progress, cohort, attempt)
            for part in parts:
                if part.outcome != "counted" or part.reason:
                    self.tell(f"Round {number}: {part.client} {part.outcome} ({part.reason}).")
            if len(uploads) >= least:
                server, parts = self.combine(progress, parts, uploads)
                if _finite(server):
                    self.note_news(parts)
                    return dataclasses.replace(
                        progress.noting(parts), t=progress.t + 1, server=server, attempt=0
                    )  # fmt: skip
                raise RunError(f"The shared model diverged in round {number}; lower the step sizes.")
            parts = [
                dataclasses.replace(p, outcome="failed", reason="the round had too few good replies")
                if p.outcome == "counted" else p
                for p in parts
            ]  # fmt: skip
            self.note_news(parts)
            progress = dataclasses.replace(progress.noting(parts), attempt=attempt)
            self.tell(
                f"Round {number} had {len(uploads)} good replies but needs at least {least}; "
                + (
                    "it is repeated."
                    if attempt < before + self.plan.max_attempts
                    else "that was the last attempt."
                )
            )
        raise Stopped(
            f"Round {number} had too few good replies {self.plan.max_attempts} times; its clients must come "
            "back before the run can continue.",
            progress,
        )

    def note_news(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.news[part.client] = {
                "round": part.round, "outcome": part.outcome, "reason": part.reason,
                "norm": part.norm, "clipped": part.clipped,
            }  # fmt: skip

    def least(self, cohort: Sequence[str]) -> int:
        """Number of good replies that a round needs."""
        return min(self.plan.min_replies or -(-len(cohort) // 2), len(cohort))

    def wait(self, cohort: Sequence[str], least: int) -> None:
        """Waits, for at most the deadline of a round, until enough clients of a cohort are connected; the
        first time, until all are."""
        least, self.settled = least if self.settled else len(cohort), True
        until = time.monotonic() + self.plan.deadline
        while len(set(cohort) & set(self.channel.present())) < least and time.monotonic() < until:
            time.sleep(LOOK_S)

    def collect(
        self, progress: Progress, cohort: Sequence[str], attempt: int
    ) -> tuple[list[Part], dict[str, Upload]]:
        """The outcome of each client's part of a round, and the good uploads."""
        here = set(self.channel.present()) & set(cohort)
        self._bind_again(progress.agreement, here)
        replies, waited = self.replies(progress, [name for name in cohort if name in here], cohort, attempt)
        self.unbound |= {name for name, reply in replies.items() if reply.error == UNBOUND}
        message, members = self.exchange(progress.agreement).message, progress.agreement.members
        parts, uploads = dict[str, Part](), dict[str, Upload]()
        for name in cohort:
            part = Part(progress.t + 1, attempt, name, "counted")
            if (reply := replies.get(name)) is None:
                parts[name] = unanswered(part, waited.get(name))
                continue
            parts[name], upload = judged(part, reply, self.plan.algorithm, message, len(members[name]))
            if upload is not None:
                uploads[name] = upload
        if central := self.central(progress.agreement):
            parts, uploads = central.fitting(parts, uploads)
        else:
            parts, uploads = clipped(
                parts, uploads, progress.norms, clip=self.plan.clip, max_norm_ratio=self.plan.max_norm_ratio
            )
        return list(parts.values()), uploads

    def _bind_again(self, agreement: Agreement, here: set[str]) -> None:
        """Sends the agreement to clients that no longer have it."""
        if again := sorted(self.unbound & here):
            self.unbound -= self.gathering.bind(agreement, again)

    def replies(
        self, progress: Progress, here: Sequence[str], cohort: Sequence[str], attempt: int
    ) -> tuple[dict[str, Reply], dict[str, float]]:
        """The replies of the connected clients of a cohort, and how long the server waited for each.

        A client that was late the last time gets less time, if the others' replies are enough.
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
        """The content of a message besides what the algorithm sends: the hash of the agreement, the round,
        the round in which the client's upload last counted, and the outcome of its last part."""
        if self.hashed is None or self.hashed[0] is not progress.agreement:
            self.hashed = progress.agreement, progress.agreement.sha256(self.plan.offer())
        news = {"news": self.news[name]} if name in self.news else {}
        counted = progress.counted.get(name, 0)
        return {"agreement": self.hashed[1], "round": progress.t, "counted": counted, **news}

    def place(self, progress: Progress, name: str) -> int:
        """The index of a client, or of the first client of a region, among all clients."""
        return progress.agreement.names.index(progress.agreement.members[name][0])

    def sent(self, progress: Progress, name: str, *, shared: bool = False) -> dict[str, np.ndarray]:
        """What the algorithm sends to a client, and if `shared` also the shared model, unless they are the
        same."""
        place = self.place(progress, name)
        sent, w = self.plan.algorithm.send(progress.server, jnp.int32(place)), self.shared(progress)
        apart = to_vectors(w) if shared and w is not None and w is not sent else {}
        return to_vectors(sent) | {f"{SHARED}{key}": vector for key, vector in apart.items()}

    def combine(
        self, progress: Progress, parts: Sequence[Part], uploads: Mapping[str, Upload]
    ) -> tuple[Any, list[Part]]:
        """What the server keeps after the round, and the parts with the effect of each on the step, which is
        not computed if clients have privacy."""
        if central := self.central(progress.agreement):
            return central.after(self.plan.algorithm, progress.server, uploads), list(parts)
        stack, rows = stacked(uploads), np.array([upload.rows for upload in uploads.values()], np.float32)
        places = jnp.array([self.place(progress, name) for name in uploads], jnp.int32)
        key, total = server_key(jax.random.key(self.plan.seed), progress.t), len(progress.agreement.names)

        def after(rows: np.ndarray) -> Any:
            cohort = key, places, jnp.asarray(rows)
            return _server_update(by_weight(self.plan.algorithm), progress.server, stack, cohort, total=total)

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
        """Asks every client to make its models in response to w; returns the scores that clients share.

        If it is the `last` time, clients keep these models for use.
        """
        names = list(progress.agreement.members)
        if not self.settled:
            self.wait(names, len(names))
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
                self.tell(f"{name} has not responded to the shared model of round {progress.t} ({why}).")
            elif reply.content.words.get(STARTED_OVER) is True:
                self.tell(f"{name} has responded to the shared model of round {progress.t} ({LOST}).")
        told = {name: reply.content for name, reply in replies.items() if reply.content is not None}
        shapes = {
            name: scores_shape(content.words["scores"], progress.agreement.schema.task)
            for name, content in told.items()
            if "scores" in content.words
        }
        usual = Counter(shape for shape in shapes.values() if shape).most_common(1)
        for name, shape in shapes.items():
            if not usual or shape != usual[0][0]:
                self.tell(f"{name} shares impossible scores; they are left out.")
                told[name] = Content({}, {})
        return told


def stacked(uploads: Mapping[str, Upload]) -> Any:
    """The trees of uploads as one, with a leading axis over their senders."""
    return jax.tree.map(lambda *all: jnp.stack(all), *(upload.tree for upload in uploads.values()))


def by_weight(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the weights of the uploads in place of rows: where clients count equally, each has a
    weight of one, and a region that of its clients."""
    return dataclasses.replace(algorithm, aggregation="samples")


@partial(jax.jit, static_argnames="total")
def _server_update(algorithm: Algorithm, server: Any, uploads: Any, cohort: Any, total: int) -> Any:
    return algorithm.server_update(server, uploads, Cohort(*cohort, total=total))


def _numbers(server: Any) -> list[np.ndarray]:
    """The floating-point arrays in what a server keeps."""
    leaves = map(np.asarray, jax.tree.leaves(server))
    return [leaf.astype(np.float64) for leaf in leaves if np.issubdtype(leaf.dtype, np.floating)]


def _finite(server: Any) -> bool:
    return all(np.isfinite(leaf).all() for leaf in _numbers(server))


def _length(new: Any, old: Any) -> float:
    """How far the server's state has moved."""
    pairs = zip(_numbers(new), _numbers(old), strict=True)
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)))
