"""Relatives of pFedMe that do not fit the model, the clients or the label: status 2 and the cure, from every
command."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from optuna.distributions import CategoricalDistribution
from test_bad_input import refused

import pfedme
from pfedme.algorithms import ALGORITHMS, IFCA, Algorithm, FedPer, LabelPrior, Mocha
from pfedme.core.models import DNN, MLR
from pfedme.core.spec import check
from pfedme.deploy.plan import Plan
from pfedme.errors import InputError
from pfedme.tuning.search import axes

DATA = "--data synthetic:clients=4,rows=40,features=5,classes=3"
TINY = f"{DATA} --rounds 2 --cohort 2 --R 2 --B 5 --out out"
NO_BODY = ["1 of a model's layers private", "this model has 1 layer", "--model dnn:hidden=100"]
NOT_CONVEX = ["mocha is for convex models", "hidden layers", "--model mlr"]
NOT_NORMALISED = ["fedbn keeps normalisation private", "this model has none", "--model dnn-bn"]
FEW_CLIENTS = ["trains 9 models", "clients (4)", "--clusters 4 or fewer"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        # parts of a model that are empty, or everything
        ("fedper --model mlr", ["fedper", *NO_BODY]),
        ("lg-fedavg --model mlr", ["lg-fedavg", *NO_BODY]),
        ("fedrep --model mlr", ["fedrep", *NO_BODY]),
        ("fedbabu --model mlr", ["fedbabu", *NO_BODY]),
        ("fedper --model dnn:hidden=4 --private 2", ["2 of a model's layers", "has 2 layers", "--private 1"]),
        ("lg-fedavg --model dnn:hidden=4-4 --private 7", ["7 of a model's layers", "--private 2"]),
        ("fedper --model dnn --private 0", ["private", "at least 1", "not 0"]),
        ("fedbn --model mlr", NOT_NORMALISED),
        ("fedbn --model dnn", NOT_NORMALISED),
        # models that a method is not for
        ("mocha --model dnn", NOT_CONVEX),
        ("mocha --model dnn-bn", NOT_CONVEX),
        # more clusters than clients
        ("ifca --clusters 9", ["ifca", *FEW_CLIENTS]),
        ("hypcluster --clusters 9", ["hypcluster", *FEW_CLIENTS]),
        ("ifca --clusters 0", ["clusters", "at least 1", "not 0"]),
        # weights outside of [0, 1]
        ("apfl --alpha 1.5", ["alpha", "at most 1", "1.5"]),
        ("apfl --alpha=-0.1", ["alpha", "at least 0", "-0.1"]),
        ("apfl --alpha nan", ["alpha", "finite number", "nan"]),
        ("apfl --adaptive maybe", ["adaptive", "true or false", "maybe"]),
        ("gossip --alpha 1", ["alpha", "below 1", "not 1"]),
        ("mapper --mix 2", ["mix", "at most 1", "not 2"]),
        ("fedamp --mix 1.01", ["mix", "at most 1", "1.01"]),
        ("l2gd --p 1", ["p of", "below 1", "not 1"]),
        # strengths and choices
        ("ditto --lam=-1", ["lam", "at least 0", "-1"]),
        ("l2gd --lam 0", ["lam", "must be positive", "0"]),
        ("label-prior --smoothing 0", ["smoothing", "must be positive", "0"]),
        ("label-prior --form middle", ["form", "'middle'", "end, training"]),
        ("mocha --omega idenity", ["omega", "'idenity'", "learned, mean"]),
        ("cooperative-sgd --graph star", ["graph", "'star'", "ring, full, none"]),
        # what goes with any of them
        ("fedavg --codec fedpaq:levels=0", ["levels of codec", "at least 1", "not 0"]),
        ("fedavg --codec fedpaq:levels=32768", ["levels of codec", "below 32768"]),
        ("ditto --codec zip", ["codec", "'zip'", "fedpaq"]),
        ("ifca --combine modus", ["combine", "'modus'", "mean"]),
    ],
)
def test_a_run_is_refused(line: str, told: list[str], capsys: pytest.CaptureFixture[str]):
    message = refused(capsys, f"run {line} {TINY}")
    for words in told:
        assert words in message


CASES = [
    ("fedper --model mlr", ["fedper", *NO_BODY]),
    ("mocha --model dnn", NOT_CONVEX),
    ("fedbn --model dnn", NOT_NORMALISED),
    ("ifca --clusters 9", ["ifca", *FEW_CLIENTS]),
    ("apfl --alpha 1.5", ["alpha", "at most 1", "1.5"]),
    ("fedavg --codec fedpaq:levels=0", ["levels of codec", "at least 1", "not 0"]),
]


@pytest.mark.parametrize("command", ["compare", "tune"])
@pytest.mark.parametrize(("line", "told"), CASES)
def test_other_commands_refuse_it_too(
    command: str, line: str, told: list[str], capsys: pytest.CaptureFixture[str]
):
    message = refused(capsys, f"{command} {line} {TINY}")
    for words in told:
        assert words in message


@pytest.mark.parametrize(("line", "told"), CASES)
def test_a_server_refuses_it_before_it_waits_for_clients(
    line: str, told: list[str], capsys: pytest.CaptureFixture[str]
):
    message = refused(capsys, f"server --insecure --min-clients 4 --out out --algorithm {line}")
    for words in told:
        assert words in message


def quantities(folder: Path) -> Path:
    """A table whose label is a quantity."""
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"who": ["a", "b"] * 20, "x": rng.normal(size=40), "y": rng.normal(size=40)})
    frame.write_csv(folder / "table.csv")
    return folder / "table.csv"


@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_label_prior_is_for_classes(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    quantities(tmp_path)
    message = refused(
        capsys, f"{command} label-prior --data table.csv --client who --label y --rounds 2 --out out"
    )
    for words in ("label-prior", "not quantities", "--task classification", "ditto"):
        assert words in message


@pytest.mark.parametrize(
    ("algorithm", "model", "told"),
    [
        (FedPer(), "mlr", "this model has 1 layer"),
        (Mocha(), "dnn", "--model mlr"),
        (IFCA(clusters=9), "mlr", "--clusters 4 or fewer"),
        (LabelPrior(), pfedme.Model(init_fn=lambda _: [np.zeros((5, 3))], apply_fn=lambda w, x: x @ w[0]),
         "a bias for each class"),
    ],
    ids=["fedper", "mocha", "ifca", "label-prior"],
)  # fmt: skip
def test_python_refuses_it_too(algorithm, model, told):
    with pytest.raises(InputError, match=told):
        pfedme.train(algorithm, "synthetic:clients=4,rows=40,features=5,classes=3", model=model, rounds=2)


def test_a_plan_counts_the_clients_that_a_server_waits_for():
    Plan(algorithm=IFCA(clusters=2), model=MLR(), min_clients=2).checked()
    Plan(algorithm=FedPer(), model=DNN(hidden=(4,))).checked()
    with pytest.raises(InputError, match="trains 3 models, more than there are clients \\(2\\)"):
        Plan(algorithm=IFCA(clusters=3), model=MLR(), min_clients=2).checked()


@pytest.mark.parametrize("cls", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_search_tries_only_what_an_algorithm_allows(cls: type[Algorithm]):
    """An alpha, for example, can be a step size, or a weight between 0 and 1."""
    for name, axis in axes(cls()).items():
        bounds = () if isinstance(axis.range, CategoricalDistribution) else (axis.range.low, axis.range.high)
        for value in (*axis.grid, *bounds):
            check(dataclasses.replace(cls(), **{name: value}), cls.name)
