"""Rounds of a federation on one machine: all clients of a cohort in one compiled program.

Randomness is addressed, not threaded: a client's key in a round is a function of (seed, round, client id),
and the cohort one of (seed, round). So training only the cohort, adding a client, stopping and resuming all
leave every client's computation as it was.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Models
from pfedme.devices import everywhere, over_devices, padded
from pfedme.errors import InputError
from pfedme.federation import Federation
from pfedme.metrics import Blocks, Scores, score, summary
from pfedme.models import Model, curvature
from pfedme.problem import Problem
from pfedme.tree import Params

MOST_ROUNDS = 64
"""The most rounds in one call of the compiled program; the result does not depend on it."""


class State(NamedTuple):
    """Where a run stands before round t. With the specification it determines everything that follows."""

    t: int
    w: Params
    clients: Any
    """What each client keeps between rounds, stacked; () if nothing."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of each model that exists, `global`, `local` and `personal`, on test and training rows."""

    round: int
    clients: np.ndarray
    """The clients that were evaluated, by their places in the federation."""
    test: dict[str, Scores]
    train: dict[str, Scores]
    info: dict[str, np.ndarray]

    def entry(self) -> dict[str, Any]:
        """This evaluation as an entry of the record's history."""
        entry: dict[str, Any] = {"round": self.round}
        entry |= {kind: summary(self.test[kind], self.train[kind]) for kind in self.test}
        if "inner_residual" in self.info:
            entry["inner"] = {
                "residual": float(self.info["inner_residual"].mean()),
                "residual_max": float(self.info["inner_residual"].max()),
                "steps": float(self.info["inner_steps"].mean()),
            }
        return entry

    @property
    def finite(self) -> bool:
        """Whether every loss, and every number about the computation, is finite."""
        losses = [s.loss for s in (*self.test.values(), *self.train.values())]
        return all(np.isfinite(numbers).all() for numbers in (*losses, *self.info.values()))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "start", "n_train", "ids"],
    meta_fields=["longest"],
)
@dataclasses.dataclass(frozen=True)
class Store:
    """A federation's rows as the compiled program sees them."""

    x: jax.Array
    y: jax.Array
    start: jax.Array
    n_train: jax.Array
    ids: jax.Array
    longest: int

    @classmethod
    def of(cls, federation: Federation) -> Store:
        """The rows of a federation."""
        f = federation
        columns = (f.x, f.y, f.start.astype(np.int32), f.n_train.astype(np.int32), f.ids)
        return cls(*(everywhere(column) for column in columns), longest=int(f.n_train.max()))

    def problem(self, model: Model, i: jax.Array) -> Problem:
        """The learning problem of client i."""
        return Problem(model, self.x, self.y, self.start[i], self.n_train[i], self.longest)


class Job(NamedTuple):
    """What stays the same from round to round."""

    algorithm: Algorithm
    model: Model
    store: Store
    key: jax.Array


