"""Rows that one upload gives away.

In a first layer z = W x + b, the gradient of unit k is Σ_j g_kj x_j in W_k and Σ_j g_kj in b_k, where g_kj is
the derivative of row j's loss in z_k. Weights over bias, ΔW_k / Δb_k, is therefore a weighted mean of the
rows that were drawn, and if one row dominates a unit it is that row (Phong et al., 2018). A curious server
computes these quotients from an upload of an honest round. A malicious one first chooses w so that few rows
count: in softmax regression with W = 0 and one class far above the others, rows of that class have no
gradient, and unit c gives the mean of the drawn rows of class c.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation

SATURATED = 60.0
"""A lead in logits after which softmax is 0 or 1 in float32, and stays so whatever the local steps do."""
MOST_CLIENTS = 20
"""Clients whose uploads are attacked."""
PAIRS = 40
"""Units up to which quotients of differences of two units are guesses as well."""
NEAR = 0.1
"""A row counts as given away if a guess is this close to it, as a share of its distance to the client's
mean."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A guess beside the true row that it comes nearest to."""

    client: int
    guess: np.ndarray
    row: np.ndarray
    error: float
    """The distance to the row, as a share of the row's distance to the client's mean."""


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What the uploads of some clients gave away."""

    server: str
    """`curious, first round`, `curious, last round` or `malicious`."""
    pairs: tuple[Pair, ...]
    """The best guess of each row that was the nearest of some guess, closest first."""
    rows: int
    """All training rows of these clients."""
    guesses: int
    chance: float
    """The smallest error of as many guesses drawn from the means and spreads of each client's columns."""
    chance_near: int
    """Rows that those come near."""

    @property
    def near(self) -> int:
        """Rows that a guess comes near."""
        return sum(pair.error <= NEAR for pair in self.pairs)

    @property
    def best(self) -> float:
        """The smallest error; infinite without a guess."""
        return self.pairs[0].error if self.pairs else np.inf

    def to_json(self, federation: Federation, shown: int) -> dict[str, Any]:
        """The numbers of the document, with the best pairs."""
        return {
            "server": self.server,
            "rows": self.rows,
            "guesses": self.guesses,
            "near": self.near,
            "error": self.best if self.pairs else None,
            "chance": self.chance if np.isfinite(self.chance) else None,
            "chance_near": self.chance_near,
            "pairs": [
                {
                    "client": federation.name(pair.client),
                    "error": pair.error,
                    "guess": pair.guess.tolist(),
                    "row": pair.row.tolist(),
                }
                for pair in self.pairs[:shown]
            ],
        }


def first_layer(upload: Any, features: int) -> np.ndarray | None:
    """The change (ΔW, Δb) of a linear first layer in stacked uploads, clients × units × (features + 1).

    None if the upload has no such layer.
    """
    for part in jax.tree.leaves(upload, is_leaf=lambda leaf: isinstance(leaf, Params)):
        if not (isinstance(part, Params) and isinstance(part.tree, list | tuple) and part.tree):
            continue
        first = part.tree[0]
        if not (isinstance(first, tuple | list) and len(first) == 2):
            continue
        W, b = first
        if W is not None and b is not None and W.ndim == 3 and W.shape[2] == features:
            return np.concatenate([np.asarray(W), np.asarray(b)[..., None]], axis=2).astype(np.float64)
    return None


def over_bias(told: np.ndarray) -> np.ndarray:
    """Weights over bias of each sum Σ_j g_j (x_j, 1) that is not empty.

    >>> over_bias(np.array([[2.0, 4.0, 2.0], [1.0, 1.0, 0.0]]))
    array([[1., 2.]])
    """
    told = told[told[:, -1] != 0]
    return told[:, :-1] / told[:, -1:]


def quotients(layer: np.ndarray) -> np.ndarray:
    """Guesses from a change of a first layer: of units, and of differences of two if there are few."""
    told = [layer]
    if 1 < len(layer) <= PAIRS:
        one, other = np.triu_indices(len(layer), 1)
        told.append(layer[one] - layer[other])
    found = over_bias(np.concatenate(told))
    return found[np.isfinite(found).all(axis=1)]


def matched(client: int, guesses: np.ndarray, x: np.ndarray) -> list[Pair]:
    """The best guess for each row that some guess is nearest to; rows at the client's mean do not count."""
    spread = np.linalg.norm(x - x.mean(axis=0), axis=1)
    x, spread = x[spread > 1e-6], spread[spread > 1e-6]
    if not (len(guesses) and len(x)):
        return []
    nearest = np.argmin((x**2).sum(axis=1) - 2 * guesses @ x.T, axis=1)
    best: dict[int, Pair] = {}
    for guess, j in zip(guesses, map(int, nearest), strict=True):
        pair = Pair(client, guess, x[j], float(np.linalg.norm(guess - x[j]) / spread[j]))
        if j not in best or pair.error < best[j].error:
            best[j] = pair
    return list(best.values())


def malicious(simulation: Simulation) -> Params | None:
    """W = 0 with the bias of the most frequent class far above, for softmax regression; else None."""
    model = simulation.model
    if not (isinstance(model, Network) and not model.hidden and model.classes > 1):
        return None
    common = int(np.argmax(simulation.federation.train_labels))
    W = np.zeros((model.outputs, model.features), np.float32)
    b = np.zeros(model.outputs, np.float32)
    b[common] = SATURATED
    return Params([(jax.numpy.asarray(W), jax.numpy.asarray(b))])


def recover(simulation: Simulation, w: Params | None, seed: int = 0) -> list[Recovered]:
    """What a server recovers from one upload of each of some clients: in the first round, after the last if
    the server keeps nothing but w, and with a w of its own choice. Empty if the model's first layer is not
    linear or nothing is sent."""
    f, algorithm = simulation.federation, simulation.algorithm
    if not algorithm.federated:
        return []
    rng = np.random.default_rng(seed)
    who = np.flatnonzero(f.n_train > 1)
    if len(who) > MOST_CLIENTS:
        who = np.sort(rng.choice(who, MOST_CLIENTS, replace=False))
    first = simulation.start()
    states = {"curious, first round": first}
    if isinstance(first.server, Params):
        if w is not None:
            states["curious, last round"] = simulation.start(w)._replace(t=simulation.seed % 2**16 + 1)
        if (crafted := malicious(simulation)) is not None:
            states["malicious"] = simulation.start(crafted)
    start, count = f.rows("train")
    flat = f.x.reshape(len(f.x), -1)
    own = {int(i): flat[start[i] : start[i] + count[i]].astype(np.float64) for i in who}
    found = []
    for server, state in states.items():
        layers = first_layer(simulation.update(state, who).upload, f.features)
        if layers is None:
            return []
        pairs, chance, guesses = list[Pair](), list[Pair](), 0
        for i, layer in zip(map(int, who), layers, strict=True):
            some = quotients(layer)
            pairs += matched(i, some, own[i])
            drawn = own[i].mean(axis=0) + own[i].std(axis=0) * rng.normal(size=some.shape)
            chance += matched(i, drawn, own[i])
            guesses += len(some)
        pairs.sort(key=lambda pair: pair.error)
        errors = [pair.error for pair in chance]
        near, total = sum(error <= NEAR for error in errors), int(count[who].sum())
        found.append(Recovered(server, tuple(pairs), total, guesses, min(errors, default=np.inf), near))
    return found
