"""What comes from the data when nothing is given: step sizes, rounds, smaller steps, clients' l2."""

import dataclasses
import json
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import assert_close, assert_same_bits, federation, network, tiny
from scipy.optimize import minimize

from pfedme.algorithms import ALGORITHMS, Algorithm, Alone, FedAvg, PFedMe, Pooled
from pfedme.algorithms.alone import STRENGTHS
from pfedme.algorithms.base import sgd
from pfedme.cli import main
from pfedme.core.models import Network
from pfedme.core.prox import prox
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.errors import Diverged
from pfedme.training.notes import about_training, still_falling, weights
from pfedme.training.pilot import ENOUGH, pilot, slower, with_every_l2, with_l2

DATA = "synthetic:clients=5,rows=40,features=4,classes=3"


def clients(sizes: list[int], *, noise: float = 1.0, seed: int = 0, classes: int = 2) -> Federation:
    """Rows whose label depends on the first feature, the same way for all clients."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), 3)).astype(np.float32)
    score = x[:, 0] + noise * rng.normal(size=len(x))
    y = (score > 0).astype(int) if classes else score.astype(np.float32)
    return Federation.split(sizes, x, y, classes=classes)


def linear(fed: Federation) -> Network:
    return Network(features=fed.features, classes=fed.classes)


@dataclasses.dataclass(frozen=True)
class Quadratic:
    """½ Σ a_j θ_j²."""

    a: jax.Array

    def grad(self, theta: Params) -> Params:
        return Params(self.a * theta.tree)


# --- Step sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_step_that_is_given_stays_and_the_others_are_found(cls: type[Algorithm]):
    given = cls(eta=0.123).with_steps(7.0)
    assert given.eta == 0.123
    found = cls().with_steps(7.0)
    assert all(getattr(found, name) > 0 for name in cls.steps)
    twice = cls().with_steps(14.0)
    assert all(getattr(twice, name) < getattr(found, name) for name in cls.steps)


@pytest.mark.parametrize("L", [0.1, 3.0, 250.0])
def test_the_stable_steps_contract_on_quadratics_of_that_curvature(L: float):
    """|1 − η a| ≤ 1 for FedAvg, the same for the inner problem, and for w on the Moreau envelope."""
    a = jnp.array([L, L / 10])
    assert float(jnp.max(jnp.abs(1 - FedAvg().with_steps(L).eta * a))) <= 1
    algorithm = PFedMe(lam=15.0).with_steps(L)
    w = Params(jnp.ones(2))
    solved = prox(Quadratic(a), w, w, lam=15.0, alpha=algorithm.alpha, K=2000).theta
    np.testing.assert_allclose(solved.tree, 15 / (15 + a), rtol=1e-4)
    assert float(jnp.max(jnp.abs((w - algorithm.eta * 15.0 * (w - solved)).tree))) <= 1 + 1e-5


def test_the_curvature_is_that_of_the_softmax_hessian_and_does_not_depend_on_the_order_of_clients():
    fed = federation()
    sims = [Simulation(FedAvg(), network(), f, cohort=2) for f in (fed, fed.take([3, 0, 4, 2, 1]))]
    assert sims[0].smoothness() == sims[1].smoothness()
    assert sims[0].algorithm.eta == pytest.approx(1 / sims[0].smoothness(), rel=1e-2)


def test_only_steps_that_were_not_given_become_smaller():
    found = PFedMe(eta=0.5).with_steps(3.0)
    again = slower(PFedMe(eta=0.5), found)
    assert isinstance(again, PFedMe)
    assert (again.eta, again.alpha) == (0.5, found.alpha / 4)
    assert slower(found, found) is None


# --- Rounds ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_converged_training_is_near_the_minimum():
    """Pooled softmax regression, by L-BFGS in float64."""
    fed = clients([60, 80, 100])
    sim = Simulation(Pooled(), linear(fed), fed, cohort=3)
    found = pilot(Pooled(), sim, budget=400)
    assert found.converged
    state = with_l2(sim.start(), np.zeros(1))
    sim.quarter_at = found.quarter_at
    while state.t < found.rounds:
        state, _ = sim.advance(state, found.rounds - state.t)
    whole = fed.pooled()

    def loss(flat: np.ndarray) -> float:
        z = whole.x.astype(float) @ flat[:6].reshape(2, 3).T + flat[6:]
        return float(np.mean(np.logaddexp(z[:, 0], z[:, 1]) - z[np.arange(len(z)), whole.y]))

    best = minimize(loss, np.zeros(8)).fun
    reached = sim.evaluate(state)[0].train["global"].mean_loss
    assert best - 1e-6 <= reached <= best + 0.01


def test_a_budget_that_ends_training_early_is_said():
    fed = clients([60, 80, 100], noise=0.05)
    sim = Simulation(FedAvg(eta=0.001), linear(fed), fed, cohort=3)
    found = pilot(FedAvg(eta=0.001), sim, budget=60)
    assert not found.converged
    assert found.rounds <= 60 + 2
    told = {
        "found": [],
        "retries": 0,
        "rounds": found.rounds,
        "stopped": "budget",
        "budget": 60,
        "improving": True,
    }
    assert "still falling" in about_training(told)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg(), PFedMe(), Alone()], ids=lambda a: a.name)
def test_a_larger_budget_changes_nothing_once_training_has_converged(algorithm: Algorithm):
    """Where twice the rounds that were best were within the smaller budget."""
    fed = clients([60, 80, 100], noise=0.5)
    sim = Simulation(algorithm, linear(fed), fed, cohort=3)
    small, large = (pilot(algorithm, sim, budget=budget) for budget in (600, 6000))
    assert small.converged
    assert max(2.1 * small.rounds, 1.5 * ENOUGH) <= 600
    for mine, theirs in zip((small.l2, small.l2_without), (large.l2, large.l2_without), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or np.array_equal(mine, theirs)
    small, large = (found._replace(l2=None, l2_without=None) for found in (small, large))
    assert small == large


def test_a_training_that_overfits_is_cut_short():
    """Labels are noise: what is learned after the first rounds makes validation rows worse."""
    fed = clients([30] * 4, noise=1e6)
    sim = Simulation(FedAvg(), linear(fed), fed, cohort=4)
    found = pilot(FedAvg(), sim, budget=1500)
    assert found.converged
    assert found.rounds <= 3 * ENOUGH


def test_the_pilot_does_not_read_test_rows_and_does_not_depend_on_the_order_of_clients():
    fed = clients([60, 80, 100])
    spoiled = fed.x.copy()
    start, count = fed.rows("test")
    for a, n in zip(start, count, strict=True):
        spoiled[a : a + n] = np.nan
    order = [2, 0, 1]
    results = [
        pilot(Alone(), Simulation(Alone(), linear(f), f, cohort=3), budget=60)
        for f in (fed, dataclasses.replace(fed, x=spoiled), fed.take(order))
    ]
    assert results[0].rounds == results[1].rounds == results[2].rounds
    assert results[0].validation == results[1].validation
    l2 = [np.asarray(result.l2) for result in results]
    np.testing.assert_array_equal(l2[0], l2[1])
    np.testing.assert_array_equal(l2[0][order], l2[2])


def test_steps_that_are_too_large_become_smaller_or_are_refused_if_given():
    """The curvature of a client that is not among those looked at is a thousand times the others'."""
    fed = clients([20] * 40, classes=0)
    x = fed.x.copy()
    x[fed.start[4] : fed.start[5]] *= 30
    fed = dataclasses.replace(fed, x=x)
    sim = Simulation(FedAvg(), linear(fed), fed, cohort=40)
    assert 4 not in np.linspace(0, 39, 32).astype(int)
    found = pilot(FedAvg(), sim, budget=40)
    assert found.retries >= 1
    assert found.algorithm.eta == pytest.approx(sim.algorithm.eta / 4**found.retries)
    assert all(np.isfinite(loss) for loss in found.validation.values())
    with pytest.raises(Diverged):
        pilot(FedAvg(eta=1.0), Simulation(FedAvg(eta=1.0), linear(fed), fed, cohort=40), budget=40)


