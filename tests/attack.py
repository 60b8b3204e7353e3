"""What a malicious, or merely curious, server can read out of a client's uploads: attacks on our own client.

Every attack chooses w (and, beyond the client's limits, settings) and reads rows out of what comes back. It
reaches the client through a function `respond(ask, w)` alone, and sees no row otherwise. It may know what a
server knows: how many training rows there are, and that columns are standardised.

`python tests/attack.py` prints the table of what was recovered, and `python tests/attack.py --noise` how
close the best attack comes to a row with and without noise.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import KDTree
from scipy.stats import norm

from pfedme.algorithms import Algorithm, FedAvg, PerFedAvg, PFedMe
from pfedme.audits.rows import over_bias
from pfedme.core.models import DNN, MLR, Network
from pfedme.core.problem import Problem
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.data.fitting import Moments, Told
from pfedme.data.schema import Column, Schema
from pfedme.deploy.messages import Refusal
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy
from pfedme.engine.simulate import Simulation
from pfedme.privacy.rows import plan_rows
from pfedme.privacy.units import Rows as RowPrivacy

ID = 7
"""The client's id, which the server hands out."""
SATURATED = 60.0
"""A lead in logits after which softmax is 0 or 1 in float32, and stays so whatever R steps do."""
LARGE = 1e4
"""A bias beside which standardised labels do not count."""


class Ask(NamedTuple):
    """What a server asks for beside w."""

    algorithm: Algorithm
    model: Network
    round: int = 0


Respond = Callable[[Ask, np.ndarray], np.ndarray]
"""A client: the upload with which it answers w."""


class Rows(NamedTuple):
    """Training rows, standardised, and their labels."""

    x: np.ndarray
    y: np.ndarray


# The client under attack, and the score.


def victim(rows: Rows, seed: int, private: RowPrivacy | None = None, rounds: int = 1) -> Respond:
    """A client with these training rows that draws its batches from (seed, round, id), as `Client` does.

    A seed that the server does not know stands for batches drawn from a secret of the client's own. That
    an attack fails then says nothing of attacks that do without the batches, for which see `traps`. With
    `private`, it adds the noise with which so many rounds are private.
    """
    one = np.ones(1, np.int64)
    simulations: dict[tuple[Algorithm, Network], tuple[Simulation, Callable[[np.ndarray], Params]]] = {}

    def respond(ask: Ask, w: np.ndarray) -> np.ndarray:
        key = ask.algorithm, ask.model
        if key not in simulations:
            simulations.clear()
            federation = Federation(
                x=rows.x, y=rows.y, n_train=len(rows.x) * one, n_test=0 * one, classes=ask.model.classes,
                ids=np.array([ID], np.uint32),
            )  # fmt: skip
            like = jax.jit(layout(ask.model).like)
            plan = private and plan_rows(private, ask.algorithm, federation.n_train, rounds * one, 0 * one)
            simulations[key] = Simulation(*key, federation, cohort=1, seed=seed, privacy=plan), like
        simulation, like = simulations[key]
        start = simulation.start(like(w.astype(np.float32)))
        update = simulation.update(start._replace(t=ask.round), np.zeros(1, int))
        return w + np.asarray(update.upload.ravel(1)[0])

    return respond


def layout(model: Network) -> Params:
    """The layers of a model, without numbers."""
    return jax.eval_shape(model.init, jax.random.key(0))


def patients(n: int, *, features: int = 4, classes: int = 2, seed: int = 0, rare: float = 0.5) -> Rows:
    """Synthetic training rows: numbers that depend on each other, standardised, some of them skewed.

    The label is a class by a linear risk with noise, or with 0 classes the risk itself; of two classes the
    share `rare` is of class 1.
    """
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, features)) @ (np.eye(features) + 0.4 * rng.normal(size=(features, features)))
    z[:, ::2] = np.exp(0.4 * z[:, ::2])
    x = ((z - z.mean(0)) / z.std(0)).astype(np.float32)
    risk = x @ rng.normal(size=features) + rng.normal(size=n)
    if classes == 0:
        return Rows(x, ((risk - risk.mean()) / risk.std()).astype(np.float32))
    edges = np.quantile(risk, [1 - rare] if classes == 2 else np.arange(1, classes) / classes)
    return Rows(x, np.searchsorted(edges, risk).astype(np.int32))


class Score(NamedTuple):
    """How many true rows were recovered, each counted once, and how many guesses that took."""

    near: int
    """All features within 0.05 standard deviations."""
    exact: int
    """Within 0.001."""
    guesses: int
    """All of them; a row that is found in several rounds is guessed several times."""


def score(guesses: np.ndarray, rows: Rows) -> Score:
    """Compares guesses with the true rows."""
    guesses = guesses[np.isfinite(guesses).all(axis=1)]
    if not len(guesses):
        return Score(0, 0, 0)
    away, which = map(np.asarray, KDTree(rows.x).query(guesses, p=np.inf))
    near, exact = (len(np.unique(which[away <= within])) for within in (0.05, 0.001))
    return Score(near, exact, len(guesses))


# What a server knows about how an upload comes about.


