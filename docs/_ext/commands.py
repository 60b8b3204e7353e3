"""Writes a page for each command of the command line, from the parser that the command itself uses."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from pfedme.cli.registry import COMMANDS

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class Command(NamedTuple):
    """A command and its parser."""

    name: str
    help: str
    parser: argparse.ArgumentParser


@functools.cache
def commands() -> list[Command]:
    """All commands, in the order of `pfedme --help`."""
    return [
        Command(name, command.help, importlib.import_module(command.module).parser())
        for name, command in COMMANDS.items()
    ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Writes the pages before others are read."""
    app.connect("builder-inited", write_pages)
    app.add_directive("command-list", CommandList)
    return {"parallel_read_safe": True}


def write_pages(app: Sphinx) -> None:
    """Writes docs/commands/NAME.rst for each command; a page that has not changed is left as it is."""
    folder = Path(app.srcdir) / "commands"
    pages = {f"{command.name}.rst": page(command) for command in commands()}
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def page(command: Command) -> str:
    """The page of a command."""
    return "\n".join([*heading(f"pfedme {command.name}", "="), *form(command.parser)])


def form(parser: argparse.ArgumentParser) -> list[str]:
    """How a command is used, with examples, and its options by group."""
    lines = [*text(parser.description), *literal(usage(parser)), *epilog(parser)]
    lines += [f".. program:: {parser.prog}", ""]
    for group in parser._action_groups:
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        shown = [a for a in shown if not isinstance(a, argparse._HelpAction)]
        if shown:
            title = (group.title or "").removeprefix("positional ").capitalize()
            lines += [*heading(title, "-"), *text(group.description)]
            lines += [line for action in shown for line in option(action, parser)]
    return lines


def heading(title: str, mark: str) -> list[str]:
    """A title, underlined."""
    return [title, mark * len(title), ""]


def usage(parser: argparse.ArgumentParser) -> str:
    """The command with what it needs; its options are listed below."""
    words = [parser.prog]
    for action in parser._actions:
        name = metavar(action)
        if not action.option_strings:
            words.append(f"{name} [{name} ...]" if action.nargs in ("+", "*") else name)
        elif action.required:
            words.append(f"{action.option_strings[-1]} {name}".strip())
    return " ".join([*words, "[options]"])


def metavar(action: argparse.Action) -> str:
    """What stands for the value of an option; nothing if it takes none."""
    if action.option_strings and action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def option(action: argparse.Action, parser: argparse.ArgumentParser) -> list[str]:
    """An option, or a word that a command takes."""
    value = metavar(action)
    named = ", ".join(f"{name} {value}".strip() for name in action.option_strings) or value
    about = parser._get_formatter()._expand_help(action) if action.help else ""
    return [f".. option:: {named}", "", f"   {escaped(about)}", ""]


def epilog(parser: argparse.ArgumentParser) -> list[str]:
    """What a command's help ends with: sentences as text, and its examples as shell."""
    before, found, after = (parser.epilog or "").partition("examples:\n")
    examples = [line for line in after.splitlines() if line.startswith(f"  {parser.prog}")]
    rest = [line for line in after.splitlines() if line.strip() and not line.startswith("  ")]
    lines = text(sentence(before))
    if found:
        lines += [*heading("Examples", "-"), ".. code-block:: sh", ""]
        lines += [*(f"   {commented(line.strip())}" for line in examples), ""]
    return [*lines, *text(sentence(" ".join(rest)))]


def commented(line: str) -> str:
    """An example of the help, with what is said about it as a comment.

    >>> commented("pfedme export runs/a -o m      the shared model")
    'pfedme export runs/a -o m    # the shared model'
    """
    return re.sub(r"\s{3,}(?=\S)", "    # ", line)


def text(words: str | None) -> list[str]:
    """A paragraph, if there is anything to say."""
    return [escaped(" ".join(words.split())), ""] if words and words.strip() else []


def literal(words: str) -> list[str]:
    """A line of code."""
    return [".. code-block:: text", "", f"   {words}", ""]


def sentence(words: str) -> str:
    """The words with a capital and a full stop."""
    words = words.strip()
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith(('.', ':')) or not words else '.'}"


def escaped(words: str) -> str:
    """Text without meaning for reStructuredText; options, and what is in quotes, become literals."""
    words = re.sub(r"([\\*`|_])", r"\\\1", words)
    return re.sub(r"(?<![\w'-])(--[a-zA-Z][\w-]*)", r"``\1``", words)


class CommandList(SphinxDirective):
    """The commands, each with a link to its page and what it does."""

    def run(self) -> list[nodes.Node]:
        lines = [f"- {{doc}}`pfedme {c.name} <commands/{c.name}>`: {c.help}" for c in commands()]
        lines += ["", "```{toctree}", ":hidden:", "", *(f"commands/{c.name}" for c in commands()), "```"]
        return self.parse_text_to_nodes("\n".join(lines))
