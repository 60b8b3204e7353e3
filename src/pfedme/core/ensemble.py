"""An ensemble: several models of one kind as a single model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pfedme.core.model import Model
from pfedme.core.spec import Count
from pfedme.core.tree import Params, record


@record
class Ensemble(Model):
    """The mean of its members' probabilities, p(y | x) = 1/N Σ_k softmax(z_k(x))[y]; of their predictions, if
    the label is a quantity.

    Its parameters are those of the members, stacked: the local models of one-shot federated learning (Guha et
    al., 2019), or all personal models of a run. Its scores are log p.

    >>> from pfedme.core.models import Network
    >>> one = Network(features=1, classes=2)
    >>> model = Ensemble(one=one, members=2, classes=2)
    >>> theta = Params([(jnp.zeros((2, 2, 1)), jnp.log(jnp.array([[9.0, 1.0], [3.0, 2.0]])))])
    >>> [round(float(p), 2) for p in jnp.exp(model.apply(theta, jnp.ones((1, 1)))[0])]
    [0.75, 0.25]
    """

    one: Model
    """What each member is."""
    members: Count

    def init(self, key: jax.Array) -> Params:
        """The members' initial parameters, drawn independently."""
        return jax.vmap(self.one.init)(jax.random.split(key, self.members))

    def apply(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores of rows x, a row each."""
        return self.scores(theta, x).T

    def scores(self, theta: Params, x: jax.Array) -> jax.Array:
        """The scores with a column for each row of x."""
        each = jax.vmap(self.one.scores, in_axes=(0, None))(theta, x)
        if not self.classes:
            return jnp.mean(each, axis=0)
        likely = jax.nn.log_softmax(each, axis=1)
        return jax.nn.logsumexp(likely, axis=0) - jnp.log(jnp.asarray(self.members, likely.dtype))

    def to_json(self) -> dict[str, Any]:
        """The number of members, and what each of them is."""
        one = self.one.to_json()
        sizes = {"features": one["features"], "classes": self.classes, "members": self.members}
        return {"kind": "ensemble", **sizes, "one": one}
