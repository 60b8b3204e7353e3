"""The server's connections: how many there may be, and how long each may take."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pfedme.deploy.door import BODY_S, DRAIN_S, FLOOR, Orders
from pfedme.deploy.log import say

HEAD_S = 10.0
"""Seconds for a handshake, and for the headers of a request."""
PER_KEY, BESIDES = 8, 64
"""Connections that one address may have open: a number for each key that the server knows, plus a
constant."""
WITHOUT_KEYS = 64
"""The number of clients that is assumed if they have no keys."""
SPARE_FILES = 256
"""Open files that are reserved for other purposes than connections."""


class Handshake(ssl.SSLObject):
    """A TLS connection that logs why its handshake failed."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            say(f"Refused a connection: {why_no_handshake(error)}.")
            raise


def why_no_handshake(error: ssl.SSLError) -> str:
    """Why a handshake failed, in words."""
    reason = error.reason or str(error)
    if "HTTP_REQUEST" in reason or "WRONG_VERSION" in reason or "PACKET_LENGTH" in reason:
        return "it came without TLS"
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return "the client does not trust this server's certificate; its ca.crt or address is different"
    return f"TLS failed ({reason})"


class Crowd:
    """The number of open connections, by address, and whether there may be one more."""

    def __init__(self, orders: Orders, files: int) -> None:
        self.orders, self.files, self.open = orders, files, Counter[str]()

    def admit(self, peer: str) -> bool:
        """Counts a new connection, unless there are too many; returns whether it may stay."""
        each = PER_KEY * (len(self.orders.names) or WITHOUT_KEYS) + BESIDES
        if self.open[peer] >= each or self.open.total() >= min(2 * each, self.files):
            say(f"Refused a connection from {peer}: too many are open.")
            return False
        self.open[peer] += 1
        return True

    def leave(self, peer: str) -> None:
        """Counts a connection that was closed."""
        self.open[peer] -= 1
        if not self.open[peer]:
            del self.open[peer]


class Connection(socket.socket):
    """A socket that calls `ended` when it is closed."""

    ended: Callable[[], None] | None = None

    def close(self) -> None:
        """Closes it."""
        ended, self.ended = self.ended, None
        super().close()
        if ended:
            ended()


class Listener(socket.socket):
    """A listening socket that accepts a limited number of connections."""

    crowd: Crowd

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; those in excess of the limit are closed at once."""
        for _ in range(SPARE_FILES):
            raw, address = super().accept()
            if self.crowd.admit(address[0]):
                connection = Connection(fileno=raw.detach())
                connection.ended = functools.partial(self.crowd.leave, address[0])
                return connection, address
            raw.close()
        raise InterruptedError


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose servers do not wait long for a TLS handshake, or for the end of a connection."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """See asyncio."""
        if options.get("ssl"):
            options |= {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": DRAIN_S}
        return await super().create_server(*args, **options)


class Protocol(H11Protocol):
    """HTTP that does not wait forever, neither for the headers of a request nor for a response to be read."""

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
        """Closes the connection if the other side takes too long."""
        if (self.cycle is None or self.cycle.response_complete) and time.monotonic() > self.until:
            self.transport.abort()


class Server(uvicorn.Server):
    """A web server that closes connections on which the other side takes too long."""

    async def on_tick(self, counter: int) -> bool:
        """Looks at all connections once a second; uvicorn calls this ten times as often."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Protocol):
                    connection.close_if_overdue()
        return await super().on_tick(counter)


def run(orders: Orders, *, app: Any, host: str, port: int, **options: Any) -> None:
    """Serves an app until the process is told to end: `uvicorn.run`, with these limits."""
    crowd = Crowd(orders, most_files() - SPARE_FILES)
    loop = f"{Loop.__module__}:{Loop.__name__}"
    server = Server(uvicorn.Config(app, host=host, port=port, http=Protocol, ws="none", loop=loop, **options))
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener(*where, crowd) for where in places(host, port)])
    if not server.started:
        sys.exit(3)


def most_files() -> int:
    """How many files this process may have open, after raising the limit as far as useful."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**14 if hard == resource.RLIM_INFINITY else min(2**14, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def places(host: str, port: int) -> list[tuple[int, Any]]:
    """The family and address of each socket to listen on."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def listener(family: int, address: Any, crowd: Crowd) -> Listener:
    """A socket bound to an address."""
    made = Listener(family, socket.SOCK_STREAM)
    made.crowd = crowd
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(address)
    return made
