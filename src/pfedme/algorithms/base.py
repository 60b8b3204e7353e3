"""The interface of an algorithm: what a client does in a round, and what the server does with the uploads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pfedme.algorithms.aggregate import Codec, Combine, Mean, Plain
from pfedme.core.models import Model
from pfedme.core.problem import Order, Problem
from pfedme.core.spec import Count, Index, NonNegative, Positive
from pfedme.core.tree import Params, record

Aggregation = Literal["uniform", "samples"]
T = TypeVar("T")
CODEC = 2**32 - 3
"""Folded into a client's key for its codec; larger than any number that is folded in for a step."""
Idea = Literal[
    "one shared model", "near a shared model", "partly shared", "several shared", "fair", "between clients",
    "not federated",
]  # fmt: skip
"""The groups of algorithms, by what clients share."""


class Models(NamedTuple):
    """The models that a client has after responding to w; None for those that the algorithm lacks."""

    local: Params | None = None
    """w_i: the client's copy of the shared model after its local rounds."""
    personal: Params | None = None
    """θ_i: the model made for the client alone."""


class Update(NamedTuple):
    """A client's part of a round."""

    upload: Any
    """What the client sends to the server: a tree of arrays. A model is sent as its difference from what the
    client received."""
    state: Any
    """What the client keeps for its next round."""
    models: Models
    info: dict[str, jax.Array]
    """Numbers about the computation, for the record."""


class Accesses(NamedTuple):
    """How often an algorithm uses a client's rows, in private mini-batches. Numbers are named by fields."""

    round: tuple[str, ...]
    """Mini-batches in a client's part of a round: the sum of these fields."""
    answer: tuple[str, ...] = ()
    """Mini-batches in `answer`, apart from those of a round that it repeats."""
    repeats: bool = False
    """Whether `answer` repeats the client's part of the round, with the same random key: this reveals nothing
    new where the client takes part, and is another round where it does not."""
    gradients: str = ""
    """Gradients on each mini-batch; one if empty."""

    def counts(self, algorithm: Algorithm) -> tuple[int, int, int]:
        """The mini-batches of a round and of an answer, and the gradients on each of them."""
        round, answer = (sum(getattr(algorithm, name) for name in names) for names in self[:2])
        return round, answer, getattr(algorithm, self.gradients) if self.gradients else 1


class Cohort(NamedTuple):
    """The clients whose uploads the server has received in a round, one entry each."""

    key: jax.Array
    """The server's random key, a function of (seed, round)."""
    clients: jax.Array
    """Their indices among all clients."""
    rows: jax.Array
    """Their numbers of training rows; zero marks an absent client."""
    total: int
    """N: the number of clients."""


