"""How clients differ: in labels, in inputs, or in the rule that predicts a label from an input.

Each kind of difference suggests a way to serve clients. The ways are compared by their loss on rows that they
have not seen, with linear models of at most 64 principal components:

- shared model: one model w for all;
- label prior: w with log π_i − log π in its logits, where π_i are client i's label frequencies (for a
  quantity, with the mean of the client's residuals added to its predictions);
- own scale: one model of features that each client centres, and possibly scales, by its own rows;
- groups: k models, of which a client uses the one with the least loss on its rows;
- own model: the client's own model, pulled towards w.

The last two include the label prior if it helps. Each client's training rows are split into two halves; a way
is fitted to one half and judged on the other, and vice versa. Test rows are never used.

Groups and own models count only if they are better than the same fitted to *dealt* rows: each client keeps
its labels, but the features of rows with equal labels are shuffled over clients. If clients differ in nothing
but labels, that changes nothing. Random deals also give the distribution of test statistics by chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.sparse import csr_array

from pfedme.data.federation import Federation
from pfedme.engine.linear import Rows, deal, fit, loss, merged, of_groups, own_scale, prior, projected
from pfedme.engine.store import features_of

Kind = Literal["none", "label skew", "feature shift", "a few kinds", "unlike tasks", "cannot tell"]
"""none: clients are alike. label skew: labels occur with different frequencies. feature shift: inputs differ.
a few kinds: groups of clients have a rule each. unlike tasks: every client has a rule of its own."""
WAYS: dict[str, Kind] = {
    "label prior": "label skew",
    "own scale": "feature shift",
    "groups": "a few kinds",
    "own model": "unlike tasks",
}
"""The ways to serve clients, from simple to complex, and the kind of difference that each is for."""
TESTED = {"label prior": "labels", "own scale": "inputs"}
"""What has to differ more than by chance for a way to count that is not compared with dealt rows."""
MOST_CLIENTS, MOST_ROWS = 60, 100
"""At most this many clients, and training rows of each, are used."""
DEALS = 199
"""How often rows are dealt to clients for a test."""
LEVEL, CLEAR = 0.005, 3.0
"""The level of these tests, and from how many standard errors a lower loss is clear."""
MOST = 0.8
"""A way explains most of a difference if it gains this share of what the best way gains."""
RIDGES = (1e-2, 1e-3, 1e-4)
"""Strengths of λ/2 ‖w‖² for a shared model; the best is used for groups, too."""
PULLS = (0.01, 0.05, 0.3)
"""Strengths of λ/2 ‖θ_i − w‖² for a client's own model."""
PSEUDOCOUNTS = (1.0, 3.0, 10.0, 30.0)
"""How many imagined rows with the frequencies of all clients are added to a client's."""
GROUPS = (2, 3, 4, 6)
"""Numbers of groups to try, with two clients or more in each on average."""
BINS = 10
"""Quantities are dealt among rows of the same of this many ranges."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How well a way to serve clients does on rows that it has not seen."""

    name: str
    kind: Kind
    """The difference that it is for."""
    loss: float
    gain: float
    """How much lower the loss is than the shared model's."""
    error: float
    """The standard error of the gain."""
    clear: bool
    """Whether the gain is significant."""
    setting: float
    """The pseudocount, whether deviations are scaled, k, or λ."""


