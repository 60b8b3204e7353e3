"""Which columns of a table a model uses: by how much its loss rises if a column's values are shuffled.

The loss of a row is −`row_score`, the score by which clients choose. If every row gets column j from another
row of the same client, the mean rise of the loss is the importance of column j for the client's model. For
linear regression with ½ (z − y)², where z = w·x + b, its expectation is

    w_j² Var(x_j) − w_j Cov(z − y, x_j),

and the covariance is zero if w fits these rows by least squares. All features of a column, such as the
categories of a text or the parts of a date, move together. Test rows are never used.

Models that are fitted to a client's rows differ from a shared one even if clients are alike. So a column is
*clearly* more or less important for a client's model only if, besides, the client's rows contradict the
shared model in this column: its residuals ∂ℓ/∂z there are correlated with the column. No model of the
client's own is involved in that, so no fit can pretend it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import ndtr, stdtr

from pfedme.core.models import Model, Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.choices import LEAST_LIKELY
from pfedme.engine.devices import over_devices, padded, read, replicate

MOST_CLIENTS, MOST_ROWS = 100, 200
"""At most this many clients, and training and validation rows of each, are used."""
MOST_WORK = 2**22
"""In a wide table fewer rows are used, so that clients × rows × columns is at most this."""
SHUFFLES = 10
"""From how many other rows, one after another, a row gets a column's values."""
CLEAR = 3.0
"""A difference is clear beyond this many standard errors, corrected for the number of differences."""


@dataclasses.dataclass(frozen=True)
class Importance:
    """How important each column is for each client's model, and for a shared model."""

    columns: tuple[str, ...]
    """The columns of the table."""
    who: np.ndarray
    """The clients whose rows were used, by their index in the federation."""
    rows: np.ndarray
    """How many rows of each were used."""
    own: np.ndarray
    """The importance of each column (column) for each client's model (row); NaN for a client with one row."""
    at_client: np.ndarray | None
    """The same for the shared model, on the same rows; None if there is no shared model."""
    shared: np.ndarray | None
    """The importance of each column for the shared model if values are shuffled over all clients' rows."""
    p: np.ndarray
    """The probability by chance of such a difference between own and shared, and of residuals of the shared
    model that depend so much on the column, whichever is larger; 1 if the client's model is the shared one,
    or if there is none."""
    direction: np.ndarray
    """By how much the score changes if a numeric column rises by a standard deviation, in each client's model
    (row); NaN for other columns and models. The score is the prediction, or the log odds of the positive
    class."""
    shared_direction: np.ndarray
    """The same for the shared model."""

    @cached_property
    def overall(self) -> np.ndarray:
        """The importance for the shared model; if there is none, the mean over the clients' models."""
        return self.shared if self.shared is not None else self.mean

    @cached_property
    def mean(self) -> np.ndarray:
        """The mean importance over the clients' models."""
        known = ~np.isnan(self.own)
        return np.where(known, self.own, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)

    @cached_property
    def clear(self) -> np.ndarray:
        """Whether a column is clearly more or less important for a client's model than for the shared one."""
        return self.p < level(self.own.size)


def level(differences: int) -> float:
    """The probability of CLEAR standard errors by chance, divided by the number of differences.

    >>> round(level(1), 4)
    0.0027
    """
    return float(2 * ndtr(-CLEAR)) / max(1, differences)


def importance(
    model: Model, federation: Federation, shared: Params | None, theta: Params, *, seed: int = 0
) -> Importance | None:
    """The importance of a table's columns for the clients' models, stacked, and for a shared model.

    It depends on nothing but these and the seed. Data that is not a table of columns, such as images, has
    no importance.
    """
    columns = features(federation)
    if not columns:
        return None
    who = some_clients(federation)
    sample = sampled(federation, who, len(columns), seed)
    masks = np.zeros((1 + len(columns), federation.features), bool)  # the first changes nothing
    for mask, own in zip(masks[1:], columns.values(), strict=True):
        mask[own] = True
    mine = rises(model, theta[who], sample, masks)
    own, error = _mean_error(mine, sample.there)
    at_client, everywhere, p = None, None, np.ones_like(own)
    if shared is not None:
        stack = shared.map(lambda leaf: jnp.broadcast_to(leaf, (len(who), *leaf.shape)))
        theirs = rises(model, stack, sample, masks)
        at_client, _ = _mean_error(theirs, sample.there)
        whole = merged(sample, federation.ids[who], seed)
        found = rises(model, shared.map(lambda leaf: leaf[None]), whole, masks)
        (everywhere,), (noise,) = _mean_error(found, whole.there)
        apart = by_chance(own - everywhere, np.hypot(error, noise), sample.there)
        p = np.maximum(apart, contradiction(model, stack, sample, list(columns.values())))
        p = np.where((mine == theirs).all(axis=2).T, 1, p)
    nothing = np.full((len(who), len(columns)), np.nan)
    stacked = nothing if (found := _direction(model, theta[who], federation)) is None else found
    alone = shared.map(lambda leaf: leaf[None]) if shared is not None else None
    single = None if alone is None else _direction(model, alone, federation)
    return Importance(
        tuple(columns), who, sample.there.sum(axis=1), own, at_client, everywhere, p, stacked,
        np.full(len(columns), np.nan) if single is None else single[0],
    )  # fmt: skip


