"""The page: the document and the scripts that draw it, in one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pfedme.errors import InputError
from pfedme.files import atomic_write, writing
from pfedme.report.html.document import document
from pfedme.report.html.read import read

NAME = "report.html"
"""The name of the page in the folder of a run or a comparison."""
SCRIPTS = (
    "chart.js", "bars.js", "parts.js", "answer.js", "find.js", "results.js", "clients.js", "ledger.js",
    "again.js", "page.js",
)  # fmt: skip


def report(folders: Sequence[Path], out: Path, *, force: bool = False) -> None:
    """Writes the page about the runs and comparisons in `folders`."""
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"-o {out} must be a file whose name ends in .html.")
    if not out.parent.is_dir():
        raise InputError(f"There is no folder {out.parent} for the report; create it, or choose another -o.")
    if out.is_dir():
        raise InputError(f"-o {out} is a folder; give the name of a file.")
    if out.exists() and not force:
        raise InputError(f"{out} exists; choose another -o, or --force to overwrite it.")
    text = page(document(read(folders)))
    with writing(out):
        atomic_write(out, text)


def page(content: dict[str, Any]) -> str:
    """The page that shows a document."""
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=html.escape(content["title"]),
        digest=digest,
        style=_asset("page.css"),
        document=embedded(content),
        script=script,
    )


def embedded(content: dict[str, Any]) -> str:
    """JSON that is safe in a script element, whatever its strings contain.

    >>> embedded({"client": "</script>"})
    '{"client":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files("pfedme.report.html").joinpath(name).read_text(encoding="utf-8")
