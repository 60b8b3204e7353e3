"""Several hosts that carry out one run together: their options, how they find each other, and how they part.

JAX's distributed runtime connects them: a coordinator on the first host and, on CPUs, Gloo between all.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pfedme.cli.interrupts import INTERRUPTED
from pfedme.errors import Diverged, InputError, Interrupted, RunError

START_S = 600
"""Seconds that hosts wait for the last of them at the beginning."""
END_S = 3600
"""Seconds that hosts wait for the last of them at the end."""
ONE_HOST = ("advise", "reproduce", "study", "audit")
"""Commands that train, and work on one host."""
SILENT_S = 100
"""Seconds after which a host that is no longer heard of counts as lost."""


class Place(NamedTuple):
    """One of several hosts."""

    hosts: int
    host: int
    """Its number, from 0."""
    coordinator: str
    """Address and port at which host 0 is found by the others."""


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run on several hosts; see `place`."""
    group = parser.add_argument_group(
        "several hosts", "start the same command on each; under SLURM, srun gives all three"
    )
    group.add_argument("--hosts", metavar="N", help="number of hosts that train together (1)")
    group.add_argument("--host", metavar="K", help="number of this one, from 0; the first writes the results")
    group.add_argument(
        "--coordinator", metavar="ADDR:PORT",
        help="address of host 0 and a free port there; for trusted networks, because nothing is encrypted",
    )  # fmt: skip


def place(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Which of several hosts this is; None if it is the only one.

    What is not given comes from PFEDME_HOSTS, PFEDME_HOST and PFEDME_COORDINATOR, then from SLURM's variables
    of a step, and the number of this host from that of a pod of a Kubernetes Indexed Job.
    """
    known: dict[str, Any] = {**_of_slurm(environment), **_of_kubernetes(environment)}
    for name in Place._fields:
        known[name] = getattr(args, name) or environment.get(f"PFEDME_{name.upper()}") or known.get(name)
    given = {name for name in ("host", "coordinator") if getattr(args, name) is not None}
    if not known["hosts"]:
        if given:
            raise InputError(f"--{min(given)} needs --hosts, the number of hosts.")
        return None
    hosts = _whole("hosts", known["hosts"], 1)
    if hosts == 1:
        return None
    for name, what in (("host", "the number of this one, from 0"), ("coordinator", "ADDR:PORT of host 0")):
        if not known[name]:
            raise InputError(f"--hosts {hosts} needs --{name}, {what}.")
    host = _whole("host", known["host"], 0)
    if host >= hosts:
        raise InputError(f"--host must be one of 0 to {hosts - 1}, the numbers of {hosts} hosts, not {host}.")
    port = known["coordinator"].rpartition(":")[2]
    if ":" not in known["coordinator"] or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"--coordinator must be the address of host 0 and a port, such as 10.0.0.1:7171, not "
            f"'{known['coordinator']}'."
        )
    return Place(hosts, host, known["coordinator"])


def _whole(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"--{name} must be a whole number of at least {least}, not '{text}'.")
    return int(text)


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The place of a task of a step that srun has started."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if first is None or not {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"} <= environment.keys():
        return {}
    numbers = (environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID"))
    port = 61_440 + sum(int(number) for number in numbers if number.isdecimal()) % 4096
    return {
        "hosts": environment["SLURM_STEP_NUM_TASKS"],
        "host": environment["SLURM_PROCID"],
        "coordinator": f"{first[1]}{first[2] or ''}:{port}",
    }


def _of_kubernetes(environment: Mapping[str, str]) -> dict[str, str]:
    """The number of a pod of an Indexed Job; Kubernetes tells a pod no more."""
    index = environment.get("JOB_COMPLETION_INDEX")
    return {} if index is None else {"host": index}


def folder_for(given: Path | None, where: Place | None, new: Callable[[], Path]) -> Path:
    """The folder for the results: the given one, or a new one, whose name only the first host knows."""
    return given or (Path("DIR") if where and where.host else new())


def resumed(out: Path) -> str:
    """How a run or a comparison in a folder continues; see `together`."""
    return f"'pfedme resume {out}' continues the run"


def check_hosts(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raises an error if a command that works on one host was started on several."""
    hosts = environment.get("PFEDME_HOSTS") or _of_slurm(environment).get("hosts", "1")
    if command in ONE_HOST and hosts != "1":
        raise InputError(
            f"'pfedme {command}' works on one host, and this is one of {hosts}; start it once, or set "
            "PFEDME_HOSTS=1 if each of them is to do it."
        )


@contextlib.contextmanager
def together(where: Place | None, cure: str) -> Iterator[bool]:
    """Connects this host with the others while a command is carried out; the value is whether it is the
    first.

    If another one is lost meanwhile, the error ends with the `cure`, what to do on any number of hosts.
    """
    if where is None:
        yield True
        return
    lost = Lost(cure)
    try:
        _connect(where)
        _handle_signals()
        yield where.host == 0
    except BaseException as error:
        if _is_about_hosts(error):
            lost.is_reported = True
            atexit.register(_leave, 1)
            raise RunError(lost.sentence) from error
        if isinstance(error, Diverged | Interrupted):
            _part()
        else:  # perhaps of this host alone: the others are not coming to this end
            atexit.register(_leave, 2 if isinstance(error, InputError) else 1)
        raise
    _part()


class Lost:
    """What happens when JAX finds another host lost while this one does not wait for it.

    JAX then aborts the process from a thread of its own, with pages of text. This says one sentence instead.
    """

    def __init__(self, cure: str) -> None:
        self.sentence = (
            f"Another host has ended or cannot be reached; see what it says. {cure}, on any number of hosts."
        )
        self.is_reported = False
        # What libraries write without Python, such as this text, goes nowhere.
        sys.stdout, sys.stderr = (
            os.fdopen(os.dup(file.fileno()), "w", buffering=1, encoding=file.encoding)
            for file in (sys.stdout, sys.stderr)
        )
        with open(os.devnull, "w") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
        # Python's own handlers run between two steps of the main thread, which an abort does not wait for.
        self.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.abort)
        ctypes.CDLL(None).signal(int(signal.SIGABRT), self.handler)

    def abort(self, _: int) -> None:
        """Ends the process, unless the main thread is about to."""
        if self.is_reported:
            time.sleep(60)
        os.write(sys.stderr.fileno(), f"pfedme: {self.sentence}\n".encode())
        os._exit(1)


