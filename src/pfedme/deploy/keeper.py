"""A small process that runs a command and ensures that nothing of it outlives the process that started it.

    python keeper.py LOG HOME COMMAND...

Its standard input is the reading end of a pipe. When the other end is closed, which the system does however
its holder ends, or when a signal tells it to, it ends the command and everything that it has started. If the
holder of the folder HOME has ended too, it then removes that folder.
Run as a file on its own, it only imports the standard library, so that it costs little.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 5.0
"""Seconds that processes have to end on their own when they are told to."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOCK = ".pfedme"
"""The file in a home folder that its owner and its keepers keep locked while they run."""


def prctl(option: int, value: int) -> None:
    """Sets a property of this process, on systems that have it."""
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
                # A command's name, in parentheses, may itself contain spaces and parentheses.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, directly or indirectly."""
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
    # The command first: it may want to sign off with others before its own processes end.
    tell_to(signal.SIGTERM, [child.pid] if child.poll() is None else started)
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and (child.poll() is None or descendants(os.getpid())):
        if child.poll() is not None:
            tell_to(signal.SIGTERM, descendants(os.getpid()))
        time.sleep(0.05)
    # On Linux, orphans become children of this process; elsewhere the earlier list is gone through again.
    while left := descendants(os.getpid()) or [pid for pid in started if pid in parents()]:
        tell_to(signal.SIGKILL, left)
        time.sleep(0.05)


@contextlib.contextmanager
def held(home: Path) -> Iterator[bool]:
    """Marks a home folder as in use; false if it is not one, or has been removed."""
    import fcntl  # not available on Windows

    try:
        lock = os.open(home / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield (home / LOCK).exists()
    finally:
        os.close(lock)


def remove(home: Path) -> None:
    """Removes a home folder, unless it is in use. The lock goes last, so that remains can be removed
    later."""
    import fcntl

    try:
        lock = os.open(home / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for entry in list(os.scandir(home)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry)
        if os.listdir(home) == [LOCK]:
            os.unlink(home / LOCK)
            os.rmdir(home)
    os.close(lock)


def main(log: str, home: Path, command: list[str]) -> int:
    """Runs the command until it ends or is told to end; returns its exit status."""
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.append(True))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with held(home):
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
    remove(home)
    return 0 if asked else child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
