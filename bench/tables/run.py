"""Real tables with our models and scikit-learn's: `make real-tables`. Writes docs/results/tables.md and .csv.

python bench/tables/run.py                               everything; an hour or two on two cores
python bench/tables/run.py --budgets 1500 --seeds 1      defaults only, without the stability of the verdict
python bench/tables/run.py --tables lung,penguins        some tables
python bench/tables/run.py --page                        only rewrites the page, from existing results

Each table has a name in pfedme, which fetches, reads and splits it. scikit-learn gets the same numbers, and
is evaluated on the same test rows. Results are stored in runs/real-tables/; interrupted runs are resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import reference
from ours import BUDGET, Cell, carry_out, result
from page import Finding, write_page

from pfedme.data.federation import Federation
from pfedme.data.natural import CATALOGUE, NATURAL, Entry
from pfedme.files import atomic_write

ROOT = Path(__file__).parents[2]
OUT = ROOT / "runs" / "real-tables"
BUDGETS = (BUDGET // 10, BUDGET, 10 * BUDGET)
SEEDS = 5
NAMES = (
    "covid", "crashes", "flights", "lung", "medpar", "contraception", "ercp", "penguins", "rodents",
    "diamonds", "ames", "schools", "gapminder", "loans",
)  # fmt: skip
TABLES = tuple(CATALOGUE[name] for name in NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=lambda text: text.split(","), help="names, joined by commas")
    parser.add_argument(
        "--budgets", type=lambda text: [int(word) for word in text.split(",")], default=BUDGETS
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT, help="where results are kept")
    parser.add_argument("--force", action="store_true", help="run ours again, whatever is kept")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if unknown := set(asked.tables or ()) - set(NAMES):
        sys.exit(f"There is no table {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}.")
    federations = {name: NATURAL[name]().load() for name in NAMES}
    beside = {name: sklearn(name, federation, asked.out) for name, federation in federations.items()}
    wanted = [] if asked.page else [table for table in TABLES if table.name in (asked.tables or NAMES)]
    cells = [Cell(t, budget, seed) for t in wanted for budget in asked.budgets for seed in range(asked.seeds)]
    # The defaults first: all of the page but the verdicts needs no other cells. Then smaller budgets first:
    # where training has ended by itself, larger ones change nothing.
    cells.sort(key=lambda cell: ((cell.budget, cell.seed) != (BUDGET, 0), cell.budget))
    left = [cell for cell in cells if asked.force or result(cell, asked.out) is None]
    for place, cell in enumerate(left, 1):
        name = cell.table.name
        kept = carry_out(cell, federations[name], asked.out, BUDGETS, force=asked.force)
        how = f"as with {kept['equals']} rounds" if "equals" in kept else f"{kept['seconds']:.0f} s"
        said = f"{cell}: {kept['verdict']['verdict']}, {how}"
        print(f"{time.strftime('%H:%M')}  {place}/{len(left)}  {said}", flush=True)
    findings = [
        Finding(table, federations[table.name], beside[table.name], kept_of(table, asked.out))
        for table in TABLES
    ]
    write_page(findings, ROOT / "docs" / "results")


def kept_of(table: Entry, out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """The results of a table that are there, by budget and seed."""
    cells = [Cell(table, budget, seed) for budget in BUDGETS for seed in range(SEEDS)]
    return {(cell.budget, cell.seed): kept for cell in cells if (kept := result(cell, out))}


def sklearn(name: str, federation: Federation, out: Path) -> dict[str, Any]:
    """scikit-learn's metrics, kept as long as neither the rows nor the module that computes them change."""
    rows = (federation.x, federation.y, federation.n_train, federation.n_test)
    digest = hashlib.sha256(
        b"".join(a.tobytes() for a in rows) + Path(reference.__file__).read_bytes()
    ).hexdigest()
    kept = out / "scikit-learn" / f"{name}.json"
    if kept.exists() and (found := json.loads(kept.read_text()))["of"] == digest:
        return found["metrics"]
    found = {name: reference.measure(p, federation) for name, p in reference.references(federation).items()}
    kept.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(kept, json.dumps({"of": digest, "metrics": found}, indent=1))
    print(f"{time.strftime('%H:%M')}  {name}: scikit-learn", flush=True)
    return found


if __name__ == "__main__":
    main()