def _connect(where: Place) -> None:
    """Waits until all hosts are there."""
    import jax

    from pfedme.engine.devices import check_even  # before JAX starts, because it makes a device of every core

    jax.config.update("jax_enable_preemption_service", False)  # which would take SIGTERM for itself
    address = where.coordinator
    try:
        jax.distributed.initialize(
            address, where.hosts, where.host, cluster_detection_method="deactivate",
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address),
            initialization_timeout=START_S, heartbeat_timeout_seconds=SILENT_S,
            shutdown_timeout_seconds=END_S,
        )  # fmt: skip
    except RuntimeError as error:
        what = "listen" if where.host == 0 and "bind" in str(error).lower() else "meet the other hosts"
        raise RunError(
            f"Host {where.host} could not {what} at {address}: {str(error).splitlines()[0]}. Start all "
            f"{where.hosts} hosts within {START_S // 60} minutes, with the address of host 0 and a free port."
        ) from None
    check_even()


def _handle_signals() -> None:
    """Lets all hosts stop together when one is told to."""
    from pfedme.engine.devices import stop_together

    def stop(number: int, _: object) -> None:
        stop_together()
        signal.signal(number, lambda *_: _leave(INTERRUPTED))  # the second time at once
        print("pfedme: all hosts stop after these rounds", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def _part() -> None:
    """Waits until all hosts have come to their end."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def _leave(status: int) -> None:
    """Ends the process without waiting for the others, as JAX would."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status == 2:
        time.sleep(1)  # others may be reporting the same error, and the first host would take them with it
    os._exit(status)


def _is_about_hosts(error: BaseException) -> bool:
    """Whether JAX reports that another host is lost."""
    ours = isinstance(error, InputError | RunError)
    return not ours and re.search("gloo|coordination service", str(error), re.IGNORECASE) is not None
