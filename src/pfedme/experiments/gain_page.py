"""The tables and the page of the study of what joining is worth."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pfedme.engine.verdict import Interval
from pfedme.experiments.gain_federations import LAM, Setting
from pfedme.experiments.study import Estimate, markdown
from pfedme.personalization.finished import Level
from pfedme.report.tables import newcomer_sentence

Unit = dict[str, Any]
"""The results of one federation with one seed, as JSON values."""
CHOSEN = ("recommended", "own-lambda")
"""What clients choose; the other methods give all clients the same kind of model."""
COLUMNS = {
    "alone": "alone", "global": "global", "label-prior": "label prior", "cluster": "cluster",
    "fine-tuned": "fine-tuned",
}  # fmt: skip
"""The methods that have a column of their own, and its title."""
CLOSE = 0.5
"""By how many points the recommended models may be below the best single method and still be as good."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A federation's row in the table: means over seeds, in percent and points."""

    setting: Setting
    mean: dict[str, float]
    worst: dict[str, float]
    harmed: float
    over_alone: Estimate
    over_global: Estimate
    named: str | None = None
    """The kind of difference that the data of seed 0 shows, if that was asked."""

    @classmethod
    def of(cls, setting: Setting, units: Sequence[Unit], named: str | None = None) -> Row:
        """The row from one unit per seed."""

        def values(name: str, measure: str) -> list[float]:
            return [100 * unit["methods"][name][measure] for unit in units]

        def gap(name: str) -> Estimate:
            pairs = zip(values("recommended", "mean"), values(name, "mean"), strict=True)
            return Estimate.of([a - b for a, b in pairs])

        methods = [name for name in units[0]["methods"] if all(name in unit["methods"] for unit in units)]
        return cls(
            setting,
            {name: float(np.mean(values(name, "mean"))) for name in methods},
            {name: float(np.mean(values(name, "worst_decile"))) for name in methods},
            float(np.mean(values("recommended", "harmed"))),
            gap("alone"),
            gap("global"),
            named,
        )

    @property
    def best(self) -> str:
        """The best single method, chosen in hindsight on test rows."""
        single = {name: value for name, value in self.mean.items() if name not in CHOSEN}
        return max(single, key=single.__getitem__)

    @property
    def behind(self) -> float:
        """How far the recommended models are below the best single method, in points."""
        return self.mean[self.best] - self.mean["recommended"]

    @property
    def pays(self) -> bool:
        """Whether the recommended models beat alone and global by two points, on average and in the worst
        tenth."""
        return all(
            table["recommended"] >= table[name] + 2
            for table in (self.mean, self.worst)
            for name in ("alone", "global")
        )


def csv_of(units: dict[str, list[Unit]]) -> str:
    """The columns federation, method, seed, mean, worst_decile, harmed, as fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["federation", "method", "seed", "mean", "worst_decile", "harmed"])
    for name, own in units.items():
        for seed, unit in enumerate(own):
            for method, values in unit["methods"].items():
                numbers = [f"{values[k]:.6f}" for k in ("mean", "worst_decile", "harmed")]
                table.writerow([name, method, seed, *numbers])
    return text.getvalue()


def newcomers_csv(units: dict[str, list[Unit]]) -> str:
    """The columns federation, rows, method, seed, mean, worst_decile, as fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["federation", "rows", "method", "seed", "mean", "worst_decile"])
    for name, own in units.items():
        for seed, unit in enumerate(own):
            for level in unit.get("newcomers", []):
                for method, values in level["methods"].items():
                    numbers = [f"{values[k]:.6f}" for k in ("mean", "worst_decile")]
                    table.writerow([name, level["rows"], method, seed, *numbers])
    return text.getvalue()


def mean_levels(units: Sequence[Unit]) -> list[Level]:
    """Newcomers' accuracies as means over seeds."""
    levels = []
    common = set.intersection(*({v["rows"] for v in unit["newcomers"]} for unit in units))
    kept = ([v for v in unit["newcomers"] if v["rows"] in common] for unit in units)
    for same in zip(*kept, strict=True):
        methods = {
            name: {k: float(np.mean([v["methods"][name][k] for v in same])) for k in same[0]["methods"][name]}
            for name in same[0]["methods"]
        }
        clients = sum(v["clients"] for v in same)
        levels.append(Level(same[0]["rows"], clients, methods, _mean_gain([v["gain"] for v in same])))
    return levels


