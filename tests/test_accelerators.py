"""The programs that train and evaluate lower for accelerators, on a machine that has none.

What such a machine does with them is left to docs/speed.md, "On accelerators".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from laws import federation, network, softmax_regression, tiny

from pfedme.algorithms import ALGORITHMS
from pfedme.core import native
from pfedme.core.models import Network
from pfedme.engine import metrics, path, simulate
from pfedme.engine.choices import for_all
from pfedme.engine.devices import padded, replicate
from pfedme.engine.metrics import Blocks
from pfedme.engine.simulate import Simulation

NAMES = ("pfedme", "fedavg", "per-fedavg", "scaffold")
PLATFORMS = ("cuda", "rocm", "tpu")
R = 7
"""Local rounds that no other test has: programs that were traced for CPUs are kept."""


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this package believe that its devices are accelerators."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def round_of(name: str, model: Network, R: int = R) -> Any:
    """The program that trains, traced."""
    simulation = Simulation(tiny(ALGORITHMS[name], R=R), model, federation(), cohort=3)
    state, run = simulation.start(), np.zeros(3, int)
    who = np.stack([padded(simulation.seated(0))] * simulate.MOST_ROUNDS).astype(np.int32)
    work = padded(run), who, 3, None
    return simulate._advance.trace(simulation.store, (simulation.job(0),), (state,), *work, cohort=3)


def evaluation_of(model: Network) -> dict[str, Any]:
    """The programs that evaluate clients' answers and follow their paths, traced."""
    simulation = Simulation(tiny(ALGORITHMS["pfedme"], R=R), model, federation(), cohort=3)
    fed, store, state = simulation.federation, simulation.store, simulation.start()
    who = padded(np.arange(fed.clients))
    blocks = Blocks.cut(*fed.rows("test"))
    theta = replicate(for_all(state.server, len(who)))
    work, _ = blocks.work(len(fed.x))
    eta = np.full(len(who), 0.1, np.float32)
    return {
        "answer": simulate._answer.trace(store, simulation.job(0), state, who, None),
        "scores": metrics._block_sums.trace(
            model, theta, store.x, store.y, work, blocks.offset, each_row=False, scores=True
        ),
        "path": path._descend.trace(
            store, model, simulation.key, theta, theta, who, eta, 1.0, 3, B=4
        ),
    }  # fmt: skip


def assert_runs_anywhere(traced: Any) -> None:
    """It lowers for every platform, in float32, without calls of a host or of code for one processor."""
    assert "callback" not in str(traced.jaxpr)
    text = traced.lower(lowering_platforms=PLATFORMS).as_text()
    assert "callback" not in text
    assert "custom_call" not in text
    assert not re.search(r"\bf64\b|xf64>", text)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("model", [softmax_regression, network])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_lowers_for_accelerators(name: str, model: Any):
    assert_runs_anywhere(round_of(name, model()))


@pytest.mark.usefixtures("accelerator")
def test_evaluation_lowers_for_accelerators():
    for traced in evaluation_of(network()).values():
        assert_runs_anywhere(traced)


@pytest.mark.skipif(not native.registered(), reason="the kernel is compiled by the package ziglang")
def test_the_kernel_is_the_only_code_for_one_processor():
    texts = {name: round_of(name, network(), R + 1).lower().as_text() for name in NAMES}
    calls = {name: re.findall(r"custom_call @(\w+)", text) for name, text in texts.items()}
    assert calls == {name: [native.TARGET] * (name == "pfedme") for name in NAMES}


def test_a_round_is_divided_over_all_devices():
    script = (
        "import re, test_accelerators as own\n"
        "traced = own.round_of('fedavg', own.softmax_regression())\n"
        "text = traced.lower(lowering_platforms=own.PLATFORMS).as_text()\n"
        "print(*re.findall(r'num_partitions = (\\d+)', text))"
    )
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["8"]
