"""Seconds per round of pFedMe, all clients training, on the cores of this process; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys

if len(sys.argv) > 1:
    # Before JAX starts: it makes a device of every core that it may use.
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))

from cells import ALGORITHMS, CELLS, median, ours

if __name__ == "__main__":
    seconds = {}
    for name, cell in CELLS.items():
        measure = ours(cell, ALGORITHMS["pfedme"], cell.federation().clients, rounds=5)
        seconds[name] = median([measure() for _ in range(5)])
    print(json.dumps(seconds))
