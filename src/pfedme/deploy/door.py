"""The server's door: which requests are let in, and how large they may be.

A request without the signature of a key that the server knows, or longer than the model requires, is refused
by its headers alone; its body is not read. (`connections` limits how many connections there are and how long
they may take; `exchanges` checks that a client does only what it was asked to.)
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import datetime
import functools
import ipaddress
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from pfedme.deploy.intake import REPLACED, WHICH
from pfedme.deploy.log import KIB, MIB, amount, say
from pfedme.deploy.trees import most_objects
from pfedme.files import atomic_write

SMALL = 64 * KIB
"""The most bytes of a request that carries no model."""
FIRST_LIMIT = 4 * MIB
"""The most bytes of a message before the server's app has said how many it needs."""
AT_ONCE = 8
"""Requests that a client may have under way at once; Flower's client needs four."""
BODY_S, SILENT_S, FLOOR = 20.0, 10.0, 16 * KIB
"""A body may take `BODY_S` seconds, plus the time that it takes at `FLOOR` bytes a second, and must not pause
for `SILENT_S` seconds."""
DRAIN_S, DRAIN = 2.0, 16 * MIB
"""The seconds and bytes for which a refused body is still read, so that its sender sees the response."""
CLIENTS_PATHS = ("/v1/fleet/", "/health")
"""What other machines may ask for."""
ACTIVATE, REGISTER = "/v1/fleet/activate-node", "/v1/fleet/register-node"
REFUSALS = {ACTIVATE: "the server does not know its key", REGISTER: "it has no key"}
"""Why a request for one of these paths is refused,"""
UNSIGNED = "its signature is not valid now; check that the clocks of both machines agree"
"""and why if the status is 401."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def write_limit(path: Path, most_bytes: int) -> None:
    """Tells the SuperLink how many bytes a client's message may have."""
    atomic_write(path, str(most_bytes))


class Orders:
    """What `pfedme server` tells its SuperLink through files: a gate, the clients' names, and a limit."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    @property
    def open(self) -> bool:
        """Whether clients are admitted yet."""
        return self.gate.exists()

    @property
    def limit(self) -> int:
        """How many bytes a client's message may have."""
        try:
            return int(self.gate.with_name("limit").read_text())
        except (OSError, ValueError):
            return FIRST_LIMIT

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        try:
            return {int(n): x for n, x in json.loads(self.gate.with_name("names.json").read_text()).items()}
        except OSError:
            return {}

    @property
    def names(self) -> dict[int, str]:
        """The names of nodes, if clients have keys."""
        return self._names if self.open else {}


