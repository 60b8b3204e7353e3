"""What privacy costs: the law of the best λ on quadratics, and the study in miniature."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from pfedme.algorithms import MRMTL
from pfedme.core.models import parse_model
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.experiments import privacy_cost, privacy_page
from pfedme.experiments.privacy_cost import FULL, METHODS, SETTINGS, TINY, Entry, Found, Point, chosen
from pfedme.experiments.quadratics import Means
from pfedme.experiments.study import Study
from pfedme.privacy.accounting import gaussian_delta, noise_for

EPSILONS = (0.5, 1.0, 2.0, 8.0, math.inf)


# --- the law λ* = s²/τ²


def mean_regularised(own: np.ndarray, lam: float) -> np.ndarray:
    """The minimiser of Σ ½ (v_i − x_i)² + λ/2 (v_i − w)² with w the mean of the v_i, by alternation."""
    v = own.copy()
    for _ in range(400):
        v = (own + lam * v.mean(axis=0)) / (1 + lam)
    return v


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_best_lambda_is_the_ratio_of_the_variances(epsilon: float):
    means = Means(clients=12, rows=80, tau=0.15)
    true, own = means.drawn(epsilon, 60_000)
    law = means.best_lam(epsilon)

    def error(log_lam: float) -> float:
        return float(np.mean((mean_regularised_at(own, math.exp(log_lam)) - true) ** 2))

    found = minimize_scalar(error, bounds=(math.log(law) - 3, math.log(law) + 3), method="bounded")
    assert math.exp(found.x) == pytest.approx(law, rel=0.05)
    assert means.best_lam_drawn(epsilon, 60_000) == pytest.approx(math.exp(found.x), rel=1e-3)
    assert error(math.log(law)) == pytest.approx(means.error(law, epsilon), rel=0.02)


def mean_regularised_at(own: np.ndarray, lam: float) -> np.ndarray:
    return (own + lam * own.mean(axis=0)) / (1 + lam)


@pytest.mark.parametrize("lam", [0.1, 1.0, 7.0])
def test_the_closed_form_is_the_minimiser(lam: float):
    own = np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_allclose(mean_regularised_at(own, lam), mean_regularised(own, lam), atol=1e-9)


def test_the_expected_error_is_least_at_the_law():
    for means in (Means(), Means(clients=3, rows=10, sigma=2.0, tau=1.0, clip=9.0)):
        for epsilon in EPSILONS:
            law = means.best_lam(epsilon)
            least = means.error(law, epsilon)
            assert all(means.error(law * factor, epsilon) > least for factor in (0.5, 0.9, 1.1, 2.0))


def test_stronger_privacy_wants_a_larger_lambda():
    means = Means()
    lams = [means.best_lam(epsilon) for epsilon in EPSILONS]
    assert lams == sorted(lams, reverse=True)
    assert lams[-1] == pytest.approx(means.sigma**2 / means.rows / means.tau**2)
    noise = means.variance(1.0) - means.variance(math.inf)
    z = math.sqrt(noise) * means.rows / means.clip
    assert gaussian_delta(z, 1, 1.0) == pytest.approx(means.delta, rel=0.02)


@pytest.mark.parametrize("lam", [0.5, 3.0])
def test_mr_mtl_finds_the_minimiser_on_quadratics(lam: float):
    """Clients without inputs fit a constant: a quadratic loss whose minimiser is the mean of their labels."""
    rng = np.random.default_rng(3)
    y = rng.standard_normal((4, 20)) + np.array([[-2.0], [0.0], [1.0], [4.0]])
    federation = Federation.split(
        np.full(4, 20), np.zeros((80, 1), np.float32), y.ravel().astype(np.float32), classes=0, train=0.5
    )
    described = parse_model("mlr").with_defaults(federation.features, federation.shape)
    simulation = Simulation(
        MRMTL(lam=lam, eta=0.2, R=5, B=0), described.build(federation.features, 0), federation, cohort=4
    )
    state, finite = simulation.advance(simulation.start(), 200)
    assert finite
    models, _ = simulation.answer(state)
    assert models.personal is not None
    (_, b) = models.personal.tree[0]
    start, count = federation.rows("train")
    own = np.array([federation.y[s : s + n].mean() for s, n in zip(start, count, strict=True)])
    np.testing.assert_allclose(np.ravel(b), mean_regularised_at(own, lam), atol=1e-4)


# --- the study


def test_the_study_covers_what_it_has_to():
    assert {"mnist-dirichlet", "mnist-rotated"} < {setting.name for setting in SETTINGS}
    assert len(SETTINGS) >= 4
    assert FULL.seeds >= 3
    assert math.inf in FULL.epsilons
    assert [method.name for method in METHODS] == ["alone", "fedavg", "mr-mtl", "pfedme"]
    for method in METHODS:
        assert method.fixed is None or method.fixed in method.lams
        assert method.fixed is None or method.fixed == getattr(method.algorithm(), "lam", None)


def test_the_best_on_validation_rows_is_chosen_and_of_equals_the_largest():
    points: dict[float | None, Point] = {0.1: Point(0.5, 0.9), 1.0: Point(0.7, 0.1), 2.0: Point(0.7, 0.2)}
    assert chosen(points) == 2.0
    assert chosen({0.1: Point(0.2, 0.2), 1.0: Point(math.nan, math.nan)}) == 0.1


def test_several_runs_together_cost_what_one_long_run_costs():
    federation = TINY.settings[0].federation(0)
    method = METHODS[2]
    made = privacy_cost.plan(TINY, method.at(TINY, TINY.settings[0], 0.1, 0.5), federation, 1.0)
    steps = TINY.rounds * TINY.R
    assert np.all(made.noise == noise_for(1.0, 0.99 * privacy_cost.DELTA, 1.0, steps))
    price = privacy_cost.price_of(made, 4)
    assert gaussian_delta(float(made.noise[0]), 4 * steps, price) == pytest.approx(
        privacy_cost.DELTA, rel=1e-6
    )
    assert 1.5 < price < 4
    without = privacy_cost.plan(TINY, method.at(TINY, TINY.settings[0], 0.1, 0.5), federation, math.inf)
    assert not np.any(without.noise)
    assert privacy_cost.price_of(without, 4) == math.inf


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path: Path):
    study = Study(tmp_path, "pfedme study privacy")
    found = privacy_page.study_privacy(study, TINY)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()}
    table = list(csv.DictReader(io.StringIO((tmp_path / "results" / "privacy.csv").read_text())))
    assert list(table[0]) == ["federation", "method", "epsilon", "seed", "evaluated", "accuracy"]
    assert len(table) == 6 * len(TINY.epsilons) * TINY.seeds
    assert {line["epsilon"] for line in table} == {"1", "inf"}
    assert {line["method"]: line["evaluated"] for line in table}["fedavg"] == "global"
    assert all(0 <= float(line["accuracy"]) <= 1 for line in table)
    for name in ("privacy.png", "privacy-lambda.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")
    again = privacy_page.study_privacy(study, TINY)
    assert again == found
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()} == kept


# --- the page, from made-up numbers


def made_up(**accuracies: list[float]) -> Found:
    """What a study with one federation and one ε would have found."""
    scale = privacy_cost.Scale(seeds=3, epsilons=(1.0,), settings=TINY.settings)
    entries = [
        Entry("tiny", method.replace("_", "-"), 1.0, seed, "personal", value)
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    lams = {("tiny", method, 1.0): [0.5, 2.0, 2.0] for method in ("mr-mtl", "pfedme")}
    price: dict[Any, float] = {("tiny", method, 1.0): 2.1 for method in ("mr-mtl", "pfedme")}
    return Found(scale, tuple(entries), lams, {}, price, {("tiny", 1.0): 5.0}, {"tiny": (4, 16, 80)})


NUMBERS = {
    "alone": [0.70, 0.71, 0.69],
    "fedavg": [0.60, 0.61, 0.62],
    "mr_mtl": [0.75, 0.77, 0.74],
    "mr_mtl_chosen": [0.75, 0.77, 0.76],
    "pfedme": [0.71, 0.69, 0.70],
    "pfedme_chosen": [0.50, 0.51, 0.49],
}


def test_gains_are_over_the_better_of_the_two_and_paired_by_seed():
    found = made_up(**NUMBERS)
    better = privacy_page.gain(found, "tiny", "mr-mtl", 1.0)
    assert better.rival == "alone"
    assert better.points.mean == pytest.approx((5 + 6 + 5) / 3)
    assert better.verdict == "better"
    assert privacy_page.gain(found, "tiny", "pfedme", 1.0).verdict == "cannot tell"
    worse = privacy_page.gain(found, "tiny", "pfedme-chosen", 1.0)
    assert worse.points.mean == pytest.approx(-20)
    assert worse.verdict == "worse"
    single = made_up(**{method: values[:1] for method, values in NUMBERS.items()})
    assert privacy_page.gain(single, "tiny", "mr-mtl", 1.0).verdict == "cannot tell"


def test_the_page_says_who_wins_and_that_choosing_is_not_accounted():
    text = privacy_page.page(made_up(**NUMBERS), ([1.0], [2.0], [2.0]))
    assert "MR-MTL with λ fixed is better than both training alone and FedAvg in 1 of 1 cases" in text
    assert "pFedMe cannot be told apart from the better of the two at ε = 1 (+0.0 against alone)" in text
    assert "Choosing spends budget" in text
    assert "| ε = 1 | 70.00 ± 2.48 |" in text
