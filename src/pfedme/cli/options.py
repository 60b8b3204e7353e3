"""Options that commands share: the source of the rows, the fields of a specification, the output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pfedme.core.spec import choices, field_docs, field_types, metavar
from pfedme.errors import InputError, unknown

if TYPE_CHECKING:
    from pfedme.data import Source

AS_JSON = "print the result as JSON on standard output"
PERSONALIZE = "auto, or auto:steps=200,...: each client finds its own λ and whether joining pays"

Options = argparse.ArgumentParser | argparse._ArgumentGroup
"""Anything that options can be added to."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `InputError`."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[:1].upper()}{message[1:]}; see '{self.prog} --help'.")


def new_parser(command: str, description: str, examples: str) -> Parser:
    """A parser without options, whose help ends with `examples`."""
    return Parser(
        prog=f"pfedme {command}", description=description, epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The parsed arguments; the error for an unknown option suggests a similar one."""
    args, rest = parser.parse_known_args(argv)
    if not rest:
        return args
    if not rest[0].startswith("-"):
        raise InputError(f"'{rest[0]}' was not expected; see '{parser.prog} --help'.")
    known = [s for action in parser._actions for s in action.option_strings if s.startswith("--")]
    raise unknown("option", rest[0].partition("=")[0], known)


def flag(field: str) -> str:
    """The option that sets a field.

    >>> flag("eval_every")
    '--eval-every'
    """
    return f"--{field.replace('_', '-')}"


def help_of(owner: type) -> dict[str, str]:
    """The help text of each field of a specification, on one line."""
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in field_docs(owner).items()}


def add_field(
    options: Options,
    owner: type,
    field: str,
    option: str | None = None,
    *,
    text: str | None = None,
    after: str = "",
    dest: str | None = None,
) -> None:
    """Adds the option that sets a field of a specification; its help is the field's documentation, unless
    another `text` is given, and lists the values of a choice."""
    kind = field_types(owner)[field]
    shown, names = metavar(kind), choices(kind)
    listed = f" One of {', '.join(names)}." if names and "{" not in shown else ""
    about = (help_of(owner).get(field, "") if text is None else text) + listed + after
    options.add_argument(option or flag(field), dest=dest or field, metavar=shown, help=about)


def add_data(options: Parser, default: str | None = "synthetic", what: str = "the federation") -> None:
    """Adds the options for the source of the rows."""
    options.add_argument(
        "--data", default=default, help=f"{what}: a name, with options after a colon, or the path of a table"
    )
    add_table(options, "your own tables")


def add_table(options: Parser, title: str, without: str = "") -> None:
    """Adds the options that describe a table, except the one for the field `without`."""
    from pfedme.data.table import OPTIONS, Table

    group, docs = options.add_argument_group(title), help_of(Table)
    for field in docs:
        if field not in OPTIONS or field == without:
            continue
        default, dest = getattr(Table, field), f"table_{field}"
        if default is False:
            group.add_argument(
                OPTIONS[field], dest=dest, action="store_const", const="true", help=docs[field]
            )
        else:
            shown = f" ({default})" if default not in (None, ()) else ""
            add_field(group, Table, field, OPTIONS[field], after=shown, dest=dest)


def source(args: argparse.Namespace, inherited: Source | None = None) -> Source:
    """The source of the rows; table options that are not given are taken from `inherited`."""
    from pfedme.data import named, parse_data, table_of
    from pfedme.data.table import OPTIONS

    given = {field: getattr(args, f"table_{field}") for field in OPTIONS}
    table = table_of(inherited) if inherited else None
    if table and args.data.partition(":")[0] not in named():
        own = {field: getattr(table, field) for field in OPTIONS if field != "test"}
        given = {field: value if value is not None else own.get(field) for field, value in given.items()}
    return parse_data(args.data, given)


def add_out(options: Options, what: str, default: Path | None = None) -> None:
    """Adds `--out`, a folder."""
    options.add_argument("--out", type=Path, metavar="DIR", default=default, help=what)


def add_json(options: Options, what: str = AS_JSON) -> None:
    """Adds `--json`."""
    options.add_argument("--json", action="store_true", help=what)


def add_debug(options: Options) -> None:
    """Adds `--debug`, which `pfedme.cli.main` handles."""
    options.add_argument("--debug", action="store_true", help="show the traceback of an error")
