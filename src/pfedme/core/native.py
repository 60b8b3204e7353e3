"""The proximal step as machine code: prox.c, compiled by the package `ziglang` if that is installed.

Without it, on other devices than CPUs and for what prox.c does not cover, `prox` takes the same steps in
XLA; the results agree up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.files import cache_folder

if TYPE_CHECKING:
    from pfedme.core.problem import Loss

SOURCE = Path(__file__).with_name("prox.c")
TARGET = "pfedme_prox"
OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
MOST_ROWS = 64
"""The largest batch: an inner step costs |D|² for each unit of the first layer."""
MOST_LAYERS = 16
BEFORE = 5
"""Arguments of the kernel before the layers of w."""


def covers(f: Loss, theta: Params) -> bool:
    """Whether the kernel can take gradient steps on this loss from this point."""
    if type(f.model) is not Network or jax.default_backend() != "cpu":
        return False
    labels = jnp.int32 if f.model.classes else jnp.float32
    types = [f.x.dtype, f.y.dtype, *(leaf.dtype for leaf in jax.tree.leaves(theta))]
    small = len(f.x) <= MOST_ROWS and len(theta.tree) <= MOST_LAYERS
    return small and types == [jnp.float32, labels] + [jnp.float32] * (len(types) - 2) and registered()


def steps(
    f: Loss, w: Params, start: Params, lam: jax.typing.ArrayLike, alpha: jax.typing.ArrayLike, K: int
) -> Params:
    """θ after K gradient steps of size α from `start` on f(θ) + λ/2 ‖θ − w‖²."""
    assert isinstance(f.model, Network)
    size, layers = len(f.x), jax.tree.leaves(w.tree)
    # θ takes the place of `start` in memory, which saves a copy in every local round.
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layers],
        vmap_method="expand_dims",
        input_output_aliases={BEFORE + len(layers) + k: k for k in range(len(layers))},
    )

    def kernel(*arrays: jax.Array) -> Any:
        return call(*arrays, K=np.int64(K), classes=np.int64(bool(f.model.classes)))

    rows = f.source or (f.x, f.y, jnp.arange(size, dtype=jnp.int32))
    scale = jnp.full(size, 1 / size, jnp.float32) if f.weight is None else f.weight
    numbers = jnp.stack([jnp.asarray(a, jnp.float32) for a in (lam, alpha, f.model.l2)])
    arrays = (*rows, f.model.weighted(scale, f.y), numbers, *layers, *jax.tree.leaves(start.tree))
    return Params(jax.tree.unflatten(jax.tree.structure(w.tree), _mapped(kernel, len(layers))(*arrays)))


def _mapped(kernel: Callable[..., Any], layers: int) -> Callable[..., Any]:
    """The kernel with a rule for `vmap`: everything but `start`, which is overwritten, can be shared."""
    mapped = custom_vmap(kernel)

    @mapped.def_vmap
    def rule(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, list[bool]]:
        own = [
            jnp.broadcast_to(a, (size, *a.shape)) if k >= BEFORE + layers and not at else a
            for k, (a, at) in enumerate(zip(arrays, batched, strict=True))
        ]
        axes = [0 if at or k >= BEFORE + layers else None for k, at in enumerate(batched)]
        return _mapped(jax.vmap(kernel, axes), layers)(*own), [True] * layers

    return mapped


@cache
def registered() -> bool:
    """Whether XLA has the kernel, which is compiled if necessary."""
    if importlib.util.find_spec("ziglang") is None:
        return False
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError):  # no place for it, or no compiler for this system
        return False
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.pfedme_prox), platform="cpu")
    return True


def _compiled() -> Path:
    """The library, kept in the cache folder for this source, compiler, version of JAX and processor."""
    about = (SOURCE.read_text(encoding="utf-8"), OPTIONS, jax.__version__, platform.platform(), _processor())
    name = hashlib.sha256(repr((*about, importlib.metadata.version("ziglang"))).encode()).hexdigest()[:16]
    library = cache_folder() / "native" / f"prox-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = str(Path(folder) / library.name)
            command = (sys.executable, "-m", "ziglang", "cc", *OPTIONS, f"-I{jax.ffi.include_dir()}")
            caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), folder)
            subprocess.run(
                [*command, str(SOURCE), "-o", made], check=True, capture_output=True, env=os.environ | caches
            )
            os.replace(made, library)
    return library


def _processor() -> str:
    """What this processor can do, as far as the system says."""
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features")))
    return platform.processor() + platform.node()
