"""Curves that are fit for a paper: readable in print and in greyscale."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter

from pfedme.engine.measure import ACCURACY, MEASURES, measure_of
from pfedme.engine.metrics import mean_interval
from pfedme.report.tables import baseline_name

KINDS = ("global", "local", "personal")
History = Sequence[dict[str, Any]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Distinguishable with colour blindness, and by their lightness in greyscale."""
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), "-")


def curves(runs: Mapping[str, Sequence[History]]) -> bytes:
    """A PNG of test accuracy, or another metric, and training loss against rounds.

    `runs` maps an algorithm's name to its histories, one per seed. With one algorithm, its models share the
    panels; with several, each model has its own panels, and `alone` is drawn in all of them. A grey line
    shows the baseline.
    """
    runs = {name: histories for name, histories in runs.items() if histories}
    single = len(runs) <= 1
    kinds = [k for k in KINDS if any(k in h[-1] for histories in runs.values() for h in histories)]
    columns = 2 if single else len(kinds)
    figure = Figure(
        figsize=(7.2, 2.9) if single else (3.0 * columns + 0.4, 5.0), layout="constrained", dpi=200
    )
    axes = figure.subplots(1, 2) if single else figure.subplots(2, columns, squeeze=False, sharey="row")
    last = [history[-1] for histories in runs.values() for history in histories]
    what = next(map(measure_of, last), ACCURACY)
    unlearned = [
        (value, baseline_name(entry))
        for entry in last
        if (value := what.of(entry.get("baseline", {}))) is not None
    ]
    for row, (measure, label) in enumerate(((what.key, what.axis), ("train_loss", "training loss"))):
        for column, kind in enumerate(kinds):
            at: Axes = axes[row] if single else axes[row, column]
            for k, (name, histories) in enumerate(runs.items()):
                own = kind if kind in histories[0][-1] else "personal" if name == "alone" else None
                if own is None:
                    continue
                style = column if single else k
                _line(at, histories, own, measure, kind if single else name, style)
            if measure == what.key:
                for value, name in unlearned[:1]:
                    at.axhline(value, color="#888888", linewidth=0.9, linestyle=":", label=name)
            dress(at, measure, "round", label if single or column == 0 else "", "" if single else kind)
    handles: dict[str, Any] = {}
    for at in np.ravel(axes):
        handles |= dict(zip(*reversed(at.get_legend_handles_labels()), strict=True))
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside upper center", ncols=min(6, len(handles)),
            frameon=False, fontsize=8.5, handlelength=3,
        )  # fmt: skip
    return png(figure)


class Curve(NamedTuple):
    """One line of a figure: a model's accuracy or loss over the rounds of runs that differ in their seed."""

    label: str
    histories: Sequence[History]
    kind: str
    colour: int
    dash: int
    per_round: float = 1.0
    """The length of a round on the horizontal axis."""
    diverged: str = ""
    """Its name in a note on divergence, if one of the runs diverged."""


def panels(
    columns: Mapping[str, Sequence[Curve]],
    x: str = "round",
    measures: Sequence[str] = ("accuracy", "train_loss"),
) -> bytes:
    """A PNG with a panel for each measure of each column of curves, in one row, like the paper's figures."""
    figure = Figure(figsize=(3.1 * len(columns) * len(measures), 3.4), layout="constrained", dpi=200)
    axes = np.atleast_1d(figure.subplots(1, len(columns) * len(measures)))
    places = [(measure, title) for measure in measures for title in columns]
    for at, (measure, title) in zip(axes, places, strict=True):
        for curve in columns[title]:
            _curve(at, curve, measure)
        dress(at, measure, x, ACCURACY.axis if measure == "accuracy" else "training loss", title)
        gone = tuple(dict.fromkeys(curve.diverged for curve in columns[title] if curve.diverged))
        labels = [str(line.get_label()) for line in _zoom(at)]
        off = [label for label in labels if not label.startswith(gone or ("-",))]
        notes = [f"{what}: {', '.join(who)}" for what, who in (("diverged", gone), ("off scale", off)) if who]
        at.annotate(
            "\n".join(notes), (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
        )  # fmt: skip
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(6, len(handles)), frameon=False,
            fontsize=8.5, handlelength=3.2,
        )  # fmt: skip
    return png(figure)