@record
class Algorithm:
    """A federated algorithm; its fields are its hyperparameters.

    A round of the simulator, and of a deployed federation, is

        for each client i of the cohort:
            sent_i   = algorithm.send(server, i)
            update_i = algorithm.client_update(key_i, problem_i, sent_i, state_i)
        server = algorithm.server_update(server, uploads, cohort)

    where `server` is whatever the server keeps, by default the shared model w, and `state_i` is whatever
    client i keeps, by default nothing. All methods are pure functions that JAX can trace. Only
    `client_update` must be written. Checkpoints include the state of the server and of all clients; deployed
    clients store their own.

    An example is FedAvg with server momentum, v ← μ v + mean of the Δ_i and w ← w + v:

    >>> @record
    ... class Momentum(Algorithm):
    ...     mu: NonNegative = 0.9
    ...     '''μ: the weight of the previous step.'''
    ...
    ...     def begin(self, key, first, total):
    ...         w = first(0)
    ...         return w, 0 * w
    ...
    ...     def send(self, server, i):
    ...         return server[0]
    ...
    ...     def client_update(self, key, problem, w, state):
    ...         w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
    ...         return Update(upload=w_i - w, state=state, models=Models(local=w_i), info={})
    ...
    ...     def server_update(self, server, uploads, cohort):
    ...         w, v = server
    ...         v = self.mu * v + self.combined(uploads, cohort)
    ...         return w + v, v
    ...
    ...     def shared(self, server, clients):
    ...         return server[0]
    >>> cohort = Cohort(jax.random.key(0), jnp.arange(2), jnp.array([10, 30]), 2)
    >>> server = Params(jnp.zeros(1)), Params(jnp.ones(1))
    >>> w, v = Momentum(mu=0.5).server_update(server, Params(jnp.array([[1.0], [4.0]])), cohort)
    >>> w.tree
    Array([3.], dtype=float32)
    """

    name: ClassVar[str]
    idea: ClassVar[Idea] = "one shared model"
    reference: ClassVar[str] = ""
    """The authors and the year of the paper that it comes from."""
    personal: ClassVar[str] = ""
    """What a client's personal model is; empty if there is none."""
    sends: ClassVar[str] = ""
    """What leaves a client in each round; owners read it before they join."""
    newcomer: ClassVar[str] = "the shared model"
    """What a client that comes after training starts with."""
    simulated: ClassVar[str] = ""
    """Why it cannot be deployed; empty if it can."""
    federated: ClassVar[bool] = True
    """Whether clients train together; if not, nothing is sent."""
    has_global: ClassVar[bool] = True
    """Whether there is one shared model that any client could use unchanged."""
    pools: ClassVar[bool] = False
    """Whether it trains on the rows of all clients as if they belonged to one client."""
    steps: ClassVar[tuple[str, ...]] = ("eta",)
    """The fields that are step sizes; those that are 0 are set from the curvature of the clients' losses."""
    tuned: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """The values that a study tries for the main hyperparameters, besides step sizes."""
    accesses: ClassVar[Accesses | None] = None
    """How often it uses rows, if it uses them in gradients on mini-batches that it draws, and nowhere else;
    it can then train with differential privacy of rows. A subclass does not inherit it."""
    averages: ClassVar[bool] = True
    """Whether the server uses nothing but the mean of the uploads, as `combined` returns it, and sends the
    same to all clients; it can then train with differential privacy of clients, and with regions. A subclass
    that defines `server_update` has to say so itself."""

    def __init_subclass__(cls) -> None:
        """A subclass without a `name` is named after its class, and one without `accesses` has none."""
        if "server_update" in vars(cls) and "averages" not in vars(cls):
            cls.averages = False
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if "accesses" not in vars(cls):
            cls.accesses = None

    eta: NonNegative = 0.0
    """η: step size of a client's model; 0 derives it from the curvature L of the clients' losses."""
    R: Count = 20
    """Local rounds (steps) of a client between two communications."""
    B: Index = 20
    """|D|: rows of a mini-batch, drawn with replacement; 0 for all of a client's rows."""
    beta: Positive = 1.0
    """β: the server moves w by β times the mean of the differences that clients send."""
    aggregation: Aggregation = "uniform"
    """Weights of the uploads: equal (paper), or proportional to the training rows (released code)."""
    combine: Combine = Mean()
    """How uploads are combined."""
    codec: Codec = Plain()
    """How uploads are encoded for sending."""
    batches: Order = "random"
    """Mini-batches: rows drawn afresh (paper), or cycled through in a fixed order (released code)."""

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an `InputError` if it cannot train this model with this many clients."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int, /) -> Any:
        """What the server keeps before the first round: by default the initial model.

        Arguments:
            key: the server's random key.
            first: `first(k)` makes initial model number k; each is drawn independently.
            total: N, the number of clients.
        """
        return first(0)

    def send(self, server: Any, i: jax.Array, /) -> Any:
        """What client i (its index among all clients) receives: by default all that the server keeps."""
        return server

    def init(self, sent: Any, first: Callable[[int], Params], /) -> Any:
        """What a client keeps before its first round; by default nothing.

        Arguments:
            sent: what the server would send it at that point.
            first: makes initial models, as in `begin`; every client can make them on its own.
        """
        return ()

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any, /) -> Update:
        """The client's part of a round.

        Arguments:
            key: the client's random key for this round, a function of (seed, round, client).
            problem: the client's rows, and the loss of a model on them.
            sent: what the server has sent.
            state: what the client kept when it last took part, or what `init` returned.

        Returns its upload, its new state, its models, and numbers for the record. The new state takes effect
        only if the upload reaches the server; see `received` if it has to agree with what the server keeps.
        """
        raise NotImplementedError

    def server_update(self, server: Any, uploads: Any, cohort: Cohort, /) -> Any:
        """What the server keeps after a round: w ← w + β Σ_i p_i Δ_i by default.

        Arguments:
            server: what it has kept so far.
            uploads: what the clients of the cohort have sent, decoded and stacked.
            cohort: who they are.

        >>> w, uploads = Params(jnp.zeros(1)), Params(jnp.array([[1.0], [4.0]]))
        >>> cohort = Cohort(jax.random.key(0), jnp.arange(2), jnp.array([10, 30]), 2)
        >>> Algorithm(beta=2.0).server_update(w, uploads, cohort).tree
        Array([5.], dtype=float32)
        >>> Algorithm(aggregation="samples").server_update(w, uploads, cohort).tree
        Array([3.25], dtype=float32)
        """
        return server + self.beta * self.combined(uploads, cohort)

    def encoded(self, key: jax.Array, upload: Any) -> Any:
        """The message in which a client with this random key sends an upload."""
        return self.codec.encode(jax.random.fold_in(key, CODEC), upload)

    def received(self, key: jax.Array, upload: T) -> T:
        """The upload as the server will read it from that message.

        A client that keeps something in step with the server, such as a term of a mean over all clients,
        must change it by what is received and not by what it meant to send: a codec may add noise.
        """
        return self.codec.decode(self.encoded(key, upload))

    def combined(self, uploads: Any, cohort: Cohort) -> Any:
        """The uploads of a cohort combined into one, by `combine` with the weights p_i."""
        return self.combine(uploads, self.weights(cohort), cohort.key)

    def change_of_mean(self, uploads: T, cohort: Cohort) -> T:
        """The change of a mean over all N clients when the values of the cohort change by their uploads:
        |S|/N times the uniform mean."""
        present = cohort.rows > 0
        members = jnp.sum(present)
        share = members / cohort.total
        mean = self.combine(uploads, present / members, cohort.key)
        return jax.tree.map(lambda a: share.astype(a.dtype) * a, mean)

    def weights(self, cohort: Cohort) -> jax.Array:
        """p_i: uniform, or proportional to the training rows; zero for an absent client."""
        share = (cohort.rows > 0) if self.aggregation == "uniform" else cohort.rows
        return share / jnp.sum(share)

    def shared(self, server: Any, clients: Any, /) -> Params | None:
        """The global model, from what the server and the clients (stacked) keep; None if there is none."""
        return server if self.has_global else None

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any, /) -> tuple[Models, dict]:
        """The models with which a client responds to what it was sent, for evaluation and for use."""
        update = self.client_update(key, problem, sent, state)
        return update.models, update.info

    @property
    def gradients(self) -> int:
        """Mini-batch gradients that a client computes in a round; a Hessian-vector product counts as two."""
        return self.R

    def stable_steps(self, L: float) -> dict[str, float]:
        """A value for each of `steps` that is stable on losses whose gradients are L-Lipschitz."""
        return {"eta": 1 / L}

    def with_steps(self, L: float) -> Self:
        """This algorithm with every step size that is not given set from L.

        >>> Algorithm(eta=0.3).with_steps(4.0).eta, Algorithm().with_steps(4.0).eta
        (0.3, 0.25)
        """
        found = {k: v for k, v in self.stable_steps(L).items() if not getattr(self, k)}
        # Rounded to three digits, which are easy to read and type; downwards, to stay stable.
        return dataclasses.replace(self, **{k: rounded_down(v) for k, v in found.items()})

    def slower(self, factor: float) -> Self:
        """This algorithm with η multiplied by a factor; the other step sizes help to define the personal
        model."""
        return dataclasses.replace(self, eta=factor * self.eta)

    def advice(self, L: float) -> str:
        """Which step size to lower after training has diverged, if gradients are L-Lipschitz."""
        return (
            f"Steps are stable for eta below 2/L = {2 / L:.2g} (L ≈ {L:.3g}), and eta is {self.eta:g}: "
            "lower --eta."
        )


