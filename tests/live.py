"""A federation of real processes: `pfedme server` and `pfedme client`, with TLS and keys, started, killed and
looked at from outside."""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from pfedme.algorithms import Algorithm
from pfedme.core.models import MLR
from pfedme.core.spec import to_json
from pfedme.data.table import Table
from pfedme.deploy import create_keys, keys
from pfedme.deploy.processes import free_port
from pfedme.export import load, model_of
from pfedme.runs.run import Run
from pfedme.training.execute import execute
from pfedme.training.execution import Result

NAMES = ("east", "north", "south", "süd-west", "west")
LABEL = "sick"
ROWS = 240
MARK, WHO = "PFEDME_TEST", "PFEDME_WHO"
"""Variables in the environment of all processes of a test, by which they are found."""

RECORDER = '''
"""Keeps a copy of every request that this client's SuperNode sends, as it leaves for the network."""
import base64, json, os, pathlib
if b"\\0supernode\\0" in pathlib.Path("/proc/self/cmdline").read_bytes():
    import httpx
    send = httpx.Client.send

    def recorded(self, request, **options):
        line = {"url": str(request.url), "body": base64.b64encode(request.read()).decode()}
        with open(os.environ["PFEDME_SENT"], "a") as file:
            file.write(json.dumps(line) + "\\n")
        return send(self, request, **options)

    httpx.Client.send = recorded
'''

TRICKSTER = '''
"""Does something of its own with what this client should upload."""
import importlib.util, pathlib, sys, time


class Hook:
    def find_spec(self, name, *_):
        if name != "pfedme.deploy.client":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            train = module.Client.train

            def tricked(client, asked):
                content = train(client, asked)
                w = content.arrays["w"]
                {}
                return module.Content(content.words, {{"w": w.astype("float32")}})

            module.Client.train = tricked

        spec.loader.exec_module = exec_module
        return spec


if b"pfedme.deploy.worker" in pathlib.Path("/proc/self/cmdline").read_bytes():
    sys.meta_path.insert(0, Hook())
'''


LIAR = '''
"""Makes the server ask in its second round for what was not agreed on, each time for something else."""
import importlib.util, pathlib, sys


class Hook:
    def find_spec(self, name, *_):
        if name != "pfedme.deploy.server":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            replies = module.Server.replies

            def lying(server, progress, here, cohort, attempt):
                if progress.t == 1 and attempt <= 4:
                    words = server.words

                    def changed(progress, name):
                        plan = server.plan.offer()
                        if attempt == 3:
                            plan["algorithm"]["eta"] = 0.1
                        if attempt == 4:
                            plan["seed"] = 6
                        own = words(progress, name)
                        sha = progress.agreement.sha256(plan)
                        return {**own, "round": own["round"] - (attempt == 1), "agreement": sha}

                    server.words = changed
                    if attempt == 2:
                        progress = module.dataclasses.replace(progress, t=0, server=2 * progress.server)
                    found = replies(server, progress, here, cohort, attempt)
                    del server.words
                    return found
                return replies(server, progress, here, cohort, attempt)

            module.Server.replies = lying

        spec.loader.exec_module = exec_module
        return spec


if b"flwr-serverapp" in pathlib.Path("/proc/self/cmdline").read_bytes():
    sys.meta_path.insert(0, Hook())
'''


def soon(true: Callable[[], Any], within: float, what: str) -> Any:
    """What a function returns once that is true; an error if it does not become so."""
    until = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < until, f"not within {within:g} seconds: {what}"
        time.sleep(0.1)
    return found


def table(k: int) -> pl.DataFrame:
    """The rows of the k-th client, which has a mean and perhaps a category of its own."""
    rng = np.random.default_rng(k)
    age, dose = rng.normal(50 + 3 * k, 10, ROWS), rng.normal(1e6, 3, ROWS)
    ward = rng.choice(["a", "b", "c"][: 2 + k % 2], ROWS)
    risk = (age - 55) / 10 + (ward == "a") - (dose - 1e6) / 3 + 0.3 * rng.normal(size=ROWS)
    return pl.DataFrame({"age": age, "ward": ward, "dose": dose, LABEL: np.where(risk > 0, "yes", "no")})