def drawn(algorithm: Algorithm, seed: int, n: int, rounds: Sequence[int]) -> np.ndarray:
    """Which rows a client's steps use, rounds × R × B: a function of seed, round, id and how many rows n."""
    zero, count = jnp.int32(0), jnp.int32(n)
    several = isinstance(algorithm, PerFedAvg)
    shape = (algorithm.R + 1, 3, algorithm.B) if several else (algorithm.R, algorithm.B)

    def of_round(t: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), ID)
        none = jnp.zeros(0)
        problem = Problem(Network(features=1), none, none, zero, count, zero, t, n, algorithm.batches)
        rows = problem.draw(key, *shape)
        return rows[:-1, 1] if several else rows

    return np.asarray(jax.vmap(of_round)(jnp.asarray(rounds, jnp.uint32)))


def effects(algorithm: Algorithm, l2: float) -> tuple[float, np.ndarray]:
    """(k, a) of w_R = k w − Σ_r a_r g_r, where g_r, the gradient of step r, depends on its batch alone.

    FedAvg: a_r = η (1 − η l2)^(R−1−r) and k = (1 − η l2)^R. pFedMe: by its recursion for w and θ, which is
    linear then.
    """
    one = np.eye(algorithm.R + 1)
    w = theta = one[-1]
    for r in range(algorithm.R):
        if isinstance(algorithm, PFedMe):
            for _ in range(algorithm.K):
                theta = theta - algorithm.alpha * (one[r] + l2 * theta + algorithm.lam * (theta - w))
            w = w - algorithm.eta * algorithm.lam * (w - theta)
        else:
            w = w - algorithm.eta * (one[r] + l2 * w)
    return w[-1], -w[:-1]


def shares(algorithm: Algorithm, l2: float, seed: int, n: int, rounds: Sequence[int]) -> np.ndarray:
    """M, rounds × n: how much row j weighs in the upload of round t, M_tj = Σ_r a_r #(j in batch r) / B."""
    a = effects(algorithm, l2)[1]
    rows = drawn(algorithm, seed, n, rounds)
    flat = rows.reshape(len(rows), -1) + n * np.arange(len(rows))[:, None]
    weight = np.broadcast_to(a[:, None] / rows.shape[2], rows.shape).ravel()
    return np.bincount(flat.ravel(), weight, minlength=n * len(rows)).reshape(len(rows), n)


# Mini-batches that the server knows: linear algebra.


def linear_system(
    respond: Respond, algorithm: Algorithm, model: Network, seed: int, n: int, rounds: int
) -> np.ndarray:
    """Rows by linear algebra from uploads that sum over all of a round's rows, with no layer to trap them.

    In softmax regression with W = 0 and b at a class s that nobody has far above the others, p is the s-th
    unit vector for every row and at every step, and class c ≠ s tells Σ_j M_tj 1[y_j = c] (x_j, 1). With two
    classes w = 0 does: p = ½, and class 1 tells Σ_j M_tj (½ − 1[y_j = 1]) (x_j, 1), up to O(η R). In ridge
    regression W = 0 and b = β, very large, tells Σ_j M_tj (β − y_j) (x_j, 1), up to O(η R).
    M is known, so that M U = D has one solution U as soon as there are n rounds.
    """
    start = np.zeros((model.outputs, model.features + 1))
    if model.classes == 0:
        start[:, -1] = 100 * LARGE
    elif model.classes > 2:
        start[-1, -1] = SATURATED
    asks = [Ask(algorithm, model, t) for t in range(rounds)]
    told = np.stack([change(respond, ask, joined(start)) for ask in asks])
    M = shares(algorithm, model.l2, seed, n, range(rounds))
    if model.classes == 0:
        return np.linalg.lstsq(M, told[:, 0, :-1] / start[0, -1], rcond=None)[0]
    if model.classes == 2:
        U = np.linalg.lstsq(M, told[:, 1], rcond=None)[0]
        return U[:, :-1] / np.where(np.abs(U[:, -1:]) > 0.1, U[:, -1:], np.nan)
    return -np.linalg.lstsq(M, told[:, :-1, :-1].sum(axis=1), rcond=None)[0]


def change(respond: Respond, ask: Ask, w: np.ndarray) -> np.ndarray:
    """How far the first layer is from what it would be without any row, k w − w_R: units × (features + 1)."""
    kept = effects(ask.algorithm, ask.model.l2)[0]
    return kept * split(w, ask.model) - split(respond(ask, w), ask.model)


def joined(layer: np.ndarray) -> np.ndarray:
    """A layer (W, b), with b as its last column, in the order of `Params.ravel`."""
    return np.concatenate([layer[:, :-1].ravel(), layer[:, -1]]).astype(np.float32)


def split(vector: np.ndarray, model: Network) -> np.ndarray:
    """The inverse of `joined` for a model's first layer."""
    units = model.hidden[0] if model.hidden else model.outputs
    size = units * model.features
    W, b = vector[:size].reshape(units, -1), vector[size : size + units]
    return np.column_stack([W, b]).astype(np.float64)


# Traps: units, or classes, that react to few rows each.


def slices(v: np.ndarray, edges: np.ndarray, sharp: float) -> np.ndarray:
    """A layer whose largest output tells between which edges v·x lies: lines that cross at the edges.

    Line i is sharp (i v·x − Σ_(k<i) edge_k), up to what all have in common, so that i wins where
    edge_(i−1) < v·x < edge_i.
    """
    place = np.arange(len(edges) + 1) - len(edges) / 2
    offset = np.concatenate([[0.0], np.cumsum(edges)])
    return sharp * np.column_stack([np.outer(place, v), offset.mean() - offset])


