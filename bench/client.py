"""How long a deployed client works on each message of a server, with a large table.

    python bench/client.py                    a CSV file of 1 GB, some minutes
    python bench/client.py --rows 10000       a check that it runs

As in a deployed run, every message has a process of its own. The start of Python and the imports are not
included. There is no network, and the only client is trained for three rounds.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from table import BLOCK, block

from pfedme.algorithms import PFedMe
from pfedme.core.models import MLR
from pfedme.data.table import Table
from pfedme.deploy import client as deployed
from pfedme.deploy.channel import Channel, Enough, never
from pfedme.deploy.client import Client
from pfedme.deploy.messages import Content, Kind, Reply
from pfedme.deploy.plan import Plan
from pfedme.deploy.policy import Policy
from pfedme.deploy.record import DeploymentRecord, carry_out
from pfedme.deploy.server import Server
from pfedme.engine.devices import keep_compiled_programs

ROUNDS = 3


def write_table(path: Path, rows: int) -> None:
    """A hospital's table."""
    with path.open("wb") as file:
        for at in range(0, rows, BLOCK):
            some = block(min(BLOCK, rows - at), 1, at).drop("hospital")
            some.write_csv(file, include_header=at == 0, float_precision=5)


def answer(folder: Path, kind: Kind, asked: Content) -> tuple[Content, float, float]:
    """The client's answer, the seconds that it took, and how many of them went into its rows."""
    table = Table(path=str(folder / "hospital.csv"), label="outcome", owner="hospital")
    own = Client(table, folder / "state", policy=Policy(approve="any"))
    work = {"agree": own.agree, "join": own.join, "train": own.train, "finish": own.finish}
    spent, rows_of = [0.0], deployed.rows_of

    def timed(*given: object):
        begin = time.perf_counter()
        rows = rows_of(*given)  # type: ignore[arg-type]
        spent[0] += time.perf_counter() - begin
        return rows

    deployed.rows_of = timed
    keep_compiled_programs(0.0)
    begin = time.perf_counter()
    content = work[kind](asked)
    return content, time.perf_counter() - begin, spent[0]


class Processes(Channel):
    """A client each of whose answers comes from another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def present(self) -> list[str]:
        """The client."""
        return ["hospital"]

    def ask(
        self, kind: Kind, contents: Mapping[str, Content], deadline: float, enough: Enough = never
    ) -> dict[str, Reply]:
        """See `Channel.ask`."""
        words = [sys.executable, __file__, "--answer", kind, "--at", str(self.folder)]
        done = subprocess.run(
            words, input=pickle.dumps(contents["hospital"]), stdout=subprocess.PIPE, check=True
        )
        content, took, rows = pickle.loads(done.stdout)
        which = f"{kind} {asked + 1}" if (asked := contents["hospital"].words.get("round")) else kind
        print(f"| {which} | {took:.2f} s | {rows:.2f} s |", flush=True)
        return {"hospital": Reply(content)}


def main() -> None:
    """Makes the table, measures, prints, and deletes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        told = answer(args.at, args.answer, pickle.loads(sys.stdin.buffer.read()))
        sys.stdout.buffer.write(pickle.dumps(told))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "hospital.csv", args.rows)
        size = (folder / "hospital.csv").stat().st_size / 1e9
        print(f"{args.rows:,} rows, {size:.2f} GB\n\n| message | time | of which rows |\n|---|---|---|")
        time.sleep(3)  # a file that was written this moment might be written again
        plan = Plan(
            algorithm=PFedMe(eta=0.01, alpha=0.01), model=MLR(), rounds=ROUNDS, cohort=1, min_clients=1
        )
        record = DeploymentRecord(plan, folder / "run", "")
        record.folder.path.mkdir()
        carry_out(Server(plan, Processes(folder), lambda *_: None), record, resume=False)


if __name__ == "__main__":
    main()
