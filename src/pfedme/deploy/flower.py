"""Flower's SuperLink and SuperNode as our commands start them: closed where Flower is open.

    python -m pfedme.deploy.flower superlink|supernode|superexec GATE FLOWER'S OPTIONS...

All that is Flower's own and not meant to be changed is changed here. It holds for the versions of Flower that
`HOLDS_FOR` names; with another one, a program ends rather than run without what it should have.

The SuperLink lets other machines do only what a client must do (Flower would let them submit programs), lets
clients in once the file GATE exists, and says whom it turned away. The SuperNode runs no program but the one
that is part of the pfedme that is installed beside it, whatever the server sends.

Flower starts a program for each message, which takes seconds. The SuperNode's SuperExec forks it off a
process that has imported everything already, and used none of it: JAX and Polars start their pools after it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import multiprocessing
import os
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import httpx

from pfedme.deploy import BUNDLE, connections
from pfedme.deploy.door import Guard, Orders
from pfedme.deploy.events import Event, emit
from pfedme.deploy.exchanges import Exchanges
from pfedme.deploy.intake import WHICH, Intake, TooMuch, tell_if_replaced
from pfedme.deploy.log import say

HOLDS_FOR = "1.41"
"""The versions of Flower whose inner parts are as expected here: 1.41.0, 1.41.1, ..."""
FOREIGN = "The server sent a program that is not part of the pfedme on this machine"
SEEN_S = 1.0
"""Seconds in which the server sees that a client has gone, before it is let in again."""
WRONG_SERVER = {"CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}
"""What OpenSSL says if it is not the server that it should be, or speaks no TLS; other failures pass."""
PULL_S = 1.0
"""Seconds after which a client asks again whether there is something to do; Flower would wait for three."""
MOST_BYTES = "PFEDME_MOST_BYTES"
"""The variable, in a client's environment, of how many bytes it takes of a server's message."""


def put(module: ModuleType, **ours: Any) -> None:
    """Puts ours in the place of what goes by these names in one of Flower's modules; ends this process if
    Flower has no such names, for what it would do then is not known."""
    if lacking := [name for name in ours if name not in module.__dict__]:
        say(f"This version of Flower has no {module.__name__}.{lacking[0]}; install a {HOLDS_FOR}.")
        raise SystemExit(1)
    module.__dict__.update(ours)


def superlink(gate: Path) -> None:
    """Flower's SuperLink, guarded."""
    from flwr.supercore import http_logging
    from flwr.superlink import main
    from flwr.superlink.servicer.fleet import fleet_handlers

    cli = importlib.import_module("flwr.superlink.cli.flower_superlink")
    ssl.SSLContext.sslobject_class = connections.Handshake
    http_logging.ROUTINE_ACCESS_PATHS |= {"/v1/control/list-runs"}
    create, orders = main.create_app, Orders(gate)
    exchanges = Exchanges(orders)

    def guarded(*args: Any) -> Any:
        app = create(*args)
        app.add_middleware(Guard, orders=orders, state=app.state.linkstate_factory.state)
        return app

    put(main, create_app=guarded)
    put(fleet_handlers, **exchanges.handlers(fleet_handlers.__dict__))
    put(fleet_handlers, activate_node=replacing(fleet_handlers.activate_node, exchanges.replace))
    put(cli, uvicorn=SimpleNamespace(run=functools.partial(connections.run, orders)))
    cli.flower_superlink()


def replacing(activate: Callable[..., Any], seen: Callable[[int], object] = id) -> Callable[..., Any]:
    """Lets a client in that has a key and was there already: Flower would turn away one that was killed and
    came back, until it missed the old one, a minute later."""

    def activated(request: Any, state: Any) -> Any:
        node = state.get_node_id_by_public_key(request.public_key)
        if node is not None and state.deactivate_node(node):
            seen(node)
            time.sleep(SEEN_S)
        return activate(request=request, state=state)

    return activated


