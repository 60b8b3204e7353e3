"""The exchangeable parts: the geometric median (RFA) as a way to combine uploads, and FedPAQ's quantised
ones; and mistakes that the same checks find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import (
    EXACT,
    assert_same_bits,
    differs,
    federation,
    flat,
    single_precision,
    softmax_regression,
    start_at,
)
from shared_laws import check_same_model, each, minimiser, on_quadratics, quadratics

from pfedme.algorithms import AFL, FedAvg, Scaffold
from pfedme.algorithms.aggregate import RFA, Codec, Combine, FedPAQ, Mean
from pfedme.algorithms.base import Cohort
from pfedme.core.tree import Params, record
from pfedme.engine.cost import traffic
from pfedme.engine.simulate import Simulation

pytestmark = pytest.mark.usefixtures("double_precision_throughout")

KEY = jax.random.key(0)


# --- the geometric median


@jax.jit
def combined(rule: Combine, uploads: Any, weights: jax.Array) -> Any:
    return rule(uploads, weights, KEY)


def median(rule: Combine, points: np.ndarray, weights: Any = None) -> np.ndarray:
    """The combination of points, which are sent as two arrays each."""
    weights = np.ones(len(points)) if weights is None else np.asarray(weights, float)
    uploads = Params([jnp.asarray(points[:, :1]), jnp.asarray(points[:, 1:])])
    return flat(combined(rule, uploads, jnp.asarray(weights / weights.sum())))


def distances(v: np.ndarray, points: np.ndarray) -> float:
    """The mean distance of v from points."""
    return float(np.linalg.norm(points - v, axis=1).mean())


def oracle(points: np.ndarray) -> np.ndarray:
    """The geometric median by many plain steps from the mean, unless a point itself is better."""
    v = points.mean(axis=0)
    for _ in range(5000):
        pull = 1 / np.maximum(np.linalg.norm(points - v, axis=1), 1e-13)
        v = pull @ points / pull.sum()
    return min((v, *points), key=lambda v: distances(v, points))


def check_balance(cls: type[Combine]) -> None:
    """At the median, the unit vectors towards the points sum to zero."""
    points = np.random.default_rng(1).normal(size=(9, 4))
    towards = points - median(cls(), points)
    np.testing.assert_allclose(np.mean(towards.T / np.linalg.norm(towards, axis=1), axis=1), 0, atol=1e-5)


def check_minority(cls: type[Combine]) -> None:
    """Four of nine, however far away, move it by a bounded distance; five of nine take it with them."""
    points = np.random.default_rng(2).normal(size=(9, 3))
    honest, ends = oracle(points[4:]), []
    for far in (1e6, 1e9):
        points[:4] = far
        ends.append(median(cls(), points))
    assert np.linalg.norm(ends[0] - honest) < 3
    np.testing.assert_allclose(*ends, atol=1e-4)
    points[4] = far
    assert np.linalg.norm(median(cls(), points)) > 1e8


def check_median(cls: type[Combine]) -> None:
    """Nothing is nearer to the points in the mean, by more than a thousandth; they are few, and unlike."""
    rng = np.random.default_rng(3)
    for clients in (3, 5) * 10:
        points = rng.normal(size=(clients, 3)) * rng.lognormal(size=(clients, 1))
        best = distances(oracle(points), points)
        assert distances(median(cls(), points), points) <= 1.001 * best


RULES = (check_balance, check_minority, check_median)


@pytest.mark.parametrize("check", RULES, ids=lambda check: check.__name__)
def test_rfa_is_the_geometric_median(check):
    check(RFA)


def test_rfa_moves_and_scales_with_the_points_and_ignores_their_order():
    points = np.random.default_rng(4).normal(size=(5, 3))
    here = median(RFA(), points)
    np.testing.assert_allclose(median(RFA(), 7 * points + 2), 7 * here + 2, rtol=1e-6)
    np.testing.assert_allclose(median(RFA(), points[::-1]), here, rtol=1e-6)


def test_weights_are_repetitions_and_half_of_them_at_one_upload_decide():
    points = np.random.default_rng(5).normal(size=(4, 3))
    repeated = np.repeat(points, (2, 1, 1, 1), axis=0)
    np.testing.assert_allclose(median(RFA(), points, [2, 1, 1, 1]), median(RFA(), repeated), rtol=1e-6)
    np.testing.assert_array_equal(median(RFA(), points, [3, 1, 1, 1]), points[0])
    np.testing.assert_array_equal(median(RFA(), np.repeat(points[:1], 4, axis=0)), points[0])


@pytest.mark.parametrize("rule", [RFA(), Mean()], ids=["rfa", "mean"])
def test_absent_clients_do_not_matter_and_nobody_is_zero(rule):
    points = np.random.default_rng(6).normal(size=(5, 3))
    want = median(rule, points[:3])
    for garbage in (0.0, 1e20):
        points[3:] = garbage
        np.testing.assert_allclose(median(rule, points, [1, 1, 1, 0, 0]), want, rtol=1e-6)
    nobody = combined(rule, Params(jnp.asarray(points)), jnp.zeros(5))
    np.testing.assert_array_equal(flat(nobody), 0)


@pytest.mark.parametrize("rule", [RFA(), Mean()], ids=["rfa", "mean"])
def test_whole_numbers_are_combined_too(rule):
    got = combined(rule, jnp.array([[0, 2], [0, 2], [9, 4]]), jnp.array([0.5, 0.25, 0.25]))
    np.testing.assert_allclose(got, [0, 2] if rule.name == "rfa" else [2.25, 2.5], atol=1e-12)


def test_a_round_with_rfa_moves_w_to_the_geometric_median():
    parts = quadratics()
    _, state = on_quadratics(FedAvg(R=1, B=0, eta=0.3, combine=RFA(M=300)), parts, 1, cohort=5)
    steps = np.array([-0.3 * f.gradient(np.zeros(3)) for f in parts])
    np.testing.assert_allclose(flat(state.server), oracle(steps), atol=1e-6)


def test_a_cohort_whose_weights_in_afl_are_all_zero_does_not_move_w():
    algorithm, w = AFL(combine=RFA(), gamma=0.1), Params(jnp.ones(3))
    server = jnp.int32(0), w, jnp.array([0.0, 0.0, 1.0]), w
    cohort = Cohort(KEY, jnp.arange(2), jnp.array([4, 4]), 3)
    uploads = Params(jnp.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])), jnp.array([0.3, 0.3])
    _, after, weights, _ = algorithm.server_update(server, uploads, cohort)
    np.testing.assert_array_equal(flat(after), 1)
    np.testing.assert_allclose(weights, [0.015, 0.015, 0.97], atol=1e-12)


@record
class HeldByItsStart(RFA):
    """β_i = p_i/max(ν, ‖v − Δ_i‖) from the most central upload, whose own β_i is 10⁶ times the others'."""

    def __call__(self, uploads: Any, weights: jax.Array, key: jax.Array) -> Any:
        points = uploads.ravel(1)
        between = jnp.linalg.norm(points[:, None] - points, axis=2)
        v = points[jnp.argmin(between @ weights)]
        for _ in range(self.M):
            pull = weights / jnp.maximum(self.nu, jnp.linalg.norm(points - v, axis=1))
            v = pull @ points / jnp.sum(pull)
        return Params(v)


