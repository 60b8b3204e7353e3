"""A headless Chromium to look at pages with, by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 120.0
# Chromium talks over file descriptors 3 and 4; this puts the pipes there and becomes the browser.
BECOME = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab of the browser, and what has happened in it."""

    def __init__(self, command: int, answer: int) -> None:
        self.command, self.answer = command, answer
        self.rest = b""
        self.last = 0
        self.errors: list[str] = []
        """Exceptions, and what was written to the console as an error or came from the browser."""
        self.requests: list[str] = []
        """The addresses that were asked for."""
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.command, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            heard = self.hear(until)
            if heard.get("id") == self.last:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']['message']}")
                return heard["result"]

    def hear(self, until: float) -> dict[str, Any]:
        """The next message; what it says about errors and requests is kept."""
        while b"\0" not in self.rest:
            if not select.select([self.answer], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.answer, 2**20)
            if not part:
                raise RuntimeError("the browser has gone")
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert", "warning"):
                self.errors.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return message

    def open(self, path: Path, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Loads a file in a window of this size, and waits until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.evaluate(
            "new Promise(done => { const look = () => document.readyState === 'complete' && document.body"
            " ? requestAnimationFrame(() => requestAnimationFrame(() => done())) : setTimeout(look, 10);"
            " look(); })"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Moves the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


def pipe() -> tuple[int, int]:
    """The end to read from and the end to write to, both above the descriptors that Chromium uses."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return read, write


@contextlib.contextmanager
def browser(program: str) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the block."""
    theirs_in, ours_out = pipe()
    ours_in, theirs_out = pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank",
        ]  # fmt: skip
        with open(os.path.join(home, "log"), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", BECOME, str(theirs_in), str(theirs_out), program, *options],
                pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Page(ours_out, ours_in)
            yield page
            page.session = None
            page.call("Browser.close")
        finally:
            os.close(ours_out)
            os.close(ours_in)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
