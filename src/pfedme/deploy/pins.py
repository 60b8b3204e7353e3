"""What a client is bound by, in its state folder: a plan, an agreement, and the rounds that it has answered.

    plan.json         the plan that a server offered, its SHA-256, and whether the owner has approved it
    agreement.json    the plan with the columns, classes, scaling and clients that were agreed on, the SHA-256
                      of all that, the fingerprint of the table, a secret, and whether the run is over
    rounds.json       the last round that was answered, and the SHA-256 of its w

A plan holds until the client is started anew, and an agreement, once a round of it was answered, for good.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from pfedme.deploy.messages import UNBOUND, Refusal, Words, sha256
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing

PLAN, AGREEMENT, ROUNDS, SESSION = "plan.json", "agreement.json", "rounds.json", "session"


class Pins:
    """The files by which a client in a state folder remembers what it is bound by."""

    def __init__(self, state: Path, run: str = "") -> None:
        self.state, self.run = state, run

    def begin(self) -> None:
        """Notes that the client was started anew; a run that is over leaves nothing that binds it."""
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            if (self._read(AGREEMENT) or {}).get("over"):
                for name in (PLAN, AGREEMENT, ROUNDS):
                    (self.state / name).unlink(missing_ok=True)
            atomic_write(self.state / SESSION, secrets.token_hex(8))

    def offered(self) -> Words | None:
        """The plan that a server has offered since the client was started, with `approved`."""
        found = self._read(PLAN)
        return found if found and found["session"] == self._session() else None

    def approved(self, plan: Words, approve: str) -> bool:
        """Whether the owner has approved a plan, if `approve` is the policy's word on that.

        Raises a refusal if it is another plan than the one of this session or than the approved one.
        """
        sha, found = sha256(plan), self._read(PLAN) or {}
        if approve not in ("ask", "any", sha):
            raise Refusal(f"its owner has approved the plan {approve[:12]}…, and this is {sha[:12]}…")
        if found.get("sha256") == sha and found["approved"]:
            return True
        if found and found["sha256"] != sha and found["session"] == self._session():
            raise Refusal(
                f"it was offered the plan {found['sha256'][:12]}… before, and this is {sha[:12]}…; its owner "
                "must start it anew for another plan"
            )
        self._write(
            PLAN, {"sha256": sha, "approved": approve != "ask", "session": self._session(), "plan": plan}
        )
        return approve != "ask"

    def approve(self) -> None:
        """Notes that the owner has approved the plan that was offered."""
        self._write(PLAN, {**(self._read(PLAN) or {}), "approved": True})

    def bind(self, agreement: Words, fingerprint: str) -> str:
        """Binds the client to an agreement about a table with this fingerprint; returns its hash.

        Raises a refusal if the client has answered a round of another one.
        """
        sha, found = sha256(agreement), self._read(AGREEMENT) or {}
        if found.get("sha256") == sha and not found["over"]:
            return sha
        same_plan = found and sha256(found["agreement"]["plan"]) == sha256(agreement["plan"])
        ended = found.get("over") and found["session"] != self._session()
        if same_plan and self._answered(found) and not ended:
            raise Refusal(
                f"it is bound by the agreement {found['sha256'][:12]}…, of which it has answered a round; "
                f"its owner can end that by removing {AGREEMENT} from the state folder"
            )
        self._write(
            AGREEMENT,
            {
                "sha256": sha,
                "fingerprint": fingerprint,
                "over": False,
                "secret": secrets.token_hex(8),
                "session": self._session(),
                "agreement": agreement,
            },
        )
        return sha

    def bound(self, sha: Any) -> Words:
        """The agreement with this hash, by which the client is bound, with `fingerprint` and `secret`."""
        found = self._read(AGREEMENT)
        if found is None:
            raise Refusal(UNBOUND)
        if found["sha256"] != sha:
            raise Refusal(f"it is bound by the agreement {found['sha256'][:12]}…, and this is about another")
        return found

    def enter(self, t: int, w: np.ndarray, *, train: bool) -> None:
        """Notes that a round is answered for this w, before anything of it leaves.

        Raises a refusal if the round has passed, or if it was answered for another w.
        """
        agreement, digest = self._read(AGREEMENT) or {}, hashlib.sha256(w.tobytes()).hexdigest()
        found = self._answered(agreement) or {"round": -1, "w": ""}
        if t < found["round"]:
            raise Refusal(f"round {t + 1} has passed; it has answered round {found['round'] + 1}")
        if t == found["round"] and digest != found["w"]:
            raise Refusal(f"it has answered round {t + 1} for another w")
        if train and agreement.get("over"):
            raise Refusal("its part in this run is over")
        if t > found["round"]:
            self._write(ROUNDS, {"agreement": agreement["sha256"], "round": t, "w": digest})

    def end(self) -> None:
        """Notes that the run is over."""
        if found := self._read(AGREEMENT):
            self._write(AGREEMENT, {**found, "over": True})

    def _answered(self, agreement: Words) -> Words | None:
        """The last round of an agreement that was answered."""
        found = self._read(ROUNDS)
        return found if found and found["agreement"] == agreement.get("sha256") else None

    def _session(self) -> str:
        try:
            return (self.state / SESSION).read_text()
        except FileNotFoundError:  # a client that Flower's own programs run: a session for each run
            return self.run

    def _read(self, name: str) -> Words | None:
        try:
            return json.loads((self.state / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.state / name} cannot be read ({error}); move it away.") from None

    def _write(self, name: str, words: Words) -> None:
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            atomic_write(self.state / name, json.dumps(words, indent=1, ensure_ascii=False) + "\n")
