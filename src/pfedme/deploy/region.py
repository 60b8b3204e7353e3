"""A region: a server that is itself a client of another, the upper server.

    upper server  ←  w, and one mean with its weight  →  region  ←  w, and uploads  →  clients

A region passes the upper server's plan and agreement on to its clients word for word, so that a client
checks, and is bound by, what it would be bound by at the upper server itself. It sends upwards what one
client with the rows of all of them would tell of its table, and in each round

    Σ_i p_i Δ_i / Σ_i p_i   and   Σ_i p_i,

the mean of its clients' uploads and their total weight, from which the upper server makes the mean over all
clients. It is a `Server` that asks its clients and judges what they send; only what it sends them comes from
above.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms.base import Cohort
from pfedme.core.tree import Params, from_vectors, to_vectors, vector_shapes
from pfedme.data.schema import Schema
from pfedme.deploy.agreement import Agreement, Fitting, fitting
from pfedme.deploy.answer import FAILED
from pfedme.deploy.channel import Channel
from pfedme.deploy.client import DONE, REFUSED
from pfedme.deploy.judge import Upload
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import (
    NOISY,
    SCHEMA_FILE,
    SHARED,
    UNBOUND,
    Content,
    Refusal,
    Words,
    misfit,
    sha256,
)
from pfedme.deploy.plan import Plan, check_sums, offered
from pfedme.deploy.processes import private_home
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import DeploymentRecord, evaluated, note
from pfedme.deploy.server import Server, by_weight, stacked
from pfedme.deploy.shared_scores import pooled
from pfedme.deploy.supervise_client import Link, supervise
from pfedme.deploy.worker import LINE, answer_all
from pfedme.errors import InputError, RunError
from pfedme.files import atomic_write, writing

PLAN = "region.json"
"""The file in a region's folder with the plan of the upper server, and its deadline."""
SHARE = 0.4
"""The part of the upper server's deadline in which the clients of a region have to come, and again that in
which they have to answer."""
LEFT = (PLAN, DONE, REFUSED)
"""What a run leaves in a region's folder, besides what it leaves in that of every server."""


class Members(Server):
    """The server of a region's clients. What it sends them, the upper server has sent."""

    arrays: Mapping[str, np.ndarray] = {}
    """The arrays of the upper server's message."""

    def first_server(self, agreement: Agreement) -> Any:
        """A region keeps nothing between rounds that its algorithm knows of."""
        return ()

    def shared(self, progress: Progress) -> Params | None:
        """The shared model as the upper server has sent it, if there is one."""
        if not (self.plan.algorithm.has_global and self.arrays):
            return None
        apart = {k.removeprefix(SHARED): a for k, a in self.arrays.items() if k.startswith(SHARED)}
        if not apart:
            return from_vectors(self.arrays, self.exchange(progress.agreement).sent)
        model = self.model_for(progress.agreement.schema)
        return from_vectors(apart, jax.eval_shape(model.init, jax.random.key(0)))

    def sent(self, progress: Progress, name: str, *, shared: bool = False) -> dict[str, np.ndarray]:
        """What the upper server has sent."""
        return dict(self.arrays)

    def mean(self, uploads: Mapping[str, Upload]) -> Content:
        """The mean of uploads, and their weight."""
        algorithm, rows = self.plan.algorithm, [upload.rows for upload in uploads.values()]
        nobody = jnp.zeros(len(rows), jnp.int32)  # who they are is nothing that a mean depends on
        cohort = Cohort(jax.random.key(0), nobody, jnp.array(rows, jnp.float32), len(rows))
        found = by_weight(algorithm).combined(stacked(uploads), cohort)
        words: Words = {"clients": sum(upload.clients for upload in uploads.values())}
        return Content(
            words | ({"rows": sum(rows)} if algorithm.aggregation == "samples" else {}), to_vectors(found)
        )


