"""Reptile: FedAvg with a small server step, and fine-tuning (Nichol et al., 2018; Jiang et al., 2019)."""

from __future__ import annotations

from typing import ClassVar

from pfedme.algorithms.base import Aggregation
from pfedme.algorithms.fedavg_ft import FedAvgFT
from pfedme.core.spec import Positive
from pfedme.core.tree import record


@record
class Reptile(FedAvgFT):
    """fedavg-ft with w ← w + ε (mean w_i − w), where ε is beta, and equal weights."""

    name: ClassVar[str] = "reptile"
    reference: ClassVar[str] = "Nichol et al., 2018; Jiang et al., 2019"
    tuned: ClassVar = {"beta": (0.25, 0.5, 1.0)}

    beta: Positive = 0.5
    """β (ε in the paper): how far the server moves w towards the mean of the local models."""
    aggregation: Aggregation = "uniform"
    """Weights of the uploads: equal, or proportional to the training rows."""
