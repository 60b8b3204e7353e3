"""Personalized federated learning with Moreau envelopes.

From Python, in a few lines:

    import pfedme

    patients = pfedme.Table(path="patients.csv", client="hospital", label="outcome")
    result = pfedme.train(pfedme.PFedMe(lam=15.0), patients, rounds=100, out="runs/patients")
    model = pfedme.model_of("runs/patients", client="Dayton")
    model.save("models/dayton")
    pfedme.load("models/dayton").predict(new_patients)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pfedme.algorithms import Alone, FedAvg, FedAvgFT, PerFedAvg, PFedMe
    from pfedme.api import train
    from pfedme.data.table import Table
    from pfedme.errors import InputError, RunError
    from pfedme.predictor import Predictor, load, model_of

__all__ = [
    "Alone", "FedAvg", "FedAvgFT", "InputError", "PFedMe", "PerFedAvg", "Predictor", "RunError", "Table",
    "load", "model_of", "train",
]  # fmt: skip

_HOMES = {
    "pfedme.algorithms": ("Alone", "FedAvg", "FedAvgFT", "PFedMe", "PerFedAvg"),
    "pfedme.api": ("train",),
    "pfedme.data.table": ("Table",),
    "pfedme.errors": ("InputError", "RunError"),
    "pfedme.predictor": ("Predictor", "load", "model_of"),
}


def __getattr__(name: str) -> Any:
    """What is named above, imported when it is first used, so that `pfedme --help` is quick."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'pfedme' has no attribute '{name}'")
