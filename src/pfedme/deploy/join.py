"""What `pfedme client` does: a SuperNode beside the data, and what its owner sees of it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from pfedme.data.table import OPTIONS, Table, joined
from pfedme.deploy.client import DONE, MODEL, REFUSED
from pfedme.deploy.flower import FOREIGN, MARK, command
from pfedme.deploy.keys import ClientKeys
from pfedme.deploy.processes import Kept, free_port, private_home
from pfedme.errors import InputError, RunError
from pfedme.files import alone, writing

CLIENT_LOG, LOCK = "client.log", "lock"
LOOK_S = 0.3
LINGER_S = 15.0
"""Seconds for the server to fetch the last reply: of a client that has left, Flower forgets what it sent."""
WRONG_SERVER = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL says if it is not the server that it should be, or speaks no TLS; other failures pass."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before a SuperNode that ended is started again: doubled each time that it did not connect."""


@dataclasses.dataclass(frozen=True)
class Joining:
    """A client that takes part in a federation elsewhere."""

    server: str
    """The address of the server."""
    table: Table
    state: Path
    keys: ClientKeys | None
    """None without TLS and keys."""
    share_metrics: bool

    def node_config(self) -> dict[str, Any]:
        """The configuration of the SuperNode, from which the Flower app makes the client."""
        table = self.table
        given = {
            name.replace("_", "-"): joined(value) if isinstance(value, tuple) else value
            for name in OPTIONS
            if name != "client" and (value := getattr(table, name)) not in (None, ())
        }
        if table.test:
            given["test"] = str(Path(table.test).absolute())
        return {
            **given,
            "name": table.owner,
            "data": str(Path(table.path).absolute()),
            "state-dir": str(self.state.absolute()),
            "share-metrics": self.share_metrics,
        }


@contextmanager
def at_work(state: Path) -> Iterator[None]:
    """Makes the state folder, its owner's and this process's alone, without an earlier server's last word."""
    with writing(state):
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o700)
    with alone(state / LOCK):
        with writing(state):
            for name in (REFUSED, DONE):
                (state / name).unlink(missing_ok=True)
        yield


def join(client: Joining, say: Callable[[str], None]) -> None:
    """Takes part until the server says that the run is over."""
    pause, last = FIRST_PAUSE_S, _round(client.state)
    with private_home() as home:
        (home / "node.toml").write_text(tomli_w.dumps(client.node_config()))
        while True:
            options = ["--superlink", client.server, "--port", str(free_port()), "--host", "127.0.0.1"]
            options += ["--node-config", str(home / "node.toml")]
            if client.keys:
                options += ["--root-certificates", str(client.keys.ca)]
                options += ["--auth-supernode-private-key", str(client.keys.key)]
            else:
                options += ["--insecure"]
            words = [*command("supernode", home / "gate"), *options]
            with Kept(words, client.state / CLIENT_LOG, home) as node:
                over, connected, last = _watch(client, node, last, say)
            if over:
                return
            pause = FIRST_PAUSE_S if connected else min(2 * pause, LONGEST_PAUSE_S)
            if connected:
                say("The connection to the server has ended; connecting again.")
            else:
                say(
                    "The server did not let this client in; trying again. If that goes on, see whether the "
                    f"clocks of both machines agree, and {client.state / CLIENT_LOG}."
                )
            time.sleep(pause)


def _watch(
    client: Joining, node: Kept, last: int | None, say: Callable[[str], None]
) -> tuple[bool, bool, int | None]:
    """Whether the run is over, once it is or the SuperNode has ended; whether it had connected; the last
    round that the client took part in."""
    connected = trying = busy = training = False
    finished: float | None = None
    talk = list[str]()
    while True:
        ended = node.status is not None
        for line in node.news():
            talk.append(line)
            if FOREIGN in line:
                raise RunError(
                    f"{FOREIGN}; nothing of it was run. Both sides must have the same version of pfedme."
                )
            if "SuperNode ID" in line:
                connected = True
                say(f"Connected to {client.server} as {client.table.owner}.")
            elif "Receiving: " in line:
                busy, training = True, "Receiving: train" in line
            elif any(words in line for words in ("Sent successfully", "Failed to send", "Ignoring")):
                busy = False
            elif "Connection attempt failed" in line and not trying:
                trying = True
                if finished is not None:
                    continue
                plainly = "" if client.keys else " in plain text"
                say(f"The server at {client.server} does not answer{plainly}; trying on.")
            elif "Connection successful" in line:
                if trying and connected:
                    say("The server is back.")
                trying = False
            elif line.startswith(MARK):
                say(line.removeprefix(MARK))
        # The last word is answered before the SuperNode is stopped, if there is still somebody to answer.
        told = ended or trying or not busy
        if told and (refused := client.state / REFUSED).exists():
            why = refused.read_text().strip()
            raise InputError(f"The server turned this client away: {why}")
        now = _round(client.state)
        if now is not None and now != last:
            last = now
            if training:
                say(f"Took part in round {now + 1}.")
        if told and (client.state / DONE).exists():
            finished = finished or time.monotonic()
            if ended or trying or time.monotonic() - finished > LINGER_S:
                return True, connected, last
        if ended:
            if not connected:
                _explain(client, talk)
            return False, connected, last
        time.sleep(LOOK_S)


def _explain(client: Joining, talk: list[str]) -> None:
    """Raises an error if a SuperNode ended for a reason that stays."""
    text = "\n".join(talk)
    if any(words in text for words in WRONG_SERVER):
        raise InputError(
            f"The server at {client.server} does not prove to be the one of "
            f"{client.keys.ca if client.keys else 'TLS'}: it has another certificate, another name, or no "
            "TLS. Ask whoever runs it for the right keys and address."
        )
    if "Failed to initialize the connection" in text and "[code: " in text:
        if client.keys is None:
            raise InputError(
                f"The server at {client.server} takes clients with a key only; ask for one, and give --keys."
            )
        raise InputError(
            f"The server at {client.server} does not know the key {client.keys.key}; whoever runs it must "
            "have its key.pub, and start the server again."
        )
    for number, why in (
        ("Exit Code: 606", "another version of Flower"),
        ("Exit Code: 600", "no such address"),
    ):
        if number in text:
            raise InputError(
                f"It is impossible to connect to {client.server}: {why}; see {client.state / CLIENT_LOG}."
            )


def _round(state: Path) -> int | None:
    """The round of the model that the client has."""
    try:
        return int(json.loads((state / MODEL / "model.json").read_text())["round"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def console(line: str) -> None:
    """A line with the time on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
