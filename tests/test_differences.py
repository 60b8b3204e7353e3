"""How clients differ: the kind of difference is named on federations where it is known, and laws."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from pfedme.cli import main
from pfedme.data.federation import Federation
from pfedme.engine import differences as measured
from pfedme.engine.differences import Differences, differences, split
from pfedme.engine.linear import Rows, fit, loss, merged, prior

CLIENTS, ROWS, FEATURES, CLASSES = 16, 60, 6, 3


def made(change: str = "", seed: int = 0, clients: int = CLIENTS, classes: int = CLASSES) -> Federation:
    """Clients whose labels are drawn by a linear model of normal features, with a change to each client."""
    rng = np.random.default_rng(seed)
    W = 2 * rng.normal(size=(FEATURES, max(classes, 1)))

    def labelled(x: np.ndarray, W: np.ndarray) -> np.ndarray:
        z = x @ W
        return (
            np.argmax(z + rng.gumbel(size=z.shape), axis=1) if classes else z[:, 0] + rng.normal(size=len(z))
        )

    parts = []
    for i in range(clients):
        x = rng.normal(size=(ROWS, FEATURES)) + 2 * (change == "other inputs") * rng.normal(size=FEATURES)
        y = labelled(x, 2 * rng.normal(size=W.shape) if change == "own rule" else W)
        if change == "labels":
            many = rng.normal(size=(20 * ROWS, FEATURES))
            label = labelled(many, W)
            share = rng.dirichlet(np.full(classes, 0.3))[label]
            chosen = rng.choice(len(many), ROWS, replace=False, p=share / share.sum())
            x, y = many[chosen], label[chosen]
        elif change == "opposite" and i % 2:
            y = classes - 1 - y if classes else -y
        elif change == "offset":
            x = x + 2 * rng.normal(size=FEATURES)
        elif change == "level":
            y = y + 5 * rng.normal()
        parts.append((x, y))
    x, y = (np.concatenate(part).astype(np.float32) for part in zip(*parts, strict=True))
    return Federation.split([ROWS] * clients, x, y.astype(np.int32) if classes else y, classes=classes)


def found(federation: Federation) -> Differences:
    told = differences(federation)
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("", "none"),
        ("labels", "label skew"),
        ("other inputs", "feature shift"),
        ("offset", "feature shift"),
        ("opposite", "a few kinds"),
        ("own rule", "unlike tasks"),
    ],
)
def test_the_kind_of_difference_is_named(change: str, kind: str):
    assert found(made(change)).kind == kind


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("", "none"),
        ("level", "label skew"),
        ("other inputs", "feature shift"),
        ("opposite", "a few kinds"),
        ("own rule", "unlike tasks"),
    ],
)
def test_the_kind_of_difference_is_named_for_a_quantity(change: str, kind: str):
    assert found(made(change, classes=0)).kind == kind


def test_two_groups_are_found_if_there_are_two():
    ways = {way.name: way for way in found(made("opposite")).ways}
    assert ways["groups"].setting == 2


@pytest.mark.slow
def test_alike_clients_are_called_alike_in_19_of_20_draws():
    assert sum(found(made(seed=seed)).kind == "none" for seed in range(1, 61)) >= 57


def test_the_order_of_clients_does_not_matter():
    f = made("labels")
    assert found(f.take(np.random.default_rng(0).permutation(f.clients))) == found(f)


def test_test_rows_do_not_matter():
    f = made("opposite")
    start, count = f.rows("test")
    x, y = f.x.copy(), f.y.copy()
    for at, n in zip(start, count, strict=True):
        x[at : at + n], y[at : at + n] = 99.0, 0
    assert found(dataclasses.replace(f, x=x, y=y)) == found(f)


def test_a_way_is_judged_on_each_training_row_once_and_fitted_to_the_others():
    f = made()
    x = np.arange(len(f.y), dtype=np.float32)[:, None]
    halves = split(dataclasses.replace(f, x=x))
    start, count = f.rows("train")
    for i in range(f.clients):
        own = np.concatenate([half.x[i, 0][half.there[i]] for half in halves])
        assert sorted(own) == list(range(start[i], start[i] + count[i]))


def test_at_most_so_many_clients_and_rows_are_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "MOST_CLIENTS", 5)
    monkeypatch.setattr(measured, "MOST_ROWS", 8)
    told = found(made())
    assert (told.clients, told.rows) == (5, 40)


def rows(n: int = 50, classes: int = 3) -> Rows:
    """Two clients with n random rows each, of which the second has only half."""
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=(2, n)) if classes else rng.normal(size=(2, n)).astype(np.float32)
    there = np.arange(n) < np.array([[n], [n // 2]])
    return Rows(rng.normal(size=(2, 4, n)).astype(np.float32) * there[:, None], y, y, there)


@pytest.mark.parametrize("classes", [3, 0])
def test_a_fitted_model_is_a_minimum(classes: int):
    """By finite differences of the objective, client by client."""
    a, rng = rows(classes=classes), np.random.default_rng(1)
    shape = (2, max(classes, 1), 4)
    anchor, offset = rng.normal(size=shape).astype(np.float32), rng.normal(size=(2, shape[1], 1))
    theta = fit(a, offset.astype(np.float32), anchor, anchor, 0.1, 300).astype(np.float64)

    def objective(theta: np.ndarray) -> np.ndarray:
        z = theta @ a.x.astype(np.float64) + offset
        if classes:
            row = np.log(np.exp(z).sum(axis=1)) - np.take_along_axis(z, a.y[:, None], axis=1)[:, 0]
        else:
            row = 0.5 * (z[:, 0] - a.y) ** 2
        return (row * a.there).sum(axis=1) / a.there.sum(axis=1) + 0.05 * ((theta - anchor) ** 2).sum(
            axis=(1, 2)
        )

    for _ in range(5):
        step = 1e-3 * rng.normal(size=shape)
        slope = (objective(theta + step) - objective(theta - step)) / 2e-3
        np.testing.assert_allclose(slope, 0, atol=1e-4)


def test_the_label_prior_is_bayes_rule():
    """With no imagined rows, it turns a model that knows only π into the client's frequencies."""
    a, w = rows(), np.zeros((1, 3, 4), np.float32)
    offset = prior(a, w, 1e-9, 3)
    pooled = np.bincount(a.y[a.there], minlength=3) + 0.5
    z = np.log(pooled / pooled.sum()) + offset[..., 0]
    own = [np.bincount(a.y[i][a.there[i]], minlength=3) / a.there[i].sum() for i in range(2)]
    np.testing.assert_allclose(np.exp(z) / np.exp(z).sum(axis=1, keepdims=True), own, rtol=1e-5)