def alone(told: np.ndarray, algorithm: Algorithm, l2: float, n: int) -> np.ndarray:
    """The rows x_j among sums Σ_j M_j (x_j, 1), a sum a line, that are of one row drawn once.

    What belongs to x is divided by that of the a_r/B (or of a full batch by Σ_r a_r/n) to which the last
    number comes nearest; sums for which none is near are of no row, or of several.
    """
    a = effects(algorithm, l2)[1]
    one = a / algorithm.B if algorithm.B else np.array([a.sum() / n])
    off = np.abs(told[:, -1:] / one - 1)
    near = off.min(axis=1) < 0.25
    return told[near, :-1] / one[off.argmin(axis=1)][near, None]


class Directions:
    """Where to look in each round: a direction, and edges between which few drawn rows are to be expected.

    Columns are standardised, so that v·x is taken to be normal at first; as soon as there are rows, their
    quantiles are used.
    """

    def __init__(self, features: int, seed: int) -> None:
        self.rng, self.features = np.random.default_rng(seed), features
        self.found: list[np.ndarray] = []

    def next(self, edges: int, mass: float) -> tuple[np.ndarray, np.ndarray]:
        """A random unit vector v, and edges with the share `mass` of all rows between the first and last."""
        v = self.rng.normal(size=self.features)
        v /= np.linalg.norm(v)
        first = self.rng.uniform(0, 1 - mass)
        levels = np.clip(np.linspace(first, first + mass, edges), 1e-4, 1 - 1e-4)
        known = np.concatenate([np.zeros((0, self.features)), *self.found]) @ v
        if len(known) < 50:
            return v, norm.ppf(levels)
        smooth = known[:, None] + 0.15 * norm.ppf((np.arange(9) + 0.5) / 9)
        return v, np.quantile(smooth, levels)


def drawn_rows(algorithm: Algorithm, n: int) -> float:
    """How many different rows a round draws, on average: n (1 − (1 − 1/n)^(R B))."""
    return n * (1 - (1 - 1 / n) ** (algorithm.R * algorithm.B)) if algorithm.B else n


def sliced_classes(
    respond: Respond, algorithm: Algorithm, model: Network, n: int, rounds: int, own: int = 2
) -> np.ndarray:
    """Rows that are alone between two hyperplanes, from softmax regression with classes that nobody has.

    `slices` gives the bulk of the rows to the client's `own` classes on both sides, and a thin slice to each
    other class c. Its gradient is Σ_j in c (x_j, 1): with one row there, weights over bias are the row.
    """
    look, order = Directions(model.features, 0), [0, *range(own, model.classes), 1]
    thin = model.classes - own
    mass = min(0.9, thin / drawn_rows(algorithm, n))
    for t in range(rounds):
        v, edges = look.next(thin + 1, mass)
        layer = np.zeros((model.classes, model.features + 1))
        layer[order] = slices(v, edges, 20 / np.diff(edges).min().clip(5e-3))
        told = change(respond, Ask(algorithm, model, t), joined(layer))[own:]
        look.found.append(alone(told, algorithm, model.l2, n))
    return np.concatenate(look.found)


class Trap(NamedTuple):
    """How the thresholds of `trapped` are laid."""

    epsilon: float
    """ε: small, it keeps the second layer as it is, and large the thresholds; small steps allow for both."""
    lever: float = 1.0
    """ℓ: long, it lifts rows above any noise that does not come with a bound on the gradients of rows."""
    lead: float = SATURATED
    """How far the bias of class s is above the others."""

    def w(self, model: Network, v: np.ndarray, edges: np.ndarray, s: int) -> np.ndarray:
        """The parameters of a model with one hidden layer."""
        first = self.epsilon * np.column_stack([np.tile(v, (len(edges), 1)), -edges])
        second = np.zeros((model.outputs, len(edges) + 1))
        second[s] = self.lever
        second[s, -1] = self.lead if model.classes else LARGE
        return np.concatenate([joined(first), joined(second)])


def trapped(
    respond: Respond, algorithm: Algorithm, model: Network, n: int, rounds: int, trap: Trap
) -> np.ndarray:
    """Rows that are alone between the thresholds of two neighbouring hidden units.

    Unit k is relu(ε (v·x − t_k)), and leads with weight ℓ to a class s whose bias is far above: rows of s
    have no gradient, any other row has ℓ (x_j, 1) in every unit whose threshold it exceeds. Unit k less unit
    k + 1 is ℓ Σ_(t_k < v·x_j < t_(k+1)) (x_j, 1). The classes take turns to be s. In a regression the bias of
    the output is β, so large that the gradient of all rows is about β ℓ (x_j, 1).
    """
    units, look = model.hidden[0], Directions(model.features, 0)
    mass = min(0.98, units * max(1, model.classes) / drawn_rows(algorithm, n))
    for t in range(rounds):
        v, edges = look.next(units, mass)
        w = trap.w(model, v, edges, t % model.outputs)
        told = change(respond, Ask(algorithm, model, t), w) / (trap.lever * (1 if model.classes else LARGE))
        told = told - np.vstack([told[1:], np.zeros(model.features + 1)])
        look.found.append(alone(told, algorithm, model.l2, n))
    return np.concatenate(look.found)