@record
class FromTheMean(RFA):
    """As many steps, from the mean."""

    def __call__(self, uploads: Any, weights: jax.Array, key: jax.Array) -> Any:
        points = uploads.ravel(1)
        v = weights @ points
        for _ in range(self.M):
            pull = weights / jnp.maximum(self.nu, jnp.linalg.norm(points - v, axis=1))
            v = pull @ points / jnp.sum(pull)
        return Params(v)


@record
class ByCoordinates(RFA):
    """The median of every coordinate."""

    def __call__(self, uploads: Any, weights: jax.Array, key: jax.Array) -> Any:
        return uploads.map(lambda a: jnp.median(a, axis=0))


# --- quantised uploads


ARRAY = np.random.default_rng(7).normal(size=(4, 3))


@jax.jit
def sent(codec: Codec, key: jax.Array, upload: Any) -> Any:
    return codec.decode(codec.encode(key, upload))


def check_noise(cls: type[FedPAQ]) -> None:
    """Over many keys, the mean is the upload and the variance what two neighbouring levels have, which is at
    most min(d/s², √d/s) ‖a‖²."""
    draws = 4000
    for levels in (1, 3, 50):
        keys = jax.random.split(jax.random.key(levels), draws)
        got = np.asarray(jax.vmap(lambda key, s=levels: sent(cls(levels=s), key, jnp.asarray(ARRAY)))(keys))
        length, d = np.linalg.norm(ARRAY), ARRAY.size
        part = np.abs(ARRAY) * levels / length % 1
        variance = (length / levels) ** 2 * part * (1 - part)
        error = 5 * np.sqrt(variance / draws)
        assert (np.abs(got.mean(axis=0) - ARRAY) <= error + 1e-12).all()
        np.testing.assert_allclose(got.var(axis=0).sum(), variance.sum(), rtol=0.05)
        assert variance.sum() <= min(d / levels**2, d**0.5 / levels) * length**2
        numbers = got * levels / length
        np.testing.assert_allclose(numbers, numbers.round(), atol=1e-9)
        assert (got * ARRAY >= 0).all()


