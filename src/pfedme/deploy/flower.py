"""Flower's SuperLink and SuperNode as our commands start them: closed where Flower is open.

    python -m pfedme.deploy.flower superlink|supernode|superexec GATE FLOWER'S OPTIONS...

All changes to Flower's private parts are made here. They are valid for the versions of Flower in `HOLDS_FOR`;
with any other version, a program exits rather than run without them.

The SuperLink lets other machines do only what a client must do (Flower would let them submit programs),
admits clients once the file GATE exists, and logs which it turned away. The SuperNode only runs the program
that is part of the installed pfedme, whatever the server sends.

Flower starts a program for each message, which takes seconds. The SuperNode's SuperExec forks it from a
process that has already imported everything but used none of it: JAX and Polars start their pools later.
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
"""The versions of Flower whose private parts are as expected here: 1.41.0, 1.41.1, ..."""
FOREIGN = "The server sent a program that is not part of the pfedme on this machine"
SEEN_S = 1.0
"""Seconds in which the server notices that a client has gone, before it is admitted again."""
WRONG_SERVER = {"CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}
"""OpenSSL's errors if it is not the right server, or does not speak TLS; other failures are temporary."""
PULL_S = 1.0
"""Seconds after which a client asks again whether there is work; Flower would wait for three."""
MOST_BYTES = "PFEDME_MOST_BYTES"
"""The environment variable that limits the bytes a client accepts in a server's message."""


def put(module: ModuleType, **ours: Any) -> None:
    """Replaces the objects with these names in one of Flower's modules by ours; ends this process if Flower
    has no such names, because its behaviour would then be unknown."""
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
    """Admits a client with a key that is already connected: Flower would turn away a client that was killed
    and came back, until it noticed a minute later that the old one had gone."""

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
        """Flower's client, with a limit on what it accepts."""

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
        # Without it, a SuperNode would accept messages and never answer.
        threading.Thread(target=lambda: (child.wait(), os._exit(1)), daemon=True).start()
        return child

    retrying = functools.partial(telling, link.__dict__["make_simple_http_retry_invoker"])
    put(link, FleetHttpClient=Client, make_simple_http_retry_invoker=retrying)
    put(
        node, http_request_response=connected, _pull_and_store_message=pulled, _push_messages=pushed,
        subprocess=SimpleNamespace(Popen=start),
    )  # fmt: skip
    flower_supernode()
    os._exit(1)  # the connection has ended, but one of Flower's threads would keep running


def telling(make: Callable[[], Any]) -> Any:
    """The result of `make`, Flower's object for retries after network errors, which also reports how they
    go."""
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
    """The reason why a connection would keep failing, if the error is such a reason."""
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
    """Flower's SuperExec, which forks the client's program from a process that is ready for it."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    ready = multiprocessing.get_context("forkserver")
    ready.set_forkserver_preload(["flwr.supernode.cli", "pfedme.deploy.app"])
    try:
        forkserver.ensure_running()
    except OSError:  # for example, the temporary folder's path is too long for a socket; this is only slower
        flower_superexec()
        return

    def start(words: list[str]) -> object:
        multiprocessing.active_children()  # reaps those that have ended
        child = ready.Process(target=client_app, args=(words,), daemon=True)
        child.start()
        return child

    put(subprocess_executor, subprocess=SimpleNamespace(Popen=start))
    flower_superexec()


def client_app(words: list[str]) -> None:
    """Flower's program for one message, in a separate process."""
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
