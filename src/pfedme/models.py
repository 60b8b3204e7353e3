"""Models: from parameters and rows to scores, and from scores to a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.spec import Count, Index, NonNegative, parse
from pfedme.tree import Params, record


@record
class Model:
    """A predictor with loss f(θ; D) = mean over D of ℓ(apply(θ, x), y) + l2/2 ‖θ‖².

    A classifier's scores are logits z, and ℓ(z, y) = −log softmax(z)[y]; a regression has one score z for each
    row, and ℓ(z, y) = ½ (z − y)². This class turns any pair of functions into a model; `init` and `apply` work on a pytree of arrays.

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
    """How many labels there are; 0 for a regression. A classifier made of functions need not tell."""
    l2: NonNegative = 0.0
    """Strength of the l2 term, over weights and biases."""

    def init(self, key: jax.Array) -> Params:
        """Random initial parameters."""
        assert self.init_fn is not None
        return Params(self.init_fn(key))

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        assert self.apply_fn is not None
        return self.apply_fn(theta.tree, x)

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x, the form in which this package computes with them."""
        return self.apply(theta, x).T

    def losses(self, scores: jax.Array, y: jax.Array) -> jax.Array:
        """ℓ(z, y), column by column."""
        return (scores[0] - y) ** 2 / 2 if self.classes == 0 else cross_entropy(scores, y)

    def regulariser(self, theta: Params) -> jax.Array:
        """l2/2 ‖θ‖²."""
        return self.l2 / 2 * (theta @ theta)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """−log softmax(logits)[y], column by column."""
    top = lax.stop_gradient(jnp.max(logits, axis=0))
    return top + jnp.log(jnp.sum(jnp.exp(logits - top), axis=0)) - of_label(logits, y)


def of_label(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The logit of the label in each column."""
    # A masked sum, because gathers, and the scatters of their gradients, are slow on CPUs.
    return jnp.sum(jnp.where(jnp.arange(len(logits))[:, None] == y, logits, 0), axis=0)


def is_first_largest(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Whether argmax would choose the label, column by column: the first of the largest logits.

    >>> is_first_largest(jnp.zeros((3, 3)), jnp.arange(3))
    Array([ True, False, False], dtype=bool)
    """
    own, before = of_label(logits, y), jnp.arange(len(logits))[:, None] < y
    return ~jnp.any(jnp.where(before, logits >= own, logits > own), axis=0) & ~jnp.isnan(own)


Layer = tuple[jax.Array, jax.Array]
"""Weights W, of shape fan_out × fan_in, and biases b."""


@record
class Network(Model):
    """Linear layers with ReLU between them; with no hidden layer it is softmax or ridge regression.

    Weights and biases start uniform in ±1/√fan_in.

    >>> dnn = Network(features=784, classes=10, hidden=(100,))
    >>> dnn.init(jax.random.key(0)).ravel().size
    79510
    """

    features: Count
    classes: Index = 0
    hidden: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Scores of a row: one for each class, or the number that a regression predicts."""
        return self.classes or 1

    def init(self, key: jax.Array) -> Params:
        """Layers (W, b) with W of shape fan_out × fan_in, uniform in ±1/√fan_in."""
        sizes = (self.features, *self.hidden, self.outputs)
        layers = []
        for fan_in, fan_out, k in zip(sizes, sizes[1:], jax.random.split(key, len(sizes) - 1), strict=False):
            k_w, k_b = jax.random.split(k)
            bound = fan_in**-0.5
            W = jax.random.uniform(k_w, (fan_out, fan_in), jnp.float32, -bound, bound)
            b = jax.random.uniform(k_b, (fan_out,), jnp.float32, -bound, bound)
            layers.append((W, b))
        return Params(layers)

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        return self.scores(theta, x).T

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x."""
        (W, b), *rest = theta.tree
        return self.head(rest, W @ x.T + b[:, None])

    def head(self, rest: Sequence[Layer], z: jax.Array) -> jax.Array:
        """The scores from the first layer's outputs z and the layers after it, a column a row of x."""
        for W, b in rest:
            z = W @ jax.nn.relu(z) + b[:, None]
        return z

    def head_grad(
        self,
        rest: Sequence[tuple[jax.Array, jax.Array]],
        z: jax.Array,
        loss: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """The gradient of loss(head(rest, z)) in z and in the layers of `rest`.

        What jax.grad would give, but for how Wᵀ G is computed: XLA's product with a small transposed matrix
        is slower on CPUs than the sum written out.
        """
        zs = [z]
        for W, b in rest:
            zs.append(W @ jax.nn.relu(zs[-1]) + b[:, None])
        G = jax.grad(loss)(zs.pop())
        grads = []
        for (W, _), z in zip(reversed(rest), reversed(zs), strict=True):
            grads.append((G @ jax.nn.relu(z).T, jnp.sum(G, axis=1)))
            G = jnp.where(z > 0, jnp.sum(W[:, :, None] * G[:, None, :], axis=0), 0)
        return G, grads[::-1]


@record
class MLR:
    """Softmax regression, l2-regularised as in the paper (the released code's strength); on labels that are
    numbers, ridge regression."""

    l2: NonNegative = 0.001
    """Strength of the l2 term in every client's loss."""

    def build(self, features: int, classes: int) -> Network:
        """The model for rows of so many features and classes."""
        return Network(features=features, classes=classes, l2=self.l2)


@record
class DNN:
    """A network of linear layers with ReLU between them."""

    hidden: tuple[int, ...] | None = None
    """Sizes of the hidden layers, such as 100 or 100-50; the paper's when not given: 100 for images
    (100 features or more), else 20."""
    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss."""

    def build(self, features: int, classes: int) -> Network:
        """The model for rows of so many features and classes."""
        hidden = self.hidden if self.hidden is not None else ((100,) if features >= 100 else (20,))
        return Network(features=features, classes=classes, hidden=hidden, l2=self.l2)


MODELS: dict[str, type[MLR] | type[DNN]] = {"mlr": MLR, "dnn": DNN}


def parse_model(text: str) -> MLR | DNN:
    """The model that `mlr`, `dnn:hidden=100-50,l2=0.001`, ... describes."""
    return parse(text, MODELS, "model")


def curvature(loss: Callable[[Params], jax.Array], theta: Params, steps: int = 30) -> jax.Array:
    """The largest eigenvalue of ∇²f(θ), by power iteration: an estimate of the smoothness L at θ.

    >>> f = lambda p: 0.5 * (p @ Params(jnp.array([1.0, 3.0]) * p.tree))
    >>> round(float(curvature(f, Params(jnp.ones(2)))), 3)
    3.0
    """
    grad = jax.grad(loss)

    def step(v: Params, _: None) -> tuple[Params, jax.Array]:
        Hv = jax.jvp(grad, (theta,), (v,))[1]
        size = jnp.sqrt(Hv @ Hv)
        return Hv * (1 / jnp.maximum(size, 1e-30)), size

    # A random start: a regular one, such as all ones, can lie in the null space of the Hessian.
    flat = theta.ravel()
    first = theta.like(jax.random.normal(jax.random.key(0), flat.shape, flat.dtype))
    return lax.scan(step, first, length=steps)[1][-1]
