"""The contract of an algorithm: what a client does in a round, and what the server does with the answers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.core.problem import Order, Problem
from pfedme.core.spec import Count, Index, NonNegative, Positive
from pfedme.core.tree import Params, record

Aggregation = Literal["uniform", "samples"]


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
    pools: ClassVar[bool] = False
    """Whether it trains on the rows of all clients as if they were one client's."""
    steps: ClassVar[tuple[str, ...]] = ("eta",)
    """The fields that are step sizes; one that is 0 comes from the curvature of the clients' losses."""

    def __init_subclass__(cls) -> None:
        """A subclass that does not say its name is called after its class."""
        if "name" not in vars(cls):
            cls.name = cls.__name__

    eta: NonNegative = 0.0
    """η: step size of a client's model; 0 takes 1/L, where L is the curvature of the clients' losses."""
    R: Count = 20
    """Local rounds (steps) of a client between two communications."""
    B: Index = 20
    """|D|: rows of a mini-batch, drawn with replacement; 0 takes all of a client's rows."""
    beta: Positive = 1.0
    """β: the server moves w by β times the distance to the mean of the uploads."""
    aggregation: Aggregation = "uniform"
    """Weights of the uploads: the same for all (paper), or by training rows (released code)."""
    batches: Order = "random"
    """Mini-batches: rows drawn afresh (paper), or cycled through in a fixed order (released code)."""

    def stable_steps(self, L: float) -> dict[str, float]:
        """A size for each of `steps` that is stable on losses whose gradients are L-Lipschitz."""
        return {"eta": 1 / L}

    def with_steps(self, L: float) -> Self:
        """This algorithm with every step size that is not given taken from L.

        >>> Algorithm(eta=0.3).with_steps(4.0).eta, Algorithm().with_steps(4.0).eta
        (0.3, 0.25)
        """
        found = {k: v for k, v in self.stable_steps(L).items() if not getattr(self, k)}
        # To three digits, which can be read and typed; downwards, to stay stable.
        return dataclasses.replace(self, **{k: _rounded_down(v) for k, v in found.items()})

    def slower(self, factor: float) -> Self:
        """This algorithm with η multiplied by a factor; other step sizes are part of what a personal model
        is."""
        return dataclasses.replace(self, eta=factor * self.eta)

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

    def shared(self, w: Params, clients: Any) -> Params | None:
        """The global model, of what the server and the clients (stacked) keep; None if there is none."""
        return w if self.has_global else None

    def answer(self, key: jax.Array, problem: Problem, w: Params, state: Any) -> tuple[Models, dict]:
        """The models with which a client answers w, for evaluation and for use."""
        update = self.client_update(key, problem, w, state)
        return update.models, update.info


def _rounded_down(value: float) -> float:
    """The number to three digits, not above it.

    >>> _rounded_down(0.123999), _rounded_down(45678.0)
    (0.123, 45600.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit * (1 + 1e-12)) * unit:.3g}")


def sgd(
    key: jax.Array,
    problem: Problem,
    w: Params,
    *,
    eta: float,
    steps: int,
    B: int,
    l2: jax.Array | None = None,
) -> Params:
    """w after `steps` steps w ← w − η ∇f̃_i(w; D), each on a fresh mini-batch D.

    With `l2` each is followed by the proximal step of l2/2 ‖W‖², W ← W/(1 + η l2), for all weights W, which
    are the arrays of two or more dimensions; it is stable for any strength.
    """

    def shrunk(leaf: jax.Array) -> jax.Array:
        return leaf if l2 is None or leaf.ndim < 2 else leaf / (1 + eta * l2)

    def step(w: Params, rows: jax.Array) -> tuple[Params, None]:
        w = w - eta * problem.loss(rows).grad(w)
        return (w if l2 is None else w.map(shrunk)), None

    return lax.scan(step, w, problem.draw(key, steps, B))[0]
