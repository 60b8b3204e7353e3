"""FedAvgM: FedAvg with momentum on the server (Hsu et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax

from pfedme.algorithms.base import Cohort
from pfedme.algorithms.fedavg import FedAvg
from pfedme.core.spec import Bound
from pfedme.core.tree import Params, record


@record
class FedAvgM(FedAvg):
    """FedAvg's clients; the server takes v ← μ v + Σ p_i Δ_i and w ← w + β v. With μ = 0 this is FedAvg."""

    name: ClassVar[str] = "fedavgm"
    reference: ClassVar[str] = "Hsu et al., 2019"
    tuned: ClassVar = {"mu": (0.5, 0.7, 0.9)}
    averages: ClassVar[bool] = True

    mu: Annotated[float, Bound(least=0, below=1)] = 0.9
    """μ (β in the paper): momentum, the weight of the server's previous step."""

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w, and v = 0."""
        w = first(0)
        return w, 0 * w

    def send(self, server: Any, i: jax.Array) -> Params:
        """w."""
        return server[0]

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        """A step with momentum."""
        w, v = server
        v = self.mu * v + self.combined(uploads, cohort)
        return w + self.beta * v, v

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]
