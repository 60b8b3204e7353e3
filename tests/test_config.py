"""A plan as the configuration of one of Flower's runs: nothing that was given is lost on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

import pytest

from pfedme.algorithms import ALGORITHMS, Algorithm, FedAvg, FedBN, Mocha, PerFedAvg, PFedMe
from pfedme.algorithms.aggregate import Combine
from pfedme.core.models import DNN, MLR, NormalisedDNN
from pfedme.core.spec import Positive, field_types, parse
from pfedme.core.tree import record
from pfedme.deploy.config import APP, config_of, declared, plan_of, refuse_undeclared, region_of
from pfedme.deploy.messages import Words
from pfedme.deploy.plan import Plan
from pfedme.errors import InputError

DEPLOYED = {name: cls for name, cls in ALGORITHMS.items() if cls.federated and not cls.simulated}


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way to combine uploads and an algorithm that are not ours; the latter has a field that goes by the
    name of one of a plan."""
    monkeypatch.setattr(Combine, "known", dict(Combine.known))

    @record
    class Halved(Combine):
        name: ClassVar[str] = "halved"
        times: Positive = 1.0

    @record
    class Momentum(FedAvg):
        name: ClassVar[str] = "momentum"
        mu: float = 0.9
        seed: int = 0

    monkeypatch.setitem(ALGORITHMS.own, "momentum", Momentum)


@pytest.mark.usefixtures("_others")
@pytest.mark.parametrize(
    "made",
    [
        lambda: PFedMe(eta=0.1, lam=3.0, alpha=0.02, nu=1e-7, solver="nesterov", theta_start="w"),
        lambda: FedAvg(combine=Combine.from_text("halved:times=0.3", ""), aggregation="uniform"),
        lambda: PerFedAvg(hessian="difference", delta=0.01),
        lambda: parse("momentum:mu=0.5,seed=7,combine=halved", ALGORITHMS, "algorithm"),
    ],
)
def test_a_plan_passes_through_flower_whole(made: Callable[[], Algorithm]):
    plan = Plan(
        algorithm=made(), model=DNN(hidden=(7, 3), l2=0.01), rounds=3, cohort=4, seed=5, min_clients=3,
        min_replies=2, deadline=9.5, max_attempts=4, clip=2.0, max_norm_ratio=8.0, join_timeout=77.0,
        eval_every=2,
    )  # fmt: skip
    config = config_of(plan)
    assert plan_of({**declared(), **config}) == plan
    assert all(isinstance(value, str | int | float | bool) for value in config.values())
    refuse_undeclared(config)


def test_flower_lets_a_run_set_every_field_of_a_plan_and_of_our_algorithms():
    fields = {name for cls in DEPLOYED.values() for name in field_types(cls)} | set(field_types(Plan))
    own = {name.replace("_", "-") for name in fields - {"rounds"}}
    assert set(declared()) == {*own, "num-server-rounds", *APP}
    assert plan_of(declared()) == Plan(algorithm=PFedMe(), model=MLR())


@pytest.mark.parametrize("cls", DEPLOYED.values(), ids=DEPLOYED)
def test_hyperparameters_can_be_set_by_themselves(cls: type[Algorithm]):
    model = NormalisedDNN(hidden=(4,)) if cls is FedBN else MLR() if cls is Mocha else DNN(hidden=(4,))
    text = {FedBN: "dnn-bn:hidden=4", Mocha: "mlr"}.get(cls, "dnn:hidden=4")
    config = declared() | {"algorithm": cls.name, "eta": 0.1, "combine": "mean", "num-server-rounds": 7}
    config |= {"model": text, "min-clients": 4}
    plan = plan_of(config)
    assert plan == Plan(algorithm=cls(eta=0.1), model=model, rounds=7, min_clients=4)
    assert plan_of(config | {"algorithm": f"{cls.name}:eta=0.1", "eta": "", "combine": ""}) == plan


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"algorithm": "fedavg", "lam": 3.0}, "no option of algorithm 'fedavg' 'lam'"),
        ({"algorithm": "fedavgg"}, "did you mean 'fedavg'"),
        ({"algorithm": '{"name": "fedavgg"}'}, "did you mean 'fedavg'"),
        ({"algorithm": '{"name": "fedavg", "mu": 1}'}, "no option of algorithm 'fedavg' 'mu'"),
        ({"algorithm": '{"name": "fedavg"'}, "cannot be read"),
        ({"algorithm": '{"eta": 1}'}, "cannot be read"),
        ({"algorithm": "fedavg:R=3", "eta": 0.1}, "eta is given in addition to 'fedavg:R=3'"),
        ({"algorithm": '{"name": "fedavg"}', "eta": 0.1}, "eta is given in addition to"),
        ({"tries": 3}, "no option of algorithm 'pfedme' 'tries'"),
        ({"combine": "median"}, "There is no combine of algorithm 'pfedme' 'median'"),
        ({"deadline": 0.0}, "deadline of the run must be positive"),
    ],
)
def test_a_setting_that_would_be_dropped_is_an_error(config: Words, said: str):
    with pytest.raises(InputError, match=re.escape(said)):
        plan_of(declared() | config)


def test_a_run_that_another_version_has_set_up_is_not_begun():
    with pytest.raises(InputError, match=r"'tries'.*another version of pfedme"):
        refuse_undeclared(config_of(Plan(algorithm=FedAvg(), model=MLR())) | {"tries": 3})


def test_regions_are_kept_with_any_name():
    plan = Plan(algorithm=FedAvg(), model=MLR(), regions=("north", "St. Mary's, Leeds"))
    assert plan_of(declared() | config_of(plan)) == plan
    own = region_of(declared() | config_of(plan) | {"min-replies": 2, "clip": 0.5})
    assert own == {
        "min_clients": 2, "min_replies": 2, "clip": 0.5, "max_norm_ratio": 10.0, "regions": plan.regions
    }  # fmt: skip