@dataclasses.dataclass(frozen=True)
class Test:
    """Whether clients differ more than by chance."""

    p: float
    """The share of deals in which clients differ at least as much, the real one included."""
    excess: float
    """By how many standard deviations of the deals they differ more than in the mean deal."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """How clients differ, and the evidence."""

    kind: Kind
    """The main kind of difference."""
    also: tuple[Kind, ...]
    """Other kinds that are clearly there."""
    loss: float
    """The loss of the shared model on rows that it has not seen."""
    ways: tuple[Way, ...]
    tests: dict[str, Test]
    """Tests of `labels`, `inputs` and `inputs given the label`."""
    clients: int
    rows: int
    """How many clients and training rows were used."""


def differences(federation: Federation) -> Differences | None:
    """How clients differ; None if there is only one, or too few rows to split."""
    halves = split(federation)
    used = [int(half.there.sum()) for half in halves]
    if federation.clients < 2 or min(used) < 2:
        return None
    losses, settings, control = compared(halves, federation.classes)
    tests = tested(halves)
    shared = losses["shared model"]

    def clearly(more: np.ndarray, less: np.ndarray) -> bool:
        return _mean_error(more - less)[0] > CLEAR * _mean_error(more - less)[1]

    ways = []
    for name, kind in WAYS.items():
        if name in losses:
            clear = clearly(shared, losses[name])
            if name in control:
                clear = clear and clearly(control[name], losses[name])
            else:
                clear = clear and tests[TESTED[name]].p <= LEVEL
            gain, error = _mean_error(shared - losses[name])
            ways.append(Way(name, kind, float(losses[name].mean()), gain, error, clear, settings[name]))
    found = [way for way in ways if way.clear]
    best = max((way.gain for way in found), default=0.0)
    main = next((way for way in found if way.gain >= MOST * best), None)
    also = [w.kind for w in found if main and w is not main and (
        w.name == "label prior" or clearly(losses[main.name], losses[w.name]))]  # fmt: skip
    kind = main.kind if main else by_tests(tests)
    return Differences(
        kind, tuple(also), float(shared.mean()), tuple(ways), tests, len(halves[0].y), sum(used)
    )


def by_tests(tests: dict[str, Test]) -> Kind:
    """The kind of difference if no way to serve clients is better than a shared model.

    >>> yes, no = Test(0.005, 9.0), Test(0.5, 0.0)
    >>> by_tests({"labels": yes, "inputs": yes, "inputs given the label": no})
    'label skew'
    >>> by_tests({"labels": no, "inputs": no, "inputs given the label": yes})
    'cannot tell'
    """
    labels, inputs, given = (
        tests[name].p <= LEVEL for name in ("labels", "inputs", "inputs given the label")
    )
    if given:  # If the rule differs but inputs do not, there are too few rows to learn more than one rule.
        return "feature shift" if inputs else "cannot tell"
    return "label skew" if labels else "none"


def split(federation: Federation) -> tuple[Rows, Rows]:
    """Two random halves of each client's training rows, which depend only on the client's id."""
    f, (start, count) = federation, federation.rows("train")
    who = np.argsort(f.ids, kind="stable")
    if len(who) > MOST_CLIENTS:
        who = who[np.sort(np.random.default_rng(0).permutation(len(who))[:MOST_CLIENTS])]
    rows = [
        start[i] + np.random.default_rng([0, int(f.ids[i])]).permutation(count[i])[:MOST_ROWS] for i in who
    ]
    y, used = f.y, np.concatenate(rows)
    range = y
    if f.classes == 0:
        y = ((y - y[used].mean()) / max(float(y[used].std()), 1e-12)).astype(np.float32)
        range = np.searchsorted(np.quantile(y[used], np.arange(1, BINS) / BINS), y)

    def padded(parts: list[np.ndarray]) -> Rows:
        there = np.arange(max(map(len, parts)))[None] < np.array([len(part) for part in parts])[:, None]
        at = np.zeros(there.shape, np.int64)
        at[there] = np.concatenate(parts)
        x = features_of(f, at).swapaxes(1, 2).astype(np.float32)
        return Rows(x, y[at], range[at], there)

    half = [(len(own) + 1) // 2 for own in rows]
    return (
        padded([own[:n] for own, n in zip(rows, half, strict=True)]),
        padded([own[n:] for own, n in zip(rows, half, strict=True)]),
    )


def compared(
    halves: tuple[Rows, Rows], classes: int
) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, np.ndarray]]:
    """The loss on each row of both halves for each way, its best setting, and the losses with dealt rows."""
    folds = [projected(halves), projected((halves[1], halves[0]))]
    outputs = max(classes, 1)
    zero = np.zeros((1, outputs, 1), np.float32)
    losses, settings, control = {}, {}, {}

    def judged(models: Sequence[np.ndarray], offsets: Sequence[np.ndarray]) -> np.ndarray:
        """The losses of a model for each fold, on the rows that it was not fitted to."""
        each = [
            loss(b, theta, offset)[b.there]
            for (_, b), theta, offset in zip(folds, models, offsets, strict=True)
        ]
        return np.concatenate(each)

    def best(tried: dict[float, np.ndarray]) -> float:
        return min(tried, key=lambda setting: tried[setting].mean())

    models, tried, w = {}, {}, [np.zeros((1, outputs, a.x.shape[1]), np.float32) for a, _ in folds]
    for ridge in RIDGES:  # each starts where the one before has ended
        w = [fit(merged(a), zero, v, 0 * v, ridge, 80) for (a, _), v in zip(folds, w, strict=True)]
        models[ridge], tried[ridge] = w, judged(w, [zero, zero])
    ridge = best(tried)
    w, losses["shared model"] = models[ridge], tried[ridge]

    offsets = {s: [prior(a, v, s, classes) for (a, _), v in zip(folds, w, strict=True)] for s in PSEUDOCOUNTS}
    tried = {s: judged(w, offsets[s]) for s in PSEUDOCOUNTS}
    settings["label prior"] = best(tried)
    losses["label prior"] = tried[settings["label prior"]]
    gain, error = _mean_error(losses["shared model"] - losses["label prior"])
    helps = gain > CLEAR * error
    offset = [o if helps else 0 * o for o in offsets[settings["label prior"]]]

    tried = {}
    for spread in (0.0, 1.0):
        each = []
        for a, b in (halves, (halves[1], halves[0])):
            near, far = projected((own_scale(a, a, spread), own_scale(a, b, spread)))
            first = np.zeros((1, outputs, near.x.shape[1]), np.float32)
            theta = fit(merged(near), zero, first, 0 * first, ridge, 100)
            each.append(loss(far, theta, zero)[far.there])
        tried[spread] = np.concatenate(each)
    settings["own scale"] = best(tried)
    losses["own scale"] = tried[settings["own scale"]]

    def own(rows: Sequence[Rows], pull: float) -> list[np.ndarray]:
        return [fit(a, o, v, v, pull, 60) for a, v, o in zip(rows, w, offset, strict=True)]

    def grouped(rows: Sequence[Rows], personal: Sequence[np.ndarray], k: int) -> list[np.ndarray]:
        every = zip(rows, personal, w, offset, strict=True)
        return [of_groups(a, theta, v, o, k, ridge) for a, theta, v, o in every]

    random = np.random.default_rng(2)
    real, dealt = [a for a, _ in folds], [deal(a, random) for a, _ in folds]
    fitted = {pull: own(real, pull) for pull in PULLS}
    tried = {pull: judged(fitted[pull], offset) for pull in PULLS}
    settings["own model"] = pull = best(tried)
    losses["own model"] = tried[pull]
    by_chance = own(dealt, pull)
    control["own model"] = judged(by_chance, offset)
    tried = {
        float(k): judged(grouped(real, fitted[pull], k), offset) for k in GROUPS if 2 * k <= len(halves[0].y)
    }
    if tried:
        settings["groups"] = k = best(tried)
        losses["groups"] = tried[k]
        control["groups"] = judged(grouped(dealt, by_chance, int(k)), offset)
    return losses, settings, control


def tested(halves: tuple[Rows, Rows]) -> dict[str, Test]:
    """Tests whether clients differ in their labels, in their inputs, and in their inputs given the label.

    The statistics are the G statistic of labels by client, and the variance between clients of features and
    of their squares: over all rows, and over the rows with each label.
    """
    parts = projected(halves)
    x = np.concatenate([np.swapaxes(part.x, 1, 2)[part.there][:, :-1] for part in parts])
    label = np.concatenate([part.range[part.there] for part in parts])
    label = np.unique(label, return_inverse=True)[1]
    owner = np.concatenate([np.nonzero(part.there)[0] for part in parts])
    n, random, every = len(label), np.random.default_rng(1), np.arange(len(label))
    cells = owner * (label.max() + 1)
    by_label = np.argsort(label, kind="stable")

    def among_equal() -> np.ndarray:
        order = np.empty(n, np.int64)
        order[by_label] = np.lexsort((random.random(n), label))
        return order

    def G(order: np.ndarray) -> float:
        counts = np.bincount(cells + label[order])
        return float((counts * np.log(np.maximum(counts, 1))).sum())

    def test(statistic: Callable[[np.ndarray], float], shuffled: Callable[[], np.ndarray]) -> Test:
        real, chance = statistic(every), np.array([statistic(shuffled()) for _ in range(DEALS)])
        # Equal statistics may differ in the last digits.
        above = int((chance >= real - 1e-6 * abs(real)).sum())
        return Test((1 + above) / (1 + DEALS), float((real - chance.mean()) / max(chance.std(), 1e-12)))

    def anyhow() -> np.ndarray:
        return random.permutation(n)

    return {
        "labels": test(G, anyhow),
        "inputs": test(_between(x, np.zeros(n, np.int64), owner), anyhow),
        "inputs given the label": test(_between(x, label, cells + label), among_equal),
    }


def _between(x: np.ndarray, within: np.ndarray, cell: np.ndarray) -> Callable[[np.ndarray], float]:
    """The variance between cells of features and their squares, centred `within` each label, as a function of
    the order of rows."""

    def centred(a: np.ndarray) -> np.ndarray:
        a = a - (_sums(within) @ a / np.bincount(within)[:, None])[within]
        return a / np.maximum(a.std(axis=0), 1e-6)

    r = centred(x)
    r = np.concatenate([r, centred(np.minimum(r**2, 9))], axis=1).astype(np.float32)
    cell = np.unique(cell, return_inverse=True)[1]
    total, size = _sums(cell), np.bincount(cell)
    return lambda order: float((((total @ r[order]) ** 2).sum(axis=1) / size).sum())


def _sums(cell: np.ndarray) -> csr_array:
    """A matrix that adds up rows by cell."""
    n = len(cell)
    return csr_array((np.ones(n, np.float32), (cell, np.arange(n))), shape=(int(cell.max()) + 1, n))


def _mean_error(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))
