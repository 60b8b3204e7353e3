"""The algorithms, one file each. To add one, write its file and its test, and add a line to the list below.
Other packages register theirs by entry points."""

from pfedme.algorithms.alone import Alone, Pooled
from pfedme.algorithms.base import Algorithm, Models, Update
from pfedme.algorithms.fedavg import FedAvg
from pfedme.algorithms.fedavg_ft import FedAvgFT
from pfedme.algorithms.per_fedavg import PerFedAvg
from pfedme.algorithms.pfedme import PFedMe
from pfedme.core.plugins import Known

ALGORITHMS = Known[Algorithm](
    "algorithms",
    {cls.name: cls for cls in (PFedMe, FedAvg, PerFedAvg, Alone, FedAvgFT, Pooled)},
    Algorithm,
)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Alone",
    "FedAvg",
    "FedAvgFT",
    "Models",
    "PFedMe",
    "PerFedAvg",
    "Pooled",
    "Update",
]
