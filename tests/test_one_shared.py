"""The relatives with one shared model: rounds against NumPy, and the laws of each. test_known_bugs_shared.py
has mistakes of public implementations that the same checks find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import oracles_shared
import pytest
from laws import EXACT, federation, flat, softmax_regression, start_at, train_rows
from shared_laws import (
    L2,
    assert_equal,
    check_rounds,
    check_same_model,
    minimiser,
    on_quadratics,
    quadratics,
    two_rounds,
    w0,
)

from pfedme.algorithms import (
    Algorithm,
    Aruba,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgFT,
    FedAvgM,
    FedDyn,
    FedMeta,
    FedProx,
    FedYogi,
    OneShot,
    PerFedAvg,
    Reptile,
    Scaffold,
)
from pfedme.algorithms.aggregate import FedPAQ
from pfedme.algorithms.base import Cohort
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

STEPS: dict[str, Any] = {"R": 3, "eta": 0.2}
CLIENT: dict[str, Any] = {**STEPS, "B": 0}
"""Of clients that use all their rows."""
SERVER: dict[str, Any] = {"beta": 0.03, "tau": 0.02}
MOMENTS: dict[str, Any] = {**SERVER, "beta1": 0.7, "beta2": 0.8}


def check_fedprox(cls: type[FedProx]) -> None:
    """With the paper's μ = 1 by default."""
    check_rounds(cls(**CLIENT, beta=1.5), oracles_shared.fedprox(mu=1.0, beta=1.5, **STEPS, l2=L2))


def check_scaffold(cls: type[Scaffold]) -> None:
    check_rounds(cls(**CLIENT, beta=1.5), oracles_shared.scaffold(beta=1.5, **STEPS, l2=L2))


def check_feddyn(cls: type[FedDyn]) -> None:
    for beta in (1.0, 0.7):
        oracle = oracles_shared.feddyn(alpha=0.4, beta=beta, **STEPS, l2=L2)
        check_rounds(cls(**CLIENT, lam=0.4, beta=beta), oracle)


def check_fedavgm(cls: type[FedAvgM]) -> None:
    oracle = oracles_shared.fedavgm(momentum=0.6, beta=1.5, **STEPS, l2=L2)
    check_rounds(cls(**CLIENT, mu=0.6, beta=1.5), oracle)


def check_fedadam(cls: type[FedAdam]) -> None:
    check_rounds(cls(**CLIENT, **MOMENTS), oracles_shared.fedopt("adam", **MOMENTS, **STEPS, l2=L2))


def check_fedyogi(cls: type[FedYogi]) -> None:
    check_rounds(cls(**CLIENT, **MOMENTS), oracles_shared.fedopt("yogi", **MOMENTS, **STEPS, l2=L2))


def check_fedadagrad(cls: type[FedAdagrad]) -> None:
    oracle = oracles_shared.fedopt("adagrad", **SERVER, beta1=0.0, beta2=0.0, **STEPS, l2=L2)
    check_rounds(cls(**CLIENT, **SERVER), oracle)


def check_aruba(cls: type[Aruba]) -> None:
    given: dict[str, Any] = {"zeta": 0.5, "p": 0.7, "F": 5, "beta": 1.5}
    check_rounds(cls(**CLIENT, **given), oracles_shared.aruba(**given, **STEPS, l2=L2))


def check_fedmeta(cls: type[FedMeta]) -> None:
    given: dict[str, Any] = {"alpha": 0.3, "beta": 1.5}
    check_rounds(cls(**CLIENT, **given), oracles_shared.fedmeta(**given, **STEPS, l2=L2))


CHECKS: dict[type[Algorithm], Callable[[Any], None]] = {
    FedProx: check_fedprox,
    Scaffold: check_scaffold,
    FedDyn: check_feddyn,
    FedAvgM: check_fedavgm,
    FedAdam: check_fedadam,
    FedYogi: check_fedyogi,
    FedAdagrad: check_fedadagrad,
    Aruba: check_aruba,
    FedMeta: check_fedmeta,
}


@pytest.mark.parametrize("cls", CHECKS, ids=lambda cls: cls.name)
def test_rounds_and_models_are_the_oracles(cls):
    CHECKS[cls](cls)


def check_reptile(cls: type[Reptile]) -> None:
    """FedAvg with ε = ½ and equal weights, and F steps from w."""

    def client(w: np.ndarray, rows: oracles.Rows, R: int = STEPS["R"]) -> np.ndarray:
        return oracles.fedavg_client(w, rows, eta=STEPS["eta"], R=R, l2=L2)

    oracle = oracles_shared.server_step(
        client, lambda w, N: (w,), lambda server, mean: (server[0] + mean / 2,), by_rows=False
    )
    check_rounds(
        cls(**CLIENT, F=7), oracle._replace(personal=lambda server, rows: client(server[0], rows, 7))
    )


