"""Starting, watching and stopping Flower's processes, so that neither they nor their files are left
behind."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from pfedme.deploy.events import VARIABLE, Event, events_file, read_event
from pfedme.deploy.keeper import LOCK, descendants, held, remove
from pfedme.errors import InputError, RunError
from pfedme.files import cache_folder, writing

KEEPER = Path(__file__).with_name("keeper.py")
PREFIX = "pfedme-"
"""The prefix of the names of home folders."""
CLIENT = "client.json"
"""The file beside a SuperNode's from which its worker makes the client."""
MOST_BYTES = "PFEDME_MOST_BYTES"
"""The environment variable that limits the bytes a client accepts in a server's message."""
START_S = 180.0
"""Seconds that a SuperLink may take to start."""
STOP_S = 15.0
"""Seconds after which a keeper that does not end is ended by force."""


def flower(which: str, path: Path) -> list[str]:
    """The command that starts one of the programs in `pfedme.deploy.flower`."""
    return [sys.executable, "-m", "pfedme.deploy.flower", which, str(path)]


class SupervisedProcess:
    """A command under a keeper, which ends it and all its children however this process ends."""

    def __init__(self, command: Sequence[str], log: Path, home: Path) -> None:
        with writing(log):
            log.touch(mode=0o600)
        self.log, self.end = log, log.stat().st_size
        self.told = events_file(home)
        self.told_end = self.told.stat().st_size if self.told.exists() else 0
        words = [sys.executable, "-I", "-S", str(KEEPER), str(log), str(home), *command]
        # A separate session, so that only this process receives Ctrl-C and decides the order of ending.
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=environment(home),
        )  # fmt: skip

    @property
    def status(self) -> int | None:
        """The exit status of the command; None while it runs."""
        return self.process.poll()

    def news(self) -> list[str]:
        """The complete lines that were added to the log since the last call."""
        lines, self.end = lines_since(self.log, self.end)
        return lines

    def events(self) -> list[Event]:
        """The events of the command since the last call."""
        lines, self.told_end = lines_since(self.told, self.told_end)
        return [read_event(line) for line in lines]

    def runs(self, program: str) -> bool:
        """Whether the command, or a process that it has started, runs a program of this name."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(Path(os.fsdecode(word)).name == program for word in words[:2]):
                    return True
        return False

    def stop(self) -> None:
        """Ends the command and everything that it has started."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> SupervisedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def lines_since(path: Path, place: int) -> tuple[list[str], int]:
    """The complete lines of a file after a position, without colours, and the position after them."""
    try:
        with path.open("rb") as file:
            file.seek(place)
            content = file.read()
    except FileNotFoundError:
        return [], place
    whole = content[: content.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), place + len(whole)


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs: quiet, with a private home, and with each other on the path."""
    beside = str(Path(sys.executable).parent)
    given = dict(os.environ)
    if given.pop("PYTHONDONTWRITEBYTECODE", None):
        # Without bytecode, each of Flower's many processes would spend seconds on compiling its sources.
        given["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return {
        **given,
        **off_proxies(),
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        VARIABLE: str(events_file(home)),
        "TMPDIR": str(home),
        "FORWARDED_ALLOW_IPS": "127.0.0.1",  # nobody else may say where a request comes from
        "PYTHONSAFEPATH": "1",  # no module is imported from the folder in which a command is started
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }


def off_proxies(*hosts: str) -> dict[str, str]:
    """Variables that make this machine, also under the names `hosts`, reachable without a proxy."""
    own = ["127.0.0.1", "localhost", "::1", *hosts]
    return {name: ",".join(filter(None, [os.environ.get(name), *own])) for name in ("NO_PROXY", "no_proxy")}


@contextlib.contextmanager
def private_home() -> Iterator[Path]:
    """A folder for Flower's files, removed at the end.

    If this process is killed, its keeper removes the folder; if both are, the next call on this machine does.
    """
    remove_leftovers()
    with contextlib.ExitStack() as stack:
        while True:
            home = Path(tempfile.mkdtemp(prefix=PREFIX))  # with mode 0700
            (home / LOCK).touch()
            stack.callback(remove, home)
            # Before it was locked, another process may have taken it for a leftover.
            if stack.enter_context(held(home)):
                break
        yield home


def remove_leftovers() -> None:
    """Removes this user's home folders that no process holds any more."""
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    remove(Path(entry.path))


def parse_address(text: str, option: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`.

    >>> parse_address("example.org:9092", "--server"), parse_address("[::1]:9092", "--server")
    (('example.org', 9092), ('::1', 9092))
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if "/" in text or not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"{option} must be HOST:PORT, such as example.org:9092, not '{text}'.")
    if ":" in host and not text.startswith("["):
        raise InputError(f"{option} '{text}' needs brackets around the address, as in [::1]:9092.")
    return host, int(port)


def joined(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """An unused port on the loopback interface."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def refuse_taken(host: str, port: int) -> None:
    """Raises an error if it is not possible to listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except OSError as error:
        raise InputError(
            f"Cannot listen on {joined(host, port)}: {error.strerror or error}; choose another --listen."
        ) from None


def own_address(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def await_health(process: SupervisedProcess, host: str, port: int, ca: Path | None) -> None:
    """Waits until a SuperLink answers."""
    context = ssl.create_default_context(cafile=str(ca)) if ca else None
    url = f"{'https' if ca else 'http'}://{joined(own_address(host), port)}/health"
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.status is None:
        try:
            with opener.open(url, timeout=5):
                return
        except ssl.SSLCertVerificationError as error:
            raise _wrong_name(host, error) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise _wrong_name(host, error.reason) from None
        except OSError:
            pass
        time.sleep(0.1)
    said = [line for line in process.news() if line.strip()]
    raise RunError(
        f"Flower's SuperLink did not start; the last lines of {process.log}: {' '.join(said[-3:])}"
    )


def _wrong_name(host: str, error: ssl.SSLCertVerificationError) -> InputError:
    return InputError(
        f"The server's certificate does not cover {own_address(host)} ({error.verify_message}); "
        f"'pfedme keys --server {own_address(host)}' adds it."
    )
