"""APFL: a personal model between the shared and an own one (Deng et al., 2020).

The personal model is v̄ = α v + (1 − α) w. Clients train w as in FedAvg, and v by gradients of f_i(v̄).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Aggregation, Algorithm, Models, Update
from pfedme.core.problem import Problem
from pfedme.core.spec import Bound
from pfedme.core.tree import Params, record


@record
class APFL(Algorithm):
    """R steps of w_i ← w_i − η ∇f̃_i(w_i) and v ← v − η α ∇f̃_i(v̄) on the same batches; a mean of the w_i.

    w is FedAvg's for every α. With a fixed α = 1, v is trained alone; with α = 0, it never moves.
    """

    name: ClassVar[str] = "apfl"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Deng et al., 2020"
    sends: ClassVar[str] = "w_i − w, the change of the shared model"
    personal: ClassVar[str] = "α v + (1 − α) w, with the client's own v and the newest w"
    tuned: ClassVar = {"alpha": (0.25, 0.5, 0.75)}

    aggregation: Aggregation = "samples"
    """Weights of the uploads: proportional to the training rows, as in FedAvg, or equal."""
    alpha: Annotated[float, Bound(least=0, most=1)] = 0.5
    """α: the weight of the client's own v in its personal model, or the first such weight if adaptive."""
    adaptive: bool = True
    """Whether each client learns its own α, by α ← α − η ⟨v − w_i, ∇f̃_i(v̄)⟩ after every step."""

    @property
    def gradients(self) -> int:
        """One of w_i and one of v̄ in each step."""
        return 2 * self.R

    def init(self, w: Params, first: Callable[[int], Params]) -> Any:
        """v, which starts at the initial w, and α."""
        return first(0), jnp.full((), self.alpha, w.dtype)

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps on w_i, v and α; w_i − w is sent."""

        def step(carry: tuple[Params, Params, jax.Array], rows: jax.Array) -> tuple[Any, None]:
            w_i, v, alpha = carry
            f = problem.loss(rows)
            slope = f.grad(_mixed(v, w_i, alpha))
            after = w_i - self.eta * f.grad(w_i), v - (self.eta * alpha) * slope
            if self.adaptive:
                alpha = jnp.clip(alpha - self.eta * ((v - w_i) @ slope), 0, 1).astype(alpha.dtype)
            return (*after, alpha), None

        (w_i, *kept), _ = lax.scan(step, (w, *state), problem.draw(key, self.R, self.B))
        models, info = self.answer(key, problem, w, tuple(kept))
        return Update(w_i - w, tuple(kept), models._replace(local=w_i), info)

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The mixture of what the client keeps and the w received."""
        v, alpha = state
        return Models(personal=_mixed(v, w, alpha)), {"alpha": alpha}


def _mixed(v: Params, w: Params, alpha: jax.Array) -> Params:
    """v̄ = α v + (1 − α) w."""
    return alpha * v + (1 - alpha) * w
