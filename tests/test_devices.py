"""The number of devices changes results by rounding alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pfedme.engine.devices import keep_compiled_programs

SCRIPT = """
import json, sys
import jax
from pfedme.algorithms import ALGORITHMS
from pfedme.data.synthetic import Synthetic
from pfedme.core.models import DNN
from pfedme.engine.simulate import Simulation

federation = Synthetic(clients=7, rows=30, features=6, classes=3).load()
model = DNN(hidden=(5,)).build(6, 3)
result = {"devices": jax.device_count()}
for name in ("pfedme", "alone"):
    cls = ALGORITHMS[name]
    simulation = Simulation(cls(R=3, B=5), model, federation, cohort=3)
    state, finite = simulation.advance(simulation.start(), 4)
    assert finite
    evaluation, models = simulation.evaluate(state)
    result[name] = {
        "w": state.server.ravel().tolist(),
        "personal": None if models.personal is None else models.personal.ravel(1).tolist(),
        "loss": {kind: scores.loss.tolist() for kind, scores in evaluation.test.items()},
        "correct": {kind: scores.correct.tolist() for kind, scores in evaluation.test.items()},
    }
print(json.dumps(result))
"""


def results(devices: int) -> dict:
    """What a process with so many devices computes: cohorts and clients do not divide evenly."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_devices():
    single, several = results(1), results(5)
    assert (single.pop("devices"), several.pop("devices")) == (1, 5)
    for name, want in single.items():
        got = several[name]
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-4, atol=1e-6, err_msg=name)
        if want["personal"] is not None:
            np.testing.assert_allclose(got["personal"], want["personal"], rtol=1e-4, atol=1e-6, err_msg=name)
        for kind, loss in want["loss"].items():
            np.testing.assert_allclose(got["loss"][kind], loss, rtol=1e-4, err_msg=f"{name} {kind}")
        assert got["correct"] == want["correct"]


@pytest.mark.parametrize("given", [True, False])
def test_compiled_programs_are_kept_where_jax_was_told_to(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PFEDME_CACHE", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], "elsewhere" if given else None)
        keep_compiled_programs(7.0)
        own = (str(tmp_path / "xla"), 7.0)
        assert tuple(getattr(jax.config, name) for name in names) == (
            ("elsewhere", before[names[1]]) if given else own
        )
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