def supernode(gate: Path) -> None:
    """Flower's SuperNode, which runs our app only."""
    from flwr.supernode import fleet_http_connection as link
    from flwr.supernode import start_client_internal as node
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.fleet_http_client import FleetHttpClient

    own, connect = program(), link.http_request_response
    intake = Intake(int(os.environ.get(MOST_BYTES) or 2**30))
    this, busy = uuid.uuid4().hex, False

    def work(begins: bool) -> None:
        nonlocal busy
        if begins != busy:
            busy = begins
            emit(Event("working" if begins else "idle"))

    class Client(FleetHttpClient):
        """Flower's, which takes what it is sent by measure."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._client.follow_redirects = False
            self._client.headers.update({"accept-encoding": "identity", WHICH: this})
            self._client.event_hooks = {"response": [intake.meter, tell_if_replaced]}

    @contextlib.contextmanager
    def connected(*args: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*args) as connection:
            id, receive, send, get_run, get_fab, *rest = connection
            emit(Event("connected"))

            def receive_some() -> Any:
                got = receive()
                if got is None or not intake.begin(got[1]):
                    return None
                work(True)
                return got

            def get_own_fab(fab_hash: str, run_id: int) -> Any:
                fab = get_fab(fab_hash, run_id)
                if hashlib.sha256(fab.content).digest() != hashlib.sha256(own).digest():
                    say(FOREIGN)
                    emit(Event("foreign program"))
                    raise SystemExit(1)
                return fab

            yield id, receive_some, send, get_run, get_own_fab, *rest

    pull, push = (node.__dict__[name] for name in ("_pull_and_store_message", "_push_messages"))

    def pulled(**given: Any) -> int:
        while True:
            with contextlib.suppress(TooMuch):
                if (run := pull(**given)) is not None:
                    return run
            work(False)
            time.sleep(PULL_S)

    def pushed(**given: Any) -> None:
        push(**given)
        work(False)

    def start(words: list[str]) -> object:
        child = subprocess.Popen([*command("superexec", gate), *words[1:]])
        # A SuperNode without it would take messages and never answer.
        threading.Thread(target=lambda: (child.wait(), os._exit(1)), daemon=True).start()
        return child

    retrying = functools.partial(telling, link.__dict__["make_simple_http_retry_invoker"])
    put(link, FleetHttpClient=Client, make_simple_http_retry_invoker=retrying)
    put(
        node, http_request_response=connected, _pull_and_store_message=pulled, _push_messages=pushed,
        subprocess=SimpleNamespace(Popen=start),
    )  # fmt: skip
    flower_supernode()
    os._exit(1)  # the connection has ended, and a thread of Flower's would go on


def telling(make: Callable[[], Any]) -> Any:
    """What `make` makes, Flower's way to try again what a network does not let through, which also tells how
    it fares."""
    invoker = make()
    success, backoff, giveup = invoker.on_success, invoker.on_backoff, invoker.on_giveup

    def succeeded(state: Any) -> None:
        if state.tries > 1:
            emit(Event("reachable"))
        success(state)

    def backed_off(state: Any) -> None:
        emit(Event("unreachable"))
        backoff(state)

    def gave_up(state: Any) -> None:
        if (reason := lasting(state.exception)) is not None:
            emit(Event(reason))
        giveup(state)

    invoker.on_success, invoker.on_backoff, invoker.on_giveup = succeeded, backed_off, gave_up
    return invoker


def lasting(error: BaseException) -> Literal["wrong server", "refused"] | None:
    """The reason for which a connection fails again and again, if it is one."""
    from flwr.supercore.error import FlowerError

    if isinstance(error, httpx.HTTPStatusError):
        return "refused" if FlowerError.from_json(error.response.text) else None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and cause.reason in WRONG_SERVER:
            return "wrong server"
        cause = cause.__cause__ or cause.__context__
    return None


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

    put(subprocess_executor, subprocess=SimpleNamespace(Popen=start))
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