class Simulation:
    """A federation, an algorithm and a model, ready to run; holds no state of the run itself."""

    def __init__(
        self, algorithm: Algorithm, model: Model, federation: Federation, *, cohort: int, seed: int = 0
    ) -> None:
        if not 1 <= cohort <= federation.clients:
            raise InputError(
                f"A cohort of {cohort} cannot be drawn from {federation.clients} clients; "
                f"choose --cohort between 1 and {federation.clients}."
            )
        self.algorithm, self.model, self.federation = algorithm, model, federation
        self.seed, self.key = seed, jax.random.key(seed)
        self.cohort = cohort if algorithm.has_global else federation.clients
        self.store = Store.of(federation)
        self._job = Job(algorithm, model, self.store, self.key)
        self._by_id = np.argsort(federation.ids, kind="stable")

    def start(self) -> State:
        """Before the first round."""
        w = self.model.init(jax.random.fold_in(self.key, 2**32 - 1))
        one = self.algorithm.init(w)
        clients = jax.tree.map(lambda a: jnp.broadcast_to(a, (self.federation.clients, *a.shape)), one)
        return State(0, w, clients)

    def cohort_of(self, t: int) -> np.ndarray:
        """The clients of round t, drawn uniformly without replacement, in the order of their ids."""
        rng = np.random.default_rng([self.seed, t])
        return self._by_id[np.sort(rng.choice(self.federation.clients, self.cohort, replace=False))]

    def advance(self, state: State, rounds: int) -> tuple[State, bool]:
        """The state after `rounds` (at most MOST_ROUNDS) more rounds, and whether all of it is finite.

        If not, the state is the one before the round that went wrong.
        """
        rounds = min(rounds, MOST_ROUNDS)
        if rounds == 0:
            return state, True
        drawn = [padded(self.cohort_of(state.t + k)) for k in range(rounds)]
        cohorts = np.resize(np.array(drawn, np.int32), (MOST_ROUNDS, len(drawn[0])))
        present = np.arange(cohorts.shape[1]) < self.cohort
        done, finite, w, clients = _advance(
            self._job, state.w, state.clients, state.t, cohorts, present, rounds
        )
        return State(state.t + int(done), w, clients), bool(finite)

    def answer(self, state: State, who: np.ndarray | None = None) -> tuple[Models, dict[str, np.ndarray]]:
        """The local and personal models of clients `who` (default: all) in answer to w, stacked."""
        who = np.arange(self.federation.clients) if who is None else np.asarray(who)
        models, info = _answer(self._job, state.w, state.clients, state.t, padded(who))
        models, info = jax.tree.map(lambda a: a[: len(who)], (models, info))
        return models, {k: np.asarray(v, np.float64) for k, v in info.items()}

    def evaluate(self, state: State, who: np.ndarray | None = None) -> tuple[Evaluation, Models]:
        """The scores of all models of clients `who` (default: all), and their local and personal models."""
        f = self.federation
        who = np.arange(f.clients) if who is None else np.asarray(who)
        models, info = self.answer(state, who)
        kinds = {"global": state.w if self.algorithm.has_global else None, **models._asdict()}
        parts = {
            "train": Blocks.cut(f.start[who], f.n_train[who]),
            "test": Blocks.cut((f.start + f.n_train)[who], f.n_test[who]),
        }
        scores = {
            part: {
                kind: score(self.model, theta, self.store.x, self.store.y, blocks, len(who))
                for kind, theta in kinds.items()
                if theta is not None
            }
            for part, blocks in parts.items()
        }
        return Evaluation(state.t, who, scores["test"], scores["train"], info), models

    def evaluated(self, clients: int) -> np.ndarray:
        """So many clients, drawn once for the run, in the order of the federation."""
        if clients == self.federation.clients:
            return np.arange(clients)
        rng = np.random.default_rng([self.seed, 2**32])
        return np.sort(rng.choice(self.federation.clients, clients, replace=False))

    def smoothness(self, rows: int = 256, most: int = 32) -> float:
        """An estimate of L: the largest curvature of (at most `most`) clients' losses at the first w."""
        who = np.linspace(0, self.federation.clients - 1, min(most, self.federation.clients)).astype(int)
        return float(_smoothness(self.model, self.store, self.key, self.start().w, who, rows))


@jax.jit
def _advance(
    job: Job, w: Params, clients: Any, t: int, cohorts: jax.Array, present: jax.Array, rounds: int
) -> tuple[jax.Array, jax.Array, Params, Any]:
    """Rounds t, t + 1, ... until `rounds` are done or a number is no longer finite."""

    def unfinished(carry: Any) -> jax.Array:
        done, finite, _, _ = carry
        return (done < rounds) & finite

    def one_round(carry: Any) -> Any:
        done, _, w, clients = carry
        who = cohorts[done]
        update = _each("client_update", job, w, clients, t + done, who)
        count = jnp.where(present, job.store.n_train[who], 0)
        after = (
            job.algorithm.server_update(w, update.upload, count) if job.algorithm.has_global else w,
            jax.tree.map(lambda every, new: every.at[who].set(new), clients, update.state),
        )
        finite = Params(after).all_finite()
        w, clients = jax.tree.map(partial(jnp.where, finite), after, (w, clients))
        return done + finite, finite, w, clients

    return lax.while_loop(unfinished, one_round, (jnp.int32(0), jnp.bool_(True), w, clients))


@jax.jit
def _answer(job: Job, w: Params, clients: Any, t: int, who: jax.Array) -> Any:
    return _each("answer", job, w, clients, t, who)


def _each(
    method: Literal["client_update", "answer"], job: Job, w: Params, clients: Any, t: Any, who: jax.Array
) -> Any:
    """What every client i in `who` makes of (key_i, problem_i, w, state_i), at once and on all devices."""

    def part(shared: tuple[Job, Params, Any], who: jax.Array) -> Any:
        (algorithm, model, store, key), w, clients = shared

        def client(i: jax.Array) -> Any:
            own = jax.tree.map(lambda every: every[i], clients)
            own_key = jax.random.fold_in(key, store.ids[i])
            return getattr(algorithm, method)(own_key, store.problem(model, i), w, own)

        return jax.vmap(client)(who)

    round_job = job._replace(key=jax.random.fold_in(job.key, t))
    return over_devices(part, (round_job, w, clients), who)


@partial(jax.jit, static_argnames="rows")
def _smoothness(
    model: Model, store: Store, key: jax.Array, w: Params, who: jax.Array, rows: int
) -> jax.Array:
    return jnp.max(lax.map(lambda i: curvature(store.problem(model, i).sample(key, rows), w), who))
