"""What a run costs: the gradients that clients compute and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import jax

from pfedme.algorithms import Algorithm
from pfedme.engine.exchange import exchange
from pfedme.engine.simulate import Simulation


def gradients(algorithm: Algorithm) -> int | None:
    """Mini-batch gradients of a client in a round; None for a user's algorithm that does not define it.

    >>> from pfedme.algorithms import FedAvg
    >>> gradients(FedAvg(R=20))
    20
    """
    told = any("gradients" in vars(cls) for cls in type(algorithm).__mro__ if cls is not Algorithm)
    ours = type(algorithm).__module__.startswith("pfedme.")
    return algorithm.gradients if told or ours else None


def traffic(simulation: Simulation) -> tuple[int, int]:
    """Bytes that a client of the cohort receives and sends in a round."""
    algorithm, federation = simulation.algorithm, simulation.federation
    if not algorithm.federated:
        return 0, 0
    shapes = exchange(algorithm, simulation.model, federation.features, federation.clients)
    return size_of(shapes.sent), size_of(shapes.message)


def size_of(shapes: Any) -> int:
    """The bytes of a tree of arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