def rare_class(respond: Respond, algorithm: Algorithm, model: Network, n: int, rounds: int) -> np.ndarray:
    """Rows of a class of which few are drawn, from softmax regression with the classes that there are.

    W = 0, and the bias of the common class 0 is far above: its rows have no gradient, and class 1 tells
    −Σ_j M_j 1[y_j = 1] (x_j, 1). With one such row in a round's batches, weights over bias are the row.
    """
    layer = np.zeros((model.classes, model.features + 1))
    layer[0, -1] = SATURATED
    told = np.stack([change(respond, Ask(algorithm, model, t), joined(layer))[1] for t in range(rounds)])
    return alone(-told, algorithm, model.l2, n)


# Half spaces: two classes of which the client has both, and no hidden layer.

STEEP = 1e7
"""The length of W beside which no step counts, and with which p is 0 or 1 at every row."""


def beyond(v: np.ndarray, edge: float, steep: float = STEEP) -> np.ndarray:
    """w that says class 1 where v·x > edge, and class 0 elsewhere.

    Class 0 has only zeros, so that what its line becomes is as exact as float32 makes small numbers, however
    steep class 1 is. It tells −Σ_j M_j (1[v·x_j > edge] − y_j) (x_j, 1), a sum over rows on the wrong side.
    """
    return joined(np.vstack([np.zeros(len(v) + 1), steep * np.append(v, -edge)]))


def halving(respond: Respond, algorithm: Algorithm, model: Network, n: int, rounds: int) -> np.ndarray:
    """All rows from full batches, about one an upload.

    With all rows in every step M is the same for all (and nearly so with batches in which every row is drawn
    very often). What `beyond` tells at an edge, less what it tells below all rows, is the sum of (x_j, 1)
    over the rows below the edge, whatever their labels. Slices with several rows are cut at their mean, those
    with fewest first.
    """
    asks = (Ask(algorithm, model, t) for t in range(rounds))
    share = effects(algorithm, model.l2)[1].sum() / n
    v = np.eye(model.features)[1]

    def below(edge: float) -> np.ndarray:
        return change(respond, next(asks), beyond(v, edge))[0] / share

    first, last = below(-1e3), below(1e3)
    slices, found = [(first, last)], list[np.ndarray]()
    for _ in range(rounds - 2):
        if not slices:
            break
        low, high = slices.pop(int(np.argmin([high[-1] - low[-1] for low, high in slices])))
        whole = high - low
        middle = below(whole[1] / whole[-1])
        for part in ((low, middle), (middle, high)):
            count = round(part[1][-1] - part[0][-1])
            if count == 1:
                found.append((part[1] - part[0])[:-1])
            elif 1 < count < round(whole[-1]):  # or else two rows are too close
                slices.append(part)
    return np.reshape(found, (-1, model.features))


