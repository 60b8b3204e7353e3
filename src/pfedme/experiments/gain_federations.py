"""The federations of the study of what joining is worth, and how the clients of each differ."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pfedme.algorithms import FedAvg, PFedMe
from pfedme.core.models import parse_model
from pfedme.data import parse_data
from pfedme.engine.choices import Personalize
from pfedme.engine.differences import Kind
from pfedme.errors import unknown
from pfedme.runs.run import Run

LAM = 15.0
"""The λ given to pFedMe, which is the paper's."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A federation of the study."""

    name: str
    data: str
    """Its source; `{seed}` stands for the seed of the repetition."""
    about: str
    kind: Kind | Literal["unknown"]
    """How its clients differ, by construction; unknown for real tables."""
    how: Personalize = dataclasses.field(default_factory=Personalize)
    model: str = "mlr:l2=0.001"
    rounds: int = 100
    """Of the shared model; 0 for as many as are best on validation rows, with steps to match."""
    budget: int = 50
    """The most rounds that training alone, or a shared model without a given number, may take."""
    newcomers: bool = False
    """Whether to train again with a fifth of the clients held out, to see how newcomers fare."""

    def run(self, seed: int, *, scale: Scale, pfedme: bool = False, newcomers: bool = False) -> Run:
        """The run that trains the shared model: with FedAvg, or with pFedMe for its own personal models."""
        algorithm = (
            PFedMe(lam=LAM, alpha=0.01, eta=0.01)
            if pfedme
            else FedAvg(eta=0.02 if self.rounds else 0.0, aggregation="uniform")
        )
        return Run(
            algorithm=algorithm,
            data=parse_data(scale.data(self.data).format(seed=seed)),
            model=parse_model(self.model),
            rounds=self.rounds and max(2, self.rounds // scale.divide),
            seed=seed,
            budget=max(6, self.budget // scale.divide),
            holdout_clients=0.2 if newcomers else None,
        )

    @property
    def known(self) -> bool:
        """Whether it counts when kinds of difference are named: the kind is known, and no other setting has
        the same clients."""
        return self.kind != "unknown" and self.model == Setting.model


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of the study is carried out."""

    seeds: int = 3
    divide: int = 1
    tiny: bool = False

    def data(self, text: str) -> str:
        """The federation, or a tiny one instead."""
        return "synthetic:clients=6,rows=24,features=4,classes=3,seed={seed}" if self.tiny else text

    def how(self, how: Personalize) -> Personalize:
        """The steps of each fit, fewer in a quick study."""
        return dataclasses.replace(how, steps=max(2, how.steps // self.divide))


FULL, QUICK, TINY = Scale(), Scale(seeds=1, divide=5), Scale(seeds=2, divide=50, tiny=True)

ROWS = {"few": 50, "some": 100, "many": 400}
"""Training rows of a client."""
NETWORK = "dnn:hidden=20,l2=0.001"


def _dirichlet(alpha: float, size: str, kind: Kind, *, newcomers: bool = False) -> Setting:
    clients = 50 if alpha > 0.1 else 30  # with more, some would have only a handful of images
    cap = 2 * ROWS[size]
    return Setting(
        f"mnist-{alpha:g}-{size}",
        f"mnist:partition=dirichlet,alpha={alpha:g},clients={clients},cap={cap},train=0.5,seed={{seed}}",
        f"MNIST, labels by Dirichlet({alpha:g}), {ROWS[size]} training rows",
        kind, newcomers=newcomers,
    )  # fmt: skip


def _seen(partition: str, size: str, about: str, kind: Kind, clients: int = 60) -> Setting:
    cap = 2 * ROWS[size]
    return Setting(
        f"mnist-{partition}-{size}",
        f"mnist:partition={partition},clients={clients},cap={cap},train=0.5,seed={{seed}}",
        f"MNIST {about}, {ROWS[size]} training rows",
        kind, newcomers=(partition, size) == ("rotated", "many"),
    )  # fmt: skip


def _synthetic(name: str, options: str, about: str, kind: Kind, *, newcomers: bool = False) -> Setting:
    return Setting(
        f"synthetic-{name}", f"synthetic:{options},seed={{seed}}", about, kind, newcomers=newcomers
    )


def _table(name: str, about: str, model: str = Setting.model) -> Setting:
    network = "-network" if model != Setting.model else ""
    return Setting(
        name + network, f"{name}:seed={{seed}}", about + (", network" if network else ""), "unknown",
        model=model, rounds=0, budget=100,
    )  # fmt: skip


def _network(setting: Setting) -> Setting:
    """The same clients with a network instead of logistic regression."""
    return dataclasses.replace(
        setting, name=f"{setting.name}-network", about=f"{setting.about}, network",
        model=NETWORK, rounds=0, budget=100, newcomers=False,
    )  # fmt: skip


_ROTATED, _PERMUTED, _SCALED = (
    "rotated by four angles", "with pixels in one of four orders", "with each client's own scale of pixels",
)  # fmt: skip

SETTINGS: tuple[Setting, ...] = (
    # Clients that are alike.
    _dirichlet(100, "few", "none"),
    _dirichlet(100, "many", "none"),
    _synthetic(
        "iid", "iid=true,rows=200,train=0.5",
        "Synthetic with identically distributed clients, 100 training rows", "none", newcomers=True,
    ),
    # Labels that occur with different frequencies.
    *(_dirichlet(alpha, "few", "label skew") for alpha in (1, 0.3, 0.1)),
    _dirichlet(0.1, "some", "label skew"),
    *(_dirichlet(alpha, "many", "label skew", newcomers=alpha == 0.3) for alpha in (1, 0.3, 0.1)),
    Setting(
        "mnist-two-labels", "mnist", "the paper's MNIST, two labels per client", "label skew", rounds=200
    ),
    # Inputs that differ, with one rule.
    _seen("scaled", "few", _SCALED, "feature shift", 40),
    _seen("scaled", "many", _SCALED, "feature shift", 40),
    _synthetic(
        "shifted", "kinds=1,rows=200,train=0.5",
        "Synthetic with one true model and each client's own inputs, 100 training rows", "feature shift",
    ),
    # Groups of clients with a rule each.
    *(_seen("rotated", size, _ROTATED, "a few kinds") for size in ROWS),
    *(_seen("permuted", size, _PERMUTED, "a few kinds", 40) for size in ("few", "many")),
    _synthetic(
        "kinds", "iid=true,kinds=4,rows=200,train=0.5",
        "Synthetic with four true models, 100 training rows", "a few kinds",
    ),
    # A rule for every client.
    Setting(
        "synthetic-0.5-0.5", "synthetic", "the paper's Synthetic(0.5, 0.5)", "unlike tasks", rounds=200
    ),
    *(
        _synthetic(f"{v}-{v}", f"alpha={v},beta={v}", f"Synthetic({v}, {v})", "unlike tasks") for v in (0, 1)
    ),
    _synthetic(
        "unlike-few", "rows=200,train=0.5", "Synthetic(0.5, 0.5), 100 training rows", "unlike tasks",
        newcomers=True,
    ),
    # Networks.
    _network(_dirichlet(0.1, "few", "label skew")),
    _network(_seen("rotated", "few", _ROTATED, "a few kinds")),
    _network(_synthetic(
        "unlike-few", "rows=200,train=0.5", "Synthetic(0.5, 0.5), 100 training rows", "unlike tasks",
    )),
    # Real clients.
    _table("medpar", "deaths in 54 hospitals"),
    _table("contraception", "contraception in 60 districts"),
    _table("penguins", "species of penguins on 3 islands"),
    _table("rodents", "genus of rodents on 24 plots"),
    _table("schools", "language scores in 133 classes (R²)"),
    _table("ames", "prices of houses in 28 neighbourhoods (R²)"),
    _table("gapminder", "life expectancy in 142 countries (R²)"),
    _table("loans", "interest on loans in 50 states (R²)"),
    _table("contraception", "contraception in 60 districts", NETWORK),
    _table("ames", "prices of houses in 28 neighbourhoods (R²)", NETWORK),
)  # fmt: skip
"""By kind of difference."""


def named(text: str | None) -> tuple[Setting, ...]:
    """The settings of the names, which are separated by commas; all if there is no text."""
    if text is None:
        return SETTINGS
    by_name = {setting.name: setting for setting in SETTINGS}
    for name in text.split(","):
        if name not in by_name:
            raise unknown("federation", name, by_name)
    return tuple(by_name[name] for name in dict.fromkeys(text.split(",")))
