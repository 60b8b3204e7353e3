"""The proximal step as machine code: prox.c, compiled by the C compiler of the package `ziglang` if that is
installed.

Without it, on other devices than CPUs and for what prox.c does not cover, `prox` takes the same steps in XLA; the
results agree up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.files import cache_folder

if TYPE_CHECKING:
    from pfedme.core.problem import Loss

SOURCE = Path(__file__).with_name("prox.c")
MOST_ROWS = 64
"""The largest batch: products with its Gram matrix cost |D|² for each unit."""
OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")


def covers(f: Loss, theta: Params) -> bool:
    """Whether the kernel can take gradient steps on this loss from this point."""
    plain = type(f.model) is Network and f.x.dtype == theta.dtype == jnp.float32
    plain &= f.y.dtype == (jnp.int32 if f.model.classes else jnp.float32)
    return plain and len(f.x) <= MOST_ROWS and jax.default_backend() == "cpu" and registered()


def steps(f: Loss, w: Params, start: Params, lam: float, alpha: float, K: int) -> Params:
    """θ after K gradient steps of size α from `start` on f(θ) + λ/2 ‖θ − w‖²."""
    assert isinstance(f.model, Network)
    size = len(f.x)
    scale = jnp.full(size, 1 / size, jnp.float32) if f.weight is None else f.weight
    layers = jax.tree.leaves(w.tree)
    call = jax.ffi.ffi_call(
        "pfedme_prox",
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layers],
        vmap_method="expand_dims",
        input_output_aliases={5 + len(layers) + k: k for k in range(len(layers))},
    )
    numbers = jnp.stack([jnp.asarray(a, jnp.float32) for a in (lam, alpha, f.model.l2)])
    rows = f.source or (f.x, f.y, jnp.arange(size, dtype=jnp.int32))
    found = call(
        *rows,
        f.model.weighted(scale, f.y),
        numbers,
        *layers,
        *jax.tree.leaves(start.tree),
        K=K,
        classes=int(f.model.classes > 0),
    )
    return Params(jax.tree.unflatten(jax.tree.structure(w.tree), found))


@cache
def registered() -> bool:
    """Whether XLA has the kernel, which is compiled if necessary."""
    if importlib.util.find_spec("ziglang") is None:
        return False
    try:
        library = ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.CalledProcessError):
        return False
    jax.ffi.register_ffi_target("pfedme_prox", jax.ffi.pycapsule(library.pfedme_prox), platform="cpu")
    return True


def compiled() -> Path:
    """The library, kept in the user's cache folder for this source, compiler, version of JAX and processor."""
    cpu = platform.platform() + platform.processor()
    with contextlib.suppress(OSError):  # Linux only
        cpu += next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] in ("flags", "Featu")
        )
    what = (SOURCE.read_text(), importlib.metadata.version("ziglang"), jax.__version__, OPTIONS, cpu)
    library = cache_folder() / "native" / f"prox-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [sys.executable, "-m", "ziglang", "cc", *OPTIONS, f"-I{jax.ffi.include_dir()}"]
            subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True, capture_output=True)
            os.replace(made, library)
    return library
