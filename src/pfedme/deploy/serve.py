"""What `pfedme server` does: a SuperLink, a run on it, and its output for people."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedme.deploy.config import ROUNDS, refuse_undeclared
from pfedme.deploy.control import ControlClient, Status
from pfedme.deploy.keys import server_keys
from pfedme.deploy.log import MARK
from pfedme.deploy.processes import (
    SupervisedProcess,
    await_health,
    flower,
    joined,
    lines_since,
    off_proxies,
    own_address,
    private_home,
    refuse_taken,
)
from pfedme.deploy.record import LEDGER, LOG, note
from pfedme.deploy.region import LEFT
from pfedme.errors import InputError, Interrupted, RunError
from pfedme.files import atomic_write, writing
from pfedme.livebar import Rounds
from pfedme.runs.folder import Folder

SETUP = "server.json"
"""The file in the run's folder with the settings that the server was started with."""
NOT_BEGUN = "not begun"
"""The status of a run that has been set up but has no record yet."""
FLOWER_LOG = "flower.log"
LOOK_S, ASK_S, GONE_S, SILENT_S = 0.2, 2.0, 5.0, 120.0
"""Seconds between two checks of the logs, between two requests to the SuperLink, until a run whose process
has ended must be reported as finished, and for which a SuperLink may leave requests unanswered."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that a server is started with."""

    config: dict[str, Any]
    """The run configuration of the Flower app."""
    host: str
    port: int
    keys: str | None
    """The folder of keys; None without TLS and keys."""

    def write(self, out: Path) -> None:
        """Writes it to the run's folder."""
        with writing(out):
            atomic_write(out / SETUP, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, out: Path) -> Setup:
        """The settings that the run in a folder was started with."""
        try:
            return cls(**json.loads((out / SETUP).read_text()))
        except FileNotFoundError:
            raise InputError(f"There is no run of 'pfedme server' in {out}: it has no {SETUP}.") from None
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{out / SETUP} cannot be read ({error}); start a new run.") from None


def refuse_out(out: Path, *, force: bool) -> None:
    """Raises an error if the folder contains something that would be lost."""
    if (out / SETUP).exists() and not force:
        status = status_of(out)
        verb = "starts" if status == NOT_BEGUN else "continues"
        goes_on = "" if status == "finished" else f"'pfedme server --resume {out}' {verb} it, "
        what = f"a run that has {status}" if status == NOT_BEGUN else f"a {status} run"
        raise InputError(f"{out} holds {what}; {goes_on}--force starts over.")
    Folder(out).check_writable(force=force)


def status_of(out: Path) -> str:
    """The status of the run in a folder that has a setup."""
    folder = Folder(out)
    return folder.status() if folder.record.exists() else NOT_BEGUN


def claim(out: Path) -> None:
    """Creates the folder, or clears what an earlier run left in it."""
    Folder(out).claim()
    with writing(out):
        for name in (LEDGER, LOG, FLOWER_LOG, SETUP, *LEFT):
            (out / name).unlink(missing_ok=True)


def check(setup: Setup) -> str | None:
    """Raises an error if the server cannot start; returns a warning if there is one."""
    refuse_undeclared(setup.config)
    refuse_taken(setup.host, setup.port)
    if setup.keys is None:
        return None
    keys = server_keys(Path(setup.keys))
    if own_address(setup.host) not in keys.hosts:
        raise InputError(
            f"The certificate {keys.certificate} does not cover {own_address(setup.host)}; "
            f"'pfedme keys --server {own_address(setup.host)} -o {setup.keys}' adds it."
        )
    return keys.warning()


def serve(setup: Setup, out: Path, *, resume: bool) -> dict[str, Any]:
    """Carries out a run, in a folder that is claimed, and returns its record."""
    again = f"'pfedme server --resume {out}'"
    try:
        with private_home() as home, Rounds(setup.config.get(ROUNDS)) as screen:
            status = _serve(setup, out, home, screen, resume=resume)
    except KeyboardInterrupt:
        begun = status_of(out) != NOT_BEGUN
        goes_on = f"its progress is saved, and {again} continues where it stopped"
        raise Interrupted(out, goes_on if begun else f"the run has not begun; {again} starts it") from None
    if status_of(out) == NOT_BEGUN:
        why = status.details or f"its process ended; see {out / FLOWER_LOG}"
        raise RunError(f"The run did not begin: {why.rstrip('.')}. {again} starts it.")
    record = Folder(out).read()
    if record.get("status") == "finished":
        return record
    why = record.get("reason") or status.details or f"its process ended; see {out / FLOWER_LOG}"
    if record.get("status") == "failed":
        raise RunError(f"The run failed: {why}")
    raise RunError(
        f"The run stopped: {why.rstrip('.')}. Its progress is saved; {again} continues where it stopped."
    )


