"""What the server believes of clients' replies: which uploads count, how long they may be, which scores are
possible.

A client is not trusted. An upload that is no model, or that is many times longer than usual, is dropped; one
that is longer than usual is shortened, so that whoever sends it has no more weight than others; and scores
must be such as rows can have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedme.data.schema import Task
from pfedme.deploy.agreement import MOST_ROWS
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import Content
from pfedme.runs.ledger import Part

TRAILING = 30
"""How many updates of earlier rounds have a say in what is usual."""
MOST_LOSS = 1e6
"""The largest loss of a row that is believed."""
INFO = (set(), {"inner_residual", "inner_steps"})
"""The numbers about the computation that a client may share, and how large they may be."""
MOST_INFO = 1e30
PARTS, KINDS = ("test", "train"), ("global", "local", "personal")


@dataclasses.dataclass(frozen=True)
class Upload:
    """What a client has sent that can be counted."""

    w: np.ndarray
    rows: int
    """Its weight where updates are weighted by rows, else 1."""


def unfit(content: Content, w: np.ndarray, weighted: bool) -> str:
    """Why an upload cannot be counted, whatever the others are; empty if it can."""
    upload = content.arrays.get("w")
    if upload is None:
        return "it has no model in it"
    if upload.shape != w.shape or upload.dtype != w.dtype:
        kind, shape = one_line(upload.dtype, 40), one_line(upload.shape, 40)
        return f"it is {kind} of shape {shape}, not {w.dtype} of shape {w.shape}"
    if not np.isfinite(upload).all():
        return "it has numbers that are not finite"
    rows = content.words.get("rows")
    if weighted and not (type(rows) is int and 0 < rows <= MOST_ROWS):
        return f"it claims {one_line(rows, 40)!r} rows"
    return ""


def usual_length(norms: Sequence[float], before: Sequence[float]) -> float:
    """The median length of the updates of a round and of those before; the lower one of two, so that one of
    two clients cannot raise it.

    >>> usual_length([1.0, 3.0], []), usual_length([1.0, 3.0, 50.0], [2.0, 2.0])
    (1.0, 2.0)
    """
    all_norms = sorted([*before[-TRAILING:], *norms])
    return all_norms[(len(all_norms) - 1) // 2] if all_norms else 0.0


def clipped(
    parts: dict[str, Part], uploads: dict[str, Upload], w: np.ndarray, before: Sequence[float],
    *, clip: float, far: float,
) -> tuple[dict[str, Part], dict[str, Upload]]:  # fmt: skip
    """The parts and uploads of a round with those dropped that are far longer than usual, and those shortened
    that are longer.

    Uploads w_i that are not shortened are left as they are; of others, w_i − w is shortened to `clip` times
    the usual length.
    """
    norms = {name: part.norm for name, part in parts.items() if name in uploads and part.norm is not None}
    usual = usual_length(list(norms.values()), before)
    parts, uploads = dict(parts), dict(uploads)
    for name, norm in norms.items():
        if (len(norms) >= 3 or before) and norm > far * max(usual, 1e-12):
            why = f"its update of length {norm:.3g} is far beyond the usual {usual:.3g}"
            parts[name] = dataclasses.replace(parts[name], outcome="dropped", reason=why)
            del uploads[name]
        elif clip and norm > clip * usual:
            factor, way = clip * usual / norm, uploads[name].w.astype(np.float64) - w
            parts[name] = dataclasses.replace(parts[name], clipped=clip * usual)
            uploads[name] = dataclasses.replace(uploads[name], w=(w + factor * way).astype(w.dtype))
    return parts, uploads


def scores_shape(scores: Any, task: Task = "classification") -> tuple[Any, ...]:
    """Of which models and sums the scores are that a client shares; () if no rows can have such scores."""
    measure = {"right"} if task == "classification" else {"spread", "mean"}
    try:
        n = {part: _count(scores[f"n_{part}"]) for part in PARTS}
        info = scores["info"]
        if set(info) not in INFO or not all(abs(_number(value)) <= MOST_INFO for value in info.values()):
            return ()
        if not scores["test"] or set(scores["test"]) != set(scores["train"]):
            return ()
        for part in PARTS:
            for kind, sums in scores[part].items():
                rows, loss = _count(sums["rows"]), _number(sums["loss"])
                fine = kind in KINDS and rows == n[part] and 0 <= loss <= MOST_LOSS * rows
                fine &= set(sums) == {"loss", "rows", *measure}
                if "right" in sums:
                    fine &= _count(sums["right"]) <= rows
                else:
                    fine &= 0 <= _number(sums["spread"]) <= MOST_LOSS**2 * rows
                    fine &= abs(_number(sums["mean"])) <= MOST_LOSS
                if not fine:
                    return ()
        return tuple(sorted(info)), tuple(sorted(scores["test"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return ()


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_ROWS:
        raise ValueError("no number of rows")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("no number")
    return float(value)
