"""The right model for every client: its own λ, and its own choice between joining and training alone.

Given a shared model w, client i follows the path of personal models

    θ_i(λ) = argmin_θ f_i(θ) + λ/2 ‖θ − w‖²

from λ = ∞, where θ is w, to λ = 0, where it is the client's own model, starting each from the previous one.
With classes it follows a second path, around w with its own label frequencies (see `label_shift`); if there
are several shared models, it follows the same paths around the one of its cluster. It scores the paths, other
personal models, and the one that it trains alone on rows that none of them has seen, takes the most shared
one among the best, and fits it again on all its rows. The mean scores of all clients count, too: with few
rows of its own, or where its own rows cannot tell, a client follows what is best for most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm, PFedMe
from pfedme.core.models import Model
from pfedme.core.spec import Bound, Count, Index, NonNegative
from pfedme.core.tree import Params, record
from pfedme.data.federation import Federation
from pfedme.engine.chunks import MadeOnDemand, Stacked, chunks, stacked
from pfedme.engine.devices import read, replicate
from pfedme.engine.label_shift import shift, shifted
from pfedme.engine.measure import ACCURACY, R2, Measure
from pfedme.engine.metrics import Blocks, Outcomes
from pfedme.engine.path import lambda_path, own_steps, walked_at_once
from pfedme.engine.personalized import Candidate, Personalized
from pfedme.engine.scorer import Scorer
from pfedme.engine.simulate import Simulation, State

PATH = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""The values of λ between ∞ and 0."""
LEAST_LIKELY = 0.01
"""Smaller probabilities are raised to this when clients choose."""


TEMPERATURES = tuple(2.0 ** (k / 3) for k in sorted(range(-6, 7), key=abs))
"""What the scores of classes may be divided by before they are judged, the most usual first."""


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
    """Size of these steps; 0 for 1/(2L), where L is the largest curvature of clients' losses, or the client's
    own if that is larger."""
    B: Count = 20
    """|D|: rows of a mini-batch in these steps."""
    pooled: NonNegative = 100.0
    """How many rows of a client's own the mean scores of all clients count as; 0 to choose by its rows alone.
    Newcomers do."""
    caution: NonNegative = 0.5
    """Number of standard errors by which a less shared model must be better on the rows used to choose."""


class Start(NamedTuple):
    """Where paths begin."""

    models: Stacked
    """A model for each client; `for_all` repeats a shared one."""
    prior: np.ndarray | None = None
    """π: the label frequencies that the models were trained under, for all clients or a row for each; None if
    labels are quantities."""


class Line(NamedTuple):
    """Models that clients can choose, or follow a path from."""

    name: str
    """`global`, `cluster`, or the name of an algorithm."""
    start: Callable[[Federation], Start]
    """Trains them on the training rows of a federation."""
    path: bool = True
    """Whether there are paths from here; otherwise clients take the models as they are."""


def for_all(w: Params, clients: int) -> Params:
    """w for each of so many clients, stacked, which takes no more memory than w."""
    return Params(jax.tree.map(lambda leaf: np.broadcast_to(read(leaf), (clients, *leaf.shape)), w.tree))


def candidates(
    how: Personalize,
    given: float | None = None,
    *,
    shifted: bool = False,
    centres: Sequence[str] = ("global",),
    ready: Sequence[str] = (),
) -> list[Candidate]:
    """All models that a client chooses from: those on paths around `centres`, those that are `ready`, and the
    one that it trains alone. `given` is the λ of a pFedMe run, and with `shifted` there are also paths around
    the centres with the client's label frequencies.

    >>> [c.label for c in candidates(Personalize(), given=15.0)][:5]
    ['global', 'λ = 100', 'λ = 30', 'λ = 15', 'λ = 10']
    """
    lams: list[float] = sorted({*PATH, given} - {None}, reverse=True)
    lines = [*centres, *(with_prior(centre) for centre in centres if shifted)]
    joined = [Candidate(line, math.inf) for line in lines]
    for lam in (*lams, 0.0):
        name = "fine-tuned" if lam == 0 else "given" if lam == given else "personal"
        joined += [Candidate(name if line == "global" else f"near-{line}", lam, how.steps) for line in lines]
    return [*joined, *(Candidate(name, 0.0) for name in ready), Candidate("alone", 0.0)]


