"""The door between a server and its clients: who comes in, with how much, and for how long.

At the server's side a request is refused by its head: without the signature of a key that the server has, or
with a length beyond what the model needs, its body is not read. A connection that does not get on is closed.
What a client sends must be the answer to what it was asked, in its own name. At the client's side nothing is
taken from a server that is longer than the client's owner allows.
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
import math
import socket
import ssl
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pfedme.files import atomic_write

MARK = "pfedme: "
"""What a line in the log begins with that is meant for people."""
AGAIN_S = 60.0
"""Seconds before the same is said again."""
KIB, MIB = 2**10, 2**20
SMALL = 64 * KIB
"""The longest body, in bytes, of a request that carries no model."""
FIRST_LIMIT = 4 * MIB
"""Bytes that a message may have before the server's app has said how many it needs."""
AT_ONCE = 8
"""Requests that a client may have under way; Flower's needs four."""
KEPT = 3
"""Messages of a client that are remembered, and whose answers are kept: the last, and some that were late."""
TRIES = 8
"""How often a client may fetch the same, or announce the same answer: a connection may fail meanwhile."""
HEAD_S, BODY_S, SILENT_S, FLOOR = 10.0, 20.0, 10.0, 16 * KIB
"""Seconds for a handshake and for the head of a request; for a body at first, to which those are added that
it takes at so many bytes a second; and without a byte of it."""
DRAIN_S, DRAIN = 2.0, 16 * MIB
"""Seconds in which, and bytes that, are read of a body that is refused, so that the answer is heard."""
PER_KEY, BESIDES = 8, 64
"""Connections that an address may have open: for each key that the server has, and besides."""
WITHOUT_KEYS = 64
"""As many clients as are expected where they have no keys."""
SPARE_FILES = 256
"""Open files that are not for connections."""
CLIENTS_PATHS = ("/v1/fleet/", "/health")
"""What other machines may ask for."""
ACTIVATE, REGISTER = "/v1/fleet/activate-node", "/v1/fleet/register-node"
REFUSALS = {ACTIVATE: "its key is not one of those that the server has", REGISTER: "it has no key"}
"""What it means that a request is refused."""
UNSIGNED = "its signature is not good at this time; see that the clocks of both machines agree"
"""What it means if the status is 401."""
WHICH = "pfedme-client"
"""The header by which processes with one key are told apart."""
REPLACED = 409
"""The status of an answer to a process whose key another has come with since."""
TURNED_OUT = "Another client has come with the same key, and this one was turned out"
OTHER_RESPONSES = 16 * MIB
"""Bytes that a client takes of a response that carries no model."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_said: dict[str, float] = {}


def say(line: str, about: str = "") -> None:
    """Puts a line into the log, unless there was one a moment ago that said the same, or was `about` it."""
    now = time.monotonic()
    if now - _said.get(about or line, -math.inf) >= AGAIN_S:
        for old in [key for key, when in _said.items() if now - when >= AGAIN_S]:
            del _said[old]
        _said[about or line] = now
        print(f"{MARK}{line}", flush=True)


def write_limit(path: Path, most_bytes: int) -> None:
    """Tells the SuperLink how many bytes a client's message may have."""
    atomic_write(path, str(most_bytes))


def most_objects(limit: int) -> int:
    """How many objects a message of so many bytes may consist of; Flower cuts arrays into pieces of 5 MiB."""
    return 256 + limit // MIB


def amount(count: int) -> str:
    """A number of bytes for people.

    >>> amount(65536), amount(4 * 2**20), amount(2**20 + 2**19)
    ('64 KiB', '4 MiB', '1.5 MiB')
    """
    return f"{count / MIB:.4g} MiB" if count >= MIB else f"{count / KIB:.4g} KiB"


def contended(times: Sequence[float], within: float = 60.0) -> bool:
    """Whether something happened three times within so many seconds, the last time included.

    >>> contended([0.0, 50.0]), contended([0.0, 50.0, 61.0]), contended([0.0, 1.0, 50.0, 60.0])
    (False, False, True)
    """
    return len(times) >= 3 and times[-1] - times[-3] <= within


