"""Membership inference by a threshold on the loss (Yeom et al., 2018).

A model fits the rows that it was trained on better than others. The attack calls a row a member if the
model's loss on it is below a threshold. Training rows are compared with as many test rows of the same client,
so that the two groups differ in nothing but training.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation

MOST_CLIENTS, MOST_ROWS = 500, 200
"""At most this many clients, and rows of each, are compared."""
FALSE = 0.01
"""The share of false positives at which true ones are reported."""
RESAMPLES = 400
POINTS = 200
"""Points of a ROC curve in the document."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """How well the loss of a model tells training rows from others."""

    members: np.ndarray
    """Losses on training rows."""
    others: np.ndarray
    """Losses on test rows of the same clients, as many."""

    @property
    def auc(self) -> float:
        """The probability that a training row has the lower loss; ties count half."""
        return self._components()[0]

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The interval of the AUC by DeLong's variance."""
        auc, member, other = self._components()
        variance = member.var(ddof=1) / len(member) + other.var(ddof=1) / len(other)
        reach = float(ndtri((1 + level) / 2)) * variance**0.5
        return float(max(0.0, auc - reach)), float(min(1.0, auc + reach))

    def _components(self) -> tuple[float, np.ndarray, np.ndarray]:
        """The AUC, and of every row the share of the rows of the other kind that are ordered rightly."""
        m, n = len(self.members), len(self.others)
        ranks = rankdata(np.concatenate([self.members, self.others]))
        member = 1 - (ranks[:m] - rankdata(self.members)) / n
        other = (ranks[m:] - rankdata(self.others)) / m
        return float(other.mean()), member, other

    def true_positives(self, false: float = FALSE) -> float:
        """The share of training rows below the threshold under which the share `false` of the others is."""
        return _true_positives(self.members, self.others, false)

    def true_positives_interval(self, false: float = FALSE, level: float = 0.95) -> tuple[float, float]:
        """Its interval by resampling rows."""
        rng, found = np.random.default_rng(0), []
        for _ in range(RESAMPLES):
            m, o = (rng.choice(a, len(a)) for a in (self.members, self.others))
            found.append(_true_positives(m, o, false))
        low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The ROC curve: shares of false and of true positives as the threshold rises."""
        losses = np.unique(np.concatenate([self.members, self.others]))
        false, true = (
            np.searchsorted(np.sort(a), losses, side="right") / len(a) for a in (self.others, self.members)
        )
        return np.append(0.0, false), np.append(0.0, true)

    def to_json(self) -> dict[str, Any]:
        """The numbers of the document."""
        false, true = self.curve()
        some = np.unique(np.linspace(0, len(false) - 1, POINTS).astype(int))
        return {
            "rows": len(self.members),
            "auc": self.auc,
            "auc_interval": self.interval(),
            "true_at": FALSE,
            "true_positives": self.true_positives(),
            "true_positives_interval": self.true_positives_interval(),
            "curve": {"false": false[some].tolist(), "true": true[some].tolist()},
        }


def _true_positives(members: np.ndarray, others: np.ndarray, false: float) -> float:
    allowed = int(false * len(others) + 1e-9)
    threshold = np.partition(others, allowed)[allowed] if allowed < len(others) else np.inf
    return float(np.mean(members < threshold))


def compare(
    model: Model, theta: Params, federation: Federation, who: np.ndarray, *, shared: bool, seed: int = 0
) -> Membership | None:
    """The losses of one model on rows of clients `who`, or of a model for each; None without test rows."""
    rng = np.random.default_rng(seed)
    places = np.arange(len(who))
    if len(places) > MOST_CLIENTS:
        places = np.sort(rng.choice(places, MOST_CLIENTS, replace=False))
    starts = {part: federation.rows(part) for part in ("train", "test")}
    rows: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    count = np.zeros(len(places), int)
    for k, i in enumerate(who[places]):
        count[k] = min(MOST_ROWS, *(int(starts[part][1][i]) for part in starts))
        for part, (start, n) in starts.items():
            rows[part].append(start[i] + rng.choice(int(n[i]), count[k], replace=False))
    if not count.sum():
        return None
    found = []
    for part in rows:
        at = np.zeros((len(places), count.max()), int)
        for k, own in enumerate(rows[part]):
            at[k, : len(own)] = own
        losses = np.concatenate(
            [
                np.asarray(
                    _losses(
                        model, theta if shared else theta[places[k : k + 20]], federation.x[at[k : k + 20]],
                        federation.y[at[k : k + 20]], shared=shared,
                    )
                )
                for k in range(0, len(places), 20)
            ]
        )  # fmt: skip
        found.append(losses[np.arange(at.shape[1]) < count[:, None]].astype(np.float64))
    members, others = (np.nan_to_num(losses, nan=np.inf) for losses in found)
    return Membership(members, others)


@partial(jax.jit, static_argnames="shared")
def _losses(model: Model, theta: Params, x: jax.Array, y: jax.Array, *, shared: bool) -> jax.Array:
    """The loss of every row, a line for each client."""

    def of_client(theta: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return model.losses(model.scores(theta, x), y)

    return jax.vmap(of_client, in_axes=(None if shared else 0, 0, 0))(theta, jnp.asarray(x), jnp.asarray(y))
