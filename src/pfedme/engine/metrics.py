"""How well the global, local and personal models do on every client's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import stdtrit

from pfedme.core.losses import is_first_largest
from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation, Part
from pfedme.engine.chunks import in_chunks, is_stack
from pfedme.engine.devices import lanes, over_devices, padded, read
from pfedme.engine.rowmetrics import CLASS_KEYS, MOST_SCORES, ClassRows, NumberRows, Value

LOWER_IS_BETTER = ("log_loss", "brier", "rmse", "mae")
"""The metrics that are errors."""


class Blocks(NamedTuple):
    """Rows cut into blocks of equal length that each belong to one client."""

    client: np.ndarray
    start: np.ndarray
    """Where the block starts in the store."""
    valid: np.ndarray
    """Number of its rows that belong to the client; the rest is padding."""
    offset: np.ndarray
    """0, 1, ..., length − 1."""
    home: np.ndarray | None = None
    """If several hosts share the rows: the host of each block."""
    local: np.ndarray | None = None
    """Where the block starts in the store of that host."""
    total: int = 0
    """Number of rows of all hosts."""

    @classmethod
    def of(cls, federation: Federation, part: Part, who: np.ndarray) -> Blocks:
        """Blocks of the rows of these clients."""
        f, (start, count) = federation, federation.rows(part)
        blocks = cls.cut(start[who], count[who])
        if f.home is None:
            return blocks
        owner = who[blocks.client]
        local = blocks.start - f.start[owner] + f.local_start[owner]
        return blocks._replace(home=f.home[owner], local=local, total=len(f.y))

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

    def work(self, stored: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """What the devices work through: client, first row to read, first row and number of rows of each
        block in a store of so many rows, and empty blocks to make equal parts; and the places of the blocks.
        """
        first = self.first_read(stored)
        if self.home is None or self.local is None:
            work = [padded(a) for a in (self.client, first, self.start, self.valid)]
            work[3][len(self.client) :] = 0
            return tuple(work), np.arange(len(self.client))
        place = lanes(self.home)
        first = np.maximum(self.local - (self.start - first), 0)
        work = tuple(np.where(place < 0, 0, a[place]) for a in (self.client, first, self.local, self.valid))
        return work, np.argsort(place, kind="stable")[np.sum(place < 0) :]

    def first_read(self, stored: int) -> np.ndarray:
        """The first row to read for each block: one that would extend past the end starts earlier."""
        stored = self.total or stored
        return np.minimum(self.start, stored - min(len(self.offset), stored))

    def own(self, stored: int) -> np.ndarray:
        """Which of the rows that are read for each block belong to it."""
        moved = self.start - self.first_read(stored)
        if self.local is not None:
            moved = np.minimum(moved, self.local)
        at = np.arange(min(len(self.offset), self.total or stored)) - moved[:, None]
        return (at >= 0) & (at < self.valid[:, None])

    def parts(self, clients: int, size: int) -> Iterator[Blocks]:
        """The blocks of each `size` of so many clients, whose numbers count from 0 again; blocks without rows
        make them equally many.

        >>> b = Blocks.cut(np.array([0, 20, 25]), np.array([20, 5, 3]))
        >>> [part.valid.tolist() for part in b.parts(3, 2)]
        [[16, 4, 5], [3, 0, 0]]
        """
        edges = np.searchsorted(self.client, np.arange(0, clients + size, size))
        most = int(np.diff(edges).max(initial=1))
        for k in range(len(edges) - 1):
            own, more = slice(edges[k], edges[k + 1]), (0, most - (edges[k + 1] - edges[k]))
            client = np.pad(self.client[own] - k * size, more, constant_values=size - 1)
            yield self._replace(
                client=client, start=np.pad(self.start[own], more), valid=np.pad(self.valid[own], more)
            )

    def owner(self) -> np.ndarray:
        """The client of each row."""
        return np.repeat(self.client, self.valid)

    def rows(self) -> np.ndarray:
        """The index of each row in the store, in the order of `owner`."""
        before = np.cumsum(self.valid) - self.valid
        return np.repeat(self.start - before, self.valid) + np.arange(self.valid.sum())


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far the labels of a regression are from their mean: the scale of errors in R²."""

    own: np.ndarray
    """Σ (y − mean)² over the rows of each client, around the client's own mean."""
    whole: float
    """The same over all rows, around the mean of all."""
    unit: float = 1.0
    """The size of a label of 1 in the original units of the data."""

    @classmethod
    def of(cls, y: np.ndarray, blocks: Blocks, clients: int, unit: float = 1.0) -> Spread:
        """The spread of the labels in `blocks`."""
        labels, owner = y[blocks.rows()].astype(np.float64), blocks.owner()
        (whole,) = deviations(labels, np.zeros_like(owner), 1)
        return cls(deviations(labels, owner, clients), float(whole), unit)


