"""FedBN: FedAvg of everything but the normalisation, which stays with each client (Li et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import jax

from pfedme.algorithms.partly import FedPer
from pfedme.core.models import Model
from pfedme.core.tree import record
from pfedme.errors import InputError


@record
class FedBN(FedPer):
    """R steps of SGD on all parameters; scales, shifts and statistics of the normalisation are private."""

    name: ClassVar[str] = "fedbn"
    reference: ClassVar[str] = "Li et al., 2021 (FedBN)"

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error if the model has no normalisation."""
        if model.normalisation(jax.eval_shape(model.init, jax.random.key(0))) is None:
            raise InputError(
                "fedbn keeps normalisation private, and this model has none; use --model dnn-bn."
            )
