"""Shared by commands that train: the options of a run and of every algorithm, and the runs they describe."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.arguments import given_in
from pfedme.cli.options import (
    Options,
    Parser,
    add_data,
    add_debug,
    add_field,
    add_json,
    add_out,
    flag,
    help_of,
    source,
)
from pfedme.core.models import MODELS, parse_model
from pfedme.core.spec import build, check, field_types, metavar, parse, to_json
from pfedme.errors import InputError
from pfedme.privacy.units import Privacy, asked_for
from pfedme.runs.run import CHOICES, NUMBERS, Run

PRIVACY = ("clip",)
"""Fields of privacy that are options named --dp-..., besides ε and δ."""
JSON_ALONE = "print the result as JSON on standard output, and nothing else"
OUT = "folder for the results; if not given, a new one under runs/"
TRACK = "log the run to tensorboard or mlflow, with options after a colon; can be repeated"


def algorithm_names() -> str:
    """The names of the algorithms, for the help text."""
    return ", ".join(ALGORITHMS)


def add_recorded_training(parser: Parser) -> None:
    """Adds the options for a training run that is simulated and recorded."""
    add_simulation(parser)
    add_out(parser, OUT)
    add_record(parser, help_of(Run)["eval_every"])
    parser.add_argument("--track", action="append", default=[], metavar="TRACKER", help=TRACK)
    add_json(parser, JSON_ALONE)
    add_debug(parser)


def add_simulation(parser: Parser) -> None:
    """Adds the options for what to train, on which rows and for how long."""
    docs = help_of(Run)
    add = parser.add_argument
    add_data(parser)
    add_model(parser)
    add(
        "--rounds", type=_rounds, metavar="N", default=0,
        help="T: communication rounds; auto trains until the loss on validation rows stops falling (auto)",
    )  # fmt: skip
    add("--budget", type=int, metavar="N", default=Run.budget, help=f"{docs['budget']} ({Run.budget})")
    add("--quarter-at", metavar="N-...", help=docs["quarter_at"])
    add("--cohort", type=int, metavar="N", help=docs["cohort"])
    add("--seed", type=int, metavar="N", default=0, help=docs["seed"] + " (0)")
    add("--eval-clients", type=int, metavar="N", help=docs["eval_clients"])
    for name in CHOICES:
        add_field(parser, Run, name)
    add_privacy(parser)


def add_privacy(parser: Parser) -> None:
    """Adds the options of differential privacy; see `privacy`.

    `--delta` is not among them: it is also a hyperparameter, which `add_hyperparameters` adds.
    """
    group = parser.add_argument_group("differential privacy")
    group.add_argument(
        "--dp", choices=list(Privacy.known),
        help="unit that is protected: rows (each client adds noise to its own gradients) or clients (the "
        "server adds noise to the mean of what they send); --delta is δ then (1e-5)",
    )  # fmt: skip
    group.add_argument("--epsilon", type=float, metavar="X", help=help_of(Privacy)["epsilon"])
    fields = {name: cls for cls in Privacy.known.values() for name in field_types(cls)}
    for name in PRIVACY:
        owners = [cls for cls in Privacy.known.values() if name in field_types(cls)]
        text = " ".join(f"[{cls.name}] {help_of(cls)[name]} ({getattr(cls, name)})" for cls in owners)
        group.add_argument(f"--dp-{name}", metavar=metavar(field_types(fields[name])[name]), help=text)


def privacy(args: argparse.Namespace) -> Privacy | None:
    """The differential privacy that the command line asks for."""
    delta = args.delta if args.dp else None
    return asked_for(
        args.dp,
        {"epsilon": args.epsilon, "delta": delta} | {name: getattr(args, f"dp_{name}") for name in PRIVACY},
    )


def add_model(options: Options) -> None:
    """Adds `--model`."""
    others = "".join(f", {name}" for name in MODELS.others)
    options.add_argument(
        "--model", default="mlr",
        help="mlr (softmax or ridge regression), dnn, dnn-bn (with batch normalisation), or cnn for images"
        f"{others}; or my_package:build, your own function that takes the numbers of features and classes "
        "and returns a Model (mlr)",
    )  # fmt: skip


def add_record(options: Options, eval_every: str) -> None:
    """Adds the options of commands that record a run."""
    options.add_argument("--eval-every", type=int, metavar="N", help=eval_every)
    options.add_argument("--force", action="store_true", help="overwrite the contents of the folder")


def add_hyperparameters(parser: Parser) -> None:
    """Adds an option for every hyperparameter, with the algorithms that have it and their defaults.

    Call this last: a hyperparameter with the name of another option gets no option; set it with
    NAME:field=value.
    """
    group = parser.add_argument_group("hyperparameters")
    taken = {action.dest for action in parser._actions}
    names = dict.fromkeys(name for cls in ALGORITHMS.values() for name in field_types(cls))
    own = [name for name in names if name not in taken and flag(name) not in parser._option_string_actions]
    parser.set_defaults(hyperparameters=own)
    for name in own:
        owners = [cls for cls in ALGORITHMS.values() if name in field_types(cls)]
        if len(owners) == len(ALGORITHMS):
            add_field(group, Algorithm, name, after=f" ({_defaults(owners, name)})")
            continue
        meanings: dict[str, list[type[Algorithm]]] = {}
        for cls in owners:
            meanings.setdefault(help_of(cls).get(name, ""), []).append(cls)
        first, *others = (
            " ".join(filter(None, [_names(some), text, f"({_defaults(some, name)})"]))
            for text, some in meanings.items()
        )
        add_field(group, owners[0], name, text=" ".join([first, *others]))


def _names(owners: Sequence[type[Algorithm]]) -> str:
    return f"[{', '.join(cls.name for cls in owners)}]"


def _defaults(owners: Sequence[type[Algorithm]], name: str) -> str:
    """The most common default of a hyperparameter, and the algorithms that have another."""
    having: dict[str, list[str]] = {}
    for cls in owners:
        having.setdefault(str(getattr(cls, name)), []).append(cls.name)
    (usual, _), *others = sorted(having.items(), key=lambda item: -len(item[1]))
    return "; ".join([usual, *(f"{', '.join(names)}: {value}" for value, names in others)])


def _rounds(text: str) -> int:
    """A number of rounds; 0 for `auto`."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be auto or a positive whole number, not '{text}'")
    return int(text)


