"""Personalized federated learning with Moreau envelopes.

From Python, in a few lines:

    import pfedme

    patients = pfedme.Table(path="patients.csv", client="hospital", label="outcome")
    print(pfedme.compare(["pfedme", "fedavg", "alone"], patients))
    result = pfedme.train(pfedme.PFedMe(lam=15.0), patients, personalize="auto", out="runs/patients")
    model = pfedme.model_of("runs/patients", client="Dayton")
    model.save("models/dayton")
    pfedme.load("models/dayton").predict(new_patients)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from pfedme.algorithms import Algorithm, Alone, FedAvg, FedAvgFT, Models, PerFedAvg, PFedMe, Update
    from pfedme.algorithms.base import Cohort, sgd
    from pfedme.api import compare, personalize, train, tune
    from pfedme.core.models import CNN, DNN, MLR, Ensemble, Model, Network, NormalisedDNN
    from pfedme.core.tree import Params, record
    from pfedme.data.fashion import FashionMnist
    from pfedme.data.federation import Federation
    from pfedme.data.mnist import Mnist
    from pfedme.data.synthetic import Synthetic
    from pfedme.data.table import Table
    from pfedme.engine.choices import Personalize
    from pfedme.engine.simulate import Simulation
    from pfedme.errors import InputError, RunError
    from pfedme.export import Predictor, load, model_of

__all__ = [
    "CNN", "DNN", "MLR", "Algorithm", "Alone", "Cohort", "Ensemble", "FashionMnist", "FedAvg", "FedAvgFT",
    "Federation", "InputError", "Mnist", "Model", "Models", "Network", "NormalisedDNN", "PFedMe", "Params",
    "PerFedAvg", "Personalize", "Predictor", "RunError", "Simulation", "Synthetic", "Table", "Update",
    "compare", "load", "model_of", "personalize", "record", "sgd", "train", "tune",
]  # fmt: skip

_HOMES = {
    "pfedme.algorithms": (
        "Algorithm", "Alone", "FedAvg", "FedAvgFT", "Models", "PFedMe", "PerFedAvg", "Update",
    ),
    "pfedme.algorithms.base": ("Cohort", "sgd"),
    "pfedme.api": ("compare", "personalize", "train", "tune"),
    "pfedme.data.fashion": ("FashionMnist",),
    "pfedme.data.federation": ("Federation",),
    "pfedme.data.mnist": ("Mnist",),
    "pfedme.data.synthetic": ("Synthetic",),
    "pfedme.data.table": ("Table",),
    "pfedme.errors": ("InputError", "RunError"),
    "pfedme.core.models": ("CNN", "DNN", "MLR", "Ensemble", "Model", "Network", "NormalisedDNN"),
    "pfedme.engine.choices": ("Personalize",),
    "pfedme.engine.simulate": ("Simulation",),
    "pfedme.export": ("Predictor", "load", "model_of"),
    "pfedme.core.tree": ("Params", "record"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """What is named above, imported when it is first used, so that `pfedme --help` is quick."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'pfedme' has no attribute '{name}'")
