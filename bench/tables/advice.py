"""`pfedme advise` on real tables, beside scikit-learn on the same rows: `make advice-tables`.

python bench/tables/advice.py                       all tables; about an hour on two cores
python bench/tables/advice.py --tables lung,ames    some tables
python bench/tables/advice.py --page                only rewrites docs/results/advice.md and .csv

One command each, with defaults only. Results are stored in runs/real-advice/; interrupted runs are continued.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import reference
from run import sklearn

from pfedme.data.natural import CATALOGUE, NATURAL
from pfedme.files import atomic_write

ROOT = Path(__file__).parents[2]
OUT = ROOT / "runs" / "real-advice"
NAMES = (
    "lung", "medpar", "contraception", "ercp", "penguins", "rodents", "covid", "crashes", "flights",
    "diamonds", "ames", "schools", "gapminder", "loans",
)  # fmt: skip
NOT_SINGLE = ("recommended", "own-lambda")
LOWER = ("rmse", "mae", "log_loss", "brier")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--minutes", default="10")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if unknown := set(asked.tables) - set(NAMES):
        sys.exit(f"There is no table {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}.")
    for name in () if asked.page else asked.tables:
        began = time.monotonic()
        program = Path(sys.executable).parent / "pfedme"
        words = ["advise", "--data", name, "--minutes", asked.minutes, "--out", str(OUT / name), "--json"]
        done = subprocess.run([program, *words], capture_output=True, text=True)
        took = time.monotonic() - began
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.splitlines()[-1]}")
        federation = NATURAL[name]().load()
        beside = sklearn(name, federation, OUT)
        told = reference.measure(reference.with_client_column(federation), federation)
        kept = {
            "seconds": took,
            "rows": int(federation.n_train.sum() + federation.n_test.sum()),
            "clients": federation.clients,
            "beside": {**beside, "pooled, client as a column": told},
        }
        atomic_write(OUT / f"{name}.json", json.dumps(kept, indent=1))
        print(f"{time.strftime('%H:%M')}  {name}: {took:.0f} s", flush=True)
    write_page()


def write_page() -> None:
    """Writes the tables of what is there."""
    lines, rows = [], []
    for name in NAMES:
        if (OUT / f"{name}.json").exists() and (OUT / name / "advice.json").exists():
            kept = json.loads((OUT / f"{name}.json").read_text())
            advice = json.loads((OUT / name / "advice.json").read_text())
            lines.append(line(name, kept, advice))
            rows += cells(name, kept, advice)
    header = (
        "table | rows | clients | join | method | metric | alone | best federated in hindsight | "
        "recommended | behind the best | scikit-learn: per client, pooled, with client | seconds"
    )
    text = (
        "# Advice on real tables\n\n"
        "`pfedme advise --data TABLE`, with defaults, beside scikit-learn on the same rows. Metrics are over "
        "all test rows: percent, or R² times 100. *Best federated in hindsight* is the best single method "
        "on the test rows, which nobody can know beforehand. *Behind the best* is how far the recommended "
        "models are below the better of it and alone, in points; negative means above. scikit-learn's models "
        "are linear, too, with their strengths chosen by cross-validation: one per client, one for all rows, "
        "and one for all rows that is told whose row it is.\n\n"
        f"| {header} |\n|{' --- |' * (header.count('|') + 1)}\n{''.join(lines)}\n"
        "`make advice-tables` repeats this. The constants of the choice (`pooled`, `caution`) were set with "
        "contraception, medpar, lung, schools, ames, penguins and rodents in view.\n"
    )
    atomic_write(ROOT / "docs" / "results" / "advice.md", text)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([["table", "by", "model", "metric", "value"], *rows])
    atomic_write(ROOT / "docs" / "results" / "advice.csv", table.getvalue())


def single(advice: dict[str, Any]) -> dict[str, float]:
    """The metric of each federated method by itself."""
    key = advice["metric"]
    return {
        name: entry[key]
        for name, entry in advice["methods"].items()
        if name not in (*NOT_SINGLE, "alone") and entry[key] is not None
    }


def line(name: str, kept: dict[str, Any], advice: dict[str, Any]) -> str:
    """A row of the table."""
    key, methods = advice["metric"], advice["methods"]
    sign = -1 if key in LOWER else 1
    best = max(single(advice), key=lambda method: sign * single(advice)[method])
    alone, mine = methods["alone"][key], methods["recommended"][key]
    behind = 100 * (max(sign * alone, sign * methods[best][key]) - sign * mine)
    beside = ", ".join(
        f"{100 * kept['beside'][model][key]:.1f}"
        for model in ("per client", "pooled", "pooled, client as a column")
    )
    told = (
        name, f"{kept['rows']:,}", str(kept["clients"]), advice["verdict"], advice["method"], key,
        f"{100 * alone:.1f}", f"{best} {100 * methods[best][key]:.1f}", f"{100 * mine:.1f}", f"{behind:+.1f}",
        beside, f"{kept['seconds']:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(told)} |\n"


def cells(name: str, kept: dict[str, Any], advice: dict[str, Any]) -> list[list[Any]]:
    """The same for the CSV file, with all methods."""
    key = advice["metric"]
    ours = [[name, "pfedme", method, key, entry[key]] for method, entry in advice["methods"].items()]
    return ours + [[name, "scikit-learn", model, key, own[key]] for model, own in kept["beside"].items()]


if __name__ == "__main__":
    assert set(NAMES) <= set(CATALOGUE)
    main()