def _curve(at: Axes, curve: Curve, measure: str) -> None:
    """The mean over seeds, up to the round that all of them reached, and a band of one standard deviation."""
    length = min((len(h) for h in curve.histories), default=0)
    scale = 100 if measure == "accuracy" else 1
    values = scale * np.array(
        [[_nan(entry[curve.kind][measure]) for entry in history[:length]] for history in curve.histories]
    )
    if not values.size:
        return
    where = [curve.per_round * entry["round"] for entry in curve.histories[0][:length]]
    colour = COLOURS[curve.colour % len(COLOURS)]
    mean = values.mean(axis=0)
    at.plot(
        where, mean, color=colour, linestyle=DASHES[curve.dash % len(DASHES)], linewidth=1.3,
        label=curve.label, marker="osD^vP*"[curve.colour % 7], markersize=3.2,
        markevery=(2 + curve.colour, max(1, length // 4)),
    )  # fmt: skip
    if len(values) > 1:
        std = values.std(axis=0, ddof=1)
        at.fill_between(where, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def _zoom(at: Axes) -> list[Line2D]:
    """Sets limits that show where the lines end rather than how they begin; returns the lines that are left
    outside because they are far from all others."""
    log = at.get_yscale() == "log"
    ends = {}
    for line in at.lines:
        data = np.asarray(line.get_ydata(), float)
        tail = data[len(data) // 10 :]
        if np.isfinite(tail).any():
            ends[line] = tail[np.isfinite(tail)]
    if not ends:
        return []
    middles = {line: np.median(np.log(tail) if log else tail) for line, tail in ends.items()}
    middle = np.median(list(middles.values()))
    usual = np.median([abs(m - middle) for m in middles.values()])
    off = [line for line, m in middles.items() if abs(m - middle) > 8 * usual > 0]
    shown = np.concatenate([tail for line, tail in ends.items() if line not in off])
    low, high = np.percentile(shown, [2, 98])
    if log:
        at.set_ylim(max(low, 1e-12) / 1.15, high * 1.15)
    elif high > low:
        at.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    return off


def png(figure: Figure) -> bytes:
    """The figure as a PNG, byte for byte the same each time."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _line(at: Axes, histories: Sequence[History], kind: str, measure: str, label: str, style: int) -> None:
    """The mean over seeds, and a band of its 95 % interval if there are several."""
    scale = MEASURES[measure].scale if measure in MEASURES else 1
    rounds = [entry["round"] for entry in histories[0] if kind in entry]
    values = scale * np.array(
        [[_nan(entry[kind].get(measure)) for entry in history if kind in entry] for history in histories]
    )
    colour, dash = COLOURS[style % len(COLOURS)], DASHES[style % len(DASHES)]
    mean = values.mean(axis=0)
    at.plot(rounds, mean, color=colour, linestyle=dash, linewidth=1.4, label=label)
    if len(values) > 1:
        half = np.array([mean_interval(column)[1] for column in values.T])
        at.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.18, linewidth=0)


def _nan(value: float | None) -> float:
    return np.nan if value is None else value


def dress(at: Axes, measure: str, x: str, y: str, title: str) -> None:
    """Sets the labels, grid and scale of a panel in the common style."""
    at.set_xlabel(x, fontsize=9)
    at.set_ylabel(y, fontsize=9)
    at.set_title(title, fontsize=9.5)
    at.tick_params(which="both", labelsize=8)
    at.grid(alpha=0.3, linewidth=0.5)
    at.spines[["top", "right"]].set_visible(False)
    if measure == "train_loss" and all(np.min(line.get_ydata()) > 0 for line in at.lines):
        at.set_yscale("log")
        at.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        at.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
