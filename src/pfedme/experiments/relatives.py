"""Which algorithm is good for which federation: all of them compared, and written down."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.experiments import published
from pfedme.experiments.study import Estimate, Study, markdown
from pfedme.experiments.tuned import FLATTER, MAJORITY, METHODS, TRIALS, Entry, Found, Scale, Setting, measure
from pfedme.files import atomic_write, writing
from pfedme.personalization.finished import Watch
from pfedme.report.relatives import Point, cost_figure, heat_map
from pfedme.report.tables import KINDS

GOOD_FOR = {
    "pfedme": "personal models near a shared one, with λ as the only knob",
    "fedavg": "one model for clients that are alike; the reference for cost",
    "per-fedavg": "a shared model from which a single step personalizes",
    "alone": "clients with enough rows of their own; the bar that joining has to clear",
    "fedavg-ft": "personal models without any change to training",
    "pooled": "what one table with all rows would give; not a federation",
    "fedprox": "one model if clients take so many steps that they drift apart",
    "scaffold": "one model for unlike clients, without their drift, at twice the traffic",
    "feddyn": "the same as scaffold with FedAvg's traffic, if clients can keep a state",
    "fedavgm": "one model in fewer rounds, by momentum on the server",
    "fedadam": "one model if coordinates differ in scale, by adaptive steps on the server",
    "fedyogi": "the same as fedadam, with steps that change more slowly",
    "fedadagrad": "the same as fedadam, with steps that only shrink",
    "one-shot": "a single exchange of models",
    "reptile": "a shared model that is a good start for fine-tuning",
    "aruba": "fine-tuning with step sizes that are learned for each coordinate",
    "fedmeta": "one personal step whose sizes are learned",
    "ditto": "a personal model beside FedAvg's, which it leaves as it is",
    "mr-mtl": "personal models tied to their mean, without a separate shared model",
    "l2gd": "the same as mr-mtl with as few exchanges as the pull needs",
    "apfl": "a mixture of an own and a shared model, with a weight that clients learn",
    "mapper": "the same as apfl, with a weight chosen on held-out rows",
    "label-prior": "clients that differ mainly in how often each label occurs, for no gradient more",
    "fedper": "networks whose last layer is each client's own",
    "fedrep": "the same as fedper, with the last layer trained first",
    "fedbabu": "a shared network body, with the last layer trained only at the end",
    "lg-fedavg": "clients whose inputs differ: their first layers are their own",
    "fedbn": "clients whose features differ in scale: only normalisation is their own",
    "ifca": "clients of a few kinds, with a shared model for each kind",
    "mocha": "few clients with related tasks, whose relations are learned; convex models",
    "fedamp": "clients that should learn mostly from those like them",
    "gossip": "clients without a server, smoothed over a graph of similar models",
    "cooperative-sgd": "clients without a server that average with their neighbours",
    "afl": "the client with the largest loss",
    "q-ffl": "clients with large losses, more the larger q is",
}
"""What each algorithm is for, by its idea."""


def study_relatives(study: Study, scale: Scale, watch: Watch = lambda *_: None) -> Found:
    """Carries out whatever is not recorded yet, and writes the table, the figures and the page."""
    claims = published.wishes() if scale.published else []
    total = scale.steps + len(claims)
    found = measure(study, scale, lambda what, step, _: watch(what, step, total))
    for step, wish in enumerate(claims, scale.steps):
        watch(f"published numbers: {wish.run.algorithm.name}", step, total)
        study.carry_out([wish])
    watch("writing", total, total)
    study.write("relatives.csv", table_csv(found.entries), scale.seeds)
    study.write("relatives.png", _heat_map(found), scale.seeds)
    study.write("relatives-cost.png", _costs(found), scale.seeds)
    with writing(study.out):
        text = page(found) + ("\n" + published.section(study) if scale.published else "")
        atomic_write(study.out / "relatives.md", text + study.footer(scale.seeds))
    return found


def table_csv(entries: Sequence[Entry]) -> str:
    """One line for each model of each method, federation and seed; accuracies are fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Entry._fields)
    for e in entries:
        accuracies = [f"{value:.6f}" for value in (e.accuracy, e.worst_decile)]
        table.writerow([e.federation, e.method, e.evaluated, e.seed, *accuracies, e.gradients, e.bytes])
    return text.getvalue()


def ranked(found: Found, federation: str) -> list[str]:
    """The methods on a federation, baselines included, best first."""
    return sorted(found.methods(federation), key=lambda name: -in_use(found, federation, name).mean)


def in_use(found: Found, federation: str, method: str) -> Estimate:
    """The accuracy of the model that clients would use."""
    return Estimate.of(found.values(federation, method, found.in_use(federation, method)))


