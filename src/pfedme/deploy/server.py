"""The server's side: rounds with clients that are elsewhere, some of whom fail."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.deploy.agreement import Agreement, agree
from pfedme.errors import InputError, RunError
from pfedme.hashing import ids_of_names
from pfedme.models import Description, Model
from pfedme.schema import Schema
from pfedme.simulate import draw_cohort, first_model
from pfedme.spec import Count, Index, Positive, Seed, check, to_json
from pfedme.tree import Params

Kind = Literal["agree", "train", "finish", "refuse"]
"""What a client is asked for: what its table is like; its part of a round; the models that it keeps in the
end. `refuse` tells it that it cannot take part."""

Outcome = Literal["counted", "dropped", "failed", "late", "absent"]
"""What became of a client's part of a round. `dropped`: it came, and was not fit to be counted. `failed`: an
error came instead. `late`: nothing came before the deadline. `absent`: the client was not connected."""


class Content(NamedTuple):
    """What is in a message: JSON values, and arrays."""

    words: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Reply(NamedTuple):
    """What a client has answered, or the error that came instead."""

    content: Content | None
    error: str = ""


PATIENCE = 2.0
"""How many times as long as for the others to wait for a client that was late the last time,"""
FULL_WAIT = 5
"""but for one in so many times, when it has all the time again."""
MOST_ROWS = 10**9
"""More rows than this nobody has; weights of rows are added as floats."""
GONE = "it was asked, and then its connection ended"
"""The error of a client that may come back."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines a deployed run but for the clients' tables."""

    algorithm: Algorithm
    model: Description
    rounds: Count = 100
    """T: communication rounds."""
    cohort: Count | None = None
    """S: clients drawn in each round; 10, or all if there are fewer."""
    seed: Seed = 0
    """Seed of the initial model, the cohorts and the mini-batches."""
    min_clients: Count = 2
    """Clients that must be there before training begins."""
    min_replies: Count | None = None
    """Good replies without which a round does not count and is repeated; half of the cohort if not given."""
    deadline: Positive = 120.0
    """Seconds that a client has for its part of a round."""
    tries: Count = 5
    """How often a round is tried before the run stops; it can be resumed."""
    far: Positive = 10.0
    """An update that is so many times longer than the median of its round is dropped."""
    wait: Positive = 3600.0
    """Seconds to wait for enough clients."""
    eval_every: Index = 0
    """Rounds between two evaluations, each of which costs another exchange; 0: only in the end."""

    def checked(self) -> Plan:
        """This plan, once it is known that it can be carried out."""
        check(self, "the run")
        if not self.algorithm.has_global:
            raise InputError(
                f"{self.algorithm.name} trains no shared model, so that there is nothing for a server to do."
            )
        if getattr(self.algorithm, "rechoose", 0):
            raise InputError("--rechoose is for simulations; leave it out.")
        return self


@dataclasses.dataclass(frozen=True)
class Part:
    """A client's part of one try of a round: a line of the ledger."""

    round: int
    attempt: int
    client: str
    outcome: Outcome
    reason: str = ""
    rows: int | None = None
    """Training rows, where they are told because updates are weighted by them."""
    norm: float | None = None
    """‖w_i − w‖."""
    step: float | None = None
    """‖w_(t+1) − w_t‖ of a round that counted."""
    without: float | None = None
    """What that would have been without this client."""


COLUMNS = [field.name for field in dataclasses.fields(Part)]


