"""The server's side until there is an agreement: which clients are connected, agree, or are turned away, and
why."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pfedme.deploy.agreement import Agreement, agree
from pfedme.deploy.channel import Channel
from pfedme.deploy.messages import GONE, Content, Reply, Words
from pfedme.deploy.plan import Plan, built
from pfedme.deploy.progress import Stopped

REFUSE_S = 10.0
"""Seconds to wait for a client to confirm that it knows why it was turned away."""
MOST_FAILURES = 3
"""How often a client may take part in an agreement and then not accept it before it is turned away."""
LOOK_S, ASK_AGAIN_S = 0.5, 5.0
"""Seconds between two checks of which clients are connected, and between two questions to a client whose
owner has not yet approved the plan."""

Tell = Callable[[str], None]
"""Called with each line for the people at the server."""


class Gathering:
    """The clients at the other end of a channel that agree to a plan."""

    def __init__(self, plan: Plan, channel: Channel, tell: Tell) -> None:
        self.plan, self.channel, self.tell = plan, channel, tell
        self.refused: dict[str, str] = {}
        """Why clients were turned away,"""
        self.turned_away: set[str] = set()
        """and which of them are still connected."""
        self.said: dict[str, Words] = {}
        """What clients have said about their tables,"""
        self.asked_at: dict[str, float] = {}
        """and when the clients were asked whose owners have not yet approved the plan."""
        self.failures = Counter[str]()
        """How often clients did not accept an agreement."""

    def agreement(self) -> Agreement:
        """Waits for enough clients that agree on columns, classes and scaling, and binds them."""
        plan, began, told = self.plan, time.monotonic(), ""
        while True:
            present = self.forget_who_left()
            if len(present) >= plan.min_clients:
                self.offer(present)
            if (found := self._accepted()) is not None:
                return self._announced(found)
            line = self._waiting(present)
            if line != told:
                self.tell(line)
                told = line
            if time.monotonic() - began > plan.join_timeout:
                here = len(present) - len(self.turned_away)
                within = f"within {plan.join_timeout:g} seconds (--join-timeout)"
                raise Stopped(f"{here} of at least {plan.min_clients} clients came {within}.")
            time.sleep(LOOK_S)

    def offer(self, present: Sequence[str]) -> None:
        """Offers the plan to clients that have not answered it; clients that do not answer in time are asked
        again. A region has to answer within the deadline, which it does not know otherwise."""
        now, offer = time.monotonic(), self.plan.offer()
        new = {
            name: Content({"plan": offer, "deadline": self.plan.deadline}, {})
            for name in present
            if name not in self.said
            and name not in self.turned_away
            and now - self.asked_at.get(name, -ASK_AGAIN_S) >= ASK_AGAIN_S
        }
        if not new:
            return
        replies = self.channel.ask("agree", new, self.plan.deadline)
        self.asked_at |= {name: now for name, reply in replies.items() if _pending(reply)}
        self.said |= {
            name: reply.content.words
            for name, reply in replies.items()
            if reply.content and not _pending(reply)
        }
        self.refuse(_errors(replies))

    def _accepted(self) -> Agreement | None:
        """The agreement of the clients that have described their tables, once enough of them are connected
        and all are bound by it."""
        least = self.plan.min_clients
        if not self.said or len(self.said) < least:
            return None
        found = agree(self.said, self.plan.regions)
        self.refuse(found.refused)
        self.said = {name: self.said[name] for name in found.members}
        if len(self.said) < least:
            return None
        # Anything wrong with the model shows up before a client is bound.
        model = built(self.plan.model, found.schema.features, len(found.schema.labels))
        self.plan.algorithm.check_fit(model, len(found.names))
        return found if self.accepted(found) else None

    def accepted(self, agreement: Agreement) -> bool:
        """Whether all whom an agreement is about are bound by it now. If not, what the others have said is
        forgotten, and they are turned away if that has happened too often."""
        if unwilling := set(agreement.members) - self.bind(agreement):
            self.failures.update(unwilling)
            why = "it did not accept the agreement, or did not answer, too often."
            self.refuse({name: why for name in unwilling if self.failures[name] >= MOST_FAILURES})
            self.said = {name: words for name, words in self.said.items() if name not in unwilling}
        return not unwilling

    def _announced(self, agreement: Agreement) -> Agreement:
        """The agreement with the clients that were turned away, after reporting it at the server."""
        for line in agreement.left_out:
            self.tell(f"{line[0].upper()}{line[1:]}")
        names = ", ".join(agreement.names)
        self.tell(f"{len(agreement.names)} clients agree on {agreement.schema.features} features: {names}.")
        self.tell(f"The agreement's SHA-256 is {agreement.sha256(self.plan.offer())}.")
        for name, clients in agreement.members.items():
            if clients != (name,):
                self.tell(f"{name} is a region with {', '.join(clients)}.")
        refused = {name: why for name, why in self.refused.items() if name not in agreement.members}
        if declared := agreement.declared:
            self.tell(f"Told by their owners' schema files, not by rows: {', '.join(declared)}.")
        if noisy := agreement.noisy:
            self.tell(f"Told by their owners' schema files, and by rows with noise: {', '.join(noisy)}.")
        return dataclasses.replace(agreement, refused=refused)

    def _waiting(self, present: Sequence[str]) -> str:
        here = sum(name not in self.turned_away for name in present)
        line = f"Waiting for clients: {here} of {self.plan.min_clients} are connected."
        if self.asked_at:
            line += f" Waiting for approval by the owners of {', '.join(sorted(self.asked_at))}."
        return line

    def bind(self, agreement: Agreement, names: Sequence[str] | None = None) -> set[str]:
        """The clients of an agreement, or of `names`, that are bound by it now; the others have refused, or
        have not answered."""
        plan = self.plan.offer()
        sha, content = agreement.sha256(plan), Content({"agreement": agreement.words(plan)}, {})
        replies = self.channel.ask(
            "join", dict.fromkeys(agreement.members if names is None else names, content), self.plan.deadline
        )
        self.refuse(_errors(replies))
        return {
            name
            for name, reply in replies.items()
            if reply.content is not None and reply.content.words.get("bound") == sha
        }

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Turns clients away, each once, and tells them why."""
        reasons = {name: why for name, why in reasons.items() if name not in self.turned_away}
        for name, why in reasons.items():
            self.tell(f"Refused {name}: {why}")
        self.refused |= reasons
        self.turned_away |= set(reasons)
        contents = {name: Content({"reason": why}, {}) for name, why in reasons.items()}
        if contents:
            self.channel.ask("refuse", contents, self.plan.deadline, lambda _, seconds: seconds > REFUSE_S)

    def refuse_latecomers(self, agreement: Agreement) -> None:
        """Tells clients that came after the agreement that the run continues without them, each once."""
        new = set(self.forget_who_left()) - {*agreement.members, *self.turned_away}
        late = "the run had already begun; it can take part in the next one."
        self.refuse(dict.fromkeys(sorted(new), late))

    def fail(self, why: str) -> None:
        """Tells all clients that the run has failed, so that they do not wait for it."""
        content = Content({"reason": why, "over": True}, {})
        present = [name for name in self.channel.present() if name not in self.turned_away]
        if present:
            self.channel.ask("refuse", dict.fromkeys(present, content), self.plan.deadline)

    def forget_who_left(self) -> list[str]:
        """The connected clients; those that were turned away and left may come back with another table."""
        present = self.channel.present()
        self.turned_away &= set(present)
        self.said = {name: words for name, words in self.said.items() if name in present}
        self.asked_at = {name: at for name, at in self.asked_at.items() if name in present}
        return present


def _pending(reply: Reply) -> bool:
    """Whether a client's owner has not yet decided to take part."""
    return reply.content is not None and reply.content.words.get("pending") is True


def _errors(replies: Mapping[str, Reply]) -> dict[str, str]:
    """The errors of clients, except for those that may come back."""
    return {name: reply.error for name, reply in replies.items() if reply.error and reply.error != GONE}
