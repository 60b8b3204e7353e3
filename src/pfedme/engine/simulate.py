"""Rounds of a federation on one or several hosts: all clients of a cohort in one compiled program.

Random keys are not passed from round to round: a client's key is a function of (seed, round, client id), and
the cohort is a function of (seed, round). So training only the cohort, adding a client, or stopping and
resuming leaves every other client's computation unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Cohort, Models, Update
from pfedme.algorithms.cautious import UNSEEN_CURVATURE, with_cautious_steps
from pfedme.core.models import Model
from pfedme.core.private import Private
from pfedme.core.private_mean import PrivateMean
from pfedme.core.tree import Params
from pfedme.data.federation import Federation, Part
from pfedme.engine.chunks import at_once, groups, size_of, stacked
from pfedme.engine.cohorts import check_cohort, draw_cohort, draw_poisson, evaluated_clients
from pfedme.engine.devices import Compiled, agreed, over_devices, padded, read, replicate
from pfedme.engine.evaluation import Evaluation
from pfedme.engine.exchange import first_model, first_server, first_states, server_key
from pfedme.engine.metrics import Blocks, Scores, Spread, score
from pfedme.engine.routing import Route, in_order, routed
from pfedme.engine.smoothness import largest_curvature
from pfedme.engine.store import Store
from pfedme.privacy import clients as private_clients
from pfedme.privacy import rows as private_rows

T = TypeVar("T")

MOST_ROUNDS = 64
"""The largest number of rounds in one call of the compiled program; the result does not depend on it."""

CACHE_BYTES = 2**23
"""Limit on the size of all active clients' models below which several runs are faster together than in
turn."""


class State(NamedTuple):
    """The state of a run before round t. With the specification it determines everything that follows."""

    t: int
    server: Any
    """What the server keeps between rounds: usually w."""
    clients: Any
    """What each client keeps between rounds, stacked; () if nothing."""
    clip: Any = ()
    """C, the clipping length of uploads, if it adapts; () otherwise."""


class Job(NamedTuple):
    """What stays the same from round to round of a run, besides its store of rows."""

    algorithm: Algorithm
    model: Model
    key: jax.Array
    private: Private | None = None
    """What makes the gradients of each client private, stacked; None if they are not."""
    mean: PrivateMean | None = None
    """What makes the mean of the uploads private; None if it is not."""


class Simulation:
    """A federation, an algorithm and a model, ready to run; holds no state of the run itself."""

    def __init__(
        self, algorithm: Algorithm, model: Model, federation: Federation, *, cohort: int, seed: int = 0,
        key: jax.Array | None = None, quarter_at: Sequence[int] = (), total: int | None = None,
        privacy: private_rows.RowPlan | private_clients.ClientPlan | None = None,
    ) -> None:  # fmt: skip
        """`key` is the random key for mini-batches, if it is not to come from `seed`. Step sizes that are not
        given come from the curvature of the clients' losses. η is divided by four after each of the rounds
        `quarter_at`. `total` is the number of all clients, if this federation is only a part of them. With
        `privacy`, rows are used in private gradients alone, or the server sees private means alone, and step
        sizes do not depend on rows."""
        check_cohort(cohort, federation.clients)
        self.model, self.federation = model, federation
        self.seed, self.key = seed, jax.random.key(seed) if key is None else key
        self.judged = Store.of(federation)
        trained = federation.pooled() if algorithm.pools else federation
        self.store = Store.of(trained) if algorithm.pools else self.judged
        self.home = trained.home
        self.trained_clients = trained.clients
        self.members = np.arange(federation.clients)
        algorithm.check_fit(model, total or trained.clients)
        self.cohort = cohort if algorithm.federated else trained.clients
        self._by_id = np.argsort(trained.ids, kind="stable")
        self.quarter_at = tuple(quarter_at)
        self.algorithm = algorithm
        self.privacy, self.private, self.mean = privacy, None, None
        if isinstance(privacy, private_rows.RowPlan):
            private_rows.check_algorithm(algorithm, model)
            self.private = replicate(privacy.private())
        elif privacy is not None:
            private_clients.check_algorithm(algorithm, model)
            self.mean = replicate(privacy.mean())
        if privacy is not None:
            self.algorithm = with_cautious_steps(algorithm)
        elif not all(getattr(algorithm, name) for name in algorithm.steps):
            self.algorithm = algorithm.with_steps(self.smoothness())

    def job(self, t: int) -> Job:
        """What stays the same in the rounds around t."""
        quarters = sum(t >= at for at in self.quarter_at)
        algorithm = self.algorithm.slower(0.25**quarters) if quarters else self.algorithm
        return Job(in_order(algorithm), self.model, self.key, self.private, self.mean)

    def same_steps(self, t: int) -> int:
        """Number of rounds from round t that have the same step sizes."""
        return min((at - t for at in self.quarter_at if at > t), default=MOST_ROUNDS)

    @property
    def at_once(self) -> int:
        """How many such runs to run together, so that their clients' models fit into the caches."""
        shapes = jax.eval_shape(self.model.init, self.key)
        models = 2 * self.places * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        return max(1, CACHE_BYTES // models)

    def start(self, server: Any = None) -> State:
        """The state before the first round, with the server's initial state or a given one."""
        if server is None:
            server = first_server(self.algorithm, self.model, self.seed, self.trained_clients)
        clients = first_states(self.algorithm, self.model, self.seed, server, clients=self.trained_clients)
        return State(0, *replicate((server, clients, () if self.mean is None else self.mean.start())))

    def cohort_of(self, t: int) -> np.ndarray:
        """The clients of round t in the order of their ids: drawn uniformly without replacement, or each by a
        coin of its own if the server adds noise for their privacy."""
        if isinstance(self.privacy, private_clients.ClientPlan):
            drawn = draw_poisson(self._by_id, self.federation.ids, self.privacy.rate, self.seed, t)
            return drawn[: self.privacy.most]
        return draw_cohort(self._by_id, self.cohort, self.seed, t)

    @property
    def places(self) -> int:
        """How many clients of a round there is room for."""
        plan = self.privacy
        return plan.most if isinstance(plan, private_clients.ClientPlan) else self.cohort

    def seated(self, t: int) -> np.ndarray:
        """The clients of round t; places that stay empty have the number of all clients."""
        drawn = self.cohort_of(t)
        return np.pad(drawn, (0, self.places - len(drawn)), constant_values=self.trained_clients)

    def advance(self, state: State, rounds: int) -> tuple[State, bool]:
        """The state after `rounds` more rounds, and whether all of it is finite.

        If not, the state is the one before the round that failed.
        """
        end, finite = state.t + rounds, True
        while finite and state.t < agreed(end):
            ((state, finite),) = advance([self], [state], end - state.t)
        return state, finite

    def update(self, state: State, who: np.ndarray) -> Update:
        """The updates of clients `who` in round t, stacked; uploads are decoded."""
        update = _update(self.store, self.job(state.t), state, padded(who), self.route(who[None]))
        return jax.tree.map(lambda a: a[: len(who)], update)

    def reply(self, t: int, sent: Any, own: Any) -> Update:
        """The update of this federation's only client in round t, from what it was sent and what it keeps:
        the part of a round that a deployed client computes. The upload is encoded."""
        return _reply(self.store, self.job(t), t, sent, own)

    def reply_models(self, t: int, sent: Any, own: Any) -> tuple[Models, dict[str, np.ndarray]]:
        """The models with which that client responds to what it was sent, stacked."""
        models, info = _reply_models(self.store, self._answer_job(t), t, sent, own)
        return models, {k: read(v).astype(np.float64) for k, v in info.items()}

    def answer(self, state: State, who: np.ndarray | None = None) -> tuple[Models, dict[str, np.ndarray]]:
        """The local and personal models with which clients `who` (default: all) respond to w, stacked."""
        if self.algorithm.pools:  # no client has its own model
            return Models(), {}
        who = np.arange(self.federation.clients) if who is None else np.asarray(who)
        job = self._answer_job(state.t)
        made = (
            (_answer(self.store, job, state, padded(some), self.route(some[None])), count)
            for some, count in groups(who, self.room(8))
        )
        models, info = stacked(made, len(who))
        return models, {k: read(v).astype(np.float64) for k, v in info.items()}

    def room(self, models: int) -> int:
        """How many clients can work at once, if each needs memory for so many models and for two batches."""
        rows = self.algorithm.B or self.store.longest
        each = models * size_of(self.model) + 2 * rows * self.federation.x[0].nbytes
        return at_once(each) if self.home is None else self.federation.clients

    def part(self, who: np.ndarray) -> Simulation:
        """Clients `who` of an algorithm that does not federate; in states of this part they count from 0."""
        part = copy.copy(self)
        part.store, part.members = self.store.of_clients(who), self.members[who]
        part.home = None if self.home is None else self.home[who]
        part.trained_clients = part.cohort = len(who)
        part._by_id = np.argsort(self.federation.ids[part.members], kind="stable")
        return part

    def route(self, who: np.ndarray) -> Route | None:
        """How clients `who`, one row for each round, get to the devices that have their rows; None if each
        device has those of its part of the clients."""
        return None if self.home is None else Route.of(self.home, who)

    def _answer_job(self, t: int) -> Job:
        """What clients need to respond with their models in round t: with full steps, even late in a run,
        because they define the personal models. With privacy, with the steps of round t: an answer that
        differed from the round would use its noise a second time."""
        return self.job(t if self.private is not None else 0)

    def evaluate(
        self,
        state: State,
        who: np.ndarray | None = None,
        *,
        on: Part = "test",
        train: bool = True,
        rows: bool = False,
    ) -> tuple[Evaluation, Models]:
        """The scores of all models of clients `who` (default: all), and their local and personal models.

        Without `train`, only the rows to evaluate `on` are used, which is faster. With `rows`, the result for
        each of those rows is kept, for the metrics that need more than sums.
        """
        who = np.arange(self.federation.clients) if who is None else np.asarray(who)
        models, info = self.answer(state, who)
        return self.score(
            state.t, self.shared(state), models, info, who, on=on, train=train, rows=rows
        ), models

    def score(
        self, t: int, shared: Params | None, models: Models, info: dict[str, np.ndarray], who: np.ndarray,
        *, on: Part = "test", train: bool = True, rows: bool = False,
    ) -> Evaluation:  # fmt: skip
        """The scores of a shared model and of the models that clients `who` have."""
        f = self.federation
        f.check_unchanged()
        kinds = {"global": shared, **models._asdict()}
        parts: tuple[Part, ...] = (on, "train") if train else (on,)
        scores: dict[Part, dict[str, Scores]] = {}
        for part in parts:
            blocks = Blocks.of(f, part, who)
            spread = Spread.of(f.y, blocks, len(who), f.label_unit) if self.model.classes == 0 else None
            keep, store = f.positive if rows and part == on else None, self.judged
            scores[part] = {
                kind: score(self.model, theta, store.x, store.y, blocks, len(who), spread, keep, f.y)
                for kind, theta in kinds.items()
                if theta is not None
            }
        return Evaluation(t, who, scores[on], scores.get("train", {}), info)

    def evaluated(self, clients: int) -> np.ndarray:
        """The clients to evaluate, drawn once for the run, in the order of the federation."""
        return evaluated_clients(self.federation.clients, clients, self.seed)

    def shared(self, state: State) -> Params | None:
        """The global model, if there is one."""
        return self.algorithm.shared(state.server, state.clients)

    def smoothness(self, batches: int = 32) -> float:
        """An estimate of L: the largest curvature, at the initial w, of clients' losses on `batches`
        mini-batches of the algorithm's size, or of 256 rows if the algorithm uses all rows. With privacy, it
        does not depend on rows."""
        if self.privacy is not None:
            return UNSEEN_CURVATURE
        who = self._by_id[np.linspace(0, self.trained_clients - 1, batches).astype(int)]
        first, B = first_model(self.model, self.seed), self.algorithm.B
        first = first.map(lambda leaf: leaf.astype(self.store.x.dtype))
        return float(
            read(largest_curvature(self.model, self.store, self.key, first, who, self.home, B or 256))
        )


def advance(
    simulations: Sequence[Simulation], states: Sequence[State], rounds: int
) -> list[tuple[State, bool]]:
    """`Simulation.advance` for several runs in one program; all stop before a round in which one fails.

    The runs share the federation and the size of the cohort; they differ only in seeds and floats such as λ.
    A run's result depends on the number of runs only through rounding, and not at all on the other runs.
    """
    federation, cohort = simulations[0].federation, simulations[0].places
    steady = (sim.same_steps(state.t) for sim, state in zip(simulations, states, strict=True))
    rounds = min(rounds, MOST_ROUNDS, federation.draws_ahead(len(simulations) * cohort), *steady)
    if rounds == 0:
        return [(state, True) for state in states]
    drawn = [
        [sim.seated(state.t + k) for k in range(rounds)]
        for sim, state in zip(simulations, states, strict=True)
    ]
    who = np.concatenate(drawn, axis=1)
    federation.read_ahead(simulations[0].members[who[who < simulations[0].trained_clients]])
    run = np.repeat(np.arange(len(drawn)), cohort)
    who = np.stack([padded(members) for members in np.resize(who, (MOST_ROUNDS, len(run)))])
    jobs = tuple(sim.job(state.t) for sim, state in zip(simulations, states, strict=True))
    route = simulations[0].route(who[:, : len(run)])
    done, finite, after = _advance(
        simulations[0].store, jobs, tuple(states), padded(run), who.astype(np.int32), rounds, route,
        cohort=cohort,
    )  # fmt: skip
    return [
        (state._replace(t=before.t + int(read(done))), bool(ok))
        for before, state, ok in zip(states, after, read(finite), strict=True)
    ]


@partial(Compiled, static_argnames=("cohort",))
def _advance(
    store: Store,
    jobs: tuple[Job, ...],
    states: tuple[State, ...],
    run: jax.Array,
    who: jax.Array,
    rounds: int,
    route: Route | None,
    cohort: int,
) -> tuple[jax.Array, jax.Array, list[State]]:
    """Rounds until `rounds` are done or a number is no longer finite.

    Client who[t, k] belongs to run[k]; the first `cohort` to run 0, and so on; the rest is padding. A number
    that no client has stands for none.
    """
    job, start, members = _stacked(jobs), _stacked(states), len(jobs) * cohort

    def by_run(a: jax.Array) -> jax.Array:
        return jnp.reshape(a[:members], (len(jobs), cohort, *a.shape[1:]))

    def unfinished(carry: Any) -> jax.Array:
        done, finite, _ = carry
        return (done < rounds) & jnp.all(finite)

    def one_round(carry: Any) -> Any:
        done, _, state = carry
        total = len(store.n_train)
        client = jnp.minimum(who[done], total - 1)
        update = _each("client_update", store, job, state, run, client, route and route.at(done))
        # One row per run, not a sum over all with zero weights for other runs: zero times infinity is NaN.
        sent = update.upload, client, jnp.where(who[done] < total, store.n_train[client], 0)
        uploads, clients, count = jax.tree.map(by_run, sent)

        def serve(job: Job, t: jax.Array, server: Any, clip: Any, uploads: Any, *members: jax.Array) -> Any:
            cohort = Cohort(server_key(job.key, t), *members, total=total)
            if job.mean is not None:
                return private_clients.private_step(job.algorithm, job.mean, server, uploads, cohort, clip)
            return job.algorithm.server_update(server, uploads, cohort), clip

        federated = jobs[0].algorithm.federated
        server, clip = state.server, state.clip
        if federated:
            server, clip = jax.vmap(serve)(job, state.t, server, clip, uploads, clients, count)

        def put(kept: jax.Array, new: jax.Array) -> jax.Array:
            # Without the padding, which has no result if clients are worked on where their rows are.
            return kept.at[run[:members], who[done, :members]].set(new[:members], mode="drop")

        after = State(state.t + 1, server, jax.tree.map(put, state.clients, update.state), clip)
        finite = jax.vmap(lambda *own: Params(own).all_finite())(*after[1:])
        fine = jnp.all(finite)
        return done + fine, finite, jax.tree.map(partial(jnp.where, fine), after, state)

    finite = jnp.ones(len(jobs), bool)
    done, finite, end = lax.while_loop(unfinished, one_round, (jnp.int32(0), finite, start))
    return done, finite, replicate([_of(r, end) for r in range(len(jobs))])


def _stacked(trees: Sequence[T]) -> T:
    """One tree whose leaves have a leading axis over `trees`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _of(run: Any, tree: T) -> T:
    """The part of a stacked tree that belongs to `run`."""
    return jax.tree.map(lambda leaf: leaf[run], tree)


@Compiled
def _update(store: Store, job: Job, state: State, who: jax.Array, route: Route | None) -> Update:
    jobs, states, run = _stacked([job]), _stacked([state]), jnp.zeros_like(who)
    return _each("client_update", store, jobs, states, run, who, route and route.at(0))


def _own_key(key: jax.Array, t: Any, id: jax.Array) -> jax.Array:
    """The random key of a client in round t."""
    return jax.random.fold_in(jax.random.fold_in(key, t), id)


@Compiled
def _reply(store: Store, job: Job, t: jax.Array, sent: Any, own: Any) -> Update:
    algorithm, key = job.algorithm, _own_key(job.key, t, store.ids[0])
    problem = store.problem(job.model, 0, t, algorithm.batches, _of(0, job.private))
    update = algorithm.client_update(key, problem, sent, own)
    return update._replace(upload=algorithm.encoded(key, update.upload))


@Compiled
def _reply_models(store: Store, job: Job, t: jax.Array, sent: Any, own: Any) -> Any:
    problem = store.problem(job.model, 0, t, job.algorithm.batches, _of(0, job.private))
    made = job.algorithm.answer(_own_key(job.key, t, store.ids[0]), problem, sent, own)
    return jax.tree.map(lambda a: a[None], made)


@Compiled
def _answer(store: Store, job: Job, state: State, who: jax.Array, route: Route | None) -> Any:
    jobs, states, run = _stacked([job]), _stacked([state]), jnp.zeros_like(who)
    return _each("answer", store, jobs, states, run, who, route and route.at(0))


def _each(
    method: Literal["client_update", "answer"],
    store: Store,
    job: Job,
    state: State,
    run: jax.Array,
    who: jax.Array,
    route: Route | None,
) -> Any:
    """What client i = who[k] of run[k] returns for (key_i, problem_i, w, state_i), for all k at once."""

    def part(
        shared: tuple[Store, Job, State], work: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array
    ) -> Any:
        store, job, state = shared
        store = store.with_rows(x, y)

        def client(run: jax.Array, i: jax.Array) -> Any:
            (algorithm, model, key), server = _of(run, (job[:3], state.server))
            own_state = jax.tree.map(lambda kept: kept[run, i], state.clients)
            t = jnp.asarray(state.t)[run]
            own_key = _own_key(key, t, store.ids[i])
            problem = store.problem(model, i, t, algorithm.batches, _of((run, i), job.private))
            made = getattr(algorithm, method)(own_key, problem, algorithm.send(server, i), own_state)
            if method == "client_update":
                made = made._replace(upload=algorithm.received(own_key, made.upload))
            return made

        return jax.vmap(client)(*work)

    shared = store.without_rows(), job, state
    if route is not None:
        return routed(part, shared, run, who, (store.x, store.y), route)
    return over_devices(part, shared, (run, who), (store.x, store.y))
