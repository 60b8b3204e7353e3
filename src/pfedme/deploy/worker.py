"""The process in which a client works on messages. It stays between them, so that Python and JAX are loaded,
and programs compiled, only once.

    python -m pfedme.deploy.worker CONFIG SOCKET

The process with the connection to the server starts it, and hands it one message after the other through a
socket that no other process has. A worker that takes too long is ended, and so is one without work; the next
message then starts another. All that a client must not lose is on its disk before a reply leaves.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path

from pfedme.deploy.messages import Content
from pfedme.errors import InputError, RunError

GRACE_S = 60.0
"""Seconds after the limit of the client's owner at which a worker that has not ended itself is ended: it may
have to start first."""
REST_S = 60.0
"""Seconds without work after which a worker is ended, so that an idle client needs little memory."""


LINE = "line"
"""The key of a configuration with the path of the socket at which another program does the work."""


class Failed(RunError):
    """The worker has ended while it worked on a message."""


class Worker:
    """A process for a client's work, started when there is some."""

    def __init__(self, config: Path) -> None:
        """`config` is the file with what `work.client_of` makes the client from."""
        self.config = config
        self.limit = float(json.loads(config.read_text())["max-seconds"]) + GRACE_S
        self.process: subprocess.Popen[bytes] | None = None
        self.busy = time.monotonic()
        """The time at which it last had work."""

    def start(self) -> None:
        """Starts the process, unless it runs already."""
        if self.process is not None and self.process.poll() is None:
            return
        self.stop()
        own, its = socket.socketpair()
        with its:
            words = [sys.executable, "-m", __name__, str(self.config), str(its.fileno())]
            self.process = subprocess.Popen(words, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        self.line = Connection(own.detach())
        self.busy = time.monotonic()

    def ask(self, kind: str, run: str, asked: Content | None) -> Content:
        """The client's reply to a message of a run; `asked` is None if the message cannot be read."""
        self.start()
        assert self.process is not None
        process, why = self.process, "it ended"

        def end() -> None:
            nonlocal why
            why = "it took too long"
            process.kill()

        clock = threading.Timer(self.limit, end)
        clock.start()
        try:
            self.line.send((kind, run, asked))
            words, arrays = self.line.recv()
            return Content(json.loads(words), arrays)
        except (OSError, EOFError):
            self.stop()
            raise Failed(why) from None
        finally:
            clock.cancel()
            self.busy = time.monotonic()

    def rest(self) -> None:
        """Ends the process if it has had no work for a while."""
        if self.process is not None and time.monotonic() - self.busy > REST_S:
            self.stop()

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.line.close()
            self.process.kill()
            self.process.wait()
            self.process = None


class Elsewhere:
    """A program that does the work without having been started for it: the server of a region."""

    def __init__(self, path: str) -> None:
        """`path` is that of its socket."""
        self.path = path

    def start(self) -> None:
        """It runs already."""

    def ask(self, kind: str, run: str, asked: Content | None) -> Content:
        """The reply to a message of a run; `asked` is None if the message cannot be read."""
        try:
            with Client(self.path, "AF_UNIX") as line:
                line.send((kind, run, asked))
                words, arrays = line.recv()
                return Content(json.loads(words), arrays)
        except (OSError, EOFError):
            raise Failed("it ended") from None

    def rest(self) -> None:
        """It goes on without work."""

    def stop(self) -> None:
        """It ends by itself."""


def answer_all(line: Connection, reply: Callable[[str, str, Content | None], Content]) -> None:
    """Replies to messages until the other side of the line is closed, which raises an error."""
    while True:
        words, arrays = reply(*line.recv())
        # As text, because the other process has not imported the types that words may have.
        line.send((json.dumps(words), arrays))


def main(config: Path, line: Connection) -> None:
    """Replies to messages until the other side of the line is closed."""
    from pfedme.deploy.work import reply
    from pfedme.engine.devices import keep_compiled_programs

    keep_compiled_programs(0.0)
    client = json.loads(config.read_text())

    def read(asked: Content | None) -> Content:
        if asked is None:
            raise InputError("A message of the server cannot be read.")
        return asked

    with contextlib.suppress(OSError, EOFError):
        answer_all(line, lambda kind, run, asked: reply(client, run, kind, lambda: read(asked)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])))
