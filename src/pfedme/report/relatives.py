"""Figures that compare many methods on several federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pfedme.report.figures import COLOURS, dress, png

SCALE = 15.0
"""Points at which the colours of the heat map end."""


class Point(NamedTuple):
    """A method's cost and accuracy."""

    method: str
    gradients: float
    accuracy: float
    """In percent."""


def heat_map(
    methods: Sequence[str], federations: Sequence[str], accuracy: np.ndarray, alone: np.ndarray
) -> bytes:
    """A PNG with the accuracy in percent of every method (row) on every federation (column); colours show how
    far it is above or below `alone`. Cells that are NaN stay empty."""
    figure = Figure(
        figsize=(2.4 + 1.25 * len(federations), 1.6 + 0.24 * len(methods)), layout="constrained", dpi=200
    )
    at = figure.subplots()
    gap = accuracy - alone
    drawn = at.imshow(gap, cmap="RdBu", vmin=-SCALE, vmax=SCALE, aspect="auto")
    for row, column in np.argwhere(np.isfinite(accuracy)):
        dark = abs(gap[row, column]) > 0.7 * SCALE
        at.text(
            column, row, f"{accuracy[row, column]:.1f}", ha="center", va="center", fontsize=7.5,
            color="white" if dark else "black",
        )  # fmt: skip
    at.set_xticks(range(len(federations)), federations, rotation=25, ha="right", fontsize=8)
    at.set_yticks(range(len(methods)), methods, fontsize=8)
    at.tick_params(length=0)
    at.spines[:].set_visible(False)
    bar = figure.colorbar(drawn, ax=at, shrink=0.5, extend="both")
    bar.set_label("points above alone", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return png(figure)


def cost_figure(panels: Mapping[str, Sequence[Point]]) -> bytes:
    """A PNG with a panel for each federation: accuracy against gradients. The best method of each cost is
    named."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * lines), layout="constrained", dpi=200)
    axes = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for at, (title, points) in zip(axes, panels.items(), strict=False):
        at.scatter(
            [p.gradients for p in points], [p.accuracy for p in points], s=14, color=COLOURS[0], alpha=0.5,
            linewidths=0,
        )  # fmt: skip
        for point in best_of_each_cost(points):
            at.annotate(
                point.method, (point.gradients, point.accuracy), xytext=(0, 4), textcoords="offset points",
                fontsize=7, ha="center",
            )  # fmt: skip
        at.set_xscale("log")
        costs = sorted({p.gradients for p in points})
        at.set_xticks(costs, [f"{cost:,.0f}" for cost in costs], rotation=60)
        at.minorticks_off()
        at.margins(x=0.12, y=0.15)
        dress(at, "", "gradients of a client", "personal model (%)", title)
    for at in axes[len(panels) :]:
        at.set_visible(False)
    return png(figure)


def best_of_each_cost(points: Sequence[Point]) -> list[Point]:
    """The most accurate of the points with equally many gradients, cheapest first.

    >>> [p.method for p in best_of_each_cost([Point("a", 2, 80), Point("b", 1, 70), Point("c", 2, 75)])]
    ['b', 'a']
    """
    best: dict[float, Point] = {}
    for point in sorted(points, key=lambda p: (p.gradients, p.accuracy)):
        best[point.gradients] = point
    return list(best.values())
