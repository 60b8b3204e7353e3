"""Per-FedAvg: a shared model that one gradient step personalizes (Fallah et al., 2020).

Client i replaces its loss f_i by the loss after one step, F_i(w) = f_i(w − α ∇f_i(w)), with gradient

    ∇F_i(w) = (I − α ∇²f_i(w)) ∇f_i(w − α ∇f_i(w)).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
from jax import lax

from pfedme.algorithms.base import Algorithm, Models, Update
from pfedme.core.problem import Loss, Problem
from pfedme.core.spec import NonNegative, Positive
from pfedme.core.tree import Params, record


@record
class PerFedAvg(Algorithm):
    """R steps of w_i ← w_i − η ∇F_i(w_i), its three derivatives on independent mini-batches; then a mean."""

    name: ClassVar[str] = "per-fedavg"
    reference: ClassVar[str] = "Fallah et al., 2020"
    sends: ClassVar[str] = "w_i − w, the change of the shared model"
    personal: ClassVar[str] = "w after one step on the client's rows"
    newcomer: ClassVar[str] = "the shared model, for one step"

    steps: ClassVar[tuple[str, ...]] = ("eta", "alpha")

    eta: NonNegative = 0.0
    """η: step size of a client's model (β̂ in the paper's table); 0 for 1/(L (1 + αL)²)."""
    alpha: NonNegative = 0.0
    """α: size of the personal step (α̂ in the paper's table); 0 for 1/(2L)."""
    hessian: Literal["exact", "first-order", "difference"] = "exact"
    """∇²f_i(w) v: exact, left out, or approximated by a central difference of gradients."""
    delta: Positive = 0.001
    """Half the width of that difference."""
    adapt_on: Literal["train", "test"] = "train"
    """Rows for the personal model: one step on training rows, or, as in the released code, two steps of sizes
    α and η on TEST rows. The latter is a leak, for audits only."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """α = 1/(2L), and η = 1/(L (1 + αL)²): the norm of I − α ∇²f_i and the Lipschitz constant of
        w − α ∇f_i(w) are both at most 1 + αL."""
        alpha = self.alpha or 1 / (2 * L)
        return {"alpha": alpha, "eta": 1 / (L * (1 + alpha * L) ** 2)}

    @property
    def gradients(self) -> int:
        """Two gradients per step, and two more for the Hessian-vector product unless it is left out."""
        return self.R * {"exact": 4, "difference": 4, "first-order": 2}[self.hessian]

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R meta-steps; the personal model is one step from the w received, on training rows."""

        def step(w: Params, rows: jax.Array) -> tuple[Params, None]:
            return w - self.eta * self.meta_gradient(w, *map(problem.loss, rows)), None

        batches = problem.draw(key, self.R + 1, 3, self.B)
        local, _ = lax.scan(step, w, batches[:-1])
        theta = self.adapt(w, problem.loss(batches[-1, 0]))
        if self.adapt_on == "test":
            first, second = map(problem.loss, problem.draw_test(key, 2, self.B))
            theta = self.adapt(w, first)
            theta = theta - self.eta * second.grad(theta)
        return Update(upload=local - w, state=state, models=Models(local=local, personal=theta), info={})

    def adapt(self, w: Params, f: Loss) -> Params:
        """w − α ∇f(w)."""
        return w - self.alpha * f.grad(w)

    def meta_gradient(self, w: Params, inner: Loss, outer: Loss, curved: Loss) -> Params:
        """(I − α ∇²f(w; D'')) ∇f(w − α ∇f(w; D); D'), with D, D', D'' the three losses' batches."""
        v = outer.grad(self.adapt(w, inner))
        if self.hessian == "first-order":
            return v
        if self.hessian == "exact":
            Hv = jax.jvp(curved.grad, (w,), (v,))[1]
        else:
            ahead, behind = curved.grad(w + self.delta * v), curved.grad(w - self.delta * v)
            Hv = (1 / (2 * self.delta)) * (ahead - behind)
        return v - self.alpha * Hv
