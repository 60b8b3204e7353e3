"""Flower's SuperLink and SuperNode as our commands start them: closed where Flower is open.

    python -m pfedme.deploy.flower superlink|supernode|superexec GATE FLOWER'S OPTIONS...

The SuperLink lets other machines do only what a client must do (Flower would let them submit programs), lets
clients in once the file GATE exists, and says whom it turned away. The SuperNode runs no program but the one
that is part of the pfedme that is installed beside it, whatever the server sends.

Flower starts a program for each message, which takes seconds. The SuperNode's SuperExec forks it off a
process that has imported everything already, and used none of it: JAX and Polars start their pools after it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import multiprocessing
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BUNDLE = Path(__file__).with_name("bundle")
"""The Flower app."""
MARK = "pfedme: "
"""What a line in the log begins with that is meant for people."""
FOREIGN = "The server sent a program that is not part of the pfedme on this machine"
AGAIN_S = 60.0
"""Seconds before the same is said again."""
SEEN_S = 1.0
"""Seconds in which the server sees that a client has gone, before it is let in again."""
PULL_S = 1.0
"""Seconds after which a client asks again whether there is something to do; Flower would wait for three."""
CLIENTS_PATHS = ("/v1/fleet/", "/health")
"""What other machines may ask for."""
REFUSALS = {
    "/v1/fleet/activate-node": "its key is not one of those that the server has",
    "/v1/fleet/register-node": "it has no key",
}
"""What it means that a request is refused."""
UNSIGNED = "its signature is not good at this time; see that the clocks of both machines agree"
"""What it means if the status is 401."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_said: dict[str, float] = {}


def say(line: str, about: str = "") -> None:
    """Puts a line into the log, unless there was one a moment ago that said the same, or was `about` it."""
    now = time.monotonic()
    if now - _said.get(about or line, -AGAIN_S) >= AGAIN_S:
        _said[about or line] = now
        print(f"{MARK}{line}", flush=True)


class Guard:
    """What decides which requests come to the SuperLink."""

    def __init__(self, app: App, gate: Path) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, peer = scope["path"], (scope.get("client") or ("",))[0]
        if not path.startswith(CLIENTS_PATHS) and not is_here(peer, (scope.get("server") or ("",))[0]):
            say(f"Refused {peer}: it asked for {path[:60]!r}, which is for this machine alone.", peer)
            await answer(send, 404)
            return
        if path.startswith("/v1/fleet/") and not self.gate.exists():
            await answer(send, 503)
            return

        async def watched(message: MutableMapping[str, Any]) -> None:
            why = REFUSALS.get(path)
            if why and message["type"] == "http.response.start" and 400 <= message["status"] < 500:
                say(f"Refused a client at {peer}: {UNSIGNED if message['status'] == 401 else why}.")
            await send(message)

        await self.app(scope, receive, watched)


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


async def answer(send: Send, status: int) -> None:
    """Answers a request with a status and nothing else."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


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


def superlink(gate: Path) -> None:
    """Flower's SuperLink, guarded."""
    from flwr.supercore import http_logging
    from flwr.superlink import main
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers

    ssl.SSLContext.sslobject_class = Handshake
    http_logging.ROUTINE_ACCESS_PATHS |= {"/v1/control/list-runs"}
    create = main.create_app

    def guarded(*args: Any) -> Any:
        app = create(*args)
        app.add_middleware(Guard, gate=gate)
        return app

    main.create_app = guarded
    fleet_handlers.__dict__["activate_node"] = replacing(fleet_handlers.activate_node)
    flower_superlink()


def replacing(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a client in that has a key and was there already: Flower would turn away one that was killed and
    came back, until it missed the old one, a minute later."""

    def activated(request: Any, state: Any) -> Any:
        node = state.get_node_id_by_public_key(request.public_key)
        if node is not None and state.deactivate_node(node):
            time.sleep(SEEN_S)
        return activate(request=request, state=state)

    return activated


def supernode(gate: Path) -> None:
    """Flower's SuperNode, which runs our app only."""
    from flwr.supernode import start_client_internal as node
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.fleet_http_connection import http_request_response as connect

    own = program()

    @contextmanager
    def connected(*args: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*args) as connection:
            id, receive, send, get_run, get_fab, *rest = connection

            def get_own_fab(fab_hash: str, run_id: int) -> Any:
                fab = get_fab(fab_hash, run_id)
                if hashlib.sha256(fab.content).digest() != hashlib.sha256(own).digest():
                    say(FOREIGN)
                    raise SystemExit(1)
                return fab

            yield id, receive, send, get_run, get_own_fab, *rest

    pull = node.__dict__["_pull_and_store_message"]

    def pulled(**given: Any) -> int:
        while (run := pull(**given)) is None:
            time.sleep(PULL_S)
        return run

    def start(words: list[str]) -> object:
        child = subprocess.Popen([*command("superexec", gate), *words[1:]])
        # A SuperNode without it would take messages and never answer.
        threading.Thread(target=lambda: (child.wait(), os._exit(1)), daemon=True).start()
        return child

    node.__dict__.update(
        http_request_response=connected,
        _pull_and_store_message=pulled,
        subprocess=SimpleNamespace(Popen=start),
    )
    flower_supernode()
    os._exit(1)  # the connection has ended, and a thread of Flower's would go on


def superexec(_: Path) -> None:
    """Flower's SuperExec, which forks the client's program off a process that is ready for it."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    ready = multiprocessing.get_context("forkserver")
    ready.set_forkserver_preload(["flwr.supernode.cli", "pfedme.deploy.app"])
    try:
        forkserver.ensure_running()
    except OSError:  # such as a temporary folder whose path is too long for a socket: slower, that is all
        flower_superexec()
        return

    def start(words: list[str]) -> object:
        multiprocessing.active_children()  # which lets those go that have ended
        child = ready.Process(target=client_app, args=(words,), daemon=True)
        child.start()
        return child

    subprocess_executor.__dict__["subprocess"] = SimpleNamespace(Popen=start)
    flower_superexec()


def client_app(words: list[str]) -> None:
    """Flower's program for one message, in a process of its own."""
    from flwr.supernode.cli import flwr_clientapp

    sys.argv = words
    flwr_clientapp()


def command(which: str, gate: Path) -> list[str]:
    """The command that starts one of these programs; Flower's options come after it."""
    return [sys.executable, "-m", "pfedme.deploy.flower", which, str(gate)]


def program() -> bytes:
    """The Flower app as it is sent."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(BUNDLE)


if __name__ == "__main__":
    programs = {"superlink": superlink, "supernode": supernode, "superexec": superexec}
    which, gate = programs[sys.argv[1]], Path(sys.argv[2])
    sys.argv = [f"flower-{sys.argv[1]}", *sys.argv[3:]]
    which(gate)
