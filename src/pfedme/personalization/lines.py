"""The models that clients are offered: what an algorithm trains, on all training rows or on some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pfedme.algorithms import IFCA, Algorithm, Alone, FedAvg, LabelPrior
from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.choices import Line, Start, for_all
from pfedme.engine.chunks import MadeOnDemand, Stacked, groups
from pfedme.engine.differences import Differences
from pfedme.engine.label_shift import frequencies, prior
from pfedme.engine.simulate import Simulation, State
from pfedme.errors import Diverged
from pfedme.runs.run import Run
from pfedme.training.pilot import FOLDS, MODELS, chooses_l2, pilot, with_l2

WARMUP = 0.25
"""The share of the rounds after which clusters are formed; at most as many rounds as IFCA's default."""
ON_THE_MENU = ("pfedme", "fedavg-ft", "label-prior", "ifca", "hypcluster", "alone")
"""Algorithms whose personal models are among the candidates in any case."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an algorithm is trained: everything but the rows."""

    algorithm: Algorithm
    """With its step sizes."""
    model: Model
    cohort: int
    seed: int
    rounds: int
    quarter_at: tuple[int, ...] = ()
    l2: np.ndarray | None = None
    """The strength that each client has chosen, for `alone`."""
    l2_without: np.ndarray | None = None
    """The strengths that they have chosen without each part of their rows."""

    def simulation(self, federation: Federation, total: int | None = None) -> Simulation:
        """The algorithm on the rows of a federation, which may be a part of `total` clients."""
        return Simulation(
            self.algorithm, self.model, federation, cohort=min(self.cohort, federation.clients),
            seed=self.seed, quarter_at=self.quarter_at, total=total,
        )  # fmt: skip

    def train(self, federation: Federation) -> tuple[Simulation, State]:
        """Trains on the training rows of a federation."""
        simulation = self.simulation(federation)
        return simulation, self._trained(simulation, self.l2_for(federation))

    def _trained(self, simulation: Simulation, l2: np.ndarray | None) -> State:
        """The state after training with these strengths of l2."""
        state = simulation.start()
        if l2 is not None:
            state = with_l2(state, l2)
        state, finite = simulation.advance(state, self.rounds)
        if not finite:
            raise Diverged(
                f"{self.algorithm.name} diverged in round {state.t} of training for its clients' own models; "
                "lower its step size."
            )
        return state

    def l2_for(self, federation: Federation) -> np.ndarray | None:
        """The strengths of l2, chosen without the rows that the federation holds out."""
        fold, folds = federation.fold or (0, 0)
        without = self.l2_without
        return self.l2 if without is None or folds != FOLDS or fold >= len(without) else without[fold]

    def shared(self, federation: Federation) -> Params:
        """The shared model that is trained on a federation."""
        simulation, state = self.train(federation)
        w = simulation.shared(state)
        assert w is not None
        return w

    def personal(self, federation: Federation) -> Params:
        """The personal models that are trained on a federation, stacked."""
        return self.models(federation)[np.arange(federation.clients)]

    def models(self, federation: Federation) -> Stacked:
        """The same; those of many clients are made when they are asked for."""
        if self.algorithm.federated:
            return answers(*self.train(federation))
        simulation, l2 = self.simulation(federation), self.l2_for(federation)

        def make(who: np.ndarray) -> Params:
            part = simulation.part(who)
            state = self._trained(part, None if l2 is None else l2[who])
            return answered(part, state, np.arange(len(who)))

        return at_once_or_later(make, federation, simulation.room(MODELS))

    def fedavg(self) -> Recipe:
        """The same for FedAvg."""
        return dataclasses.replace(self, algorithm=_like(self.algorithm, FedAvg()))

    def ifca(self, clusters: int) -> Recipe:
        """The same for IFCA with so many clusters."""
        warmup = min(IFCA.warmup, int(WARMUP * self.rounds))
        return dataclasses.replace(
            self, algorithm=_like(self.algorithm, IFCA(clusters=clusters, warmup=warmup))
        )


def answers(simulation: Simulation, state: State) -> Stacked:
    """The personal models with which clients respond to w."""
    make = partial(answered, simulation, state)
    return at_once_or_later(make, simulation.federation, simulation.room(MODELS))


def answered(simulation: Simulation, state: State, who: np.ndarray) -> Params:
    """Those of clients `who`, stacked."""
    theta = simulation.answer(state, who)[0].personal
    assert theta is not None
    return theta


def at_once_or_later(make: Callable[[np.ndarray], Params], federation: Federation, room: int) -> Stacked:
    """The models that `make` makes for clients: for all of them now if there is room, or else for some when
    they are asked for."""
    everyone = np.arange(federation.clients)
    return make(everyone) if len(everyone) <= room else MadeOnDemand(make)


def _like(algorithm: Algorithm, other: Algorithm) -> Algorithm:
    """Another algorithm with the batches of this one, and with its step size if both take steps of SGD."""
    same = {"R": algorithm.R, "B": algorithm.B, "batches": algorithm.batches}
    if isinstance(algorithm, FedAvg | IFCA):
        same |= {"eta": algorithm.eta, "aggregation": algorithm.aggregation}
    return dataclasses.replace(other, **same)