class Orders:
    """What the server tells its SuperLink by files: a gate, and beside it names and a limit."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    @property
    def open(self) -> bool:
        """Whether clients are let in."""
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
        """The names of nodes, where clients have keys."""
        return self._names if self.open else {}


class Guard:
    """What decides which requests come to the SuperLink, before their bodies are read."""

    def __init__(self, app: App, orders: Orders, state: Callable[[], Any]) -> None:
        self.app, self.orders, self.state = app, orders, state
        self.busy, self.held = Counter[bytes](), Counter[bytes]()
        self.which: dict[bytes, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, peer = scope["path"], (scope.get("client") or ("",))[0]
        if not path.startswith(CLIENTS_PATHS) and not is_here(peer, (scope.get("server") or ("",))[0]):
            say(f"Refused {peer}: it asked for {path[:60]!r}, which is for this machine alone.", peer)
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
        """Whether a request is of the process that came last with its key."""
        if which and path == ACTIVATE:
            self.which[key] = which
        return which is None or self.which.get(key, which) == which


async def read(name: str, most: int, receive: Receive, send: Send) -> bytes | None:
    """The body of a request; None if there is none to go on with, and the answer is given."""
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
    """Refuses a body that is longer than it may be."""
    say(f"Refused {name}: it sends more than {amount(most)}.")
    dropped, more = 0, True
    try:
        async with asyncio.timeout(DRAIN_S):
            while more and dropped < DRAIN:
                message = await receive()
                dropped, more = dropped + len(message.get("body", b"")), message.get("more_body", False)
    except TimeoutError:
        pass
    await answer(send, 413)


def longest(path: str, limit: int) -> int:
    """How many bytes the body of a request may have."""
    if path == "/v1/fleet/push-object":
        return limit
    return SMALL + (256 * most_objects(limit) if path == "/v1/fleet/push-messages" else 0)


def public_key(headers: dict[str, str]) -> bytes | None:
    """The key that a request says is its sender's."""
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    try:
        return base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True) or None
    except (KeyError, ValueError, binascii.Error):
        return None


def is_signed(headers: dict[str, str], key: bytes) -> bool:
    """Whether the head of a request has a good signature of the time, which is all that Flower signs."""
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
    """The status and the body by which Flower itself turns an unknown key away, at this path."""
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
    """Gives a body again that was read before."""
    whole = [body]

    async def again() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": whole.pop()} if whole else await receive()

    return again


def watched(path: str, peer: str, send: Send) -> Send:
    """Says why Flower turns a client away, if it does."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        why = REFUSALS.get(path)
        if why and message["type"] == "http.response.start" and 400 <= message["status"] < 500:
            say(f"Refused a client at {peer}: {UNSIGNED if message['status'] == 401 else why}.")
        await send(message)

    return sent


def is_here(peer: str, server: str) -> bool:
    """Whether a connection comes from this machine: from a loopback, or from the address that it goes to.

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
    """Answers a request, and ends the connection, with whatever of the request is still to come."""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Part:
    """A message that a client was given, and what it answers."""

    run: int
    objects: set[str]
    """What it may fetch."""
    fetched: Counter[str] = field(default_factory=Counter)
    tree: bytes = b""
    """What it has announced."""
    root: str = ""
    announced: set[str] = field(default_factory=set)
    tries: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    """The bytes of each object that it has sent."""


