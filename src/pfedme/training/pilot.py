"""Settings that were not given: the number of rounds, smaller steps at the end, and clients' l2, all chosen
on validation rows.

A pilot trains with a fifth of each client's training rows held out, which are the validation rows. It doubles
the rounds until doubling no longer lowers the loss on these rows. The run itself then trains on all training
rows with the settings found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import Algorithm, Alone
from pfedme.algorithms.alone import STRENGTHS
from pfedme.data.federation import Federation, Part
from pfedme.engine.choices import choose, row_score
from pfedme.engine.chunks import chunks, stacked
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
MODELS = 10
"""Models that a client needs memory for while it trains one of its own."""
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
    choice = None
    if chooses_l2(asked):
        choice, without = _choose(course, found, simulation, watch)
        found = found._replace(l2=np.array(STRENGTHS)[choice], l2_without=np.array(STRENGTHS)[without])
    if held.classes == 2:
        found = found._replace(thresholds=course.thresholds(found, choice))
    return found


def slower(asked: Algorithm, steps: Algorithm) -> Algorithm | None:
    """The algorithm with a quarter of each step size that was not given; None if all were given."""
    own = {name: 0.25 * getattr(steps, name) for name in steps.steps if not getattr(asked, name)}
    return dataclasses.replace(steps, **own) if own else None


class Group(NamedTuple):
    """Clients that train together."""

    simulation: Simulation
    who: np.ndarray
    """Those that are evaluated, by their number in the simulation; the last may be repeated."""
    clients: int
    """How many there are without repetition."""
    first: int
    """How many were in the groups before."""
    blocks: dict[Part, Blocks]
    """Their rows of each part."""


class Course:
    """Training with evaluation on validation rows; if l2 is to be chosen, each client trains a model for each
    strength.

    Clients that train alone do so in several groups if they are many. The states of these are not kept, so
    every length begins from the start for them.
    """

    def __init__(
        self, algorithm: Algorithm, simulation: Simulation, held: Federation, who: np.ndarray | None
    ) -> None:
        s = simulation
        self.simulation = Simulation(
            algorithm, s.model, held, cohort=min(s.cohort, held.clients), seed=s.seed, key=s.key
        )
        self.held = held
        self.who = np.arange(held.clients) if who is None else who
        self.blocks: dict[Part, Blocks] = {
            part: Blocks.of(held, part, self.who) for part in ("validation", "train")
        }
        self.scale = unlearned_loss(held.y[self.blocks["train"].rows()], held.classes)
        self.groups = list(self._groups())
        self.state: State | None = None
        """That of the only group after the rounds with full steps; None if there are several."""
        self.end: State | None = None
        """The same after all rounds of the best length."""
        self.best: dict[str, np.ndarray] = {}
        """The `row_score` of each kind of model on validation rows then; see `row_scores`."""

    def _groups(self) -> Iterator[Group]:
        """All clients, or as many of them after another as memory allows if they train alone."""
        s = self.simulation
        if s.algorithm.federated or s.algorithm.pools or s.home is not None:
            yield Group(s, self.who, len(self.who), 0, self.blocks)
            return
        size = s.room(MODELS * (len(STRENGTHS) if chooses_l2(s.algorithm) else 1))
        for judged, trained in zip(
            *(chunks(self.who, own, size) for own in self.blocks.values()), strict=True
        ):
            who, clients, first, blocks = judged
            own: dict[Part, Blocks] = {"validation": blocks, "train": trained.blocks}
            if clients == len(self.who):
                yield Group(s, who, clients, first, own)
            else:
                yield Group(s.part(who), np.arange(len(who)), clients, first, own)

    def lanes(self, state: State) -> list[State]:
        """The state, or one for each strength of l2."""
        if not chooses_l2(self.simulation.algorithm):
            return [state]

        def lane(k: int) -> State:
            return state._replace(clients=jax.tree.map(lambda a: a[:, k], state.clients))

        return [lane(k) for k in range(len(STRENGTHS))]

    def advance(
        self, group: Group, state: State, to: int, quarter_at: tuple[int, ...], watch: Watch
    ) -> State:
        """Trains until round `to`."""
        simulation = group.simulation
        simulation.quarter_at = quarter_at
        while state.t < to:
            agreed(to)
            ((state, finite),) = advance([simulation], [state], to - state.t)
            if not finite:
                raise self.diverged(state.t)
            watch((group.first * to + group.clients * state.t) // len(self.who))
        return state

    def diverged(self, t: int) -> Diverged:
        """The error for steps that are too large."""
        return Diverged(f"{self.simulation.algorithm.name} diverged in round {t} of its pilot.")

    def ends(
        self, rounds: int, quarter_at: tuple[int, ...], watch: Watch = lambda _: None
    ) -> Iterator[tuple[Group, State]]:
        """The state of each group after so many rounds."""
        full = min(quarter_at, default=0)
        for group in self.groups:
            state = self.state
            if state is None:
                state = group.simulation.start()
                state = with_every_l2(state) if chooses_l2(self.simulation.algorithm) else state
            state = self.advance(group, state, full, (), watch)
            if len(self.groups) == 1:
                self.state = state
            yield group, self.advance(group, state, rounds, quarter_at, watch)

    def train(
        self, rounds: int, quarter_at: tuple[int, ...], watch: Watch, parts: Sequence[Part] = ("validation",)
    ) -> tuple[dict[Part, dict[str, np.ndarray]], State | None]:
        """The `row_scores` on each part after so many rounds, on training rows with the weakest l2 alone; and
        the state, if there is only one group."""
        found: dict[Part, list[dict[str, np.ndarray]]] = {part: [] for part in parts}
        end = None
        for group, state in self.ends(rounds, quarter_at, watch):
            lanes, end = self.lanes(state), state if len(self.groups) == 1 else None
            for part, scores in found.items():
                some = lanes if part == "validation" else lanes[-1:]
                scores.append(self.row_scores(group, some, part))
        return {part: _side_by_side(scores) for part, scores in found.items()}, end

    def row_scores(self, group: Group, states: Sequence[State], part: Part) -> dict[str, np.ndarray]:
        """The `row_score` of each kind of model: one row per state, one column per row of the part."""
        simulation, blocks, store = group.simulation, group.blocks[part], group.simulation.judged
        found: dict[str, list[np.ndarray]] = {}
        for state in states:
            personal = simulation.answer(state, group.who)[0].personal
            for kind, theta in (("global", simulation.shared(state)), ("personal", personal)):
                if theta is not None:
                    made = outcomes(simulation.model, theta, store.x, store.y, blocks)
                    if not made.finite:
                        raise self.diverged(state.t)
                    found.setdefault(kind, []).append(row_score(made))
        return {kind: np.stack(scores) for kind, scores in found.items()}

    def owner(self, part: Part = "validation") -> np.ndarray:
        """For each row, the client whose model predicts it."""
        owner = self.blocks[part].owner()
        return np.zeros_like(owner) if self.simulation.algorithm.pools else owner

    def losses(self, found: dict[str, np.ndarray], part: Part = "validation") -> dict[str, float]:
        """The mean loss of each kind of model that a client would receive, from its `row_scores`.

        If clients choose a strength, it is the loss of each client's best one on validation rows.
        """
        owner, losses = self.owner(part), {}
        for kind, scores in found.items():
            sums = np.stack([np.bincount(owner, -own) for own in scores])
            losses[kind] = float(sums.min(axis=0).sum() / max(1, len(owner)))
        return losses

    def thresholds(self, found: Pilot, choice: np.ndarray | None) -> dict[str, float]:
        """The best threshold of each kind of model at the end of the best length, with each client's choice
        of the strengths of l2."""
        shared, t = None, found.rounds
        ends = self.ends(t, found.quarter_at) if self.end is None else [(self.groups[0], self.end)]

        def answers() -> Iterator[tuple[Any, int]]:
            nonlocal shared
            for group, state in ends:
                if choice is not None:
                    members = group.simulation.members if len(self.groups) > 1 else np.arange(len(choice))
                    own = np.arange(len(members)), choice[members]
                    state = state._replace(clients=jax.tree.map(lambda a, own=own: a[own], state.clients))
                shared = group.simulation.shared(state)
                yield group.simulation.answer(state, group.who), group.clients

        models, info = stacked(answers(), len(self.who))
        judged = self.simulation.score(
            t, shared, models, info, self.who, on="validation", train=False, rows=True
        )
        return judged.thresholds()

    def until_converged(self, budget: int, watch: Watch) -> Pilot:
        """Doubles the rounds until doubling no longer helps, or the budget is used up.

        Rounds with full steps continue from one length to the next. To judge a
        length, a separate end is added to it: half as many rounds again, at 1/4, 1/16 and 1/64 of η.
        """
        best, least, found = np.inf, 10 * self.scale, None
        full, most = FIRST, max(1, int(budget / (1 + END)))
        while True:
            full = min(full, most)
            third = min(max(1, round(END * full / 3)), (budget - full) // 3)
            quarter_at = (full, full + third, full + 2 * third)
            scores, end = self.train(full + 3 * third, quarter_at, watch, ("validation", "train"))
            losses = self.losses(scores["validation"])
            loss, trained = _mean(losses), _mean(self.losses(scores["train"], "train"))
            if not trained < least + ROSE * self.scale:
                raise self.diverged(full + 3 * third)
            least = min(least, trained)
            level = full >= ENOUGH and loss > best - TOLERANCE * self.scale
            if loss < best or found is None:
                best, self.best, self.end = loss, scores["validation"], end
                found = Pilot(self.simulation.algorithm, full + 3 * third, quarter_at, False, losses, {})
            if level or full == most:
                return found._replace(converged=level)
            full *= 2

    def given(self, rounds: int, quarter_at: tuple[int, ...], watch: Watch) -> Pilot:
        """Trains for a given number of rounds."""
        scores, self.end = self.train(rounds, quarter_at, watch)
        self.best = scores["validation"]
        return Pilot(self.simulation.algorithm, rounds, quarter_at, True, self.losses(self.best), {})


def _choose(
    course: Course, found: Pilot, simulation: Simulation, watch: Watch
) -> tuple[np.ndarray, np.ndarray]:
    """The index in STRENGTHS that is best for each client on its validation rows, and the strongest of
    several that are about equally good; clients with few rows use all of them, held out in turn. And the same
    without each of these parts, for clients that have used others."""
    federation, pools = simulation.federation, simulation.algorithm.pools
    scores, owners = [], []

    def judged(by: Course, who: np.ndarray) -> None:
        (own,) = by.best.values()
        scores.append(own.T)
        owners.append(by.owner() if pools else who[by.owner()])

    judged(course, course.who)
    rows = federation.n_train.sum(keepdims=True) if pools else federation.n_train
    few = np.flatnonzero(rows < SMALL)
    if len(few) and not np.any(federation.n_val):
        some = federation if pools or len(few) == len(rows) else federation.take(few)
        for fold in range(1, FOLDS):
            again = Course(found.algorithm, simulation, some.hold_out(fold, FOLDS), None)
            again.given(found.rounds, found.quarter_at, watch)
            judged(again, few)
            del again  # the next one needs its memory
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


def _side_by_side(found: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The scores of several groups of clients in one table for each kind of model."""
    return {kind: np.concatenate([scores[kind] for scores in found], axis=1) for kind in found[0]}


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
