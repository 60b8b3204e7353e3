"""Settings that were not given: the number of rounds, smaller steps at the end, and clients' l2, all chosen
on validation rows.

A pilot trains with a fifth of each client's training rows held out, which are the validation rows. It doubles
the rounds until doubling no longer lowers the loss on these rows. The run itself then trains on all training
rows with the settings found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm, Alone
from pfedme.algorithms.alone import STRENGTHS
from pfedme.data.federation import Federation, Part
from pfedme.engine.choices import choose, row_score
from pfedme.engine.devices import agreed, replicate
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.engine.simulate import Simulation, State, advance
from pfedme.errors import Diverged

FOLDS = 5
"""Each client's training rows are divided into this many parts, one of which is for validation."""
SMALL = 1000
"""A client with fewer training rows uses all parts in turn to choose its l2, one with more only the first."""
CAUTION = 0.5
"""Number of standard errors by which a weaker l2 must be better, for a client with many rows."""
FEW = 100
"""With n rows, it must be better by √(1 + FEW/n) times that number: few rows say little about their noise."""
FIRST = 4
"""Initial number of rounds with full steps."""
ENOUGH = 32
"""After fewer rounds with full steps, training does not count as converged, whatever the losses are."""
END = 0.5
"""Rounds with smaller steps at the end, as a share of those with full ones."""
TOLERANCE = 1e-3
"""How much doubling the rounds must lower the loss to be worthwhile, as a share of the loss without
learning."""
ROSE = 0.01
"""How much, as the same kind of share, the loss on training rows may rise before steps count as too large."""
RETRIES = 6
"""How often training that diverges is restarted with a quarter of its step sizes."""
UNJUDGED = 100
"""Number of rounds if no client has enough rows to hold some out."""

Watch = Callable[[int], None]


class Pilot(NamedTuple):
    """The settings that a pilot has found."""

    algorithm: Algorithm
    """With its step sizes."""
    rounds: int
    quarter_at: tuple[int, ...]
    """Rounds after which η is divided by four."""
    converged: bool
    validation: dict[str, float]
    """The loss of each kind of model on validation rows after these rounds."""
    thresholds: dict[str, float]
    """For two classes: the best threshold on validation rows for each kind of model."""
    retries: int = 0
    """How often it diverged and was restarted with smaller steps."""
    l2: np.ndarray | None = None
    """The strength that each client has chosen, if clients choose it."""
    l2_without: np.ndarray | None = None
    """The same without each part of the rows (a row for each part): what may be judged on that part."""


def chooses_l2(algorithm: Algorithm) -> bool:
    """Whether clients choose their own l2 strength."""
    return isinstance(algorithm, Alone) and algorithm.l2 == "own"


def with_l2(state: State, l2: np.ndarray) -> State:
    """The state before the first round of `alone` with these strengths, one for each client that trains."""
    theta, _ = state.clients
    return state._replace(clients=replicate((theta, jnp.asarray(l2, jnp.float32))))


def with_every_l2(state: State) -> State:
    """The state before the first round of `alone` in which every client trains a model with each strength."""
    theta, l2 = state.clients
    strengths = jnp.broadcast_to(jnp.array(STRENGTHS, jnp.float32), (len(l2), len(STRENGTHS)))
    theta = jax.tree.map(lambda a: jnp.repeat(a[:, None], len(STRENGTHS), axis=1), theta)
    return state._replace(clients=replicate((theta, strengths)))


