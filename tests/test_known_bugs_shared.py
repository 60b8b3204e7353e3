"""Mistakes that public implementations of the relatives make, or that are easy to make. Each is made here and
is found by the check that our algorithm passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from shared_laws import each
from test_one_shared import (
    check_aruba,
    check_fedadam,
    check_fedavgm,
    check_feddyn,
    check_feddyn_corrects,
    check_fedmeta,
    check_fedprox,
    check_quantised_feddyn_corrects,
    check_quantised_scaffold_corrects,
    check_scaffold,
    check_scaffold_corrects,
)

from pfedme.algorithms import Algorithm, Aruba, FedAdam, FedAvgM, FedDyn, FedMeta, FedProx, Scaffold
from pfedme.algorithms.base import Cohort, Models, Update, sgd
from pfedme.core.problem import ALL_ROWS, Problem
from pfedme.core.spec import NonNegative
from pfedme.core.tree import Params, record

pytestmark = pytest.mark.usefixtures("double_precision_throughout")


@record
class PullsNowhere(FedProx):
    """PFLlib: μ is 0 unless it is given."""

    lam: NonNegative = 0.0


@record
class NormNotSquared(FedDyn):
    """PFLlib: α/2 ‖y − w‖ in place of its square."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, g_i: Params) -> Update:
        def bend(y: Params) -> Params:
            length = jnp.sqrt((y - w) @ (y - w) + 1e-20)
            return self.lam / (2 * length) * (y - w) - g_i

        y = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B, extra=bend)
        return Update(y - w, g_i - self.lam * (y - w), Models(local=y), {})


@record
class SignFlipped(FedDyn):
    """fluke: + ⟨g_i, y⟩ in the client's loss."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, g_i: Params) -> Update:
        update = super().client_update(key, problem, w, -1 * g_i)
        return update._replace(state=update.state + 2 * g_i)


@record
class NeverStored(Scaffold):
    """FL-bench: c_i stays zero."""

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, c_i: Params) -> Update:
        return super().client_update(key, problem, sent, c_i)._replace(state=c_i)


@record
class MeanOfTheCohort(Scaffold):
    """c moves by the mean change of the cohort, as if everyone were in it."""

    def change_of_mean(self, uploads: Any, cohort: Cohort) -> Any:
        return self.combined(uploads, cohort)


@record
class KeepsWhatItMeantToSend(Scaffold):
    """c_i moves by what was sent before the codec added noise."""

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, c_i: Params) -> Update:
        update = super().client_update(key, problem, sent, c_i)
        return update._replace(state=c_i + update.upload[1])


@record
class KeepsItsOwnStep(FedDyn):
    """The same mistake with g_i."""

    def client_update(self, key: jax.Array, problem: Problem, w: Params, g_i: Params) -> Update:
        update = super().client_update(key, problem, w, g_i)
        return update._replace(state=g_i - self.lam * update.upload)


@record
class FirstRoundLost(FedAvgM):
    """fluke: w moves by the momentum of the round before."""

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        w, v = server
        return w + self.beta * v, super().server_update(server, uploads, cohort)[1]


@record
class RateTwice(FedAdam):
    """fluke: the server's step size is applied twice."""

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        w, *moments = super().server_update(server, uploads, cohort)
        return server[0] + self.beta * (w - server[0]), *moments


@record
class BiasCorrected(FedAdam):
    """Flower: √(1 − β₂^(t+1))/(1 − β₁^(t+1)) times the step; here with t = 1."""

    def server_update(self, server: Any, uploads: Params, cohort: Cohort) -> Any:
        w, *moments = super().server_update(server, uploads, cohort)
        factor = (1 - self.beta2**2) ** 0.5 / (1 - self.beta1**2)
        return server[0] + factor * (w - server[0]), *moments


@record
class FirstOrder(FedMeta):
    """The Hessian is left out: ∇f(w − a ∇f(w)) in place of the slope in w."""

    def client_update(self, key: jax.Array, problem: Problem, sent: Any, state: Any) -> Update:
        w, a = sent
        f = problem.loss(ALL_ROWS)
        for _ in range(self.R):
            slope = f.grad(w)
            after = f.grad(w - a.map(jnp.multiply, slope))
            w, a = w - self.eta * after, a + self.eta * slope.map(jnp.multiply, after)
        return Update((w - sent[0], a - sent[1]), state, Models(local=w, personal=w), {})


@record
class CountsFromZero(Aruba):
    """ε²/t^p in place of ε²/(t + 1)^p."""

    def server_update(self, server: Any, uploads: Any, cohort: Cohort) -> Any:
        t, *rest = super().server_update((server[0] - 1, *server[1:]), uploads, cohort)
        return t + 1, *rest


MUTANTS: dict[type[Algorithm], Callable[[Any], None]] = {
    PullsNowhere: check_fedprox,
    NormNotSquared: check_feddyn,
    SignFlipped: check_feddyn_corrects,
    NeverStored: check_scaffold,
    MeanOfTheCohort: check_scaffold_corrects,
    KeepsWhatItMeantToSend: check_quantised_scaffold_corrects,
    KeepsItsOwnStep: check_quantised_feddyn_corrects,
    FirstRoundLost: check_fedavgm,
    RateTwice: check_fedadam,
    BiasCorrected: check_fedadam,
    FirstOrder: check_fedmeta,
    CountsFromZero: check_aruba,
}


@each(MUTANTS, slow=(KeepsItsOwnStep, FirstOrder, CountsFromZero))
def test_a_mistake_is_found(mutant):
    with pytest.raises(AssertionError):
        MUTANTS[mutant](mutant)
