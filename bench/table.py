"""A large table: `make bench-table`. Measures the time to read it, against polars alone, and the memory.

python bench/table.py                                  10 million rows of 1,000 clients, a few minutes
python bench/table.py --rows 100000 --clients 100      a check that it runs
python bench/table.py --format parquet                 or folder: a CSV file for each client
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

NUMBERS = 10
WARDS = ("north", "south", "east", "west", "day clinic", "emergency")
SEXES = ("female", "male")
BLOCK = 2**18
"""Rows that are made at once."""


def block(rows: int, clients: int, seed: int) -> pl.DataFrame:
    """Rows of a federation whose clients have other means and another rule for the label each."""
    rng = np.random.default_rng([0, seed])
    own = np.random.default_rng([1, clients])
    shift, rule = own.normal(size=(2, clients, NUMBERS))
    client = rng.integers(clients, size=rows)
    x = rng.normal(size=(rows, NUMBERS)) + 0.5 * shift[client]
    ward, sex = rng.integers(len(WARDS), size=rows), rng.integers(len(SEXES), size=rows)
    score = (x * (1 + 0.5 * rule[client])).sum(axis=1) + ward - 2.5 + sex + rng.normal(size=rows)
    scale = 10.0 ** np.arange(NUMBERS).clip(0, 3)
    return pl.DataFrame(
        {
            "hospital": pl.Series([f"hospital {i:04}" for i in range(clients)])[client],
            **{f"x{k}": x[:, k] * scale[k] + 100 * k for k in range(NUMBERS)},
            "ward": pl.Series(WARDS)[ward],
            "sex": pl.Series(SEXES)[sex],
            "outcome": pl.Series(["ill", "well"])[(score > 0).astype(np.int64)],
        }
    )


def generate(path: Path, rows: int, clients: int) -> None:
    """Writes the table: a CSV or Parquet file, or a folder of CSV files if the name has no ending."""
    write = functools.partial(pl.DataFrame.write_csv, float_precision=5)
    blocks = (block(min(BLOCK, rows - at), clients, at) for at in range(0, rows, BLOCK))
    if path.suffix == ".csv":
        with open(path, "wb") as file:
            for k, some in enumerate(blocks):
                write(some, file, include_header=k == 0)
    elif path.suffix == ".parquet":
        pl.concat(blocks).write_parquet(path)
    else:
        path.mkdir()
        for (name,), own in pl.concat(blocks).partition_by("hospital", as_dict=True).items():
            write(own.drop("hospital"), path / f"{name}.csv")


def arguments(path: Path) -> list[str]:
    """The options by which a command reads the table."""
    client = [] if path.is_dir() else ["--client", "hospital"]
    return ["--data", str(path), *client, "--label", "outcome"]


def seconds(what: str, path: Path) -> float:
    """What reading the file takes, in this process."""
    if what == "polars":
        work = functools.partial(_polars, path)
    else:
        from pfedme.data.table import Table

        client = None if path.is_dir() else "hospital"
        table = Table(path=str(path), client=client, label="outcome")
        work = table.load if what == "load" else table.pinned
    begin = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - begin
    del result
    return elapsed


def _polars(path: Path) -> pl.DataFrame:
    if path.is_dir():
        return pl.concat(pl.read_csv(file) for file in sorted(path.iterdir()))
    return pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path)


def child(command: list[str]) -> tuple[str, float, float]:
    """What a command prints, the seconds that it takes, and the GiB that it and its children hold at most."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for pid in _family(process.pid):
                # It has ended, perhaps.
                with contextlib.suppress(OSError, IndexError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    peaks[pid] = int(status.split("VmHWM:")[1].split()[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out, _ = process.communicate()
    finally:
        done.set()
        watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} has failed.")
    return out, time.perf_counter() - begin, sum(peaks.values()) / 2**20


def _family(pid: int) -> list[int]:
    """A process and those that it has started, and they in turn."""
    out = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for own in (task / "children").read_text().split():
                out += _family(int(own))
    return out


def measure(path: Path, repetitions: int) -> list[tuple[str, float, float]]:
    """Name, seconds and peak GiB of each piece of work; those that are compared, alternately."""
    times: dict[str, list[tuple[float, float]]] = {"polars": [], "load": [], "fingerprint": []}
    for _ in range(repetitions):
        for what, own in times.items():
            out, _, peak = child([sys.executable, __file__, "--only", what, "--at", str(path)])
            own.append((json.loads(out), peak))
            print(f"  {what}: {own[-1][0]:.2f} s", file=sys.stderr, flush=True)
    lines = [(what, median(s for s, _ in own), max(p for _, p in own)) for what, own in times.items()]
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        for words in ("data describe", "run pfedme --rounds 20", "run alone --rounds 20"):
            own = ["--out", f"{out}/{words.split()[1]}"]
            command = [str(Path(sys.executable).with_name("pfedme")), *words.split(), *arguments(path), *own]
            _, took, peak = child(command)
            lines.append((f"pfedme {words}", took, peak))
            print(f"  {words}: {took:.1f} s, {peak:.2f} GiB", file=sys.stderr, flush=True)
    return lines


def size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def report(lines: list[tuple[str, float, float]], path: Path, rows: int, clients: int) -> str:
    """The measurements as Markdown."""
    took = {what: s for what, s, _ in lines}
    names = {
        "polars": "polars alone reads it",
        "load": "ours reads, splits and encodes it",
        "fingerprint": "its fingerprint",
    }
    table = [f"| `{w}` | {s:.1f} s | {p:.2f} GiB |" for w, s, p in lines if w not in names]
    head = [f"| {names[w]} | {s:.1f} s | {p:.2f} GiB |" for w, s, p in lines if w in names]
    return "\n".join(
        [
            f"{rows:,} rows, {clients:,} clients, {size(path) / 1e9:.2f} GB ({path.name}): ours takes "
            f"{took['load'] / took['polars']:.2f} times what polars alone takes to read it.",
            "",
            "| what | time | peak memory |",
            "|---|---|---|",
            *head,
            *table,
        ]
    )


def main() -> None:
    """Makes the table, measures, prints, and deletes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--format", choices=["csv", "parquet", "folder"], default="csv")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder to make the table in, and to leave it there")
    parser.add_argument("--only", choices=["polars", "load", "fingerprint"], help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(seconds(args.only, args.at)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        ending = "" if args.format == "folder" else f".{args.format}"
        path = folder / f"hospitals-{args.rows}-{args.clients}{ending}"
        if not path.exists():
            print("making the table ...", file=sys.stderr, flush=True)
            generate(path, args.rows, args.clients)
        print(report(measure(path, args.repetitions), path, args.rows, args.clients))


if __name__ == "__main__":
    main()