def with_prior(centre: str) -> str:
    """The name of a centre with the client's label frequencies."""
    return "label-prior" if centre == "global" else f"{centre}-label-prior"


def choose(
    score: np.ndarray, owner: np.ndarray, clients: int, caution: float | np.ndarray, pooled: float = 0.0
) -> np.ndarray:
    """The candidate that each client takes. `score` has the score of each candidate (column) on each row used
    to choose, such as `row_score`.

    The mean over clients of their mean scores, in which one with n rows has the weight n/(n + pooled), counts
    as much as `pooled` rows of each client's own. A client considers the candidates that are not worse than
    its best by `caution` standard errors (a number, or one for each client). Of these it takes the first that
    is not worse than the best for all clients in the same sense, or else the one that is best for all; with
    `pooled` = 0, the first. A client without rows considers all candidates.

    >>> score = np.log([[0.2, 0.8, 0.8], [0.9, 0.9, 0.9], [0.1, 0.7, 0.7]])
    >>> choose(score, np.zeros(3, int), 2, caution=0.5)
    array([1, 0])
    >>> score = np.array([[0.0, 1.0], [0.0, 1.0], [0.5, 0.4]])  # the last client has only one row
    >>> [choose(score, np.array([0, 1, 2]), 3, caution=0.0, pooled=m)[2] for m in (0, 10)]
    [np.int64(0), np.int64(1)]
    """
    count = np.bincount(owner, minlength=clients)[:, None].astype(float)
    there, least = count[:, 0] > 0, np.maximum(count, 1)
    caution = np.reshape(caution, (-1, 1))
    own = _by_client(score, owner, clients) / least
    weight = count / np.maximum(count + pooled, 1)
    trust = weight / max(weight.sum(), 1e-12)
    shared = (trust * own).sum(axis=0)
    mean = weight * own + (1 - weight) * shared
    best = np.argmax(mean, axis=1)
    behind = score[np.arange(len(owner)), best[owner]][:, None] - score
    far = _by_client(behind, owner, clients) / least
    variance = np.maximum(_by_client(behind**2, owner, clients) / least - far**2, 0)
    noise = weight * np.where(count > 1, np.sqrt(variance / least), 1.0)  # a single row decides nothing
    lost = np.take_along_axis(mean, best[:, None], axis=1) - mean
    good = ~there[:, None] | (lost <= caution * noise + 1e-12)
    if pooled == 0 or there.sum() < 2:
        return np.argmax(good, axis=1)
    apart = own[:, [np.argmax(shared)]] - own
    far = (trust * apart).sum(axis=0)
    noise = np.sqrt((trust**2 * (apart - far) ** 2).sum(axis=0) / (1 - (trust**2).sum()))
    for_all = good & (far <= caution * noise + 1e-12)
    otherwise = np.argmax(np.where(good, shared, -np.inf), axis=1)
    return np.where(for_all.any(axis=1), np.argmax(for_all, axis=1), otherwise)


def row_score(found: Outcomes) -> np.ndarray:
    """The score by which a model is chosen, row by row: the logarithm of the probability of the label, which
    is at least LEAST_LIKELY so that one row cannot decide; for a quantity −½ (z − y)², with the same limit.
    If the outcomes are those at several temperatures, there is a column for each.

    Unlike accuracy, or the probability itself, it is highest for the true probabilities of rare labels too.
    """
    likely = found.likely if found.tempered is None else found.tempered
    return np.log(np.maximum(np.nan_to_num(likely), LEAST_LIKELY))  # NaN: a model that diverged


