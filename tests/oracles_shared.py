"""The relatives with one shared model, and the fair ones, transcribed from their papers in plain NumPy.

Imports nothing of the code. Clients use all their rows in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from oracles import Rows, gradient, hessian, loss

Vectors = tuple[Any, ...]


class Reply(NamedTuple):
    """What a client does in a round."""

    upload: Vectors
    own: np.ndarray
    """What it keeps."""
    local: np.ndarray


class Cohort(NamedTuple):
    """Whose uploads the server has."""

    who: Sequence[int]
    rows: Sequence[int]
    total: int
    """N."""

    def mean(self, values: Sequence[Any], *, by_rows: bool = False) -> Any:
        """The mean over the cohort, of equal weights or by training rows."""
        total = 0.0
        for value, rows in zip(values, self.rows, strict=True):
            total = total + value * (rows / sum(self.rows) if by_rows else 1 / len(self.rows))
        return total


class Oracle(NamedTuple):
    """An algorithm as the functions of its paper."""

    begin: Callable[[np.ndarray, int], Vectors]
    """What the server keeps first, from w and N."""
    client: Callable[[Vectors, np.ndarray, Rows], Reply]
    """A client's part of a round, from what the server and the client keep and the client's rows."""
    serve: Callable[[Vectors, list[Vectors], Cohort], Vectors]
    """What the server keeps next, from what it keeps, the uploads and the cohort."""
    personal: Callable[[Vectors, Rows], np.ndarray] | None = None
    shared: Callable[[Vectors], np.ndarray] = lambda server: server[0]


class Outcome(NamedTuple):
    """What there is after some rounds."""

    server: Vectors
    own: np.ndarray
    """What clients keep, a row each."""
    local: np.ndarray
    """The models with which they respond."""
    personal: np.ndarray | None
    shared: np.ndarray


def carried_out(
    oracle: Oracle, w: np.ndarray, clients: Sequence[Rows], cohorts: Sequence[Sequence[int]]
) -> Outcome:
    """All that there is after a round with each of the cohorts. What clients keep is zero at first."""
    server, own = oracle.begin(w, len(clients)), np.zeros((len(clients), len(w)))
    for who in cohorts:
        replies = [oracle.client(server, own[i], clients[i]) for i in who]
        cohort = Cohort(who, [len(clients[i].y) for i in who], len(clients))
        server = oracle.serve(server, [reply.upload for reply in replies], cohort)
        own[list(who)] = [reply.own for reply in replies]
    local = [oracle.client(server, kept, rows).local for kept, rows in zip(own, clients, strict=True)]
    personal = None if oracle.personal is None else np.array([oracle.personal(server, c) for c in clients])
    return Outcome(server, own, np.array(local), personal, oracle.shared(server))


def steps(
    w: np.ndarray,
    rows: Rows,
    *,
    eta: float,
    R: int,
    l2: float,
    extra: Callable[[np.ndarray], Any] = lambda y: 0.0,
) -> np.ndarray:
    """R steps y ← y − η (∇f(y) + extra(y)) from w."""
    y = w
    for _ in range(R):
        y = y - eta * (gradient(y, rows, l2) + extra(y))
    return y


def server_step(
    client: Callable[[np.ndarray, Rows], np.ndarray],
    begin: Callable[[np.ndarray, int], Vectors],
    serve: Callable[[Vectors, np.ndarray], Vectors],
    *,
    by_rows: bool = True,
) -> Oracle:
    """Clients that send w_i − w and keep nothing, and a server that uses only the mean of what they send."""

    def reply(server: Vectors, own: np.ndarray, rows: Rows) -> Reply:
        w_i = client(server[0], rows)
        return Reply((w_i - server[0],), own, w_i)

    def mean(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        return serve(server, cohort.mean([delta for (delta,) in uploads], by_rows=by_rows))

    return Oracle(begin, reply, mean)


def fedprox(*, mu: float, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Li et al., 2020."""

    def client(w: np.ndarray, rows: Rows) -> np.ndarray:
        return steps(w, rows, eta=eta, R=R, l2=l2, extra=lambda y: mu * (y - w))

    return server_step(client, lambda w, N: (w,), lambda server, delta: (server[0] + beta * delta,))


