"""The contract of an algorithm: what a client does in a round, and what the server does with the answers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.problem import Order, Problem
from pfedme.spec import Count, Index, Positive
from pfedme.tree import Params, record


class Models(NamedTuple):
    """The models that a client holds after it has answered w; None for one that the algorithm lacks."""

    local: Params | None = None
    """w_i: the client's copy of the shared model after its local rounds."""
    personal: Params | None = None
    """θ_i: the model made for the client alone."""


class Update(NamedTuple):
    """A client's part of a round."""

    upload: Params
    """What the client sends to the server."""
    state: Any
    """What it keeps for its next round."""
    models: Models
    info: dict[str, jax.Array]
    """Numbers about the computation that are worth a place in the record."""


@record
class Algorithm:
    """A federated algorithm; its fields are its hyperparameters.

    A round of the simulator, and of a deployed federation, is

        update_i = algorithm.client_update(key_i, problem_i, w, state_i)   for each client i of the cohort
        w        = algorithm.server_update(w, uploads, counts)
    """

    name: ClassVar[str]
    has_global: ClassVar[bool] = True
    """Whether there is a shared model w at all."""

    eta: Positive = 0.01
    """η: step size of a client's model."""
    R: Count = 20
    """Local rounds (steps) of a client between two communications."""
    B: Index = 20
    """|D|: rows of a mini-batch, drawn with replacement; 0 takes all of a client's rows."""
    beta: Positive = 1.0
    """β: the server moves w by β times the way to the mean of the uploads."""
    aggregation: Literal["uniform", "samples"] = "uniform"
    """Weights of the uploads: the same for all (paper), or by training rows (released code)."""
    batches: Order = "random"
    """Mini-batches: rows drawn afresh (paper), or cycled through in a fixed order (released code)."""

    def init(self, w: Params) -> Any:
        """What a client keeps between rounds, before its first; nothing by default."""
        return ()

    def client_update(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> Update:
        """The client's part of a round that starts from w."""
        raise NotImplementedError

    def server_update(self, w: Params, uploads: Params, count: jax.Array) -> Params:
        """w ← (1 − β) w + β Σ_i p_i w_i over the stacked uploads w_i of clients with `count` rows.

        p_i is uniform, or proportional to the rows; a count of zero marks an absent client.

        >>> w, uploads = Params(jnp.zeros(1)), Params(jnp.array([[1.0], [4.0]]))
        >>> Algorithm(beta=2.0).server_update(w, uploads, jnp.array([10, 30])).tree
        Array([5.], dtype=float32)
        >>> Algorithm(aggregation="samples").server_update(w, uploads, jnp.array([10, 30])).tree
        Array([3.25], dtype=float32)
        """
        share = (count > 0) if self.aggregation == "uniform" else count
        p = share / jnp.sum(share)
        mean = uploads.map(lambda u: jnp.tensordot(p.astype(u.dtype), u, 1))
        return (1 - self.beta) * w + self.beta * mean

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The models with which a client answers w, for evaluation and for use."""
        update = self.client_update(key, problem, w, state)
        return update.models, update.info


def sgd(key: jax.Array, problem: Problem, w: Params, *, eta: float, steps: int, B: int) -> Params:
    """w after `steps` steps w ← w − η ∇f̃_i(w; D), each on a fresh mini-batch D."""

    def step(w: Params, rows: jax.Array) -> tuple[Params, None]:
        return w - eta * problem.loss(rows).grad(w), None

    return lax.scan(step, w, problem.draw(key, steps, B))[0]
