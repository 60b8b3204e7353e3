"""What a run was made with."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import jax

from pfedme.engine.devices import cores


def environment() -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "devices": [str(d.device_kind) for d in jax.devices()],
    }
