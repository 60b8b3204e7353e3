"""Seconds that a server takes to save a round, as its ledger grows: `python bench/ledger.py`."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from statistics import median

import jax

from pfedme.algorithms import FedAvg
from pfedme.core.models import MLR
from pfedme.data.schema import Column, Schema
from pfedme.deploy.agreement import Agreement
from pfedme.deploy.plan import Plan, built
from pfedme.deploy.progress import Progress
from pfedme.deploy.record import LEDGER, DeploymentRecord
from pfedme.report.html.read import read_ledger
from pfedme.runs.ledger import Part

CLIENTS, ROUNDS = 100, 1_000


def main() -> None:
    """Saves 1,000 rounds of 100 clients, and reads the ledger."""
    names = tuple(f"hospital {i}" for i in range(CLIENTS))
    columns = tuple(Column(f"x{k}", "number") for k in range(60))
    schema = Schema(columns, "outcome", None, "classification", ("ill", "well"))
    plan = Plan(algorithm=FedAvg(eta=0.1), model=MLR(), rounds=ROUNDS)
    w = built(plan.model, schema.features, len(schema.labels)).init(jax.random.key(0))
    progress, times = Progress(0, w, Agreement(schema, names, {})), []
    with tempfile.TemporaryDirectory() as folder:
        record = DeploymentRecord(plan, Path(folder), "")
        for t in range(1, ROUNDS + 1):
            begin = time.perf_counter()
            parts = [
                Part(t, 1, name, "counted", rows=100, norm=1.234567, step=0.5, without=0.4) for name in names
            ]
            progress = record.save(dataclasses.replace(progress, t=t).noting(parts))
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        read_ledger(Path(folder) / LEDGER)
        read = time.perf_counter() - begin
    print(f"first ten rounds {median(times[:10]):.3f} s each, last ten {median(times[-10:]):.3f} s each")
    print(f"the ledger of {CLIENTS * ROUNDS:,} lines is read in {read:.2f} s")


if __name__ == "__main__":
    main()
