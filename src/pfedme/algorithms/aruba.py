"""ARUBA: FedAvg with fine-tuning and a learned step size for each coordinate (Khodak et al., 2019).

The step size is √(b/g), where b collects squared changes of the clients' models, and g squared gradients:

    b ← b + ε²/(t + 1)^p + ½ mean Δ²,   g ← g + ζ²/(t + 1)^p + mean of the sums of squared gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update
from pfedme.core.problem import Problem
from pfedme.core.spec import Count, NonNegative, Positive
from pfedme.core.tree import Params, record


@record
class Aruba(Algorithm):
    """R steps of w_i ← w_i − √(b/g) ∇f̃_i(w_i), coordinate by coordinate; then means for w, b and g."""

    name: ClassVar[str] = "aruba"
    reference: ClassVar[str] = "Khodak et al., 2019"
    sends: ClassVar[str] = "w_i − w, and the sum of its squared gradients"
    personal: ClassVar[str] = "w after F steps with the learned step sizes"
    newcomer: ClassVar[str] = "w and the step sizes, for fine-tuning"
    tuned: ClassVar = {"zeta": (0.1, 1.0, 10.0)}

    eta: NonNegative = 0.0
    """η: the first step size, ε/ζ; 0 derives it from the curvature L of the clients' losses."""
    zeta: Positive = 1.0
    """ζ: how slowly step sizes are learned; ε is η ζ."""
    p: NonNegative = 1.0
    """p: how fast the weight of the first step size decreases."""
    F: Count = 100
    """Fine-tuning steps, on batches of B rows."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """t = 1, w, b = ε² and g = ζ²."""
        w = first(0)
        b, g = (w.map(lambda a, c=c: jnp.full_like(a, c) ** 2) for c in (self.eta * self.zeta, self.zeta))
        return jnp.int32(1), w, b, g

    def send(self, server: Any, i: jax.Array) -> tuple[Params, Params]:
        """w, and the step size of each coordinate."""
        _, w, b, g = server
        return w, b.map(lambda b, g: jnp.sqrt(b / g), g)

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps; w_i − w, and the sum of the squared gradients, are sent."""
        w_i, squares = _descend(key, problem, sent, self.R, self.B)
        return Update((w_i - sent[0], squares), state, Models(local=w_i), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """w as in FedAvg, and the sums behind the step sizes."""
        (t, w, b, g), (delta, squares) = server, uploads
        prior = 1 / (t + 1.0) ** self.p
        spread = self.combined(delta.map(jnp.square), cohort)
        b = b.map(lambda b, d: b + ((self.eta * self.zeta) ** 2 * prior).astype(b.dtype) + d / 2, spread)
        g = g.map(lambda g, s: g + (self.zeta**2 * prior).astype(g.dtype) + s, self.combined(squares, cohort))
        return t + 1, w + self.beta * self.combined(delta, cohort), b, g

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[1]

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> tuple[Models, dict]:
        """The local model, and w after F steps."""
        update = self.client_update(key, problem, sent, state)
        tune = jax.random.split(key)[0]  # key itself was used for the local model
        theta, _ = _descend(tune, problem, sent, self.F, self.B)
        return update.models._replace(personal=theta), {}


def _descend(key: jax.Array, problem: Problem, sent: Any, steps: int, B: int) -> tuple[Params, Params]:
    """w after some steps, and the sum of the squared gradients."""
    w, eta = sent

    def step(carry: tuple[Params, Params], rows: jax.Array) -> tuple[Any, None]:
        w, squares = carry
        slope = problem.loss(rows).grad(w)
        return (w - slope.map(jnp.multiply, eta), squares + slope.map(jnp.square)), None

    return lax.scan(step, (w, 0 * w), problem.draw(key, steps, B))[0]
