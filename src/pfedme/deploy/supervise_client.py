"""What `pfedme client` does: a SuperNode next to the data, and its output for the owner. A region has a
SuperNode too."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedme.data.table import OPTIONS, joined
from pfedme.deploy.client import DONE, REFUSED, Client
from pfedme.deploy.console import plan_lines
from pfedme.deploy.ending import choice_text
from pfedme.deploy.events import FOREIGN, TURNED_OUT
from pfedme.deploy.keys import ClientKeys
from pfedme.deploy.log import MARK
from pfedme.deploy.pins import Pins
from pfedme.deploy.processes import CLIENT, MOST_BYTES, SupervisedProcess, flower, private_home
from pfedme.errors import InputError, RunError
from pfedme.files import alone, writing

CLIENT_LOG, LOCK = "client.log", "lock"
LOOK_S = 0.3
LINGER_S = 15.0
"""Seconds for the server to fetch the last reply: once a client has left, Flower forgets what it sent."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before a SuperNode that ended is restarted: doubled each time that it did not connect."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection to a server elsewhere."""

    server: str
    """The address of the server."""
    name: str
    """The name under which the server knows this side."""
    state: Path
    """The folder for the log, and for the server's last word."""
    keys: ClientKeys | None
    """None without TLS and keys."""
    wait: float
    """Seconds to wait for a server that does not answer."""
    most_bytes: int
    """Limit on the bytes of a message of the server."""


def node_config(client: Client) -> dict[str, Any]:
    """What a worker makes a client from: the configuration that Flower's own SuperNode would have."""
    table, policy = client.table, client.policy
    given = {
        name.replace("_", "-"): joined(value) if isinstance(value, tuple) else value
        for name in OPTIONS
        if name != "client" and (value := getattr(table, name)) not in (None, ()) and value is not False
    }
    if table.test:
        given["test"] = str(Path(table.test).absolute())
    limits = {
        field.name.replace("_", "-"): joined(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(policy)
        if (value := getattr(policy, field.name)) not in (None, ())
    }
    return {
        **given,
        **limits,
        "name": table.owner,
        "data": str(Path(table.path).absolute()),
        "state-dir": str(client.state.absolute()),
        "share-metrics": client.share_metrics,
        **({"personalize": choice_text(client.personalize)} if client.personalize else {}),
    }


@contextmanager
def at_work(state: Path) -> Iterator[None]:
    """Prepares the state folder for this owner and process only, without an earlier server's last word."""
    with writing(state):
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o700)
    with alone(state / LOCK):
        with writing(state):
            for name in (REFUSED, DONE):
                (state / name).unlink(missing_ok=True)
        Pins(state).begin()
        yield


def supervise(
    link: Link,
    work: Mapping[str, Any],
    say: Callable[[str], None],
    approval: Callable[[], object] = lambda: None,
) -> None:
    """Takes part until the server says that the run is over.

    `work` is what the program that works on the server's messages is made from, and `approval` is called
    again and again.
    """
    pause, seen = FIRST_PAUSE_S, time.monotonic()
    os.environ[MOST_BYTES] = str(link.most_bytes)
    with private_home() as home:
        (home / CLIENT).write_text(json.dumps(work))
        trust = (str(link.keys.ca), str(link.keys.key)) if link.keys else (None, None)
        connection = dict(zip(("server", "ca", "key"), (link.server, *trust), strict=True))
        (home / "node.json").write_text(json.dumps(connection))
        while True:
            words = flower("supernode", home / "node.json")
            with SupervisedProcess(words, link.state / CLIENT_LOG, home) as node:
                over, connected, seen = _watch(link, node, seen, approval, say)
            if over:
                return
            pause = FIRST_PAUSE_S if connected else min(2 * pause, LONGEST_PAUSE_S)
            if connected:
                say("The connection to the server has ended; connecting again.")
            else:
                say(
                    "The server did not admit this client; trying again. If this continues, check that the "
                    f"clocks of both machines agree, and see {link.state / CLIENT_LOG}."
                )
            time.sleep(pause)