def wrong_side(
    respond: Respond,
    algorithm: Algorithm,
    model: Network,
    rounds: int,
    learn: int = 40,
    spread: float = 0.1,
    steep: float = STEEP,
) -> np.ndarray:
    """Rows that are alone on the wrong side of a hyperplane, among those that a round draws.

    The first rounds train, to find a hyperplane with few rows on its wrong side; the others move it at
    random. Every upload makes a guess, weights over bias, which is right if there was one such row.
    """
    rng, d = np.random.default_rng(0), model.features
    w, sum_w = np.zeros(2 * (d + 1), np.float32), np.zeros(2 * (d + 1))
    learn = min(learn, rounds - 1)
    for t in range(learn):
        w = respond(Ask(algorithm, model, t), w)
        sum_w += w * (t >= learn // 2)
    line = np.append(np.ones(d), 0.0) if learn == 0 else np.diff(split(sum_w, model), axis=0)[0]
    line /= np.linalg.norm(line[:-1])
    sums = []
    for t in range(learn, rounds):
        moved = line + spread * np.append(rng.normal(size=d) / d**0.5, rng.normal() / 2)
        sums.append(change(respond, Ask(algorithm, model, t), beyond(moved[:-1], -moved[-1], steep))[0])
    return over_bias(np.array(sums))


def outermost(respond: Respond, algorithm: Algorithm, model: Network, n: int, rounds: int) -> np.ndarray:
    """Rows that are alone beyond an edge far out, of a client whose rows are all of class 0."""
    rng, sums = np.random.default_rng(0), list[np.ndarray]()
    edge = float(norm.ppf(1 - 1 / drawn_rows(algorithm, n)))
    for t in range(rounds):
        v = rng.normal(size=model.features)
        told = change(respond, Ask(algorithm, model, t), beyond(v / np.linalg.norm(v), edge))[0]
        rows = abs(told[-1]) * algorithm.B / algorithm.eta
        edge += 0.1 if rows > 1.5 else -0.1 if rows < 0.5 else 0.0
        sums.append(told)
    return over_bias(np.array(sums))


def curved(respond: Respond, algorithm: PerFedAvg, model: Network, rounds: int, stretch: float) -> np.ndarray:
    """Rows that are alone near a hyperplane, whatever their labels, from Per-FedAvg.

    Its Hessian is Σ_j p_j (1 − p_j) (x_j, 1)(x_j, 1)ᵀ, and only rows near the hyperplane have a part in it.
    If the agreement gives all columns scales that are `stretch` times too small, it outweighs the gradient.
    """
    rng, sums = np.random.default_rng(0), list[np.ndarray]()
    for t in range(rounds):
        v = rng.normal(size=model.features)
        edge = stretch * float(norm.ppf(rng.uniform(0.02, 0.98)))
        w = beyond(v / np.linalg.norm(v), edge, 300 / stretch)
        sums.append(change(respond, Ask(algorithm, model, t), w)[0])
    return over_bias(np.array(sums)) / stretch


def large_weights(respond: Respond, algorithm: Algorithm, model: Network, rounds: int) -> np.ndarray:
    """Weights over bias of a quantity's model, with W large along a direction that changes."""
    rng, sums = np.random.default_rng(0), list[np.ndarray]()
    for t in range(rounds):
        w = LARGE * rng.normal(size=(1, model.features + 1))
        sums.append(change(respond, Ask(algorithm, model, t), joined(w))[0])
    return over_bias(np.array(sums))


# Beyond the client's limits.


def invented_classes(
    respond: Respond, n: int, own: int, features: int, parts: int, algorithm: Algorithm
) -> np.ndarray:
    """Rows that have a class to themselves, among as many classes as the cells of a grid.

    The logit of cell (i, k, ...) is the sum of a line of each column's `slices`, so that p is 1 at the cell
    in which a row lies and 0 elsewhere, and cell c tells Σ_j in c (x_j, 1): with one row there, weights over
    bias are the row. One upload for each column, with a class for each of 200 slices, tells its quantiles.
    """
    model = Network(features=features, classes=own + 201)
    all_rows = FedAvg(eta=1e3, R=1, B=0)
    fine, lines = np.linspace(-4, 8, 200), []
    for column in np.eye(features):
        layer = _behind(slices(column, fine, 300.0), own)
        count = change(respond, Ask(all_rows, model), joined(layer))[own:, -1].clip(0)
        edges = np.interp(np.arange(1, parts) / parts, np.cumsum(count)[:-1] / count.sum(), fine)
        lines.append(slices(column, edges, 1e3))
    grid = np.array([sum(cell) for cell in itertools.product(*lines)])
    model = Network(features=features, classes=own + len(grid))
    told = change(respond, Ask(algorithm, model), joined(_behind(grid, own)))[own:]
    told = told[told[:, -1] > 0.4 * algorithm.eta / (algorithm.B or n)]
    return told[:, :-1] / told[:, -1:]


def _behind(layer: np.ndarray, own: int) -> np.ndarray:
    """A layer with the client's own classes before its classes, where no row ever gets to."""
    first = np.zeros((own, layer.shape[1]))
    first[:, -1] = -1e9
    return np.vstack([first, layer])


def one_row(respond: Respond, model: Network, rounds: int) -> np.ndarray:
    """The row of an upload with R = B = 1: weights over bias of any class, (p − y) x / (p − y)."""
    asks = [Ask(FedAvg(R=1, B=1), model, t) for t in range(rounds)]
    told = np.stack(
        [change(respond, ask, joined(np.zeros((model.outputs, model.features + 1))))[0] for ask in asks]
    )
    return told[:, :-1] / told[:, -1:]


# A curious server: nothing is malicious, neither w nor the settings.


Seen = list[tuple[np.ndarray, np.ndarray]]
"""w and the client's upload, of each round."""


def honest_run(
    respond: Respond, others: Sequence[Respond], algorithm: Algorithm, model: Network, rounds: int
) -> Seen:
    """What a server sees of a client in a training in which server and clients do as they should."""
    w = np.asarray(model.init(jax.random.key(0)).ravel())
    seen = []
    for t in range(rounds):
        uploads = [client(Ask(algorithm, model, t), w) for client in (respond, *others)]
        seen.append((w, uploads[0]))
        w = np.mean(uploads, axis=0)
    return seen


@record
class Relaxed(Network):
    """A network whose labels are numbers: of a classifier, how far a row is of each class but the first."""

    def losses(self, scores: jax.Array, y: jax.Array) -> jax.Array:
        """ℓ(z, y), linear in y for a classifier."""
        if self.classes == 0:
            return super().losses(scores, y[:, 0])
        log_p = jax.nn.log_softmax(scores, axis=0)
        return -log_p[0] - jnp.sum(y.T * (log_p[1:] - log_p[0]), axis=0)


def inverted(seen: Seen, algorithm: Algorithm, model: Network, seed: int, n: int) -> np.ndarray:
    """Rows by least squares: those with which the client's own program would have made these uploads.

    Minimises Σ_t ‖upload_t(x, y) − upload_t‖² over n rows x and relaxed labels y by Levenberg's and
    Marquardt's method, from noise. upload_t(x, y) is `client_update` with w_t and with the key that the
    server takes for the client's. An upload of softmax regression has (C − 1)(d + 1) numbers that do not
    follow from the others, and a row d + C − 1 that are unknown.
    """
    fields = {name: getattr(model, name) for name in ("features", "classes", "hidden", "l2")}
    relaxed, d = Relaxed(**fields), model.features
    with jax.enable_x64(True):
        like = layout(model)
        ws, uploads = (jnp.asarray(np.array(a, np.float64)) for a in zip(*seen, strict=True))
        zero = jnp.int32(0)

        scale = float(jnp.std(uploads - ws)) / 10

        def away(z: jax.Array, t: jax.Array, w: jax.Array, upload: jax.Array) -> jax.Array:
            rows = z.reshape(n, -1)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), t), ID)
            problem = Problem(
                relaxed, rows[:, :d], rows[:, d:], zero, jnp.int32(n), zero, t, n, algorithm.batches
            )
            sent = algorithm.client_update(key, problem, like.like(w), ()).upload.ravel()
            return (w + sent - upload) / scale

        rounds = jnp.arange(len(ws), dtype=jnp.uint32)

        @jax.jit
        def f(z: jax.Array) -> jax.Array:
            return jax.vmap(partial(away, z))(rounds, ws, uploads).ravel()

        @jax.jit
        def jacobian(z: jax.Array) -> jax.Array:
            # Backwards: an upload has fewer numbers than the rows.
            of_round = jax.jacrev(away)
            return jax.vmap(partial(of_round, z))(rounds, ws, uploads).reshape(-1, len(z))

        rng = np.random.default_rng(0)
        labels = np.full((n, max(1, model.classes - 1)), 1 / model.classes if model.classes else 0.0)
        first = np.hstack([0.3 * rng.normal(size=(n, d)), labels])
        z = marquardt(f, jacobian, first.ravel())
    return z.reshape(n, -1)[:, :d]


