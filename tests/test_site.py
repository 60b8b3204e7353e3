"""The site: what `make docs` checks is checked, and every name of the Python interface has a place."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import pfedme

DOCS = Path(__file__).resolve().parent.parent / "docs"


def part(name: str) -> ModuleType:
    """A module of docs/_ext."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "_ext" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(site: Path, body: str) -> list[str]:
    """What is wrong with a site of two pages and a style sheet, of which one page has this body."""
    (site / "other.html").write_text('<p id="here">')
    (site / "page.html").write_text(f"<html><body>{body}</body></html>")
    return [line for line in part("check").problems(site) if not line.endswith("is on no page")]


def test_links_that_lead_somewhere_are_fine(tmp_path: Path):
    links = ("other.html", "other.html#here", "#mine", "https://example.org/", "data:text/plain,x")
    assert written(tmp_path, '<p id="mine">' + "".join(f'<a href="{link}">' for link in links)) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('<a href="gone.html">', "dead link gone.html"),
        ('<a href="other.html#gone">', "dead link other.html#gone"),
        ('<a href="#gone">', "dead link #gone"),
        ('<img src="gone.png">', "dead link gone.png"),
        ('<script src="https://example.org/x.js"></script>', "fetches https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "fetches //example.org/x.css"),
    ],
)
def test_what_is_wrong_with_a_page_is_told(tmp_path: Path, body: str, why: str):
    assert written(tmp_path, body) == [f"page.html: {why}"]


def test_a_font_from_elsewhere_is_told(tmp_path: Path):
    (tmp_path / "x.css").write_text("@font-face { src: url('https://example.org/x.woff2') }")
    assert written(tmp_path, "") == ["x.css: fetches https://example.org/x.woff2"]


def test_a_name_without_a_place_is_told(tmp_path: Path):
    places = [f'<p id="pfedme.{name}">' for name in pfedme.__all__ if name != "train"]
    (tmp_path / "page.html").write_text("".join(places))
    assert part("check").problems(tmp_path) == ["pfedme.train is on no page"]


def test_every_name_of_the_interface_has_a_place():
    text = "\n".join(path.read_text() for path in DOCS.glob("api/*.rst"))
    placed = re.findall(r"^\.\. auto\w+:: pfedme\.(\w+)$", text, re.MULTILINE)
    assert sorted(placed) == sorted(pfedme.__all__)


def test_docstrings_are_rewritten():
    module = part("docstrings")
    assert doctest.testmod(module).failed == 0
    lines = ["Of |D| rows and `w`:", "", "    F(w) = *", "", ">>> 1", "1"]
    module.rewrite(None, "", "", None, None, lines)
    assert lines == [r"Of \|D\| rows and ``w``:", "", "::", "", "    F(w) = *", "", ">>> 1", "1", ""]
