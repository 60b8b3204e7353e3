"""The shared model with a client's own label frequencies in its logits, by Bayes' rule.

If clients differ only in the frequencies π_i of their labels, client i's model is the shared model with
log π_i − log π added to the biases of its last layer; π are the frequencies that the shared model was trained
under. Only training rows are counted.
"""

from __future__ import annotations

import jax
import numpy as np

from pfedme.algorithms import LabelPrior
from pfedme.algorithms.base import Aggregation
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.metrics import Blocks

SMOOTHING = LabelPrior().smoothing
"""How many imagined rows with the frequencies π are added to a client's."""


def frequencies(federation: Federation) -> np.ndarray:
    """π_i: the share of each label (column) in the training rows of each client (row)."""
    rows = Blocks.cut(*federation.rows("train"))
    cells = rows.owner() * federation.classes + federation.y[rows.rows()]
    counts = np.bincount(cells, minlength=federation.clients * federation.classes)
    shares = counts.reshape(federation.clients, -1) / np.maximum(federation.n_train, 1)[:, None]
    return shares.astype(np.float32)  # so that sums of them in double precision are exact


def prior(federation: Federation, aggregation: Aggregation) -> np.ndarray:
    """π: the mean of the clients' frequencies, with the weights that their uploads have."""
    weights = np.ones(federation.clients) if aggregation == "uniform" else federation.n_train
    return weights @ frequencies(federation).astype(np.float64) / np.sum(weights)


def shift(federation: Federation, pi: np.ndarray) -> np.ndarray:
    """log π_i − log π of each client (row), where π_i is smoothed towards π; 0 for a label of which π is 0.

    It is computed as log(1 + n/(n + s) (π_i − π)/π), which is exactly 0 if π_i is π.
    """
    share = (federation.n_train / (federation.n_train + SMOOTHING))[:, None]
    apart = frequencies(federation) - pi
    return np.log(1 + share * np.divide(apart, pi, out=np.zeros_like(apart), where=pi > 0))


def shifted(w: Params, shift: jax.Array) -> Params:
    """w with `shift` added to the biases of its last layer."""
    return w.layers[-1:].map(lambda a: a + shift.astype(a.dtype) if a.ndim == 1 else a) | w