class Guard:
    """ASGI middleware that decides which requests reach the SuperLink before their bodies are read."""

    def __init__(self, app: App, orders: Orders, state: Callable[[], Any]) -> None:
        self.app, self.orders, self.state = app, orders, state
        self.busy, self.held = Counter[bytes](), Counter[bytes]()
        self.which: dict[bytes, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, peer = scope["path"], (scope.get("client") or ("",))[0]
        if not path.startswith(CLIENTS_PATHS) and not is_here(peer, (scope.get("server") or ("",))[0]):
            say(f"Refused {peer}: {path[:60]!r} is only for this machine.", peer)
            await answer(send, 404)
        elif not path.startswith("/v1/fleet/"):
            await self.app(scope, receive, send)
        elif not self.orders.open:
            await answer(send, 503)
        else:
            await self._fleet(path, peer, scope, receive, send)

    async def _fleet(self, path: str, peer: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        key = public_key(headers)
        node = self.state().get_node_id_by_public_key(key) if key else None
        if node is None and (path != REGISTER or self.orders.names):
            why = REFUSALS.get(path, REFUSALS[ACTIVATE]) if key else UNSIGNED
            say(f"Refused a client at {peer}: {why}.")
            await answer(send, *turned_away(path if key else ""))
            return
        if not (key and is_signed(headers, key)):
            say(f"Refused a client at {peer}: {UNSIGNED}.")
            await answer(send, 401)
            return
        name = self.orders.names.get(node or 0) or f"a client at {peer}"
        if not self._is_latest(path, key, headers.get(WHICH)):
            await answer(send, REPLACED)
            return
        limit = self.orders.limit
        most = longest(path, limit)
        length = most if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        if length > most:
            await too_long(name, most, receive, send)
        elif self.busy[key] >= AT_ONCE or self.held[key] + length > 2 * limit + AT_ONCE * SMALL:
            say(f"Refused {name}: it sends too much at once.")
            await answer(send, 429)
        else:
            self.busy[key] += 1
            self.held[key] += length
            try:
                if (body := await read(name, most, receive, send)) is not None:
                    await self.app(scope, replayed(body, receive), watched(path, peer, send))
            finally:
                self.busy[key] -= 1
                self.held[key] -= length
                if not self.busy[key]:
                    del self.busy[key], self.held[key]

    def _is_latest(self, path: str, key: bytes, which: str | None) -> bool:
        """Whether a request comes from the latest process to connect with its key."""
        if which and path == ACTIVATE:
            self.which[key] = which
        return which is None or self.which.get(key, which) == which


async def read(name: str, most: int, receive: Receive, send: Send) -> bytes | None:
    """The body of a request; None if it did not arrive properly and the request has been dealt with."""
    began, body, more = time.monotonic(), bytearray(), True
    while more:
        patience = min(SILENT_S, began + BODY_S + len(body) / FLOOR - time.monotonic())
        try:
            async with asyncio.timeout(patience):
                message = await receive()
        except TimeoutError:
            await answer(send, 408)
            return None
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            body.clear()
            await too_long(name, most, receive, send)
            return None
    return bytes(body)


async def too_long(name: str, most: int, receive: Receive, send: Send) -> None:
    """Refuses a body that is too long."""
    say(f"Refused {name}: it sends more than {amount(most)}.")
    dropped, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while more and dropped < DRAIN:
                message = await receive()
                dropped, more = dropped + len(message.get("body", b"")), message.get("more_body", False)
    await answer(send, 413)


def longest(path: str, limit: int) -> int:
    """The most bytes that the body of a request for a path may have."""
    if path == "/v1/fleet/push-object":
        return limit
    return SMALL + (256 * most_objects(limit) if path == "/v1/fleet/push-messages" else 0)


def public_key(headers: dict[str, str]) -> bytes | None:
    """The key that a request claims to be signed with."""
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    try:
        return base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True) or None
    except (KeyError, ValueError, binascii.Error):
        return None


def is_signed(headers: dict[str, str], key: bytes) -> bool:
    """Whether the headers have a valid signature of the current time, which is all that Flower signs."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import (
        FLEET_HTTP_SIGNATURE_HEADER,
        MAX_TIMESTAMP_DIFF_SECONDS,
        MIN_TIMESTAMP_DIFF_SECONDS,
    )
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        stamp = headers[TIMESTAMP_HEADER]
        age = (now() - datetime.datetime.fromisoformat(stamp)).total_seconds()
        timely = MIN_TIMESTAMP_DIFF_SECONDS < age < MAX_TIMESTAMP_DIFF_SECONDS
        return timely and verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature)
    except (KeyError, ValueError, TypeError, UnicodeError, binascii.Error):
        return False


def turned_away(path: str) -> tuple[int, bytes]:
    """The status and the body with which Flower itself would turn away an unknown key at this path."""
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.error.catalog import API_ERROR_MAP

    codes = {
        ACTIVATE: ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED,
        REGISTER: ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED,
    }
    if path not in codes:
        return 401, b""
    told = API_ERROR_MAP[codes[path]]
    body = FlowerError(codes[path], "").to_json(told.public_message)
    return told.http_status_code, json.dumps(body).encode()


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that yields a body that was already read."""
    whole = [body]

    async def again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": whole.pop()} if whole else await receive()

    return again


def watched(path: str, peer: str, send: Send) -> Send:
    """A `send` that logs why Flower turns a client away, if it does."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        why = REFUSALS.get(path)
        if why and message["type"] == "http.response.start" and 400 <= message["status"] < 500:
            say(f"Refused a client at {peer}: {UNSIGNED if message['status'] == 401 else why}.")
        await send(message)

    return sent


def is_here(peer: str, server: str) -> bool:
    """Whether a connection comes from this machine: from a loopback address, or from the one that it goes to.

    >>> is_here("127.0.0.1", "127.0.0.1"), is_here("10.0.0.7", "10.0.0.7"), is_here("10.0.0.8", "10.0.0.7")
    (True, True, False)
    """
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or peer == server


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Responds to a request and closes the connection, whatever of the request is still to come."""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
