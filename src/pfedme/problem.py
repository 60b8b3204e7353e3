"""What one client knows: its rows, and the loss of a model on them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pfedme.models import Model, cross_entropy
from pfedme.tree import Params


@partial(jax.tree_util.register_dataclass, data_fields=["model", "x", "y", "weight"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Loss:
    """f̃_i(θ; D), the model's mean loss over a batch D of rows: an estimate of f_i(θ)."""

    model: Model
    x: jax.Array
    y: jax.Array
    weight: jax.Array | None = None
    """Weights of the rows, summing to one; None weighs them alike."""

    def __call__(self, theta: Params) -> jax.Array:
        """The loss at θ."""
        losses = cross_entropy(self.model.apply(theta, self.x), self.y)
        mean = jnp.mean(losses) if self.weight is None else jnp.sum(self.weight * losses)
        return mean + self.model.regulariser(theta)

    def grad(self, theta: Params) -> Params:
        """∇f̃_i(θ; D)."""
        return jax.grad(self.__call__)(theta)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "x", "y", "start", "count"],
    meta_fields=["longest"],
)
@dataclasses.dataclass(frozen=True)
class Problem:
    """One client's learning problem: a model, and the client's training rows within a store of rows."""

    model: Model
    x: jax.Array
    y: jax.Array
    start: jax.Array
    """Where the client's training rows begin in x and y."""
    count: jax.Array
    """How many they are."""
    longest: int
    """The most training rows of any client in the store: the size of a full batch before masking."""

    def sample(self, key: jax.Array, B: int) -> Loss:
        """The loss on B training rows drawn with replacement, or on all of them if B is 0."""
        if B == 0:
            at = jnp.arange(self.longest)
            own = at < self.count
            weight = jnp.where(own, 1, 0).astype(jnp.float32) / self.count
            row = self.start + jnp.where(own, at, 0)
            return Loss(self.model, self.x[row], self.y[row], weight.astype(self.x.dtype))
        row = self.start + jax.random.randint(key, (B,), 0, self.count, jnp.int32)
        return Loss(self.model, self.x[row], self.y[row])
