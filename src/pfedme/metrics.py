"""How well the global, the local and the personal models do on every client's rows."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.devices import over_devices, padded
from pfedme.models import Model, is_first_largest
from pfedme.tree import Params


class Blocks(NamedTuple):
    """Rows cut into blocks of equal length that each belong to one client."""

    client: np.ndarray
    start: np.ndarray
    """Where the block begins in the store."""
    valid: np.ndarray
    """How many of its rows are the client's; the rest is padding."""
    offset: np.ndarray
    """0, 1, ..., length − 1."""

    @classmethod
    def cut(cls, start: np.ndarray, count: np.ndarray) -> Blocks:
        """Blocks of the rows start[i] ... start[i] + count[i] − 1 of each client i.

        >>> b = Blocks.cut(np.array([0, 20]), np.array([20, 5]))
        >>> b.client, b.start, b.valid
        (array([0, 0, 1]), array([ 0, 16, 20]), array([16,  4,  5]))
        """
        length = int(np.clip(2 ** round(np.log2(max(1.0, count.mean()))), 16, 512))
        blocks = -(-count // length)
        client = np.repeat(np.arange(len(count)), blocks)
        number = np.arange(len(client)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        valid = np.minimum(count[client] - number * length, length)
        return cls(client, start[client] + number * length, valid, np.arange(length))

    def padded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Client, start and valid rows of each block, and empty blocks until all devices have as many."""
        client, start, valid = (padded(a) for a in self[:3])
        valid[len(self.client) :] = 0
        return client, start, valid

    def owner(self) -> np.ndarray:
        """The client of each row."""
        return np.repeat(self.client, self.valid)

    def rows(self) -> np.ndarray:
        """The place of each row in the store, in the order of `owner`."""
        before = np.cumsum(self.valid) - self.valid
        return np.repeat(self.start - before, self.valid) + np.arange(self.valid.sum())


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far the labels of a regression are from their mean: what R² measures errors by."""

    own: np.ndarray
    """Σ (y − mean)² over the rows of each client, around the client's own mean."""
    whole: float
    """The same over all rows, around the mean of all."""
    unit: float = 1.0
    """What a label of 1 is worth in the units that the data came in."""

    @classmethod
    def of(cls, y: np.ndarray, blocks: Blocks, clients: int, unit: float = 1.0) -> Spread:
        """The spread of the labels in `blocks`."""
        labels, owner = y[blocks.rows()].astype(np.float64), blocks.owner()
        (whole,) = deviations(labels, np.zeros_like(owner), 1)
        return cls(deviations(labels, owner, clients), float(whole), unit)


def deviations(values: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """Σ (v − mean)² over the values of each client; exactly 0 where they are alike.

    >>> deviations(np.array([0.1, 0.1, 0.1, 1.0, 3.0]), np.array([0, 0, 0, 2, 2]), 3)
    array([0., 0., 2.])
    """
    first = np.zeros(clients)
    first[owner[::-1]] = values[::-1]
    away = values - first[owner]
    mean = np.bincount(owner, away, clients) / np.maximum(np.bincount(owner, minlength=clients), 1)
    return np.bincount(owner, (away - mean[owner]) ** 2, clients)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Sums over each client's rows, for one model of each client."""

    correct: np.ndarray
    """Right predictions; NaN in a regression."""
    loss: np.ndarray
    count: np.ndarray
    spread: Spread | None = None
    """Of the labels, in a regression."""

    @property
    def accuracy(self) -> np.ndarray:
        """Each client's accuracy; NaN for one with no rows."""
        return np.where(self.count > 0, self.correct / np.maximum(self.count, 1), np.nan)

    @property
    def r2(self) -> np.ndarray:
        """Each client's R² = 1 − SSE/SST around the mean of its rows; NaN for one whose labels are alike."""
        assert self.spread is not None
        own = self.spread.own
        return np.where(own > 0, 1 - 2 * self.loss / np.where(own > 0, own, 1), np.nan)

    @property
    def rmse(self) -> np.ndarray:
        """Each client's root mean squared error, in the units of the data; NaN for one with no rows."""
        assert self.spread is not None
        mean = np.where(self.count > 0, 2 * self.loss / np.maximum(self.count, 1), np.nan)
        return self.spread.unit * np.sqrt(mean)

    @property
    def own(self) -> np.ndarray:
        """What each client is judged by: its accuracy, or its R² in a regression."""
        return self.accuracy if self.spread is None else self.r2

    @property
    def overall(self) -> float | None:
        """The same over all rows; None if there are no rows, or if a regression's labels are all alike."""
        if self.spread is None:
            return float(self.correct.sum() / self.count.sum()) if self.count.any() else None
        whole = self.spread.whole
        return float(1 - 2 * self.loss.sum() / whole) if whole > 0 else None

    @property
    def mean_loss(self) -> float:
        """The mean loss over all rows of all clients, without the l2 term."""
        return float(self.loss.sum() / max(1, self.count.sum()))


def score(
    model: Model,
    theta: Params,
    x: jax.Array,
    y: jax.Array,
    blocks: Blocks,
    clients: int,
    spread: Spread | None = None,
) -> Scores:
    """The scores of θ, one point for all clients or a stack of one point for each of `clients`.

    A regression also needs the spread of its labels.
    """
    count = np.bincount(blocks.client, blocks.valid, clients).astype(np.int64)
    if not len(blocks.client):
        return Scores(np.zeros(clients), np.zeros(clients), count, spread)
    client, start, valid = blocks.padded()
    correct, loss = map(np.asarray, _block_sums(model, theta, x, y, client, start, valid, blocks.offset))
    return Scores(
        correct=np.bincount(client, correct, clients),
        loss=np.bincount(client, loss.astype(np.float64), clients),
        count=count,
        spread=spread,
    )


class Outcomes(NamedTuple):
    """What a model makes of single rows."""

    right: np.ndarray
    """Whether the label is the most probable one."""
    likely: np.ndarray
    """The probability that the model gives to the label."""


def outcomes(model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks) -> Outcomes:
    """What θ, as in `score`, makes of each row, in the order of the blocks."""
    if not len(blocks.client):
        return Outcomes(np.zeros(0, bool), np.zeros(0))
    client, start, valid = blocks.padded()
    sums = _block_sums(model, theta, x, y, client, start, valid, blocks.offset, each_row=True)
    right, loss = (np.asarray(a)[: len(blocks.client)] for a in sums)
    # A block that would reach past the store was moved to begin earlier.
    moved = np.maximum(0, blocks.start + right.shape[1] - len(x))
    at = np.arange(right.shape[1]) - moved[:, None]
    own = (at >= 0) & (at < blocks.valid[:, None])
    return Outcomes(right[own], np.exp(-loss[own].astype(np.float64)))


@partial(jax.jit, static_argnames="each_row")
def _block_sums(
    model: Model,
    theta: Params,
    x: jax.Array,
    y: jax.Array,
    client: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    offset: jax.Array,
    each_row: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Correct predictions and summed losses of each block; or of each row of each block."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shared_model = jax.tree.leaves(shapes)[0].ndim == jax.tree.leaves(theta)[0].ndim
    length = min(len(offset), len(x))

    def sums(shared: tuple[Model, Params, jax.Array, jax.Array], blocks: Any) -> tuple[jax.Array, jax.Array]:
        model, theta, x, y = shared

        def one(block: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            client, start, valid = block
            # The last block may reach past the store: then it begins earlier, and the mask stays.
            first = jnp.minimum(start, len(x) - length)
            row = first + offset[:length]
            own = (row >= start) & (row < start + valid)
            labels = lax.dynamic_slice_in_dim(y, first, length)
            rows = lax.dynamic_slice_in_dim(x, first, length)
            scores = model.scores(theta if shared_model else theta[client], rows)
            hit = is_first_largest(scores, labels) & own if model.classes != 0 else jnp.full(length, jnp.nan)
            loss = jnp.where(own, model.losses(scores, labels), 0)
            return (hit, loss) if each_row else (jnp.sum(hit), jnp.sum(loss))

        return lax.map(one, blocks)

    return over_devices(sums, (model, theta, x, y), (client, start, valid))


def over_clients(accuracy: np.ndarray) -> dict[str, float] | None:
    """Mean, spread, worst tenth and worst of the clients' own accuracies (or R²); None if no client has one.

    >>> over_clients(np.array([0.5, np.nan, 1.0]))
    {'mean': 0.75, 'std': 0.25, 'worst_decile': 0.5, 'min': 0.5}
    """
    own = np.sort(accuracy[~np.isnan(accuracy)])
    if not len(own):
        return None
    worst = own[: -(-len(own) // 10)]
    return {
        "mean": float(own.mean()),
        "std": float(own.std()),
        "worst_decile": float(worst.mean()),
        "min": float(own[0]),
    }


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The mean over clients, and 1.96 standard errors of it; those are 0 for a single client.

    >>> mean_interval(np.array([0.0, 2.0, 4.0, 2.0]))
    (2.0, 1.6...)
    """
    return float(values.mean()), float(1.96 * values.std(ddof=min(1, len(values) - 1)) / len(values) ** 0.5)


def summary(test: Scores, train: Scores | None) -> dict[str, Any]:
    """A model's entry in the record; `worst_decile` is the mean over the worst tenth of the clients.

    A regression has no accuracy: `rmse` and `r2` are over all rows, and `clients` is about the clients' own
    R².
    """
    tested = bool(test.count.any())
    entry: dict[str, Any] = {"accuracy": test.overall}
    if test.spread is not None:
        squares = 2 * test.mean_loss
        entry = {"accuracy": None, "rmse": test.spread.unit * squares**0.5 if tested else None}
        entry["r2"] = test.overall
    entry["loss"] = test.mean_loss if tested else None
    entry["train_loss"] = train.mean_loss if train else None
    return entry | {"clients": over_clients(test.own)}
