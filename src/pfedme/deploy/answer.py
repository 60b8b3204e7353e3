"""A client's answer to a message, and the lines of its log: nothing leaves before its line is on the disk."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from pfedme.deploy.client import Client
from pfedme.deploy.log import MARK, one_line
from pfedme.deploy.messages import Content, Refusal, Words, digest
from pfedme.errors import InputError, RunError

FAILED = "its program failed; its own console says why"
UNLOGGED = "its log cannot be written; its own console says why"
"""What a server learns about a client that could not note what it would have sent."""


def say(line: str) -> None:
    """Prints a line for the owner of the client, on its console."""
    print(f"{MARK}{one_line(line)}", flush=True)


def explained(error: Exception) -> Content:
    """What a server learns about an error, after it was shown to the owner: an error may quote a row, and
    only a refusal does not."""
    if isinstance(error, Refusal):
        say(f"Refused what the server asked for: {error}.")
        return Content({"error": str(error)}, {})
    if not isinstance(error, InputError | RunError):
        print(traceback.format_exc(), flush=True)
    say(str(error))
    return Content({"error": FAILED}, {})


def answer(
    client: Client, kind: str, asked: Callable[[], Content], work: Callable[[Client, Content], Content]
) -> Content:
    """The reply to a message of some kind, which `work` makes from what is `asked`.

    The log has a line for the message before it is worked on, and one for the reply before it is returned. If
    a line cannot be written, or the log was changed, only that leaves.
    """
    name: Words = {"name": client.table.owner}
    try:
        message, error = _read(asked)
        received = client.log.append("received", kind=kind, **_about(message))
    except Exception as cannot:
        return _unlogged(name, cannot)
    content = explained(error) if error else None
    if content is None:
        try:
            content = work(client, message or Content({}, {}))
        except Exception as failure:
            content = explained(failure)
    reply = Content({**name, **content.words}, content.arrays)
    try:
        client.log.reply(received, reply)
    except Exception as cannot:
        return _unlogged(name, cannot)
    return reply


def _read(asked: Callable[[], Content]) -> tuple[Content | None, Exception | None]:
    try:
        return asked(), None
    except Exception as error:
        return None, error


def _about(message: Content | None) -> Words:
    """What a line says about a message that was received."""
    if message is None:
        return {"round": None, "bytes": None, "sha256": None}
    size, sha = digest(message)
    t: Any = message.words.get("round")
    return {"round": t + 1 if type(t) is int and 0 <= t < 2**31 else None, "bytes": size, "sha256": sha}


def _unlogged(name: Words, error: Exception) -> Content:
    """All that leaves a client whose log cannot be written or was changed."""
    told = explained(error)
    return Content({**name, **(told.words if isinstance(error, Refusal) else {"error": UNLOGGED})}, {})
