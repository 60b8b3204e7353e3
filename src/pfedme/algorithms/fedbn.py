"""FedBN: FedAvg of everything but the normalisation, which stays with each client (Li et al., 2021)."""

from __future__ import annotations

from typing import ClassVar

import jax

from pfedme.algorithms.partly import PartlyShared
from pfedme.core.models import Model
from pfedme.core.normalised import normalisation
from pfedme.core.tree import Params, record
from pfedme.errors import InputError


@record
class FedBN(PartlyShared):
    """R steps of SGD on all parameters; scales, shifts and statistics of the normalisation are private."""

    name: ClassVar[str] = "fedbn"
    reference: ClassVar[str] = "Li et al., 2021 (FedBN)"

    def kept(self, w: Params) -> Params:
        """The normalisation."""
        return normalisation(w)

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error if the model has no normalisation."""
        if not jax.tree.leaves(self.kept(jax.eval_shape(model.init, jax.random.key(0)))):
            raise InputError(
                "fedbn keeps normalisation private, and this model has none; use --model dnn-bn."
            )