class Ledger:
    """Who was asked what, so that a client can fetch, confirm and answer that and nothing else.

    Flower sees to it that a request is in the name of the node that its key belongs to; what is inside, it
    believes. These are its handlers, each with a question before it.
    """

    def __init__(self, orders: Orders) -> None:
        from flwr.common.constant import SUPERLINK_NODE_ID

        self.orders, self.server, self.lock = orders, SUPERLINK_NODE_ID, threading.RLock()
        self.parts: dict[int, OrderedDict[str, Part]] = {}
        self.replaced: dict[int, deque[float]] = {}

    def handlers(self, own: dict[str, Any]) -> dict[str, Callable[..., Any]]:
        """Flower's handlers, by name, as they are to be."""
        asked = {
            "pull_messages": self._given,
            "push_messages": self._announced,
            "push_object": self._sent,
            "pull_object": self._fetched,
            "confirm_message_received": self._confirmed,
        }
        return {name: functools.partial(ask, own[name]) for name, ask in asked.items()}

    def replace(self, node: int) -> None:
        """Notes that a client came while it was there, as it seems."""
        times = self.replaced.setdefault(node, deque(maxlen=3))
        times.append(time.monotonic())
        if contended(tuple(times)):
            say(
                f"The key of {self._name(node)} is in use by two clients at once (or one that starts again "
                "and again); each turns the other out."
            )

    def _name(self, node: int) -> str:
        return self.orders.names.get(node, f"node {node}")

    def _refuse(self, node: int, why: str) -> NoReturn:
        from fastapi import HTTPException

        say(f"Refused {self._name(node)}: {why}.")
        raise HTTPException(403, why)

    def _given(self, pull: Callable[..., Any], **given: Any) -> Any:
        response = pull(**given)
        with self.lock:
            parts = self.parts.setdefault(given["request"].node.node_id, OrderedDict())
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                ids = {one.object_id for one in walk(tree)}
                parts[message.metadata.message_id] = Part(message.metadata.run_id, ids)
            while len(parts) > KEPT:
                _, old = parts.popitem(last=False)
                if old.root:
                    given["store"].delete(old.root)
        return response

    def _announced(self, push: Callable[..., Any], **given: Any) -> Any:
        request, store = given["request"], given["state"].object_store
        node = request.node.node_id
        with self.lock:
            if (len(request.messages_list), len(request.message_object_trees)) != (1, 1):
                self._refuse(node, "what it sends is not a message")
            about, tree = request.messages_list[0].metadata, request.message_object_trees[0]
            if about.src_node_id != node or about.dst_node_id != self.server:
                self._refuse(node, "it sends a message in another's name, or to another client")
            part = self.parts.get(node, {}).get(about.reply_to_message_id)
            if part is None or part.run != about.run_id:
                self._refuse(node, "it answers what it was not asked")
            ids = [one.object_id for one in walk(tree)]
            if len(ids) > most_objects(self.orders.limit):
                self._refuse(node, f"it announces more than {most_objects(self.orders.limit)} objects")
            if tree.object_id != about.message_id or not is_plain(tree) or not is_as_stored(tree, store):
                self._refuse(node, "what it announces contradicts itself")
            told = tree.SerializeToString(deterministic=True)
            if part.tree not in (b"", told) or part.tries >= TRIES:
                self._refuse(node, "it answers the same twice")
            part.tree, part.root, part.announced = told, tree.object_id, set(ids)
            part.tries += 1
            return push(**given)

    def _sent(self, push: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        node, limit = request.node.node_id, self.orders.limit
        with self.lock:
            part = self._part(node, request, lambda part: part.announced)
            part.stored[request.object_id] = len(request.object_content)
            if sum(part.stored.values()) > limit:
                del part.stored[request.object_id]
                self._refuse(node, f"it sends more than {amount(limit)}")
        return push(**given)

    def _fetched(self, pull: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        with self.lock:
            part = self._part(request.node.node_id, request, lambda part: part.objects)
            if part.fetched[request.object_id] >= TRIES:
                self._refuse(request.node.node_id, "it fetches the same again and again")
            response = pull(**given)
            part.fetched[request.object_id] += response.object_available
        return response

    def _confirmed(self, confirm: Callable[..., Any], **given: Any) -> Any:
        request = given["request"]
        node = request.node.node_id
        with self.lock:
            part = self.parts.get(node, {}).get(request.message_object_id)
            if part is None or part.run != request.run_id:
                self._refuse(node, "it confirms what it was not given")
        return confirm(**given)

    def _part(self, node: int, request: Any, objects: Callable[[Part], set[str]]) -> Part:
        own = self.parts.get(node, {}).values()
        found = (part for part in own if part.run == request.run_id and request.object_id in objects(part))
        if (part := next(found, None)) is None:
            self._refuse(node, "it asks for, or sends, what is not part of a message of its own")
        return part


def walk(tree: Any) -> Iterator[Any]:
    """All parts of a tree of objects."""
    yield tree
    for child in tree.children:
        yield from walk(child)


def is_plain(tree: Any) -> bool:
    """Whether an object that occurs more than once in a tree has the same parts each time.

    Flower keeps the parts of each once. With others the second time, a small tree stands for a huge one.
    """
    parts: dict[str, tuple[str, ...]] = {}
    return all(
        parts.setdefault(one.object_id, own) == own
        for one in walk(tree)
        for own in [tuple(child.object_id for child in one.children)]
    )


def is_as_stored(tree: Any, store: Any) -> bool:
    """Whether those objects of a tree that are in a store have the same parts there."""
    if tree.object_id in store:
        return store.get_object_tree(tree.object_id) == tree
    return all(is_as_stored(child, store) for child in tree.children)


class Handshake(ssl.SSLObject):
    """A TLS connection that says why it did not come about."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            say(f"Refused a connection: {why_no_handshake(error)}.")
            raise


def why_no_handshake(error: ssl.SSLError) -> str:
    """What went wrong, for people."""
    reason = error.reason or str(error)
    if "HTTP_REQUEST" in reason or "WRONG_VERSION" in reason or "PACKET_LENGTH" in reason:
        return "it came without TLS"
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return "the other side does not trust this server's certificate; it has another ca.crt or address"
    return f"TLS failed ({reason})"


class Crowd:
    """How many connections are open, from where, and whether there may be one more."""

    def __init__(self, orders: Orders, files: int) -> None:
        self.orders, self.files, self.open = orders, files, Counter[str]()

    def admit(self, peer: str) -> bool:
        """Counts a connection, if it may be."""
        each = PER_KEY * (len(self.orders.names) or WITHOUT_KEYS) + BESIDES
        if self.open[peer] >= each or self.open.total() >= min(2 * each, self.files):
            say(f"Refused a connection from {peer}: there are too many.")
            return False
        self.open[peer] += 1
        return True

    def leave(self, peer: str) -> None:
        """Counts one less."""
        self.open[peer] -= 1
        if not self.open[peer]:
            del self.open[peer]


class Connection(socket.socket):
    """A socket that tells when it is closed."""

    ended: Callable[[], None] | None = None

    def close(self) -> None:
        """Closes it."""
        ended, self.ended = self.ended, None
        super().close()
        if ended:
            ended()


class Listener(socket.socket):
    """A socket that connections come in by, as many as there may be."""

    crowd: Crowd

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; those that are too many are closed at once."""
        for _ in range(SPARE_FILES):
            raw, address = super().accept()
            if self.crowd.admit(address[0]):
                connection = Connection(fileno=raw.detach())
                connection.ended = functools.partial(self.crowd.leave, address[0])
                return connection, address
            raw.close()
        raise InterruptedError


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers do not wait long for a handshake, nor for the end of a connection."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """See asyncio."""
        if options.get("ssl"):
            options |= {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": DRAIN_S}
        return await super().create_server(*args, **options)


class Protocol(H11Protocol):
    """HTTP that does not wait for ever: for the head of a request, nor for an answer to be taken."""

    until = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio."""
        super().connection_made(transport)
        self.until = time.monotonic() + HEAD_S

    def on_response_complete(self) -> None:
        """See uvicorn."""
        left = self.transport.get_write_buffer_size()
        self.until = time.monotonic() + (BODY_S + left / FLOOR if left else HEAD_S)
        super().on_response_complete()

    def close_if_overdue(self) -> None:
        """Ends the connection if the other side does not get on."""
        if (self.cycle is None or self.cycle.response_complete) and time.monotonic() > self.until:
            self.transport.abort()


class Server(uvicorn.Server):
    """A web server that closes connections which do not get on."""

    async def on_tick(self, counter: int) -> bool:
        """What is done every tenth of a second."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Protocol):
                    connection.close_if_overdue()
        return await super().on_tick(counter)


def run(orders: Orders, *, app: Any, host: str, port: int, **options: Any) -> None:
    """Serves an app until the process is told to end: what `uvicorn.run` does, by these rules."""
    crowd = Crowd(orders, most_files() - SPARE_FILES)
    loop = f"{Loop.__module__}:{Loop.__name__}"
    server = Server(uvicorn.Config(app, host=host, port=port, http=Protocol, ws="none", loop=loop, **options))
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener(*where, crowd) for where in places(host, port)])
    if not server.started:
        sys.exit(3)


def most_files() -> int:
    """How many files this process may have open, after as many as it can use were asked for."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**14 if hard == resource.RLIM_INFINITY else min(2**14, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def places(host: str, port: int) -> list[tuple[int, Any]]:
    """The family and the address of each place to listen on."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def listener(family: int, address: Any, crowd: Crowd) -> Listener:
    """Listens there."""
    made = Listener(family, socket.SOCK_STREAM)
    made.crowd = crowd
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(address)
    return made


class TooMuch(Exception):
    """A server sent more than its client takes."""


class Intake:
    """What a client takes from a server: so many bytes a message, and so many objects."""

    def __init__(self, most: int) -> None:
        self.most, self.left, self.lock = most, 0, threading.Lock()

    def begin(self, tree: Any) -> bool:
        """Begins a message; whether it may be fetched."""
        self.left = self.most
        if sum(1 for _ in walk(tree)) <= most_objects(self.most) and is_plain(tree):
            return True
        say("The server sent a message of too many parts; nothing of it was used.")
        return False

    def meter(self, response: httpx.Response) -> None:
        """Sees to it that a response is cut off where it becomes too long."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TooMuch("a response that is compressed may have any length")
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)
        carrying = str(response.url.path).endswith("/pull-object")
        response.stream = Metered(stream, self.take if carrying else self._others())

    def take(self, count: int) -> None:
        """Takes so many bytes of the message."""
        with self.lock:
            self.left -= count
            if self.left < 0:
                self.refuse(self.most)

    def _others(self) -> Callable[[int], None]:
        sizes = Counter[str]()

        def take(count: int) -> None:
            sizes["so far"] += count
            if sizes["so far"] > OTHER_RESPONSES:
                self.refuse(OTHER_RESPONSES)

        return take

    def refuse(self, most: int) -> None:
        """Says that it is too much."""
        say(f"The server sent more than {amount(most)}; nothing of it was used.")
        raise TooMuch(f"more than {most} bytes")


def tell_if_replaced(response: httpx.Response) -> None:
    """Says, at a client, that the server takes another for it."""
    if response.status_code == REPLACED:
        say(f"{TURNED_OUT}.")


class Metered(httpx.SyncByteStream):
    """A body whose bytes are counted as they come in."""

    def __init__(self, stream: httpx.SyncByteStream, take: Callable[[int], None]) -> None:
        self.stream, self.take = stream, take

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.stream:
            self.take(len(chunk))
            yield chunk

    def close(self) -> None:
        """Closes it."""
        self.stream.close()
