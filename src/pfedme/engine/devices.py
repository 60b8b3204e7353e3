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


# XLA runs these small batched products on one core of a device, so each core is made a device. This must
# come before JAX starts; where it has started, or JAX_NUM_CPU_DEVICES is set, it is left as it is.
if getattr(jax.config, "jax_num_cpu_devices", 0) < 0:
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cores())


def keep_compiled_programs(least_s: float = 0.2) -> None:
    """Lets JAX keep what takes so many seconds to compile in the user's cache folder, for the next start."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)
    # A process that was killed, or a full disk, leaves half a program, which is then compiled again.
    warnings.filterwarnings("ignore", r"Error (reading|writing) persistent compilation cache")


@cache
def mesh() -> Mesh:
    """All devices in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def over_devices(f: Callable[[Any, Any], T], shared: Any, work: Any) -> T:
    """f(shared, work), where f maps the leading axis of `work` to that of its result, a part on each device.

    That axis must be a multiple of the number of devices (see `padded`); `shared` goes to all of them.
    """
    part, whole = PartitionSpec(AXIS), PartitionSpec()
    run = jax.shard_map(f, mesh=mesh(), in_specs=(whole, part), out_specs=part, check_vma=False)
    return run(shared, work)


def padded(a: np.ndarray) -> np.ndarray:
    """`a`, its last element repeated until its length is a multiple of the number of devices."""
    return np.pad(a, (0, -len(a) % jax.device_count()), mode="edge")


def replicate(a: Any) -> Any:
    """`a`, an array or a tree of them, on every device; an aligned one in memory is shared by the cores.

    A compiled program is made for where its arguments lie, so that what is kept from call to call should
    always lie here.
    """
    return jax.device_put(a, NamedSharding(mesh(), PartitionSpec()))
