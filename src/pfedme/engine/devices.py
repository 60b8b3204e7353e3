"""All cores, or all accelerators, of one or several hosts: one XLA device each, and work spread over them
along its leading axis.

Several hosts, which `pfedme.cli.hosts` connects, run the same program in step. What decides about its course
must be the same on all of them: a clock, a file or a signal counts through `agreed` and `from_first`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pfedme.core.private import Private
from pfedme.errors import InputError, Interrupted
from pfedme.files import cache_folder

T = TypeVar("T")

AXIS, HOST = "work", "host"


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


class Compiled:
    """`jax.jit` of a function of clients' work. If gradients are private, its vectors are as wide as the
    CPU's, with which noise takes half as long; other programs gain nothing from that."""

    def __init__(self, f: Callable[..., Any], static_argnames: tuple[str, ...] = ()) -> None:
        wide = {"xla_cpu_prefer_vector_width": 512}
        jitted = partial(jax.jit, f, static_argnames=static_argnames)
        self.programs = jitted(), jitted(compiler_options=wide)

    def of(self, *args: Any) -> Any:
        """The one for these arguments."""
        parts = jax.tree.leaves(args, is_leaf=lambda part: isinstance(part, Private))
        return self.programs[any(isinstance(part, Private) for part in parts)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of(*args)(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit` has it."""
        return self.of(*args).trace(*args, **kwargs)


def hosts() -> int:
    """Number of hosts that carry out this program together."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


@cache
def mesh() -> Mesh:
    """All devices in a row; of several hosts, a row for each."""
    if hosts() == 1:
        return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    rows = np.array(jax.devices()).reshape(hosts(), -1)
    return Mesh(rows, (HOST, AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def over_devices(
    f: Callable[..., T], shared: Any, work: Any, rows: Any = (), *, everywhere: bool = False
) -> T:
    """f(shared, work, *rows), where f maps the leading axis of `work` to that of its result, a part on each
    device.

    The size of that axis must be a multiple of the number of devices (see `padded`). All get `shared`, and
    `rows` of their own host (see `own_rows`). With `everywhere`, the result is the same on all devices.
    """
    part, whole = PartitionSpec(mesh().axis_names), PartitionSpec()
    specs = (whole, part, *(_of_host() for _ in rows))
    out = whole if everywhere else part
    run = jax.shard_map(f, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=False)
    return run(shared, work, *rows)


def _of_host() -> PartitionSpec:
    """The placement of arrays of which each host has its own part."""
    return PartitionSpec() if hosts() == 1 else PartitionSpec(HOST)


def own_rows(a: np.ndarray) -> jax.Array:
    """The rows of this host, which all of its devices share: as many on each host."""
    if hosts() == 1:
        return replicate(a)
    shape = (hosts() * len(a), *a.shape[1:])
    return jax.make_array_from_callback(shape, NamedSharding(mesh(), _of_host()), lambda _: a)


def on_host() -> jax.Array:
    """The number of the host of a device, within `over_devices`."""
    return jax.lax.axis_index(HOST)


def as_shared_out(a: Any) -> Any:
    """`a`, which all devices have, with only a part of its leading axis used on each."""
    return jax.lax.with_sharding_constraint(a, NamedSharding(mesh(), PartitionSpec(mesh().axis_names)))


def from_its_device(a: jax.Array) -> jax.Array:
    """The array whose numbers come from the one device on which they are not zero, within `over_devices`.

    Sums of whole numbers are exact, whatever their order.
    """
    if jnp.issubdtype(a.dtype, jnp.floating):
        whole = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(from_its_device(jax.lax.bitcast_convert_type(a, whole)), a.dtype)
    if a.dtype == bool:
        return from_its_device(a.astype(jnp.uint32)).astype(bool)
    return jax.lax.psum(a, mesh().axis_names)


def lanes(home: np.ndarray, size: int = 1) -> np.ndarray:
    """Work dealt to the devices of the hosts where it has to be done: for each device the indices of its
    items, followed by −1 up to a multiple of `size`, the same length for all, one device after another."""
    of_host = jax.device_count() // hosts()
    dealt = [part for h in range(hosts()) for part in np.array_split(np.flatnonzero(home == h), of_host)]
    length = max(size, -(-max(map(len, dealt)) // size) * size)
    return np.concatenate([np.pad(part, (0, length - len(part)), constant_values=-1) for part in dealt])


def padded(a: np.ndarray) -> np.ndarray:
    """`a`, with its last element repeated until its length is a multiple of the number of devices."""
    return np.pad(a, (0, -len(a) % jax.device_count()), mode="edge")


def replicate(a: Any) -> Any:
    """`a`, an array or a tree of arrays, on every device; the cores share an aligned array in memory.

    A compiled program depends on the placement of its arguments, so anything that is kept between calls
    should always be placed here.
    """
    everywhere = NamedSharding(mesh(), PartitionSpec())

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return jax.device_put(leaf, everywhere)
        # All hosts have the same values, and device_put would send them around to see that they do.
        return jax.make_array_from_callback(np.shape(leaf), everywhere, np.asarray(leaf).__getitem__)

    return jax.device_put(a, everywhere) if hosts() == 1 else jax.tree.map(placed, a)


def check_even() -> None:
    """Raises an error unless all hosts have the same number of devices."""
    counts = np.bincount([device.process_index for device in jax.devices()])
    if counts.min() < counts.max():
        raise InputError(
            f"All hosts must have the same number of devices, but they have {', '.join(map(str, counts))}; "
            f"set JAX_NUM_CPU_DEVICES={counts.min()} on each of them."
        )


def host() -> int:
    """The number of this host."""
    return jax.process_index() if hosts() > 1 else 0


def is_first() -> bool:
    """Whether this host is the first, the only one that writes files and prints."""
    return host() == 0


def read(a: Any) -> np.ndarray:
    """The values of an array, wherever its parts lie. All hosts must ask for them."""
    if isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(a, tiled=True))
    return np.asarray(a)


def from_hosts(own: np.ndarray, home: np.ndarray) -> np.ndarray:
    """Values for all items, on all hosts, where item k is one of host home[k], from those that each host has
    for its `own` items, in the same order."""
    counts = np.bincount(home, minlength=hosts())
    sent = np.zeros((counts.max(), *own.shape[1:]), own.dtype)
    sent[: len(own)] = own
    found = np.empty((len(home), *own.shape[1:]), own.dtype)
    for k, part in enumerate(multihost_utils.process_allgather(sent)):
        found[home == k] = part[: counts[k]]
    return found


_stopping = False


def stop_together() -> None:
    """Makes `agreed` raise `Interrupted` on all hosts, where a single process would raise it at once."""
    global _stopping
    _stopping = True


def agreed(number: int) -> int:
    """The first host's `number`, on all hosts. Raises `Interrupted` if one of them was told to stop."""
    if hosts() == 1:
        return number
    told = multihost_utils.process_allgather(np.array([_stopping, number], np.int32))
    if told[:, 0].any():
        raise Interrupted(None)
    return int(told[0, 1])


def from_first(make: Callable[[], bytes | None]) -> bytes:
    """What `make` returns on the first host, the only one that calls it; if it raises an `InputError`, all
    hosts do."""
    if hosts() == 1:
        return make() or b""
    content = b""
    if is_first():
        try:
            content = b"+" + (make() or b"")
        except InputError as error:
            content = b"-" + str(error).encode()
    sent = np.zeros(agreed(len(content)), np.uint8)
    if is_first():
        sent[:] = np.frombuffer(content, np.uint8)
    content = multihost_utils.broadcast_one_to_all(sent).tobytes()
    if content[:1] == b"-":
        raise InputError(content[1:].decode())
    return content[1:]