class Region:
    """Answers an upper server for the clients at the other end of a channel."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        out: Path,
        own: Mapping[str, Any],
        *,
        command: str = "pfedme server",
        agreed: Callable[[Server, Progress], None] = lambda *_: None,
    ) -> None:
        """`own` has the fields in `plan.REGION` that differ from their defaults, and `out` is the region's
        folder, in which it continues; `agreed` is called before its clients are asked for an upload."""
        self.name, self.channel, self.out, self.command = name, channel, out, command
        self.own, self.least = dict(own), int(own.get("min_clients", Plan.min_clients))
        self.own.pop("min_clients", None)
        self.agreed = agreed
        self.server: Members | None = None
        """The server of its clients, once there is a plan."""
        self.fit: Fitting | None = None
        """What these have told of their tables."""
        self.progress: Progress | None = None
        """The state of the run, once there is an agreement."""
        self.told: Mapping[str, Content] = {}
        """The clients' last replies."""
        self.said = ""
        """The last line about what it waits for."""
        if (out / PLAN).exists():
            found = json.loads((out / PLAN).read_text(encoding="utf-8"))
            self._begin(found["plan"], found["deadline"])

    def tell(self, line: str, done: int | None = None) -> None:
        """Writes a line to the region's log."""
        note(self.out, line, done)

    def reply(self, kind: str, asked: Content | None) -> Content:
        """The reply to a message of the upper server; `asked` is None if it cannot be read."""
        work: dict[str, Callable[[Content], Content]] = {
            "agree": self.agree, "hello": lambda _: Content({}, {}), "join": self.join, "train": self.train,
            "finish": self.finish, "refuse": self.refused,
        }  # fmt: skip
        try:
            if asked is None:
                raise Refusal("a message of the upper server cannot be read")
            content = work[kind](asked)
        except (InputError, RunError) as error:
            self.tell(f"Not done: {error}")
            content = Content({"error": str(error)}, {})
        except Exception:
            print(traceback.format_exc(), flush=True)
            content = Content({"error": FAILED}, {})
        return Content({"name": self.name, **content.words}, content.arrays)

    def _begin(self, words: Any, deadline: Any) -> Members:
        """The server of the region's clients under a plan of the upper server."""
        if self.server is not None and sha256(self.server.plan.offer()) == sha256(words):
            return self.server
        if self.server is not None:
            raise Refusal("it was offered another plan before; it must be restarted for this one")
        plan = offered(words)
        try:
            check_sums(plan)
        except InputError as error:
            raise Refusal(str(error)) from None
        if type(deadline) not in (int, float) or not 0 < deadline < np.inf:
            deadline = Plan.deadline
        with writing(self.out):
            atomic_write(self.out / PLAN, json.dumps({"plan": words, "deadline": deadline}) + "\n")
        plan = dataclasses.replace(plan, deadline=SHARE * deadline, **self.own)
        self.server = Members(plan, self.channel, self.tell)
        self.record = DeploymentRecord(plan, self.out, self.command)
        self.tell(f"The upper server's plan has the SHA-256 {sha256(words)}.")
        self.progress = self.record.restore(self.server)
        self.record.write_record("running", self.progress)
        if self.progress is not None:
            self.agreed(self.server, self.progress)
        return self.server

    def agree(self, asked: Content) -> Content:
        """What one client with the rows of all clients would say of its table, once there are enough."""
        server = self._begin(asked.words.get("plan"), asked.words.get("deadline"))
        gathering = server.gathering
        present = gathering.forget_who_left()
        if len(present) >= self.least:
            gathering.offer(present)
        self.fit = fitting(gathering.said, server.plan.regions)
        gathering.refuse(self.fit.refused)
        gathering.said = {name: gathering.said[name] for name in self.fit.told}
        if len(self.fit.told) < self.least:
            line = f"{len(self.fit.told)} of at least {self.least} clients have told about their tables."
            if line != self.said:
                self.tell(line)
            self.said = line
            return Content({"pending": True}, {})
        return Content(self.fit.region(), {})

    def join(self, asked: Content) -> Content:
        """Binds the region's clients to the upper server's agreement."""
        words = asked.words.get("agreement")
        if not (isinstance(words, dict) and isinstance(words.get("names"), list)):
            raise Refusal("the upper server's agreement cannot be read")
        server, sha = self._begin(words.get("plan"), None), sha256(words)
        if self.progress is not None and self.progress.agreement.sha256(words["plan"]) == sha:
            server.gathering.bind(self.progress.agreement, server.channel.present())
            return Content({"bound": sha}, {})
        if self.fit is None:
            raise Refusal("it has not told about the tables of its clients since it was restarted")
        members = {name: tuple(sorted(clients)) for name, clients in self.fit.members.items()}
        declared = self.fit.by(SCHEMA_FILE), self.fit.by(NOISY)
        agreement = Agreement(_schema(words), tuple(words["names"]), {}, (), *declared, members)
        if agreement.words(words["plan"]) != words:
            raise Refusal("the upper server's agreement cannot be read")
        if lacking := sorted(set(self.fit.sources) - set(agreement.names)):
            raise Refusal(f"the agreement does not include its client '{lacking[0]}'")
        if not server.gathering.accepted(agreement):
            return Content({"pending": True}, {})
        self._save(Progress(0, (), agreement))
        self.agreed(server, Progress(0, (), agreement))
        self.record.write_record("running", self.progress)
        self.tell(f"{', '.join(members)} are bound; the agreement's SHA-256 is {sha}.")
        return Content({"bound": sha}, {})

    def train(self, asked: Content) -> Content:
        """The mean of the clients' uploads, and their weight."""
        server, progress = self._at_round(asked)
        if progress.t == server.plan.rounds:
            raise Refusal(f"the plan has no round {progress.t + 1}")
        names = list(progress.agreement.members)
        server.gathering.refuse_latecomers(progress.agreement)
        least = server.least(names)
        server.wait(names, least)
        progress = dataclasses.replace(progress, attempt=progress.attempt + 1)
        parts, uploads = server.collect(progress, names, progress.attempt)
        for part in parts:
            if part.outcome != "counted" or part.reason:
                self.tell(f"Round {part.round}: {part.client} {part.outcome} ({part.reason}).")
        self._save(dataclasses.replace(progress, waiting=tuple(parts)))
        if len(uploads) < least:
            raise Refusal(f"{len(uploads)} of its {len(names)} clients replied, but it needs {least}")
        content = server.mean(uploads)
        if wrong := misfit(content.arrays, vector_shapes(server.exchange(progress.agreement).message)):
            raise Refusal(f"the mean of its clients' uploads is no upload: {wrong}")
        self.tell(f"Round {progress.t + 1}: the sum of {len(uploads)} clients leaves.", progress.t + 1)
        return content

    def finish(self, asked: Content) -> Content:
        """Has the clients make their models, and sends the sums of the scores that they share."""
        server, progress = self._at_round(asked)
        last = asked.words.get("last") is True
        progress, told = evaluated(server, progress, last=last)
        scores = [content.words["scores"] for content in told.values() if "scores" in content.words]
        self._save(progress)
        if last:
            self.told = told
            self.record.write_record("finished", self.progress)
            with writing(self.out):
                atomic_write(self.out / DONE, f"{progress.t}\n")
        return Content({"scores": pooled(scores)} if scores else {}, {})

    def refused(self, asked: Content) -> Content:
        """Tells all clients that the run has failed, or that this region cannot take part."""
        reason = one_line(asked.words.get("reason", ""), 1000)
        if self.server is not None:
            self.server.fail(f"the upper server says: {reason}")
            self.record.write_record("failed", self.progress, reason)
        with writing(self.out):
            word = {"reason": reason, "over": asked.words.get("over") is True}
            atomic_write(self.out / REFUSED, json.dumps(word) + "\n")
        return Content({}, {})

    def close(self) -> None:
        """Completes the folder of a finished run, after the last reply."""
        assert self.server is not None
        assert self.progress is not None
        self.record.finish(self.server, self.progress, self.told)
        self.tell("Finished.")

    def stopped(self, why: str) -> None:
        """Records that the region has lost the upper server, or has been turned away by it."""
        self.tell(f"Stopped: {why}")
        if self.server is not None and self.record.folder.status() == "running":
            self.record.write_record("stopped", self.progress, why)

    def _at_round(self, asked: Content) -> tuple[Members, Progress]:
        """The server of the clients and the state before a round, after a check that the region is bound.

        Whether the clients' last uploads count depends on whether the upper server has counted the region's.
        """
        server, progress = self.server, self.progress
        if server is None or progress is None:
            raise Refusal(UNBOUND)
        if asked.words.get("agreement") != progress.agreement.sha256(server.plan.offer()):
            raise Refusal("it is bound by another agreement")
        t = asked.words.get("round")
        if type(t) is not int or not 0 <= t <= server.plan.rounds:
            raise Refusal(f"the plan has no round {one_line(t, 20)}")
        server.arrays = asked.arrays
        if parts := progress.waiting:
            if asked.words.get("counted") != parts[0].round:
                why = "the upper server did not count the region"
                parts = tuple(
                    dataclasses.replace(part, outcome="failed", reason=why)
                    if part.outcome == "counted" else part
                    for part in parts
                )  # fmt: skip
            server.note_news(parts)
            progress = dataclasses.replace(progress.noting(parts), waiting=())
        return server, dataclasses.replace(progress, t=t, attempt=progress.attempt if t == progress.t else 0)

    def _save(self, progress: Progress) -> None:
        """Writes the state, from which the region can continue."""
        self.progress = self.record.save(progress)


def take_part(region: Region, link: Link) -> None:
    """Answers the upper server until the run is over.

    The connection to it is a process of its own, as a client's is, and hands its messages to this one.
    """
    for name in (DONE, REFUSED):
        (region.out / name).unlink(missing_ok=True)
    with private_home() as home, Listener(str(home / "line"), "AF_UNIX") as listener:

        def answer() -> None:
            while True:
                with contextlib.suppress(OSError, EOFError), listener.accept() as line:
                    answer_all(line, lambda kind, _, asked: region.reply(kind, asked))

        threading.Thread(target=answer, daemon=True).start()
        supervise(link, {LINE: str(home / "line")}, region.tell)
    region.close()


def _schema(words: Words) -> Schema:
    """The schema of an agreement."""
    try:
        return Schema.from_json(words["schema"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refusal("the upper server's agreement cannot be read") from None