def deviations(values: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """Σ (v − mean)² over the values of each client; exactly 0 if they are equal.

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
    """Number of correct predictions; NaN in a regression."""
    loss: np.ndarray
    count: np.ndarray
    spread: Spread | None = None
    """Spread of the labels, in a regression."""
    rows: ClassRows | NumberRows | None = None
    """Every row, for the metrics that need more than sums; None if rows were not kept."""

    @property
    def accuracy(self) -> np.ndarray:
        """Each client's accuracy; NaN for a client without rows."""
        return np.where(self.count > 0, self.correct / np.maximum(self.count, 1), np.nan)

    @property
    def r2(self) -> np.ndarray:
        """Each client's R² = 1 − SSE/SST around the mean of its rows; NaN for a client with equal labels."""
        assert self.spread is not None
        own = self.spread.own
        return np.where(own > 0, 1 - 2 * self.loss / np.where(own > 0, own, 1), np.nan)

    @property
    def rmse(self) -> np.ndarray:
        """Each client's root mean squared error, in the units of the data; NaN for a client without rows."""
        assert self.spread is not None
        mean = np.where(self.count > 0, 2 * self.loss / np.maximum(self.count, 1), np.nan)
        return self.spread.unit * np.sqrt(mean)

    @property
    def own(self) -> np.ndarray:
        """Each client's accuracy, or its R² in a regression."""
        return self.accuracy if self.spread is None else self.r2

    @property
    def overall(self) -> float | None:
        """The same over all rows; None if there are no rows, or if a regression's labels are all equal."""
        if self.spread is None:
            return float(self.correct.sum() / self.count.sum()) if self.count.any() else None
        whole = self.spread.whole
        return float(1 - 2 * self.loss.sum() / whole) if whole > 0 else None

    @property
    def mean_loss(self) -> float:
        """The mean loss over all rows of all clients, without the l2 term."""
        return float(self.loss.sum() / max(1, self.count.sum()))

    def over_all_rows(self, key: str) -> float | None:
        """The metric of this name over all rows; None if it is undefined, or if rows were not kept."""
        if key in ("accuracy", "r2"):
            return self.overall
        return None if self.rows is None else self.rows.value(key).overall

    def of(self, key: str) -> np.ndarray:
        """Each client's metric of this name; NaN where it is undefined, and everywhere if rows were not
        kept."""
        if key in ("accuracy", "r2", "rmse"):
            return getattr(self, key)
        if key == "log_loss" and self.spread is None:
            return np.where(self.count > 0, self.loss / np.maximum(self.count, 1), np.nan)
        return np.full(len(self.count), np.nan) if self.rows is None else self.rows.value(key).own


def score(
    model: Model,
    theta: Params,
    x: jax.Array,
    y: jax.Array,
    blocks: Blocks,
    clients: int,
    spread: Spread | None = None,
    positive: int | None = None,
    labels: np.ndarray | None = None,
) -> Scores:
    """The scores of θ, one point for all clients or a stack with one point for each of `clients`.

    A regression also needs the spread of its labels. If a class counts as `positive` (any number in a
    regression), rows are kept too, unless there are very many. `labels` are those of all rows, if y is not.
    """
    count = np.bincount(blocks.client, blocks.valid, clients).astype(np.int64)
    if not len(blocks.client):
        return Scores(np.zeros(clients), np.zeros(clients), count, spread)
    keep = positive is not None and fits(model, int(count.sum()))
    sums = _of_blocks(model, theta, x, y, blocks, each_row=False, scores=keep)
    correct, loss = sums[:2]
    rows = None
    if keep:
        assert positive is not None
        scores = _by_row(sums[2], blocks, len(x))
        labels = (read(y) if labels is None else labels)[blocks.rows()]
        owner = blocks.owner()
        if spread is None:
            rows = ClassRows(scores, labels, owner, clients, positive)
        else:
            labels = spread.unit * labels.astype(np.float64)
            rows = NumberRows(spread.unit * scores[:, 0].astype(np.float64) - labels, labels, owner, clients)
    return Scores(
        correct=np.bincount(blocks.client, correct, clients),
        loss=np.bincount(blocks.client, loss.astype(np.float64), clients),
        count=count,
        spread=spread,
        rows=rows,
    )


def logits(model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks) -> np.ndarray:
    """What θ, as in `score`, returns for each row, in the order of the blocks; there must be blocks."""
    return _by_row(_of_blocks(model, theta, x, y, blocks, each_row=False, scores=True)[2], blocks, len(x))


def _by_row(scores: np.ndarray, blocks: Blocks, stored: int) -> np.ndarray:
    """The scores of blocks, block × score × row, with a row for each row."""
    return scores.swapaxes(1, 2)[blocks.own(stored)]


def fits(model: Model, rows: int) -> bool:
    """Whether the scores of so many rows can be kept."""
    return rows * (model.classes or 1) <= MOST_SCORES


class Outcomes(NamedTuple):
    """A model's results on individual rows."""

    right: np.ndarray
    """Whether the label is the most probable one."""
    likely: np.ndarray
    """The probability that the model gives to the label."""
    finite: bool = True
    """Whether the loss on every row is finite."""
    tempered: np.ndarray | None = None
    """The same probability after the scores are divided by each of several temperatures, a column each."""


def outcomes(
    model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks,
    temperatures: tuple[float, ...] = (),
) -> Outcomes:  # fmt: skip
    """The results of θ, as in `score`, on each row, in the order of the blocks."""
    if not len(blocks.client):
        none = np.zeros((0, len(temperatures)), np.float32) if temperatures else None
        return Outcomes(np.zeros(0, bool), np.zeros(0), tempered=none)
    right, loss, *more = _of_blocks(
        model, theta, x, y, blocks, each_row=True, scores=False, temperatures=temperatures
    )
    own = blocks.own(len(x))
    loss = loss[own].astype(np.float64)
    tempered = np.exp(-more[0].swapaxes(1, 2)[own]) if more else None
    return Outcomes(right[own], np.exp(-loss), bool(np.isfinite(loss).all()), tempered)


def _of_blocks(
    model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks, **wanted: Any
) -> tuple[np.ndarray, ...]:
    """What `_block_sums` returns, for each block."""
    found = []
    for some, own, kept in in_chunks(model, theta, blocks):
        work, place = own.work(len(x))
        sums = _block_sums(model, some, x, y, work, own.offset[: own.total or None], **wanted)
        found.append([read(a)[place][:kept] for a in sums])
    return tuple(found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True)))