def pilot(
    asked: Algorithm,
    simulation: Simulation,
    *,
    budget: int,
    rounds: int = 0,
    quarter_at: tuple[int, ...] = (),
    who: np.ndarray | None = None,
    watch: Watch = lambda _: None,
) -> Pilot:
    """Determines settings that were not given. `asked` is the algorithm as requested, with 0 for step sizes
    that were not given, and `simulation` is that of the run itself.

    If `rounds` is given, training takes that many, and only l2 is chosen. Raises `Diverged` if step sizes
    that were given are too large.
    """
    held = simulation.federation
    held = held if np.any(held.n_val) else held.hold_out(0, FOLDS)
    if not np.any(held.n_val):
        l2 = np.full(simulation.trained_clients, STRENGTHS[0]) if chooses_l2(asked) else None
        return Pilot(simulation.algorithm, rounds or UNJUDGED, quarter_at, True, {}, {}, l2=l2)
    steps, retries = simulation.algorithm, 0
    while True:
        course = Course(steps, simulation, held, who)
        try:
            if rounds:
                found = course.given(rounds, quarter_at, watch)
            else:
                found = course.until_converged(budget, watch)
            break
        except Diverged:
            if retries == RETRIES or (steps := slower(asked, steps)) is None:
                raise
            retries += 1
    found = found._replace(retries=retries)
    state = course.best
    if chooses_l2(asked):
        choice, without = _choose(course, found, simulation, watch)
        found = found._replace(l2=np.array(STRENGTHS)[choice], l2_without=np.array(STRENGTHS)[without])
        own = np.arange(len(choice))
        state = state._replace(clients=jax.tree.map(lambda a: a[own, choice], state.clients))
    if held.classes == 2:
        judged = course.simulation.evaluate(state, course.who, on="validation", train=False, rows=True)[0]
        found = found._replace(thresholds=judged.thresholds())
    return found


def slower(asked: Algorithm, steps: Algorithm) -> Algorithm | None:
    """The algorithm with a quarter of each step size that was not given; None if all were given."""
    own = {name: 0.25 * getattr(steps, name) for name in steps.steps if not getattr(asked, name)}
    return dataclasses.replace(steps, **own) if own else None