def features(federation: Federation) -> dict[str, list[int]]:
    """The features that each column of the table has become; empty if the data is not a table of columns."""
    schema = federation.schema
    if schema is None or federation.shape:
        return {}
    found: dict[str, list[int]] = {name: [] for name in schema.sources}
    for column in schema.columns:
        at = schema.starts[column.name]
        found[column.source] += range(at, at + column.features)
    return found


def some_clients(federation: Federation) -> np.ndarray:
    """At most MOST_CLIENTS clients, drawn at random by their ids, but the same ones each time."""
    by_id = np.argsort(federation.ids, kind="stable")
    return np.sort(by_id[np.random.default_rng(0).permutation(len(by_id))[:MOST_CLIENTS]])


class Sample(NamedTuple):
    """Rows of clients in random order, padded to the same number, and where shuffled values come from."""

    x: np.ndarray
    """Features: clients × rows × features."""
    y: np.ndarray
    there: np.ndarray
    """Which rows are there: clients × rows."""
    donor: np.ndarray
    """The row whose values each row gets, shuffle by shuffle: shuffles × clients × rows."""


def sampled(federation: Federation, who: np.ndarray, columns: int, seed: int) -> Sample:
    """Some of the training and validation rows of clients, which depend only on the client's id."""
    f = federation
    most = max(2, min(MOST_ROWS, MOST_WORK // (len(who) * columns)))
    count = f.n_val + f.n_train
    rows = [
        f.start[i] + np.random.default_rng([seed, int(f.ids[i])]).permutation(count[i])[:most] for i in who
    ]
    there = np.arange(max(map(len, rows)))[None] < np.array([len(own) for own in rows])[:, None]
    at = np.zeros(there.shape, np.int64)
    at[there] = np.concatenate(rows)
    return Sample(f.x.reshape(len(f.x), -1)[at], f.y[at], there, donors(there.sum(axis=1), there.shape[1]))


def donors(count: np.ndarray, longest: int) -> np.ndarray:
    """For each shuffle, the row that each of `count` rows gets values from: never itself, and a different one
    each time if there are enough rows.

    >>> donors(np.array([3]), 3)[:3, 0]
    array([[1, 2, 0],
           [2, 0, 1],
           [1, 2, 0]])
    """
    n = count[:, None]
    by = 1 + np.arange(SHUFFLES)[:, None, None] % np.maximum(n - 1, 1)
    return (np.arange(longest) + by) % np.maximum(n, 1)


def merged(sample: Sample, ids: np.ndarray, seed: int) -> Sample:
    """The rows of all clients as those of one, in random order."""
    order = np.argsort(ids, kind="stable")
    x, y = (a[order][sample.there[order]] for a in (sample.x, sample.y))
    mixed = np.random.default_rng(seed).permutation(len(y))
    there = np.ones((1, len(y)), bool)
    return Sample(x[mixed][None], y[mixed][None], there, donors(np.array([len(y)]), len(y)))


def rises(model: Model, theta: Params, sample: Sample, masks: np.ndarray) -> np.ndarray:
    """The mean rise of each row's loss, over shuffles, if the features of each mask but the first are
    shuffled: masks − 1 × clients × rows. A model that does not use a feature has a rise of exactly 0."""
    rows = (sample.x, sample.y, sample.donor.astype(np.int32))
    work = masks[padded(np.arange(len(masks)))]
    loss = read(_losses(model, theta, replicate(rows), work))[: len(masks)]
    return loss[1:].astype(np.float64) - loss[0]


@jax.jit
def _losses(model: Model, theta: Params, rows: tuple[jax.Array, ...], masks: jax.Array) -> jax.Array:
    """The mean over shuffles of each row's loss, with the features of each mask from other rows."""

    def part(shared: tuple[Model, Params, tuple[jax.Array, ...]], masks: jax.Array) -> jax.Array:
        model, theta, (x, y, donor) = shared

        def of_client(theta: Params, x: jax.Array, y: jax.Array) -> jax.Array:
            loss = model.losses(model.scores(theta, x), y)
            return jnp.minimum(jnp.where(jnp.isnan(loss), jnp.inf, loss), -math.log(LEAST_LIKELY))

        def one(mask: jax.Array) -> jax.Array:
            def add(total: jax.Array, own: jax.Array) -> tuple[jax.Array, None]:
                other = jnp.where(mask, jnp.take_along_axis(x, own[..., None], axis=1), x)
                return total + jax.vmap(of_client)(theta, other, y), None

            return lax.scan(add, jnp.zeros(y.shape, jnp.float32), donor)[0] / len(donor)

        return lax.map(one, masks)

    return over_devices(part, (model, theta, rows), masks)


def contradiction(
    model: Model, shared: Params, sample: Sample, columns: Sequence[Sequence[int]]
) -> np.ndarray:
    """The probability by chance of such correlations between the residuals ∂ℓ/∂z of models, stacked, and the
    features of a column: clients × columns. Both are centred at each client, so that a level does not count.
    """
    there = sample.there[:, None]
    residual = read(_residuals(model, shared, replicate((sample.x, sample.y)))).astype(np.float64)
    if residual.shape[1] == 2:
        residual = residual[:, :1]  # that of the second class is its opposite
    n = np.maximum(sample.there.sum(axis=1), 1)[:, None, None]

    def centred(values: np.ndarray) -> np.ndarray:
        values = np.where(there, values, 0)
        return np.where(there, values - values.sum(axis=2, keepdims=True) / n, 0)

    residual, found = centred(residual), []
    for own in columns:
        feature = centred(sample.x[..., own].swapaxes(1, 2).astype(np.float64))
        each = [
            by_chance(*_mean_error((residual[:, c] * feature[:, k])[None], sample.there), sample.there)[:, 0]
            for c in range(residual.shape[1])
            for k in range(len(own))
        ]
        found.append(np.minimum(len(each) * np.min(each, axis=0), 1))
    return np.stack(found, axis=1)


@jax.jit
def _residuals(model: Model, theta: Params, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    """∂ℓ/∂z: clients × outputs × rows."""

    def of_client(theta: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.grad(lambda z: jnp.sum(model.losses(z, y)))(model.scores(theta, x))

    return jax.vmap(of_client)(theta, *rows)


def by_chance(mean: np.ndarray, error: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The probability (Student's) of means so far from 0, with these standard errors: clients × columns."""
    n = there.sum(axis=1)[:, None]
    # A tiny error is rounding, or that of rows that are all equal, which prove little.
    t = np.where((n > 1) & (error > 1e-9), mean / np.maximum(error, 1e-9), 0)
    return 2 * stdtr(np.maximum(n - 1, 1), -np.abs(t))


def _mean_error(values: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over each client's rows, and their standard errors: clients × columns. The mean of a single row
    is NaN."""
    n = there.sum(axis=1)
    mean = np.where(there, values, 0).sum(axis=2) / np.maximum(n, 1)
    square = np.where(there, (values - mean[..., None]) ** 2, 0).sum(axis=2)
    return np.where(n > 1, mean, np.nan).T, np.sqrt(square / np.maximum(n * (n - 1), 1)).T


def _direction(model: Model, theta: Params, federation: Federation) -> np.ndarray | None:
    """The weight of each column that is one number, in linear models of a quantity or two classes, stacked:
    models × columns; None for other models."""
    if not isinstance(model, Network) or model.hidden or model.classes > 2:
        return None
    W = read(theta.tree[0][0])
    weight = W[:, 0] if W.shape[1] == 1 else W[:, federation.positive] - W[:, 1 - federation.positive]
    columns = features(federation).values()
    return np.stack(
        [weight[:, own[0]] if len(own) == 1 else np.full(len(W), np.nan) for own in columns], axis=1
    )
