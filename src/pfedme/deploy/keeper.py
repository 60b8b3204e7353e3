"""A small process that runs a command and sees to it that nothing of it outlives whoever wanted it.

    python keeper.py LOG COMMAND...

It holds the reading end of a pipe as its standard input. Once the other end is closed, which the system does
however its holder ends, or once it is told to by a signal, it ends the command and all that it has started.
Run as a file, by itself, it imports nothing but the standard library, so that it costs little.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
"""Seconds that processes have to end by themselves when they are told to."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Sets a property of this process, where the system is one that has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def parents() -> dict[int, int]:
    """The parent of each process that is not a zombie."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
        )
        rows = [line.split() for line in listed.stdout.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}
    found = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # A command's name, in parentheses, may itself have spaces and parentheses.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, directly or not."""
    above, found = parents(), []
    new = [pid]
    while new:
        new = [child for child, parent in above.items() if parent in new]
        found += new
    return found


def tell_to(number: int, pids: list[int]) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end(child: subprocess.Popen) -> None:
    """Ends the command and everything that it has started."""
    started = descendants(os.getpid())
    # The command first: it may want to say good-bye to others before its own processes go.
    tell_to(signal.SIGTERM, [child.pid] if child.poll() is None else started)
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and (child.poll() is None or descendants(os.getpid())):
        if child.poll() is not None:
            tell_to(signal.SIGTERM, descendants(os.getpid()))
        time.sleep(0.05)
    # What is orphaned comes to this process, on Linux; elsewhere what there was before is gone through again.
    while left := descendants(os.getpid()) or [pid for pid in started if pid in parents()]:
        tell_to(signal.SIGKILL, left)
        time.sleep(0.05)


def main(log: str, command: list[str]) -> int:
    """Runs the command until it ends or is to end; the exit status is its own."""
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.append(True))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
    while child.poll() is None and not told:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready and not os.read(0, 1024):
            break
    asked = child.poll() is None
    end(child)
    return 0 if asked else child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
