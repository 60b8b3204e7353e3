"""The software and hardware of a run."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import jax

from pfedme.algorithms import PFedMe
from pfedme.engine.devices import cores, hosts
from pfedme.engine.exchange import takes_native_steps
from pfedme.engine.simulate import Simulation


def environment() -> dict[str, Any]:
    """The versions and the machine that produced the numbers."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "devices": [str(d.device_kind) for d in jax.devices()],
        **({"hosts": hosts()} if hosts() > 1 else {}),
    }


def form(simulation: Simulation) -> dict[str, str]:
    """`proximal_steps`: whether they run as machine code (`core/native.py`) or in XLA, since results agree
    only up to rounding; nothing for algorithms without such steps."""
    s = simulation
    if not isinstance(s.algorithm, PFedMe):
        return {}
    native = s.private is None and takes_native_steps(
        s.algorithm, s.model, s.federation.features, s.store.longest
    )
    return {"proximal_steps": "machine code" if native else "XLA"}
