"""The state of a deployed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pfedme.deploy.agreement import Agreement
from pfedme.deploy.judge import TRAILING
from pfedme.errors import RunError
from pfedme.runs.ledger import Part


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state of a deployed run after `t` rounds; with the plan it determines what follows."""

    t: int
    server: Any
    """What the algorithm's server keeps: usually the shared model."""
    agreement: Agreement
    ledger: tuple[Part, ...] = ()
    """Lines that have not been written yet."""
    attempt: int = 0
    """Number of failed attempts at the next round."""
    norms: tuple[float, ...] = ()
    """Lengths of the last updates that counted."""
    lates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How often in a row clients have been late."""
    counted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The last round in which each client's upload counted; the first is 1."""
    history: tuple[dict[str, Any], ...] = ()
    waiting: tuple[Part, ...] = ()
    """At a region, the parts of clients in what it has sent last: whether they count is not known before the
    next message of the upper server."""

    def noting(self, parts: Sequence[Part]) -> Progress:
        """This state with more lines of the ledger, and what follows from them."""
        lates = {**self.lates}
        for part in parts:
            lates[part.client] = lates.get(part.client, 0) + 1 if part.outcome == "late" else 0
        good = [part for part in parts if part.outcome == "counted"]
        norms = [part.norm for part in good if part.norm is not None]
        return dataclasses.replace(
            self, ledger=(*self.ledger, *parts), lates=lates, norms=(*self.norms, *norms)[-TRAILING:],
            counted={**self.counted, **{part.client: part.round for part in good}},
        )  # fmt: skip


class Stopped(RunError):
    """Too few clients, or too few good replies too often. The run can be resumed from `progress`."""

    def __init__(self, why: str, progress: Progress | None = None) -> None:
        super().__init__(why)
        self.progress = progress
