"""Shows the scripts of examples/: title and text are a script's docstring, or the comment at its head."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


class Example(NamedTuple):
    """A script with its title, what is said about it, and its code."""

    path: Path
    title: str
    about: str
    code: str


def examples(names: list[str]) -> list[Example]:
    """The examples of these names, which must be all that there are."""
    there = {path.stem: path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    if set(names) != set(there):
        raise ValueError(f"the gallery and examples/ differ in {sorted(set(names) ^ set(there))}")
    return [read(there[name]) for name in names]


def read(path: Path) -> Example:
    """An example."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tree = ast.parse(source)
        said, first = ast.get_docstring(tree) or "", tree.body[0]
        code = "\n".join(source.splitlines()[first.end_lineno or 0 :])
    else:
        lines = source.splitlines()
        head = [line for line in lines[1:] if line.startswith("#")]
        said = "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)
        code = "\n".join(lines[1 + len(head) :])
    title, _, about = said.partition("\n")
    return Example(path, title.rstrip("."), about.strip(), code.strip())


def section(example: Example) -> list[str]:
    """An example as MyST."""
    language = {".py": "python", ".sh": "sh"}[example.path.suffix]
    return [
        f"## {example.title}", "", example.about, "", f"```{{code-block}} {language}",
        f":caption: examples/{example.path.name}", "", example.code, "```", "",
    ]  # fmt: skip


class Gallery(SphinxDirective):
    """The examples that it names, one after the other."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        found = examples([line.strip() for line in self.content if line.strip()])
        for example in found:
            self.env.note_dependency(str(example.path))
        text = "\n".join(line for example in found for line in section(example))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directive `gallery`."""
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True}
