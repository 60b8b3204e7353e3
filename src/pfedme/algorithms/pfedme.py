"""pFedMe: personalized federated learning with Moreau envelopes (Dinh et al., 2020, Algorithm 1).

Client i replaces its loss f_i by the loss's Moreau envelope,

    F_i(w) = min_θ f_i(θ) + λ/2 ‖θ − w‖²,

whose minimiser θ_i(w) is the personal model and whose gradient is λ (w − θ_i(w)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
from jax import lax

from pfedme.algorithms.base import Accesses, Algorithm, Models, Update
from pfedme.core.problem import Problem
from pfedme.core.prox import Solver, inner_accuracy, prox
from pfedme.core.spec import Count, Index, NonNegative, Positive
from pfedme.core.tree import Params, record


@record
class PFedMe(Algorithm):
    """Algorithm 1: R local rounds of w_i ← w_i − η λ (w_i − θ̃_i(w_i)), then w is mixed with the mean w_i."""

    name: ClassVar[str] = "pfedme"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Dinh et al., 2020"
    sends: ClassVar[str] = "w_i − w, the change of the shared model"
    personal: ClassVar[str] = "θ_i = argmin f_i(θ) + λ/2 ‖θ − w‖²"
    accesses: ClassVar = Accesses(round=("R",), repeats=True, gradients="K")
    tuned: ClassVar = {"lam": (0.5, 5.0, 15.0)}
    steps: ClassVar[tuple[str, ...]] = ("eta", "alpha")

    lam: Positive = 15.0
    """λ: how strongly θ_i is pulled towards w."""
    alpha: NonNegative = 0.0
    """Step size for computing θ_i; 0 derives it from the curvature L (pfedme is stable below 2/(L + λ))."""
    K: Count = 5
    """Inner steps in each local round, unless nu is given."""
    nu: Positive | None = None
    """ν: solve the inner problem until ‖∇h̃‖² ≤ ν, instead of taking K steps."""
    solver: Solver = "gradient"
    """Inner solver: gradient descent, or Nesterov's accelerated form."""
    theta_start: Literal["carry", "w"] = "carry"
    """Where θ starts in a local round: at the θ of the previous one (w in the first), or at w_i."""
    rechoose: Index = 0
    """Every this many rounds, each client chooses its own λ for θ again, at most lam, on a fifth of its
    training rows; 0 keeps lam for all clients."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """α = 1/(L + λ) for the inner problem, and η = 1/L_F for F_i, which is L_F = λL/(λ + L)-smooth."""
        return {"alpha": 1 / (L + self.lam), "eta": (L + self.lam) / (L * self.lam)}

    def advice(self, L: float) -> str:
        """Which step size to lower: of the inner or of the outer problem."""
        limit, known = 2 / (L + self.lam), f"λ = {self.lam:g}, L ≈ {L:.3g}"
        stable = f"Inner steps are stable for alpha below 2/(L + λ) = {limit:.2g} ({known})"
        if self.alpha >= limit:
            return f"{stable}, but alpha is {self.alpha:g}: lower --alpha or --lam."
        return f"{stable} and alpha is {self.alpha:g}, so the outer step is too large: lower --eta or --beta."

    @property
    def gradients(self) -> int:
        """K gradients in each local round."""
        return self.R * self.K

    def init(self, sent: Params, first: Callable[[int], Params]) -> Any:
        """λ_i, if each client has its own."""
        return jax.numpy.float32(self.lam) if self.rechoose else ()

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """Lines 5 to 9 of Algorithm 1. The personal model is θ̃_i of the last local round."""
        lam = state if self.rechoose else self.lam
        inner = {"lam": lam, "alpha": self.alpha, "K": self.K, "nu": self.nu, "solver": self.solver}

        def local_round(carry: tuple[Params, Params, Params], rows: Any) -> tuple[Any, jax.Array]:
            _, w, theta = carry
            start = theta if self.theta_start == "carry" else w
            theta, steps = prox(problem.loss(rows), w, start, **inner)
            return (w, w - self.eta * self.lam * (w - theta), theta), steps

        batches = problem.draw(key, self.R, self.B)
        (before, w_i, theta), steps = lax.scan(local_round, (w, w, w), batches)
        info = inner_accuracy(problem.loss(batches[-1]), theta, before, lam, steps)
        return Update(upload=w_i - w, state=state, models=Models(local=w_i, personal=theta), info=info)
