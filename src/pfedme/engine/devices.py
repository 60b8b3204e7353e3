"""All cores, or all accelerators: one XLA device each, and work spread over them along its leading axis."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfedme.files import cache_folder

T = TypeVar("T")

AXIS = "work"


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# XLA runs these small batched products on one core of a device, so each core becomes a device. This must
# happen before JAX starts; if it has started, or if JAX_NUM_CPU_DEVICES is set, nothing is changed.
if getattr(jax.config, "jax_num_cpu_devices", 0) < 0:
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cores())


def keep_compiled_programs(least_s: float = 0.2) -> None:
    """Lets JAX cache programs that take this many seconds to compile, in the user's cache folder.

    If JAX has been given a folder for them (`JAX_COMPILATION_CACHE_DIR`), nothing is changed.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)
    # A killed process or a full disk leaves an incomplete program, which is then compiled again.
    warnings.filterwarnings("ignore", r"Error (reading|writing) persistent compilation cache")


@cache
def mesh() -> Mesh:
    """All devices in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def over_devices(f: Callable[[Any, Any], T], shared: Any, work: Any) -> T:
    """f(shared, work), where f maps the leading axis of `work` to that of its result, a part on each device.

    The size of that axis must be a multiple of the number of devices (see `padded`); all get `shared`.
    """
    part, whole = PartitionSpec(AXIS), PartitionSpec()
    run = jax.shard_map(f, mesh=mesh(), in_specs=(whole, part), out_specs=part, check_vma=False)
    return run(shared, work)


def padded(a: np.ndarray) -> np.ndarray:
    """`a`, with its last element repeated until its length is a multiple of the number of devices."""
    return np.pad(a, (0, -len(a) % jax.device_count()), mode="edge")


def replicate(a: Any) -> Any:
    """`a`, an array or a tree of arrays, on every device; the cores share an aligned array in memory.

    A compiled program depends on the placement of its arguments, so anything that is kept between calls
    should always be placed here.
    """
    return jax.device_put(a, NamedSharding(mesh(), PartitionSpec()))