def marquardt(f: Callable, jacobian: Callable, z: np.ndarray, steps: int = 25) -> np.ndarray:
    """argmin ‖f(z)‖² by steps −(JᵀJ + μ I)⁻¹ Jᵀ f, with μ smaller after a good step, larger after a bad."""
    damping, r = 1.0, np.asarray(f(z))
    for _ in range(steps):
        J = np.asarray(jacobian(z))
        H, g = J.T @ J, J.T @ r
        while damping < 1e8:
            there = z - np.linalg.solve(H + damping * np.eye(len(z)), g)
            r_there = np.asarray(f(there))
            if r_there @ r_there < r @ r:
                break
            damping *= 4
        else:
            break
        done = r_there @ r_there > 0.99 * (r @ r)
        z, r, damping = there, r_there, max(damping / 5, 1e-12)
        if done and damping < 1e-3:
            break
    return z


# The table.

KNOWN, SECRET = 5, 6
"""The seed that the server knows, and one that it does not."""
LIMITS = {
    "the model": "model",
    "at random": "cycled batches",
    "plan's R ": "R",
    "plan's B ": "B",
    "plan's rounds": "rounds",
    "plan's l2": "l2",
    "more often": "draws",
    "plan's e": "step size",
    "plan's alpha": "step size",
    "classes": "classes",
    "training rows": "rows",
    "scaling": "scaling",
}
"""What a refusal says, and the limit that it is about."""


def limit(ask: Ask, rows: Rows, uploads: int, *, known: bool = False, stretch: float = 1.0) -> str:
    """The limit by which a client with the default policy refuses; nothing if it does not."""
    policy = Policy(approve="any")
    model = DNN(hidden=ask.model.hidden) if ask.model.hidden else MLR(l2=ask.model.l2)
    plan = Plan(algorithm=ask.algorithm, model=model, rounds=max(1, uploads)).checked()
    names = [f"x{k}" for k in range(rows.x.shape[1])]
    numbers = {name: Moments.of(x.astype(float), 5) for name, x in zip(names, rows.x.T, strict=True)}
    columns = tuple(Column(name, "number", 0.0, 1 / stretch) for name in names)
    if ask.model.classes:
        told = Told("y", "classification", False, numbers, {}, tuple(map(str, np.unique(rows.y))))
        labels = tuple(map(str, range(ask.model.classes)))
        schema = Schema(columns, "y", None, "classification", labels)
    else:
        told = Told("y", "regression", False, numbers, {}, quantity=Moments.of(rows.y.astype(float), 5))
        schema = Schema(columns, "y", None, "regression")
    try:
        policy.check_schema(schema, told)
        policy.check_plan(plan)
        policy.check_table(len(rows.x), names, plan)
    except Refusal as refusal:
        return next(name for words, name in LIMITS.items() if words in str(refusal))
    return "secret batches" if known and policy.batch_key == "secret" else ""


class Line(NamedTuple):
    """A line of the table."""

    setting: str
    limit: str
    score: Score
    rows: int
    uploads: int

    def __str__(self) -> str:
        near, exact, guesses = self.score
        within = f"no: {self.limit}" if self.limit else "yes"
        cells = (self.setting, within, f"{near:,} of {self.rows:,}", exact, guesses, self.uploads)
        return f"| {' | '.join(c if isinstance(c, str) else f'{c:,}' for c in cells)} |"


TWO = Network(features=4, classes=2)
WEAKEST = FedAvg(eta=1.0, R=10, B=16)
"""What the default limits allow, with fewest draws in a round."""
FULL = FedAvg(eta=1.0, R=10, B=0)


