"""Flower's SuperLink and SuperNode as our commands start them: closed where Flower is open.

    python -m pfedme.deploy.flower superlink GATE FLOWER'S OPTIONS...
    python -m pfedme.deploy.flower supernode CONFIG

All changes to Flower's private parts are made here. They are valid for the versions of Flower in `HOLDS_FOR`;
with any other version, a program exits rather than run without them.

The SuperLink lets other machines do only what a client must do (Flower would let them submit programs),
admits clients once the file GATE exists, and logs which it turned away.

Of the SuperNode, only the connection to the server is Flower's, which would start a program for each message,
and look for work ten times a second at a port of this machine. Here, messages go to a `Worker`, which only
runs what is part of the installed pfedme.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import ssl
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import httpx

from pfedme.deploy import BUNDLE, connections
from pfedme.deploy.door import Guard, Orders
from pfedme.deploy.events import Event, emit
from pfedme.deploy.exchanges import Exchanges
from pfedme.deploy.intake import WHICH, Intake, tell_if_replaced
from pfedme.deploy.log import say
from pfedme.deploy.processes import CLIENT, MOST_BYTES

HOLDS_FOR = "1.41"
"""The versions of Flower whose private parts are as expected here: 1.41.0, 1.41.1, ..."""
SEEN_S = 1.0
"""Seconds in which the server notices that a client has gone, before it is admitted again."""
WRONG_SERVER = {"CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}
"""OpenSSL's errors if it is not the right server, or does not speak TLS; other failures are temporary."""


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


def supernode(config: Path) -> None:
    """A client's connection to its server, in place of Flower's SuperNode: Flower's own connection, without a
    port on this machine and without programs that the server sends."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode import fleet_http_connection as link
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from pfedme.deploy.node import attend
    from pfedme.deploy.worker import LINE, Elsewhere, Worker

    own = json.loads(config.read_text())
    intake, this = Intake(int(os.environ.get(MOST_BYTES) or 2**30)), uuid.uuid4().hex

    class Client(FleetHttpClient):
        """Flower's client, with a limit on what it accepts."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._client.follow_redirects = False
            self._client.headers.update({"accept-encoding": "identity", WHICH: this})
            self._client.event_hooks = {"response": [intake.meter, tell_if_replaced]}

    retrying = functools.partial(telling, link.__dict__["make_simple_http_retry_invoker"])
    put(link, FleetHttpClient=Client, make_simple_http_retry_invoker=retrying)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    work, pair = config.with_name(CLIENT), None
    elsewhere = json.loads(work.read_text()).get(LINE)
    worker = Elsewhere(elsewhere) if elsewhere else Worker(work)
    if own["key"]:
        key: Any = load_ssh_private_key(Path(own["key"]).read_bytes(), None)
        pair = key, key.public_key()
    try:
        worker.start()
        with link.http_request_response(own["server"], own["ca"] is None, own["ca"], pair) as connection:
            emit(Event("connected"))
            attend(connection[1:], intake, worker, program())
    finally:
        worker.stop()
        os._exit(1)  # one of Flower's threads would keep running


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


def program() -> bytes:
    """The Flower app as it is sent."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(BUNDLE)


if __name__ == "__main__":
    programs = {"superlink": superlink, "supernode": supernode}
    which, path = programs[sys.argv[1]], Path(sys.argv[2])
    sys.argv = [f"flower-{sys.argv[1]}", *sys.argv[3:]]
    which(path)