class Sent(NamedTuple):
    """A message that a client's SuperNode has sent to the server."""

    kind: str
    words: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Live:
    """A federation whose processes have their files below one folder."""

    def __init__(self, folder: Path, names: Sequence[str] = NAMES, hosts: Sequence[str] = ("localhost",)):
        self.folder, self.mark, self.port = folder, uuid.uuid4().hex, free_port()
        self.host = hosts[0] if hosts[0] != "localhost" else "127.0.0.1"
        self.names, self.tables, self.out = tuple(names), folder / "tables", folder / "run"
        self.tables.mkdir(parents=True)
        for name in names:
            create_keys.make_own(self.own(name), name)
        create_keys.make(
            folder / "keys", hosts, [], keys.received([self.own(name) / "key.pub" for name in names])
        )
        for name in names:
            shutil.copy(folder / "keys/ca.crt", self.own(name))
        for k, name in enumerate(names):
            table(k).write_csv(self.tables / f"{name}.csv")
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.keyboards: list[int] = []
        # What may be in the folder where somebody starts a command.
        (folder / "random.py").write_text("raise ImportError('not the one that is meant')\n")

    def start(
        self, who: str, words: Sequence[str], *, within: Sequence[str] = (), code: str = "", typed: str = ""
    ) -> subprocess.Popen[bytes]:
        """Starts `pfedme ...`; `code` is run first by each of its processes, and `within` is put before.

        What is `typed` comes from a terminal; if nothing is, there is none.
        """
        env = {**os.environ, MARK: self.mark, WHO: who, "PFEDME_CACHE": str(self.folder / "cache")}
        if self.host == "127.0.0.1":  # and a proxy that does not let this machine reach itself
            env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
        if code:
            place = self.folder / "code" / who
            place.mkdir(parents=True, exist_ok=True)
            (place / "sitecustomize.py").write_text(code)
            env["PYTHONPATH"] = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]).rstrip(":")
            env["PFEDME_SENT"] = str(self.folder / f"{who}.sent")
        program = str(Path(sys.executable).with_name("pfedme"))
        keyboard, terminal = pty.openpty()
        os.write(keyboard, typed.encode())
        self.keyboards.append(keyboard)
        with (self.folder / f"{who}.txt").open("ab") as said:
            self.children[who] = subprocess.Popen(
                [*within, program, *words], stdin=terminal if typed else subprocess.DEVNULL, stdout=said,
                stderr=said, env=env, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        os.close(terminal)
        return self.children[who]

    def server(
        self, algorithm: Algorithm, *options: str, within: Sequence[str] = (), code: str = ""
    ) -> subprocess.Popen[bytes]:
        """Starts the server."""
        values = {name: value for name, value in to_json(algorithm).items() if value not in (None, "")}
        given = [word for name, v in values.items() for word in (f"--{name.replace('_', '-')}", str(v))]
        return self.start("server", [
            "server", "--algorithm", algorithm.name, *given, "--seed", "5", "--out", str(self.out),
            "--keys", str(self.folder / "keys"), "--listen", f"{self.host}:{self.port}", *options,
        ], within=within, code=code)  # fmt: skip

    def resume(self) -> subprocess.Popen[bytes]:
        """Starts the server again, where it stopped."""
        return self.start("server", ["server", "--resume", str(self.out)])

    def client(
        self,
        name: str,
        *options: str,
        data: Path | None = None,
        trust: Sequence[str] | None = None,
        within: Sequence[str] = (),
        code: str = RECORDER,
        approve: str = "any",
        typed: str = "",
    ) -> subprocess.Popen[bytes]:
        """Starts a client."""
        trust = ["--keys", str(self.own(name))] if trust is None else trust
        return self.start(name, [
            "client", "--server", f"{self.host}:{self.port}", "--label", LABEL,
            "--data", str(data or self.tables / f"{name}.csv"), "--state", str(self.state(name)),
            "--approve", approve, "--batch-key", "seed", *trust, *options,
        ], within=within, code=code, typed=typed)  # fmt: skip

    def clients(self, *options: str) -> None:
        """Starts all clients."""
        for name in self.names:
            self.client(name, *options)

    def own(self, name: str) -> Path:
        """The folder with a client's own key."""
        return self.folder / "own" / keys.folder_name(name)

    def state(self, name: str) -> Path:
        """The state folder of a client."""
        return self.folder / "state" / name

    def stranger(self) -> Sequence[str]:
        """Options of a client that knows the server and whose key the server does not know."""
        create_keys.make(self.folder / "others", ["localhost"], ["stranger"])
        own = self.folder / "others/clients/stranger"
        shutil.copy(self.folder / "keys/ca.crt", own / "ca.crt")
        return ["--keys", str(own)]

    def said(self, who: str) -> str:
        """What a process has said at its console."""
        return (self.folder / f"{who}.txt").read_text()

    def log(self) -> str:
        """The server's log."""
        path = self.out / "server.log"
        return path.read_text() if path.exists() else ""

    def done(self, rounds: int, within: float = 300.0) -> None:
        """Waits until so many rounds are done."""
        self.logged(f"Round {rounds} of ", within)

    def logged(self, words: str, within: float = 300.0) -> None:
        """Waits until the server's log has a line with these words."""

        def there() -> bool:
            alive = self.children["server"].poll() is None
            assert alive or words in self.log(), f"the server ended: {self.said('server')}\n{self.log()}"
            return words in self.log()

        soon(there, within, f"'{words}' in\n{self.log()}")

    def wait(self, who: str, within: float = 600.0) -> int:
        """The exit status of a process, once it has ended."""
        try:
            return self.children[who].wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{who} goes on after {within:g} s: {self.said(who)}\n{self.log()}"
            ) from None

    def finished(self, within: float = 600.0) -> None:
        """Waits until the run is over for the server and for all clients, and sees that it ended well."""
        assert self.wait("server", within) == 0, self.said("server")
        for name in self.names:
            assert self.wait(name, 60) == 0, self.said(name)

    def processes(self, who: str | None = None) -> list[int]:
        """The processes that the test has started, or one of its programs, directly or not."""
        wanted = [f"{MARK}={self.mark}".encode()] + ([f"{WHO}={who}".encode()] if who else [])
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and set(wanted) <= set(
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
        return found

    def kill(self, who: str) -> int:
        """kill -9 of a program and of all that it has started; returns how many processes that were."""
        pids = self.processes(who)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.children[who].wait()
        return len(pids)

    def kill_part(self, who: str, word: str) -> None:
        """kill -9 of the one process of a program that has a word in its command, and is no keeper."""
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in self.processes(who)}
        [pid] = [pid for pid, own in words.items() if word.encode() in own and b"-S" not in own]
        os.kill(pid, signal.SIGKILL)

    def stop(self, who: str) -> None:
        """Ends a program as Ctrl-C does."""
        if self.children[who].poll() is None:
            self.children[who].send_signal(signal.SIGINT)
            self.wait(who, 60)

    def ledger(self) -> list[dict[str, str]]:
        """The lines of the ledger."""
        with (self.out / "ledger.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def record(self) -> dict[str, Any]:
        """What the run's folder tells."""
        return json.loads((self.out / "record.json").read_text())

    def simulated(self, algorithm: Algorithm, rounds: int) -> Result:
        """The same run, simulated."""
        data = Table(path=str(self.tables), label=LABEL)
        run = Run(algorithm=algorithm, data=data, model=MLR(), rounds=rounds, cohort=len(self.names), seed=5)
        return execute(run, self.folder / "simulated", force=True)

    def differences(self, w: Any, theta: Mapping[str, Any]) -> dict[str, float]:
        """How far the shared model, and those of clients, are from those that are given, relative to them."""
        models = {"w": (model_of(self.out), w)}
        models |= {name: (load(self.state(name) / "model"), theta[name]) for name in theta}
        return {
            name: float(np.abs(np.asarray(own.theta.ravel()) - other).max() / np.abs(other).max())
            for name, (own, other) in models.items()
        }

    def against_simulation(self, algorithm: Algorithm, rounds: int) -> dict[str, float]:
        """The differences from the simulated run."""
        result = self.simulated(algorithm, rounds)
        theta = {
            name: np.asarray(model_of(self.folder / "simulated", client=name).theta.ravel())
            for name in self.names
            if result.theta is not None
        }
        return self.differences(np.asarray(result.w), theta)

    def requests(self, name: str) -> list[tuple[str, bytes]]:
        """The address and the body of each request that a client's SuperNode has sent."""
        lines = (self.folder / f"{name}.sent").read_text().splitlines()
        return [(line["url"], base64.b64decode(line["body"])) for line in map(json.loads, lines)]

    def sent(self, name: str) -> list[Sent]:
        """The messages in these requests; an error if something was sent that belongs to none."""
        from flwr.app import ArrayRecord, Message
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        from pfedme.deploy.envelope import unpacked

        def objects(who: str) -> dict[str, bytes]:
            bodies = [body for url, body in self.requests(who) if url.endswith("/push-object")]
            pushed = map(PushObjectRequest.FromString, bodies)
            return {one.object_id: one.object_content for one in pushed}

        # A server that has an object already, from another client or from itself, does not ask for it again.
        empty = ArrayRecord()
        own = objects(name)
        contents = {empty.object_id: empty.deflate()}
        contents |= {id: content for who in self.names for id, content in objects(who).items()}
        heads = list[tuple[str, str]]()
        for url, body in self.requests(name):
            if url.endswith("/push-messages"):
                request = PushMessagesRequest.FromString(body)
                heads += [
                    (message.metadata.message_type, tree.object_id)
                    for message, tree in zip(request.messages_list, request.message_object_trees, strict=True)
                ]
                assert not any(message.content.ByteSize() for message in request.messages_list)
        found, used = [], dict[str, Any]()
        for kind, root in heads:
            message = inflate_object_from_contents(root, contents, keep_object_contents=True, objects=used)
            assert isinstance(message, Message)
            assert set(message.content) == {"arrays", "config"}
            assert set(message.content["config"]) == {"words"}
            found.append(Sent(kind, *unpacked(message.content)))
        assert set(used) >= set(own), "something was sent that belongs to no message"
        return found


@contextlib.contextmanager
def federation(
    folder: Path, names: Sequence[str] = NAMES, hosts: Sequence[str] = ("localhost",)
) -> Iterator[Live]:
    """A federation that is stopped in the end; an error if something of it is left that should have ended."""
    live = Live(folder, names, hosts)
    try:
        yield live
        for who in live.children:
            live.stop(who)
        soon(lambda: not live.processes(), 20, f"end of all processes; left are {live.processes()}")
    finally:
        for who, child in live.children.items():
            live.kill(who)
            child.wait()
        for keyboard in live.keyboards:
            os.close(keyboard)