def test_reptile_is_the_oracle_and_fedavg_ft_with_a_smaller_server_step():
    check_reptile(Reptile)
    check_same_model(Reptile(**CLIENT), FedAvgFT(**CLIENT, beta=0.5, aggregation="uniform"))


def test_one_shot_is_fedavg_with_one_long_round_of_all_clients_and_their_mean():
    algorithm = OneShot(**CLIENT)
    simulation, state = two_rounds(algorithm)
    clients = train_rows(simulation.federation)
    alone = np.array([oracles.fedavg_client(w0, rows, eta=0.2, R=6, l2=L2) for rows in clients])
    assert_equal(flat(state.clients, True), alone)
    assert_equal(flat(simulation.answer(state)[0].local, True), alone)
    w = flat(simulation.shared(state))
    assert_equal(w, alone.mean(axis=0))
    once = FedAvg(R=6, B=0, eta=0.2, aggregation="uniform")
    other = Simulation(once, simulation.model, simulation.federation, cohort=4)
    assert_equal(w, flat(other.advance(start_at(other, w0), 1)[0].server))
    # In softmax regression the mean model is the ensemble whose logits are averaged.
    x = simulation.federation.x
    assert_equal(oracles.logits(w, x), np.mean([oracles.logits(theta, x) for theta in alone], axis=0))


# --- special cases


FEDAVG = FedAvg(**CLIENT)
EQUAL = FedAvg(**CLIENT, aggregation="uniform")


