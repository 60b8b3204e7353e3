"""The path of personal models θ_i(λ) = argmin_θ f_i(θ) + λ/2 ‖θ − w‖², from the shared model w at λ = ∞ to
the client's own at λ = 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.algorithms import FedAvg
from pfedme.core.losses import curvature
from pfedme.core.models import Model, Network
from pfedme.core.problem import ALL_ROWS, Loss
from pfedme.core.prox import Span
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.chunks import Stacked, at_once, size_of
from pfedme.engine.devices import over_devices, padded, read, replicate
from pfedme.engine.exchange import first_model
from pfedme.engine.metrics import Blocks, Outcomes, outcomes
from pfedme.engine.personalized import Candidate
from pfedme.engine.routing import Route, routed, where_rows_are
from pfedme.engine.simulate import Simulation, Store

FEW = 256
"""The curvature of a client's loss is that on at most so many rows."""


def lambda_path(
    model: Model,
    federation: Federation,
    starts: Mapping[str, Stacked],
    offered: Sequence[Candidate],
    key: jax.Array,
    who: np.ndarray,
    blocks: Blocks,
    eta: np.ndarray,
    B: int,
    temperatures: tuple[float, ...] = (),
) -> Iterator[tuple[Outcomes, Params]]:
    """The models of clients `who`, stacked, one candidate after another, and their outcomes on the clients'
    rows in `blocks`. `starts` has the models of all clients in which each line begins, and `eta` the sizes of
    their steps on mini-batches of B rows."""
    store = Store.of(federation)
    items = padded(who).astype(np.int32)
    route = None if federation.home is None else Route.of(federation.home, who[None])
    # In an order that is the same on all hosts, unlike that of a set.
    centres = {line: replicate(starts[line][items]) for line in dict.fromkeys(c.line for c in offered)}
    reached = dict(centres)
    lams = list(dict.fromkeys(candidate.lam for candidate in offered if candidate.steps))
    for candidate in offered:
        line = candidate.line
        if candidate.steps:
            same = jax.random.fold_in(key, lams.index(candidate.lam))  # the same batches on all paths
            reached[line] = _descend(
                store, model, same, centres[line], reached[line], items, eta[items],
                candidate.lam, candidate.steps, B=B, route=route,
            )  # fmt: skip
        theta = reached[line]
        models = theta if len(items) == len(who) else theta[: len(who)]
        yield outcomes(model, models, store.x, store.y, blocks, temperatures), models


def walked_at_once(model: Model, federation: Federation, lines: int, B: int) -> int:
    """How many clients can follow their paths on so many lines at once; all if several hosts share the
    rows."""
    if federation.home is not None:
        return federation.clients
    rows = Store.most_rows(federation)
    rows = rows if not B or _in_span(model, rows, federation.features, B) else B
    models = (2 * lines + 6) * size_of(model)  # where lines start and are, and what a step needs
    return at_once(models + 2 * rows * federation.features * federation.x.dtype.itemsize)


def _in_span(model: Model, rows: int, features: int, B: int) -> bool:
    """Whether steps are taken in the span of a client's rows, of which there are at most so many."""
    return isinstance(model, Network) and B > 0 and rows**2 <= B * features