def alone_recipe(model: Model, federation: Federation, seed: int, budget: int) -> tuple[Recipe, bool]:
    """How each client of a federation is trained alone, with the number of rounds and the l2 that are best on
    validation rows; and whether the losses were still falling then."""
    asked = Alone()
    alone = Simulation(asked, model, federation, cohort=federation.clients, seed=seed)
    found = pilot(asked, alone, budget=budget)
    recipe = Recipe(
        found.algorithm, model, federation.clients, seed, found.rounds, found.quarter_at, found.l2,
        found.l2_without,
    )  # fmt: skip
    return recipe, not found.converged


def recipe_of(record: dict[str, Any], model: Model, clients: int) -> tuple[Recipe, bool] | None:
    """How each client was trained in a run of `alone` with this record, and whether the losses were still
    falling then; None if the record does not say with which l2."""
    run, auto = Run.from_json(record["config"]), record.get("auto") or {}
    algorithm = dataclasses.replace(run.algorithm, **auto.get("steps", {}))
    l2, without = (np.array(auto[name]) if name in auto else None for name in ("l2", "l2_without"))
    if chooses_l2(algorithm) and (l2 is None or len(l2) != clients):
        return None
    recipe = Recipe(algorithm, model, clients, run.seed, run.rounds, run.quarter_at, l2, without)
    return recipe, bool(auto.get("improving"))


def clusters_in(found: Differences | None) -> int:
    """The number of clusters into which clients clearly fall; 0 if something simpler explains how they
    differ."""
    if found is None or "a few kinds" not in (found.kind, *found.also):
        return 0
    return next(int(way.setting) for way in found.ways if way.kind == "a few kinds")


def trained_under(algorithm: Algorithm, pi: np.ndarray) -> np.ndarray:
    """The label frequencies that an algorithm's shared model was trained under, if those of the clients are π
    on average: π, or equal ones if clients' frequencies enter already in training."""
    if isinstance(algorithm, LabelPrior) and algorithm.form == "training":
        return np.full_like(pi, 1 / len(pi))
    return pi


def global_line(train: Callable[[Federation], Params], recipe: Recipe) -> Line:
    """The shared model that `train` gives, which is that of the recipe."""

    def start(federation: Federation) -> Start:
        pi = None
        if federation.classes:
            pi = trained_under(recipe.algorithm, prior(federation, recipe.algorithm.aggregation))
        return Start(for_all(train(federation), federation.clients), pi)

    return Line("global", start)


def cluster_line(recipe: Recipe, name: str = "cluster") -> Line:
    """The model of each client's cluster."""

    def start(federation: Federation) -> Start:
        return Clusters.of(recipe, federation).start(federation)

    return Line(name, start)


def personal_line(recipe: Recipe) -> Line:
    """The personal models of an algorithm, as they are."""
    return Line(recipe.algorithm.name, lambda federation: Start(recipe.models(federation)), path=False)


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Trained models of several clusters."""

    recipe: Recipe
    state: State
    prior: np.ndarray | None
    """The label frequencies that the model of each cluster (row) was trained under."""
    clients: int

    @classmethod
    def of(cls, recipe: Recipe, federation: Federation) -> Clusters:
        """Trains them on a federation."""
        _, state = recipe.train(federation)
        found = cls(recipe, state, None, federation.clients)
        if not federation.classes:
            return found
        assert isinstance(recipe.algorithm, IFCA)
        _, which = found.chosen(federation)
        weights = (which == np.arange(recipe.algorithm.clusters)[:, None]).astype(float)
        if recipe.algorithm.aggregation == "samples":
            weights = weights * federation.n_train
        total = weights.sum(axis=1, keepdims=True)
        mean = weights @ frequencies(federation).astype(np.float64) / np.maximum(total, 1e-12)
        overall = prior(federation, recipe.algorithm.aggregation)
        return dataclasses.replace(found, prior=np.where(total > 0, mean, overall))

    def chosen(self, federation: Federation) -> tuple[Stacked, np.ndarray]:
        """The model of each client's cluster, by its training rows, and the cluster's index."""
        simulation = self.recipe.simulation(federation, self.clients)
        everyone, room = np.arange(federation.clients), simulation.room(MODELS)
        if len(everyone) <= room:  # one answer has both
            models, info = simulation.answer(self.state)
            assert models.personal is not None
            return models.personal, info["cluster"].astype(int)
        which = [
            simulation.answer(self.state, some)[1]["cluster"][:count]
            for some, count in groups(everyone, room)
        ]
        return MadeOnDemand(partial(answered, simulation, self.state)), np.concatenate(which).astype(int)

    def start(self, federation: Federation) -> Start:
        """The model of each client's cluster, and the label frequencies that it was trained under."""
        models, which = self.chosen(federation)
        return Start(models, None if self.prior is None else self.prior[which])