def _serve(setup: Setup, out: Path, home: Path, screen: Rounds, *, resume: bool) -> Status:
    keys = server_keys(Path(setup.keys)) if setup.keys is not None else None
    options = ["--host", setup.host, "--port", str(setup.port), "--disable-runtime-dependency-installation"]
    if keys:
        options += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
        options += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
    else:
        options += ["--insecure"]
    os.environ.update(off_proxies(own_address(setup.host)))
    gate, seen = home / "gate", lines_since(out / LOG, 0)[1]
    own = {"out": str(out.absolute()), "limit": str(home / "limit"), "resume": resume}
    config = {**setup.config, **own}
    ca = keys.ca if keys else None
    with SupervisedProcess([*flower("superlink", gate), *options], out / FLOWER_LOG, home) as process:
        await_health(process, setup.host, setup.port, ca)
        with ControlClient(joined(own_address(setup.host), setup.port), ca) as control:
            if keys:
                names = control.register(keys.clients)
                atomic_write(home / "names.json", json.dumps(names))
                config["names"] = str(home / "names.json")
            run = control.submit(config)
            gate.touch()
            how = "with TLS and keys" if keys else "in plain text"
            note(out, f"Listening on {joined(setup.host, setup.port)} {how}.")
            return _watch(process, control, run, out, seen, screen)


def _watch(
    process: SupervisedProcess, control: ControlClient, run: int, out: Path, seen: int, screen: Rounds
) -> Status:
    """Shows what happens until the run is over."""
    asked = here = heard = time.monotonic()
    started, rounds = False, dict[str, int]()
    while True:
        for line in process.news():
            if line.startswith(MARK):
                note(out, line.removeprefix(MARK))
        status, now = Status(False, False, ""), time.monotonic()
        if now - asked >= ASK_S and process.status is None:
            asked = now
            try:
                status, heard = control.status(run), now
            except RunError:
                if now - heard > SILENT_S:
                    raise
            running = process.runs("flwr-serverapp")
            started |= running
            here = here if started and not running else now
        lines, seen = lines_since(out / LOG, seen)
        # An event is written before its line, so it is known by now.
        rounds |= {event.line: event.number for event in process.events() if event.name == "round done"}
        for line in lines:
            screen(without_date(line), rounds.pop(line, None))
        if status.over:
            if not status.well:
                with writing(out), process.log.open("a", encoding="utf-8") as log:
                    log.write(control.words(run))
            return status
        if started and now - here > GONE_S:
            return Status(True, False, f"its process was killed; see {out / FLOWER_LOG}")
        if process.status is not None:
            return Status(True, False, f"Flower's SuperLink ended; see {out / FLOWER_LOG}")
        time.sleep(LOOK_S)


def without_date(line: str) -> str:
    """A line of a run's log as people see it on the screen.

    >>> without_date("2024-05-01 12:34:56.789 Finished.")
    '12:34:56 Finished.'
    """
    return re.sub(r"^\d{4}-\d\d-\d\d (\S{8})\S* ", r"\1 ", line)


def summary(record: Mapping[str, Any], out: Path) -> list[str]:
    """The summary of a finished run without scores."""
    told = record.get("deployment", {})
    refused = told.get("refused") or {}
    clients = len(told.get("clients", []))
    lines = [
        f"The run is finished: {record['config']['rounds']} rounds with {clients} clients.",
        "No client shared its scores; each client keeps those of its own models.",
        f"Results: {out}/ (model.safetensors, {LEDGER}, {LOG}, record.json)",
    ]
    return lines + [f"Refused {name}: {why}" for name, why in refused.items()]
