"""The software and hardware of a run."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import jax

from pfedme.engine.devices import cores, hosts


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
