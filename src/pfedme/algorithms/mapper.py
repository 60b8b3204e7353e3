"""MAPPER: a personal model between the shared and an own one, whose weight is chosen (Mansour et al., 2020).

The personal model is λ θ + (1 − λ) w, with the λ of a grid that is best on rows held out of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.base import Algorithm, Models, Update
from pfedme.algorithms.stacked import repeated
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.spec import Bound
from pfedme.core.tree import Params, record

GRID, HELD_OUT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 5
"""The weights λ that a client tries, and one in how many training rows judges them; the others train."""


@record
class Mapper(Algorithm):
    """For each λ of a grid, R steps of θ ← θ − η λ g and w_i ← w_i − η (1 − λ) g, where
    g = ∇f̃_i(λ θ + (1 − λ) w_i); the best λ's w_i − w is sent.

    With the only weight λ = 1, θ is trained alone and w stays; with λ = 0, this is FedAvg with equal weights.
    """

    name: ClassVar[str] = "mapper"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Mansour et al., 2020"
    sends: ClassVar[str] = "w_i − w, the change of the shared model"
    personal: ClassVar[str] = "λ θ + (1 − λ) w, with the client's own θ and λ and the newest w"

    mix: Annotated[float, Bound(least=0, most=1)] | None = None
    """λ: the weight of θ in the personal model; if not given, each client chooses it from a grid in every
    round, by the loss on a fifth of its training rows."""

    @property
    def grid(self) -> jax.Array:
        """The weights to try."""
        return jnp.stack([jnp.asarray(self.mix)] if self.mix is not None else [*map(jnp.asarray, GRID)])

    @property
    def gradients(self) -> int:
        """One in each step, for each weight."""
        return self.R * (1 if self.mix is not None else len(GRID))

    def init(self, w: Params, first: Callable[[int], Params]) -> Any:
        """θ for each weight, which start at the initial w, and the number of the best."""
        return repeated(first(0), len(self.grid)), jnp.int32(0)

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """R steps for each weight; the best one's w_i − w is sent."""
        held = jnp.where(self.mix is None, problem.count // HELD_OUT, 0)
        fit = dataclasses.replace(problem, count=problem.count - held)
        rows = fit.draw(key, self.R, self.B)

        def trained(lam: jax.Array, theta: Params) -> tuple[Params, Params]:
            def step(carry: tuple[Params, Params], rows: jax.Array) -> tuple[Any, None]:
                theta, w_i = carry
                slope = fit.loss(rows).grad(_mixed(lam, theta, w_i))
                return (theta - self.eta * lam * slope, w_i - self.eta * (1 - lam) * slope), None

            return lax.scan(step, (theta, w), rows)[0]

        thetas, ws = jax.vmap(trained)(lams := self.grid.astype(w.dtype), state[0])
        last = jnp.where(held > 0, held, problem.count)
        judge = dataclasses.replace(problem, start=problem.start + problem.count - last, count=last)
        losses = jax.vmap(judge.loss(ALL_ROWS))(jax.vmap(_mixed)(lams, thetas, ws))
        best = jnp.argmax(losses <= 1.0001 * jnp.min(losses)).astype(jnp.int32)  # if tied, the most shared
        models, info = self.answer(key, problem, w, (thetas, best))
        return Update(ws[best] - w, (thetas, best), models._replace(local=ws[best]), info)

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The mixture of the w received and what the client keeps."""
        thetas, best = state
        lam = self.grid[best].astype(w.dtype)
        return Models(personal=_mixed(lam, thetas[best], w)), {"mix": lam}


def _mixed(lam: jax.Array, theta: Params, w: Params) -> Params:
    """λ θ + (1 − λ) w."""
    return lam * theta + (1 - lam) * w
