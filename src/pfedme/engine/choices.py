"""The right model for every client: its own λ, and its own choice between joining and training alone.

Given a shared model w, client i follows the path of personal models

    θ_i(λ) = argmin_θ f_i(θ) + λ/2 ‖θ − w‖²

from λ = ∞, where θ is w, to λ = 0, where it is the client's own model, starting each from the previous one.
With classes it follows a second path, around w with its own label frequencies (see `label_shift`).
It scores the paths, and the model that it trains alone, on rows that none of them has seen, takes the most
shared one among the best, and fits it again on all its rows. Scores and choice stay with the client.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.algorithms import Algorithm, FedAvg, PFedMe
from pfedme.core.models import Model
from pfedme.core.spec import Bound, Count, Index, NonNegative
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.engine.devices import over_devices, padded, replicate
from pfedme.engine.label_shift import shift, shifted
from pfedme.engine.measure import ACCURACY, R2, Measure
from pfedme.engine.metrics import Blocks, Outcomes, Spread, outcomes, score
from pfedme.engine.personalized import Candidate, Personalized
from pfedme.engine.rowmetrics import Value
from pfedme.engine.simulate import Simulation, State, Store

PATH = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""The values of λ between ∞ and 0."""
LEAST_LIKELY = 0.01
"""Smaller probabilities are raised to this when clients choose."""


@record
class Personalize:
    """How clients find their own models."""

    name: ClassVar[str] = "auto"

    folds: Annotated[int, Bound(least=2, most=100)] = 5
    """Number of parts of a client's training rows; models are judged on a part that they have not seen."""
    small: Index = 200
    """A client with fewer training rows uses all parts in turn to choose, one with more only the first."""
    steps: Count = 200
    """SGD steps for each λ, the last of them smaller."""
    eta: NonNegative = 0.0
    """Size of these steps; 0 for 1/(2L), where L is the curvature of the clients' losses."""
    B: Count = 20
    """|D|: rows of a mini-batch in these steps."""
    caution: NonNegative = 0.5
    """Number of standard errors by which a less shared model must be better on the rows used to choose."""


def candidates(how: Personalize, given: float | None = None, *, shifted: bool = False) -> list[Candidate]:
    """All models that a client chooses from; `given` is the λ of a pFedMe run, and with `shifted` there are
    those with the client's label frequencies.

    >>> [c.label for c in candidates(Personalize(), given=15.0)][:5]
    ['global', 'λ = 100', 'λ = 30', 'λ = 15', 'λ = 10']
    """
    lams: list[float] = sorted({*PATH, given} - {None}, reverse=True)
    path = [Candidate("given" if lam == given else "personal", lam, how.steps) for lam in lams]
    joined = [Candidate("global", math.inf), *path, Candidate("fine-tuned", 0.0, how.steps)]
    if shifted:
        near = [Candidate("near-label-prior", c.lam, c.steps) for c in joined[1:]]
        pairs = zip(joined, [Candidate("label-prior", math.inf), *near], strict=True)
        joined = list(itertools.chain.from_iterable(pairs))
    return [*joined, Candidate("alone", 0.0)]


def choose(score: np.ndarray, owner: np.ndarray, clients: int, caution: float | np.ndarray) -> np.ndarray:
    """The candidate that each client takes: the first that is not worse than its best by `caution` standard
    errors (a number, or one for each client). `score` has the score of each candidate (column) on each row
    used to choose, such as `row_score`.

    A client without such rows takes the first.

    >>> score = np.log([[0.2, 0.8, 0.8], [0.9, 0.9, 0.9], [0.1, 0.7, 0.7]])
    >>> choose(score, np.zeros(3, int), 2, caution=0.5)
    array([1, 0])
    """
    total = _by_client(score, owner, clients)
    best = np.argmax(total, axis=1)
    behind = score[np.arange(len(owner)), best[owner]][:, None] - score
    count = np.maximum(np.bincount(owner, minlength=clients), 1)[:, None]
    mean = _by_client(behind, owner, clients) / count
    variance = np.maximum(_by_client(behind**2, owner, clients) / count - mean**2, 0)
    noise = np.where(count > 1, np.sqrt(variance / count), 1.0)  # a single row decides nothing
    return np.argmax(mean <= np.reshape(caution, (-1, 1)) * noise + 1e-12, axis=1)


def row_score(found: Outcomes) -> np.ndarray:
    """The score by which a model is chosen, row by row: the logarithm of the probability of the label, which
    is at least LEAST_LIKELY so that one row cannot decide; for a quantity −½ (z − y)², with the same limit.

    Unlike accuracy, or the probability itself, it is highest for the true probabilities of rare labels too.
    """
    return np.log(np.maximum(np.nan_to_num(found.likely), LEAST_LIKELY))  # NaN: a model that diverged


