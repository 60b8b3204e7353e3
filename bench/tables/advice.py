"""`pfedme advise` on real tables, beside scikit-learn on the same rows: `make advice-tables`.

python bench/tables/advice.py                       all tables; some hours on two cores
python bench/tables/advice.py --tables lung,ames    some tables
python bench/tables/advice.py --page                only rewrites docs/results/advice.md and .csv

One command each, with defaults only. A table with few rows is split into training and test rows several
times, since one split of it cannot show a difference of a point. Results are stored in runs/real-advice/;
interrupted runs are continued, and finished ones are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import reference
from run import sklearn

from pfedme.advice.advise import STATE
from pfedme.advice.trials import Trials, question
from pfedme.algorithms import FedAvg
from pfedme.core.models import MLR
from pfedme.data import parse_data
from pfedme.data.natural import CATALOGUE
from pfedme.engine.devices import keep_compiled_programs
from pfedme.files import atomic_write
from pfedme.runs.run import Run

ROOT = Path(__file__).parents[2]
OUT = ROOT / "runs" / "real-advice"
NAMES = (
    "lung", "penguins", "ercp", "medpar", "gapminder", "contraception", "schools", "ames", "star", "loans",
    "covid", "crashes", "rodents", "diamonds", "insteval", "flights",
)  # fmt: skip
SPLITS, FEW = 5, 5_000
"""How often a table with fewer than so many rows is split."""
PATHS = ("label-prior", "cluster", "cluster-label-prior", "fine-tuned")
"""Methods that clients are offered around a shared model; the others are evaluated as they were tried."""
SKLEARN = ("per client", "pooled", "with client")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--minutes", default="10")
    parser.add_argument("--page", action="store_true", help="run nothing")
    asked = parser.parse_args()
    if unknown := set(asked.tables) - set(NAMES):
        sys.exit(f"There is no table {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}.")
    keep_compiled_programs()
    for split in range(0 if asked.page else asked.splits):
        for name in asked.tables:
            path = OUT / name / f"{split}.json"
            if not path.exists() and (split == 0 or CATALOGUE[name].rows < FEW):
                jax.clear_caches()  # a process can map only so many compiled programs
                kept = carry_out(f"{name}:seed={split}", OUT / name / str(split), asked.minutes)
                atomic_write(path, json.dumps(kept, indent=1))
                print(f"{time.strftime('%H:%M')}  {name} {split}: {kept['seconds']:.0f} s", flush=True)
    write_page()


def carry_out(source: str, out: Path, minutes: str) -> dict[str, Any]:
    """Advice on one split of a table, and the test scores of everything beside it."""
    program = Path(sys.executable).parent / "pfedme"
    words = ["advise", "--data", source, "--minutes", minutes, "--out", str(out), "--json"]
    if not (out / "advice.json").exists():
        done = subprocess.run([program, *words], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{source}: {done.stderr.splitlines()[-1]}")
    advice = json.loads((out / "advice.json").read_text())
    run, simulation = Run(algorithm=FedAvg(), data=parse_data(source), model=MLR()).prepare()
    federation, key = simulation.federation, advice["metric"]
    trials = Trials(out / STATE, question(run.to_json()))
    ours = {trial.method: test_score(trial, simulation, key) for trial in trials.best()}
    told = {name: entry[key] for name, entry in advice["methods"].items()}
    ours |= {name: told[name] for name in (*PATHS, "alone", "recommended") if name in told}
    beside = sklearn(source.replace(":", "-"), federation, OUT)
    with_client = reference.measure(reference.with_client_column(federation), federation)
    return {
        "seconds": advice["seconds"],
        "load": os.getloadavg()[0],
        "rows": int(federation.n_train.sum() + federation.n_test.sum()),
        "tested": int(federation.n_test.sum()),
        "clients": federation.clients,
        "verdict": advice["verdict"],
        "method": advice["method"],
        "metric": key,
        "left": len(advice["left"]),
        "ours": ours,
        "beside": {name: m[key] for name, m in ({**beside, "with client": with_client}).items()},
    }


def test_score(trial: Any, simulation: Any, key: str) -> float | None:
    """The metric over all test rows of the models that a method trains for clients, as it was tried last, on
    all training rows."""
    s = simulation
    trained, state = trial.recipe(s.model, s.cohort, s.seed).train(s.federation)
    scores = trained.evaluate(state, train=False, rows=True)[0].test
    kind = "personal" if trial.algorithm.personal else "global"
    return scores[kind].over_all_rows(key)


def write_page() -> None:
    """Writes the tables of what is there."""
    found = {name: kept for name in NAMES if (kept := list(kept_of(name)))}
    header = (
        "table | rows | clients | splits | join | metric | alone | best federated in hindsight | "
        "recommended | behind the best | scikit-learn: per client, pooled, with client | seconds"
    )
    lines = [line(name, kept) for name, kept in found.items()]
    load = max(split["load"] for kept in found.values() for split in kept)
    text = (
        "# Advice on real tables\n\n"
        "`pfedme advise --data TABLE`, with defaults, beside scikit-learn on the same rows. Metrics are over "
        "all test rows: percent, or AUC or R² times 100.\n\n"
        f"A table with fewer than {FEW:,} rows is split into training and test rows several times "
        "(`--data TABLE:seed=1`, ...), because one split cannot show a difference of a point: in lung, one "
        "test row is 1.6 points. For these tables, numbers are means over splits, and ± is the standard "
        "deviation over splits.\n\n"
        "*Best federated in hindsight* is the method with the best mean on the test rows, out of all that "
        "were tried and those that clients are offered around the shared model. Nobody can know it "
        "beforehand, and the best of more than ten noisy means is a little too good. *Behind the best* is "
        "how far the recommended models are below the better of it and alone, in points, with the standard "
        "error of this mean difference over splits; for quantities, how much larger their RMSE is, in "
        "percent. Negative means better. scikit-learn's models are linear, too, with their strengths chosen "
        "by cross-validation: one per client, one for all rows, and one for all rows that is told whose row "
        "it is.\n\n"
        f"| {header} |\n|{' --- |' * (header.count('|') + 1)}\n{''.join(lines)}\n"
        f"Seconds are the longest of the splits, on two cores with a load of up to {load:.0f}. `make "
        "advice-tables` repeats this. The constants of the choice (`pooled`, `caution`) were set with "
        "contraception, medpar, lung, schools, ames, penguins and rodents in view.\n"
    )
    atomic_write(ROOT / "docs" / "results" / "advice.md", text)
    table = io.StringIO()
    rows = [row for name, kept in found.items() for row in cells(name, kept)]
    header = ["table", "split", "by", "model", "metric", "value"]
    csv.writer(table, lineterminator="\n").writerows([header, *rows])
    atomic_write(ROOT / "docs" / "results" / "advice.csv", table.getvalue())


def kept_of(name: str) -> Iterator[dict[str, Any]]:
    """The results of a table that are there, one for each split."""
    for split in range(SPLITS):
        if (path := OUT / name / f"{split}.json").exists():
            yield json.loads(path.read_text())


def behind(key: str, other: np.ndarray, mine: np.ndarray) -> tuple[float, float]:
    """How far `mine` is behind `other` in points, or how much larger its RMSE is in percent, from the scores
    in each split; and the standard error."""
    apart = 100 * (other - mine)
    if key == "r2":
        error, least = np.sqrt(1 - mine), np.sqrt(1 - other)
        apart = 100 * (error - least) / least.mean()
    return float(apart.mean()), float(apart.std(ddof=1) / np.sqrt(len(apart))) if len(apart) > 1 else 0.0


def in_hindsight(kept: list[dict[str, Any]]) -> str:
    """The federated method with the best mean score, out of those that every split has."""
    common = set.intersection(*(set(split["ours"]) for split in kept)) - {"alone", "recommended"}
    return max(sorted(common), key=lambda method: scores(kept, method).mean())


def scores(kept: list[dict[str, Any]], method: str, by: str = "ours") -> np.ndarray:
    """The score of a method in each split; −∞ where it is undefined."""
    return np.array([-np.inf if (value := split[by][method]) is None else value for split in kept])


def line(name: str, kept: list[dict[str, Any]]) -> str:
    """A row of the table."""
    key, first, best = kept[0]["metric"], kept[0], in_hindsight(kept)

    def told(method: str, by: str = "ours") -> str:
        own = 100 * scores(kept, method, by)
        return f"{own.mean():.1f}" + (f" ± {own.std(ddof=1):.1f}" if len(own) > 1 else "")

    better = max("alone", best, key=lambda method: scores(kept, method).mean())
    far, error = behind(key, scores(kept, better), scores(kept, "recommended"))
    verdicts = [split["verdict"] for split in kept]
    counts = ", ".join(
        f"{verdict} {verdicts.count(verdict)}×" if len(kept) > 1 else verdict
        for verdict in dict.fromkeys(verdicts)
    )
    sklearns = ", ".join(f"{100 * scores(kept, model, 'beside').mean():.1f}" for model in SKLEARN)
    cells = (
        name, f"{first['rows']:,}", f"{first['clients']:,}", str(len(kept)), counts,
        {"auc": "AUC", "r2": "R²"}.get(key, key), told("alone"), f"{best} {told(best)}", told("recommended"),
        f"{far:+.1f}" + (f" ± {error:.1f}" if len(kept) > 1 else "") + (" %" if key == "r2" else ""),
        sklearns, f"{max(split['seconds'] for split in kept):.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def cells(name: str, kept: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """The same for the CSV file, with all methods and splits."""
    for place, split in enumerate(kept):
        for by, where in (("pfedme", "ours"), ("scikit-learn", "beside")):
            for model, value in split[where].items():
                yield [name, place, by, model, split["metric"], "" if value is None else f"{value:.6f}"]


if __name__ == "__main__":
    assert set(NAMES) <= set(CATALOGUE)
    main()
