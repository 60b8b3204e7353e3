"""Differential privacy of rows at a deployed client, which enforces it whatever the server asks.

The client calibrates its noise before the first round, for its own number of rows, and pins it with the
agreement. Mini-batches and noise are drawn afresh for each reply from the operating system's entropy: never
from the seed, which the server knows, nor from the client's secret, and what they were drawn from is not
stored. A reply is stored before it leaves. If the same is asked for again, the same bytes are sent, which
reveal nothing more; a second reply to the same round is never made.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from pfedme.deploy.audit_log import AuditLog
from pfedme.deploy.budget import Budget, Cost, Exhausted
from pfedme.deploy.log import say
from pfedme.deploy.messages import Content, Refusal, Words, digest
from pfedme.deploy.policy import Policy
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing
from pfedme.privacy.accounting import Event
from pfedme.privacy.rows import RowPlan, plan_rows
from pfedme.privacy.units import Rows

if TYPE_CHECKING:
    from pfedme.deploy.plan import Plan

REPLY, LOCK = "reply.safetensors", "reply.lock"


def fresh_key() -> jax.Array:
    """A random key from the operating system's entropy, for the mini-batches and the noise of one reply."""
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(secrets.token_bytes(8), np.uint32)))


def calibrated(plan: Plan, policy: Policy, rows: int, share: float = 0.0) -> Words | None:
    """The noise with which a client with this many training rows takes part in all rounds of a plan and makes
    its models in the end, as JSON values; None if the plan has no differential privacy of rows.

    ε is the plan's, or the client's own limit without the `share` of it that the agreement costs, if that is
    smaller.
    """
    if not isinstance(plan.privacy, Rows):
        return None
    accesses, n = plan.algorithm.accesses, np.array([rows])
    assert accesses is not None
    left = (policy.max_epsilon or np.inf) - share
    spec = dataclasses.replace(plan.privacy, epsilon=min(plan.privacy.epsilon, left))
    if rows < max(1, plan.algorithm.B):
        raise Refusal("it has fewer training rows than a mini-batch of the plan")
    if spec.delta * rows >= 1:
        raise Refusal("the plan's delta is not below 1 divided by the number of its training rows")
    rounds = np.array([plan.rounds + accesses.repeats])
    try:
        found = plan_rows(spec, plan.algorithm, n, rounds, np.array([1]))
    except InputError as error:
        say(str(error))
        raise Refusal("it cannot compute the noise for this plan; its own console says why") from None
    arrays = {
        name: getattr(found, name)[0].item() for name in ("rows", "batches", "rate", "noise", "epsilon")
    }
    return {
        **arrays, "B": found.B, "gradients": found.gradients, "most": found.most,
        "spec": {"epsilon": spec.epsilon, "delta": spec.delta, "clip": spec.clip},
    }  # fmt: skip


def row_plan(words: Words) -> RowPlan:
    """The noise that was pinned."""
    arrays = {name: np.array([words[name]]) for name in ("rows", "batches", "rate", "noise", "epsilon")}
    rest = {name: words[name] for name in ("B", "gradients", "most")}
    return RowPlan(spec=Rows(**words["spec"]), **arrays, **rest)


def cost_of(plan: Plan, pinned: Words, run: str, kind: str) -> Cost:
    """What a reply of some kind costs."""
    accesses = plan.algorithm.accesses
    assert accesses is not None
    per_round, per_answer, _ = accesses.counts(plan.algorithm)
    batches = per_round if kind == "train" else per_answer + accesses.repeats * per_round
    found = row_plan(pinned)
    return Cost(run, Event(*found.event(0, batches)), found.spec.delta, found.spec.epsilon)


