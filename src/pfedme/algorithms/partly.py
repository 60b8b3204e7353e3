"""Partly shared models: FedAvg of some layers, while the others stay with each client.

FedPer keeps the last layers private, LG-FedAvg the first ones, and FedBN the normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from pfedme.algorithms.base import Algorithm, Models, Update, sgd
from pfedme.core.models import Model
from pfedme.core.problem import Problem
from pfedme.core.spec import Count
from pfedme.core.tree import Params, record
from pfedme.errors import InputError


@record
class PartlyShared(Algorithm):
    """R steps of SGD on all parameters; some of them are private, and the server averages the rest."""

    idea: ClassVar = "partly shared"
    personal: ClassVar[str] = "the shared layers with the client's own"
    sends: ClassVar[str] = "the change of the shared layers"
    newcomer: ClassVar[str] = "the shared layers with untrained private ones"
    has_global: ClassVar[bool] = False

    def kept(self, w: Params) -> Params:
        """The private part of a model."""
        raise NotImplementedError

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Params:
        """The shared layers of the initial model."""
        w = first(0)
        return w.without(self.kept(w))

    def init(self, sent: Params, first: Callable[[int], Params]) -> Any:
        """The private layers of the initial model."""
        return self.kept(first(0))

    def client_update(self, key: jax.Array, problem: Problem, body: Params, state: Any, /) -> Update:
        """R steps on all layers; only the change of the shared ones is sent."""
        w = sgd(key, problem, body | state, eta=self.eta, steps=self.R, B=self.B)
        own = self.kept(w)
        return Update(upload=w.without(own) - body, state=own, models=Models(personal=w), info={})

    def answer(self, key: jax.Array, problem: Problem, body: Params, state: Any, /) -> tuple[Models, dict]:
        """The shared layers received with the client's own."""
        return Models(personal=body | state), {}


@record
class FedPer(PartlyShared):
    """R steps of SGD on all layers; the last ones are private, and the server averages the rest."""

    name: ClassVar[str] = "fedper"
    reference: ClassVar[str] = "Arivazhagan et al., 2019"

    private: Count = 1
    """How many layers are private: the last ones, or, with lg-fedavg, the first ones."""

    def kept(self, w: Params) -> Params:
        """The last layers."""
        return w.layers[-self.private :]

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error unless some layers are private and some are shared."""
        layers = len(jax.eval_shape(model.init, jax.random.key(0)).layers)
        if self.private >= layers:
            some = f"{layers} layer{'s' if layers > 1 else ''}"
            raise InputError(
                f"{self.name} keeps {self.private} of a model's layers private and shares the rest, but this "
                f"model has {some}; use a deeper one, such as --model dnn:hidden=100"
                + (f", or at most --private {layers - 1}." if layers > 1 else ".")
            )


@record
class LGFedAvg(FedPer):
    """R steps of SGD on all layers; the first ones are private, and the server averages the rest."""

    name: ClassVar[str] = "lg-fedavg"
    reference: ClassVar[str] = "Liang et al., 2020"

    def kept(self, w: Params) -> Params:
        """The first layers."""
        return w.layers[: self.private]
