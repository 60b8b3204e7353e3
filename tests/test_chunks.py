"""Clients that take turns, because their models would need too much memory at once, get the same models and
scores as together. Models that clients train alone agree up to rounding, everything else to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from laws import assert_close, assert_same_bits, network, tiny

from pfedme.algorithms import IFCA, Alone, Ditto, PFedMe
from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine import chunks
from pfedme.engine.choices import Personalize, personalize, with_own_lambdas
from pfedme.engine.chunks import groups, stacked
from pfedme.engine.measure import MEASURES
from pfedme.engine.metrics import Blocks
from pfedme.engine.simulate import Simulation
from pfedme.personalization.lines import Recipe, alone_recipe, cluster_line, global_line, personal_line
from pfedme.runs.rows_file import rows_file
from pfedme.training.pilot import pilot

CLIENTS = 9
HOW = Personalize(steps=3, folds=2, B=4)


def clients(classes: int = 3) -> Federation:
    """Nine clients of different sizes; two have nothing to test."""
    rng = np.random.default_rng(5)
    counts = rng.integers(6, 40, CLIENTS)
    n_test = np.where(np.arange(CLIENTS) % 4 == 3, 0, counts // 4)
    x = rng.normal(size=(counts.sum(), 3)).astype(np.float32)
    z = x @ rng.normal(size=3) + 0.5 * rng.normal(size=len(x))
    y = z.astype(np.float32) if classes == 0 else np.digitize(z, [0, 1][: classes - 1]).astype(np.int32)
    return Federation(
        x=x, y=y, n_train=counts - n_test, n_test=n_test, classes=classes,
        ids=np.arange(10, 10 + CLIENTS, dtype=np.uint32),
    ).checked()  # fmt: skip


def in_turn_and_together(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Any]) -> tuple[Any, Any]:
    """What is computed with as few clients at once as possible, and with all."""
    together = compute()
    monkeypatch.setattr(chunks, "MOST_BYTES", 1)
    assert chunks.at_once(1000) == jax.device_count() < CLIENTS
    return compute(), together


def numbers(found: Any) -> Any:
    """The arrays of a result."""
    return {k: v for k, v in vars(found).items() if isinstance(v, np.ndarray)}


@pytest.mark.parametrize(("classes", "metric"), [(3, None), (2, "auc"), (0, "mae")])
def test_every_client_chooses_the_same_model(
    monkeypatch: pytest.MonkeyPatch, classes: int, metric: str | None
):
    fed = clients(classes)
    model = Network(features=3, classes=classes)

    def own(part: Federation) -> Params:
        return jax.vmap(lambda i: model.init(jax.random.fold_in(jax.random.key(2), i)))(part.ids)

    def found() -> Any:
        recipe = Recipe(tiny(PFedMe), model, cohort=4, seed=0, rounds=2)
        lines = [
            global_line(recipe.shared, recipe),
            cluster_line(recipe.ifca(2)),
            personal_line(dataclasses.replace(recipe, algorithm=tiny(Ditto))),
        ]
        made = personalize(
            HOW, model, fed, lines, own, given=15.0, measure=MEASURES[metric] if metric else None
        )
        values = {k: (v.overall, v.half_width, v.own) for k, v in made.values.items()}
        return numbers(made), made.theta, values

    one, other = in_turn_and_together(monkeypatch, found)
    assert bool(one[2]) == bool(metric)
    assert_same_bits(one, other)


@pytest.mark.parametrize(("classes", "rounds", "some"), [(3, 0, False), (2, 0, True), (2, 3, False)])
def test_a_pilot_of_clients_alone_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, classes: int, rounds: int, some: bool
):
    fed = clients(classes)
    who = np.array([0, 2, 3, 5, 8]) if some else None

    def found() -> Any:
        alone = Simulation(Alone(), Network(features=3, classes=classes), fed, cohort=fed.clients)
        return pilot(Alone(), alone, budget=12, rounds=rounds, who=who)._asdict()

    one, other = in_turn_and_together(monkeypatch, found)
    assert one.pop("algorithm") == other.pop("algorithm")
    assert_close(one, other)
    assert set(one["thresholds"]) == ({"personal"} if classes == 2 else set())


def test_clients_that_train_alone_get_the_same_models(monkeypatch: pytest.MonkeyPatch):
    fed, model = clients(), network()

    def found() -> Any:
        recipe, _ = alone_recipe(model, fed, 0, 6)
        return recipe.l2, recipe.l2_without, recipe.personal(fed.hold_out(1, 5))

    assert_close(*in_turn_and_together(monkeypatch, found))


@pytest.mark.parametrize("algorithm", [PFedMe, Alone, IFCA])
def test_evaluation_and_the_file_of_rows_are_the_same(monkeypatch: pytest.MonkeyPatch, algorithm: type):
    fed = clients()

    def found() -> Any:
        simulation = Simulation(tiny(algorithm), network(), fed, cohort=4)
        state, _ = simulation.advance(simulation.start(), 2)
        evaluation, models = simulation.evaluate(state, np.array([0, 1, 2, 3, 4, 6, 8]), rows=True)
        kinds = {"global": simulation.shared(state), **models._asdict()}
        files = rows_file(simulation, evaluation.clients, kinds)
        scores = {kind: (own.correct, own.loss, own.count) for kind, own in evaluation.test.items()}
        return models, evaluation.info, scores, evaluation.entry(full=True), files

    one, other = in_turn_and_together(monkeypatch, found)
    assert one[-1] == other[-1]
    assert one[-2] == other[-2]
    assert_same_bits(one[:-2], other[:-2])


def test_clients_choose_the_same_lambdas_during_training(monkeypatch: pytest.MonkeyPatch):
    fed = clients().hold_out(0, 3)

    def found() -> Any:
        simulation = Simulation(tiny(PFedMe, rechoose=2), network(), fed, cohort=4)
        state, _ = simulation.advance(simulation.start(), 2)
        return with_own_lambdas(simulation, state, HOW).clients

    assert_same_bits(*in_turn_and_together(monkeypatch, found))


def test_the_blocks_of_parts_are_those_of_all():
    counts = np.array([40, 0, 3, 17, 0, 0, 90])
    whole = Blocks.cut(np.cumsum(counts) - counts, counts)
    parts = list(whole.parts(len(counts), 3))
    assert len(parts) == 3
    assert len({len(part.client) for part in parts}) == 1
    np.testing.assert_array_equal(np.concatenate([part.rows() for part in parts]), whole.rows())
    owner = [part.owner() + 3 * k for k, part in enumerate(parts)]
    np.testing.assert_array_equal(np.concatenate(owner), whole.owner())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 20])
def test_groups_have_everyone_once(size: int):
    who = np.arange(5, 14)
    found = list(groups(who, size))
    assert len({len(some) for some, _ in found}) == 1
    assert len(found[0][0]) <= size
    np.testing.assert_array_equal(np.concatenate([some[:count] for some, count in found]), who)
    whole = stacked((((some, -some), count) for some, count in found), len(who))
    assert_same_bits(whole, (who, -who))