def beyond_the_limits() -> Iterator[Line]:
    """Settings that a client refuses by default."""
    n = 1125
    rows = patients(n, features=3)
    for what, algorithm in (
        ("R = 1, all rows", FedAvg(eta=1e3, R=1, B=0)),
        ("R = B = 20, η = 20", FedAvg(eta=20.0)),
    ):
        found = invented_classes(victim(rows, SECRET), n, 2, 3, 25, algorithm)
        why = limit(Ask(algorithm, Network(features=3, classes=2 + 25**3)), rows, 4)
        yield Line(f"mlr, 15,625 invented classes, fedavg, {what}", why, score(found, rows), n, 4)
    model = Network(features=3, classes=2)
    found = one_row(victim(rows, SECRET), model, 1)
    why = limit(Ask(FedAvg(R=1, B=1), model), rows, 1)
    yield Line("mlr, 2 classes, fedavg, R = B = 1", why, score(found, rows), n, 1)
    rows, ten = patients(n), Network(features=4, classes=10)
    found = sliced_classes(victim(rows, SECRET), FedAvg(eta=1.0), ten, n, 50)
    why = limit(Ask(FedAvg(eta=1.0), ten), rows, 50)
    yield Line("mlr, 10 classes (2 own), fedavg, R = B = 20, η = 1", why, score(found, rows), n, 50)
    dnn, tiny = Network(features=4, classes=2, hidden=(100,)), FedAvg(eta=1e-5)
    for uploads in (1, 50):
        found = trapped(victim(rows, SECRET), tiny, dnn, n, uploads, Trap(1e-3))
        why = limit(Ask(tiny, dnn), rows, uploads)
        yield Line("dnn of 100 units as traps, fedavg, η = 10⁻⁵", why, score(found, rows), n, uploads)


def batches_known() -> Iterator[Line]:
    """Linear algebra, or least squares, with batches that the server knows, or takes itself to know."""
    n, model = 103, Network(features=4, classes=2, l2=0.001)
    rows = patients(n)
    for batches in ("random", "cycled"):
        algorithm = FedAvg(eta=1e-6, batches=batches)
        known = batches == "random"
        found = linear_system(victim(rows, KNOWN if known else SECRET), algorithm, model, KNOWN, n, 115)
        why = limit(Ask(algorithm, model), rows, 115, known=known)
        what = "batches known" if known else "batches cycled through"
        yield Line(f"mlr, 2 classes, fedavg, η = 10⁻⁶, w = 0, {what}", why, score(found, rows), n, 115)
    n, algorithm = 75, PFedMe()
    rows = patients(n)
    others = [victim(patients(n, seed=10 + k), KNOWN + 10 + k) for k in range(2)]
    for how, seed in (("known", KNOWN), ("secret", SECRET)):
        seen = honest_run(victim(rows, seed), others, algorithm, model, 100)
        found = inverted(seen, algorithm, model, KNOWN, n)
        why = limit(Ask(algorithm, model), rows, 100, known=how == "known")
        what = f"honest w: mlr, 2 classes, pfedme, defaults, least squares, batches {how}"
        yield Line(what, why, score(found, rows), n, 100)


def within_the_limits() -> Iterator[Line]:
    """The best that we know against a client with the default limits."""

    def line(what: str, rows: Rows, ask: Ask, uploads: int, found: np.ndarray, stretch: float = 1) -> Line:
        why, n = limit(ask, rows, uploads, stretch=stretch), len(rows.x)
        return Line(what, why, score(found, rows), n, uploads)

    # All rows in every batch, or nearly.
    small, large = patients(75), patients(1125)
    pfedme = PFedMe(eta=1.0, lam=1.0, alpha=1.0, K=1, R=10, B=0)
    often = FedAvg(eta=1.0, R=10, B=300_000)
    for what, algorithm, rows, uploads in (
        ("fedavg, R = 10, all rows", FULL, large, 50),
        ("fedavg, R = 10, all rows", FULL, large, 1000),
        ("fedavg, R = 10, all rows", FULL, small, 76),
        ("pfedme, R = 10, all rows", pfedme, small, 76),
        ("fedavg, R = 10, B = 300,000", often, small, 80),
        ("fedavg, R = 10, B = 75", FedAvg(eta=1.0, R=10, B=75), small, 1000),
    ):
        found = halving(victim(rows, SECRET), algorithm, TWO, len(rows.x), uploads)
        yield line(f"mlr, 2 classes, {what}, halving", rows, Ask(algorithm, TWO), uploads, found)

    # Mini-batches: steps that forget all batches but the last, or not.
    forget, wide = Network(features=4, classes=2, l2=0.999), patients(75, features=40)
    for what, rows, model, uploads, learn, spread, steep in (
        ("l2 = 0.999", large, forget, 50, 10, 0.1, 1e34),
        ("l2 = 0.999", large, forget, 1000, 40, 0.1, 1e34),
        ("l2 = 0.999", small, forget, 1000, 40, 0.5, 1e34),
        ("l2 = 0.001", large, Network(features=4, classes=2, l2=0.001), 1000, 40, 0.1, STEEP),
        ("5 % in one class", patients(1125, rare=0.05), TWO, 1000, 40, 0.1, STEEP),
        ("l2 = 0", small, TWO, 1000, 40, 0.1, STEEP),
        ("40 features", wide, Network(features=40, classes=2), 1000, 200, 0.3, STEEP),
    ):
        found = wrong_side(victim(rows, SECRET), WEAKEST, model, uploads, learn, spread, steep)
        what = f"mlr, 2 classes, fedavg, R = 10, B = 16, {what}, wrong side"
        yield line(what, rows, Ask(WEAKEST, model), uploads, found)
    for rare, uploads in ((0.01, 50), (0.05, 1000)):
        rows, algorithm = patients(1125, rare=rare), FedAvg(R=10, B=16)
        found = rare_class(victim(rows, SECRET), algorithm, TWO, 1125, uploads)
        what = f"mlr, 2 classes, {100 * rare:g} % in one, fedavg, R = 10, B = 16, rows of that one"
        of, why = int(rows.y.sum()), limit(Ask(algorithm, TWO), rows, uploads)
        yield Line(what, why, score(found, rows), of, uploads)
    for rows in (large, small):
        rows = Rows(rows.x, 0 * rows.y)
        found = outermost(victim(rows, SECRET), WEAKEST, TWO, len(rows.x), 1000)
        what = "mlr, 2 classes (1 own), fedavg, R = 10, B = 16, outermost"
        yield line(what, rows, Ask(WEAKEST, TWO), 1000, found)
        far = np.argsort(-np.linalg.norm(rows.x, axis=1))[:20]
        of = score(found, Rows(rows.x[far], rows.y[far]))
        yield Line(f"the same, of {len(rows.x):,} rows the 20 farthest", limit(Ask(WEAKEST, TWO), rows, 1000),
                   of, 20, 1000)  # fmt: skip
    for stretch in (90, 10):
        per = PerFedAvg(eta=1e-6, alpha=1.0, R=10, B=16)
        stretched = Rows((stretch * large.x).astype(np.float32), large.y)
        found = curved(victim(stretched, SECRET), per, TWO, 1000, stretch)
        what = f"mlr, 2 classes, per-fedavg, R = 10, B = 16, columns stretched {stretch} times"
        yield line(what, large, Ask(per, TWO), 1000, found, stretch=stretch)
    rows, ridge = patients(75, classes=0), Network(features=4)
    tiny = FedAvg(eta=1e-6, R=10, B=16)
    found = large_weights(victim(rows, SECRET), tiny, ridge, 1000)
    yield line("quantity (ridge), fedavg, R = 10, B = 16, large W", rows, Ask(tiny, ridge), 1000, found)


