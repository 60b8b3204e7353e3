"""Shared by the commands for federations on several machines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pfedme.cli.options import Parser
from pfedme.errors import InputError


def need_flower(command: str) -> None:
    """Raises an error that says what to install if Flower is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise InputError(f"pfedme {command} needs Flower: pip install 'pfedme[flower]'.")


def add_trust(parser: Parser, keys: str) -> None:
    """Adds the options that let the server and the clients of a federation trust each other."""
    group = parser.add_argument_group("trust")
    group.add_argument("--keys", type=Path, metavar="DIR", help=f"{keys} (keys)")
    group.add_argument(
        "--insecure", action="store_true", help="no encryption and no keys; for trials on one machine"
    )
    group.add_argument(
        "--insecure-network",
        action="store_true",
        help="with --insecure: allow it over a network too, where others can listen in",
    )