def leaders(found: Found, federation: str, kind: str | None, field: str = "accuracy") -> list[str]:
    """The method with the best model of a kind (None for the model in use), and then those that cannot be
    told apart from it: the 95 % interval of their difference, paired over seeds, includes zero. Pooled and
    the majority do not compete."""
    rivals = {}
    for name in found.methods(federation):
        values = found.by_seed(federation, name, kind or found.in_use(federation, name), field)
        if values and name not in ("pooled", MAJORITY):
            rivals[name] = values
    if not rivals:
        return []
    first = max(rivals, key=lambda name: float(np.mean([*rivals[name].values()])))

    def level(name: str) -> bool:
        both = rivals[first].keys() & rivals[name].keys()
        gap = Estimate.of([rivals[first][seed] - rivals[name][seed] for seed in both])
        return gap.seeds > 1 and gap.mean <= gap.ci95

    return [first, *(name for name in rivals if name != first and level(name))]


def federation_table(found: Found, setting: Setting) -> str:
    """The table of a federation."""
    name = setting.name
    best = {kind: leaders(found, name, kind) for kind in KINDS}
    least = leaders(found, name, None, "worst_decile")

    def cell(method: str, kind: str, field: str, best: Sequence[str]) -> str:
        values = found.values(name, method, kind, field)
        if not values:
            return "–"
        shown = f"{Estimate.of(values)}" + ("" if len(values) == found.scale.seeds else f" ({len(values)})")
        mark = "" if method not in best else "**" if method == best[0] else "*"
        return f"{mark}{shown}{mark}"

    lines = []
    for method in ranked(found, name):
        entry = found.models[name, method][found.in_use(name, method)][0]
        algorithm = found.chosen.get((name, method))
        lines.append([
            method, *(cell(method, kind, "accuracy", best[kind]) for kind in KINDS),
            cell(method, found.in_use(name, method), "worst_decile", least),
            f"{entry.gradients:,}", f"{entry.bytes / 1e6:,.2f}", settings_text(algorithm),
        ])  # fmt: skip
    header = ["method", "global", "local", "personal", "worst tenth", "gradients", "MB", "chosen"]
    return markdown(header, lines)


def settings_text(algorithm: Algorithm | None) -> str:
    """The settings that were chosen, as options."""
    if algorithm is None:
        return "–"
    names = dict.fromkeys([*algorithm.tuned, *algorithm.steps])
    return ", ".join(f"{name} {getattr(algorithm, name):.3g}" for name in names)


def sentence(found: Found, cls: type[Algorithm]) -> str:
    """What an algorithm is good for: its idea, and what was measured."""
    fair, name = cls.idea == "fair", cls.name
    field = "worst_decile" if fair else "accuracy"
    first, level, behind, kind = [], [], {}, ""
    for setting in found.scale.settings:
        where = setting.name
        if (where, name) not in found.models or cls.pools:
            continue
        kind = found.in_use(where, name)
        best = leaders(found, where, kind, field)
        if name == best[0]:
            first.append(where)
        elif name in best:
            level.append(where)
        else:
            top, own = (np.mean(found.values(where, who, kind, field)) for who in (best[0], name))
            behind[where] = float(top - own)
    what = f"worst tenth of all {kind} models" if fair else f"{kind} model"
    told = [f"the best {what} on {', '.join(first)}"] if first else []
    told += [f"not distinguishable from the best {what} on {', '.join(level)}"] if level else []
    if behind:
        span = " to ".join(
            dict.fromkeys(f"{gap:.1f}" for gap in (min(behind.values()), max(behind.values())))
        )
        closest = min(behind, key=lambda where: behind[where])
        told.append(
            f"{span} points below elsewhere"
            if told
            else f"{span} points below the best {what}, and closest to it on {closest}"
        )
    reference = f" ({cls.reference})" if cls.reference else ""
    return f"- `{name}`{reference}: {'; '.join([GOOD_FOR[name], *told])}."


def summary_table(found: Found) -> str:
    """The best model of each kind on every federation, beside the baselines."""
    lines = []
    for setting in found.scale.settings:
        name = setting.name
        cells = []
        for kind in ("global", "personal"):
            best = leaders(found, name, kind)
            shown = Estimate.of(found.values(name, best[0], kind)) if best else None
            cells.append(f"{best[0]} {shown}" if best else "–")
        baselines = [
            str(in_use(found, name, method)) if (name, method) in found.models else "–"
            for method in (MAJORITY, "alone", "pooled")
        ]
        lines.append([name, *baselines, *cells])
    return markdown(["federation", "majority", "alone", "pooled", "best global", "best personal"], lines)


