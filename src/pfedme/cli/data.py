"""`pfedme data`: describes a federation, lists those that have a name, or converts one to be mapped into
memory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path

from pfedme.cli.options import (
    add_data,
    add_debug,
    add_json,
    add_out,
    add_table,
    new_parser,
    parsed,
    source,
)
from pfedme.errors import unknown

EXAMPLES = """\
examples:
  pfedme data describe                          the paper's synthetic federation
  pfedme data describe --data synthetic:alpha=1,beta=1,clients=30
  pfedme data describe --data mnist:partition=released
  pfedme data describe --data medpar            54 hospitals, fetched on first use
  pfedme data describe --data patients.csv --client hospital --label outcome --out described
  pfedme data list                              all names, with rows, clients and licence
  pfedme data convert patients.parquet --client hospital --label outcome -o patients"""

CONVERT = """\
a table is read once, in pieces; while it is sorted by client, its numbers need twice the space on the disk

examples:
  pfedme data convert patients.parquet --client hospital --label outcome -o patients
  pfedme run pfedme --data patients"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme data describe`."""
    made = new_parser("data describe", "Describes a federation.", EXAMPLES)
    add_data(made)
    add_out(made, "folder for pictures of each client's labels and of how clients differ")
    add_json(made, "print the description as JSON")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Describes a federation, lists those that have a name, or converts one."""
    if argv[:1] == ["list"]:
        return _list(argv[1:])
    if argv[:1] == ["convert"]:
        return _convert(argv[1:])
    if argv[:1] not in (["describe"], ["-h"], ["--help"]):
        raise unknown("data command", argv[0] if argv else "", ["describe", "list", "convert"])
    args = parsed(parser(), argv[1:] if argv[0] == "describe" else argv)

    from pfedme.cli.screen.bars import waiting
    from pfedme.cli.screen.federations import print_description
    from pfedme.engine.differences import differences
    from pfedme.files import atomic_write, refuse_file, writing
    from pfedme.report.describe import describe
    from pfedme.report.differing import about_difference, differences_figure
    from pfedme.report.spread import labels_figure

    if args.out:
        refuse_file(args.out)
    with waiting(f"reading {args.data}"):
        federation = source(args).load()
    with waiting("describing the federation"):
        description = describe(federation)
    with waiting("comparing clients"):
        found = differences(federation)
    if args.out:
        with writing(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            atomic_write(args.out / "labels.png", labels_figure(federation))
            if found:
                atomic_write(args.out / "differences.png", differences_figure(found))
    if args.json:
        differ = dataclasses.asdict(found) if found else None
        print(json.dumps({"data": args.data, **description, "differences": differ}))
    else:
        facts = about_difference(found, federation.classes)
        print_description(args.data, description, federation, facts)
    return 0


def _list(argv: list[str]) -> int:
    """Lists the federations that have a name."""
    about = "Lists the federations that have a name; most are fetched on first use, under the licence named."
    made = new_parser("data list", about, "examples:\n  pfedme data list\n  pfedme data list --json")
    add_json(made, "print the list as JSON")
    add_debug(made)
    args = parsed(made, argv)

    from pfedme.cli.screen.federations import print_names
    from pfedme.data import listing

    print(json.dumps(listing())) if args.json else print_names(listing())
    return 0


def _convert(argv: list[str]) -> int:
    """Writes a federation to a folder from which it is mapped into memory."""
    about = (
        "Writes a federation to a folder from which rows are mapped into memory, and may be larger than it."
    )
    made = new_parser("data convert", about, CONVERT)
    made.add_argument(
        "data", metavar="SOURCE", help="a name, with options after a colon, or the path of a table"
    )
    made.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the new folder")
    add_table(made, "your own tables")
    add_json(made, "print what was written as JSON")
    add_debug(made)
    args = parsed(made, argv)

    from pfedme.cli.screen.bars import waiting
    from pfedme.data.mapped import convert

    with waiting(f"converting {args.data}"):
        federation = convert(source(args), args.out)
    rows, clients, size = len(federation.y), federation.clients, federation.x.nbytes
    if args.json:
        print(json.dumps({"out": str(args.out), "rows": rows, "clients": clients, "bytes": size}))
        return 0
    for note in federation.notes:
        print(note)
    print(f"{rows:,} rows of {clients:,} clients, {size / 2**30:.3g} GiB, are in {args.out}.")
    print(f"To train from it: pfedme run pfedme --data {shlex.quote(str(args.out))}")
    return 0
