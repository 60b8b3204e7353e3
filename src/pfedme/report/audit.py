"""Pictures of an audit: recovered rows, ROC curves, canaries' scores, and ε measured beside ε claimed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pfedme.report.figures import COLOURS, DASHES, dress, png

COLUMNS = 24
"""At most this many columns of a table are drawn."""


def pictures(document: dict[str, Any]) -> dict[str, bytes]:
    """The PNGs of an audit, by file name."""
    found = {
        "rows.png": rows_figure(document),
        "membership.png": membership_figure(document["membership"]),
        "canaries.png": canaries_figure(document),
        "epsilon.png": epsilon_figure(document),
    }
    return {name: content for name, content in found.items() if content}


def best_upload(document: dict[str, Any]) -> dict[str, Any] | None:
    """The upload that gave away the most: the closest guess."""
    with_guesses = [part for part in document["upload"] if part["pairs"]]
    return min(with_guesses, key=lambda part: part["error"]) if with_guesses else None


def rows_figure(document: dict[str, Any]) -> bytes | None:
    """True rows beside the guesses that come closest: images, or columns of a table."""
    best = best_upload(document)
    if best is None:
        return None
    pairs, shape = best["pairs"], document["shape"]
    if len(shape) >= 2:
        return png(_images(pairs, shape))
    return png(_columns(pairs, document["columns"]))


def _images(pairs: Sequence[dict[str, Any]], shape: Sequence[int]) -> Figure:
    figure = Figure(figsize=(1.25 * len(pairs) + 0.7, 3.0), layout="constrained", dpi=200)
    axes = figure.subplots(2, len(pairs), squeeze=False)
    for k, pair in enumerate(pairs):
        row = np.reshape(pair["row"], shape)
        for at, image in ((axes[0, k], row), (axes[1, k], np.reshape(pair["guess"], shape))):
            at.imshow(image, cmap=None if len(shape) == 3 else "gray", vmin=row.min(), vmax=row.max())
            at.set_xticks([])
            at.set_yticks([])
        axes[1, k].set_xlabel(f"error {pair['error']:.2g}", fontsize=8)
    axes[0, 0].set_ylabel("true row", fontsize=9)
    axes[1, 0].set_ylabel("recovered", fontsize=9)
    return figure


def _columns(pairs: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    features = len(pairs[0]["row"])
    shown = min(features, COLUMNS)
    labels = [_short(name) for name in names[:shown]] or [f"x{k}" for k in range(shown)]
    across = min(3, len(pairs))
    down = -(-len(pairs) // across)
    figure = Figure(figsize=(2.6 * across + 1.2, (0.17 * shown + 0.9) * down), layout="constrained", dpi=200)
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    for at in axes.ravel()[len(pairs) :]:
        at.set_visible(False)
    place = np.arange(shown)
    for at, pair in zip(axes.ravel(), pairs, strict=False):
        row, guess = (np.asarray(pair[name][:shown]) for name in ("row", "guess"))
        reach = 1.3 * np.abs(row).max() + 0.5
        at.scatter(row, place, s=26, facecolors="none", edgecolors=COLOURS[0], label="true row")
        at.scatter(np.clip(guess, -reach, reach), place, s=9, color=COLOURS[1], label="recovered")
        dress(at, "", "", "", f"client {pair['client']}, error {pair['error']:.2g}")
        at.set_yticks(place, labels, fontsize=7)
    axes[0, 0].invert_yaxis()
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _short(text: str, most: int = 22) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def membership_figure(found: dict[str, Any]) -> bytes | None:
    """ROC curves of membership inference, on linear and on logarithmic axes."""
    if not found:
        return None
    figure = Figure(figsize=(7.2, 3.2), layout="constrained", dpi=200)
    axes = figure.subplots(1, 2)
    for k, (kind, one) in enumerate(found.items()):
        false, true = (np.asarray(one["curve"][name]) for name in ("false", "true"))
        label = f"{kind} model{'' if kind == 'global' else 's'}, AUC {one['auc']:.3f}"
        for at in axes:
            at.plot(false, true, color=COLOURS[k], linestyle=DASHES[k], linewidth=1.4, label=label)
    least = 1 / max(one["rows"] for one in found.values())
    for at, title in zip(axes, ("all thresholds", "few false positives"), strict=True):
        at.plot([least, 1], [least, 1], color="#888888", linewidth=0.9, linestyle=":", label="guessing")
        dress(at, "", "false positives", "true positives", title)
    axes[1].set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    return png(figure)


def canaries_figure(document: dict[str, Any]) -> bytes:
    """How the scores of canaries that were included differ from those of the others."""
    panels = {"canaries in this run": document["canaries"]}
    if document["worst_case"]:
        panels["given to the mechanism directly"] = document["worst_case"]
    figure = Figure(figsize=(7.2, 2.9), layout="constrained", dpi=200)
    axes = figure.subplots(1, 2)
    axes[1].set_visible(len(panels) > 1)
    for at, (title, one) in zip(axes, panels.items(), strict=False):
        _histograms(at, one["scores"])
        dress(at, "", "score", "canaries", title)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize=8.5)
    return png(figure)


def _histograms(at: Axes, scores: dict[str, Sequence[float]]) -> None:
    everything = np.concatenate([scores["included"], scores["excluded"]])
    low, high = np.quantile(everything, [0.005, 0.995])
    edges = np.linspace(low, high if high > low else low + 1, 36)
    for k, kind in enumerate(("excluded", "included")):
        values = np.clip(scores[kind], edges[0], edges[-1])
        at.hist(values, edges, alpha=0.6, color=COLOURS[k], label=kind, hatch="" if k else "//")


def epsilon_figure(document: dict[str, Any]) -> bytes:
    """The lower bounds on ε beside the claim."""
    bounds = {"canaries in this run": document["canaries"]["epsilon"]}
    if document["worst_case"]:
        bounds["given to the mechanism directly"] = document["worst_case"]["epsilon"]
    figure = Figure(figsize=(7.2, 0.45 * len(bounds) + 1.3), layout="constrained", dpi=200)
    at = figure.subplots()
    for k, value in enumerate(bounds.values()):
        at.barh(k, value, color=COLOURS[0], height=0.55)
        at.text(value, k, f" at least {value:.2f}", va="center", fontsize=8.5)
    at.set_yticks(range(len(bounds)), list(bounds), fontsize=8.5)
    claim = document["claim"]
    if claim:
        at.axvline(claim["epsilon"], color=COLOURS[1], linewidth=1.6)
        at.set_title(f"the line is the claim, ε = {claim['epsilon']:g}", fontsize=9)
    else:
        at.set_title("the run claims nothing (ε = ∞)", fontsize=9)
    dress(at, "", "ε", "", at.get_title())
    at.set_xlim(0, 1.25 * max(*bounds.values(), claim["epsilon"] if claim else 0.5, 0.5))
    return png(figure)