def test_clients_without_rows_to_hold_out_train_for_a_fixed_number_of_rounds():
    fed = clients([4, 4, 4])
    found = pilot(FedAvg(), Simulation(FedAvg(), linear(fed), fed, cohort=3), budget=1500)
    assert (found.rounds, found.validation) == (100, {})


def test_whether_a_given_number_of_rounds_was_enough_is_seen_in_the_training_loss():
    fed = clients([60, 80])

    def history(*losses: float) -> list[dict]:
        return [{"round": k, "global": {"train_loss": loss}} for k, loss in enumerate(losses)]

    assert still_falling(history(0.7, 0.6, 0.5, 0.4, 0.3), fed)
    assert not still_falling(history(0.7, 0.5, 0.4, 0.4, 0.4), fed)
    assert not still_falling(history(0.7), fed)


# --- Alone -------------------------------------------------------------------------------------------


def test_all_of_l2_leaves_a_client_with_how_often_its_labels_occur():
    fed = clients([80, 120])
    sim = Simulation(tiny(Alone, B=0, eta=0.5, R=50), linear(fed), fed, cohort=2)
    state, _ = sim.advance(with_l2(sim.start(), np.full(2, 1e6)), 20)
    (W, b), *_ = sim.answer(state)[0].personal.tree  # type: ignore[union-attr]
    np.testing.assert_allclose(W, 0, atol=1e-6)
    for i in range(2):
        own = fed.y[fed.start[i] : fed.start[i] + fed.n_train[i]]
        odds = np.exp(b[i])
        np.testing.assert_allclose(odds / odds.sum(), np.bincount(own, minlength=2) / len(own), atol=1e-3)