def calibrated(score: np.ndarray, owner: np.ndarray, clients: int, pooled: float) -> np.ndarray:
    """The score of each candidate (second axis) on each row (first), at the temperature (last axis) that has
    the best mean over clients, weighted as in `choose`.

    Averages of networks give probabilities that are too even, and networks fitted to few rows such that are
    too certain; which label is the most probable depends on neither.

    >>> score = np.log([[[0.6, 0.9], [0.5, 0.5]], [[0.6, 0.8], [0.3, 0.1]]])  # 2 of each
    >>> np.exp(calibrated(score, np.zeros(2, int), 1, pooled=0.0))
    array([[0.9, 0.5],
           [0.8, 0.3]])
    """
    trust = 1 / (np.bincount(owner, minlength=clients) + pooled)[owner]
    best = np.argmax(np.einsum("r,rct->ct", trust, score), axis=1)
    return np.take_along_axis(score, best[None, :, None], axis=2)[:, :, 0].astype(np.float64)


def personalize(
    how: Personalize,
    model: Model,
    federation: Federation,
    lines: Sequence[Line],
    alone: Callable[[Federation], Stacked],
    *,
    seed: int = 0,
    given: float | None = None,
    measure: Measure | None = None,
    positive: int | None = None,
    watch: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Personalized:
    """Every client's choice on validation rows, and the chosen model fitted to all its training rows.

    The models of `lines`, the most shared first, and those that `alone(federation)` trains for its clients on
    their own, stacked, are trained again for each part of the rows, so that they have not seen those that
    judge them. If the scores of all clients count, each candidate is judged at the temperature that suits all
    of them best. There are paths with label frequencies if the model has a bias for each class and the first
    line knows π. Test rows are read once, after all choices. The metric on them is `measure` (accuracy or R²
    if None), for the class `positive` (the federation's if None); clients choose by `row_score` in any case.
    """
    eta = _steps(how, model, federation, seed)
    key = jax.random.key(seed)
    few = np.flatnonzero(federation.n_train < how.small)
    folds = how.folds if len(few) else 1
    several = how.pooled > 0 and federation.clients > 1
    temperatures = TEMPERATURES if federation.classes and several else ()
    owners, scores = [], []
    for fold in range(folds):
        watch("choice", fold, folds + 1)
        who = np.arange(federation.clients) if fold == 0 else few
        part = federation.hold_out(fold, how.folds)
        blocks = Blocks.of(part, "validation", who)
        starts, offered = _started(how, model, part, lines, alone, given)
        own = jax.random.fold_in(key, fold)
        for some in chunks(who, blocks, walked_at_once(model, part, len(starts), how.B)):
            found = lambda_path(
                model, part, starts, offered, own, some.who, some.blocks, eta, how.B, temperatures
            )
            judged = [row_score(outcome) for outcome, _ in found]
            scores.append(np.stack(judged, axis=1))
            owners.append(some.who[some.blocks.owner()])
        del part, starts  # the next ones need their memory
    watch("models", folds, folds + 1)
    owner, every = np.concatenate(owners), np.concatenate(scores)
    if temperatures:
        every = calibrated(every, owner, federation.clients, how.pooled)
    choice = choose(every, owner, federation.clients, how.caution, how.pooled)
    joined = choose(every[:, :-1], owner, federation.clients, how.caution, how.pooled)
    count = np.bincount(owner, minlength=federation.clients)[:, None]
    means = _by_client(every, owner, federation.clients) / np.where(count > 0, count, np.nan)

    test = Blocks.of(federation, "test", np.arange(federation.clients))
    y = federation.y[test.rows()].astype(np.float64)
    variance = float(np.var(y)) if len(y) and federation.classes == 0 else 1.0
    starts, offered = _started(how, model, federation, lines, alone, given)
    last = jax.random.fold_in(key, folds)
    scorer = None
    if measure is not None and measure not in (ACCURACY, R2):
        scorer = Scorer.of(measure, model, federation, test, positive)
    right = []

    def fitted() -> Iterator[tuple[Params, int]]:
        """The chosen models of some clients after another."""
        size = walked_at_once(model, federation, len(starts), how.B)
        for some in chunks(np.arange(federation.clients), test, size):
            walked = lambda_path(model, federation, starts, offered, last, some.who, some.blocks, eta, how.B)
            rows, theta, shared = [], None, None
            for place, (found, models) in enumerate(walked):
                rows.append(found.right if federation.classes else _explained(found, variance))
                theta = _taken(models, theta, choice[some.who] == place)
                if scorer:
                    shared = _taken(models, shared, joined[some.who] == place)
                    if not offered[place].on_path:
                        scorer.add(offered[place].name, models, some)
            assert theta is not None
            right.append(np.stack(rows, axis=1))
            if scorer and shared is not None:
                scorer.add("recommended", theta, some)
                scorer.add("own-lambda", shared, some)
            yield theta, some.clients

    theta = stacked(fitted(), federation.clients)
    known = scorer.values() if scorer else {}
    watch("models", folds + 1, folds + 1)
    return Personalized(
        offered, choice, joined, means, theta, np.concatenate(right), test.owner(),
        metric=measure if known else None, values=known,
    )  # fmt: skip


def _started(
    how: Personalize,
    model: Model,
    federation: Federation,
    lines: Sequence[Line],
    alone: Callable[[Federation], Stacked],
    given: float | None,
) -> tuple[dict[str, Stacked], list[Candidate]]:
    """The models of all clients that paths start from or that are ready; and the candidates."""
    starts = dict[str, Stacked]()
    begun = {line: line.start(federation) for line in lines}
    shifts = model.has_class_biases() and begun[lines[0]].prior is not None
    for line, start in begun.items():
        starts[line.name] = start.models
        if line.path and shifts:
            assert start.prior is not None
            starts[with_prior(line.name)] = _shifted(start.models, shift(federation, start.prior))
    starts["alone"] = alone(federation)
    centres = [line.name for line in lines if line.path]
    ready = [line.name for line in lines if not line.path]
    return starts, candidates(how, given, shifted=shifts, centres=centres, ready=ready)


def _shifted(models: Stacked, shift: np.ndarray) -> Stacked:
    """The models with each client's `shift` of its label frequencies."""
    return MadeOnDemand(lambda who: jax.vmap(shifted)(models[who], replicate(shift[who].astype(np.float32))))


def _explained(found: Outcomes, variance: float) -> np.ndarray:
    """1 − (z − y)²/σ², row by row."""
    squares = -2 * np.log(np.maximum(np.nan_to_num(found.likely), 1e-300))
    return 1 - squares / (variance or 1.0)


def _steps(how: Personalize, model: Model, federation: Federation, seed: int) -> np.ndarray:
    """The size of each client's steps."""
    if how.eta:
        return np.full(federation.clients, how.eta, np.float32)
    return own_steps(model, federation, seed, how.B)


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
    how = how or Personalize()
    eta = _steps(how, simulation.model, federation, simulation.seed)
    lams = [algorithm.lam, *(lam for lam in PATH if lam < algorithm.lam)]
    offered = [Candidate("personal", lam, how.steps) for lam in lams]
    key = jax.random.fold_in(jax.random.fold_in(simulation.key, 2**32 - 2), state.t)
    who = np.arange(federation.clients)
    blocks = Blocks.of(federation, "validation", who)
    w = simulation.shared(state)
    assert w is not None
    starts = {"global": for_all(w, federation.clients)}
    scores = []
    for some in chunks(who, blocks, walked_at_once(simulation.model, federation, 1, how.B)):
        walked = lambda_path(
            simulation.model, federation, starts, offered, key, some.who, some.blocks, eta, how.B
        )
        scores.append(np.stack([row_score(found) for found, _ in walked], axis=1))
    choice = choose(np.concatenate(scores), blocks.owner(), federation.clients, how.caution)
    return state._replace(clients=replicate(jnp.asarray(np.array(lams, np.float32)[choice])))


def _by_client(values: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """The sums of each column over each client's rows."""
    return np.stack([np.bincount(owner, column, clients) for column in values.T], axis=1)


def _taken(mine: Params, other: Params | None, mask: np.ndarray) -> Params:
    """`mine` where the mask is true, `other`, if there is one, elsewhere, in stacks of points."""
    return mine if other is None else _where(mask, mine, other)


@jax.jit
def _where(mask: np.ndarray, mine: Params, other: Params) -> Params:
    """`mine` where the mask is true, `other` elsewhere, in stacks of points."""
    return mine.map(lambda a, b: jnp.where(jnp.reshape(mask, (-1,) + (1,) * (a.ndim - 1)), a, b), other)
