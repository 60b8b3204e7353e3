"""Linear models of many clients at once, in NumPy: what clients are compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

WIDTH = 64
"""With more features than this, models use as many principal components."""
FLOOR = 1e-3
"""The share of a uniform guess in every prediction, which bounds its loss."""


class Rows(NamedTuple):
    """Rows of G clients (or groups), padded to the same number n."""

    x: np.ndarray
    """Features: (G, D, n)."""
    y: np.ndarray
    """Labels: (G, n)."""
    range: np.ndarray
    """The label itself, or the range that a quantity is in: (G, n)."""
    there: np.ndarray
    """Which rows are there: (G, n)."""


def projected(parts: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """The rows with at most `WIDTH` centred features of mean square 1, and a feature that is 1."""
    x = np.concatenate([np.swapaxes(part.x, 1, 2)[part.there] for part in parts])
    centre = x.mean(axis=0)
    x = x - centre
    axes = np.eye(x.shape[1], dtype=np.float32)
    if len(axes) > WIDTH:
        axes = np.linalg.eigh((x.T @ x).astype(np.float64))[1][:, -WIDTH:].astype(np.float32)
    axes = axes / max(float(np.sqrt(np.mean((x @ axes) ** 2))), 1e-12)

    def made(part: Rows) -> Rows:
        z = axes.T @ (part.x - centre[:, None])
        return part._replace(x=np.concatenate([z, np.ones_like(z[:, :1])], axis=1) * part.there[:, None])

    return made(parts[0]), made(parts[1])


def merged(rows: Rows, who: np.ndarray | slice = slice(None)) -> Rows:
    """The rows of some clients as those of one."""
    x, *rest = (a[who] for a in rows)
    return Rows(np.swapaxes(x, 0, 1).reshape(1, x.shape[1], -1), *(a.reshape(1, -1) for a in rest))


def scores(z: np.ndarray) -> np.ndarray:
    """The predictions of outputs (G, C, n): probabilities, or quantities if C is 1."""
    if z.shape[1] == 1:
        return z
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def loss(rows: Rows, theta: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """The loss of each row: −log of the label's probability, or ½ (prediction − label)²."""
    p = scores(theta @ rows.x + offset)
    if p.shape[1] == 1:
        return 0.5 * (p[:, 0] - rows.y) ** 2
    p = np.take_along_axis(p, rows.y[:, None].astype(np.int64), axis=1)[:, 0]
    return -np.log((1 - FLOOR) * p + FLOOR / theta.shape[1])


def fit(
    rows: Rows, offset: np.ndarray, first: np.ndarray, anchor: np.ndarray, pull: float, steps: int
) -> np.ndarray:
    """The θ (G, C, D) that minimises each client's mean loss + pull/2 ‖θ − anchor‖², by Nesterov's method."""
    outputs = first.shape[1]
    weight = (rows.there / np.maximum(rows.there.sum(axis=1, keepdims=True), 1)).astype(np.float32)[:, None]
    hot = rows.y[:, None] if outputs == 1 else (np.arange(outputs)[:, None] == rows.y[:, None])
    hot, rows_first = hot.astype(np.float32), np.ascontiguousarray(np.swapaxes(rows.x, 1, 2))
    v, size = np.ones((len(rows.y), 1, rows.x.shape[1]), np.float32), np.float32(1)
    v = v + 0.1 * np.random.default_rng(0).standard_normal(v.shape[1:]).astype(np.float32)
    for _ in range(15):
        v = (weight * (v @ rows.x)) @ rows_first
        size = np.linalg.norm(v, axis=2, keepdims=True)
        v = v / np.maximum(size, 1e-12)
    L = 1.1 * size * (1.0 if outputs == 1 else 0.5) + pull
    q = np.sqrt(pull / L)
    theta = ahead = np.broadcast_to(first, (len(rows.y), *first.shape[1:]))
    for t in range(steps):
        away = weight * (scores(ahead @ rows.x + offset) - hot)
        new = ahead - (away @ rows_first + pull * (ahead - anchor)) / L
        ahead, theta = new + np.minimum((1 - q) / (1 + q), t / (t + 3)) * (new - theta), new
    return theta.astype(np.float32)


def prior(rows: Rows, w: np.ndarray, pseudocount: float, classes: int) -> np.ndarray:
    """What the label prior adds to each client's outputs: log π_i − log π, or its mean residual, shrunk."""
    n = rows.there.sum(axis=1)[:, None]
    if classes == 0:
        residual = np.where(rows.there, rows.y - (w @ rows.x)[:, 0], 0).sum(axis=1, keepdims=True)
        return (residual / (n + pseudocount)).astype(np.float32)[..., None]
    counts = ((np.arange(classes)[:, None] == rows.y[:, None]) & rows.there[:, None]).sum(axis=2)
    pi = (counts.sum(axis=0) + 0.5) / (counts.sum() + 0.5 * classes)
    return np.log((counts + pseudocount * pi) / (n + pseudocount) / pi).astype(np.float32)[..., None]


def own_scale(known: Rows, rows: Rows, spread: float) -> Rows:
    """The rows, minus each client's mean of the known rows and, with `spread`, divided by its deviation."""
    there, n = known.there[:, None], np.maximum(known.there.sum(axis=1), 1)[:, None, None]
    mean = np.where(there, known.x, 0).sum(axis=2, keepdims=True) / n
    away = np.where(there, known.x - mean, 0)
    x = rows.x - mean
    if spread:
        # Two imagined rows with the deviation of all clients keep a client with few rows from dividing by 0.
        whole = (away**2).sum(axis=(0, 2))[:, None] / known.there.sum()
        own = ((away**2).sum(axis=2, keepdims=True) + 2 * whole) / (n + 2)
        x = x * np.sqrt(whole / np.maximum(own, 1e-12))
    return rows._replace(x=x.astype(np.float32))


def of_groups(
    rows: Rows, personal: np.ndarray, w: np.ndarray, offset: np.ndarray, k: int, ridge: float
) -> np.ndarray:
    """Each client's model if there are k, one for each group: first by the directions in which the clients'
    own models deviate from w, then by which model has the least loss on a client's rows."""
    way = (personal - w).reshape(len(personal), -1)
    way = way / np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-12)
    group = fcluster(linkage(way, "ward"), k, "maxclust") - 1
    models = np.repeat(w, k, axis=0)
    for _ in range(2):
        for j in np.unique(group):
            who = np.flatnonzero(group == j)
            added = np.swapaxes(np.repeat(offset[who], rows.y.shape[1], axis=2), 0, 1)
            first = models[j : j + 1]
            models[j] = fit(merged(rows, who), added.reshape(1, len(w[0]), -1), first, 0 * first, ridge, 40)[
                0
            ]
        cost = [np.where(rows.there, loss(rows, model, offset), 0).sum(axis=1) for model in models]
        group = np.argmin(cost, axis=0)
    return models[group]


def deal(rows: Rows, random: np.random.Generator) -> Rows:
    """The rows with features shuffled over all rows whose labels are equal, or in the same range."""
    x = np.swapaxes(rows.x, 1, 2).copy()
    for label in np.unique(rows.range[rows.there]):
        equal = rows.there & (rows.range == label)
        x[equal] = random.permutation(x[equal])
    return rows._replace(x=np.swapaxes(x, 1, 2))