@partial(jax.jit, static_argnames=("each_row", "scores", "temperatures"))
def _block_sums(
    model: Model,
    theta: Params,
    x: jax.Array,
    y: jax.Array,
    blocks: tuple[jax.Array, ...],
    offset: jax.Array,
    *,
    each_row: bool,
    scores: bool,
    temperatures: tuple[float, ...] = (),
) -> tuple[jax.Array, ...]:
    """Correct predictions and summed losses of each block, or of each row of each block; with `scores`, also
    the model's outputs for every row, and with `temperatures` every row's losses at each of them."""
    shared_model = not is_stack(model, theta)
    length = min(len(offset), len(x))

    def sums(shared: tuple[Model, Params], blocks: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        model, theta = shared

        def one(block: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            client, first, start, valid = block
            row = first + offset[:length]
            own = (row >= start) & (row < start + valid)
            labels = lax.dynamic_slice_in_dim(y, first, length)
            rows = lax.dynamic_slice_in_dim(x, first, length)
            z = model.scores(theta if shared_model else theta[client], rows)
            hit = is_first_largest(z, labels) & own if model.classes != 0 else jnp.full(length, jnp.nan)
            loss = jnp.where(own, model.losses(z, labels), 0)
            found = (hit, loss) if each_row else (jnp.sum(hit), jnp.sum(loss))
            if temperatures:
                found = (*found, jnp.stack([model.losses(z / T, labels) for T in temperatures]))
            return (*found, z) if scores else found

        return lax.map(one, blocks)

    return over_devices(sums, (model, theta), blocks, (x, y))


def over_clients(values: np.ndarray, *, lower: bool = False) -> dict[str, float] | None:
    """Mean, spread, worst tenth and worst of the clients' accuracies (or another metric); None if no client
    has one. With `lower`, lower is better, and the worst is the `max`.

    >>> over_clients(np.array([0.5, np.nan, 1.0]))
    {'mean': 0.75, 'std': 0.25, 'worst_decile': 0.5, 'min': 0.5}
    """
    own = np.sort(values[~np.isnan(values)])
    if not len(own):
        return None
    own = own[::-1] if lower else own
    worst = own[: -(-len(own) // 10)]
    return {
        "mean": float(own.mean()),
        "std": float(own.std()),
        "worst_decile": float(worst.mean()),
        "max" if lower else "min": float(own[0]),
    }


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The mean, and the half-width of its 95 % interval by Student's t; the latter is 0 for a single value.

    The values are a metric of independent clients, or of runs with different seeds.

    >>> mean_interval(np.array([0.0, 2.0, 4.0, 2.0]))
    (2.0, 2.598...)
    """
    n = len(values)
    if n < 2:
        return float(values.mean()), 0.0
    return float(values.mean()), float(stdtrit(n - 1, 0.975) * values.std(ddof=1) / n**0.5)


def summary(
    test: Scores, train: Scores | None, *, metric: str = "", full: bool = False,
    threshold: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A model's entry in the record; `worst_decile` is the mean over the worst tenth of the clients.

    A regression has no accuracy: `rmse` and `r2` are over all rows, and `clients` is about the clients' R².
    `by_client` has the same for other metrics, if rows were kept: for `metric`, or for all metrics in a
    `full` entry. A full entry also has the half-widths of the metrics' 95 % intervals over all rows, and the
    calibration of probabilities. AUC of several classes takes a while, and is left out unless requested.
    With a `threshold`, for two classes, `at_threshold` has the metrics that depend on it.
    """
    tested = bool(test.count.any())
    entry: dict[str, Any] = {"accuracy": test.overall}
    if test.spread is not None:
        squares = 2 * test.mean_loss
        entry = {"accuracy": None, "rmse": test.spread.unit * squares**0.5 if tested else None}
        entry["r2"] = test.overall
    entry["loss"] = test.mean_loss if tested else None
    entry["train_loss"] = train.mean_loss if train else None
    entry["clients"] = over_clients(test.own)
    classes = test.spread is None
    entry["log_loss"] = entry["loss"] if classes else None
    if test.rows is None:
        return entry
    wanted = CLASS_KEYS if classes else ("mae",)
    if isinstance(test.rows, ClassRows) and test.rows.classes > 2 and not full:
        wanted = tuple(key for key in wanted if key != "auc" or metric == "auc")
    found: dict[str, Value] = {key: test.rows.value(key) for key in wanted}
    entry |= {key: value.overall for key, value in found.items()}
    sums = ("accuracy", "log_loss") if classes else ("r2", "rmse")
    shown = (*sums, *wanted) if full else (metric,) if metric in (*sums, *wanted) else ()
    entry["by_client"] = {
        key: _by_client(test.of(key) if key in sums else found[key].own, key) for key in shown
    }
    if full:
        found |= {key: test.rows.value(key) for key in sums}
        entry["half_width"] = {key: found[key].half_width for key in shown}
        if isinstance(test.rows, ClassRows):
            entry["calibration"] = test.rows.calibration()
    if threshold is not None and isinstance(test.rows, ClassRows):
        rows = dataclasses.replace(test.rows, threshold=threshold)
        keys = ("accuracy", "balanced_accuracy", "recall", "precision", "f1")
        entry["at_threshold"] = {"threshold": threshold, **{key: rows.value(key).overall for key in keys}}
    return entry


def _by_client(own: np.ndarray, key: str) -> dict[str, float] | None:
    """A metric over clients, the half-width of the 95 % interval of its mean, and the number of clients."""
    told = over_clients(own, lower=key in LOWER_IS_BETTER)
    if told is None:
        return None
    there = own[~np.isnan(own)]
    return {**told, "half_width": mean_interval(there)[1], "clients": len(there)}