def test_no_l2_changes_nothing_and_a_strength_is_a_proximal_step():
    fed = clients([40])
    sim = Simulation(FedAvg(eta=0.1), linear(fed), fed, cohort=1)
    problem = sim.store.problem(sim.model, 0)
    w, key = sim.start().server, jax.random.key(1)
    plain, none = (sgd(key, problem, w, eta=0.1, steps=3, B=5, l2=l2) for l2 in (None, jnp.zeros(())))
    assert_same_bits(plain, none)
    one, shrunk = (sgd(key, problem, w, eta=0.1, steps=1, B=5, l2=l2) for l2 in (None, jnp.float32(2)))
    (W, b), (V, c) = one.tree[0], shrunk.tree[0]
    np.testing.assert_allclose(V, W / 1.2, rtol=1e-6)
    np.testing.assert_array_equal(b, c)


def test_a_model_for_each_strength_is_trained_like_the_only_one():
    fed = clients([40, 25])
    sim = Simulation(tiny(Alone), linear(fed), fed, cohort=2)
    every, _ = sim.advance(with_every_l2(sim.start()), 5)
    for k, strength in enumerate(STRENGTHS):
        only, _ = sim.advance(with_l2(sim.start(), np.full(2, strength)), 5)
        assert_close(jax.tree.map(lambda a, k=k: a[:, k], every.clients), only.clients)


@pytest.mark.slow
def test_clients_whose_labels_are_noise_choose_a_strong_l2_and_others_a_weak_one():
    noise, clear = clients([60] * 3, noise=1e6, seed=1), clients([400] * 3, noise=0.05, seed=2)
    fed = Federation.split(
        [60] * 3 + [400] * 3,
        np.concatenate([noise.x, clear.x]),
        np.concatenate([noise.y, clear.y]),
        classes=2,
    )
    found = pilot(Alone(), Simulation(Alone(), linear(fed), fed, cohort=6), budget=200)
    assert found.l2 is not None
    assert found.l2[:3].min() >= STRENGTHS[2]
    assert found.l2[3:].max() <= STRENGTHS[3]


# --- The command -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "alone"])
def test_the_command_in_the_record_repeats_the_run_with_every_number_written_out(name: str, tmp_path: Path):
    out, again = tmp_path / "auto", tmp_path / "again"
    assert main(["run", name, "--data", DATA, "--R", "5", "--budget", "24", "--out", str(out)]) == 0
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["rounds"] == record["auto"]["rounds"] == record["final"]["round"]
    assert record["config"]["algorithm"]["eta"] == record["auto"]["steps"]["eta"] > 0
    words = shlex.split(record["command"])[1:]
    assert main([*words, "--out", str(again)]) == 0
    repeated = json.loads((again / "record.json").read_text())
    assert repeated["final"] == record["final"]
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_the_weights_are_told_where_one_client_has_far_more_rows_than_the_others():
    uneven, even = clients([400, 20, 20, 20]), clients([40, 50, 60, 40])
    told = weights(FedAvg(), uneven)
    share = uneven.n_train[0] / uneven.n_train.sum()
    assert told == {"aggregation": "samples", "client": uneven.name(0), "share": pytest.approx(share)}
    assert weights(FedAvg(), even) is None
    assert weights(Alone(), uneven) is None


@pytest.mark.parametrize("aggregation", ["uniform", "samples"])
def test_a_run_says_how_clients_are_weighted(aggregation: str, tmp_path: Path):
    table = tmp_path / "table.csv"
    rng = np.random.default_rng(0)
    rows = [f"{c},{x:.3f},{int(x > 0)}" for c in "a" * 200 + "bcd" * 12 for x in [rng.normal()]]
    table.write_text("\n".join(["site,x,y", *rows]))
    words = ["run", "fedavg", "--data", str(table), "--client", "site", "--label", "y", "--rounds", "2"]
    assert main([*words, "--aggregation", aggregation, "--out", str(tmp_path / "out")]) == 0
    said = " ".join(json.loads((tmp_path / "out" / "record.json").read_text())["auto"]["sentences"])
    assert {"uniform": "weighted equally, although 'a'", "samples": "weighted by rows, so 'a'"}[
        aggregation
    ] in said
