"""L2GD: own models, pulled towards their mean when a coin says so (Hanzely and Richtárik, 2020, Algorithm 1).

It minimises (1/N) Σ f_i(x_i) + λ/(2N) Σ ‖x_i − x̄‖². In each iteration all clients toss the same coin: with
probability p they take a step of the second term, otherwise one of the first. Only the former needs the mean,
so a round here is one such step followed by all steps until the next: their number is geometric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update
from pfedme.core.problem import Problem
from pfedme.core.spec import Bound, Positive
from pfedme.core.tree import Params, record


@record
class L2GD(Algorithm):
    """x_i ← x_i − (ηλ/p)(x_i − x̄), then steps of x_i ← x_i − η/(1 − p) ∇f̃_i(x_i), until the coin says stop.

    η is α/N in the paper. The coin is the server's, which sends the number of steps. R has no effect.
    """

    name: ClassVar[str] = "l2gd"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Hanzely and Richtárik, 2020"
    sends: ClassVar[str] = "the change of its personal model x_i"
    personal: ClassVar[str] = "x_i, which the client keeps and trains in its rounds"
    newcomer: ClassVar[str] = "the mean x̄ of all clients' models"
    simulated: ClassVar[str] = "its clients sometimes take a single step, which would reveal the batch's rows"
    steps: ClassVar[tuple[str, ...]] = ("eta", "p")
    tuned: ClassVar = {"lam": (0.05, 0.5, 2.0)}

    lam: Positive = 0.5
    """λ: how strongly x_i is pulled towards the mean."""
    p: Annotated[float, Bound(least=0, below=1)] = 0.0
    """p: the probability of a step towards the mean; 0 for λ/(L + λ), the best in theory."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """p = λ/(L + λ), and the largest η for which both kinds of steps are stable."""
        p = self.p or self.lam / (L + self.lam)
        return {"p": p, "eta": min((1 - p) / L, p / self.lam)}

    @property
    def gradients(self) -> int:
        """The expected number, (1 − p)/p."""
        return round((1 - self.p) / self.p) if self.p else self.R

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """x̄, and the number of steps in the first round."""
        return first(0), self._steps(key)

    def _steps(self, key: jax.Array) -> jax.Array:
        """How many steps the coin allows before it says stop: k with probability (1 − p)ᵏ p."""
        return (jax.random.geometric(key, self.p) - 1).astype(jnp.int32)

    def init(self, sent: Any, first: Callable[[int], Params]) -> Params:
        """x_i, which starts at the initial x̄: the server's mean counts on it."""
        return first(0)

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, x: Params) -> Update:
        """A step towards x̄ and steps on f_i; the change of x_i is sent."""
        mean, steps = sent

        def step(k: jax.Array, x: Params) -> Params:
            slope = problem.sample(jax.random.fold_in(key, k), self.B).grad(x)
            return x - (self.eta / (1 - self.p)) * slope

        after = lax.fori_loop(0, steps, step, x - (self.eta * self.lam / self.p) * (x - mean))
        kept = x + self.received(key, after - x)  # so that x̄ stays the mean of the x_i with any codec
        return Update(upload=after - x, state=kept, models=Models(personal=kept), info={})

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """The mean of all x_i, and the coin."""
        return server[0] + self.beta * self.change_of_mean(uploads, cohort), self._steps(cohort.key)

    def shared(self, server: Any, clients: Any) -> Params:
        """x̄."""
        return server[0]

    def answer(self, key: jax.Array, problem: Problem, sent: Any, x: Params) -> tuple[Models, dict]:
        """x_i as the client keeps it."""
        return Models(personal=x), {}
