"""The page with the advice: the answer, what each client gains, the evidence, and what to do next."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedme.report.differing import about_difference

if TYPE_CHECKING:
    from pfedme.advice.advise import Advice

TONES = {"yes": ("good", "Join"), "no": ("bad", "Do not join"), "cannot tell": ("open", "Cannot tell")}
STYLE = """
main { padding-bottom: 3rem; } img { max-width: 100%; height: auto; background: #fff; border-radius: 8px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--paper); padding: 0.8rem; }
.up { color: var(--good); font-weight: 600; } .down { color: var(--bad); font-weight: 600; }
.tall { max-height: 34rem; overflow-y: auto; } .scroll th:first-child { text-align: left; }
.tall thead th { position: sticky; top: 0; background: var(--card); }
"""


def advice_page(document: dict[str, Any], advice: Advice, out: Path) -> str:
    """The page as HTML, without scripts; pictures in the folder `out` are embedded."""
    what = advice.found.measure
    tone, badge = TONES[document["verdict"]]
    parts = [
        f'<section id="answer" class="{tone}"><h2>Should we train together?</h2>'
        f'<p class="lead"><span class="badge">{badge}</span>{_text(document["sentence"])}</p>'
        f"<p>{_text(_harm(advice))}</p></section>",
        _section(
            "What each client gains", _picture(out, "personalized.png"), _clients(document["clients"], what)
        ),
        _section("How clients differ", *_differ(advice), _picture(out, "differences.png")),
        _section("Which columns matter", _picture(out, "columns.png")),
        _section("What was tried", _tried(advice), _models(document["methods"], what)),
        _section("What to do next", *_next(document)),
    ]
    rows = advice.federation.n_train.sum(), advice.federation.n_test.sum()
    style = resources.files("pfedme.report.html").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        '<link rel="icon" href="data:,"><title>Advice</title>'
        f"<style>{style}{STYLE}</style></head><body><main>"
        f"<h1>Advice for {advice.federation.clients:,} clients</h1>"
        f'<p class="about">{rows[0]:,} training rows, {rows[1]:,} test rows, judged by {_text(what.name)}. '
        "Models were chosen on rows that they had not seen; test rows were read once, after every client "
        f"had chosen. This took {advice.seconds / 60:.1f} minutes.</p>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(str(text))


def _section(title: str, *content: str) -> str:
    """A section, or nothing if it would be empty."""
    inside = "".join(content)
    return f"<section><h2>{_text(title)}</h2>{inside}</section>" if inside else ""


def _picture(out: Path, name: str) -> str:
    path = out / name
    if not path.exists():
        return ""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{_text(path.stem)}" src="data:image/png;base64,{content}"></p>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; the first column is a heading."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(
        f"<tr><th class='text'>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: float | None, what: Any, *, sign: bool = False) -> str:
    if value is None:
        return "–"
    digits = ".3g" if what.digits is None else f".{what.digits - 1}f"
    return f"{what.scale * value:{'+' if sign else ''}{digits}}".replace("-", "−")


def _clients(clients: Sequence[dict[str, Any]], what: Any) -> str:
    """One row per client, those that gain most first."""
    order = sorted(clients, key=lambda row: -(row["gain"] if row["gain"] is not None else -1e9))
    rows = []
    for row in order:
        low, high = row["low"], row["high"]
        tone = "up" if low is not None and low > 0 else "down" if high is not None and high < 0 else ""
        reach = (
            ""
            if low is None
            else f" <small>{_number(low, what, sign=True)} to {_number(high, what, sign=True)}</small>"
        )
        gain = f'<span class="{tone}">{_number(row["gain"], what, sign=True)}</span>{reach}'
        rows.append(
            [
                _text(row["client"]),
                _text(row["choice"]),
                *(_number(row[k], what) for k in ("score", "alone", "global")),
                gain,
            ]
        )
    note = "The gain is over training alone, with a 95 % interval from the client's own test rows."
    header = ["client", "its model", what.name, "alone", "global", "gain over alone"]
    return f"<div class='tall'>{_table(header, rows)}</div><p class='note'>{note}</p>"


def _harm(advice: Advice) -> str:
    """Who would be harmed, by the recommended models and by a single shared one."""
    found = advice.found
    names = [advice.federation.name(i) for i in range(found.clients)]
    own, shared = (
        [name for name, hurt in zip(names, found.harmed(found.of(which)) & found.tested, strict=True) if hurt]
        for which in ("recommended", "global")
    )
    first = (
        "No client is clearly worse off than alone with the model that it chose."
        if not own
        else (f"Clearly worse off than alone with the model that they chose: {_some(own)}.")
    )
    second = "" if not shared else f" If all used the one shared model, it would harm {_some(shared)}."
    return first + second


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _differ(advice: Advice) -> list[str]:
    facts = about_difference(advice.differences, advice.federation.classes)
    return [
        f"<p><strong>{_text(name[0].upper() + name[1:])}</strong>: {_text(text)}</p>" for name, text in facts
    ]


def _tried(advice: Advice) -> str:
    rows = [
        [
            _text(t.method),
            f"{t.loss:.4f}",
            f"{t.rounds:,}",
            "yes" if t.converged else "no",
            f"{t.seconds:.0f}",
        ]
        for t in advice.trials
        if t.loss is not None
    ]
    note = (
        "<p class='note'>Loss on validation rows of the model that clients would use, before they choose.</p>"
    )
    return _table(["method", "loss", "rounds", "converged", "seconds"], rows) + note


def _models(methods: dict[str, dict[str, Any]], what: Any) -> str:
    rows = [
        [
            _text(name),
            *(_number(entry[k], what) for k in (what.key, "mean", "worst_decile")),
            f"{100 * entry['harmed']:.1f}",
        ]
        for name, entry in methods.items()
    ]
    return "<h3>All models on the test rows</h3>" + _table(
        ["model", "over all rows", "client mean", "worst tenth", "harmed %"], rows
    )


def _next(document: dict[str, Any]) -> list[str]:
    said = [
        f"<p>To train {_text(document['method'])} on this machine:</p><pre>{_text(document['command'])}</pre>"
    ]
    if document["deployed"]:
        commands = "\n".join(document["deployed"])
        said.append(
            "<p>To train it in a federation, in which rows stay where they are; the first and the last "
            f"command at each client, the others at the server:</p><pre>{_text(commands)}</pre>"
        )
    said.append(
        "<p>Each client's model is in models/. To use it: "
        "<code>pfedme predict models/CLIENT --data TABLE -o predictions.csv</code></p>"
    )
    if document["left"]:
        said.append(f"<p>With more time it would also try: {_text('; '.join(document['left']))}.</p>")
    return said
