"""Numbers that look random but depend only on what they are computed from."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 2**20
"""Rows that are hashed at once."""


def mix(z: np.ndarray) -> np.ndarray:
    """The uint64 numbers, scrambled in place by the output function of SplitMix64, a bijection."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def draws(seed: int, ids: np.ndarray, place: np.ndarray) -> np.ndarray:
    """A random uint64 for each row, determined by the seed, its client's id and its index in the client.

    >>> draws(0, np.array([7, 7]), np.array([0, 1])) == draws(0, np.array([1, 7]), np.array([3, 1]))
    array([False,  True])
    """
    z = (ids.astype(np.uint64) << np.uint64(32)) ^ place.astype(np.uint64)
    return mix(mix(z) + np.uint64(GOLDEN * (seed + 1) % 2**64))


def ids_of_names(names: Sequence[str]) -> np.ndarray:
    """A uint32 id for each of several distinct names, which hardly ever depends on the other names.

    It is the name's CRC-32. If two names share one, the later in the list takes the next free number.

    >>> ids_of_names(["north", "south"])[1] == ids_of_names(["south"])[0]
    np.True_
    """
    ids = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
    _, own = np.unique(ids, return_index=True)
    if len(own) < len(ids):
        taken = set(ids.tolist())
        for i in np.setdiff1d(np.arange(len(ids)), own):
            free = int(ids[i])
            while free in taken:
                free = (free + 1) % 2**32
            taken.add(free)
            ids[i] = free
    return ids


def hash_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A uint64 for each row of features and its label: equal for equal rows, hardly ever for others."""
    flat = x.reshape(len(x), -1)
    salt = mix(np.arange(1, flat.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    out = mix(y.astype(np.float64).view(np.uint64) + np.uint64(GOLDEN))
    step = max(1, BLOCK // max(1, flat.shape[1]))
    for at in range(0, len(flat), step):
        # Adding zero turns −0 into 0.
        bits = (flat[at : at + step].astype(np.float32) + np.float32(0)).view(np.uint32).astype(np.uint64)
        out[at : at + step] += mix(bits + salt).sum(axis=1, dtype=np.uint64)
    return mix(out)


def fingerprint(paths: Sequence[Path]) -> str:
    """A name for the content of files: SHA-256 over their names and bytes."""
    total = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        total.update(f"{path.name}\0".encode(errors="surrogateescape"))
        total.update(_content(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return total.hexdigest()[:32]


@lru_cache(maxsize=4096)
def _content(path: Path, *_stat: int) -> bytes:
    """The hash of a file's bytes, cached until the file changes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
