"""Differential privacy of clients at the server of a deployed run.

The server draws cohorts and noise from the operating system's entropy: never from the seed, which clients
know. A round that is repeated asks the same clients again, and publishes one model. Clients shorten what they
send themselves, and the server leaves out what is longer.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Cohort
from pfedme.core.private_mean import PrivateMean
from pfedme.deploy.agreement import Agreement
from pfedme.deploy.judge import Upload
from pfedme.deploy.messages import Words
from pfedme.deploy.plan import Plan, built
from pfedme.deploy.policy import MOST_DRAWN
from pfedme.deploy.private import fresh_key
from pfedme.engine.exchange import upload_of
from pfedme.privacy.clients import ClientPlan, plan_clients, private_step
from pfedme.privacy.units import Clients
from pfedme.runs.ledger import Part

LENIENT = 1e-5
"""By how much an upload may be longer than it should, relative to that."""
LEDGER = "who took part in which round, which ledger.csv and server.log say: keep them at the server"


@dataclasses.dataclass(frozen=True)
class Central:
    """The server's part of the privacy of clients in a federation."""

    plan: ClientPlan
    names: tuple[str, ...]
    upload: Any
    """The shapes of an upload."""

    @classmethod
    def of(cls, plan: Plan, agreement: Agreement) -> Central | None:
        """That of a plan among the clients of an agreement; None if the plan has no such privacy."""
        if not isinstance(plan.privacy, Clients):
            return None
        names, schema = agreement.names, agreement.schema
        model = built(plan.model, schema.features, len(schema.labels))
        upload = upload_of(plan.algorithm, model, schema.features, len(names))
        numbers = sum(leaf.size for leaf in jax.tree.leaves(upload))
        cohort = min(plan.cohort or MOST_DRAWN, len(names))
        made = plan_clients(plan.privacy, plan.algorithm, len(names), cohort, plan.rounds, numbers)
        return cls(made, tuple(names), upload)

    def draw(self) -> list[str]:
        """The clients of a round, each drawn by a coin of its own."""
        if self.plan.rate >= 1:
            return list(self.names)
        threshold = int(self.plan.rate * 2.0**64)
        drawn = [name for name in self.names if secrets.randbits(64) < threshold]
        return drawn[: self.plan.most]

    def fitting(
        self, parts: Mapping[str, Part], uploads: Mapping[str, Upload]
    ) -> tuple[dict[str, Part], dict[str, Upload]]:
        """The parts and uploads of a round without those that are too long. Each is judged on its own: what a
        client adds must not depend on the others."""
        parts, uploads, longest = dict(parts), dict(uploads), self.plan.spec.clip
        for name, upload in list(uploads.items()):
            if not upload.norm <= longest * (1 + LENIENT):
                why = f"its update of length {upload.norm:.3g} was not shortened to {longest:g}"
                parts[name] = dataclasses.replace(parts[name], outcome="dropped", reason=why)
                del uploads[name]
        return parts, uploads

    def after(self, algorithm: Algorithm, server: Any, uploads: Mapping[str, Upload]) -> Any:
        """What the server keeps after a round with these uploads, which may be none."""
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.upload)
        trees = [*(upload.tree for upload in uploads.values()), nothing]
        stack = jax.tree.map(lambda *all: jnp.stack(all), *trees)
        rows = jnp.asarray(np.arange(len(trees)) < len(uploads), jnp.float32)
        return _step(algorithm, self.plan.mean(), server, stack, rows, fresh_key(), total=len(self.names))

    def to_json(self) -> Words:
        """What the record says about it."""
        told = self.plan.to_json()
        return {**told, "simulated": False, "not_covered": [*told["not_covered"], LEDGER]}


@partial(jax.jit, static_argnames="total")
def _step(
    algorithm: Algorithm, mean: PrivateMean, server: Any, uploads: Any, rows: jax.Array, key: jax.Array,
    total: int,
) -> Any:  # fmt: skip
    cohort = Cohort(key, jnp.zeros(len(rows), jnp.int32), rows, total)
    return private_step(algorithm, mean, server, uploads, cohort, ())[0]