def ledger_csv(parts: Sequence[Part]) -> str:
    """The ledger as text."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for part in parts:
        cells = (getattr(part, name) for name in COLUMNS)
        table.writerow("" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in cells)
    return text.getvalue()


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a deployed run stands after `t` rounds; with the plan it determines what follows."""

    t: int
    w: np.ndarray
    """The shared model's coordinates."""
    agreement: Agreement
    ledger: tuple[Part, ...] = ()
    history: tuple[dict[str, Any], ...] = ()


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

    def begin(self) -> Progress:
        """Waits for clients, agrees with them on columns, classes and scaling, and makes the first model."""
        plan, asked = self.plan, dict[str, Reply]()
        waited, told = time.monotonic(), ""
        while True:
            present = self._forget_who_left()
            asked = {name: reply for name, reply in asked.items() if name in present}
            new = {name: Content({}, {}) for name in present if name not in asked}
            if len(present) >= plan.min_clients and new:
                replies = self.channel.ask("agree", new, plan.deadline)
                # Who does not answer, be it too late or gone, is asked again.
                asked |= {name: reply for name, reply in replies.items() if reply.error != GONE}
                said = {name: reply.content.words for name, reply in asked.items() if reply.content}
                agreement = agree(said) if said else None
                refused = {name: reply.error for name, reply in asked.items() if reply.error}
                refused |= agreement.refused if agreement else {}
                self._refuse({name: why for name, why in refused.items() if name not in self.turned_away})
                if agreement and len(agreement.names) >= plan.min_clients:
                    refused = {name: why for name, why in self.refused.items() if name not in agreement.names}
                    agreement = dataclasses.replace(agreement, refused=refused)
                    break
            here = sum(name not in self.turned_away for name in present)
            now = f"Waiting for clients: {here} of {plan.min_clients} are there."
            if now != told:
                self.tell(now)
                told = now
            if time.monotonic() - waited > plan.wait:
                raise Stopped(
                    f"{here} of at least {plan.min_clients} clients came within {plan.wait:g} seconds."
                )
            time.sleep(0.5)
        names = ", ".join(agreement.names)
        self.tell(f"{len(agreement.names)} clients agree on {agreement.schema.features} features: {names}.")
        w = first_model(self.model_for(agreement.schema), plan.seed).ravel()
        return Progress(0, np.asarray(w), agreement)

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        for name, why in reasons.items():
            self.tell(f"Refused {name}: {why}")
        self.refused |= reasons
        self.turned_away |= set(reasons)
        contents = {name: Content({"reason": why}, {}) for name, why in reasons.items()}
        if contents:
            self.channel.ask("refuse", contents, self.plan.deadline)

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
        features, classes = schema.features, len(schema.labels)
        return self.plan.model.settled(features).build(features, classes)

    def cohort(self, progress: Progress) -> list[str]:
        """The clients of the next round: those that a simulation would draw."""
        names = progress.agreement.names
        size = min(self.plan.cohort or 10, len(names))
        by_id = np.argsort(ids_of_names(names), kind="stable")
        return [names[i] for i in draw_cohort(by_id, size, self.plan.seed, progress.t)]

    def round(self, progress: Progress) -> Progress:
        """The state after one more round, which is tried again as long as too few replies are good."""
        cohort, ledger = self.cohort(progress), list(progress.ledger)
        least = self.least(cohort)
        before = max((part.attempt for part in ledger if part.round == progress.t), default=0)
        self._turn_away(progress.agreement)
        for attempt in range(before + 1, before + self.plan.tries + 1):
            self._await(cohort, least if self.settled else len(cohort))
            self.settled = True
            parts, uploads = self.collect(progress, cohort, attempt)
            for part in parts:
                if part.outcome != "counted":
                    self.tell(f"Round {part.round}: {part.client} {part.outcome} ({part.reason}).")
            if len(uploads) >= least:
                w, parts = self.combine(progress, parts, uploads)
                if np.isfinite(w).all():
                    return dataclasses.replace(progress, t=progress.t + 1, w=w, ledger=(*ledger, *parts))
                raise RunError(f"The shared model diverged in round {progress.t}; lower the step sizes.")
            parts = [
                dataclasses.replace(p, outcome="failed", reason="the round had too few good replies")
                if p.outcome == "counted" else p
                for p in parts
            ]  # fmt: skip
            ledger += parts
            progress = dataclasses.replace(progress, ledger=tuple(ledger))
            self.tell(
                f"Round {progress.t} had {len(uploads)} good replies of at least {least}; "
                + ("it is repeated." if attempt < before + self.plan.tries else "that was the last try.")
            )
        raise Stopped(
            f"Round {progress.t} had too few good replies {self.plan.tries} times; its clients must come "
            "back before the run goes on.",
            progress,
        )

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
    ) -> tuple[list[Part], dict[str, tuple[np.ndarray, int]]]:
        """What became of each client's part of a round, and the uploads, with rows, that are good."""
        present = set(self.channel.present())
        here = [name for name in cohort if name in present]
        slow = {name for name in here if attempt == 1 and self.lates(progress, name) % FULL_WAIT}
        others = 0.0

        def enough(waiting: set[str], seconds: float) -> bool:
            nonlocal others
            if waiting - slow or len(here) - len(waiting) < self.least(cohort):
                others = seconds
            return seconds > PATIENCE * others

        asked = {name: Content(self.words(progress, name), {"w": progress.w}) for name in here}
        replies = self.channel.ask("train", asked, self.plan.deadline, enough) if asked else {}
        good: dict[str, tuple[np.ndarray, int]] = {}
        parts: dict[str, Part] = {}
        weighted = self.plan.algorithm.aggregation == "samples"
        for name in cohort:
            part = Part(progress.t, attempt, name, "counted")
            reply = replies.get(name)
            if reply is None and name not in here:
                part = dataclasses.replace(part, outcome="absent", reason="it is not connected")
            elif reply is None:
                until = min(self.plan.deadline, PATIENCE * others if name in slow else np.inf)
                part = dataclasses.replace(
                    part, outcome="late", reason=f"no reply within {round(until, 1):g} seconds"
                )
            elif reply.content is None:
                part = dataclasses.replace(part, outcome="failed", reason=reply.error)
            elif why := unfit(reply.content, progress.w, weighted):
                part = dataclasses.replace(part, outcome="dropped", reason=why)
            else:
                upload, rows = reply.content.arrays["w"], reply.content.words["rows"] if weighted else 1
                good[name] = upload, rows
                norm = float(np.linalg.norm(upload.astype(np.float64) - progress.w))
                part = dataclasses.replace(part, norm=norm, rows=rows if weighted else None)
            parts[name] = part
        usual = float(np.median([p.norm for p in parts.values() if p.norm is not None] or [0.0]))
        before = [p.norm for p in progress.ledger if p.outcome == "counted" and p.norm is not None]
        if len(good) < 3 and before:
            usual = float(np.median(before[-30:]))
        for name in list(good):
            norm = parts[name].norm
            if (len(good) >= 3 or before) and norm is not None and norm > self.plan.far * max(usual, 1e-12):
                why = f"its update of length {norm:.3g} is far beyond the usual {usual:.3g}"
                parts[name] = dataclasses.replace(parts[name], outcome="dropped", reason=why)
                del good[name]
        return list(parts.values()), good

    def lates(self, progress: Progress, name: str) -> int:
        """How often a client was late since it last was not."""
        own = [part.outcome for part in progress.ledger if part.client == name]
        return next((k for k, outcome in enumerate(reversed(own)) if outcome != "late"), len(own))

    def words(self, progress: Progress, name: str) -> dict[str, Any]:
        """What a client must know to take part."""
        names, plan = progress.agreement.names, self.plan
        return {
            "round": progress.t,
            "seed": plan.seed,
            "algorithm": {"name": plan.algorithm.name, **to_json(plan.algorithm)},
            "model": model_words(plan.model),
            "schema": progress.agreement.schema.to_json(),
            "id": int(ids_of_names(names)[names.index(name)]),
        }

    def combine(
        self, progress: Progress, parts: Sequence[Part], uploads: Mapping[str, tuple[np.ndarray, int]]
    ) -> tuple[np.ndarray, list[Part]]:
        """w of the next round, and the parts with what each did to the step."""
        like = jax.eval_shape(self.model_for(progress.agreement.schema).init, jax.random.key(0))
        w = like.like(jnp.asarray(progress.w))
        stack = like.like(jnp.asarray(np.stack([upload for upload, _ in uploads.values()])))
        count = np.array([rows for _, rows in uploads.values()], np.float32)

        def after(count: np.ndarray) -> np.ndarray:
            return np.asarray(_server_update(self.plan.algorithm, w, stack, jnp.asarray(count)).ravel())

        def step(to: np.ndarray) -> float:
            return float(np.linalg.norm(to.astype(np.float64) - progress.w))

        new = after(count)
        said = {
            name: step(after(np.where(np.arange(len(count)) == k, 0, count))) if len(count) > 1 else 0.0
            for k, name in enumerate(uploads)
        }
        return new, [
            dataclasses.replace(part, step=step(new), without=said[part.client])
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
            name: Content({**self.words(progress, name), "last": last}, {"w": progress.w}) for name in here
        }
        replies = self.channel.ask("finish", asked, self.plan.deadline) if asked else {}
        for name in names:
            reply = replies.get(name)
            if reply is None or reply.content is None:
                why = reply.error if reply else "no reply" if name in here else "it is not connected"
                self.tell(f"{name} has not answered the shared model of round {progress.t} ({why}).")
        told = {name: reply.content for name, reply in replies.items() if reply.content is not None}
        shapes = {
            name: scores_shape(content.words["scores"])
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
def _server_update(algorithm: Algorithm, w: Params, uploads: Params, count: jax.Array) -> Params:
    return algorithm.server_update(w, uploads, count)


def model_words(model: Description) -> dict[str, Any]:
    """The description of a model as JSON values."""
    from pfedme.models import MODELS

    name = next(name for name, cls in MODELS.items() if type(model) is cls)
    return {"name": name, **to_json(model)}


def scores_shape(scores: Any) -> tuple[Any, ...]:
    """Of which parts, models and sums the scores are that a client shares; () if they cannot be."""
    try:
        sums = {(part, kind): scores[part][kind] for part in ("test", "train") for kind in scores[part]}
        numbers = [scores["n_train"], scores["n_test"], *scores["info"].values()]
        numbers += [number for one in sums.values() for number in one.values()]
        counts = [one["rows"] for one in sums.values()] + numbers[:2]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            return ()
        if min(counts) < 0:
            return ()
        return tuple(scores["info"]), tuple((*key, *sorted(one)) for key, one in sums.items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def unfit(content: Content, w: np.ndarray, weighted: bool) -> str:
    """Why an upload cannot be counted, whatever the others are; empty if it can."""
    upload = content.arrays.get("w")
    if upload is None:
        return "it has no model in it"
    if upload.shape != w.shape or upload.dtype != w.dtype:
        return f"it is {upload.dtype} of shape {upload.shape}, not {w.dtype} of shape {w.shape}"
    if not np.isfinite(upload).all():
        return "it has numbers that are not finite"
    rows = content.words.get("rows")
    if weighted and not (isinstance(rows, int) and 0 < rows <= MOST_ROWS):
        return f"it claims {rows!r} rows"
    return ""
