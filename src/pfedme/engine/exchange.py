"""What a server and a client exchange: initial values, shapes, and the server's randomness."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.core import native
from pfedme.core.models import Model
from pfedme.core.problem import Problem
from pfedme.core.tree import Params

FIRST_MODELS, SERVER = 2**32 - 1, 2**32 - 4
"""Numbers that are folded into keys for initial models and the server; larger than any round."""


def first_model(model: Model, seed: Any, number: int = 0) -> Params:
    """w before the first round; with a `number`, further ones for an algorithm with several models."""
    key = jax.random.fold_in(jax.random.key(seed), FIRST_MODELS)
    return model.init(jax.random.fold_in(key, number) if number else key)


def first_server(algorithm: Algorithm, model: Model, seed: int, clients: int) -> Any:
    """What the server keeps before the first round."""
    key = jax.random.fold_in(jax.random.key(seed), SERVER)
    return algorithm.begin(key, partial(first_model, model, seed), clients)


@jax.jit
def first_state(algorithm: Algorithm, model: Model, seed: Any, sent: Any) -> Any:
    """What a client keeps before its first round, given what it would be sent then."""
    return algorithm.init(sent, partial(first_model, model, seed))


@partial(jax.jit, static_argnames="clients")
def first_states(algorithm: Algorithm, model: Model, seed: Any, server: Any, clients: int) -> Any:
    """What all clients keep before their first round, stacked."""

    def first(i: jax.Array) -> Any:
        return first_state(algorithm, model, seed, algorithm.send(server, i))

    return jax.vmap(first, axis_size=clients)(jnp.arange(clients))


class Exchange(NamedTuple):
    """The shapes of what the server and a client exchange in a round."""

    server: Any
    """What the server keeps."""
    sent: Any
    state: Any
    """What the client keeps."""
    message: Any
    """What the client sends, encoded."""


def exchange(algorithm: Algorithm, model: Model, features: int, clients: int) -> Exchange:
    """The shapes of what is exchanged in a federation with this many clients and features."""
    return jax.eval_shape(*_round(algorithm, model, features, clients))


def takes_native_steps(algorithm: Algorithm, model: Model, features: int, most_rows: int) -> bool:
    """Whether clients that have at most so many rows take their proximal steps as machine code."""
    round, *shapes = _round(algorithm, model, features, 1, most_rows)
    return native.TARGET in str(jax.make_jaxpr(round)(*shapes))


def _round(
    algorithm: Algorithm, model: Model, features: int, clients: int, longest: int = 1
) -> tuple[Any, ...]:
    """A client's part of a round as a function, and the shapes of its arguments."""
    one = jax.ShapeDtypeStruct((), np.int32)
    x = jax.ShapeDtypeStruct((1, features), np.float32)
    y = jax.ShapeDtypeStruct((1,), np.float32 if model.classes == 0 else np.int32)

    def round(key: jax.Array, x: jax.Array, y: jax.Array, i: jax.Array) -> Exchange:
        first = partial(first_model, model, 0)
        server = algorithm.begin(key, first, clients)
        sent = algorithm.send(server, i)
        state = algorithm.init(sent, first)
        problem = Problem(model, x, y, i, i, i, i, longest, algorithm.batches)
        update = algorithm.client_update(key, problem, sent, state)
        return Exchange(server, sent, state, algorithm.encoded(key, update.upload))

    return round, jax.random.key(0), x, y, one


def upload_of(algorithm: Algorithm, model: Model, features: int, clients: int) -> Any:
    """The shapes of an upload as the server reads it."""
    message = exchange(algorithm, model, features, clients).message
    return jax.eval_shape(algorithm.codec.decode, message)


def server_key(seed_key: jax.Array, t: Any) -> jax.Array:
    """The server's random key in round t."""
    return jax.random.fold_in(jax.random.fold_in(seed_key, SERVER), t)
