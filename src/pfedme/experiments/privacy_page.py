"""The table, the figures and the page of what privacy costs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pfedme.experiments.privacy_cost import DELTA, FOLDS, Entry, Found, Scale, study_cost
from pfedme.experiments.quadratics import Means
from pfedme.experiments.study import Estimate, Study, markdown
from pfedme.files import atomic_write, writing
from pfedme.personalization.finished import Watch
from pfedme.report.privacy import Curve, accuracy_figure, lam_figure

ALONE, SHARED = "alone", "fedavg"
TITLES = {
    ALONE: "alone",
    SHARED: "FedAvg",
    "mr-mtl": "MR-MTL, λ fixed",
    "mr-mtl-chosen": "MR-MTL, λ chosen",
    "pfedme": "pFedMe, λ fixed",
    "pfedme-chosen": "pFedMe, λ chosen",
}
CHOSEN = "-chosen"
LAW = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""ε at which the law on quadratics is shown."""


def study_privacy(study: Study, scale: Scale, watch: Watch = lambda *_: None) -> Found:
    """Carries out whatever is not kept yet, and writes the table, the figures and the page."""
    found = study_cost(study, scale, watch)
    watch("writing", scale.jobs, scale.jobs)
    law = drawn_law(Means())
    study.write("privacy.csv", table_csv(found.entries), scale.seeds)
    study.write("privacy.png", _accuracies(found), scale.seeds)
    study.write("privacy-lambda.png", _lams(found, law), scale.seeds)
    with writing(study.results):
        atomic_write(study.results / "privacy.md", page(found, law) + study.footer(scale.seeds))
    return found


