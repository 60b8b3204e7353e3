"""What a deployed client keeps between rounds, if its algorithm keeps something.

A round's new state takes effect only once the server has confirmed that the upload of that round counted;
otherwise the two sides would no longer match. Until then both are in the file: the state before the round,
from which a retry starts again, and the one after it. If neither is the state after the last round that
counted, because the file was lost or is an old copy, the client refuses, unless its owner lets it start over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import safetensors
import safetensors.numpy

from pfedme.core.tree import leaves, tree_of
from pfedme.deploy.messages import Refusal
from pfedme.files import atomic_write, writing

FILE = "kept.safetensors"


class Memory:
    """The file with what a client keeps in the run of one agreement."""

    def __init__(self, state: Path, agreement: str, shapes: Any, *, start_over: bool = False) -> None:
        """`agreement` is the one that the client is bound by; `shapes` are those of what it keeps, and
        `start_over` is whether it may start over if that is lost."""
        self.path, self.agreement, self.shapes = state / FILE, agreement, shapes
        self.start_over = start_over
        self.now: Any = None
        """What the client keeps,"""
        self.counted: Any = 0
        """the round after which it does,"""
        self.started_over = False
        """and whether it has started over since then."""

    def recall(self, counted: Any, first: Callable[[], Any]) -> Any:
        """What the client keeps, if its upload of round `counted` (the first is 1) was the last to count; the
        result of `first` if none did, or if it starts over.

        Raises a refusal if what the client kept is lost and it may not start over.
        """
        self.counted = counted
        if not jax.tree.leaves(self.shapes):
            self.now = self.shapes
            return self.now
        arrays, about = self._read()
        if about and counted == about["round"]:
            self.now = tree_of("after", arrays, self.shapes)
        elif about and counted == about["before"]:
            self.now, self.started_over = tree_of("before", arrays, self.shapes), about["started_over"]
        elif counted == 0 and not about:
            self.now = first()
        elif self.start_over and type(counted) is int:
            self.now, self.started_over = first(), True
        else:
            raise Refusal(
                f"what it keeps of this run after round {str(counted)[:20]} is not in its state folder; its "
                "owner can put the folder back, or let it start over (--lost-state start-over)"
            )
        return self.now

    def expect(self, t: int, after: Any) -> None:
        """Notes what the client will keep if its upload of round t counts."""
        if jax.tree.leaves(self.shapes):
            if (self._read()[1] or {"round": 0})["round"] > t + 1:
                raise Refusal(f"round {t + 1} has passed while it worked on it")
            about = {"agreement": self.agreement, "round": t + 1, "before": self.counted}
            about |= {"started_over": self.started_over}
            arrays = leaves("before", self.now) | leaves("after", after)
            with writing(self.path):
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                atomic_write(self.path, safetensors.numpy.save(arrays, {"pfedme": json.dumps(about)}))

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            with safetensors.safe_open(self.path, framework="numpy") as file:
                about = json.loads(file.metadata()["pfedme"])
                if about["agreement"] != self.agreement:
                    return {}, {}
                names = file.keys()
                return {name: file.get_tensor(name) for name in names}, about
        except FileNotFoundError:
            return {}, {}
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            raise Refusal(f"its file {FILE} cannot be read; its owner has to check it") from None
