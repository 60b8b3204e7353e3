"""AFL: the model that is best for the worst mixture of clients (agnostic learning, Mohri et al., 2019).

It solves min_w max_λ Σ λ_i f_i(w) over the probabilities λ, by a step on w and one on λ in each round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.spec import Positive
from pfedme.core.tree import Params, record


@record
class AFL(Algorithm):
    """w ← w + β (N/|S|) Σ λ_i Δ_i and λ ← Π(λ + γ (N/|S|) f_i(w)), where Π projects onto the probabilities.

    The shared model is the mean of w over the rounds. With R = 1 it is the paper's.
    """

    name: ClassVar[str] = "afl"
    idea: ClassVar = "fair"
    reference: ClassVar[str] = "Mohri et al., 2019"
    sends: ClassVar[str] = "w_i − w, and f_i(w), its loss on its training rows"
    tuned: ClassVar = {"gamma": (0.001, 0.01, 0.1)}

    gamma: Positive = 0.01
    """γ: step size of the clients' weights λ."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """t = 0, w, λ = 1/N and the mean of w."""
        w = first(0)
        return jnp.int32(0), w, jnp.full(total, 1 / total, w.dtype), w

    def send(self, server: Any, i: jax.Array) -> Params:
        """w."""
        return server[1]

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps to w_i; w_i − w and f_i(w) are sent."""
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        return Update((w_i - w, problem.loss(ALL_ROWS)(w)), state, Models(local=w_i), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """A step on w, a step on λ, and the mean of w."""
        (t, w, weights, mean), (delta, loss) = server, uploads
        present = cohort.rows > 0
        scale = cohort.total / jnp.sum(present)
        own = jnp.where(present, weights[cohort.clients], 0)
        sum_ = jnp.sum(own)
        step = self.combine(delta, own / jnp.maximum(sum_, 1e-30), cohort.key)
        w = w + (self.beta * scale * sum_).astype(w.dtype) * step
        ascent = (self.gamma * scale * jnp.where(present, loss, 0)).astype(weights.dtype)
        weights = onto_simplex(weights.at[cohort.clients].add(ascent))
        share = (1 / (t + 1.0)).astype(w.dtype)
        return t + 1, w, weights, mean + share * (w - mean)

    def shared(self, server: Any, clients: Any) -> Params:
        """The mean of w over the rounds."""
        return server[3]


def onto_simplex(v: jax.Array) -> jax.Array:
    """The probabilities nearest to v.

    >>> onto_simplex(jnp.array([0.9, 0.5, -2.0]))
    Array([0.7, 0.3, 0. ], dtype=float32)
    """
    down = jnp.sort(v)[::-1]
    excess = (jnp.cumsum(down) - 1) / jnp.arange(1, len(v) + 1)
    last = jnp.sum(down > excess) - 1
    return jnp.maximum(v - excess[last], 0).astype(v.dtype)
