"""Figures of what joining is worth to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfedme.engine.personalized import Candidate
from pfedme.report.figures import COLOURS, DASHES, dress, png

if TYPE_CHECKING:
    from pfedme.data.federation import Federation
    from pfedme.engine.personalized import Personalized
    from pfedme.personalization.finished import Level

LINES = {
    name: place
    for place, name in enumerate(
        ("recommended", "alone", "global", "fine-tuned", "given", "label-prior", "cluster")
    )
}
"""The index of each method's colour, dashes and marker."""
MARKERS = "osD^vPX"
EDGE = 60.0
"""The largest gain in points that the figure of the study has room for."""
NAMES = {"given": "pFedMe's λ"}


def gain_figure(found: Personalized, federation: Federation) -> bytes:
    """A PNG: each client's gain over alone and over the global model, and the λ it chose, by its rows."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained", dpi=200)
    left, right = figure.subplots(1, 2)
    rows, what = federation.n_train.astype(float), found.measure
    for place, (name, colour) in enumerate((("alone", COLOURS[0]), ("global", COLOURS[1]))):
        gains = found.gains(name)
        reach = [abs(end - gains.each) for end in gains.ends(what)]
        left.errorbar(
            rows * (1 + 0.02 * place), what.scale * gains.each, np.multiply(what.scale, reach),
            fmt="o^"[place], color=colour, markersize=3, linewidth=0.5, label=f"over {name}",
        )  # fmt: skip
    left.axhline(0, color="0.4", linewidth=0.8)
    unit = what.points.format("").strip() or f"in {what.name}"
    dress(left, "", "training rows of a client", f"gain ({unit})", "")
    left.legend(frameon=False, fontsize=8)
    chosen_lam(right, rows, [found.candidates[k] for k in found.choice])
    for at in (left, right):
        if len(rows) and rows.max() > 5 * rows.min():
            at.set_xscale("log")
    return png(figure)


def chosen_lam(at: Axes, rows: np.ndarray, chosen: Sequence[Candidate]) -> None:
    """The λ of each client against its training rows, on a log scale with places for ∞, 0 and alone."""
    lam, own = np.array([c.lam for c in chosen]), np.array([c.line != "global" for c in chosen], bool)
    alone = np.array([c.name == "alone" for c in chosen], bool)
    own &= ~alone
    finite = lam[(lam > 0) & np.isfinite(lam)]
    low, high = (finite.min() / 10, finite.max() * 10) if len(finite) else (1e-3, 1e3)
    low, high = min(low, 1e-3), max(high, 1e3)
    shown = np.where(lam == 0, low, np.where(np.isinf(lam), high, lam))
    shown = np.where(alone, low / 10, shown)
    spread = np.exp(0.25 * np.random.default_rng(0).uniform(-1, 1, len(shown)))
    for some, mark, colour, label in (
        (~own, "o", COLOURS[2], None), (own, "^", COLOURS[3], "not around the global model"),
    ):  # fmt: skip
        at.scatter(
            rows[some], (shown * spread)[some], s=9, color=colour, alpha=0.6, linewidths=0, marker=mark,
            label=label,
        )  # fmt: skip
    if own.any():
        at.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    at.set_yscale("log")
    ticks = [10.0**k for k in range(int(np.log10(low)) + 1, int(np.log10(high)))]
    names = ["alone", "fine-tuned (0)", *(f"{t:g}" for t in ticks), "global (∞)"]
    at.set_yticks([low / 10, low, *ticks, high], names)
    at.minorticks_off()
    dress(at, "", "training rows of a client", "λ chosen", "")


def gain_study_figure(units: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """A PNG of a study: one row per federation with each client's gain over alone and over the global model;
    below, gain and chosen λ against training rows. Gains beyond ±EDGE points are shown at the edge."""
    figure = Figure(figsize=(9.0, 0.3 * len(units) + 4.2), layout="constrained", dpi=200)
    halves: Any = figure.subfigures(2, 1, height_ratios=[0.3 * len(units) + 0.8, 3.2])
    above, below = halves
    for at, over in zip(above.subplots(1, 2, sharey=True), ("alone", "global"), strict=True):
        for place, own in enumerate(units.values()):
            gains = 100 * np.concatenate([np.asarray(unit["gain"][over]) for unit in own])
            spread = np.random.default_rng(place).uniform(-0.28, 0.28, len(gains))
            colour = COLOURS[0 if over == "alone" else 1]
            at.scatter(
                np.clip(gains, -EDGE, EDGE), place + spread, s=4, color=colour, alpha=0.3, linewidths=0
            )
            at.plot(
                [np.clip(gains.mean(), -EDGE, EDGE)] * 2,
                [place - 0.38, place + 0.38],
                color="black",
                linewidth=1.8,
            )
        at.axvline(0, color="0.4", linewidth=0.8)
        at.set_yticks(range(len(units)), list(units))
        at.set_ylim(len(units) - 0.5, -0.5)
        dress(at, "", f"gain over {over} (points, up to ±{EDGE:g}); bar: mean", "", "")
    left, right = below.subplots(1, 2)
    every = [unit for own in units.values() for unit in own]
    rows = np.concatenate([np.asarray(unit["rows"], float) for unit in every])
    gains = 100 * np.concatenate([np.asarray(unit["gain"]["alone"]) for unit in every])
    chosen = [
        Candidate(name, np.inf if lam is None else lam)
        for unit in every
        for name, lam in zip(unit["chosen"], unit["lam"], strict=True)
    ]
    left.scatter(rows, np.clip(gains, -EDGE, EDGE), s=5, color=COLOURS[0], alpha=0.35, linewidths=0)
    left.axhline(0, color="0.4", linewidth=0.8)
    dress(left, "", "training rows of a client", "gain over alone (points)", "")
    chosen_lam(right, rows, chosen)
    for at in (left, right):
        at.set_xscale("log")
    return png(figure)


def newcomer_figure(curves: Mapping[str, Sequence[Level]]) -> bytes:
    """A PNG with a panel for each federation: newcomers' accuracy, or another metric, against the number of
    their rows."""
    columns = min(4, len(curves))
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(3.0 * columns + 0.6, 2.7 * lines + 0.4), layout="constrained", dpi=200)
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for at, (title, levels) in zip(axes, curves.items(), strict=False):
        what = levels[0].measure
        for name, place in LINES.items():
            if not all(name in level.methods for level in levels):
                continue
            means = [level.methods[name]["mean"] for level in levels]
            values = [np.nan if mean is None else what.scale * mean for mean in means]
            at.plot(
                [level.rows for level in levels], values, color=COLOURS[place], linestyle=DASHES[place],
                marker=MARKERS[place], markersize=3.2, linewidth=1.3, label=NAMES.get(name, name),
            )  # fmt: skip
        at.set_xscale("log")
        at.set_xticks([level.rows for level in levels], [str(level.rows) for level in levels])
        at.minorticks_off()
        dress(at, "", "training rows of a newcomer", what.axis, title)
    for at in axes[len(curves) :]:
        at.set_visible(False)
    lines_of = {
        label: line for at in axes for line, label in zip(*at.get_legend_handles_labels(), strict=True)
    }
    order = [NAMES.get(name, name) for name in LINES if NAMES.get(name, name) in lines_of]
    figure.legend(
        [lines_of[name] for name in order],
        order,
        loc="outside upper center",
        ncols=6 if columns > 1 else 2,
        frameon=False,
        fontsize=8.5,
        handlelength=3,
    )
    return png(figure)