def table_csv(entries: Sequence[Entry]) -> str:
    """One line for each method, federation, ε and seed; accuracies are fractions."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Entry._fields)
    for e in entries:
        accuracy = "" if math.isnan(e.accuracy) else f"{e.accuracy:.6f}"
        table.writerow([e.federation, e.method, f"{e.epsilon:g}", e.seed, e.evaluated, accuracy])
    return text.getvalue()


class Gain(NamedTuple):
    """Points by which a personal model is above the better of alone and FedAvg."""

    rival: str
    """The better of the two, by its mean over seeds."""
    points: Estimate
    """Paired over seeds."""
    other: Estimate
    """The same above the other of the two."""

    @property
    def verdict(self) -> Literal["better", "worse", "cannot tell"]:
        """Better if both 95 % intervals are above zero; worse if that for the better of the two is below."""
        p = self.points
        if not p.seeds > 1 or not abs(p.mean) > p.ci95:
            return "cannot tell"
        if p.mean < 0:
            return "worse"
        return "better" if self.other.mean > self.other.ci95 else "cannot tell"

    def __str__(self) -> str:
        if math.isnan(self.points.mean):
            return "diverged"
        width = f" ± {self.points.ci95:.1f}" if self.points.seeds > 1 else ""
        shown = f"{self.points.mean:+.1f}{width}"
        return f"**{shown}**" if self.verdict == "better" else shown


def gain(found: Found, federation: str, method: str, epsilon: float, against: float | None = None) -> Gain:
    """What a personal method gains at ε over the better baseline, at the same ε or another one."""
    at = epsilon if against is None else against
    own = found.values(federation, method, epsilon)
    rivals = {name: found.values(federation, name, at) for name in (ALONE, SHARED)}
    rival = max(rivals, key=lambda name: float(np.nan_to_num(np.mean([*rivals[name].values()]), nan=-1.0)))
    gains = {name: Estimate.of([own[s] - theirs[s] for s in own]) for name, theirs in rivals.items()}
    (other,) = rivals.keys() - {rival}
    return Gain(rival, gains[rival], gains[other])


def personal(found: Found) -> list[str]:
    """The methods with personal models near a shared one."""
    return [name for name in found.names if name not in (ALONE, SHARED)]


def shown(epsilon: float) -> str:
    """ε in text."""
    return "no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}"


def federation_table(found: Found, federation: str) -> str:
    """Accuracies in percent of every method at every ε."""
    lines = []
    for epsilon in found.scale.epsilons:
        values = {m: Estimate.of([*found.values(federation, m, epsilon).values()]) for m in found.names}
        top = max(values, key=lambda m: float(np.nan_to_num(values[m].mean, nan=-1.0)))
        cells = [f"**{v}**" if m == top else str(v) for m, v in values.items()]
        lines.append([shown(epsilon), *cells])
    return markdown(["", *(TITLES[m] for m in found.names)], lines)


def gain_table(found: Found) -> str:
    """What personal models gain over the better of alone and FedAvg."""
    lines = []
    for setting in found.scale.settings:
        for epsilon in found.scale.epsilons:
            each = {m: gain(found, setting.name, m, epsilon) for m in personal(found)}
            rival = TITLES[next(iter(each.values())).rival]
            lines.append([setting.name, shown(epsilon), rival, *map(str, each.values())])
    return markdown(["federation", "", "better of the two", *(TITLES[m] for m in personal(found))], lines)


def price_table(found: Found) -> str:
    """What choosing λ costs if every run that is tried counts, and what is left of the gain."""
    finite = [e for e in found.scale.epsilons if math.isfinite(e)]
    lines = []
    for (federation, method, epsilon), price in found.price.items():
        if math.isinf(epsilon):
            continue
        nearest = min(finite, key=lambda e: abs(math.log(e / price)))
        if nearest <= epsilon or price > 1.5 * nearest:
            continue
        left = gain(found, federation, method + CHOSEN, epsilon, nearest)
        title = TITLES[method].partition(",")[0]
        lines.append([
            federation, title, f"{epsilon:g}", f"{price:.2f}", f"{nearest:g}", TITLES[left.rival], str(left)
        ])  # fmt: skip
    header = ["federation", "method", "ε of a run", "ε of all runs", "baselines at ε", "better", "gain"]
    return markdown(header, lines)


def verdict(found: Found, federation: str) -> str:
    """In plain words: where personal models with a fixed λ are better than both baselines."""
    told = []
    for method in (m for m in personal(found) if not m.endswith(CHOSEN)):
        gains = {e: gain(found, federation, method, e) for e in found.scale.epsilons}
        parts = []
        for kind, words in (
            ("better", "beats both"),
            ("worse", "is worse than the better of the two"),
            ("cannot tell", "cannot be told apart from the better of the two"),
        ):
            some = {e: g for e, g in gains.items() if g.verdict == kind}
            if not some:
                continue
            by = ", ".join(
                f"{shown(e)} ({g.points.mean:+.1f} against {TITLES[g.rival]})" for e, g in some.items()
            )
            parts.append(f"{words} at {by}")
        told.append(f"{TITLES[method].partition(',')[0]} {'; it '.join(parts)}.")
    return f"- **{federation}.** " + " ".join(told)


def summary(found: Found) -> str:
    """The verdict over all federations, in a few sentences."""
    sentences = []
    for method in (m for m in personal(found) if not m.endswith(CHOSEN)):
        gains = [
            (s.name, e, gain(found, s.name, method, e))
            for s in found.scale.settings
            for e in found.scale.epsilons
            if math.isfinite(e)
        ]
        wins, losses = ([g for g in gains if g[2].verdict == kind] for kind in ("better", "worse"))
        by = [g.points.mean for _, _, g in wins]
        size = f", by {min(by):.1f} to {max(by):.1f} points" if by else ""
        where = ", ".join(dict.fromkeys(name for name, _, _ in wins))
        level, cases = len(gains) - len(wins) - len(losses), f"{len(gains)} cases with noise"
        found_at = f"{size} ({where})" if where else ""
        sentences.append(
            f"{TITLES[method].replace(',', ' with')} is better than both training alone and FedAvg in "
            f"{len(wins)} of {cases}{found_at}. It is worse than the better of the two in {len(losses)}, and "
            f"{level} cannot be told apart."
        )
    return "\n".join(f"- {sentence}" for sentence in sentences)


def drawn_law(means: Means) -> tuple[list[float], list[float], list[float]]:
    """ε, λ* = s²/τ², and the best λ on clients that were drawn."""
    return list(LAW), [means.best_lam(e) for e in LAW], [means.best_lam_drawn(e, 4000) for e in LAW]


def geometric(values: Sequence[float]) -> float:
    """The geometric mean.

    >>> geometric([1.0, 4.0])
    2.0
    """
    return math.exp(sum(math.log(v) for v in values) / len(values))


def lam_table(found: Found) -> str:
    """The λ that is best on validation rows, for each seed."""
    lines = [
        [federation, TITLES[method].partition(",")[0]]
        + [", ".join(f"{lam:g}" for lam in found.lams[federation, method, e]) for e in found.scale.epsilons]
        for federation, method in dict.fromkeys((f, m) for f, m, _ in found.lams)
    ]
    return markdown(["federation", "method", *map(shown, found.scale.epsilons)], lines)


def trend(found: Found) -> str:
    """Whether the best λ of MR-MTL grows as ε falls."""
    noisiest, quiet = min(found.scale.epsilons), max(found.scale.epsilons)
    told = {}
    for setting in found.scale.settings:
        low, high = (geometric(found.lams[setting.name, "mr-mtl", e]) for e in (noisiest, quiet))
        kind = "grows" if low > high else "falls" if low < high else "stays the same"
        told.setdefault(kind, []).append(f"{setting.name} ({high:.2g} to {low:.2g})")
    return "; ".join(f"it {kind} on {', '.join(names)}" for kind, names in told.items())


def edges(found: Found) -> str:
    """How often the chosen λ is the smallest or the largest that was tried."""
    tried = {method.name: method.lams for method in found.scale.methods}
    lams = [(tried[method], lam) for (_, method, _), own in found.lams.items() for lam in own]
    least, most = (sum(lam == pick(grid) for grid, lam in lams) for pick in (min, max))
    return (
        f"Of {len(lams)} choices, {least} are the smallest λ that was tried and {most} the largest: the grid "
        "is coarse, and the best λ may lie beyond it."
    )


def largest_steps(found: Found) -> str:
    """How often the best step size is the largest that was tried."""
    largest = {setting.name: max(setting.steps) for setting in found.scale.settings}
    count = sum(step == largest[name] for (name, _, _), step in found.steps.items())
    return f"In {count} of {len(found.steps)} cases it is the largest that was tried"


def page(found: Found, law: tuple[list[float], list[float], list[float]]) -> str:
    """The content of docs/results/privacy.md."""
    scale = found.scale
    about = "\n".join(_about(found, s.name, s.about) for s in scale.settings)
    tables = "\n".join(f"### {s.name}\n\n{federation_table(found, s.name)}" for s in scale.settings)
    verdicts = "\n".join(verdict(found, s.name) for s in scale.settings)
    fixed = ", ".join(f"{m.fixed:g} for {TITLES[m.name].partition(',')[0]}" for m in scale.methods if m.lams)
    tried = "; ".join(
        f"{TITLES[m.name].partition(',')[0]}: {', '.join(f'{lam:g}' for lam in m.lams)}"
        for m in scale.methods
        if m.lams
    )
    means, cases = Means(), len(scale.settings) * len(scale.epsilons)
    laws = markdown(
        ["", *(shown(e) for e in law[0])],
        [
            ["s²/τ²", *(f"{lam:.2f}" for lam in law[1])],
            ["best on clients that were drawn", *(f"{lam:.2f}" for lam in law[2])],
        ],
    )
    return f"""\
