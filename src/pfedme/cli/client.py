"""`pfedme client`: takes part in training with a table that stays on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedme.cli.deployment import add_trust, need_flower
from pfedme.cli.options import Parser, add_debug, add_field, add_table, new_parser, parsed
from pfedme.core.spec import field_types
from pfedme.deploy.policy import Policy
from pfedme.errors import Interrupted

EXAMPLES = """\
examples:
  pfedme client --server fed.example.org:9092 --data my.csv --label outcome --keys north --state state
  pfedme client --server 127.0.0.1:9092 --data my.csv --label outcome --insecure --state state
afterwards: pfedme predict state/model --data new.csv -o predictions.csv"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme client`."""
    about = "Takes part in a federation with a table that stays on this machine."
    made = new_parser("client", about, EXAMPLES)
    made.add_argument("--server", metavar="HOST:PORT", required=True, help="the server")
    made.add_argument(
        "--data", required=True, metavar="TABLE", help="this client's rows: CSV, TSV, Excel, Parquet or NPZ"
    )
    made.add_argument(
        "--state", type=Path, required=True, metavar="DIR",
        help="folder for this client's own model, which nobody else gets, and for its log",
    )  # fmt: skip
    made.add_argument("--name", help="this client's name; by default that of its key, or of the file")
    made.add_argument(
        "--share-metrics",
        action="store_true",
        help="tell the server how many rows the models predict correctly",
    )
    made.add_argument(
        "--personalize", metavar="HOW",
        help="auto, or auto:folds=5,...: keep a part of the rows out of training and choose by them when the "
        "run is over: the shared model, one near it, or one trained alone; the server is not told",
    )  # fmt: skip
    add_trust(made, "folder with this client's key, from 'pfedme keys --own', and the server's ca.crt")
    made.add_argument(
        "--wait", type=float, default=86400.0, metavar="SECONDS",
        help="how long to wait for a server that does not answer (86400)",
    )  # fmt: skip
    _add_limits(made)
    add_table(made, "the table", without="client")
    add_debug(made)
    return made


def _add_limits(parser: Parser) -> None:
    """Adds the options that limit what a server may ask a client for."""
    group = parser.add_argument_group(
        "limits", "What the server may ask for; limits can also be set in policy.toml next to the table."
    )
    for name in field_types(Policy):
        default = getattr(Policy, name)
        shown = ",".join(default) if isinstance(default, tuple) else default
        add_field(group, Policy, name, after="" if shown in (None, "") else f" ({shown})")


def carry_out(argv: list[str]) -> int:
    """Takes part until the run is over."""
    args = parsed(parser(), argv)
    need_flower("client")

    from pfedme.deploy import commands

    try:
        return commands.client(args)
    except KeyboardInterrupt:
        raise Interrupted(None, "run the same command to take part again") from None
