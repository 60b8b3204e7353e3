"""What a run costs: the gradients that clients compute and the bytes that are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfedme.algorithms import Algorithm, PerFedAvg, PFedMe

if TYPE_CHECKING:
    from pfedme.runs.run import Run


def gradients(algorithm: Algorithm) -> int:
    """Mini-batch gradients that a client computes in a round; a Hessian-vector product counts as two."""
    if isinstance(algorithm, PFedMe):
        return algorithm.R * algorithm.K
    if isinstance(algorithm, PerFedAvg):
        return algorithm.R * {"exact": 4, "difference": 4, "first-order": 2}[algorithm.hessian]
    return algorithm.R


def bytes_sent(run: Run, size: int) -> int:
    """What all rounds send: a model of `size` numbers in float32 to each client of the cohort, and back.

    >>> from pfedme.algorithms import FedAvg
    >>> from pfedme.data import parse_data
    >>> from pfedme.models import parse_model
    >>> from pfedme.run import Run
    >>> run = Run(
    ...     algorithm=FedAvg(), data=parse_data("synthetic"), model=parse_model("mlr"), rounds=10, cohort=5
    ... )
    >>> bytes_sent(run, size=100)
    40000
    """
    return run.rounds * (run.cohort or 0) * 2 * 4 * size if run.algorithm.has_global else 0