def personalize(
    how: Personalize,
    model: Model,
    federation: Federation,
    w: Params,
    without: Callable[[Federation], Params],
    alone: Callable[[Federation], Params],
    *,
    seed: int = 0,
    given: float | None = None,
    prior: Callable[[Federation], np.ndarray] | None = None,
    measure: Measure | None = None,
    positive: int | None = None,
    watch: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Personalized:
    """Every client's choice on validation rows, and the chosen model fitted to all its training rows.

    `without(federation)` is a shared model that has not seen the federation's validation rows: retrained for
    clients that took part in w, and w itself for newcomers. `alone(federation)` are the models, stacked, that
    its clients train on their own, and `prior(federation)` the label frequencies π that `without(federation)`
    was trained under; without it, or a bias for each class, no model uses label frequencies. Test rows
    are read once, after all choices. The metric on them is `measure` (accuracy or R² if None), for the class
    `positive` (the federation's if None); clients choose by `row_score` in any case.
    """
    if not model.has_class_biases():
        prior = None
    offered = candidates(how, given, shifted=prior is not None)
    how = with_step(how, model, federation, seed)
    key = jax.random.key(seed)
    few = np.flatnonzero(federation.n_train < how.small)
    folds = how.folds if len(few) else 1
    owners, scores = [], []
    for fold in range(folds):
        watch("choice", fold, folds + 1)
        who = np.arange(federation.clients) if fold == 0 else few
        part = federation.hold_out(fold, how.folds)
        blocks = Blocks.cut(*(a[who] for a in part.rows("validation")))
        found = lambda_path(
            how, model, part, without(part), alone(part), offered, jax.random.fold_in(key, fold), who, blocks,
            shift=prior and shift(part, prior(part)),
        )  # fmt: skip
        judged = [row_score(outcome) for outcome, _ in found]
        scores.append(np.stack(judged, axis=1))
        owners.append(who[blocks.owner()])
    watch("models", folds, folds + 1)
    owner, every = np.concatenate(owners), np.concatenate(scores)
    choice = choose(every, owner, federation.clients, how.caution)
    joined = choose(every[:, :-1], owner, federation.clients, how.caution)
    count = np.bincount(owner, minlength=federation.clients)[:, None]
    means = _by_client(every, owner, federation.clients) / np.where(count > 0, count, np.nan)

    test = Blocks.cut(*federation.rows("test"))
    right, theta, shared = [], None, None
    values = dict[str, Value | None]()
    metric = None if measure in (ACCURACY, R2) else measure
    judged = metric and _judge_of(metric, model, federation, test, positive)
    who = np.arange(federation.clients)
    y = federation.y[test.rows()].astype(np.float64)
    variance = float(np.var(y)) if len(y) and federation.classes == 0 else 1.0
    walked = lambda_path(
        how, model, federation, w, alone(federation), offered, jax.random.fold_in(key, folds), who, test,
        shift=prior and shift(federation, prior(federation)),
    )  # fmt: skip
    for place, (found, models) in enumerate(walked):
        right.append(found.right if federation.classes else _explained(found, variance))
        theta = models if theta is None else _where(jnp.asarray(choice == place), models, theta)
        if judged:
            shared = models if shared is None else _where(jnp.asarray(joined == place), models, shared)
            if offered[place].name not in ("personal", "near-label-prior"):
                values[offered[place].name] = judged(models)
    assert theta is not None
    if judged and shared is not None:
        values |= {"recommended": judged(theta), "own-lambda": judged(shared)}
    known = {name: value for name, value in values.items() if value is not None}
    watch("models", folds + 1, folds + 1)
    return Personalized(
        offered, choice, joined, means, theta, np.stack(right, axis=1), test.owner(),
        metric=metric if known else None, values=known,
    )  # fmt: skip


def _judge_of(
    metric: Measure, model: Model, federation: Federation, blocks: Blocks, positive: int | None
) -> Callable[[Params], Value | None]:
    """A function that computes a metric of stacked models on the rows in `blocks`; None if there are too many
    rows to keep."""
    store, clients = Store.of(federation), federation.clients
    spread = None
    if federation.classes == 0:
        spread = Spread.of(federation.y, blocks, clients, federation.label_unit)
    positive = federation.positive if positive is None else positive

    def judged(models: Params) -> Value | None:
        rows = score(model, models, store.x, store.y, blocks, clients, spread, positive).rows
        return None if rows is None else rows.value(metric.key)

    return judged


def _explained(found: Outcomes, variance: float) -> np.ndarray:
    """1 − (z − y)²/σ², row by row."""
    squares = -2 * np.log(np.maximum(np.nan_to_num(found.likely), 1e-300))
    return 1 - squares / (variance or 1.0)


def with_step(how: Personalize, model: Model, federation: Federation, seed: int) -> Personalize:
    """`how`, with a step size from the curvature of the clients' losses if it has none."""
    if how.eta:
        return how
    L = Simulation(FedAvg(eta=1.0, B=how.B), model, federation, cohort=1, seed=seed).smoothness()
    return dataclasses.replace(how, eta=1 / (2 * L))


def rounds_to_choice(algorithm: Algorithm, t: int) -> int:
    """Number of rounds after round t until clients choose their λ again."""
    every = algorithm.rechoose if isinstance(algorithm, PFedMe) else 0
    return every - t % every if every else 2**31 - 1


def with_own_lambdas(simulation: Simulation, state: State, how: Personalize | None = None) -> State:
    """The state with each client's λ_i chosen again, if that is due in round `state.t`.

    A client takes the largest λ of the path, up to the given one, that is not worse than the best on the
    validation rows that no client has trained on. It depends only on w and t, not on earlier choices.
    """
    algorithm, federation = simulation.algorithm, simulation.federation
    if (
        not isinstance(algorithm, PFedMe)
        or not algorithm.rechoose
        or state.t % algorithm.rechoose
        or not state.t
    ):
        return state
    how = with_step(how or Personalize(), simulation.model, federation, simulation.seed)
    lams = [algorithm.lam, *(lam for lam in PATH if lam < algorithm.lam)]
    offered = [Candidate("personal", lam, how.steps) for lam in lams]
    key = jax.random.fold_in(jax.random.fold_in(simulation.key, 2**32 - 2), state.t)
    who, blocks = np.arange(federation.clients), Blocks.cut(*federation.rows("validation"))
    w = simulation.shared(state)
    assert w is not None
    walked = lambda_path(how, simulation.model, federation, w, None, offered, key, who, blocks)
    scores = np.stack([row_score(found) for found, _ in walked], axis=1)
    choice = choose(scores, blocks.owner(), federation.clients, how.caution)
    return state._replace(clients=replicate(jnp.asarray(np.array(lams, np.float32)[choice])))


def lambda_path(
    how: Personalize,
    model: Model,
    federation: Federation,
    w: Params,
    alone: Params | None,
    offered: Sequence[Candidate],
    key: jax.Array,
    who: np.ndarray,
    blocks: Blocks,
    shift: np.ndarray | None = None,
) -> Iterator[tuple[Outcomes, Params]]:
    """The models of clients `who`, stacked, one candidate after another, and their outcomes on the clients'
    rows in `blocks`. `alone` are the models that all clients train on their own, and `shift` their
    log π_i − log π, if they are candidates."""
    store = Store.of(federation)
    items = padded(who).astype(np.int32)
    own = None if shift is None else replicate(jnp.asarray(shift[items], jnp.float32))
    first = replicate(w.map(lambda leaf: jnp.broadcast_to(leaf, (len(items), *leaf.shape))))
    paths = {False: first} | ({} if own is None else {True: jax.vmap(shifted)(first, own)})
    lams = [candidate.lam for candidate in offered if not candidate.shifted]
    for candidate in offered:
        theta = paths[candidate.shifted]
        if candidate.name == "alone":
            assert alone is not None
            theta = alone[items]
        if candidate.steps:
            same = jax.random.fold_in(key, lams.index(candidate.lam))  # the same batches on both paths
            theta = paths[candidate.shifted] = _descend(
                store, model, same, w, own if candidate.shifted else None, theta, items, candidate.lam,
                how.eta, candidate.steps, B=how.B,
            )  # fmt: skip
        models = theta if len(items) == len(who) else theta[: len(who)]
        yield outcomes(model, models, store.x, store.y, blocks), models


@partial(jax.jit, static_argnames="B")
def _descend(
    store: Store,
    model: Model,
    key: jax.Array,
    w: Params,
    shift: jax.Array | None,
    theta: Params,
    who: jax.Array,
    lam: float,
    eta: float,
    steps: int,
    B: int,
) -> Params:
    """θ after `steps` of θ ← argmin_u ⟨∇f̃_i(θ), u⟩ + λ/2 ‖u − w‖² + 1/(2η) ‖u − θ‖², for each client,
    where w has the client's `shift` in its biases, if there is one.

    η is divided by four for the last four tenths of the steps, and again for the last two.
    """

    def part(
        shared: tuple[Store, Model, jax.Array, Params], work: tuple[Params, jax.Array, jax.Array | None]
    ) -> Params:
        store, model, key, w = shared

        def fit(theta: Params, i: jax.Array, shift: jax.Array | None) -> Params:
            problem = store.problem(model, i)
            centre = w if shift is None else shifted(w, shift)
            own = jax.random.fold_in(key, store.ids[i])

            def step(k: jax.Array, theta: Params) -> Params:
                gradient = problem.sample(jax.random.fold_in(own, k), B).grad(theta)
                size = eta * jnp.where(k < 0.6 * steps, 1.0, jnp.where(k < 0.8 * steps, 0.25, 0.0625))
                return (1 / (1 + size * lam)) * (theta - size * gradient + (size * lam) * centre)

            return lax.fori_loop(0, steps, step, theta)

        return jax.vmap(fit)(*work)

    return over_devices(part, (store, model, key, w), (theta, who, shift))


def _by_client(values: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """The sums of each column over each client's rows."""
    return np.stack([np.bincount(owner, column, clients) for column in values.T], axis=1)


@jax.jit
def _where(mask: jax.Array, mine: Params, other: Params) -> Params:
    """`mine` where the mask is true, `other` elsewhere, in stacks of points."""
    return mine.map(lambda a, b: jnp.where(jnp.reshape(mask, (-1,) + (1,) * (a.ndim - 1)), a, b), other)
