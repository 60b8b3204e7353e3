"""What a deployed client keeps between rounds, if its algorithm keeps something.

A round's new state takes effect only once the server has confirmed that the upload of that round counted;
otherwise the two sides would no longer match. Until then both are in the file: the state before the round,
from which a retry starts again, and the one after it.
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

    def __init__(self, state: Path, agreement: str, shapes: Any) -> None:
        """`agreement` is the one that the client is bound by; `shapes` are those of what it keeps."""
        self.path, self.agreement, self.shapes = state / FILE, agreement, shapes
        self.now: Any = None
        """What the client keeps."""

    def recall(self, counted: Any, first: Callable[[], Any]) -> Any:
        """What the client keeps, if its upload of round `counted` (the first is 1) was the last to count; the
        result of `first` if none did."""
        if not jax.tree.leaves(self.shapes):
            self.now = self.shapes
            return self.now
        arrays, about = self._read()
        if not about:
            self.now = first()
        elif about["round"] == counted:
            self.now = tree_of("after", arrays, self.shapes)
        else:
            self.now = tree_of("before", arrays, self.shapes)
        return self.now

    def expect(self, t: int, after: Any) -> None:
        """Notes what the client will keep if its upload of round t counts."""
        if jax.tree.leaves(self.shapes):
            about = {"agreement": self.agreement, "round": t + 1}
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