@partial(jax.jit, static_argnames="B")
def _descend(
    store: Store,
    model: Model,
    key: jax.Array,
    centre: Params,
    theta: Params,
    who: jax.Array,
    eta: jax.Array,
    lam: float,
    steps: int,
    B: int,
    route: Route | None = None,
) -> Params:
    """θ after `steps` of θ ← argmin_u ⟨∇f̃_i(θ), u⟩ + λ/2 ‖u − w‖² + 1/(2η) ‖u − θ‖², for each client, where w
    is its `centre`.

    η is divided by four for the last four tenths of the steps, and again for the last two. With few rows of
    many features, the steps are taken in the span of the rows (`Span`), where they cost less.
    """
    spans = _in_span(model, store.longest, math.prod(store.x.shape[1:]), B)

    def part(shared: tuple[Store, Model, jax.Array], work: tuple[Any, ...], x: Any, y: Any) -> Params:
        store, model, key = shared
        store = store.with_rows(x, y)

        def fit(centre: Params, theta: Params, i: jax.Array, eta: jax.Array) -> Params:
            problem = store.problem(model, i)
            own = jax.random.fold_in(key, store.ids[i])
            span = Span.of(problem.loss(ALL_ROWS), centre, theta) if spans else None

            def loss(k: jax.Array) -> Loss | Span:
                drawn = problem.draw(jax.random.fold_in(own, k), B)
                return problem.loss(drawn) if span is None else span.on(drawn - problem.start)

            def step(k: jax.Array, theta: Params) -> Params:
                size = eta * jnp.where(k < 0.6 * steps, 1.0, jnp.where(k < 0.8 * steps, 0.25, 0.0625))
                pulled = size * lam * (centre if span is None else span.w)
                return (1 / (1 + size * lam)) * (theta - size * loss(k).grad(theta) + pulled)

            if span is None:
                return lax.fori_loop(0, steps, step, theta)
            return span.point(lax.fori_loop(0, steps, step, span.start))

        return jax.vmap(fit)(*work)

    def part_at(shared: tuple[Any, ...], places: tuple[jax.Array, jax.Array], x: Any, y: Any) -> Params:
        common, centre, theta, eta = shared
        at, who = places
        return part(common, (centre[at], theta[at], who, eta[at]), x, y)

    common, own = (store.without_rows(), model, key), (store.x, store.y)
    if route is None:
        return over_devices(part, common, (centre, theta, who, eta), own)
    return routed(part_at, (common, centre, theta, eta), jnp.arange(len(who)), who, own, route.at(0))


def own_steps(model: Model, federation: Federation, seed: int, B: int) -> np.ndarray:
    """The size of each client's steps: 1/(2L), where L is the largest curvature of the losses
    of clients, or the client's own if that is larger still, as with an outlying row."""
    L = Simulation(FedAvg(eta=1.0, B=B), model, federation, cohort=1, seed=seed).smoothness()
    own = read(_curvatures(model, Store.of(federation), first_model(model, seed), federation.home, B))
    return (1 / (2 * np.maximum(L, np.nan_to_num(own)))).astype(np.float32)


@partial(jax.jit, static_argnames="B")
def _curvatures(model: Model, store: Store, w: Params, home: jax.Array | None, B: int) -> jax.Array:
    """For each client, the curvature at w with which mini-batches of B rows take SGD steps: with probability
    1/B that of the heaviest row, and otherwise that of all rows (of the first FEW if there are more)."""
    w = w.map(lambda leaf: leaf.astype(store.x.dtype))

    def of_client(shared: Any, i: jax.Array, _: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        store, model, w = shared
        store = store.with_rows(x, y)
        first, count = store.start[i], store.n_train[i]
        at = jnp.arange(store.longest)
        rows = first + jnp.where(at < count, at, 0)
        norms = jnp.sum(jnp.reshape(store.x[rows], (len(rows), -1)) ** 2, axis=1)
        heaviest = first + jnp.argmax(jnp.where(at < count, norms, -1))[None]
        some, used = rows[:FEW], (at < count)[:FEW].astype(w.dtype)
        whole = Loss(model, store.x[some], store.y[some], used / jnp.sum(used))
        L = curvature(whole, w)
        most = curvature(Loss(model, store.x[heaviest], store.y[heaviest]), w)
        return L + jnp.maximum(most - L, 0) / B if B else L

    shared, who = (store.without_rows(), model, w), jnp.arange(len(store.n_train))
    if home is not None:
        return where_rows_are(of_client, shared, who, home, (store.x, store.y))
    return lax.map(lambda i: of_client(shared, i, i, store.x, store.y), who)