def page(found: Found) -> str:
    """The content of docs/relatives.md."""
    scale = found.scale
    rounds = " or ".join(map(str, sorted({setting.length(scale) for setting in scale.settings})))
    tables = "\n".join(
        f"### {s.name}\n\n{s.about[0].upper()}{s.about[1:]}; model `{s.model}`, {s.length(scale)} rounds. "
        f"{_missing(found, s)}\n\n{federation_table(found, s)}"
        for s in scale.settings
    )
    over = (
        f"means over {scale.seeds} seeds with 95 % intervals over seeds" if scale.seeds > 1 else "of one seed"
    )
    divisors = {k: " or ".join(f"{value:g}" for value in values) for k, values in FLATTER.items()}
    sentences = "\n".join(sentence(found, cls) for cls in scale.methods)
    return f"""\
# Which algorithm for which federation?

{len(scale.methods)} algorithms on {len(scale.settings)} federations, each tuned on validation rows with the
same budget: {TRIALS} trials for every algorithm on every federation. This page says what each is good for,
what it costs, and how it compares with three baselines: clients that train *alone*, one model trained on the
*pooled* rows of all, and always predicting the *majority* class.

{summary_table(found)}
Accuracies are percent of all clients' test rows, {over}.

![Accuracy of the model in use, coloured by the points above or below alone](results/relatives.png)

## How it was measured

- A trial holds out a fifth of each client's training rows, trains on the rest for as many rounds as the run
  itself ({rounds}), and is judged by its accuracy on the held-out rows: of the personal model if there is
  one, otherwise of the global one. Test rows decide nothing. The best settings are then used to train on all
  training rows, once with each of {scale.seeds} seeds; all trials have seed 0. Federations whose images are
  drawn at random are drawn again for each seed, so that about one in a hundred of the other seeds' test rows
  may have been held out with seed 0; the other federations are the same for all seeds.
- Most algorithms have one main hyperparameter, which takes three values, each with two step sizes. Algorithms
  without one get six step sizes. Step sizes are derived from the curvature L of the clients' losses, divided
  by {divisors[TRIALS]} (by {divisors[2]} if there are two).
- *alone* and *pooled* get more than the others, because they are the bar to clear: besides six step sizes,
  every client chooses its own l2 from seven strengths, and *pooled* takes as many steps as all clients of a
  round together. `l2gd` takes as many steps in a round as the others, on average, and `ifca` has four
  clusters, which are found after a quarter of the rounds. Everything else has its default value, such as 20
  local steps on 20 rows each.
- *Gradients* and *MB* are what a client computes, and what it sends and receives, in the whole run on
  average. Fine-tuning is included, tuning is not.
- In the tables, **bold** is the best of its column, and *italics* cannot be told apart from it: the 95 %
  interval of the difference, paired over seeds, includes zero. *pooled* and *majority* do not compete. *Worst
  tenth* is the mean over the tenth of the clients that does worst, for the personal model or else the global
  one. If training diverged with some seeds, the number of the others is in brackets.

## What each is good for

The idea of each algorithm, and what was measured. Algorithms without personal models are compared with other
global models, and fair ones by the worst tenth of the clients.

{sentences}

## Cost

![Accuracy of the personal model against the gradients of a client](results/relatives-cost.png)

Each point is a method; the best of each cost is named.

## Tables

{tables}
All numbers: [relatives.csv](results/relatives.csv).
"""


def _missing(found: Found, setting: Setting) -> str:
    """Which methods are left out, and why."""
    reasons: dict[str, list[str]] = {}
    for (where, method), why in found.left_out.items():
        if where == setting.name:
            reasons.setdefault(why.replace(method, "it"), []).append(method)
    told = [f"{', '.join(methods)} ({why.rstrip('.')})" for why, methods in reasons.items()]
    return f"Left out: {'; '.join(told)}." if told else "All methods take part."


def _heat_map(found: Found) -> bytes:
    """The accuracy of every method's model in use, in the order of the algorithms."""
    order = [*(cls.name for cls in METHODS), MAJORITY]
    methods = [name for name in order if any(name == method for _, method in found.models)]
    federations = [setting.name for setting in found.scale.settings]

    def mean(where: str, method: str) -> float:
        return in_use(found, where, method).mean if (where, method) in found.models else float("nan")

    accuracy = np.array([[mean(where, method) for where in federations] for method in methods])
    return heat_map(methods, federations, accuracy, np.array([mean(where, "alone") for where in federations]))


def _costs(found: Found) -> bytes:
    """The cost and accuracy of every method with a personal model."""
    return cost_figure({
        setting.name: [
            Point(method, lines["personal"][0].gradients, in_use(found, setting.name, method).mean)
            for (where, method), lines in found.models.items()
            if where == setting.name and "personal" in lines
        ]
        for setting in found.scale.settings
    })  # fmt: skip
