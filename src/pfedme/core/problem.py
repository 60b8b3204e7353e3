"""What one client knows: its rows, and the loss of a model on them."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.core.models import Model
from pfedme.core.private import Batch, Private, PrivateLoss, scaled
from pfedme.core.tree import Params
from pfedme.errors import InputError

Order = Literal["random", "cycled"]
"""How mini-batches are drawn: afresh with replacement, or in the order of the store, continuing from round to
round and starting over after the last row."""

ALL_ROWS = np.zeros(0, np.int32)
"""Stands for all rows of a client in `Problem.loss`, as B = 0 does."""

BLOCK = 64
"""Rows that `Problem.mean_loss` reads at a time."""


@partial(
    jax.tree_util.register_dataclass, data_fields=["model", "x", "y", "weight", "source"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Loss:
    """f̃_i(θ; D), the model's mean loss over a batch D of rows: an estimate of f_i(θ).

    If the model has class weights, each row's loss is multiplied by the weight of its class.
    """

    model: Model
    x: jax.Array
    y: jax.Array
    weight: jax.Array | None = None
    """Weights of the rows, summing to one; None for equal weights."""
    source: tuple[jax.Array, jax.Array, jax.Array] | None = None
    """A store of rows and its labels, and the places of x and y in it, for code that need not copy them."""

    def __call__(self, theta: Params) -> jax.Array:
        """The loss at θ."""
        scores, extra = self.model.in_training(theta, self.x, self.weight)
        return self.mean_loss(scores) + extra

    def mean_loss(self, scores: jax.Array) -> jax.Array:
        """The mean loss of the batch's scores, without the l2 term."""
        losses = self.model.weighted(self.model.losses(scores, self.y), self.y)
        return jnp.mean(losses) if self.weight is None else jnp.sum(self.weight * losses)

    def grad(self, theta: Params) -> Params:
        """∇f̃_i(θ; D)."""
        return jax.grad(self.__call__)(theta)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "x", "y", "start", "count", "n_test", "round", "private"],
    meta_fields=["longest", "order"],
)
@dataclasses.dataclass(frozen=True)
class Problem:
    """One client's learning problem: a model, and the client's rows within a store of rows."""

    model: Model
    x: jax.Array
    y: jax.Array
    start: jax.Array
    """Where the client's training rows begin in x and y."""
    count: jax.Array
    """Number of training rows; the client's test rows follow them directly."""
    n_test: jax.Array
    round: jax.Array
    longest: int
    """The largest number of training rows of any client in the store: the size of a full batch before
    masking."""
    order: Order
    private: Private | None = None
    """If given, rows are used in private gradients alone: mini-batches are Poisson samples, and `loss` has
    nothing but a noisy gradient."""

    def draw(self, key: jax.Array, *shape: int) -> Any:
        """Training rows for mini-batches; the last number of `shape` is the size |D| of each.

        A size of 0 stands for all rows of the client. Pass the batches, or one of them, to `loss`.
        """
        if self.private is not None:
            assert shape[-1] == self.private.B
            return self.private.draw(key, self.start, self.count, shape[:-1])
        if self.order == "cycled":
            size = math.prod(shape)
            before = jnp.asarray(self.round, jnp.uint32) * size
            place = (before + jnp.arange(size, dtype=jnp.uint32)) % self.count.astype(jnp.uint32)
            return self.start + place.reshape(shape).astype(jnp.int32)
        bits = jax.random.bits(key, shape, jnp.uint32)
        return self.start + scaled(bits, self.count)

    def draw_test(self, key: jax.Array, *shape: int) -> jax.Array:
        """Test rows, drawn with replacement; training rows if the client has no test rows."""
        self._refuse_if_private()
        bits = jax.random.bits(key, shape, jnp.uint32)
        return self.start + jnp.where(self.n_test > 0, self.count + scaled(bits, self.n_test), 0)

    def loss(self, rows: Any) -> Any:
        """f̃_i(θ; D) on the mini-batch D of these rows; with none of them, f_i(θ) on all rows.

        It is a `Loss`, or a `PrivateLoss` if gradients are private.
        """
        if isinstance(rows, Batch):
            assert self.private is not None
            return PrivateLoss(self.model, self.x, self.y, rows, self.private)
        self._refuse_if_private()
        rows = jnp.asarray(rows)
        if rows.size:
            return Loss(self.model, _at(self.x, rows), _at(self.y, rows), source=(self.x, self.y, rows))
        at = jnp.arange(self.longest)
        own = at < self.count
        rows = self.start + jnp.where(own, at, 0)
        return Loss(
            self.model, self.x[rows], self.y[rows], jnp.where(own, 1, 0).astype(self.x.dtype) / self.count
        )

    def mean_loss(self, theta: Params) -> jax.Array:
        """f_i(θ) on all rows of the client, of the model as it is used and without a gradient.

        Rows are read in blocks that stay in the caches. If this is mapped over several models, they share
        each block.
        """
        self._refuse_if_private()

        def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, total = carry
            at = first + jnp.arange(BLOCK)
            own = at < self.count
            rows = self.start + jnp.where(own, at, 0)
            y = _at(self.y, rows)
            losses = self.model.losses(self.model.scores(theta, _at(self.x, rows)), y)
            return first + BLOCK, total + jnp.sum(jnp.where(own, self.model.weighted(losses, y), 0))

        begin = jnp.int32(0), jnp.zeros((), self.x.dtype)
        total = lax.while_loop(lambda carry: carry[0] < self.count, add, begin)[1]
        return total / self.count + self.model.regulariser(theta)

    def label_counts(self, classes: int) -> jax.Array:
        """How often each label occurs in the client's training rows."""
        self._refuse_if_private()
        at = jnp.arange(self.longest)
        own = at < self.count
        y = self.y[self.start + jnp.where(own, at, 0)]
        return jnp.sum(own[:, None] & (y[:, None] == jnp.arange(classes)), axis=0)

    def sample(self, key: jax.Array, B: int) -> Any:
        """The loss on a fresh mini-batch of B rows."""
        return self.loss(self.draw(key, B))

    def _refuse_if_private(self) -> None:
        """Raises an error if rows may be used in private gradients alone."""
        if self.private is not None:
            raise InputError(
                "This algorithm uses rows in other ways than in gradients on mini-batches that it draws, "
                "which differential privacy of rows (--dp rows) does not cover; choose another algorithm."
            )


def _at(a: jax.Array, rows: jax.Array) -> jax.Array:
    """a[rows], without an extra pass over the result to check for rows out of bounds."""
    return a.at[rows].get(mode="promise_in_bounds")
