"""`pfedme algorithms`: lists the algorithms, or describes one of them."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import TYPE_CHECKING, Any

from pfedme.cli.options import add_debug, add_json, new_parser, parsed
from pfedme.errors import unknown

if TYPE_CHECKING:
    from pfedme.algorithms import Algorithm

EXAMPLES = """\
examples:
  pfedme algorithms                             all of them, grouped by what clients share
  pfedme algorithms scaffold                    one of them, with its formula and hyperparameters
  pfedme algorithms --json"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme algorithms`."""
    made = new_parser("algorithms", "Lists the algorithms, or describes one of them.", EXAMPLES)
    made.add_argument("name", nargs="?", metavar="ALGORITHM", help="the algorithm to describe")
    add_json(made, "print the list, or the description, as JSON")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Prints the list, or the description."""
    args = parsed(parser(), argv)

    from pfedme.algorithms import ALGORITHMS
    from pfedme.cli.screen.algorithms import print_algorithm, print_algorithms

    if args.name is not None and args.name not in ALGORITHMS:
        raise unknown("algorithm", args.name, ALGORITHMS)
    facts = [description(cls) for name, cls in ALGORITHMS.items() if args.name in (None, name)]
    if args.json:
        print(json.dumps(facts if args.name is None else facts[0]))
    elif args.name is None:
        print_algorithms(facts)
    else:
        print_algorithm(facts[0], ALGORITHMS[args.name])
    return 0


def description(cls: type[Algorithm]) -> dict[str, Any]:
    """What there is to know about an algorithm, as JSON values.

    >>> from pfedme.algorithms import OneShot
    >>> facts = description(OneShot)
    >>> facts["idea"], facts["deployable"], facts["gradients"]
    ('one shared model', False, 20)
    """
    from pfedme.engine.cost import gradients

    made = cls()
    return {
        "name": made.name,
        "idea": cls.idea,
        "about": inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
        "reference": cls.reference,
        "personal": cls.personal or None,
        "sends": cls.sends or None,
        "newcomer": cls.newcomer,
        "gradients": gradients(made),
        "deployable": not cls.simulated and cls.federated,
        "why_not": cls.simulated or None,
    }
