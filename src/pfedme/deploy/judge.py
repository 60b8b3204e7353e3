"""What the server accepts of clients' replies: which uploads count, how long they may be, and which scores
are possible.

A client is not trusted. An upload that is not a model, or that is many times longer than usual, is dropped.
One that is longer than usual is shortened, so that its sender has no more weight than others. Scores must be
possible for some rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.core.tree import Params, from_vectors, vector_shapes
from pfedme.data.schema import Task
from pfedme.deploy.agreement import MOST_ROWS
from pfedme.deploy.log import one_line
from pfedme.deploy.messages import LOST, STARTED_OVER, Content, Reply, misfit
from pfedme.runs.ledger import Part

TRAILING = 30
"""Number of updates of earlier rounds that determine what is usual."""
MOST_LOSS = 1e6
"""The largest loss of a row that is accepted."""
MANY_INFO, MOST_INFO = 16, 1e30
"""Limits on the number and the size of the numbers about the computation that a client may share."""
INNER = {"inner_residual", "inner_steps"}
"""Numbers about the computation that come together or not at all."""
PARTS, KINDS = ("test", "train"), ("global", "local", "personal")


@dataclasses.dataclass(frozen=True)
class Upload:
    """What a client has sent that can be counted."""

    tree: Any
    """Decoded."""
    rows: int
    """Its weight: training rows if updates are weighted by them, else the number of clients."""
    clients: int = 1
    """The number of clients whose mean it is, which is more than one only if it comes from a region."""

    @property
    def norm(self) -> float:
        """The length of the parts about models."""
        squares = [np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(_models(self.tree))]
        return float(np.sqrt(sum(squares)))

    def shortened(self, factor: float) -> Upload:
        """This upload with the parts about models multiplied by a factor."""
        scaled = jax.tree.map(
            lambda part: factor * part if isinstance(part, Params) else part, self.tree, is_leaf=_is_model
        )
        return dataclasses.replace(self, tree=scaled)


def _is_model(part: Any) -> bool:
    return isinstance(part, Params)


def _models(tree: Any) -> list[Params]:
    """The parts of an upload that are differences of models."""
    return [part for part in jax.tree.leaves(tree, is_leaf=_is_model) if isinstance(part, Params)]


def unfit(content: Content, shapes: Mapping[str, Any], weighted: bool, most: int = 1) -> str:
    """Why an upload whose vectors should have these shapes cannot be counted, regardless of the others; empty
    if it can. `most` is the number of clients for which its sender stands."""
    if wrong := misfit(content.arrays, shapes):
        return one_line(wrong, 200)
    rows = content.words.get("rows")
    if weighted and not (type(rows) is int and 0 < rows <= MOST_ROWS):
        return f"it claims {one_line(rows, 40)!r} rows"
    clients = content.words.get("clients", 1)
    if not (type(clients) is int and 0 < clients <= most):
        return f"it claims to answer for {one_line(clients, 40)!r} clients, of {most}"
    return ""


def unanswered(part: Part, waited: float | None) -> Part:
    """The part of a client that did not answer after a wait in seconds, or was not connected (None)."""
    if waited is None:
        return dataclasses.replace(part, outcome="absent", reason="it is not connected")
    why = f"no reply within {round(waited, 1):g} seconds"
    return dataclasses.replace(part, outcome="late", reason=why)


def judged(
    part: Part, reply: Reply, algorithm: Algorithm, message: Any, most: int = 1
) -> tuple[Part, Upload | None]:
    """The outcome of a client's part from its reply, which should be like `message`, and its upload if that
    can be counted. `most` is the number of clients for which it stands."""
    if reply.content is None:
        return dataclasses.replace(part, outcome="failed", reason=reply.error), None
    weighted = algorithm.aggregation == "samples"
    words = reply.content.words
    if why := unfit(reply.content, vector_shapes(message), weighted, most):
        return dataclasses.replace(part, outcome="dropped", reason=why), None
    rows, clients = words["rows"] if weighted else None, words.get("clients", 1)
    tree = algorithm.codec.decode(from_vectors(reply.content.arrays, message))
    upload = Upload(tree, clients if rows is None else rows, clients)
    reason = LOST if words.get(STARTED_OVER) is True else ""
    if clients < most:
        reason = f"for {clients} of its {most} clients"
    return dataclasses.replace(part, norm=upload.norm, rows=rows, reason=reason), upload


def usual_length(norms: Sequence[float], before: Sequence[float]) -> float:
    """The median length of the updates of a round and of earlier ones; the lower of two, so that one of two
    clients cannot raise it.

    >>> usual_length([1.0, 3.0], []), usual_length([1.0, 3.0, 50.0], [2.0, 2.0])
    (1.0, 2.0)
    """
    all_norms = sorted([*before[-TRAILING:], *norms])
    return all_norms[(len(all_norms) - 1) // 2] if all_norms else 0.0


def clipped(
    parts: dict[str, Part],
    uploads: dict[str, Upload],
    before: Sequence[float],
    *,
    clip: float,
    max_norm_ratio: float,
) -> tuple[dict[str, Part], dict[str, Upload]]:
    """The parts and uploads of a round. Uploads more than `max_norm_ratio` times as long as usual are
    dropped, and those longer than `clip` times the usual length are shortened to it."""
    norms = {name: part.norm for name, part in parts.items() if name in uploads and part.norm is not None}
    usual = usual_length(list(norms.values()), before)
    parts, uploads = dict(parts), dict(uploads)
    for name, norm in norms.items():
        if (len(norms) >= 3 or before) and norm > max_norm_ratio * max(usual, 1e-12):
            why = f"its update of length {norm:.3g} is far beyond the usual {usual:.3g}"
            parts[name] = dataclasses.replace(parts[name], outcome="dropped", reason=why)
            del uploads[name]
        elif clip and norm > clip * usual:
            parts[name] = dataclasses.replace(parts[name], clipped=clip * usual)
            uploads[name] = uploads[name].shortened(clip * usual / norm)
    return parts, uploads


def scores_shape(scores: Any, task: Task = "classification") -> tuple[Any, ...]:
    """The models and sums in the scores that a client shares; () if no rows can have such scores."""
    measure = {"right"} if task == "classification" else {"spread", "mean"}
    try:
        n = {part: _count(scores[f"n_{part}"]) for part in PARTS}
        info = scores["info"]
        named = len(info) <= MANY_INFO and all(name.isidentifier() and len(name) <= 40 for name in info)
        named &= INNER & set(info) in (INNER, set())
        if not named or not all(abs(_number(value)) <= MOST_INFO for value in info.values()):
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
        raise ValueError("not a number of rows")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number")
    return float(value)
