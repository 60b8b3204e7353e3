"""The differential privacy of a run: what it refuses, and how much noise its clients need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from pfedme.algorithms import Algorithm
from pfedme.core.model import Model
from pfedme.data.federation import Federation
from pfedme.engine.cohorts import check_cohort, draw_cohort
from pfedme.engine.exchange import upload_of
from pfedme.errors import InputError
from pfedme.privacy import clients, rows
from pfedme.privacy.units import Clients

if TYPE_CHECKING:
    from pfedme.runs.run import Run


def private_algorithm(run: Run) -> Algorithm:
    """The algorithm as a private run carries it out, after a check that everything about the run can be
    private."""
    if not run.rounds:
        raise InputError(
            "--dp needs a given number of rounds: 'auto' would choose it on validation rows, outside of the "
            "budget; give --rounds."
        )
    if run.personalize:
        raise InputError(
            "--personalize cannot be combined with --dp: clients would choose their models on rows, outside "
            "of the budget; leave one of them out."
        )
    if run.holdout_clients:
        raise InputError(
            "--holdout-clients cannot be combined with --dp: newcomers would use their rows outside of the "
            "budget; leave one of them out."
        )
    if run.class_weights:
        raise InputError(
            "--class-weights balanced cannot be combined with --dp: the weights are computed from the rows; "
            "leave one of them out."
        )
    if isinstance(run.privacy, Clients):
        clients.check_algorithm(run.algorithm)
        return run.algorithm
    algorithm = rows.with_fixed_choices(run.algorithm)
    rows.check_algorithm(algorithm)
    return algorithm


def evaluated_rounds(rounds: int, every: int) -> np.ndarray:
    """The rounds after which a private run evaluates its models: not before the first, which would spend
    budget on nothing."""
    return np.unique([*range(every, rounds, every), rounds])


def plan(
    run: Run, algorithm: Algorithm, model: Model, federation: Federation, evaluated: np.ndarray
) -> rows.RowPlan | clients.ClientPlan | None:
    """The noise of each client, or that of the server; None if the run is not private. `run` has all its
    defaults.

    `evaluated` are the clients whose models are evaluated: they respond with them after some rounds.
    """
    if run.privacy is None:
        return None
    assert run.cohort is not None
    check_cohort(run.cohort, federation.clients)
    if isinstance(run.privacy, Clients):
        sent = upload_of(algorithm, model, federation.features, federation.clients)
        numbers = sum(leaf.size for leaf in jax.tree.leaves(sent))
        return clients.plan_clients(
            run.privacy, algorithm, federation.clients, run.cohort, run.rounds, numbers
        )
    assert isinstance(run.privacy, rows.Rows)
    return _plan_rows(run, run.privacy, algorithm, federation, run.cohort, evaluated)


def _plan_rows(
    run: Run, privacy: rows.Rows, algorithm: Algorithm, federation: Federation, cohort: int,
    evaluated: np.ndarray,
) -> rows.RowPlan:  # fmt: skip
    """The noise of each client, by how often it uses its rows."""
    assert run.eval_every is not None
    assert algorithm.accesses is not None
    total, rounds = federation.clients, run.rounds
    answers = evaluated_rounds(rounds, run.eval_every)
    takes_part = np.zeros((total, rounds + 1), bool)
    if cohort == total or not algorithm.federated:
        takes_part[:, :rounds] = True
    else:
        by_id = np.argsort(federation.ids, kind="stable")
        for t in range(rounds):
            takes_part[draw_cohort(by_id, cohort, run.seed, t), t] = True
    answered = np.zeros(total, int)
    answered[evaluated] = len(answers)
    if algorithm.accesses.repeats:
        takes_part[np.ix_(evaluated, answers)] = True
    per_round, per_answer, _ = algorithm.accesses.counts(algorithm)
    most = per_round * (rounds + 1) + per_answer * len(answers)
    return rows.plan_rows(
        privacy, algorithm, federation.n_train, takes_part.sum(axis=1), answered,
        name=lambda i: f"Client {federation.name(i)}", longest=most,
    )  # fmt: skip
