"""The end of a run at a client that chooses its model: what the choice needs, in a file until it is made.

The choice takes longer than a server waits for a reply, and the server learns nothing of it. So the client
answers first. If it is stopped before it has chosen, the file is still there, and needs no server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from pfedme.core.spec import build, parse, to_json
from pfedme.deploy.messages import Refusal, Words
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy
from pfedme.engine.choices import Personalize
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing

FILE = "last.safetensors"
KEPT = "kept"
"""The prefix of the arrays that the client keeps for the algorithm; the others are what the server sent."""
BEGAN_WITHOUT = "the run began without --personalize, so that the shared model has seen all its rows"


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a client knows when a run is over."""

    pinned: Words
    """What it was bound by."""
    round: int
    arrays: Mapping[str, np.ndarray]
    """What the server sent last, and what the client keeps for the algorithm."""
    why: str = ""
    """Why the client cannot choose; empty if it can."""

    @property
    def how(self) -> Personalize | None:
        """How the client chooses."""
        return how_pinned(self.pinned)

    def save(self, state: Path) -> None:
        """Writes the file."""
        about = {"pinned": self.pinned, "round": self.round, "why": self.why}
        with writing(state):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = safetensors.numpy.save(dict(self.arrays), {"pfedme": json.dumps(about)})
            atomic_write(state / FILE, content)

    @classmethod
    def load(cls, state: Path) -> Ending | None:
        """The ending in a state folder; None if there is none."""
        try:
            with safetensors.safe_open(state / FILE, framework="numpy") as file:
                about, names = json.loads(file.metadata()["pfedme"]), file.keys()
                return cls(arrays={name: file.get_tensor(name) for name in names}, **about)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise InputError(
                f"{state / FILE} cannot be read ({error}); remove it to keep the algorithm's model."
            ) from None


def parse_choice(text: str | None) -> Personalize | None:
    """How a deployed client chooses, from `auto:steps=200,...`: by one part of its rows, and without the
    scores of others.

    >>> parse_choice("auto:folds=4").folds, parse_choice("")
    (4, None)
    """
    if not text:
        return None
    how = parse(text, {Personalize.name: Personalize}, "personalization")
    for name in ("pooled", "small"):
        if (value := getattr(how, name)) not in (0, getattr(Personalize, name)):
            raise InputError(
                f"--personalize auto:{name}={value:g} is for simulations: a deployed client chooses by one "
                f"part of its own rows. Leave {name} out."
            )
    return dataclasses.replace(how, pooled=0.0, small=0)


def choice_text(how: Personalize) -> str:
    """The inverse of `parse_choice`."""
    return f"{how.name}:" + ",".join(f"{name}={value}" for name, value in to_json(how).items())


def to_pin(how: Personalize | None, rows: int, plan: Plan, policy: Policy) -> Words:
    """The part of a client's pins about its choice, given its number of training rows: `personalize`, None if
    it does not choose, and `why` not, if it wanted to."""
    if how is None:
        return {"personalize": None, "why": ""}
    left, why = rows - (rows // how.folds if rows > 1 else 0), ""
    if left == rows:
        why = f"{rows} training rows are too few to keep one of {how.folds} parts for the choice"
    else:
        try:
            policy.check_table(left, (), plan)
        except Refusal as refusal:
            why = f"without one of {how.folds} parts of its rows for the choice, {refusal}"
    return {"personalize": None if why else to_json(how), "why": why}


def how_pinned(pinned: Words) -> Personalize | None:
    """How a client with these pins chooses; None if it does not."""
    words = pinned.get("personalize")
    return None if words is None else build(Personalize, words, "the client's pins")


def pinned_line(pinned: Words, wanted: Personalize | None) -> str:
    """What the owner should know about the choice when the client is bound; empty if there is nothing."""
    how, why = how_pinned(pinned), why_not(pinned, wanted)
    if how is not None:
        return (
            f"One of {how.folds} parts of the training rows is kept out of training; when the run is over, "
            "this client chooses its model by it. The server is not told."
        )
    return f"This client takes part with all its rows and keeps the algorithm's model: {why}." if why else ""


def why_not(pinned: Words, wanted: Personalize | None) -> str:
    """Why a client that wants to choose cannot; empty if it can, or does not want to."""
    if wanted is None or pinned.get("personalize") is not None:
        return ""
    return pinned.get("why") or BEGAN_WITHOUT
