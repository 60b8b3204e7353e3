"""What a client accepts from its server: no message larger than its owner allows, and no endless response."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx

from pfedme.deploy.events import TURNED_OUT, Event, emit
from pfedme.deploy.log import MIB, amount, say
from pfedme.deploy.trees import is_plain, most_objects, walk

WHICH = "pfedme-client"
"""The header that tells processes with the same key apart."""
REPLACED = 409
"""The status of a response to a process whose key another process has since connected with."""
OTHER_RESPONSES = 16 * MIB
"""The most bytes of a response that carries no model."""


class TooMuch(Exception):
    """A server sent more than its client accepts."""


class Allowance:
    """The number of bytes that may still arrive."""

    def __init__(self, most: int) -> None:
        self.most, self.left, self.lock = most, most, threading.Lock()

    def take(self, count: int) -> None:
        """Subtracts a number of bytes; raises `TooMuch` if that is more than was left."""
        with self.lock:
            self.left -= count
            if self.left < 0:
                say(f"The server sent more than {amount(self.most)}; nothing of it was used.")
                raise TooMuch(f"more than {self.most} bytes")


class Intake:
    """What a client accepts: a limited number of bytes, and of objects, for each message."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.message = Allowance(most)

    def begin(self, tree: Any) -> bool:
        """Begins a message; returns whether it may be fetched."""
        self.message = Allowance(self.most)
        if sum(1 for _ in walk(tree)) <= most_objects(self.most) and is_plain(tree):
            return True
        say("The server sent a message that has too many parts; nothing of it was used.")
        return False

    def meter(self, response: httpx.Response) -> None:
        """Ensures that a response is cut off when it becomes too long."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TooMuch("a compressed response could have any length")
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        is_object = str(response.url.path).endswith("/pull-object")
        response.stream = Metered(stream, self.message if is_object else Allowance(OTHER_RESPONSES))


def tell_if_replaced(response: httpx.Response) -> None:
    """Tells the client's owner if another process has taken this one's place."""
    if response.status_code == REPLACED:
        say(f"{TURNED_OUT}.")
        emit(Event("replaced"))


class Metered(httpx.SyncByteStream):
    """A body whose bytes are counted as they arrive."""

    def __init__(self, stream: httpx.SyncByteStream, allowance: Allowance) -> None:
        self.stream, self.allowance = stream, allowance

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.stream:
            self.allowance.take(len(chunk))
            yield chunk

    def close(self) -> None:
        """Closes the stream underneath."""
        self.stream.close()