class Releases:
    """The replies of a client in one run, each of which is made once and costs something."""

    def __init__(self, log: AuditLog, policy: Policy, run: str) -> None:
        self.log, self.policy, self.run = log, policy, run
        self.path = log.state / REPLY

    def once(self, t: int, cost: Cost, make: Callable[[], Content]) -> Content:
        """The upload of round t, which `make` makes; the same bytes if it was made before.

        Raises a refusal if the budget does not allow it, or if the bytes are lost.
        """
        with self._turn():
            if before := self._spent("train", t):
                return self._again(t, before)
            Budget.of(self.log.read()).charge(cost, self.policy)
            content = make()
            self._store(t, content)
            self._charge("train", t, cost, sha256=digest(content)[1])
            return content

    def final(self, t: int, cost: Cost) -> bool:
        """Charges what the models in the end cost, of which nothing leaves; returns whether that was done
        before."""
        with self._turn():
            if self._spent("finish", t):
                self.log.append("repeated", kind="finish", round=t + 1, run=self.run, epsilon=0.0)
                return True
            self._charge("finish", t, cost)
            return False

    def _charge(self, kind: str, t: int, cost: Cost, **about: str) -> None:
        with self.log.turn():
            chain = self.log.read()
            words = Budget.of(chain).charge(cost, self.policy)
            self.log.append_in_turn(chain, "spent", kind=kind, round=t + 1, **about, **words)

    def _spent(self, kind: str, t: int) -> Words | None:
        return Budget.of(self.log.read()).found(self.run, kind, t + 1)

    def _again(self, t: int, before: Words) -> Content:
        content = self._stored(t)
        if content is None or digest(content)[1] != before["sha256"]:
            raise Refusal(
                f"it has answered round {t + 1} before, and that reply is lost; another one would reveal more"
            )
        self.log.append("repeated", kind="train", round=t + 1, run=self.run, epsilon=0.0)
        return content

    def _store(self, t: int, content: Content) -> None:
        about = json.dumps({"run": self.run, "round": t, "words": content.words})
        with writing(self.path):
            atomic_write(self.path, safetensors.numpy.save(content.arrays, {"pfedme": about}))
            self.path.chmod(0o600)

    def _stored(self, t: int) -> Content | None:
        try:
            with safetensors.safe_open(self.path, framework="numpy") as file:
                about = json.loads(file.metadata()["pfedme"])
                if (about["run"], about["round"]) != (self.run, t):
                    return None
                names = file.keys()
                return Content(about["words"], {name: file.get_tensor(name) for name in names})
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            return None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Makes replies one after the other."""
        import fcntl  # not available on Windows

        with writing(self.log.state):
            lock = (self.log.state / LOCK).open("ab")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def refuse_uncovered(plan: Plan, *, shares: bool, chooses: bool) -> None:
    """Raises a refusal if a plan is private and the owner uses rows in ways that its ε does not cover: it
    `shares` metrics, or the client `chooses` its model."""
    if plan.privacy is not None and shares:
        raise Refusal(
            "the plan has differential privacy, which does not cover the exact scores that it shares; its "
            "owner can leave out --share-metrics"
        )
    if isinstance(plan.privacy, Rows) and chooses:
        raise Refusal(
            "the plan has differential privacy, which does not cover a choice by its rows; its owner can "
            "leave out --personalize"
        )


def check_budget(plan: Plan, noise: Words | None, run: str, log: AuditLog, policy: Policy) -> None:
    """Tells the owner how long the budget lasts for a private plan; raises a refusal if that is not even a
    round."""
    if noise is None:
        return
    budget = Budget.of(log.read())
    if budget.of_run(run).lines:
        return  # it was told before
    rounds = budget.lasts(cost_of(plan, noise, run, "train"), plan.rounds, policy)
    if rounds == 0:
        limit = f"{policy.max_epsilon or noise['spec']['epsilon']:g}"
        raise Exhausted(f"its budget is spent: even one round would exceed its limit of epsilon {limit}")
    say(
        f"Noise multiplier {noise['noise']:.4g}, clipping at {noise['spec']['clip']:g}: the whole plan costs "
        f"epsilon {noise['epsilon']:.4g} at delta {noise['spec']['delta']:g}."
        + (f" What is left lasts for {rounds} of {plan.rounds} rounds." if rounds < plan.rounds else "")
    )
