"""How many clients a machine holds: memory, processes and seconds per round of a deployed federation.

    python bench/deployed.py [--clients 5 20 40] [--rounds 6] [--idle 60]

The server and all clients run here, with TLS and keys and tiny tables; memory is the sum of the proportional
set sizes of a program's processes, in which shared pages count once. After some rounds one client is stopped,
so that all others wait; memory and CPU time are measured at the end of the rounds and while they wait.
The results go into `deployed` of bench/results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

from federation import BIN, HERE, process, wait_for, write_tables

from pfedme.deploy.keeper import descendants
from pfedme.deploy.processes import free_port
from pfedme.files import atomic_write

TICK = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    return [pid, *descendants(pid)]


def memory(pids: list[int]) -> float:
    """Their proportional set size in MiB."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(rollup.split("\nPss:")[1].split()[0])
    return total / 1024


def cpu(pids: list[int]) -> float:
    """CPU seconds that they, and children of theirs that have ended, have used."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, words[11:15]))
    return total / TICK


def measure(folder: Path, clients: int, rounds: int, idle: float) -> dict[str, float]:
    """One federation."""
    tables, out, port = write_tables(folder, clients), folder / "run", free_port()
    names, env = [table.stem for table in tables], {**os.environ, "PFEDME_CACHE": str(folder / "cache")}
    words = [str(BIN / "pfedme"), "keys", "--server", "localhost", "--clients", *names]
    subprocess.run([*words, "-o", str(folder / "keys")], env=env, capture_output=True, check=True)
    with contextlib.ExitStack() as stack:
        words = ["pfedme", "server", "--algorithm", "fedavg", "--eta", "0.05", "--rounds", str(rounds)]
        words += ["--cohort", str(clients), "--min-clients", str(clients), "--min-replies", str(clients)]
        words += ["--keys", str(folder / "keys"), "--listen", f"127.0.0.1:{port}", "--out", str(out)]
        words += ["--deadline", "600"]
        server = stack.enter_context(process(*words, log=folder / "server.txt", env=env)).pid

        def join(k: int):
            words = ["pfedme", "client", "--server", f"127.0.0.1:{port}", "--data", str(tables[k])]
            words += ["--label", "y", "--keys", str(folder / "keys/clients" / names[k]), "--approve", "any"]
            words += ["--state", str(folder / f"state-{names[k]}")]
            return process(*words, log=folder / f"{names[k]}.txt", env=env)

        last = contextlib.ExitStack()
        last.enter_context(join(0))
        stack.callback(last.close)
        others = []
        for k in range(1, clients):
            # Not all at once, so that the start does not need more memory than the rest.
            others.append(stack.enter_context(join(k)).pid)
            connected = folder / f"{names[k]}.txt"
            if k % 4 == 0:
                wait_for(lambda connected=connected: "Connected" in connected.read_text())
        log = out / "server.log"
        wait_for(lambda: log.exists() and "Round 2 of" in log.read_text(), 3600)
        before = [cpu(tree(pid)) for pid in (server, *others)]
        wait_for(lambda: f"Round {rounds - 1} of" in log.read_text(), 3600)
        after = [cpu(tree(pid)) for pid in (server, *others)]
        a_round = [(b - a) / (rounds - 3) for a, b in zip(before, after, strict=True)]
        last.close()
        at_work = [memory(tree(pid)) for pid in others]
        server_mib, processes = memory(tree(server)), [len(tree(pid)) for pid in others]
        server_processes = len(tree(server))
        time.sleep(75)
        before, since = [cpu(tree(pid)) for pid in (server, *others)], time.monotonic()
        time.sleep(idle)
        after, seconds = [cpu(tree(pid)) for pid in (server, *others)], time.monotonic() - since
        spent = [60 * (b - a) / seconds for a, b in zip(before, after, strict=True)]
        at_rest = [memory(tree(pid)) for pid in others]
        resting = [len(tree(pid)) for pid in others]
        with join(0):
            wait_for(lambda: f"Round {rounds} of" in log.read_text(), 3600)
    lines = re.findall(r"^(.{23}) Round \d+ of \d+ is done", log.read_text(), re.MULTILINE)
    times = [datetime.fromisoformat(line).timestamp() for line in lines[: rounds - 1]]
    return {
        "clients": clients,
        "round_s": statistics.median(b - a for a, b in itertools.pairwise(times)),
        "server_mib": server_mib,
        "server_processes": server_processes,
        "client_mib": statistics.mean(at_work),
        "client_idle_mib": statistics.mean(at_rest),
        "client_processes": statistics.median(processes),
        "client_idle_processes": statistics.median(resting),
        "client_cpu_s_per_round": statistics.mean(a_round[1:]),
        "server_cpu_s_per_round": a_round[0],
        "client_idle_cpu_s_per_minute": statistics.mean(spent[1:]),
        "server_idle_cpu_s_per_minute": spent[0],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 40])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--idle", type=float, default=60)
    parser.add_argument("--print", action="store_true", help="only print the results")
    args = parser.parse_args()
    if args.rounds < 4:
        parser.error("--rounds must be at least 4: the first three are not measured")
    for clients in args.clients:
        folder = Path(tempfile.mkdtemp(prefix="pfedme-bench-"))
        try:
            found = measure(folder, clients, args.rounds, args.idle)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({key: round(value, 2) for key, value in found.items()}), flush=True)
        if not args.print:
            path = HERE / "results.json"
            results = json.loads(path.read_text())
            rest = [one for one in results.get("deployed", []) if one["clients"] != clients]
            results["deployed"] = sorted([*rest, found], key=lambda one: one["clients"])
            atomic_write(path, json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
