"""A network with batch normalisation whose running statistics m and v are parameters like the others.

A hidden layer computes ReLU(scale · (z − m)/√(v + ε) + shift) from z = W x + b. In training, the mean and the
variance of z over the batch D replace m and v, and the loss has the additional term

    ½ ‖m − mean_D‖² + ½ ‖v − var_D‖², minus its value,

in which mean_D and var_D are constants. It changes only the gradient in m and v, so that a step of size η is
the usual moving average, m ← (1 − η) m + η mean_D. Algorithms need not know about it: a mean of models is
also one of their statistics, and the prox pulls the statistics of θ towards those of w.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.model import Model, uniform_layers
from pfedme.core.spec import Count, Index
from pfedme.core.tree import Params, record

EPSILON = 1e-5
"""ε: added to variances before they divide."""


class Moments(NamedTuple):
    """Means and variances, one of each for every unit of a layer."""

    mean: jax.Array
    var: jax.Array


class Normalisation(NamedTuple):
    """The normalisation of a hidden layer."""

    scale: jax.Array
    shift: jax.Array
    running: Moments
    """m and v."""

    @classmethod
    def first(cls, units: int) -> Normalisation:
        """The initial one of a layer with this many units."""
        one, zero = jnp.ones(units), jnp.zeros(units)
        return cls(one, zero, Moments(zero, one))

    def __call__(self, z: jax.Array, by: Moments) -> jax.Array:
        """The outputs z, a column for each row of x, normalised by these moments."""
        factor = self.scale * lax.rsqrt(by.var + EPSILON)
        return factor[:, None] * (z - by.mean[:, None]) + self.shift[:, None]


@record
class NormalisedNetwork(Model):
    """Linear layers with batch normalisation and ReLU between them.

    Weights and biases start as those of `Network`, the normalisation with scale and v one, shift and m zero.

    >>> model = NormalisedNetwork(features=784, classes=10, hidden=(100,))
    >>> model.init(jax.random.key(0)).ravel().size
    79910
    """

    features: Count
    classes: Index = 0
    hidden: tuple[int, ...] = ()

    def init(self, key: jax.Array) -> Params:
        """Hidden layers (W, b, normalisation), and the last layer (W, b)."""
        sizes = (self.features, *self.hidden, self.classes or 1)
        *hidden, last = uniform_layers(key, [(b, a) for a, b in itertools.pairwise(sizes)])
        return Params([*((W, b, Normalisation.first(len(b))) for W, b in hidden), last])

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each, each of them on its own."""
        return self.scores(theta, x).T

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x, normalised by m and v; a negative v counts as zero."""

        def running(_: jax.Array, layer: Normalisation) -> Moments:
            return Moments(layer.running.mean, jnp.maximum(layer.running.var, 0))

        return _forward(theta, x, running)[0]

    def in_training(
        self, theta: Params, x: jax.Array, weight: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The scores of a batch, normalised by its own moments, and the l2 term with the pull on m and v."""
        share = jnp.full(len(x), 1 / len(x), x.dtype) if weight is None else weight

        def of_batch(z: jax.Array, _: Normalisation) -> Moments:
            mean = z @ share
            return Moments(mean, jnp.square(z - mean[:, None]) @ share)

        scores, moments = _forward(theta, x, of_batch)
        running = Params([layer.running for *_, layer in theta.tree[:-1]])
        away = running - Params(lax.stop_gradient(moments))
        pull = away @ away / 2
        return scores, self.regulariser(theta) + pull - lax.stop_gradient(pull)

    def regulariser(self, theta: Params) -> jax.Array:
        """l2/2 ‖θ‖², without m and v."""
        *hidden, last = theta.tree
        return super().regulariser(Params([*((W, b, n.scale, n.shift) for W, b, n in hidden), last]))

    def to_json(self) -> dict[str, Any]:
        """Its sizes."""
        sizes = {"features": self.features, "classes": self.classes, "hidden": list(self.hidden)}
        return {"kind": "dnn-bn", **sizes}


def normalisation(theta: Params) -> Params:
    """θ with only its normalisation: scale, shift, m and v of every layer that has them.

    >>> w = Params([(jnp.ones(2), Normalisation.first(2))])
    >>> [len(jax.tree.leaves(part)) for part in (normalisation(w), w.without(normalisation(w)))]
    [4, 1]
    """

    def is_one(node: Any) -> bool:
        return isinstance(node, Normalisation)

    return Params(jax.tree.map(lambda node: node if is_one(node) else None, theta.tree, is_leaf=is_one))


def _forward(
    theta: Params, x: jax.Array, moments: Callable[[jax.Array, Normalisation], Moments]
) -> tuple[jax.Array, list[Moments]]:
    """The scores, and the `moments` that the hidden layers' outputs are normalised by."""
    *hidden, (W, b) = theta.tree
    a, found = x.T, []
    for V, c, layer in hidden:
        z = V @ a + c[:, None]
        found.append(moments(z, layer))
        a = jax.nn.relu(layer(z, found[-1]))
    return W @ a + b[:, None], found
