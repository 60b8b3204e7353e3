"""Convolutional networks against loops over pixels, and on images from files to a record."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from laws import (
    PAPERS,
    assert_close,
    assert_same_bits,
    differs,
    double_precision,
    flat,
    problem,
    tiny,
    trajectory,
)
from oracles import network_logits
from stops import stop_at
from test_mnist import write_digits

from pfedme.algorithms import Algorithm, PerFedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.convolution import stage
from pfedme.core.models import CNN, Convolutional, Model, Network, model_from_json, parse_model
from pfedme.core.problem import Loss, Problem
from pfedme.core.tree import Params
from pfedme.data import parse_data
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.execute import execute

every_algorithm = pytest.mark.parametrize(
    "cls",
    [
        pytest.param(cls, marks=pytest.mark.slow if name not in ("pfedme", "per-fedavg") else ())
        for name, cls in PAPERS.items()
    ],
    ids=PAPERS,
)
every_size = pytest.mark.parametrize(
    ("height", "width", "channels", "kernel"),
    [(5, 7, 1, 3), (6, 5, 3, 5), (4, 6, 2, 1), (2, 3, 2, 7)],
)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def by_pixel(W: np.ndarray, b: np.ndarray, z: np.ndarray) -> np.ndarray:
    """ReLU(b + 2×2 sums of the convolution), one pixel after the other."""
    n, k = W.shape[:2]
    _, height, width, rows = z.shape
    out = np.zeros((n, height // 2, width // 2, rows)) + b[:, None, None, None]
    for p, q in itertools.product(range(height // 2), range(width // 2)):
        for a, e, i, j in itertools.product((0, 1), (0, 1), range(k), range(k)):
            at, to = 2 * p + a + i - k // 2, 2 * q + e + j - k // 2
            if 0 <= at < height and 0 <= to < width:
                out[:, p, q] += W[:, i, j] @ z[:, at, to]
    return np.maximum(out, 0)


def by_xla(W: jax.Array, b: jax.Array, z: jax.Array) -> jax.Array:
    """The same by XLA's convolution and window sum."""
    y = lax.conv_general_dilated(z, W, (1, 1), "SAME", dimension_numbers=("CHWN", "OHWI", "CHWN"))
    y = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jax.nn.relu(y + b[:, None, None, None])


def drawn(height: int, width: int, channels: int, kernel: int) -> tuple[np.ndarray, ...]:
    """W, b and three images."""
    return normal(0, 4, kernel, kernel, channels), normal(1, 4), normal(2, channels, height, width, 3)


# --- A stage -----------------------------------------------------------------------------------------


@every_size
def test_a_stage_is_the_sum_over_pixels(height: int, width: int, channels: int, kernel: int):
    W, b, z = drawn(height, width, channels, kernel)
    with double_precision():
        np.testing.assert_allclose(jax.jit(stage)(W, b, z), by_pixel(W, b, z), rtol=1e-10, atol=1e-12)


