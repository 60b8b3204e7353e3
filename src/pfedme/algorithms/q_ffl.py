"""q-FFL: a shared model that favours clients with large losses (q-FedAvg, Li et al., 2020).

It minimises Σ p_i f_i(w)^(q+1)/(q + 1). With q = 0 it is FedAvg; for q → ∞ only the worst client counts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record


@record
class QFFL(Algorithm):
    """w ← w − β Σ p_i f_i^q g_i/Σ p_i (q f_i^(q−1) ‖g_i‖² + f_i^q/η), where g_i = (w − w_i)/η, f_i = f_i(w).

    With Δ_i = w_i − w and m_i ∝ p_i f_i^q, this is w + β Σ m_i Δ_i/(1 + (q/η) Σ m_i ‖Δ_i‖²/f_i).
    """

    name: ClassVar[str] = "q-ffl"
    idea: ClassVar = "fair"
    reference: ClassVar[str] = "Li et al., 2020 (q-FFL)"
    sends: ClassVar[str] = "w_i − w, and f_i(w), its loss on its training rows"
    tuned: ClassVar = {"q": (0.1, 1.0, 5.0)}

    q: NonNegative = 1.0
    """q: how much more clients with large losses count."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps to w_i; w_i − w and f_i(w) are sent."""
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        return Update((w_i - w, problem.loss(ALL_ROWS)(w)), state, Models(local=w_i), {})

    def server_update(self, w: Params, uploads: Any, cohort: Cohort) -> Params:
        """A step whose size is an estimate of the inverse curvature of the objective."""
        delta, loss = uploads
        present = cohort.rows > 0
        f = jnp.where(present, jnp.maximum(loss, 1e-10), 0)
        m = self.weights(cohort) * (f / jnp.max(f)) ** self.q  # f^q itself could overflow
        m = m / jnp.sum(m)
        ratio = jnp.where(present, jax.vmap(lambda d: d @ d)(delta) / f, 0)
        scale = self.beta / (1 + self.q / self.eta * jnp.sum(m * ratio))
        return w + scale.astype(w.dtype) * self.combine(delta, m, cohort.key)
