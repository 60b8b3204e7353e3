"""MR-MTL: own models, pulled towards their mean (mean-regularised multi-task learning, Liu et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax

from pfedme.algorithms.base import Accesses, Algorithm, Cohort, Models, Update, sgd
from pfedme.core.problem import Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record


@record
class MRMTL(Algorithm):
    """R steps of v_i ← v_i − η (∇f̃_i(v_i) + λ (v_i − w)) from the client's own v_i; w is the mean of all v_i.

    It minimises Σ f_i(v_i) + λ/2 ‖v_i − w‖², which is pFedMe's objective. With λ = 0, v_i is trained alone.
    """

    name: ClassVar[str] = "mr-mtl"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Liu et al., 2022"
    sends: ClassVar[str] = "the change of its personal model v_i"
    personal: ClassVar[str] = "v_i, which the client keeps and trains in its rounds, pulled towards the mean"
    accesses: ClassVar = Accesses(round=("R",))
    tuned: ClassVar = {"lam": (0.05, 0.5, 2.0)}

    lam: NonNegative = 0.5
    """λ: how strongly v_i is pulled towards w."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """η = 1/(L + λ)."""
        return {"eta": 1 / (L + self.lam)}

    def init(self, w: Params, first: Callable[[int], Params]) -> Params:
        """v_i, which starts at the initial w: the server's mean counts on it."""
        return first(0)

    def client_update(self, key: jax.Array, problem: Problem, w: Params, v: Params) -> Update:
        """R steps on v_i; its change is sent."""

        def pull(v: Params) -> Params:
            return self.lam * (v - w)

        after = sgd(key, problem, v, eta=self.eta, steps=self.R, B=self.B, extra=pull)
        kept = v + self.received(key, after - v)  # so that w stays the mean of the v_i with any codec
        return Update(upload=after - v, state=kept, models=Models(personal=kept), info={})

    def server_update(self, w: Params, uploads: Params, cohort: Cohort) -> Params:
        """The mean of all v_i, those of absent clients as they were (for β = 1)."""
        return w + self.beta * self.change_of_mean(uploads, cohort)

    def answer(self, key: jax.Array, problem: Problem, w: Params, v: Params) -> tuple[Models, dict]:
        """v_i as the client keeps it."""
        return Models(personal=v), {}
