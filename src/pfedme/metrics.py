"""How well the global, the local and the personal models do on every client's rows."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.models import Model, cross_entropy
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


@dataclasses.dataclass(frozen=True)
class Scores:
    """Sums over each client's rows, for one model of each client."""

    correct: np.ndarray
    loss: np.ndarray
    count: np.ndarray

    @property
    def accuracy(self) -> np.ndarray:
        """Each client's accuracy; NaN for one with no rows."""
        return np.where(self.count > 0, self.correct / np.maximum(self.count, 1), np.nan)

    @property
    def mean_loss(self) -> float:
        """The mean loss over all rows of all clients, without the l2 term."""
        return float(self.loss.sum() / max(1, self.count.sum()))


def score(model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks, clients: int) -> Scores:
    """The scores of θ, one point for all clients or a stack of one point for each of `clients`."""
    count = np.bincount(blocks.client, blocks.valid, clients).astype(np.int64)
    if not len(blocks.client):
        return Scores(np.zeros(clients), np.zeros(clients), count)
    correct, loss = map(np.asarray, _block_sums(model, theta, x, y, blocks))
    return Scores(
        correct=np.bincount(blocks.client, correct, clients),
        loss=np.bincount(blocks.client, loss.astype(np.float64), clients),
        count=count,
    )


@partial(jax.jit, static_argnames="batch")
def _block_sums(
    model: Model, theta: Params, x: jax.Array, y: jax.Array, blocks: Blocks, batch: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Correct predictions and summed losses of each block."""
    shared = jax.tree.leaves(model_shape(model))[0].ndim == jax.tree.leaves(theta)[0].ndim

    def one(block: Any) -> tuple[jax.Array, jax.Array]:
        client, start, valid = block
        row = jnp.minimum(start + blocks.offset, len(x) - 1)
        own = blocks.offset < valid
        logits = model.apply(theta if shared else theta[client], x[row])
        hit = jnp.argmax(logits, axis=-1) == y[row]
        loss = jnp.where(own, cross_entropy(logits, y[row]), 0)
        return jnp.sum(hit & own), jnp.sum(loss)

    return lax.map(one, (blocks.client, blocks.start, blocks.valid))


def model_shape(model: Model) -> Any:
    """The shapes of a model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0))


def summary(test: Scores, train: Scores) -> dict[str, Any]:
    """A model's entry in the record; `worst_decile` is the mean over the worst tenth of the clients."""
    own = np.sort(test.accuracy[test.count > 0])
    entry: dict[str, Any] = {"accuracy": None, "loss": None, "train_loss": train.mean_loss, "clients": None}
    if len(own):
        entry["accuracy"] = float(test.correct.sum() / test.count.sum())
        entry["loss"] = test.mean_loss
        entry["clients"] = {
            "mean": float(own.mean()),
            "std": float(own.std()),
            "worst_decile": float(own[: -(-len(own) // 10)].mean()),
            "min": float(own[0]),
        }
    return entry
