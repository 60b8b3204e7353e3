"""What a client is bound by, in its state folder: a plan, an agreement, and the rounds that it has answered.

    plan.json         the plan that a server offered, its SHA-256, and whether the owner has approved it
    agreement.json    the plan with the columns, classes, scaling and clients that were agreed on, the SHA-256
                      of all that, the fingerprint of the table, a secret, whether the run is over, and
                      whether the client keeps rows for the choice of its model
    rounds.json       the last round that was answered, and the SHA-256 of what was sent in it

A plan is binding until the client is restarted, and an agreement permanently once a round of it was answered.
Each message has its own process, and they take turns: between the read and the write of one, no other writes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pfedme.deploy.messages import SHARED, UNBOUND, Refusal, Words, sha256
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing

PLAN, AGREEMENT, ROUNDS, SESSION = "plan.json", "agreement.json", "rounds.json", "session"
LOCK = "pins.lock"


class Pins:
    """The files in a state folder that record what a client is bound by."""

    def __init__(self, state: Path, run: str = "") -> None:
        self.state, self.run = state, run

    def begin(self) -> None:
        """Records that the client was started; a finished run leaves nothing that binds it."""
        with self._turn():
            if (self._read(AGREEMENT) or {}).get("over"):
                for name in (PLAN, AGREEMENT, ROUNDS):
                    (self.state / name).unlink(missing_ok=True)
            atomic_write(self.state / SESSION, secrets.token_hex(8))

    @property
    def supervised(self) -> bool:
        """Whether `pfedme client` was started with this state folder, and not one of Flower's programs."""
        return (self.state / SESSION).exists()

    def offered(self) -> Words | None:
        """The plan that a server has offered since the client was started, with `approved`."""
        found = self._read(PLAN)
        return found if found and found["session"] == self._session() else None

    def approved(self, plan: Words, approve: str) -> bool:
        """Whether the owner has approved a plan, given the policy's `approve`.

        Raises a refusal if it is not the plan of this session, or not the approved one.
        """
        sha, asks = sha256(plan), approve == "ask"
        if approve not in ("ask", "any", sha):
            raise Refusal(f"its owner has approved the plan {approve[:12]}…, but this is {sha[:12]}…")
        with self._turn():
            found, session = self._read(PLAN) or {}, self._session()
            # An owner who wants to be asked has not approved what a laxer policy accepted.
            if found.get("sha256") == sha and found["asked" if asks else "approved"]:
                return True
            if found and found["sha256"] != sha and found["session"] == session:
                raise Refusal(
                    f"it was offered the plan {found['sha256'][:12]}… before, but this is {sha[:12]}…; its "
                    "owner must restart it for another plan"
                )
            words = {"sha256": sha, "approved": not asks, "asked": False, "session": session, "plan": plan}
            self._write(PLAN, words)
        return not asks

    def approve(self, sha: str) -> None:
        """Records that the owner was asked about the plan with this hash, and has approved it."""
        with self._turn():
            found = self._read(PLAN)
            if found is None or found["sha256"] != sha:
                raise InputError("The offered plan is not the one that was shown; start again.")
            self._write(PLAN, {**found, "approved": True, "asked": True})

    def bind(self, agreement: Words, fingerprint: str, own: Words) -> str:
        """Binds the client to an agreement about a table with this fingerprint, and to decisions of its `own`
        that hold for the whole run: how it chooses its model, and the noise that it adds if the plan is
        private. Returns the agreement's hash.

        Raises a refusal if the client has answered a round of another one.
        """
        sha = sha256(agreement)
        with self._turn():
            found = self._read(AGREEMENT) or {}
            if found.get("sha256") == sha and not found["over"]:
                return sha
            same_plan = found and sha256(found["agreement"]["plan"]) == sha256(agreement["plan"])
            ended = found.get("over") and found["session"] != self._session()
            if same_plan and self._answered(found) and not ended:
                raise Refusal(
                    f"it is bound by the agreement {found['sha256'][:12]}… and has answered a round of it; "
                    f"its owner can end that by removing {AGREEMENT} from the state folder"
                )
            words = {"sha256": sha, "fingerprint": fingerprint, "over": False, "session": self._session()}
            words |= {"id": secrets.token_hex(8), "secret": secrets.token_hex(8), "agreement": agreement}
            words |= own
            self._write(AGREEMENT, words)
        return sha

    def bound(self, sha: Any) -> Words:
        """The agreement with this hash that binds the client, with `fingerprint` and `secret`."""
        found = self._read(AGREEMENT)
        if found is None:
            raise Refusal(UNBOUND)
        if found["sha256"] != sha:
            raise Refusal(f"it is bound by the agreement {found['sha256'][:12]}…, but this is about another")
        return found

    def enter(self, sha: str, t: int, sent: Mapping[str, np.ndarray], *, train: bool) -> None:
        """Records, before anything leaves, that a round of the agreement with this hash is answered for what
        was sent.

        Raises a refusal if the round has passed, or if it was answered for something else.
        """
        digest, shared = (
            hashlib.sha256(b"".join(a.tobytes() for _, a in sorted(part))).hexdigest() if part else ""
            for part in (
                [item for item in sent.items() if not item[0].startswith(SHARED)],
                [item for item in sent.items() if item[0].startswith(SHARED)],
            )
        )
        with self._turn():
            agreement = self.bound(sha)
            found = self._answered(agreement) or {"round": -1, "w": "", "shared": ""}
            if t < found["round"]:
                raise Refusal(f"round {t + 1} has passed; it has answered round {found['round'] + 1}")
            known = found["shared"] if t == found["round"] else ""
            if t == found["round"] and (digest != found["w"] or (shared and known and shared != known)):
                raise Refusal(f"it has answered round {t + 1} for another w")
            if train and agreement["over"]:
                raise Refusal("its part in this run is over")
            if t > found["round"] or shared != known:
                words = {"id": agreement["id"], "round": t, "w": digest, "shared": shared or known}
                self._write(ROUNDS, words)

    def end(self) -> None:
        """Records that the run is over."""
        with self._turn():
            if found := self._read(AGREEMENT):
                self._write(AGREEMENT, {**found, "over": True})

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits until no other process uses these files, and makes others wait."""
        import fcntl  # not available on Windows

        with writing(self.state):
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.state / LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def _answered(self, agreement: Words) -> Words | None:
        """The last round of an agreement that was answered."""
        found = self._read(ROUNDS)
        return found if found and found["id"] == agreement.get("id") else None

    def _session(self) -> str:
        try:
            return (self.state / SESSION).read_text()
        except FileNotFoundError:  # a client run by Flower's own programs: one session for each run
            return self.run

    def _read(self, name: str) -> Words | None:
        try:
            return json.loads((self.state / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.state / name} cannot be read ({error}); move it elsewhere.") from None

    def _write(self, name: str, words: Words) -> None:
        with writing(self.state):
            atomic_write(self.state / name, json.dumps(words, indent=1, ensure_ascii=False) + "\n")
