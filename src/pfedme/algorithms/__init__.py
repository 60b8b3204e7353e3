"""The algorithms, one file each. To add one, write its file and its test, and add a line to the list below.
Other packages register theirs by entry points."""

from pfedme.algorithms.afl import AFL
from pfedme.algorithms.alone import Alone, Pooled
from pfedme.algorithms.apfl import APFL
from pfedme.algorithms.aruba import Aruba
from pfedme.algorithms.base import Algorithm, Models, Update
from pfedme.algorithms.cooperative_sgd import CooperativeSGD
from pfedme.algorithms.ditto import Ditto
from pfedme.algorithms.fedamp import FedAMP
from pfedme.algorithms.fedavg import FedAvg
from pfedme.algorithms.fedavg_ft import FedAvgFT
from pfedme.algorithms.fedavgm import FedAvgM
from pfedme.algorithms.fedbabu import FedBABU
from pfedme.algorithms.fedbn import FedBN
from pfedme.algorithms.feddyn import FedDyn
from pfedme.algorithms.fedmeta import FedMeta
from pfedme.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from pfedme.algorithms.fedprox import FedProx
from pfedme.algorithms.fedrep import FedRep
from pfedme.algorithms.gossip import Gossip
from pfedme.algorithms.ifca import IFCA, HypCluster
from pfedme.algorithms.l2gd import L2GD
from pfedme.algorithms.label_prior import LabelPrior
from pfedme.algorithms.mapper import Mapper
from pfedme.algorithms.mocha import Mocha
from pfedme.algorithms.mr_mtl import MRMTL
from pfedme.algorithms.one_shot import OneShot
from pfedme.algorithms.partly import FedPer, LGFedAvg
from pfedme.algorithms.per_fedavg import PerFedAvg
from pfedme.algorithms.pfedme import PFedMe
from pfedme.algorithms.q_ffl import QFFL
from pfedme.algorithms.reptile import Reptile
from pfedme.algorithms.scaffold import Scaffold
from pfedme.core.plugins import Known

OURS: tuple[type[Algorithm], ...] = (
    PFedMe, FedAvg, PerFedAvg, Alone, FedAvgFT, Pooled,
    FedProx, Scaffold, FedDyn, FedAvgM, FedAdam, FedYogi, FedAdagrad, OneShot, Reptile, Aruba, FedMeta,
    Ditto, MRMTL, L2GD, APFL, Mapper, LabelPrior,
    FedPer, FedRep, FedBABU, LGFedAvg, FedBN,
    IFCA, HypCluster,
    Mocha, FedAMP, Gossip, CooperativeSGD,
    AFL, QFFL,
)  # fmt: skip
ALGORITHMS = Known[Algorithm]("algorithms", {cls.name: cls for cls in OURS}, Algorithm)

__all__ = [
    "AFL",
    "ALGORITHMS",
    "APFL",
    "IFCA",
    "L2GD",
    "MRMTL",
    "QFFL",
    "Algorithm",
    "Alone",
    "Aruba",
    "CooperativeSGD",
    "Ditto",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedDyn",
    "FedMeta",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedYogi",
    "Gossip",
    "HypCluster",
    "LGFedAvg",
    "LabelPrior",
    "Mapper",
    "Mocha",
    "Models",
    "OneShot",
    "PFedMe",
    "PerFedAvg",
    "Pooled",
    "Reptile",
    "Scaffold",
    "Update",
]
