"""Label prior: FedAvg, corrected for how often each label occurs at a client.

If clients differ only in the frequencies π_i of their labels, Bayes' rule gives client i's model: the shared
model's logits plus log π_i − log π, where π is the mean of the π_i that the shared model was trained under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from pfedme.algorithms.base import Algorithm, Cohort, Models, Update, sgd
from pfedme.core.models import Model
from pfedme.core.problem import Problem
from pfedme.core.spec import Positive
from pfedme.core.tree import Params, record
from pfedme.errors import InputError

FLOOR = 1e-3
"""Added to every frequency in π, so that a label that has not occurred has a finite logarithm."""


@record
class LabelPrior(Algorithm):
    """FedAvg with equal weights; θ_i is w with log π_i − log π added to the biases of its last layer.

    With form=training, a client adds its own log π_i while it trains, so that w is trained under no prior.
    """

    name: ClassVar[str] = "label-prior"
    idea: ClassVar = "near a shared model"
    reference: ClassVar[str] = "Bayes' rule; Menon et al., 2021, for logits with a prior in training"
    sends: ClassVar[str] = "w_i − w, and how often each label occurs in its training rows"
    personal: ClassVar[str] = "w with the client's label frequencies in its logits"
    newcomer: ClassVar[str] = "w with its own label frequencies"
    tuned: ClassVar = {"smoothing": (1.0, 3.0, 10.0)}

    form: Literal["end", "training"] = "end"
    """Where label frequencies enter: when models are used, or already in training."""
    smoothing: Positive = 2.0
    """How many imagined rows with the frequencies π (equal ones, in training) are added to a client's."""

    def check_fit(self, model: Model, clients: int) -> None:
        """Raises an error unless labels are classes and the model has a bias for each."""
        if model.classes == 0:
            raise InputError("label-prior needs classes, not quantities; use --task classification or ditto.")
        if not model.has_class_biases():
            raise InputError("label-prior needs a bias for each class in the last layer; use --model mlr.")

    def begin(self, key: jax.Array, first: Callable[[int], Params], total: int) -> Any:
        """w, equal frequencies π, and t = 0."""
        bias = next(a for a in jax.tree.leaves(first(0).layers[-1:]) if a.ndim == 1)
        return first(0), jnp.full_like(bias, 1 / bias.size), jnp.int32(0)

    def send(self, server: Any, i: jax.Array) -> Any:
        """w and π."""
        return server[:2]

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        """R steps to w_i; w_i − w, and the client's label frequencies, are sent."""
        (w, pi), theta = sent, self.corrected(problem, *sent)
        start = theta if self.form == "training" else w
        change = sgd(key, problem, start, eta=self.eta, steps=self.R, B=self.B) - start
        own = problem.label_counts(len(pi)) / problem.count.astype(pi.dtype)
        return Update((change, own), state, Models(w + change, theta), {})

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        """w as in FedAvg, and π, the mean over all rounds."""
        (w, pi, t), (delta, own) = server, self.combined(uploads, cohort)
        return w + self.beta * delta, pi + (own - pi) / (t + 1).astype(pi.dtype), t + 1

    def shared(self, server: Any, clients: Any) -> Params:
        """w."""
        return server[0]

    def answer(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> tuple[Models, dict]:
        """w with the client's label frequencies in its logits."""
        return Models(personal=self.corrected(problem, *sent)), {}

    def corrected(self, problem: Problem, w: Params, pi: jax.Array) -> Params:
        """w with log π_i − log π in its logits."""
        known = pi + FLOOR if self.form == "end" else jnp.ones_like(pi)
        known = known / jnp.sum(known)
        own = (problem.label_counts(len(pi)) + self.smoothing * known) / (problem.count + self.smoothing)
        shift = jnp.log(own) - jnp.log(known)
        return w.layers[-1:].map(lambda a: a + shift if a.ndim == 1 else a) | w