def test_merged_rows_have_the_same_losses():
    a, w = rows(), np.random.default_rng(2).normal(size=(1, 3, 4))
    zero = np.zeros((1, 3, 1))
    one = merged(a)
    np.testing.assert_allclose(loss(one, w, zero)[one.there], loss(a, w, zero)[a.there])


def test_one_client_or_one_row_each_is_not_compared():
    assert differences(made(clients=1)) is None
    tiny = Federation.split([1, 1, 1], np.zeros((3, 2), np.float32), np.array([0, 1, 0]), classes=2)
    assert differences(tiny) is None


def test_clients_that_are_constant_are_alike():
    x, y = np.zeros((80, 3), np.float32), np.zeros(80, np.int32)
    assert found(Federation.split([10] * 8, x, y, classes=2)).kind == "none"


def test_the_description_says_how_clients_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    f = made("opposite")
    np.savez(tmp_path / "t.npz", x=f.x, y=f.y, client=np.repeat(np.arange(f.clients), f.count))
    line = f"data describe --data {tmp_path / 't.npz'}"
    assert main(shlex.split(f"{line} --out {tmp_path / 'out'}")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "clients differ by a few kinds" in said
    assert "try ifca" in said
    assert (tmp_path / "out" / "differences.png").read_bytes().startswith(b"\x89PNG")
    assert main(shlex.split(f"{line} --json")) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["kind"] == "a few kinds"
