"""What a run costs: the gradients that clients compute and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import jax

from pfedme.algorithms import Algorithm
from pfedme.engine.simulate import Simulation


def gradients(algorithm: Algorithm) -> int | None:
    """Mini-batch gradients of a client in a round; None for an algorithm of the user's own that does not say.

    >>> from pfedme.algorithms import FedAvg
    >>> gradients(FedAvg(R=20))
    20
    """
    told = any("gradients" in vars(cls) for cls in type(algorithm).__mro__ if cls is not Algorithm)
    ours = type(algorithm).__module__.startswith("pfedme.")
    return algorithm.gradients if told or ours else None


def traffic(simulation: Simulation) -> tuple[int, int]:
    """Bytes that a client of the cohort receives and sends in a round."""
    algorithm, store = simulation.algorithm, simulation.store
    if not algorithm.federated:
        return 0, 0
    state = simulation.shapes()

    def round(server: Any, clients: Any) -> tuple[Any, Any]:
        sent = algorithm.send(server, jax.numpy.zeros((), int))
        own = jax.tree.map(lambda kept: kept[0], clients)
        problem = store.problem(simulation.model, 0, 0, algorithm.batches)
        update = algorithm.client_update(simulation.key, problem, sent, own)
        return sent, algorithm.codec.encode(simulation.key, update.upload)

    down, up = jax.eval_shape(round, state.server, state.clients)
    return _bytes(down), _bytes(up)


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
