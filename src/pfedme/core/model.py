"""The interface of a model: from parameters and rows to scores, and from scores to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pfedme.core.losses import cross_entropy, of_label
from pfedme.core.spec import Index, NonNegative
from pfedme.core.tree import Params, record


@record
class Model:
    """A predictor with loss f(θ; D) = mean over D of ℓ(apply(θ, x), y) + l2/2 ‖θ‖².

    A classifier's scores are logits z, and ℓ(z, y) = −log softmax(z)[y]; a regression has one score z for
    each row, and ℓ(z, y) = ½ (z − y)². This class turns any pair of functions into a model; `init` and
    `apply` work on a pytree of arrays.

    >>> linear = Model(
    ...     init_fn=lambda key: {"W": jnp.zeros((2, 3))},
    ...     apply_fn=lambda tree, x: x @ tree["W"],
    ... )
    >>> theta = linear.init(jax.random.key(0))
    >>> linear.apply(theta, jnp.ones((5, 2))).shape
    (5, 3)
    """

    init_fn: Callable[[jax.Array], Any] | None = None
    apply_fn: Callable[[Any, jax.Array], jax.Array] | None = None
    classes: Index | None = None
    """Number of labels; 0 for a regression. Optional for a classifier made of functions."""
    l2: NonNegative = 0.0
    """Strength of the l2 term, over weights and biases."""
    class_weights: tuple[float, ...] | None = None
    """Weight of a row of each class in training; None for equal weights."""

    def init(self, key: jax.Array) -> Params:
        """Random initial parameters."""
        assert self.init_fn is not None
        return Params(self.init_fn(key))

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        assert self.apply_fn is not None
        return self.apply_fn(theta.tree, x)

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x, the form that this package computes with."""
        return self.apply(theta, x).T

    def losses(self, scores: jax.Array, y: jax.Array) -> jax.Array:
        """ℓ(z, y), column by column."""
        return (scores[0] - y) ** 2 / 2 if self.classes == 0 else cross_entropy(scores, y)

    def weighted(self, losses: jax.Array, y: jax.Array) -> jax.Array:
        """The losses of rows times the weights of their classes, as in training."""
        if self.class_weights is None:
            return losses
        return losses * of_label(jnp.stack([*map(jnp.asarray, self.class_weights)])[:, None], y)

    def regulariser(self, theta: Params) -> jax.Array:
        """l2/2 ‖θ‖²."""
        return self.l2 / 2 * (theta @ theta)

    def in_training(
        self, theta: Params, x: jax.Array, weight: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The scores of a batch in training, and what is added to its mean loss: by default the l2 term.

        `weight` is as in `Loss`. A model differs here if it treats batches in training in another way than
        rows in use.
        """
        return self.scores(theta, x), self.regulariser(theta)

    def has_class_biases(self) -> bool:
        """Whether labels are classes and the last layer has a bias for each."""
        last = jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0)).layers[-1:])
        return bool(self.classes) and [a.shape for a in last if a.ndim == 1] == [(self.classes,)]

    def to_json(self) -> dict[str, Any]:
        """What is needed to use this model's parameters, as JSON values; `model_from_json` is its inverse.

        It has `features` and `classes`. l2, which matters only in training, is not part of it.
        """
        raise NotImplementedError("a model made of functions cannot be written as JSON")


Layer = tuple[jax.Array, jax.Array]
"""Weights W, of shape fan_out × fan_in, and biases b."""


def uniform_layers(key: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[Layer]:
    """Weights of these shapes, each fan_out × ..., and biases, uniform in ±1/√fan_in."""
    layers = []
    for shape, k in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        k_w, k_b = jax.random.split(k)
        bound = math.prod(shape[1:]) ** -0.5
        W = jax.random.uniform(k_w, shape, jnp.float32, -bound, bound)
        b = jax.random.uniform(k_b, shape[:1], jnp.float32, -bound, bound)
        layers.append((W, b))
    return layers


def dense(layers: Sequence[Layer], z: jax.Array) -> jax.Array:
    """The outputs of linear layers with ReLU before each, a column for each column of z."""
    for W, b in layers:
        z = W @ jax.nn.relu(z) + b[:, None]
    return z
