"""What another package might add: four algorithms, a model, a data source, and a function that makes a model.

`installed/` has the metadata that make it an installed package once that folder is on the path.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pfedme import Algorithm, Cohort, Federation, Model, Models, Network, Params, Update, record, sgd
from pfedme.core.models import Description
from pfedme.core.problem import Problem
from pfedme.core.spec import Count, NonNegative, Seed
from pfedme.data.synthetic import Synthetic


@record
class Momentum(Algorithm):
    """FedAvg with server momentum: v ← μ v + mean of the Δ_i and w ← w + β v."""

    name: ClassVar[str] = "momentum"

    mu: NonNegative = 0.5
    """μ: the weight of the previous step."""

    def begin(self, key: jax.Array, first: Any, total: int) -> Any:
        """w, and v = 0."""
        w = first(0)
        return w, 0 * w

    def send(self, server: Any, i: jax.Array) -> Params:
        """w."""
        return server[0]

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps."""
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        return Update(w_i - w, state, Models(local=w_i), {})

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """A step with momentum."""
        w, v = server
        v = self.mu * v + self.combined(uploads, cohort)
        return w + self.beta * v, v

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]


@record
class Control(Algorithm):
    """SCAFFOLD: steps w_i ← w_i − η (∇f̃_i(w_i) − c_i + c), where c is the mean of all clients' c_i."""

    name: ClassVar[str] = "control"

    def begin(self, key: jax.Array, first: Any, total: int) -> Any:
        """w, and c = 0."""
        w = first(0)
        return w, 0 * w

    def init(self, sent: Any, first: Any) -> Params:
        """c_i = 0."""
        return 0 * sent[0]

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, c_i: Params) -> Update:
        """R steps, and then c_i ← c_i − c + (w − w_i)/(R η)."""
        w, c = sent

        def step(w_i: Params, rows: jax.Array) -> tuple[Params, None]:
            return w_i - self.eta * (problem.loss(rows).grad(w_i) - c_i + c), None

        w_i = jax.lax.scan(step, w, problem.draw(key, self.R, self.B))[0]
        new = c_i - c + (1 / (self.R * self.eta)) * (w - w_i)
        return Update((w_i - w, new - c_i), new, Models(local=w_i), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """w as ever, and c by the share of the clients that have changed theirs."""
        w, c = server
        dw, dc = self.combined(uploads, cohort)
        return w + self.beta * dw, c + (jnp.sum(cohort.rows > 0) / cohort.total) * dc

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]


@record
class Clusters(Algorithm):
    """Two models, of which each client trains, and uses, the one with the lower loss on its training rows."""

    name: ClassVar[str] = "clusters"
    has_global: ClassVar[bool] = False

    def begin(self, key: jax.Array, first: Any, total: int) -> Any:
        """Two first models."""
        return first(0), first(1)

    def _chosen(self, problem: Problem, sent: Any) -> tuple[jax.Array, Params]:
        f = problem.loss(jnp.zeros(0, jnp.int32))
        second = f(sent[1]) < f(sent[0])
        return second.astype(jnp.int32), sent[0].map(lambda a, b: jnp.where(second, b, a), sent[1])

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps on the better one; which it is goes with the difference."""
        which, w = self._chosen(problem, sent)
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        one_hot = (jnp.arange(2) == which).astype(jnp.int32)
        return Update((one_hot, w_i - w), state, Models(personal=w), {"second": which.astype(w_dtype(w))})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """Each model moves by the mean of those that chose it."""
        one_hot, delta = uploads
        share = self.weights(cohort)[:, None] * one_hot

        def moved(k: int) -> Params:
            own = share[:, k] / jnp.maximum(jnp.sum(share[:, k]), 1e-9)
            return server[k] + self.beta * self.combine(delta, own, cohort.key)

        return moved(0), moved(1)

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> tuple[Models, dict]:
        """The better one as it stands."""
        which, w = self._chosen(problem, sent)
        return Models(personal=w), {"second": which.astype(w_dtype(w))}


def w_dtype(w: Params) -> Any:
    """The type of a model's numbers."""
    return jax.tree.leaves(w)[0].dtype


@record
class Head(Algorithm):
    """FedAvg of all layers but the last, which is each client's own and never leaves it."""

    name: ClassVar[str] = "head"
    has_global: ClassVar[bool] = False

    def begin(self, key: jax.Array, first: Any, total: int) -> Params:
        """The first model without its last layer."""
        return first(0).layers[:-1]

    def init(self, sent: Params, first: Any) -> Params:
        """The last layer of the first model."""
        return first(0).layers[-1:]

    def client_update(self, key: jax.Array, problem: Problem, body: Params, head: Params) -> Update:
        """R steps on both; the head stays."""
        w = sgd(key, problem, body | head, eta=self.eta, steps=self.R, B=self.B)
        own = w.layers[:-1]
        return Update(own - body, w.layers[-1:], Models(personal=w), {})

    def answer(self, key: jax.Array, problem: Problem, body: Params, head: Params) -> tuple[Models, dict]:
        """The shared layers with the client's own."""
        return Models(personal=body | head), {}


OUTSIDE: dict[str, type[Algorithm]] = {cls.name: cls for cls in (Momentum, Control, Clusters, Head)}


@record
class Narrow(Description):
    """A network with one small hidden layer."""

    width: Count = 3
    """Of the hidden layer."""
    l2: NonNegative = 0.0
    """Strength of the l2 term in every client's loss."""

    def build(self, features: int, classes: int, shape: tuple[int, ...] = ()) -> Network:
        """The network."""
        return Network(features=features, classes=classes, hidden=(self.width,), l2=self.l2)


@record
class Opposed:
    """Clients in two groups whose labels are opposite."""

    name: ClassVar[str] = "opposed"

    clients: Count = 6
    """N."""
    rows: Count = 32
    """Of each client."""
    seed: Seed = 0
    """Seed of the data."""

    def load(self) -> Federation:
        """The federation."""
        rng = np.random.default_rng(self.seed)
        fed = Synthetic(clients=self.clients, rows=self.rows, features=3, classes=2, seed=self.seed).load()
        x = rng.normal(size=fed.x.shape).astype(np.float32)
        group = np.repeat(np.arange(self.clients) % 2, fed.count)
        y = ((x[:, 0] > 0) ^ (group == 1)).astype(np.int32)
        return Federation(x=x, y=y, n_train=fed.n_train, n_test=fed.n_test, classes=2, ids=fed.ids).checked()


def build(features: int, classes: int) -> Model:
    """A linear model without biases, made of functions."""
    return Model(
        init_fn=lambda key: {"W": 0.1 * jax.random.normal(key, (features, classes or 1))},
        apply_fn=lambda tree, x: x @ tree["W"],
        classes=classes,
    )


def network(features: int, classes: int) -> Model:
    """A model that can be written down."""
    return Network(features=features, classes=classes, hidden=(3,))


def broken(features: int, classes: int) -> Model:
    """Raises an error."""
    raise RuntimeError("nothing works")


def nothing(features: int, classes: int) -> None:
    """Returns no model."""
