"""A metric of models on all rows of all clients, computed for some clients after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.chunks import Chunk
from pfedme.engine.measure import Measure
from pfedme.engine.metrics import Blocks, Spread, fits, score
from pfedme.engine.rowmetrics import ClassRows, NumberRows, Value
from pfedme.engine.store import Store


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Computes a metric of stacked models on the test rows of clients, some clients after another."""

    metric: Measure
    model: Model
    federation: Federation
    store: Store
    spread: Spread | None
    positive: int
    found: dict[str, list[ClassRows | NumberRows]]
    """Of each method, the rows of some clients after another."""

    @classmethod
    def of(
        cls, metric: Measure, model: Model, federation: Federation, blocks: Blocks, positive: int | None
    ) -> Scorer | None:
        """For the rows in `blocks`; None if there are too many rows to keep."""
        if not fits(model, int(blocks.valid.sum())):
            return None
        spread = None
        if federation.classes == 0:
            spread = Spread.of(federation.y, blocks, federation.clients, federation.label_unit)
        positive = federation.positive if positive is None else positive
        return cls(metric, model, federation, Store.of(federation), spread, positive, {})

    def add(self, name: str, models: Params, some: Chunk) -> None:
        """Scores a method's models of some clients."""
        rows = score(
            self.model, models, self.store.x, self.store.y, some.blocks, len(some.who), self.spread,
            self.positive, self.federation.y,
        ).rows  # fmt: skip
        if rows is not None:
            own = dataclasses.replace(rows, owner=rows.owner + some.first, clients=self.federation.clients)
            self.found.setdefault(name, []).append(own)

    def values(self) -> dict[str, Value]:
        """The metric of each method; nothing if there are no rows."""
        return {name: joined(rows).value(self.metric.key) for name, rows in self.found.items()}


def joined(parts: Sequence[ClassRows | NumberRows]) -> ClassRows | NumberRows:
    """The rows of several parts as one."""
    names = [name for name in ("scores", "error", "y", "owner") if hasattr(parts[0], name)]
    columns = {name: np.concatenate([getattr(own, name) for own in parts]) for name in names}
    return dataclasses.replace(parts[0], **columns)