def given_hyperparameters(args: argparse.Namespace) -> dict[str, str]:
    """The hyperparameters given as options on the command line, as strings."""
    taken = {"delta"} if getattr(args, "dp", None) else set()
    return {
        name: value
        for name in args.hyperparameters
        if name not in taken and (value := getattr(args, name)) is not None
    }


def algorithms(args: argparse.Namespace, texts: Sequence[str]) -> list[Algorithm]:
    """The algorithms that the command line describes; NAME:field=value takes precedence over options."""
    given = given_hyperparameters(args)
    chosen = [parse(text, ALGORITHMS, "algorithm") for text in texts]
    _refuse_foreign(given, chosen)
    built = []
    for text, algorithm in zip(texts, chosen, strict=True):
        fields, own = field_types(type(algorithm)), given_in(text)
        extra = {n: v for n, v in given.items() if n in fields and n not in own}
        what = f"algorithm '{algorithm.name}'"
        built.append(build(type(algorithm), {**to_json(algorithm), **extra}, what))
    return built


def _refuse_foreign(given: dict[str, str], chosen: Sequence[Algorithm]) -> None:
    """Raises an error if a hyperparameter is given that none of the algorithms has."""
    for name in given:
        if not any(name in field_types(type(algorithm)) for algorithm in chosen):
            raise InputError(
                f"{flag(name)} is not an option of {', '.join(a.name for a in chosen)}, whose "
                f"hyperparameters are {', '.join(to_json(chosen[0]))}."
            )


def runs(args: argparse.Namespace, texts: Sequence[str]) -> list[Run]:
    """The runs that the command line describes, one for each algorithm."""
    quarters = _quarters(args.quarter_at)
    chosen, data, wanted = algorithms(args, texts), source(args), privacy(args)
    return [
        check(
            Run(
                algorithm=algorithm, data=data, model=parse_model(args.model),
                **{name: getattr(args, name) for name in (*NUMBERS, *CHOICES)},
                budget=args.budget, quarter_at=quarters, privacy=wanted,
            ),
            "the run",
        )
        for algorithm in chosen
    ]  # fmt: skip


def _quarters(text: str | None) -> tuple[int, ...]:
    """The rounds of `100-150`."""
    parts = [] if text is None else text.split("-")
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--quarter-at must be rounds joined by '-', such as 100-150, not '{text}'.")
    return tuple(map(int, parts))


def new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet, named after the current time."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (Path("runs") / (name if k == 1 else f"{name}-{k}") for k in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())