class Approval:
    """The owner's approval of the plan that a server offers, asked for once."""

    def __init__(self, state: Path) -> None:
        self.state, self.shown = state, False

    def __call__(self) -> None:
        """Shows the plan once there is one, and asks for approval unless the policy has given it."""
        pins = Pins(self.state)
        if self.shown or (found := pins.offered()) is None:
            return
        self.shown = True
        print("\n".join(plan_lines(found["plan"], found["sha256"])), file=sys.stderr, flush=True)
        if found["approved"]:
            return
        if not sys.stdin.isatty():
            raise InputError(
                "The plan must be approved, but there is no terminal to ask at; nothing of the table has "
                f"left this machine. To take part in this plan, add --approve {found['sha256']}"
            )
        question = "Take part, and let what is listed above leave this machine? [yes/no] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("The plan was not approved; nothing of the table has left this machine.")
        pins.approve(found["sha256"])


def _watch(
    link: Link,
    node: SupervisedProcess,
    seen: float,
    approval: Callable[[], object],
    say: Callable[[str], None],
) -> tuple[bool, bool, float]:
    """Returns when the run is over or the SuperNode has ended: whether the run is over, whether the SuperNode
    had connected, and the time of the last connection."""
    connected = trying = busy = False
    finished: float | None = None
    happened, talk = set[str](), list[str]()
    while True:
        ended = node.status is not None
        for event in node.events():
            happened.add(event.name)
            match event.name:
                case "foreign program":
                    raise RunError(
                        f"{FOREIGN}; it was not run. Both sides must have the same version of pfedme."
                    )
                case "replaced":
                    raise RunError(
                        f"{TURNED_OUT}. If that was not you, somebody else has the key: ask the operator of "
                        "the server for a new one."
                    )
                case "connected":
                    connected = True
                    say(f"Connected to {link.server} as {link.name}.")
                case "working" | "idle":
                    busy = event.name == "working"
                case "unreachable" if not trying:
                    trying = True
                    if finished is None:
                        plainly = "" if link.keys else " in plain text"
                        say(f"The server at {link.server} does not answer{plainly}; still trying.")
                case "reachable":
                    if trying and connected:
                        say("The server is back.")
                    trying = False
                case _:
                    pass
        for line in node.news():
            talk.append(line)
            if line.startswith(MARK):
                say(line.removeprefix(MARK))
        approval()
        # The server's last word is answered before the SuperNode is stopped, if the server is still there.
        told = ended or trying or not busy
        if told and (refused := link.state / REFUSED).exists():
            word = json.loads(refused.read_text())
            if word.get("own"):
                # The server may not have fetched the reason yet.
                finished = finished or time.monotonic()
                if ended or trying or time.monotonic() - finished > LINGER_S:
                    raise RunError(f"This client has left the run: {word['reason']}.")
                time.sleep(LOOK_S)
                continue
            if word["over"]:
                raise RunError(f"The run has failed: {word['reason']}")
            raise InputError(f"The server turned this client away: {word['reason']}")
        if told and (link.state / DONE).exists():
            finished = finished or time.monotonic()
            if ended or trying or time.monotonic() - finished > LINGER_S:
                return True, connected, seen
        if connected and not trying:
            seen = time.monotonic()
        if time.monotonic() - seen > link.wait:
            raise RunError(
                f"The server at {link.server} has not answered for {link.wait:g} seconds (--wait); run "
                "the same command to take part again."
            )
        if ended:
            if not connected:
                _explain(link, happened, talk)
            return False, connected, seen
        time.sleep(LOOK_S)


def _explain(link: Link, happened: set[str], talk: list[str]) -> None:
    """Raises an error if a SuperNode ended for a permanent reason."""
    if "wrong server" in happened:
        raise InputError(
            f"The server at {link.server} cannot be verified with "
            f"{link.keys.ca if link.keys else 'TLS'}: it has another certificate, another name, or no "
            "TLS. Ask its operator for the right keys and address."
        )
    if "refused" in happened:
        if link.keys is None:
            raise InputError(
                f"The server at {link.server} only accepts clients with a key; ask for one and give --keys."
            )
        raise InputError(
            f"The server at {link.server} does not know the key {link.keys.key}; its operator must add "
            "its key.pub and restart the server."
        )
    for number, why in (
        ("Exit Code: 606", "another version of Flower"),
        ("Exit Code: 600", "no such address"),
    ):
        if any(number in line for line in talk):
            raise InputError(f"Cannot connect to {link.server}: {why}; see {link.state / CLIENT_LOG}.")


def console(line: str) -> None:
    """A line with the time on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
