"""The figure of the theorems."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from pfedme.experiments.theory.clients import NU
from pfedme.experiments.theory.measured import (
    Measured,
    Row,
    power,
)
from pfedme.report.figures import COLOURS, DASHES


class Line(NamedTuple):
    """A series of rows in a panel; the legend has its fitted exponent and the paper's, if there is one."""

    quantity: str
    label: str
    rate: float | None = None


class Panel(NamedTuple):
    """A panel of the figure: its title, axes and lines."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    bounds: str = ""
    """The label of the dotted lines of the bounds; empty for none."""
    log: bool = True


ERROR, SQUARE, RATE = "F(w̄$_T$) − F*", "mean ‖∇F(w$_t$)‖²", "paper's rate"
PANELS = (
    Panel("Lemma 1: mini-batch", "|D|", "δ²", (
        Line("δ² against |D|, strongly convex", "strongly convex", -1),
        Line("δ² against |D|, nonconvex", "nonconvex", -1),
    ), "bounds"),
    Panel("Lemma 1: inner tolerance", "ν", "δ²", (
        Line("δ² against ν, strongly convex", "strongly convex", 1),
        Line("δ² against ν, nonconvex", "nonconvex", 1),
    ), "bounds"),
    Panel("Theorem 1: linear phase, floor", "round t", "F(w$_t$) − F*", (
        Line("F(w_t) − F* against t", "η̃ = η̂$_1$, γ$_f$ = 1"),
    ), "λ²δ²/μ$_F$", False),
    Panel("Theorem 1: the floor", "η̃ = ηβR", "floor of F − F*", (
        Line("floor against η̃, noise", "noise, γ$_f$ = 1", 0),
        Line(f"floor against η̃, ν = {NU:g}", f"no noise, ν = {NU:g}", 0),
    ), "λ²δ²/μ$_F$"),
    Panel("Corollary 1: rounds", "T / ln T", ERROR, (
        Line("drift against T", "drift", -2),
        Line("sampling against T, S = N/4", "sampling", -1),
        Line("noise against T, β = N√R", "noise", -2),
    )),
    Panel("Corollary 1: cohort", "(N/S − 1) / (N − 1)", ERROR, (
        Line("sampling against (N/S − 1)/(N − 1), N = 16", "N = 16, S = 2, 4, 8", 1),
        Line("sampling against (N/S − 1)/(N − 1), S = N/2", "S = N/2, N = 4, 8, 16", 1),
    )),
    Panel("Corollary 1: β = N√R", "N or R", ERROR, (
        Line("drift against N, β = N√R", "drift, N", -2),
        Line("drift against R, β = N√R", "drift, R", -2),
        Line("noise against N, β = N√R", "noise, N", -2),
        Line("noise against R, β = N√R", "noise, R", -2),
    )),
    Panel("Theorem 2: rounds", "T", SQUARE, (
        Line("‖∇F‖² against T, η̃ = η̂_2", "η̃ = η̂$_2$", -1),
        Line("‖∇F‖² against T, S = N", "larger steps, S = N", -2 / 3),
        Line("‖∇F‖² against T, S = 1", "larger steps, S = 1", -1 / 2),
    )),
    Panel("Corollary 2", "β, N or R", SQUARE, (
        Line("‖∇F‖² against β", "β", -4 / 3),
        Line("‖∇F‖² against N, β = √N R^¼", "N, β = √N R$^{¼}$", -2 / 3),
        Line("‖∇F‖² against R, β = √N R^¼", "R, β = √N R$^{¼}$", -2 / 3),
    )),
)  # fmt: skip


def figure(findings: Sequence[Measured]) -> bytes:
    """A PNG of the measurements, with fitted exponents and the paper's rates."""
    found = {line.quantity: [r for f in findings for r in f.rows if r.quantity == line.quantity]
             for panel in PANELS for line in panel.lines}  # fmt: skip
    sheet = Figure(figsize=(8.4, 8.2), layout="constrained", dpi=200)
    for at, panel in zip(np.ravel(sheet.subplots(3, 3)), PANELS, strict=True):
        shown = [line for line in panel.lines if found[line.quantity]]
        for k, line in enumerate(shown):
            _draw(at, found[line.quantity], line, panel, k)
        _dress(at, panel)
    image = io.BytesIO()
    sheet.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _draw(at: Axes, rows: Sequence[Row], line: Line, panel: Panel, k: int) -> None:
    """A series with its interval, its bound, and the paper's rate through its first point."""
    x, y, low, high, bound = (np.array([getattr(r, name) for r in rows]) for name in Row._fields[2:])
    colour, label, dash = COLOURS[k], line.label, (DASHES[0], DASHES[1], DASHES[3], DASHES[4])[k]
    if line.rate is not None:
        label += f": {power(x.tolist(), y[:, None]).value:.2f} (paper {_rate(line.rate)})".replace("-", "−")
    marker = "" if len(x) > 10 else "os^D"[k]
    at.plot(x, y, color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.2, label=label)
    at.fill_between(x, np.maximum(low, y / 10), high, color=colour, alpha=0.2, linewidth=0)
    if panel.bounds:
        name = panel.bounds if k == 0 else None
        at.plot(x, bound, color=colour, linestyle=":", linewidth=1.1, label=name)
    elif line.rate is not None:
        path, name = y[0] * (x / x[0]) ** line.rate, RATE if k == 0 else None
        at.plot(x, path, color="0.5", linestyle=":", linewidth=1, label=name, zorder=1)


def _rate(rate: float) -> str:
    """An exponent as the paper writes it."""
    return {-2 / 3: "−2/3", -4 / 3: "−4/3", -1 / 2: "−1/2"}.get(rate, f"{rate:g}")


def _dress(at: Axes, panel: Panel) -> None:
    """Sets the scales, labels and legend, with room for the legend above the lines."""
    at.set_yscale("log")
    if panel.log:
        at.set_xscale("log")
    handles, labels = at.get_legend_handles_labels()
    bottom, top = np.log10(at.get_ylim())
    at.set_ylim(10**bottom, 10 ** (bottom + (top - bottom) / (0.97 - 0.07 * len(labels))))
    for axis in (at.xaxis, at.yaxis):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log" and high < 60 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
    at.set_xlabel(panel.x, fontsize=8)
    at.set_ylabel(panel.y, fontsize=8)
    at.set_title(panel.title, fontsize=9)
    at.tick_params(which="both", labelsize=7)
    at.grid(alpha=0.3, linewidth=0.5)
    at.spines[["top", "right"]].set_visible(False)
    order = np.argsort([label in (panel.bounds, RATE) for label in labels], kind="stable")
    at.legend(
        [handles[k] for k in order], [labels[k] for k in order],
        fontsize=6.3, frameon=False, loc="upper right", handlelength=3, labelspacing=0.3,
    )  # fmt: skip