def rounded_down(value: float) -> float:
    """The number rounded down to three digits.

    >>> rounded_down(0.123999), rounded_down(45678.0)
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
    extra: Callable[[Params], Params] | None = None,
    fixed: Params | None = None,
) -> Params:
    """w after `steps` steps w ← w − η ∇f̃_i(w; D), each on a fresh mini-batch D.

    `extra(w)` is added to every gradient. If w is only a part of a model, the rest is `fixed`. With `l2`,
    each step is followed by the proximal step of l2/2 ‖W‖², W ← W/(1 + η l2), for all weights W, which are
    the arrays of two or more dimensions. This is stable for any strength.
    """

    def shrunk(leaf: jax.Array) -> jax.Array:
        return leaf if l2 is None or leaf.ndim < 2 else leaf / (1 + eta * l2)

    def slope(rows: Any, w: Params) -> Params:
        f = problem.loss(rows)
        found = f.grad(w) if fixed is None else jax.grad(lambda w: f(w | fixed))(w)
        return found if extra is None else found + extra(w)

    def step(w: Params, rows: Any) -> tuple[Params, None]:
        w = w - eta * slope(rows, w)
        return (w if l2 is None else w.map(shrunk)), None

    return lax.scan(step, w, problem.draw(key, steps, B))[0]
