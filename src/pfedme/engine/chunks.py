"""Clients in chunks, so that the memory for their models is bounded.

What clients compute on their own does not depend on how many do so at once, other than by rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import aligned
from pfedme.engine.devices import read, replicate

if TYPE_CHECKING:
    from pfedme.engine.metrics import Blocks

MOST_BYTES = 2**27
"""Limit on what clients that work at once need for their models and rows; beyond it, they take turns."""


class Stacked(Protocol):
    """A model for each client."""

    def __getitem__(self, who: np.ndarray, /) -> Params:
        """Those of clients `who`, stacked."""
        ...


@dataclasses.dataclass(frozen=True)
class MadeOnDemand:
    """A model for each client that is made when it is asked for."""

    make: Callable[[np.ndarray], Params]

    def __getitem__(self, who: np.ndarray) -> Params:
        """Those of clients `who`, stacked."""
        return self.make(who)


class Chunk(NamedTuple):
    """Clients that work at once."""

    who: np.ndarray
    """As many in each chunk, the last of them repeated if there are too few."""
    clients: int
    """How many there are without repetition."""
    first: int
    """How many clients were in the chunks before this one."""
    blocks: Blocks
    """Their rows; `blocks.client` is the place in `who`."""


def at_once(each: int) -> int:
    """How many clients can work at once, if each needs so many bytes."""
    devices = jax.device_count()
    return max(1, MOST_BYTES // (each * devices)) * devices


@jax.jit
def _first(model: Model, key: jax.Array) -> Params:
    return model.init(key)


def _shapes(model: Model) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a point; models that differ in floats only are traced once."""
    return jax.tree.leaves(_first.eval_shape(model, jax.random.key(0)))


def size_of(model: Model) -> int:
    """The bytes of a point."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in _shapes(model))


def chunks(who: np.ndarray, blocks: Blocks, size: int) -> Iterator[Chunk]:
    """Clients `who` in chunks of at most `size`, with their blocks of rows. If there are several, the blocks
    are as many in each, so that all share one compiled program."""
    parts, first = list(groups(who, size)), 0
    own = blocks.parts(len(who), len(parts[0][0])) if len(parts) > 1 else [blocks]
    for (some, count), blocks in zip(parts, own, strict=True):
        yield Chunk(some, count, first, blocks)
        first += count


def groups(who: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Clients `who` in groups of at most `size`, all of the same length: the last client is repeated if
    there are too few. The second number is how many there are without repetition.

    >>> [(some.tolist(), count) for some, count in groups(np.array([5, 6, 7]), 2)]
    [([5, 6], 2), ([7, 7], 1)]
    """
    size = max(1, -(-len(who) // max(1, -(-len(who) // size))))
    for first in range(0, len(who), size):
        some = who[first : first + size]
        yield np.pad(some, (0, size - len(some)), mode="edge"), len(some)


def in_chunks(model: Model, theta: Params, blocks: Blocks) -> Iterator[tuple[Params, Blocks, int]]:
    """A stack of models in parts that need little memory, with the blocks of each and the number of those
    that are not empty; one model for all clients, and few models, are a single part."""
    clients = len(jax.tree.leaves(theta)[0]) if is_stack(model, theta) else 0
    size = at_once(2 * size_of(model))
    if clients <= size or blocks.home is not None:
        yield theta, blocks, len(blocks.client)
        return
    for some in chunks(np.arange(clients), blocks, size):
        last = some.first + len(some.who)
        kept = np.searchsorted(blocks.client, (some.first, last))
        yield replicate(theta[some.who]), some.blocks, int(kept[1] - kept[0])


def is_stack(model: Model, theta: Params) -> bool:
    """Whether θ is a point for each client, not one for all."""
    return _shapes(model)[0].ndim < jax.tree.leaves(theta)[0].ndim


def stacked(parts: Iterable[tuple[Any, int]], total: int) -> Any:
    """Trees of arrays put together along their leading axis, in the memory of the host: so many entries of
    each, and `total` in all."""
    whole, at = None, 0
    for tree, count in parts:
        if count == total:
            return jax.tree.map(lambda a, n=count: a if len(a) == n else a[:n], tree)
        if whole is None:
            whole = jax.tree.map(lambda a: aligned((total, *a.shape[1:]), a.dtype), tree)
        for to, a in zip(jax.tree.leaves(whole), jax.tree.leaves(tree), strict=True):
            to[at : at + count] = read(a)[:count]
        at += count
    return whole
