"""Synthetic(ᾱ, β̄): clients that differ in model and in features (Li et al., 2020, as used in the paper).

    u_i ~ N(0, ᾱ),   W_i, b_i ~ N(u_i, 1),   B_i ~ N(0, β̄),   v_i ~ N(B_i, 1),
    x ~ N(v_i, diag(j^-1.2)),   y = argmax(W_i x + b_i),

with ᾱ and β̄ as standard deviations. ᾱ changes no label: u_i adds the same number to all logits of a row.
Clients' true models differ because each has its own W_i. Sizes follow a power law:
5 (50 + ⌊lognormal(4, 2)⌋).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from pfedme.core.spec import Bound, Count, Index, NonNegative, Seed, Share
from pfedme.core.tree import record
from pfedme.data.federation import Federation, aligned


@record
class Synthetic:
    """The paper's synthetic federation: 10 classes, 60 features, 100 clients of 250 to 25,810 rows."""

    name: ClassVar[str] = "synthetic"

    alpha: NonNegative = 0.5
    """ᾱ: how much the means of the clients' true models differ, as in the paper. It changes no label, because
    a mean adds the same number to all logits."""
    beta: NonNegative = 0.5
    """β̄: how much their features differ."""
    clients: Count = 100
    """N."""
    rows: Index = 0
    """Number of rows per client; 0 for the paper's power law."""
    iid: bool = False
    """One feature distribution for all, and one true model unless kinds is given."""
    kinds: Index = 0
    """Number of true models: client i has model i modulo kinds; 0 for a model of its own."""
    features: Count = 60
    """Numbers in a row."""
    classes: Annotated[int, Bound(least=2, most=10_000)] = 10
    """Labels."""
    train: Share = 0.75
    """Share of a client's rows to train on."""
    seed: Seed = 0
    """Seed of the data."""

    def load(self) -> Federation:
        """The federation.

        >>> Synthetic().load().count.sum()
        np.int64(205795)
        """
        counts, normal = self._draws()
        d, c, n = self.features, self.classes, self.clients
        if self.iid:
            u, v = np.zeros(n, np.float32), np.zeros((n, d), np.float32)
        else:
            u, B = self.alpha * normal(n), self.beta * normal(n)
            v = B[:, None] + normal((n, d))
        kinds = self.kinds or int(self.iid)
        shared = (normal((kinds, d, c)), normal((kinds, c))) if kinds else None
        scale = (np.arange(1, d + 1) ** -0.6).astype(v.dtype)
        x, y = aligned((counts.sum(), d), np.float32), np.empty(counts.sum(), np.int32)
        group = max(1, 2**14 // self.rows) if self.rows else 1
        at = 0
        for first in range(0, n, group):
            who = slice(first, min(first + group, n))
            g, size = who.stop - first, counts[first]
            if shared:
                W, b = (part[np.arange(first, who.stop) % kinds] for part in shared)
            else:
                W, b = u[who, None, None] + normal((g, d, c)), u[who, None] + normal((g, c))
            rows = v[who, None, :] + scale * normal((g, size, d))
            x[at : at + g * size] = rows.reshape(-1, d)
            y[at : at + g * size] = np.argmax(rows @ W + b[:, None, :], axis=-1).ravel()
            at += g * size
        # A client's rows are independent and identically distributed, so training on the first ones is a
        # random split.
        return Federation.split(counts, x, y, classes=c, train=self.train)

    def _draws(self) -> tuple[np.ndarray, Callable[..., np.ndarray]]:
        """The sizes, and a source of standard normal numbers."""
        if self.rows:
            rng = np.random.default_rng(self.seed)
            return np.full(self.clients, self.rows), partial(rng.standard_normal, dtype=np.float32)
        # NumPy's legacy generator and the order of the draws are those of the released code: the same seed
        # gives the paper's clients, whose few largest largely determine the accuracy over all rows.
        legacy = np.random.RandomState(self.seed)
        counts = (legacy.lognormal(4, 2, self.clients).astype(int) + 50) * 5
        return counts, legacy.standard_normal
