"""What the code should compute, transcribed from the papers in plain NumPy (float64). Imports nothing of it.

A point of ℝᵈ is a vector: the weights of one class after those of the other, then the biases. With a one
appended to each x this is the matrix (Wᵀ; b), and the logits of x are (x, 1) · (Wᵀ; b).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """Rows of one client."""

    x: np.ndarray
    y: np.ndarray


def with_one(x: np.ndarray) -> np.ndarray:
    """(x, 1)."""
    return np.concatenate([np.asarray(x, np.float64), np.ones((len(x), 1))], axis=1)


def places(features: int, classes: int) -> np.ndarray:
    """Where the entries of the matrix (Wᵀ; b), row by row, stand in the vector."""
    weights = np.arange(features)[:, None] + features * np.arange(classes)
    return np.concatenate([weights, [features * classes + np.arange(classes)]]).ravel()


def logits(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Softmax regression's logits of rows x."""
    rows = x.shape[1] + 1
    return with_one(x) @ theta[places(x.shape[1], len(theta) // rows)].reshape(rows, -1)


def network_logits(layers: Sequence[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
    """Logits of linear layers (W, b) with max(·, 0) between them."""
    z = np.asarray(x, np.float64)
    for number, (W, b) in enumerate(layers):
        if number:
            z = np.maximum(z, 0)
        z = z @ np.asarray(W, np.float64).T + np.asarray(b, np.float64)
    return z


def row_losses(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """−log softmax(z)[y] of each row."""
    return np.array([np.log(np.sum(np.exp(row - row[label]))) for row, label in zip(z, y, strict=True)])


def softmax(z: np.ndarray) -> np.ndarray:
    """Probabilities of the classes."""
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def loss(theta: np.ndarray, rows: Rows, l2: float) -> float:
    """f(θ) = mean −log softmax(z)[y] + l2/2 ‖θ‖²."""
    return float(row_losses(logits(theta, rows.x), rows.y).mean() + l2 / 2 * theta @ theta)


def row_gradients(theta: np.ndarray, rows: Rows, l2: float) -> np.ndarray:
    """∇f̃(θ; ξ) for each row ξ: (x, 1) ⊗ (p − e_y) + l2 θ."""
    z = logits(theta, rows.x)
    error = softmax(z) - np.eye(z.shape[1])[rows.y]
    slopes = np.empty((len(z), len(theta)))
    slopes[:, places(rows.x.shape[1], z.shape[1])] = np.einsum("nj,nc->njc", with_one(rows.x), error).reshape(
        len(z), -1
    )
    return slopes + l2 * theta


def gradient(theta: np.ndarray, rows: Rows, l2: float) -> np.ndarray:
    """∇f(θ)."""
    return row_gradients(theta, rows, l2).mean(axis=0)


def hessian(theta: np.ndarray, rows: Rows, l2: float) -> np.ndarray:
    """∇²f(θ) = mean of (x, 1)(x, 1)ᵀ ⊗ (diag p − p pᵀ), plus l2 I."""
    terms = [
        np.kron(np.outer(x, x), np.diag(p) - np.outer(p, p))
        for x, p in zip(with_one(rows.x), softmax(logits(theta, rows.x)), strict=True)
    ]
    order = places(rows.x.shape[1], len(theta) // (rows.x.shape[1] + 1))
    full = np.empty_like(terms[0])
    full[np.ix_(order, order)] = np.mean(terms, axis=0)
    return full + l2 * np.eye(len(theta))


def smoothness(rows: Rows, l2: float) -> float:
    """An upper bound of L: the curvature of log-sum-exp is at most 1/2."""
    x = with_one(rows.x)
    return float(np.linalg.eigvalsh(x.T @ x / len(x))[-1] / 2 + l2)


def prox(w: np.ndarray, rows: Rows, lam: float, l2: float) -> np.ndarray:
    """argmin f(θ) + λ/2 ‖θ − w‖², by Newton's method with halved steps; λ = 0 gives f's own minimiser."""

    def h(theta: np.ndarray) -> float:
        return loss(theta, rows, l2) + lam / 2 * float((theta - w) @ (theta - w))

    theta = w.copy()
    for _ in range(100):
        slope = gradient(theta, rows, l2) + lam * (theta - w)
        if np.linalg.norm(slope) < 1e-13:
            return theta
        step = np.linalg.solve(hessian(theta, rows, l2) + lam * np.eye(len(w)), slope)
        size = 1.0
        while np.linalg.norm(slope) > 1e-6 and h(theta - size * step) > h(theta):
            size /= 2
        theta = theta - size * step
    return theta


def envelope(w: np.ndarray, rows: Rows, lam: float, l2: float) -> float:
    """F(w) = min_θ f(θ) + λ/2 ‖θ − w‖²."""
    theta = prox(w, rows, lam, l2)
    return loss(theta, rows, l2) + lam / 2 * float((theta - w) @ (theta - w))


def slope(f: Callable[[np.ndarray], float], w: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """∇f(w) by central differences."""
    return np.array([(f(w + h * e) - f(w - h * e)) / (2 * h) for e in np.eye(len(w))])


def descend(
    grad: Callable[[np.ndarray], np.ndarray],
    w: np.ndarray,
    start: np.ndarray,
    lam: float,
    alpha: float,
    K: int,
) -> np.ndarray:
    """K gradient steps on f(θ) + λ/2 ‖θ − w‖²."""
    theta = start
    for _ in range(K):
        theta = theta - alpha * (grad(theta) + lam * (theta - w))
    return theta


def accelerate(
    grad: Callable[[np.ndarray], np.ndarray],
    w: np.ndarray,
    start: np.ndarray,
    lam: float,
    alpha: float,
    K: int,
) -> np.ndarray:
    """K steps of Nesterov's method with constant momentum, for a step 1/L_h = α and strong convexity λ."""
    theta, y = start, start
    momentum = (1 - np.sqrt(alpha * lam)) / (1 + np.sqrt(alpha * lam))
    for _ in range(K):
        previous, theta = theta, y - alpha * (grad(y) + lam * (y - w))
        y = theta + momentum * (theta - previous)
    return theta


class Answer(NamedTuple):
    """What a pFedMe client has after its local rounds."""

    local: np.ndarray
    personal: np.ndarray
    residual: float
    """‖∇h‖² of the last inner problem at the θ that was found."""


def pfedme_client(
    w: np.ndarray,
    rows: Rows,
    *,
    lam: float,
    eta: float,
    alpha: float,
    R: int,
    K: int,
    l2: float,
    restart: bool,
) -> Answer:
    """Algorithm 1, lines 5 to 9, with all rows as the batch; `restart` begins each inner problem at w_i."""
    w_i, theta, residual = w, w, np.nan
    for _ in range(R):
        theta = descend(lambda p: gradient(p, rows, l2), w_i, w_i if restart else theta, lam, alpha, K)
        rest = gradient(theta, rows, l2) + lam * (theta - w_i)
        residual = float(rest @ rest)
        w_i = w_i - eta * lam * (w_i - theta)
    return Answer(w_i, theta, residual)


def fedavg_client(w: np.ndarray, rows: Rows, *, eta: float, R: int, l2: float) -> np.ndarray:
    """R gradient steps on the client's loss."""
    for _ in range(R):
        w = w - eta * gradient(w, rows, l2)
    return w


def meta_gradient(w: np.ndarray, rows: Rows, alpha: float, l2: float) -> np.ndarray:
    """∇F(w) for F(w) = f(w − α ∇f(w)), which is (I − α ∇²f(w)) ∇f(w − α ∇f(w))."""
    v = gradient(w - alpha * gradient(w, rows, l2), rows, l2)
    return v - alpha * hessian(w, rows, l2) @ v


def per_fedavg_client(
    w: np.ndarray, rows: Rows, *, alpha: float, eta: float, R: int, l2: float, first_order: bool = False
) -> np.ndarray:
    """R steps along the meta gradient, or along it without its Hessian."""
    for _ in range(R):
        if first_order:
            w = w - eta * gradient(w - alpha * gradient(w, rows, l2), rows, l2)
        else:
            w = w - eta * meta_gradient(w, rows, alpha, l2)
    return w


def server(
    w: np.ndarray, uploads: Sequence[np.ndarray], counts: Sequence[int], *, beta: float, by_samples: bool
) -> np.ndarray:
    """Algorithm 1, line 12: (1 − β) w + β Σ p_i w_i."""
    total = np.zeros_like(w)
    for upload, count in zip(uploads, counts, strict=True):
        total = total + upload * (count / sum(counts) if by_samples else 1 / len(uploads))
    return (1 - beta) * w + beta * total


def rounds(
    w: np.ndarray,
    clients: Sequence[Rows],
    cohorts: Sequence[Sequence[int]],
    client: Callable[[np.ndarray, Rows], np.ndarray],
    *,
    beta: float,
    by_samples: bool,
) -> list[np.ndarray]:
    """w before the first round and after each, when a round's cohort uploads client(w, rows)."""
    ws = [w]
    for cohort in cohorts:
        uploads = [client(ws[-1], clients[i]) for i in cohort]
        counts = [len(clients[i].y) for i in cohort]
        ws.append(server(ws[-1], uploads, counts, beta=beta, by_samples=by_samples))
    return ws


def score(z: np.ndarray, y: np.ndarray) -> tuple[int, float]:
    """How many rows have their largest logit at their label, and the sum of their losses."""
    correct = sum(int(np.argmax(row) == label) for row, label in zip(z, y, strict=True))
    return correct, float(row_losses(z, y).sum()) if len(y) else 0.0
