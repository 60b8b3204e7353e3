"""How clients differ, in words and as a picture."""

from __future__ import annotations

from matplotlib.figure import Figure

from pfedme.engine.differences import Differences, Kind, Way
from pfedme.report.figures import COLOURS, png

FOLLOWS: dict[Kind, str] = {
    "none": "One shared model should do: try fedavg.",
    "label skew": "A shared model with each client's label frequencies should do: try label-prior.",
    "feature shift": "One shared model with fine-tuning, or with a normalisation of each client's own, "
    "should do: try fedavg-ft, or fedbn with --model dnn-bn.",
    "a few kinds": "A shared model for each group of clients should do: try ifca.",
    "unlike tasks": "Clients need models of their own: try alone, or pfedme with a small lambda.",
    "cannot tell": "The labels of equal inputs seem to differ between clients, but there are too few rows to "
    "learn more than one rule: compare fedavg, ditto and alone.",
}
"""What follows for the choice of an algorithm."""
LEVEL_OF_QUANTITY = "Clients differ mostly in the level of the quantity: try fedavg-ft or ditto."
"""What follows from label skew if the label is a quantity, for which there is no label-prior."""


def about_difference(found: Differences | None, classes: int) -> list[tuple[str, str]]:
    """The kind of difference, what follows, and the evidence, each with a heading."""
    if found is None:
        return []
    follows = FOLLOWS[found.kind] if classes or found.kind != "label skew" else LEVEL_OF_QUANTITY
    named = {"none": "nothing significant", "cannot tell": "cannot tell"}.get(found.kind, found.kind)
    also = f", and also by {' and '.join(found.also)}" if found.also else ""
    tries = "; ".join(f"{_called(way)} {way.loss:.3f}" for way in found.ways)
    chance = ", ".join(f"{name} p = {test.p:.3g}" for name, test in found.tests.items())
    return [
        ("clients differ by", f"{named}{also}. {follows}"),
        ("loss on unseen rows", f"shared model {found.loss:.3f}; {tries}"),
        ("differences by chance", chance),
    ]


def _called(way: Way) -> str:
    return f"{way.setting:.0f} groups" if way.name == "groups" else way.name


def differences_figure(found: Differences) -> bytes:
    """A PNG of how much lower the loss of each way to serve clients is than the shared model's, with
    95 % intervals; a way that is clearly better is filled."""
    figure = Figure(figsize=(5.6, 0.42 * len(found.ways) + 1.3), layout="constrained", dpi=200)
    at = figure.subplots()
    for place, way in enumerate(found.ways):
        at.barh(
            place, way.gain, xerr=1.96 * way.error, height=0.6, edgecolor=COLOURS[0], capsize=2,
            color=COLOURS[0] if way.clear else "white", error_kw={"linewidth": 1},
        )  # fmt: skip
    names = [f"{_called(way)}\n({way.kind})" for way in found.ways]
    at.set_yticks(range(len(names)), names, fontsize=8)
    at.invert_yaxis()
    at.axvline(0, color="black", linewidth=0.8)
    # A way that is much worse would leave no room for the others.
    most = max(
        [abs(way.gain) + 2 * way.error for way in found.ways if way.gain > 0], default=0.1 * found.loss
    )
    at.set_xlim(-0.6 * most, 1.1 * most)
    at.tick_params(axis="x", labelsize=8)
    at.set_xlabel(f"loss below the shared model's, {found.loss:.3f}, on unseen rows", fontsize=9)
    at.set_title(f"clients differ by: {found.kind}", fontsize=10)
    return png(figure)
