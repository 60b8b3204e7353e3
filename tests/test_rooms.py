"""The rooms of the house: a module imports only from its own room and from those before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pfedme

ROOT = Path(pfedme.__file__).parent
ROOMS = (
    "errors", "files", "livebar", "core", "algorithms", "privacy", "data", "engine", "runs", "export",
    "report", "training", "personalization", "tuning", "advice", "experiments", "deploy", "audits",
    "arguments", "api", "cli",
)  # fmt: skip
"""In the order of the pipeline; a name without a folder is a single module."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
}


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, wherever it does; but for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pfedme":
            base = (node.module or "").removeprefix("pfedme").removeprefix(".")
            found |= {full if (full := f"{base}.{name.name}") in MODULES else base for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name.removeprefix("pfedme.") for name in node.names if "pfedme." in name.name}
    return found - {""}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_rooms_before_its_own(module: str):
    place = ROOMS.index(module.split(".")[0])
    later = {name for name in imported(MODULES[module]) if ROOMS.index(name.split(".")[0]) > place}
    assert not later


def test_no_modules_import_each_other_when_they_are_loaded():
    """Of modules that import each other, one sees the other half made."""
    depends = {module: imported_at_once(path) & MODULES.keys() for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in depends[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def imported_at_once(path: Path) -> set[str]:
    """The modules of this package that a file imports when it is loaded, other than its own package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pfedme."):
            base = (node.module or "").removeprefix("pfedme.")
            found |= {full if (full := f"{base}.{name.name}") in MODULES else base for name in node.names}
    own = ".".join(path.relative_to(ROOT).parts[:-1])
    return found - {own}


def test_no_module_is_long():
    long = {
        name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > 450
    }
    assert not long