@every_size
def test_its_derivatives_are_those_of_xlas_convolution(height: int, width: int, channels: int, kernel: int):
    """Gradients, and products with the Hessian, in weights, biases and images."""
    with double_precision():
        point = tuple(map(jnp.asarray, drawn(height, width, channels, kernel)))
        toward = tuple(jnp.asarray(normal(7 + k, *a.shape)) for k, a in enumerate(point))
        weight = jnp.asarray(normal(5, 4, height // 2, width // 2, 3))

        def of(form: Callable[..., jax.Array]) -> Any:
            grad = jax.grad(lambda own: jnp.sum(weight * jnp.square(form(*own))))
            return jax.jit(lambda at, v: jax.jvp(grad, (at,), (v,)))(point, toward)

        assert_close(of(stage), of(by_xla), rtol=1e-9, atol=1e-10)


def test_mapped_over_clients_it_is_one_client_after_the_other():
    shapes = (4, 3, 3, 2), (4,), (2, 5, 6, 3)
    with double_precision():
        many = [normal(k, 5, *shape) for k, shape in enumerate(shapes)]
        together, alone = jax.jit(jax.vmap(stage))(*many), jax.jit(stage)
        assert_close(together, np.stack([alone(*own) for own in zip(*many, strict=True)]), rtol=1e-12)


# --- The network -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (7, 9, 3)], ids=["grey", "colour"])
def test_the_network_is_stages_and_then_linear_layers(shape: tuple[int, ...]):
    model = Convolutional(shape=shape, classes=4, channels=(3, 5), hidden=(6,))
    theta, x = model.init(jax.random.key(1)), normal(0, 5, int(np.prod(shape)))
    (W1, b1), (W2, b2), *rest = [(np.asarray(W, float), np.asarray(b, float)) for W, b in theta.tree]
    z = np.moveaxis(x.reshape(5, *(shape if len(shape) == 3 else (*shape, 1))), (0, 3), (3, 0))
    z = by_pixel(W2, b2, by_pixel(W1, b1, z)).reshape(-1, 5).T
    got = jax.jit(model.apply)(theta, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, network_logits(rest, z), rtol=1e-4, atol=1e-5)


def test_its_gradient_is_the_slope_of_its_loss():
    model = Convolutional(shape=(5, 6, 2), classes=3, channels=(2, 3), hidden=(4,), l2=0.1)
    with double_precision():
        theta = model.init(jax.random.key(0)).map(lambda a: a.astype(jnp.float64))
        f = Loss(model, jnp.asarray(normal(0, 4, 60)), jnp.array([0, 1, 2, 1]))
        gradient, loss, h = flat(jax.jit(f.grad)(theta)), jax.jit(f.__call__), 1e-6
        for seed in range(6):
            v = normal(seed, len(gradient))
            ends = [float(loss(theta.like(jnp.asarray(flat(theta) + s * h * v)))) for s in (1, -1)]
            np.testing.assert_allclose((ends[0] - ends[1]) / (2 * h), gradient @ v, rtol=1e-6)


def test_weights_start_within_one_over_root_fan_in():
    layers = Convolutional(shape=(9, 8, 3), classes=10, channels=(30, 40), hidden=(50,), kernel=5)
    fans = (5 * 5 * 3, 5 * 5 * 30, 2 * 2 * 40, 50)
    for (W, b), fan_in in zip(layers.init(jax.random.key(1)).tree, fans, strict=True):
        assert W.size == len(b) * fan_in
        assert 0.9 * fan_in**-0.5 < np.abs(W).max() <= fan_in**-0.5
        assert np.abs(b).max() <= fan_in**-0.5


# --- In training -------------------------------------------------------------------------------------

SHAPE = (4, 5)


def images(sizes: Sequence[tuple[int, int]] = ((7, 3), (12, 2), (3, 1), (9, 4))) -> Federation:
    """Clients with noise in which a bright half of the image is the label."""
    rng = np.random.default_rng(0)
    n_train, n_test = np.array(sizes).T
    y = rng.integers(0, 2, (n_train + n_test).sum()).astype(np.int32)
    x = rng.normal(size=(len(y), *SHAPE)).astype(np.float32)
    x[y == 0, :2] += 1
    x[y == 1, 2:] += 1
    return Federation(
        x=x.reshape(len(y), -1), y=y, n_train=n_train, n_test=n_test, classes=2,
        ids=np.arange(len(sizes), dtype=np.uint32), shape=SHAPE,
    ).checked()  # fmt: skip


def network(l2: float = 0.01) -> Model:
    return Convolutional(shape=SHAPE, classes=2, channels=(3,), hidden=(4,), l2=l2)


def simulation(cls: type[Algorithm], fed: Federation, cohort: int = 3) -> Simulation:
    return Simulation(tiny(cls), network(), fed, cohort=cohort)


@every_algorithm
def test_every_algorithm_learns_and_is_the_same_for_permuted_clients(cls: type[Algorithm]):
    fed, order = images(), np.array([2, 0, 3, 1])
    sim, other = simulation(cls, fed), simulation(cls, fed.take(order))
    states, again = (trajectory(s, s.start(), 2) for s in (sim, other))
    assert_close(states[-1].server, again[-1].server)
    models, permuted = sim.answer(states[-1])[0], other.answer(again[-1])[0]
    assert_close(jax.tree.map(lambda a: a[order], models), permuted)
    later, finite = sim.advance(states[-1], 40)
    assert finite
    start, end = (sim.evaluate(state)[0].train for state in (states[0], later))
    for kind in start:
        assert end[kind].mean_loss < start[kind].mean_loss


def test_rows_of_other_clients_and_larger_ones_change_nothing():
    """A full batch has as many rows as the largest client, and those that are not one's own do not count."""
    fed, theta = images(((7, 3), (40, 2))), network().init(jax.random.key(0))

    @jax.jit
    def gradient(own: Problem) -> Params:
        return own.sample(jax.random.key(0), 0).grad(theta)

    assert_close(*(gradient(problem(some, network(), 0)) for some in (fed, fed.take([0]))))


@pytest.mark.slow
def test_per_fedavgs_hessian_is_the_difference_of_gradients():
    fed = images()
    with double_precision():
        theta = network().init(jax.random.key(3)).map(lambda a: a.astype(jnp.float64))
        f = Loss(network(), jnp.asarray(fed.x[:7], jnp.float64), jnp.asarray(fed.y[:7]))
        exact, first, near = (
            jax.jit(PerFedAvg(alpha=0.1, delta=1e-6, hessian=how).meta_gradient)(theta, f, f, f)
            for how in ("exact", "first-order", "difference")
        )
    assert_close(exact, near, rtol=1e-5, atol=1e-7)
    assert differs(exact, first)


@pytest.mark.slow
def test_pfedme_solves_its_inner_problem():
    sim = Simulation(PFedMe(lam=20.0, alpha=0.03, nu=1e-6, R=1, B=0), network(), images(), cohort=2)
    _, info = sim.answer(sim.start())
    assert info["inner_residual"].max() <= 1.1e-6
    assert info["inner_steps"].min() > 1


# --- Descriptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        Network(features=4, classes=3),
        Network(features=4, classes=0, hidden=(5, 2)),
        Convolutional(shape=(8, 9), classes=10, channels=(2, 3), hidden=(4,)),
        Convolutional(shape=(8, 9, 3), classes=0, channels=(2,), hidden=(), kernel=5),
    ],
)
def test_a_model_can_be_written_down_and_read_again(model: Model):
    document = json.loads(json.dumps(model.to_json()))
    again = model_from_json(document)
    assert again == model
    assert_same_bits(model.init(jax.random.key(2)), again.init(jax.random.key(2)))
    assert document["features"] == 4 if isinstance(model, Network) else 72


