"""The page with the advice: the answer, what each client gains, the evidence, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedme.report.differing import about_difference
from pfedme.report.html.static import commands, escaped, picture, section, static_page, table

if TYPE_CHECKING:
    from pfedme.advice.advise import Advice
    from pfedme.report.columns import ColumnReport

TONES = {"yes": "good", "no": "bad", "cannot tell": "open"}


def advice_page(document: dict[str, Any], advice: Advice, columns: ColumnReport | None, out: Path) -> str:
    """The page as HTML, without scripts; pictures in the folder `out` are embedded."""
    what = advice.found.measure
    parts = [
        f'<section id="answer" class="{TONES[document["verdict"]]}"><h2>Should we train together?</h2>'
        f'<p class="lead">{escaped(document["sentence"])}</p>'
        f"<p>{escaped(_harm(advice))}</p></section>",
        section(
            "What each client gains", _picture(out / "personalized.png"), _clients(document["clients"], what)
        ),
        section("How clients differ", *_differ(advice), _picture(out / "differences.png")),
        section("Which columns matter", *_columns(columns)),
        section("What was tried", _tried(advice), _models(document["methods"], what)),
        section("What to do next", *_next(document)),
    ]
    rows = advice.federation.n_train.sum(), advice.federation.n_test.sum()
    return static_page(
        "Advice",
        f"Advice for {advice.federation.clients:,} clients",
        f"{rows[0]:,} training rows, {rows[1]:,} test rows, judged by {what.name}. Models were chosen on "
        "rows that they had not seen; test rows were read once, after every client had chosen. This took "
        f"{advice.seconds / 60:.1f} minutes.",
        parts,
    )


def _picture(path: Path) -> str:
    return picture(path.stem, path.read_bytes()) if path.exists() else ""


def _columns(found: ColumnReport | None) -> list[str]:
    if found is None:
        return []
    said = "".join(f"<li>{escaped(sentence)}</li>" for sentence in found.sentences)
    note = f"<p class='note'>{escaped(found.caption)}</p>"
    return [f"<ul>{said}</ul>" if said else "", picture("columns", found.picture), note]


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
            else f"<small>{_number(low, what, sign=True)} to {_number(high, what, sign=True)}</small>"
        )
        gain = f'<span class="{tone}">{_number(row["gain"], what, sign=True)}</span> {reach}'
        others = [_number(row[k], what) for k in ("score", "alone", "global")]
        rows.append([escaped(row["client"]), gain, escaped(row["choice"]), *others])
    note = (
        f"{len(rows):,} clients, those that gain most first. The gain is over training alone, with a 95 % "
        "interval from the client's own test rows."
    )
    header = ["client", "gain over alone", "its model", what.name, "alone", "global"]
    return f"<p class='note'>{note}</p><div class='tall'>{table(header, rows)}</div>"


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
        f"<p><strong>{escaped(name[0].upper() + name[1:])}</strong>: {escaped(text)}</p>"
        for name, text in facts
    ]


def _tried(advice: Advice) -> str:
    rows = [
        [
            escaped(t.method),
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
    return table(["method", "loss", "rounds", "converged", "seconds"], rows) + note


def _models(methods: dict[str, dict[str, Any]], what: Any) -> str:
    rows = [
        [
            escaped(name),
            *(_number(entry[k], what) for k in (what.key, "mean", "worst_decile")),
            f"{100 * entry['harmed']:.1f}",
        ]
        for name, entry in methods.items()
    ]
    return "<h3>All models on the test rows</h3>" + table(
        ["model", "over all rows", "client mean", "worst tenth", "harmed %"], rows
    )


def _next(document: dict[str, Any]) -> list[str]:
    said = [
        f"<p>To train {escaped(document['method'])} on this machine:</p>{commands([document['command']])}"
    ]
    if document["deployed"]:
        said.append(
            "<p>To train it in a federation, in which rows stay where they are; the first and the last "
            f"command at each client, the others at the server:</p>{commands(document['deployed'])}"
        )
    said.append(
        "<p>Each client's model is in models/. To use it: "
        "<code>pfedme predict models/CLIENT --data TABLE -o predictions.csv</code></p>"
    )
    if document["left"]:
        said.append(f"<p>With more time it would also try: {escaped('; '.join(document['left']))}.</p>")
    return said
