"""Figures of what privacy costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from pfedme.report.figures import COLOURS, dress, png

MARKS = ("o", "s", "^", "D", "v", "P")


class Curve(NamedTuple):
    """A value for each ε, with the half-width of its interval."""

    label: str
    values: Sequence[float]
    widths: Sequence[float]


def accuracy_figure(epsilons: Sequence[float], panels: Mapping[str, Sequence[Curve]]) -> bytes:
    """A PNG with a panel for each federation: accuracy in percent against ε."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * lines + 0.5), layout="constrained", dpi=200)
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for at, (title, curves) in zip(axes, panels.items(), strict=False):
        for k, curve in enumerate(curves):
            # Side by side, so that intervals do not hide each other.
            place = np.arange(len(epsilons)) + 0.09 * (k - (len(curves) - 1) / 2)
            widths = np.nan_to_num(np.asarray(curve.widths, float))
            at.errorbar(
                place, curve.values, widths, label=curve.label, color=COLOURS[k // 2 if k > 1 else k - 2],
                marker=MARKS[k], markersize=4, linewidth=1.1, elinewidth=0.7, capsize=1.5,
                linestyle="--" if "chosen" in curve.label else "-",
                markerfacecolor="white" if "chosen" in curve.label else None,
            )  # fmt: skip
        _epsilon_axis(at, epsilons)
        dress(at, "", "ε of each row", "test accuracy (%)", title)
    for at in axes[len(panels) :]:
        at.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=8
    )
    return png(figure)


def lam_figure(
    law: tuple[Sequence[float], Sequence[float], Sequence[float]],
    epsilons: Sequence[float],
    best: Sequence[Curve],
) -> bytes:
    """A PNG of the best λ against ε: on quadratics (ε, λ* by the law, and on clients that were drawn), and on
    the federations."""
    figure = Figure(figsize=(8.4, 3.3), layout="constrained", dpi=200)
    left, right = figure.subplots(1, 2)
    at, exact, drawn = law
    left.plot(at, exact, color=COLOURS[0], linewidth=1.2, label="s²/τ²")
    left.plot(at, drawn, "o", color=COLOURS[1], markersize=4, label="best on clients that were drawn")
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xticks(at, [f"{e:g}" for e in at])
    left.xaxis.minorticks_off()
    _plain_numbers(left)
    left.legend(frameon=False, fontsize=8)
    dress(left, "", "ε", "best λ", "quadratics")
    for k, curve in enumerate(best):
        place = np.arange(len(epsilons)) + 0.06 * (k - (len(best) - 1) / 2)
        right.plot(
            place, curve.values, label=curve.label, color=COLOURS[k], marker=MARKS[k], markersize=4,
            linewidth=1.1, alpha=0.9,
        )  # fmt: skip
    right.set_yscale("log")
    _plain_numbers(right)
    _epsilon_axis(right, epsilons)
    right.legend(frameon=False, fontsize=8)
    dress(right, "", "ε of each row", "best λ on validation rows", "MR-MTL on the federations")
    return png(figure)


def _plain_numbers(at: Axes) -> None:
    """1, 2 and 5 times powers of ten on a logarithmic vertical axis."""
    at.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    at.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    at.yaxis.set_minor_locator(NullLocator())


def _epsilon_axis(at: Axes, epsilons: Sequence[float]) -> None:
    """Equal steps from the smallest ε to no noise."""
    at.set_xticks(range(len(epsilons)), ["no noise" if math.isinf(e) else f"{e:g}" for e in epsilons])
