"""Pages without scripts: their frame and parts."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from importlib import resources

STYLE = """
main { padding-bottom: 3rem; } img { max-width: 100%; height: auto; background: #fff; border-radius: 8px; }
pre { white-space: pre-wrap; background: var(--paper); padding: 0.8rem; margin: 0.6rem 0 1rem; }
pre span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.scroll tbody th.text { white-space: normal; overflow-wrap: anywhere; min-width: 8.5rem; }
td small { color: var(--soft); } @media (max-width: 640px) { td small { display: block; } }
.up { color: var(--good); font-weight: 600; } .down { color: var(--bad); font-weight: 600; }
.tall { max-height: 34rem; overflow-y: auto; } .scroll th:first-child { text-align: left; }
.tall thead th { position: sticky; top: 0; background: var(--card); }
"""


def static_page(title: str, heading: str, about: str, parts: Sequence[str]) -> str:
    """A self-contained page of these parts, which are HTML; the other texts are escaped."""
    style = resources.files("pfedme.report.html").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{escaped(title)}</title>'
        f"<style>{style}{STYLE}</style></head><body><main><h1>{escaped(heading)}</h1>"
        f'<p class="about">{escaped(about)}</p>{"".join(parts)}</main></body></html>\n'
    )


def escaped(text: object) -> str:
    """A text as HTML."""
    return html.escape(str(text))


def section(title: str, *content: str) -> str:
    """A section, or nothing if it would be empty."""
    inside = "".join(content)
    return f"<section><h2>{escaped(title)}</h2>{inside}</section>" if inside else ""


def picture(name: str, content: bytes) -> str:
    """An embedded PNG."""
    data = base64.b64encode(content).decode()
    return f'<p><img alt="{escaped(name)}" src="data:image/png;base64,{data}"></p>'


def commands(lines: Sequence[str]) -> str:
    """Commands, one per line, which break between words only."""
    told = "\n".join(" ".join(f"<span>{escaped(word)}</span>" for word in line.split(" ")) for line in lines)
    return f"<pre>{told}</pre>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; the first column is a heading."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(
        f"<tr><th class='text'>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