ABOUT = {"kind": "cnn", "features": 36, "classes": 3, "shape": [6, 6], "channels": [2], "hidden": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "transformer"}, "Unknown kind of model 'transformer'"),
        ({"channels": []}, "at least one stage"),
        ({"shape": [5, 6]}, "not form images of 5×6"),
        ({"classes": -1}, "classes of the model must be at least 0"),
        ({"kernel": 4}, "must be an odd number, not 4"),
        ({"depth": 3}, "depth"),
    ],
)
def test_a_damaged_description_is_refused(change: dict, said: str):
    assert model_from_json(ABOUT) == Convolutional(shape=(6, 6), classes=3, channels=(2,), hidden=())
    with pytest.raises(InputError, match=said):
        model_from_json({**ABOUT, **change})


@pytest.mark.parametrize(
    ("text", "features", "said"),
    [
        ("cnn", 60, "the image shape of rows of 60 numbers is not known; give it, as in cnn:shape=28-28"),
        ("cnn:shape=8-8", 60, "rows of 60 numbers do not form images of 8×8"),
        ("cnn:shape=60", 60, "not form images of 60"),
        ("cnn:shape=3-2-5-2", 60, "not form images of 3×2×5×2"),
        ("cnn:shape=28-28,kernel=4", 784, "kernel of model 'cnn' must be an odd number, not 4"),
        ("cnn:shape=28-28,channels=4-4-4-4-4", 784, "28×28 cannot be halved 5 times; .*cnn:channels=4"),
        ("cnn:shape=28-28,channels=", 784, "channels of model 'cnn' must name at least one stage"),
    ],
)
def test_what_a_cnn_cannot_be_is_refused(text: str, features: int, said: str):
    with pytest.raises(InputError, match=said):
        parse_model(text).with_defaults(features)