class Course:
    """Training with evaluation on validation rows; if l2 is to be chosen, each client trains a model for each
    strength."""

    def __init__(
        self, algorithm: Algorithm, simulation: Simulation, held: Federation, who: np.ndarray | None
    ) -> None:
        s = simulation
        self.simulation = Simulation(
            algorithm, s.model, held, cohort=min(s.cohort, held.clients), seed=s.seed, key=s.key
        )
        self.held = held
        self.who = np.arange(held.clients) if who is None else who
        start = self.simulation.start()
        self.state = self.best = with_every_l2(start) if chooses_l2(algorithm) else start
        parts: tuple[Part, ...] = ("validation", "train")
        self.blocks = {part: Blocks.of(held, part, self.who) for part in parts}
        self.scale = unlearned_loss(held.y[self.blocks["train"].rows()], held.classes)

    @property
    def t(self) -> int:
        """The round that comes next."""
        return self.state.t

    def lanes(self, state: State) -> list[State]:
        """The state, or one for each strength of l2."""
        if not chooses_l2(self.simulation.algorithm):
            return [state]

        def lane(k: int) -> State:
            return state._replace(clients=jax.tree.map(lambda a: a[:, k], state.clients))

        return [lane(k) for k in range(len(STRENGTHS))]

    def advance(self, to: int, quarter_at: tuple[int, ...], watch: Watch) -> None:
        """Trains until round `to`."""
        self.simulation.quarter_at = quarter_at
        while self.t < to:
            agreed(to)
            ((self.state, finite),) = advance([self.simulation], [self.state], to - self.t)
            if not finite:
                raise self.diverged()
            watch(self.t)

    def diverged(self) -> Diverged:
        """The error for steps that are too large."""
        return Diverged(f"{self.simulation.algorithm.name} diverged in round {self.t} of its pilot.")

    def row_scores(self, states: Sequence[State], part: Part) -> dict[str, np.ndarray]:
        """The `row_score` of each kind of model: one row per state, one column per row of the part."""
        simulation, blocks, store = self.simulation, self.blocks[part], self.simulation.judged
        found: dict[str, list[np.ndarray]] = {}
        for state in states:
            personal = simulation.answer(state, self.who)[0].personal
            for kind, theta in (("global", simulation.shared(state)), ("personal", personal)):
                if theta is not None:
                    made = outcomes(simulation.model, theta, store.x, store.y, blocks)
                    if not made.finite:
                        raise self.diverged()
                    found.setdefault(kind, []).append(row_score(made))
        return {kind: np.stack(scores) for kind, scores in found.items()}

    def owner(self, part: Part = "validation") -> np.ndarray:
        """For each row, the client whose model predicts it."""
        owner = self.blocks[part].owner()
        return np.zeros_like(owner) if self.simulation.algorithm.pools else owner

    def losses(self, part: Part = "validation") -> dict[str, float]:
        """The mean loss of each kind of model that a client would receive.

        If clients choose a strength, it is the loss of each client's best one on validation rows, and of the
        weakest on training rows.
        """
        states = self.lanes(self.state)
        states = states if part == "validation" else states[-1:]
        owner, found = self.owner(part), {}
        for kind, scores in self.row_scores(states, part).items():
            sums = np.stack([np.bincount(owner, -own) for own in scores])
            found[kind] = float(sums.min(axis=0).sum() / max(1, len(owner)))
        return found

    def until_converged(self, budget: int, watch: Watch) -> Pilot:
        """Doubles the rounds until doubling no longer helps, or the budget is used up.

        Rounds with full steps continue from one length to the next. To judge a
        length, a separate end is added to it: half as many rounds again, at 1/4, 1/16 and 1/64 of η.
        """
        best, least, found = np.inf, 10 * self.scale, None
        full, most, trunk = FIRST, max(1, int(budget / (1 + END))), self.state
        while True:
            full = min(full, most)
            self.state = trunk
            self.advance(full, (), watch)
            trunk = self.state
            third = min(max(1, round(END * full / 3)), (budget - full) // 3)
            quarter_at = (full, full + third, full + 2 * third)
            self.advance(full + 3 * third, quarter_at, watch)
            losses = self.losses()
            loss, trained = _mean(losses), _mean(self.losses("train"))
            if not trained < least + ROSE * self.scale:
                raise self.diverged()
            least = min(least, trained)
            level = full >= ENOUGH and loss > best - TOLERANCE * self.scale
            if loss < best or found is None:
                best, self.best = loss, self.state
                found = Pilot(self.simulation.algorithm, self.t, quarter_at, False, losses, {})
            if level or full == most:
                return found._replace(converged=level)
            full *= 2

    def given(self, rounds: int, quarter_at: tuple[int, ...], watch: Watch) -> Pilot:
        """Trains for a given number of rounds."""
        self.advance(rounds, quarter_at, watch)
        self.best = self.state
        return Pilot(self.simulation.algorithm, rounds, quarter_at, True, self.losses(), {})


def _choose(
    course: Course, found: Pilot, simulation: Simulation, watch: Watch
) -> tuple[np.ndarray, np.ndarray]:
    """The index in STRENGTHS that is best for each client on its validation rows, and the strongest of
    several that are about equally good; clients with few rows use all of them, held out in turn. And the same
    without each of these parts, for clients that have used others."""
    federation, pools = simulation.federation, simulation.algorithm.pools
    courses = [(course, course.who)]
    rows = federation.n_train.sum(keepdims=True) if pools else federation.n_train
    few = np.flatnonzero(rows < SMALL)
    if len(few) and not np.any(federation.n_val):
        some = federation if pools else federation.take(few)
        for fold in range(1, FOLDS):
            again = Course(found.algorithm, simulation, some.hold_out(fold, FOLDS), None)
            again.given(found.rounds, found.quarter_at, watch)
            courses.append((again, few))
    scores, owners = [], []
    for judged, who in courses:
        (own,) = judged.row_scores(judged.lanes(judged.best), "validation").values()
        scores.append(own.T)
        owners.append(judged.owner() if pools else who[judged.owner()])
    caution = CAUTION * np.sqrt(1 + FEW / np.maximum(rows, 1))

    def chosen(parts: Sequence[int]) -> np.ndarray:
        score, owner = (np.concatenate([values[k] for k in parts]) for values in (scores, owners))
        return choose(score, owner, len(rows), caution)

    parts = range(len(scores))
    choice, without = chosen(parts), []
    for part in parts:
        others = [k for k in parts if k != part]
        used = np.isin(np.arange(len(rows)), [i for k in others for i in owners[k]])
        without.append(np.where(used, chosen(others), choice) if others else choice)
    return choice, np.stack(without)


def _mean(losses: dict[str, float]) -> float:
    return float(np.mean(list(losses.values())))


def unlearned_loss(y: np.ndarray, classes: int) -> float:
    """The loss of always predicting the frequencies of the labels, or their mean.

    >>> round(unlearned_loss(np.array([0, 1, 0, 1]), 2), 4)  # log 2
    0.6931
    """
    if classes == 0:
        return float(np.var(y) / 2) or 1.0
    share = np.bincount(y.astype(int), minlength=classes) / max(1, len(y))
    return float(-np.sum(share * np.log(np.where(share > 0, share, 1)))) or 1.0