@pytest.mark.parametrize(
    "algorithm",
    [
        FedProx(**CLIENT, lam=0.0),
        FedAvgM(**CLIENT, mu=0.0),
        FedAdam(**CLIENT, beta1=0.0, beta2=1.0, tau=0.3, beta=0.6),
        FedYogi(**CLIENT, beta1=0.0, beta2=1.0, tau=0.3, beta=0.6),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_a_special_case_is_fedavg(algorithm):
    check_same_model(algorithm, FEDAVG)


def test_with_large_tau_fedadagrad_is_fedavg_too():
    check_same_model(FedAdagrad(**CLIENT, tau=1e6, beta=2e6), FEDAVG, rtol=1e-9)


def test_with_large_zeta_aruba_keeps_the_first_step_size_and_is_fedavg():
    check_same_model(Aruba(**CLIENT, zeta=1e7), EQUAL, rtol=1e-9)


@pytest.mark.parametrize("algorithm", [Scaffold(**CLIENT), FedAvgM(**CLIENT, aggregation="uniform")])
def test_the_first_round_is_fedavgs(algorithm):
    got, want = (
        flat(simulation.shared(state))
        for simulation, state in (two_rounds(one, 1) for one in (algorithm, EQUAL))
    )
    assert_equal(got, want)


def test_a_yogi_forgets_a_large_second_moment_more_slowly_than_adam():
    v, square = jnp.array([4.0, 1.0]), jnp.array([0.01, 0.3])
    yogi, adam, adagrad = (cls().second_moment(v, square) for cls in (FedYogi, FedAdam, FedAdagrad))
    assert (adam < yogi).all()
    assert (yogi < v).all()
    assert (v < adagrad).all()
    names = {field.name for field in dataclasses.fields(FedAdagrad)}
    assert "beta2" not in names, "an option without effect"


def test_steps_allow_for_the_curvature_of_the_pull():
    for algorithm in (FedProx(lam=3.0), FedDyn(lam=3.0)):
        assert algorithm.stable_steps(2.0) == {"eta": 1 / 5}


def test_fedmeta_follows_the_slopes_of_the_loss_after_a_step_in_w_and_in_the_step_sizes():
    fed = federation(EXACT, dtype=np.float64)
    rows, alpha = train_rows(fed)[0], 0.3
    simulation = Simulation(FedMeta(R=1, B=0, alpha=alpha, eta=1.0), softmax_regression(L2), fed, cohort=1)
    state, d = start_at(simulation, w0), len(w0)

    def after_a_step(both: np.ndarray) -> float:
        w, a = both[:d], both[d:]
        return oracles.loss(w - a * oracles.gradient(w, rows, L2), rows, L2)

    dw, da = simulation.update(state, np.array([0])).upload
    want = -oracles.slope(after_a_step, np.concatenate([w0, np.full(d, alpha)]))
    np.testing.assert_allclose(np.concatenate([flat(dw), flat(da)]), want, rtol=1e-6, atol=1e-9)
    per_fedavg = PerFedAvg(R=1, B=0, alpha=alpha, eta=1.0)
    other = Simulation(per_fedavg, simulation.model, fed, cohort=1)
    assert_equal(flat(dw), flat(other.update(start_at(other, w0), np.array([0])).upload))


# --- where they lead on quadratic losses


QUADRATICS = quadratics()
LONG: dict[str, Any] = {"R": 10, "B": 0, "eta": 0.1}


def check_corrected(algorithm: Scaffold | FedDyn, rounds: int = 400) -> None:
    """With cohorts of two of five, w goes to the minimiser of Σ f_i; what clients keep goes to their
    gradients there, and the server always keeps the mean of that."""
    star = minimiser(QUADRATICS)
    simulation, state = on_quadratics(algorithm, QUADRATICS, 0)
    for number in (1, 1, 5, rounds):
        state, finite = simulation.advance(state, number)
        assert finite
        w, mean = (flat(part) for part in state.server)
        np.testing.assert_allclose(mean, flat(state.clients, True).mean(axis=0), atol=1e-13)
    np.testing.assert_allclose(w, star, atol=1e-9)
    np.testing.assert_allclose(mean, 0, atol=1e-9)
    slopes = np.array([f.gradient(star) for f in QUADRATICS])
    assert np.abs(slopes).max() > 0.5, "clients differ"
    np.testing.assert_allclose(flat(state.clients, True), slopes, atol=1e-8)
    np.testing.assert_allclose(flat(simulation.shared(state)), w)


def check_scaffold_corrects(cls: type[Scaffold]) -> None:
    check_corrected(cls(**LONG))


def check_feddyn_corrects(cls: type[FedDyn]) -> None:
    check_corrected(cls(**LONG, lam=1.0))


def check_quantised_scaffold_corrects(cls: type[Scaffold]) -> None:
    check_corrected(cls(**LONG, codec=FedPAQ(levels=4)))


def check_quantised_feddyn_corrects(cls: type[FedDyn]) -> None:
    check_corrected(cls(**LONG, lam=1.0, codec=FedPAQ(levels=4)))


def test_scaffold_and_feddyn_find_the_minimiser_and_fedavg_does_not():
    check_scaffold_corrects(Scaffold)
    check_feddyn_corrects(FedDyn)
    _, state = on_quadratics(FedAvg(**LONG, aggregation="uniform"), QUADRATICS, 400, cohort=5)
    assert np.abs(flat(state.server) - minimiser(QUADRATICS)).max() > 0.1


def test_they_find_it_through_a_coarse_codec_too():
    check_quantised_scaffold_corrects(Scaffold)
    check_quantised_feddyn_corrects(FedDyn)


def test_with_many_steps_fedprox_minimises_the_sum_of_moreau_envelopes():
    lam = 2.0
    algorithm = FedProx(R=200, B=0, eta=0.2, lam=lam, aggregation="uniform")
    _, state = on_quadratics(algorithm, QUADRATICS, 100, cohort=5)
    envelopes = [np.linalg.solve(f.A + lam * np.eye(3), lam * f.A) for f in QUADRATICS]
    want = np.linalg.solve(sum(envelopes), sum(M @ f.c for M, f in zip(envelopes, QUADRATICS, strict=True)))
    np.testing.assert_allclose(flat(state.server), want, atol=1e-9)


def check_lost_uploads(*, keep: bool) -> None:
    """c is the mean of the c_i although in every round one upload is lost, whose sender does not `keep` its
    new c_i; and an absent client that is marked as such is as good as none."""
    simulation, state = on_quadratics(Scaffold(**LONG), QUADRATICS, 0, cohort=3)
    server_update = jax.jit(simulation.algorithm.server_update)
    for t in range(4):
        who = simulation.cohort_of(t)
        update = simulation.update(state, who)

        def served(uploads: Any, who: np.ndarray, rows: list[int], state: Any = state) -> Any:
            cohort = Cohort(jax.random.key(0), jnp.asarray(who), jnp.asarray(rows), len(QUADRATICS))
            return server_update(state.server, uploads, cohort)

        server = served(jax.tree.map(lambda a: a[1:], update.upload), who[1:], [3, 3])
        for got, want in zip(served(update.upload, who, [0, 3, 3]), server, strict=True):
            assert_equal(flat(got), flat(want))
        kept = slice(None) if keep else slice(1, None)
        clients = state.clients.map(
            lambda a, new, who=who, kept=kept: a.at[who[kept]].set(new[kept]), update.state
        )
        state = state._replace(t=t + 1, server=server, clients=clients)
        assert_equal(flat(server[1]), flat(clients, True).mean(axis=0))


def test_lost_uploads_do_not_part_scaffolds_server_from_its_clients():
    """Bug: clients whose upload is lost keep their new c_i (PFLlib). For deployed ones see
    test_outside_deploy.py."""
    check_lost_uploads(keep=False)
    with pytest.raises(AssertionError):
        check_lost_uploads(keep=True)