# What privacy costs

Each client makes its own gradients private, so that everything that leaves it, shared and personal models
alike, is (ε, {DELTA:g})-differentially private in each of its rows. [privacy.md](../privacy.md) describes
how. This page shows what it costs in accuracy, and whether personal models are still worth it.

## The verdict

{summary(found)}

*Better* means that the 95 % intervals of the differences from both, paired over {scale.seeds} seeds, are
above zero; *worse*, that the one from the better of the two is below. Some of {cases} cases may be found by
chance.

{verdicts}

![Accuracy against ε](privacy.png)

Means over seeds with 95 % intervals. Dashed: λ is chosen, which spends budget that these ε leave out.

## Points above the better of alone and FedAvg

{gain_table(found)}
**Bold**: better than both, as above.

## Accuracy

{tables}
Percent of all clients' test rows, with 95 % intervals over seeds; the best of a line is bold. All numbers:
[privacy.csv](privacy.csv).

## λ fixed and λ chosen

λ is fixed before anything is looked at: {fixed}, their defaults. *Chosen* is the λ
with the best accuracy over all clients' validation rows, for each ε and seed (tried: {tried}).
**Choosing spends budget, and ε in the tables above does not include it.** Every λ that is tried is a run of
its own, and an honest ε is that of all of them together. The validation rows are not trained on, but the
accuracies on them are shared without noise, which no ε here covers.