def _mean_gain(gains: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of gains in independent federations, with its interval."""
    mean = float(np.mean([gain["mean"] for gain in gains]))
    half = float(np.linalg.norm([gain["high"] - gain["mean"] for gain in gains])) / len(gains)
    return Interval(mean, mean - half, mean + half)._asdict()


def main_table(rows: Sequence[Row]) -> str:
    """All federations, with a dash where a method does not exist."""
    header = [
        "federation", *COLUMNS.values(), "best single method in hindsight", "recommended", "over alone",
        "over global", "worst tenth: alone, global, recommended", "harmed %",
    ]  # fmt: skip
    return markdown(
        header,
        [
            [f"{r.setting.name}: {r.setting.about}",
             *(f"{r.mean[m]:.1f}" if m in r.mean else "–" for m in COLUMNS),
             f"{r.mean[r.best]:.1f} ({r.best})", f"{r.mean['recommended']:.1f}",
             _points(r.over_alone), _points(r.over_global),
             ", ".join(f"{r.worst[m]:.1f}" for m in ("alone", "global", "recommended")), f"{r.harmed:.1f}"]
            for r in rows
        ],
    )  # fmt: skip


def choosing(rows: Sequence[Row]) -> str:
    """What it costs that clients choose, compared with the best single method in hindsight."""
    close = [row for row in rows if row.behind <= CLOSE]
    far = sorted((row for row in rows if row.behind > CLOSE), key=lambda row: -row.behind)
    text = (
        f"- The recommended models are within {CLOSE:g} points of the best single method in hindsight, or "
        f"above it, on {len(close)} of {len(rows)} federations."
    )
    if far:
        text += (
            f" They are farther below it on {_listed(far, lambda r: f'{-r.behind:+.1f}, {r.best} is best')}."
        )
    most = max(rows, key=lambda row: row.harmed)
    if not most.harmed:
        return f"{text}\n- No client is harmed."
    return f"{text}\n- At most {most.harmed:.1f} % of clients are harmed ({most.setting.about})."


def by_kind(rows: Sequence[Row]) -> str:
    """For each kind of difference, the mean gain of each method over alone and over global, and how often it
    is the best single method."""
    kinds = list(dict.fromkeys(row.setting.kind for row in rows))
    methods = list(dict.fromkeys(name for row in rows for name in row.mean))
    methods = [m for m in (*COLUMNS, *methods) if m not in CHOSEN]
    methods = [*(m for m in dict.fromkeys(methods) if any(m in r.mean for r in rows)), "recommended"]
    lines, told = [], []
    for kind in kinds:
        own = [row for row in rows if row.setting.kind == kind]
        cells = []
        for method in methods:
            has = [row for row in own if method in row.mean]
            over = [np.mean([r.mean[method] - r.mean[m] for r in has]) if has else None
                    for m in ("alone", "global")]  # fmt: skip
            cells.append(" / ".join(f"{gap:+.1f}" for gap in over if gap is not None) or "–")
        lines.append([f"{_titled(kind)} ({len(own)})", *cells])
        times = Counter(row.best for row in own).most_common()
        best = ", ".join(f"{name} on {n}" for name, n in times)
        told.append(f"- {_titled(kind)}: the best single method is {best} of {len(own)}.")
    return markdown(["difference (federations)", *methods], lines) + "\n" + "\n".join(told)


def naming(rows: Sequence[Row]) -> str:
    """How often the kind of difference is named rightly."""
    asked = [row for row in rows if row.setting.known]
    right = sum(row.named == row.setting.kind for row in asked)
    table = markdown(
        ["federation", "known", "named"],
        [[row.setting.about, row.setting.kind, row.named or "cannot tell"] for row in asked],
    )
    return f"It is named rightly on {right} of {len(asked)} federations (seed 0).\n\n{table}"


def page(rows: Sequence[Row], curves: dict[str, list[Level]], units: dict[str, list[Unit]]) -> str:
    """The content of docs/gain.md: when personalized federation pays, when not, and how to tell."""
    by_name = {row.setting.name: row for row in rows}
    pays = [row for row in rows if row.pays]
    nothing = [row for row in rows if abs(row.over_alone.mean) < 1]
    level = [row for row in rows if abs(row.over_global.mean) < 1]
    few, many = by_name["mnist-0.3-few"], by_name["mnist-0.3-many"]
    newcomers = "\n".join(
        f"- {by_name[name].setting.about}: {_newcomers(own)}" for name, own in curves.items()
    )
    share = {name: np.mean([c == "alone" for u in own for c in u["chosen"]]) for name, own in units.items()}
    most = sorted(share, key=lambda name: -share[name])[:3]
    lonely = [f"{100 * share[name]:.0f} % choose alone on {by_name[name].setting.about}" for name in most]
    real = sum(row.setting.kind == "unknown" for row in rows)
    seeds = rows[0].over_alone.seeds
    over = (
        f"means over clients and {seeds} seeds, with\n95 % intervals over seeds"
        if seeds > 1
        else "means over clients, of a single\nseed, so that differences of a point or less can be chance"
    )
    return f"""\
# When does joining pay?

A client that joins a federation can end up with one of several models: the unchanged shared model, the shared
model with the client's own label frequencies, the model of a group of similar clients, a model fine-tuned on
its own rows from one of these or kept near it (λ sets how near), or, if joining does not help, the model it
would have had alone. This page measures what each is worth on {len(rows)} federations, from similar clients
to clients that have nothing in common, with few and many rows; {real} of them are tables with real clients.
*Recommended* is the model that each client chooses for itself on rows that it has held out
(`--personalize auto`); test rows are read once, after all choices. Numbers are percent of a client's test
rows, or 100 R² where the label is a quantity, {over}.

{main_table(rows)}
*Label prior* is the shared model (FedAvg's) with log π_i − log π in its logits, where π_i are the client's
label frequencies and π is their mean; *cluster* is the model of the client's group; *fine-tuned* is the end
of the path from the shared model, λ = 0. The best single method is the one that would have been best on test
rows, had all clients used it; *pfedme* is Algorithm 1 with λ = {LAM:g} for all. A dash means that there is no
such model. *Harmed* is the share of clients that the recommended model leaves more than a point below alone,
beyond their own 95 % interval. A client has at most the stated number of training rows. *Alone* uses the
number of rounds and the l2 that are best on validation rows, and so do shared models of tables and networks.
The data of the paper's two federations is the same for all seeds; the other federations are drawn, and
tables split, again for each seed.

![What each client gains over alone and over the global model, and the λ it chose](results/gain.png)

## When it pays

- It pays most if clients have a task in common and too few rows for it. The recommended models beat both
  alone and the global model by two points or more, on average and in the worst tenth of the clients, on
  {len(pays)} of {len(rows)} federations: {_listed(pays, _gains)}.
- On MNIST with Dirichlet(0.3), joining is worth {few.over_alone.mean:.1f} points with 50 training rows and
  {many.over_alone.mean:.1f} with 400.

## When it does not

- The recommended models are within a point of alone on
  {_listed(nothing, lambda r: f"{r.over_alone.mean:+.1f}")}.
- Personalization gains nothing, and the global model is as good, if clients are similar: within a point on
  {_listed(level, lambda r: f"{r.over_global.mean:+.1f}")}.
- Clients that are better off alone find out: {", ".join(lonely)}.

## What choosing costs

{choosing(rows)}
- The constants of the choice (`pooled`, `caution`) were set with some of these federations in view, by
  letting half of the held-out rows choose and judging by the other half; test rows had no part in it.

## What works for which kind of difference

Each cell is the mean gain over alone / over global, in points, over the federations of that kind where the
method exists.

{by_kind(rows)}

## Naming the kind of difference

The kind of difference of a simulated federation is known. The test in
[data.md](data.md#the-description) has to find it in the clients' training rows. {naming(rows)}

## Clients that join later

A newcomer gets its model only from the shared model and its own rows. Accuracy against the number of those
rows, for the recommended model and for training alone:

![Accuracy of newcomers against the number of their rows](results/newcomers.png)

{newcomers}

## How to tell for your own data

1. `pfedme run fedavg --data … --personalize auto` prints the table above for your clients, and writes what
   each should use and what it gains, with an interval, to `personalized.csv`.
2. If *recommended* is above *alone* by more than its interval, joining pays; if it is about the same as
   *alone* for nearly all clients, it does not; if *global* is about the same as *recommended*, you do not
   need personal models.
3. A client with few rows and large intervals should follow its validation rows, not its test rows: that is
   what `choice` in `personalized.csv` does.
"""


def _titled(kind: str) -> str:
    return "real clients" if kind == "unknown" else kind


def _listed(some: Sequence[Row], show: Callable[[Row], str]) -> str:
    return "; ".join(f"{row.setting.about} ({show(row)})" for row in some) or "none of them"


def _points(gap: Estimate) -> str:
    return f"{gap.mean:+.1f} ± {gap.ci95:.1f}" if gap.seeds > 1 else f"{gap.mean:+.1f}"


def _gains(row: Row) -> str:
    return f"{_points(row.over_alone)} over alone, {_points(row.over_global)} over global"


def _newcomers(levels: Sequence[Level]) -> str:
    means = [(v.rows, *(100 * v.methods[m]["mean"] for m in ("recommended", "alone"))) for v in levels]
    shown = ", ".join(f"{rows} rows {mine:.1f} (alone {alone:.1f})" for rows, mine, alone in means)
    fewest = min(v.clients for v in levels)
    told = f"{levels[0].clients} newcomers, of which {fewest} have the most rows"
    return f"{shown}; {told}. {newcomer_sentence(levels)}"