def check_independence(cls: type[FedPAQ]) -> None:
    """Equal arrays of an upload, and equal uploads of two clients or rounds, have noise of their own."""
    codec, a = cls(levels=2), jnp.asarray(ARRAY)
    one, other = sent(codec, KEY, (a, a))
    assert differs(one, other)
    twins = federation(((8, 0), (8, 0)), dtype=np.float64)
    x, y = np.concatenate([twins.x[:8]] * 2), np.concatenate([twins.y[:8]] * 2)
    twins.x[:], twins.y[:] = x, y
    simulation = Simulation(FedAvg(R=1, B=0, eta=0.2, codec=codec), softmax_regression(), twins, cohort=2)
    state = start_at(simulation, np.arange(12.0))
    first, second = (flat(simulation.update(state._replace(t=t), np.arange(2)).upload, True) for t in (0, 1))
    assert differs(first[0], first[1])
    assert differs(first, second)


CODECS = (check_noise, check_independence)


@pytest.mark.parametrize("check", CODECS, ids=lambda check: check.__name__)
def test_fedpaq_adds_noise_of_mean_zero_to_each_array(check):
    check(FedPAQ)


def test_what_cannot_be_quantised_is_sent_as_it_is():
    upload = jnp.array(3.7), jnp.array([0.3]), jnp.arange(5), jnp.zeros(4)
    assert_same_bits(sent(FedPAQ(levels=2), KEY, upload), upload)
    assert not np.isfinite(sent(FedPAQ(), KEY, jnp.array([1.0, np.nan, 2.0]))).all()


def test_with_many_levels_it_is_fedavg():
    quantised = FedAvg(R=3, B=0, eta=0.2, codec=FedPAQ(levels=2**15 - 1))
    check_same_model(quantised, FedAvg(R=3, B=0, eta=0.2), rtol=1e-3)


@pytest.mark.parametrize(("levels", "size"), [(1, 1), (127, 1), (128, 2), (2**15 - 1, 2)])
def test_a_number_takes_a_byte_or_two(levels, size):
    fed, model, codec = federation(), softmax_regression(), FedPAQ(levels=levels)

    def bytes_sent(algorithm: Any) -> int:
        with single_precision():
            return traffic(Simulation(algorithm, model, fed, cohort=2))[1]

    assert bytes_sent(FedAvg(eta=0.1, codec=codec)) == 12 * size + 2 * 4  # and two lengths
    assert bytes_sent(AFL(eta=0.1, codec=codec)) == 12 * size + 2 * 4 + 4  # and a loss
    top = codec.encode(KEY, jnp.array([0.0, -5.0]))
    assert top.numbers.tolist() == [0, -levels]
    np.testing.assert_array_equal(codec.decode(top), [0.0, -5.0])


def test_what_a_deployed_client_sends_and_keeps_is_what_a_simulated_one_does():
    fed = federation(EXACT, dtype=np.float64).take([2])
    algorithm = Scaffold(R=3, B=0, eta=0.2, codec=FedPAQ(levels=3))
    simulation = Simulation(algorithm, softmax_regression(), fed, cohort=1)
    state = start_at(simulation, np.arange(12.0))
    update = simulation.update(state, np.array([0]))
    reply = simulation.reply(0, state.server, jax.tree.map(lambda a: a[0], state.clients))
    for got, want in zip(algorithm.codec.decode(reply.upload), update.upload, strict=True):
        np.testing.assert_allclose(flat(got), flat(want), rtol=1e-12)
    np.testing.assert_allclose(flat(reply.state), flat(update.state), rtol=1e-12)
    np.testing.assert_allclose(flat(update.state), flat(update.upload[1]), rtol=1e-12)


@pytest.mark.slow
def test_fedavg_stays_within_the_noise_of_its_codec():
    """The noise shrinks with the uploads: one client alone still comes to its minimiser."""
    parts = quadratics(clients=1)
    algorithm = FedAvg(R=5, B=0, eta=0.2, codec=FedPAQ(levels=4))
    _, state = on_quadratics(algorithm, parts, 200, cohort=1)
    np.testing.assert_allclose(flat(state.server), minimiser(parts), atol=1e-9)


@record
class RoundsToTheNearest(FedPAQ):
    """Without randomness, and so with a bias."""

    def _packed(self, key: jax.Array, a: jax.Array) -> Any:
        exact = super()._packed(key, a)
        nearest = jnp.round(a * self.levels / exact.length)
        return exact._replace(numbers=nearest.astype(exact.numbers.dtype))


@record
class OneKey(FedPAQ):
    """All arrays and clients with the same randomness."""

    def _packed(self, key: jax.Array, a: jax.Array) -> Any:
        return super()._packed(KEY, a)


MUTANTS: dict[type[Any], Callable[[Any], None]] = {
    HeldByItsStart: check_median,
    FromTheMean: check_minority,
    ByCoordinates: check_balance,
    RoundsToTheNearest: check_noise,
    OneKey: check_independence,
}


@each(MUTANTS, slow=())
def test_a_mistake_is_found(mutant):
    with pytest.raises(AssertionError):
        MUTANTS[mutant](mutant)
