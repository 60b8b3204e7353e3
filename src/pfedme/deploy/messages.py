"""What the two sides of a federation say to each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from pfedme.errors import InputError

Kind = Literal["agree", "join", "train", "finish", "refuse"]
"""What a client is asked for: a description of its table; to be bound by an agreement; its part of a round;
the models that it keeps in the end. `refuse` tells it that it cannot take part, or that the run failed."""

Words = dict[str, Any]
"""JSON values."""

UNBOUND = "it has no agreement; its state folder is new"
"""The error of a client that needs the agreement again."""
GONE = "its connection ended after it was asked"
"""The error of a client that may come back."""

STARTED_OVER = "started_over"
"""The word of a client that had lost what it kept and that its owner lets start over, until an upload of it
counts."""
LOST = "it had lost what it kept, and started over"
"""What the ledger says of that."""

SCHEMA_FILE, FROM_ROWS = "schema file", "rows, with minimum counts"
NOISY = "schema file, and rows with noise"
"""Where what a client tells for the agreement comes from."""

SHARED = "shared/"
"""The prefix of the names of the shared model's vectors, if it is sent separately from what the algorithm
sends."""


class Content(NamedTuple):
    """The content of a message: JSON values, and arrays."""

    words: Words
    arrays: dict[str, np.ndarray]


def digest(content: Content) -> tuple[int, str]:
    """The number of bytes and the SHA-256 of a message's content: a line of JSON with its words and the name,
    type and shape of its arrays, and the bytes of the arrays in that order.

    >>> digest(Content({"round": 3}, {"w": np.zeros(4, np.float32)}))[0]
    69
    """
    arrays = {name: content.arrays[name] for name in sorted(content.arrays)}
    about = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    line = json.dumps({"words": content.words, "arrays": about}, sort_keys=True, separators=(",", ":"))
    parts = [f"{line}\n".encode(), *(array.tobytes() for array in arrays.values())]
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sum(map(len, parts)), sha.hexdigest()


class Reply(NamedTuple):
    """What a client has answered, or the error that came instead."""

    content: Content | None
    error: str = ""


class Refusal(InputError):
    """Why a client refuses a request, in words that may leave it: they quote no row."""


def misfit(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Any]) -> str:
    """What is wrong with arrays that should have these shapes, and be finite; empty if nothing is."""
    if lacking := shapes.keys() - arrays.keys():
        return f"it lacks {sorted(lacking)[0]}"
    if extra := arrays.keys() - shapes.keys():
        return f"it contains {str(sorted(extra)[0])[:40]!r}, which was not asked for"
    for name, wanted in shapes.items():
        found = arrays[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            kind, shape = str(found.dtype)[:40], str(found.shape)[:40]
            return f"it is {kind} of shape {shape}, not {wanted.dtype} of shape {wanted.shape}"
        if np.issubdtype(found.dtype, np.floating) and not np.isfinite(found).all():
            return "it contains numbers that are not finite"
    return ""


def sha256(words: Words) -> str:
    """The hash of JSON values, whatever the order of their keys.

    >>> sha256({"a": 1, "b": [0.1]}) == sha256({"b": [0.1], "a": 1})
    True
    """
    text = json.dumps(words, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