def fedavgm(*, momentum: float, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Hsu et al., 2019: v ← μ v + Δ, w ← w + β v."""

    def client(w: np.ndarray, rows: Rows) -> np.ndarray:
        return steps(w, rows, eta=eta, R=R, l2=l2)

    def serve(server: Vectors, delta: np.ndarray) -> Vectors:
        w, v = server
        v = momentum * v + delta
        return w + beta * v, v

    return server_step(client, lambda w, N: (w, np.zeros_like(w)), serve)


def fedopt(
    kind: str, *, beta: float, beta1: float, beta2: float, tau: float, eta: float, R: int, l2: float
) -> Oracle:
    """Reddi et al., 2021, Algorithm 2, coordinate by coordinate."""

    def client(w: np.ndarray, rows: Rows) -> np.ndarray:
        return steps(w, rows, eta=eta, R=R, l2=l2)

    def serve(server: Vectors, delta: np.ndarray) -> Vectors:
        w, m, v = (part.copy() for part in server)
        for j, d in enumerate(delta):
            m[j] = beta1 * m[j] + (1 - beta1) * d
            if kind == "adagrad":
                v[j] = v[j] + d * d
            elif kind == "adam":
                v[j] = beta2 * v[j] + (1 - beta2) * d * d
            else:
                v[j] = v[j] - (1 - beta2) * d * d * np.sign(v[j] - d * d)
            w[j] = w[j] + beta * m[j] / (np.sqrt(v[j]) + tau)
        return w, m, v

    return server_step(client, lambda w, N: (w, np.zeros_like(w), np.full_like(w, tau**2)), serve)


def scaffold(*, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Karimireddy et al., 2020, Algorithm 1 with option II."""

    def client(server: Vectors, c_i: np.ndarray, rows: Rows) -> Reply:
        w, c = server
        y = steps(w, rows, eta=eta, R=R, l2=l2, extra=lambda _: c - c_i)
        after = c_i - c + (w - y) / (R * eta)
        return Reply((y - w, after - c_i), after, y)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        w, c = server
        share = len(cohort.who) / cohort.total
        return (
            w + beta * cohort.mean([delta for delta, _ in uploads]),
            c + share * cohort.mean([change for _, change in uploads]),
        )

    return Oracle(lambda w, N: (w, np.zeros_like(w)), client, serve)


def feddyn(*, alpha: float, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Acar et al., 2021, Algorithm 1, with R steps for the local minimisation; β = 1 is the paper's."""

    def client(server: Vectors, g_i: np.ndarray, rows: Rows) -> Reply:
        w = server[0]
        y = steps(w, rows, eta=eta, R=R, l2=l2, extra=lambda y: -g_i + alpha * (y - w))
        return Reply((y,), g_i - alpha * (y - w), y)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        w, h = server
        models = [y for (y,) in uploads]
        h = h - alpha / cohort.total * sum(y - w for y in models)
        return (1 - beta) * w + beta * (cohort.mean(models) - h / alpha), h

    return Oracle(lambda w, N: (w, np.zeros_like(w)), client, serve)


def aruba(*, zeta: float, p: float, F: int, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Khodak et al., 2019, Algorithm 2, where a round is a task: means over the cohort."""
    epsilon = eta * zeta

    def begin(w: np.ndarray, N: int) -> Vectors:
        return 1, w, np.full_like(w, epsilon**2), np.full_like(w, zeta**2)

    def descend(server: Vectors, rows: Rows, number: int) -> tuple[np.ndarray, np.ndarray]:
        _, w, b, g = server
        rate, squares = np.sqrt(b / g), np.zeros_like(w)
        for _ in range(number):
            slope = gradient(w, rows, l2)
            w, squares = w - rate * slope, squares + slope**2
        return w, squares

    def client(server: Vectors, own: np.ndarray, rows: Rows) -> Reply:
        w_i, squares = descend(server, rows, R)
        return Reply((w_i - server[1], squares), own, w_i)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        t, w, b, g = server
        b = b + epsilon**2 / (t + 1) ** p + cohort.mean([delta**2 for delta, _ in uploads]) / 2
        g = g + zeta**2 / (t + 1) ** p + cohort.mean([squares for _, squares in uploads])
        return t + 1, w + beta * cohort.mean([delta for delta, _ in uploads]), b, g

    def personal(server: Vectors, rows: Rows) -> np.ndarray:
        return descend(server, rows, F)[0]

    return Oracle(begin, client, serve, personal, lambda server: server[1])


def fedmeta(*, alpha: float, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Chen et al., 2018, Meta-SGD, with R steps on a client: for θ = w − a ∘ ∇f(w),

    ∂f(θ)/∂w = (I − ∇²f(w) diag a) ∇f(θ) and ∂f(θ)/∂a = −∇f(w) ∘ ∇f(θ).
    """

    def client(server: Vectors, own: np.ndarray, rows: Rows) -> Reply:
        w, a = server
        for _ in range(R):
            slope, curved = gradient(w, rows, l2), hessian(w, rows, l2)
            after = gradient(w - a * slope, rows, l2)
            w, a = w - eta * (after - curved @ (a * after)), a + eta * slope * after
        return Reply((w - server[0], a - server[1]), own, w)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        dw, da = (cohort.mean([upload[part] for upload in uploads]) for part in (0, 1))
        return server[0] + beta * dw, server[1] + beta * da

    def personal(server: Vectors, rows: Rows) -> np.ndarray:
        w, a = server
        return w - a * gradient(w, rows, l2)

    return Oracle(lambda w, N: (w, np.full_like(w, alpha)), client, serve, personal)


def onto_simplex(v: np.ndarray) -> np.ndarray:
    """The nearest probabilities, max(v − t, 0), with t from bisection of Σ max(v − t, 0) = 1."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if np.maximum(v - t, 0).sum() > 1 else (low, t)
    return np.maximum(v - (low + high) / 2, 0)


def afl(*, gamma: float, beta: float, eta: float, R: int, l2: float) -> Oracle:
    """Mohri et al., 2019, stochastic AFL with a cohort in place of one client."""

    def client(server: Vectors, own: np.ndarray, rows: Rows) -> Reply:
        w = server[1]
        w_i = steps(w, rows, eta=eta, R=R, l2=l2)
        return Reply((w_i - w, loss(w, rows, l2)), own, w_i)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        t, w, weights, mean = server
        scale, ascent = cohort.total / len(cohort.who), np.zeros(cohort.total)
        for i, (delta, value) in zip(cohort.who, uploads, strict=True):
            w = w + beta * scale * weights[i] * delta
            ascent[i] = scale * value
        return t + 1, w, onto_simplex(weights + gamma * ascent), (t * mean + w) / (t + 1)

    return Oracle(
        lambda w, N: (0, w, np.full(N, 1 / N), w), client, serve, shared=lambda server: server[3]
    )  # fmt: skip


def q_ffl(*, q: float, beta: float, eta: float, R: int, l2: float, by_rows: bool = False) -> Oracle:
    """Li et al., 2020, q-FedAvg, where L is 1/η."""

    def client(server: Vectors, own: np.ndarray, rows: Rows) -> Reply:
        w_i = steps(server[0], rows, eta=eta, R=R, l2=l2)
        return Reply(((server[0] - w_i) / eta, loss(server[0], rows, l2)), own, w_i)

    def serve(server: Vectors, uploads: list[Vectors], cohort: Cohort) -> Vectors:
        deltas = [f**q * g for g, f in uploads]
        h = [q * f ** (q - 1) * (g @ g) + f**q / eta for g, f in uploads]
        step = cohort.mean(deltas, by_rows=by_rows) / cohort.mean(h, by_rows=by_rows)
        return (server[0] - beta * step,)

    return Oracle(lambda w, N: (w,), client, serve)
