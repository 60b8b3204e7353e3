"""SCAFFOLD: local SGD whose steps are corrected for how clients differ (Karimireddy et al., 2020).

Client i keeps c_i, an estimate of ∇f_i(w), and the server keeps c, the mean of all c_i. Steps along
∇f_i(w_i) − c_i + c then lead where steps on the mean loss would, however many a client takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record


@record
class Scaffold(Algorithm):
    """R steps of w_i ← w_i − η (∇f̃_i(w_i) − c_i + c), then c_i ← c_i − c + (w − w_i)/(Rη) and two means.

    In the first round this is FedAvg, because c_i = c = 0.
    """

    name: ClassVar[str] = "scaffold"
    reference: ClassVar[str] = "Karimireddy et al., 2020"
    sends: ClassVar[str] = "w_i − w, and the change of c_i, an estimate of its gradient"

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w, and c = 0."""
        w = first(0)
        return w, 0 * w

    def init(self, sent: Any, first: Callable[[int], Params]) -> Params:
        """c_i = 0."""
        return 0 * sent[0]

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, c_i: Params) -> Update:
        """R corrected steps to w_i; w_i − w and the change of c_i are sent."""
        w, c = sent
        correction = c - c_i
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B, extra=lambda _: correction)
        upload = w_i - w, 1 / (self.R * self.eta) * (w - w_i) - c
        _, change = self.received(key, upload)  # so that c stays the mean of the c_i with any codec
        return Update(upload, c_i + change, Models(local=w_i), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """w ← w + β Σ p_i Δ_i, and c ← c + |S|/N times the mean change of the c_i."""
        (w, c), (delta, change) = server, uploads
        return w + self.beta * self.combined(delta, cohort), c + self.change_of_mean(change, cohort)

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]
