"""What joining is worth to a client, on federations from similar to dissimilar, with few and many rows."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pfedme import __version__
from pfedme.algorithms import FedAvg, PFedMe
from pfedme.core.models import MLR
from pfedme.core.spec import to_json
from pfedme.data import parse_data
from pfedme.engine.choices import Personalize, candidates
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.engine.simulate import State
from pfedme.engine.verdict import Interval
from pfedme.experiments.study import Estimate, Study, markdown
from pfedme.files import atomic_write, writing
from pfedme.personalization.finished import (
    NEWCOMER_ROWS,
    FinishedRun,
    Level,
    Watch,
    names,
    newcomer_curve,
    summary,
)
from pfedme.report.gain import gain_study_figure, newcomer_figure
from pfedme.report.tables import newcomer_sentence
from pfedme.runs.run import Run

LAM = 15.0
"""The λ given to pFedMe, which is the paper's."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A federation of the study."""

    name: str
    data: str
    """Its source; `{seed}` stands for the seed of the repetition."""
    about: str
    how: Personalize = dataclasses.field(default_factory=Personalize)
    rounds: int = 100
    lam_step: float = 0.01
    """pFedMe's inner step, which must be below 2/(L + λ)."""
    newcomers: bool = False
    """Whether to train again with a fifth of the clients held out, to see how newcomers fare."""

    def run(self, seed: int, *, scale: Scale, pfedme: bool = False, newcomers: bool = False) -> Run:
        """The run that trains the shared model: with FedAvg, or with pFedMe for its own personal models."""
        algorithm = (
            PFedMe(lam=LAM, alpha=self.lam_step, eta=0.01)
            if pfedme
            else FedAvg(eta=0.02, aggregation="uniform")
        )
        return Run(
            algorithm=algorithm,
            data=parse_data(scale.data(self.data).format(seed=seed)),
            model=MLR(l2=0.001),
            rounds=max(2, self.rounds // scale.divide),
            seed=seed,
            holdout_clients=0.2 if newcomers else None,
        )


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the study is carried out."""

    seeds: int = 3
    divide: int = 1
    tiny: bool = False

    def data(self, text: str) -> str:
        """The federation, or a tiny one instead."""
        return "synthetic:clients=6,rows=24,features=4,classes=3,seed={seed}" if self.tiny else text

    def how(self, how: Personalize) -> Personalize:
        """The steps of each fit, fewer in a quick study."""
        return dataclasses.replace(how, steps=max(2, how.steps // self.divide))


FULL, QUICK, TINY = Scale(), Scale(seeds=1, divide=5), Scale(seeds=2, divide=50, tiny=True)


def _dirichlet(alpha: float, rows: int, *, newcomers: bool = False) -> Setting:
    size = {50: "few", 100: "some", 400: "many"}[rows]
    clients = 50 if alpha > 0.1 else 30  # with more, some would have only a handful of images
    return Setting(
        f"mnist-{alpha:g}-{size}",
        f"mnist:partition=dirichlet,alpha={alpha:g},clients={clients},cap={2 * rows},train=0.5,seed={{seed}}",
        f"MNIST, labels by Dirichlet({alpha:g}), {rows} training rows",
        newcomers=newcomers,
    )


SETTINGS: tuple[Setting, ...] = (
    *(_dirichlet(alpha, 50) for alpha in (100, 1, 0.3, 0.1)),
    _dirichlet(0.1, 100),
    *(_dirichlet(alpha, 400, newcomers=alpha in (100, 0.3)) for alpha in (100, 1, 0.3, 0.1)),
    *(
        Setting(
            f"mnist-rotated-{size}",
            f"mnist:partition=rotated,clients=60,cap={2 * rows},train=0.5,seed={{seed}}",
            f"MNIST rotated by four angles, {rows} training rows",
            newcomers=size == "many",
        )
        for size, rows in (("few", 50), ("some", 100), ("many", 400))
    ),
    Setting(
        "mnist-two-labels",
        "mnist",
        "the paper's MNIST, two labels per client",
        rounds=200,
    ),
    Setting(
        "synthetic-0.5-0.5",
        "synthetic",
        "the paper's Synthetic(0.5, 0.5)",
        rounds=200,
    ),
    *(
        Setting(
            f"synthetic-{value}-{value}",
            f"synthetic:alpha={value},beta={value},seed={{seed}}",
            f"Synthetic({value}, {value})",
        )
        for value in (0, 1)
    ),
    Setting(
        "synthetic-iid",
        "synthetic:iid=true,rows=200,train=0.5,seed={seed}",
        "Synthetic with identically distributed clients, 100 training rows",
        newcomers=True,
    ),
    Setting(
        "synthetic-unlike-few",
        "synthetic:rows=200,train=0.5,seed={seed}",
        "Synthetic(0.5, 0.5), 100 training rows",
        newcomers=True,
    ),
)
"""From similar to dissimilar clients within each family."""

Unit = dict[str, Any]
"""The results of one federation with one seed, as JSON values."""


def measure(setting: Setting, seed: int, scale: Scale) -> Unit:
    """Runs all methods on one federation with one seed."""
    how = scale.how(setting.how)
    finished = FinishedRun.trained(setting.run(seed, scale=scale))
    federation = finished.simulation.federation
    found = finished.to_members(how)
    right = {name: found.of(name) for name in names(found)}
    right["pfedme"] = _algorithm_one(setting.run(seed, scale=scale, pfedme=True))
    unit: Unit = {
        "methods": {name: summary(found, own) for name, own in right.items()},
        "rows": federation.n_train.tolist(),
        "lam": [None if np.isinf(lam) else float(lam) for lam in found.lam],
        "chosen": [found.candidates[k].name for k in found.choice],
        "gain": {name: found.gain(right[name])[0].tolist() for name in ("alone", "global")},
    }
    if setting.newcomers:
        finished = FinishedRun.trained(setting.run(seed, scale=scale, newcomers=True))
        newcomers = finished.run.parties()[1]
        assert newcomers is not None
        unit["newcomers"] = [dataclasses.asdict(v) for v in newcomer_curve(finished, newcomers, how)]
    return unit


def _algorithm_one(run: Run) -> np.ndarray:
    """Whether the personal models of Algorithm 1, with its own w and λ, predict each test row correctly."""
    finished = FinishedRun.trained(run)
    s = finished.simulation
    models, _ = s.answer(State(run.rounds, finished.w, s.start().clients))
    assert models.personal is not None
    return outcomes(
        s.model, models.personal, s.store.x, s.store.y, Blocks.cut(*s.federation.rows("test"))
    ).right


def study_gain(study: Study, scale: Scale, watch: Watch = lambda *_: None) -> list[Row]:
    """Carries out whatever is not recorded yet, and writes the table, the figures and the page."""
    plan = [(setting, seed) for setting in SETTINGS for seed in range(scale.seeds)]
    units: dict[str, list[Unit]] = {}
    for k, (setting, seed) in enumerate(plan):
        watch(f"{setting.name}, seed {seed}", k, len(plan))
        units.setdefault(setting.name, []).append(_recorded(study, setting, seed, scale))
    watch("writing", len(plan), len(plan))
    rows = [Row.of(setting, units[setting.name]) for setting in SETTINGS]
    curves = {s.name: _mean_levels(units[s.name]) for s in SETTINGS if s.newcomers}
    study.write("gain.csv", _csv(units), scale.seeds)
    study.write("gain.png", gain_study_figure(units), scale.seeds)
    study.write("newcomers.png", newcomer_figure(curves), scale.seeds)
    study.write("newcomers.csv", _newcomers_csv(units), scale.seeds)
    with writing(study.out):
        atomic_write(study.out / "gain.md", page(rows, curves, units) + study.footer(scale.seeds))
    return rows


def _recorded(study: Study, setting: Setting, seed: int, scale: Scale) -> Unit:
    """A unit of the study, measured once and kept under a name made of everything that determines it."""
    run = setting.run(seed, scale=scale)
    other = setting.run(seed, scale=scale, pfedme=True)
    rows = NEWCOMER_ROWS if setting.newcomers else ()
    menu = [candidate.label for candidate in candidates(setting.how, shifted=True)]
    what = [run.digest(), other.digest(), to_json(scale.how(setting.how)), menu, rows, __version__]
    what += ["intervals over newcomers"] if rows else []
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    path = study.runs / f"gain-{digest}.json"
    if path.exists():
        try:
            return json.loads(path.read_text())
        except ValueError:
            path.unlink()  # damaged; it is measured again
    unit = measure(setting, seed, scale)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(unit))
    return unit


@dataclasses.dataclass(frozen=True)
class Row:
    """A federation's row in the table: means over seeds, in percent and points."""

    setting: Setting
    mean: dict[str, float]
    worst: dict[str, float]
    harmed: float
    over_alone: Estimate
    over_global: Estimate

    @classmethod
    def of(cls, setting: Setting, units: Sequence[Unit]) -> Row:
        """The row from one unit per seed."""

        def values(name: str, measure: str) -> list[float]:
            return [100 * unit["methods"][name][measure] for unit in units]

        def gap(name: str) -> Estimate:
            pairs = zip(values("recommended", "mean"), values(name, "mean"), strict=True)
            return Estimate.of([a - b for a, b in pairs])

        methods = list(units[0]["methods"])
        return cls(
            setting,
            {name: float(np.mean(values(name, "mean"))) for name in methods},
            {name: float(np.mean(values(name, "worst_decile"))) for name in methods},
            float(np.mean(values("recommended", "harmed"))),
            gap("alone"),
            gap("global"),
        )

    @property
    def best(self) -> str:
        """The best single method, chosen in hindsight on test rows."""
        single = {
            name: value for name, value in self.mean.items() if name not in ("recommended", "own-lambda")
        }
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


def _csv(units: dict[str, list[Unit]]) -> str:
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


def _newcomers_csv(units: dict[str, list[Unit]]) -> str:
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


def _mean_levels(units: Sequence[Unit]) -> list[Level]:
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


def page(rows: Sequence[Row], curves: dict[str, list[Level]], units: dict[str, list[Unit]]) -> str:
    """The content of docs/gain.md: when personalized federation pays, when not, and how to tell."""
    methods = ("alone", "global", "label-prior", "fine-tuned", "pfedme", "own-lambda", "recommended")
    table = markdown(
        ["federation", *methods, "over alone", "over global", "worst tenth: alone, global, recommended",
         "harmed %"],
        [
            [f"{r.setting.name}: {r.setting.about}", *(f"{r.mean[m]:.1f}" for m in methods),
             _points(r.over_alone), _points(r.over_global),
             ", ".join(f"{r.worst[m]:.1f}" for m in ("alone", "global", "recommended")), f"{r.harmed:.1f}"]
            for r in rows
        ],
    )  # fmt: skip
    by_name = {row.setting.name: row for row in rows}
    pays = [row for row in rows if row.pays]
    nothing = [row for row in rows if abs(row.over_alone.mean) < 1]
    level = [row for row in rows if abs(row.over_global.mean) < 1]
    furthest = max(rows, key=lambda row: row.behind)
    most_harmed = max(rows, key=lambda row: row.harmed)

    def listed(some: Sequence[Row], show: Callable[[Row], str]) -> str:
        return "; ".join(f"{row.setting.about} ({show(row)})" for row in some) or "none of them"

    few, many = by_name["mnist-0.3-few"], by_name["mnist-0.3-many"]
    newcomers = "\n".join(
        f"- {by_name[name].setting.about}: {_newcomers(own)}" for name, own in curves.items()
    )
    share = {name: np.mean([c == "alone" for u in own for c in u["chosen"]]) for name, own in units.items()}
    most = sorted(share, key=lambda name: -share[name])[:3]
    lonely = [f"{100 * share[name]:.0f} % choose alone on {by_name[name].setting.about}" for name in most]
    return f"""\
# When does joining pay?

A client that joins a federation can end up with one of several models: the unchanged shared model, the shared
model with the client's own label frequencies, the shared model fine-tuned on its own rows, a personal model
near one of the first two (λ sets how near), or, if joining does not help, the model it would have had alone.
This page measures what each is worth on {len(rows)} federations, from similar clients to clients that have
nothing in common, with few and many rows.
*Recommended* is the model that each client chooses for itself on rows that it has held out
(`--personalize auto`); test rows are read once, after all choices. Numbers are percent of a client's test
rows, means over clients and {rows[0].over_alone.seeds} seeds, with 95 % intervals over seeds.

{table}
*label-prior* is the shared model (FedAvg's) with log π_i − log π in its logits, where π_i are the client's
label frequencies and π is their mean; *fine-tuned* is the end of the path from the shared
model, λ = 0; *pfedme* is Algorithm 1 with λ = {LAM:g} for all; *own-lambda* is what each client would choose
if alone were not an option. *Harmed* is the share of clients that the recommended model leaves more than a
point below alone, beyond their own 95 % interval. A client has at most the stated number of training rows.
*Alone* uses the number of rounds and the l2 that are best on validation rows. The data of the paper's two
federations is the same for all seeds; the other federations are drawn again for each seed.

![What each client gains over alone and over the global model, and the λ it chose](results/gain.png)

## When it pays

- It pays most if clients have a task in common and too few rows for it. The recommended models beat both
  alone and the global model by two points or more, on average and in the worst tenth of the clients, on
  {len(pays)} of {len(rows)} federations: {listed(pays, _gains)}.
- With more rows it pays less. On MNIST with Dirichlet(0.3), joining is worth {few.over_alone.mean:.1f} points
  with 50 training rows and {many.over_alone.mean:.1f} with 400.

## When it does not

- If each client has its own task and enough rows for it, joining gains nothing: the recommended models are
  within a point of alone on {listed(nothing, lambda r: f"{r.over_alone.mean:+.1f}")}.
- If clients are similar, personalization gains nothing, and the global model is as good: within a point on
  {listed(level, lambda r: f"{r.over_global.mean:+.1f}")}.
- Choosing costs little. Compared with the best single method in hindsight, the recommended models lose at
  most {furthest.behind:.1f} points ({furthest.setting.about}, where {furthest.best} is best), and at most
  {most_harmed.harmed:.1f} % of clients are harmed ({most_harmed.setting.about}).
- Clients that are better off alone find out: {", ".join(lonely)}.

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