@pytest.mark.parametrize("text", ["cnn:channels=8-0", "cnn:kernel=0", "cnn:shape=a-b", "cnn:hidden=1.5"])
def test_what_no_cnn_can_be_is_refused_at_once(text: str):
    with pytest.raises(InputError, match="of model 'cnn' must be"):
        parse_model(text)


def test_the_shape_is_the_datas_unless_it_is_given():
    assert CNN().with_defaults(784, (28, 28)).shape == (28, 28)
    assert CNN(shape=(14, 56)).with_defaults(784, (28, 28)).shape == (14, 56)
    assert CNN().build(3072, 10, (32, 32, 3)).shape == (32, 32, 3)


# --- From files to a record --------------------------------------------------------------------------

SMALL = "--model cnn:channels=2,hidden=3 --R 2 --K 1 --B 4 --rounds 4"


def pfedme(line: str) -> int:
    return main(shlex.split(line))


def write_images(path: Path, shape: tuple[int, ...]) -> None:
    """An NPZ of images of two classes, at three clients."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.integers(0, 200, (60, *shape))
    x[y == 1, : shape[0] // 2] += 55
    np.savez(path, x=x.astype(np.uint8), y=y, client=np.array(["a", "b", "c"])[np.arange(60) // 20])


@pytest.mark.slow
def test_images_of_a_file_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    shape = (6, 5, 3)
    write_images(Path("images.npz"), shape)
    assert pfedme(f"run pfedme --data images.npz {SMALL} --out run --json") == 0
    final = json.loads(capsys.readouterr().out)["final"]
    record = Folder(Path("run")).read()
    assert record["config"]["model"] == {
        "name": "cnn", "channels": [2], "hidden": [3], "kernel": 3, "shape": list(shape), "l2": 0.0,
    }  # fmt: skip
    assert "A convolutional network (cnn:" in Path("run/report.html").read_text()
    command = shlex.split(record["command"])
    assert main([*command[1:], "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final"] == final
    run = Run.from_json(record["config"])
    with pytest.raises(KeyboardInterrupt):
        execute(run, Path("broken"), watch=stop_at(2, evaluated=True))
    assert pfedme("resume broken") == 0
    for name in ("clients.csv", "model.safetensors"):
        assert Path("run", name).read_bytes() == Path("broken", name).read_bytes()


def test_rows_that_are_no_images_are_refused_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for line in ("--data synthetic --model cnn", "--data synthetic --model cnn:shape=7-9"):
        assert pfedme(f"run pfedme {line} --rounds 1 --out run") == 2
        assert "cnn:shape=" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize("partition", ["disjoint", "released", "dirichlet", "rotated", "permuted", "scaled"])
def test_mnist_is_images_of_28_by_28(tmp_path: Path, partition: str):
    write_digits(tmp_path / "idx", 30)
    fed = parse_data(f"mnist:path={tmp_path / 'idx'},partition={partition}").load()
    assert fed.shape == fed.take([0, 1]).shape == fed.hold_out(0, 5).shape == (28, 28)
    assert parse_model("cnn").with_defaults(fed.features, fed.shape) == CNN(shape=(28, 28))