The fair comparison of a chosen λ is with baselines that spend as much on a single run. The table has it
wherever the study has baselines near that ε; *ε of all runs* is computed for all runs together.

{price_table(found)}
## The best λ as ε falls

On quadratics the best λ is s²/τ². s² is the variance of a client's own estimate, from sampling and from the
noise for privacy; τ² is the variance between the clients' true optima. With {means.clients} clients
that estimate means from {means.rows} rows each (σ = {means.sigma:g}, τ = {means.tau:g}, rows clipped to
length {means.clip:g}, one noisy mean each):

{laws}
On the federations, MR-MTL's best λ on validation rows (geometric mean over seeds), from no noise to the
smallest ε: {trend(found)}.

![The best λ against ε](privacy-lambda.png)

The λ that was chosen, for each seed:

{lam_table(found)}
{edges(found)}

## How it was measured

{about}

- Multinomial logistic regression. All clients take part in all {scale.rounds} rounds of {scale.R} private
  mini-batches. pFedMe takes K = {scale.K} gradients on each, and pays for it with √K times the noise, and
  with one round more for its personal models. Every row's gradient is clipped to length 1.
- *No noise* has the same clipping and the same random batches, so that the curves show the noise alone.
- One of {FOLDS} parts of each client's training rows is kept for validation, for all methods alike. Test rows
  decide nothing.
- Every method has the best of {_counts(scale)} step sizes at each ε, chosen on validation rows with seed 0
  and λ fixed. ε does not include that either. All methods have the same number of trials.
  {largest_steps(found)}, so that longer training or larger steps might give more.
- This is the third pass. The grids, of λ and of step sizes, were widened after passes in which choices on
  validation rows were at their ends, and seeds were added because with 3 of them most cases could not be told
  apart; the fixed λ stayed the same. With 3 seeds, MR-MTL with λ fixed was better than both in 2 of 16 cases
  with two step sizes (mnist-dirichlet, +3.2 at ε = 1 and +1.6 at ε = 2), and in none with three.
- Each seed has another split into training and test rows, another first model, other batches and other noise.
- ε is that of a simulation: noise comes from the seed.

Clients have equally many rows, there are few rounds, and the models are small. These numbers show how methods
compare, and not the best accuracy that is possible at an ε.

MR-MTL's authors report results on the School data, exam scores of pupils in London. They are not repeated
here: `pfedme data list` does not have that data. Its `schools` is another set, of scores in a language test.
"""


def _about(found: Found, name: str, about: str) -> str:
    clients, rows, tested = found.clients[name]
    z = ", ".join(f"{found.noise[name, e]:.2f}" for e in found.scale.epsilons if math.isfinite(e))
    return (
        f"- `{name}`: {about}; {clients} clients with {rows} rows to train on, {tested:,} test rows in all. "
        f"Noise multipliers z with one gradient on each batch, from the smallest ε to the largest: {z}."
    )


def _counts(scale: Scale) -> str:
    return " or ".join(map(str, sorted({len(s.steps) for s in scale.settings})))


def _accuracies(found: Found) -> bytes:
    def curve(federation: str, method: str) -> Curve:
        each = [Estimate.of([*found.values(federation, method, e).values()]) for e in found.scale.epsilons]
        return Curve(TITLES[method], [e.mean for e in each], [e.ci95 for e in each])

    panels = {s.name: [curve(s.name, m) for m in found.names] for s in found.scale.settings}
    return accuracy_figure(found.scale.epsilons, panels)


def _lams(found: Found, law: tuple[list[float], list[float], list[float]]) -> bytes:
    epsilons = found.scale.epsilons
    best = [
        Curve(s.name, [geometric(found.lams[s.name, "mr-mtl", e]) for e in epsilons], [])
        for s in found.scale.settings
    ]
    return lam_figure(law, epsilons, best)