def by_chance() -> Iterator[Line]:
    """Guesses from what the agreement tells, with no upload at all."""
    rows = patients(1125)
    guesses = np.random.default_rng(2).normal(size=(1000, 4))
    yield Line("guesses from means and spreads", "", score(guesses, rows), 1125, 0)


class Closest(NamedTuple):
    """How close the guesses of an attack come to rows, on average over several clients' secrets."""

    error: float
    """The smallest distance to a row, as a share of the row's distance to the client's mean."""
    near: float
    """Rows to which a guess comes within 0.05 standard deviations in all columns."""


EIGHT = RowPrivacy(epsilon=8.0, delta=1e-5)
GUESSES = 50


def rare_class_against(private: RowPrivacy | None, secrets: int = 10) -> Closest:
    """`rare_class`, which within the default limits recovers the largest share of the rows that it is about,
    with and without noise. Every upload makes a guess, because noise hides which of them are of one row."""
    rows, algorithm = patients(1125, rare=0.01), FedAvg(eta=1.0, R=10, B=16)
    layer = np.zeros((2, TWO.features + 1))
    layer[0, -1] = SATURATED
    found = []
    for secret in range(secrets):
        respond = victim(rows, SECRET + secret, private, GUESSES)
        told = [change(respond, Ask(algorithm, TWO, t), joined(layer))[1] for t in range(GUESSES)]
        found.append(over_bias(np.stack(told)))
    return closest(found, rows)


def guesses_against(draws: int = 10) -> Closest:
    """As many guesses from means and spreads."""
    rng, rows = np.random.default_rng(2), patients(1125, rare=0.01)
    size = draws, GUESSES, rows.x.shape[1]
    return closest(list(rows.x.mean(axis=0) + rows.x.std(axis=0) * rng.normal(size=size)), rows)


def closest(guesses: Sequence[np.ndarray], rows: Rows) -> Closest:
    """Compares guesses with the rows of the rare class."""
    rare = Rows(rows.x[rows.y == 1], rows.y[rows.y == 1])
    spread = np.linalg.norm(rare.x - rows.x.mean(axis=0), axis=1)
    away = [(np.linalg.norm(some[:, None] - rare.x, axis=2) / spread).min() for some in guesses]
    return Closest(float(np.mean(away)), float(np.mean([score(some, rare).near for some in guesses])))


def against_noise() -> None:
    """Prints how close the best attack within the default limits comes to a row, without and with noise."""
    print("| | smallest error | rows within 0.05 |\n| --- | --- | --- |")
    for name, found in (
        ("attack, no noise", rare_class_against(None)),
        ("attack, `--dp rows --epsilon 8`", rare_class_against(EIGHT)),
        ("guesses from means and spreads", guesses_against()),
    ):
        print(f"| {name} | {found.error:.2g} | {found.near:.1f} of 12 |", flush=True)


def main() -> None:
    """Prints the table."""
    print(
        "# What a server can read out of uploads\n\n"
        "Made by `make attack`, which attacks our own client on synthetic rows: a row counts as recovered if "
        "one of the guesses has all its features within 0.05 (or 0.001) standard deviations, and the second "
        "column is what the client's own checks say with their defaults.\n\n"
        "| attack | within the default limits? | rows within 0.05 | within 0.001 | guesses | uploads |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for part in (by_chance, beyond_the_limits, batches_known, within_the_limits):
        for line in part():
            print(line, flush=True)


if __name__ == "__main__":
    against_noise() if "--noise" in sys.argv else main()
