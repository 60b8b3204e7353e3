"""Notes on the training of a run: where step sizes, weights and rounds came from, and what would help."""

from __future__ import annotations

from typing import Any

from pfedme.algorithms import Algorithm
from pfedme.data.federation import Federation
from pfedme.training.pilot import TOLERANCE, unlearned_loss

UNEVEN = 3
"""How many times an equal share the largest client must have for a note about weights."""


def still_falling(history: list[dict[str, Any]], federation: Federation) -> bool:
    """Whether the loss on training rows fell in the second half of a run by more than five times the
    improvement that makes doubling the rounds worthwhile; steps of full size make the loss noisy."""
    half = history[-1]["round"] / 2
    before = [entry for entry in history if entry["round"] <= half]
    if not before or half < 1:
        return False
    scale = unlearned_loss(federation.y, federation.classes)
    for kind in ("global", "personal"):
        then, now = (entry.get(kind, {}).get("train_loss") for entry in (before[-1], history[-1]))
        if then is not None and now is not None and then - now > 5 * TOLERANCE * scale:
            return True
    return False


def about_training(auto: dict[str, Any]) -> list[str]:
    """Sentences about how step sizes and rounds were determined."""
    names = {"eta": "η", "alpha": "α"}
    said = []
    if auto["found"]:
        sizes = ", ".join(f"{names.get(name, name)} = {auto['steps'][name]:.3g}" for name in auto["found"])
        said.append(f"Step sizes from the data: {sizes} (curvature L ≈ {auto['L']:.3g}).")
    if auto["retries"]:
        said.append(
            f"Larger steps diverged; these are 1/{4 ** auto['retries']} of what the curvature suggests."
        )
    if auto.get("weights"):
        said.append(about_weights(auto["weights"]))
    rounds = f"{auto['rounds']:,} round{'' if auto['rounds'] == 1 else 's'}"
    if auto["stopped"] == "converged":
        said.append(f"It took {rounds}; more did not lower the loss on validation rows.")
    elif auto["stopped"] == "budget":
        said.append(
            f"The budget of {auto['budget']:,} rounds ended while the loss on validation rows was still "
            "falling; a larger --budget may do better."
        )
    elif auto["improving"]:
        said.append(f"The loss on training rows was still falling when the given {rounds} ended.")
    return said


def weights(algorithm: Algorithm, federation: Federation) -> dict[str, Any] | None:
    """How the clients' uploads are weighted, and the largest client's share of the rows, if it is large; None
    if it is not, or if nothing is uploaded."""
    rows = federation.n_train
    largest = int(rows.argmax())
    share = float(rows[largest] / max(1, rows.sum()))
    if not algorithm.federated or share * len(rows) < UNEVEN:
        return None
    return {"aggregation": algorithm.aggregation, "client": federation.name(largest), "share": share}


def about_weights(weights: dict[str, Any]) -> str:
    """A sentence about how much clients count in the shared model."""
    client, share = weights["client"], f"{100 * weights['share']:.1f} %"
    if weights["aggregation"] == "samples":
        return (
            f"Clients are weighted by rows, so '{client}' alone has {share} of the weight; "
            "--aggregation uniform weights all clients equally."
        )
    return (
        f"Clients are weighted equally, although '{client}' has {share} of all rows; --aggregation samples "
        "weights them by rows."
    )
