"""Which columns matter for the shared model and for each client's, as data, a picture and sentences."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.schema import is_number
from pfedme.engine.importance import Importance, features, importance
from pfedme.engine.store import whole
from pfedme.files import atomic_write, writing
from pfedme.report.figures import COLOURS, dress, png
from pfedme.report.spread import Shift, shifts

MOST_COLUMNS, MOST_CLIENTS = 12, 30
"""At most this many are drawn."""
LONGEST = 20
"""At most this many characters of a name are drawn."""
TOLD = 3
"""At most this many sentences about models, and one less about rows."""
LEAST = 0.01
"""Smaller differences of importance are not told, however certain."""
LEAST_DISTANCE = 0.1
"""The same for the total variation distance of distributions."""


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    """Which columns matter, and where clients differ from the others."""

    importance: Importance
    shifts: list[Shift]
    """Columns that are clearly distributed differently at a client, most different first."""
    picture: bytes
    """A PNG."""
    caption: str
    sentences: list[str]
    """At most six."""
    table: str
    """The content of columns.csv."""


def columns_of(
    model: Model, federation: Federation, shared: Params | None, theta: Params, *, seed: int = 0
) -> ColumnReport | None:
    """Which columns matter for the clients' models `theta`, stacked, and for a shared model if there is one;
    None if the data is not a table of columns. Test rows are not used. Several hosts exchange all rows."""
    if not features(federation):
        return None
    federation = whole(federation)
    found = importance(model, federation, shared, theta, seed=seed)
    if found is None:
        return None
    apart = shifts(federation, found.who)
    shown = drawn(found)
    return ColumnReport(
        found, apart, figure(found, federation, *shown), caption(found, federation, *shown),
        sentences(found, apart, federation), table(found, federation),
    )  # fmt: skip


def write_columns(path: Path, found: ColumnReport) -> None:
    """Writes columns.csv, .png and .json to a folder."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        atomic_write(path / "columns.csv", found.table)
        atomic_write(path / "columns.png", found.picture)
        told = {"sentences": found.sentences, "caption": found.caption}
        atomic_write(path / "columns.json", json.dumps(told, indent=1) + "\n")


def table(found: Importance, federation: Federation) -> str:
    """A row for each client and column; those of all clients, with the importance for the shared model over
    all their rows, come first and have no client."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["client", "column", "importance", "shared_importance"])

    def cell(value: float) -> str:
        return "" if np.isnan(value) else f"{value:.6f}"

    nothing = np.full(found.own.shape, np.nan)
    at_client = nothing if found.at_client is None else found.at_client
    shared = nothing[0] if found.shared is None else found.shared
    for name, own, other in zip(found.columns, found.mean, shared, strict=True):
        out.writerow(["", name, cell(own), cell(other)])
    for i, mine, others in zip(found.who, found.own, at_client, strict=True):
        for name, own, other in zip(found.columns, mine, others, strict=True):
            out.writerow([federation.name(int(i)), name, cell(own), cell(other)])
    return text.getvalue()


def differing(found: Importance) -> np.ndarray:
    """How much more important each column is for each client's model than for the shared one; 0 if that is
    not clear."""
    if found.shared is None:
        return np.zeros_like(found.own)
    return np.where(found.clear, found.own - found.shared, 0)


def drawn(found: Importance) -> tuple[np.ndarray, np.ndarray]:
    """The columns and clients to draw, by their index in `found`: the columns that matter most, for the
    shared model or only for some clients', and the clients whose models differ most clearly from the shared
    one; with equal ones, those with more rows."""
    size = np.maximum.reduce([found.overall, found.mean, np.abs(differing(found)).max(axis=0)])
    most = np.argsort(-size, kind="stable")[:MOST_COLUMNS]
    columns = most[np.argsort(-found.overall[most], kind="stable")]
    known = np.flatnonzero(found.rows > 1)
    clients = known[np.lexsort((-found.rows[known], found.p[known].min(axis=1)))]
    return columns, clients[:MOST_CLIENTS]


def figure(found: Importance, federation: Federation, columns: np.ndarray, clients: np.ndarray) -> bytes:
    """A PNG: a bar for each column that matters for the shared model, and below it a heat map of the clients'
    own models, with a mark where they clearly differ from the shared one.

    It is narrow, so that it can be read on a phone too."""
    height = 0.19 * len(clients)
    figure = Figure(figsize=(4.6, height + 2.9), layout="constrained", dpi=260)
    above, below = figure.subplots(2, 1, height_ratios=[1.1, max(height, 0.3)], sharex=True)
    place = np.arange(len(columns))
    above.bar(place, found.overall[columns], width=0.75, color=COLOURS[0])
    above.axhline(0, color="0.4", linewidth=0.6)
    dress(above, "", "", "rise of loss", _whose(found))
    above.grid(axis="x", visible=False)
    above.set_axisbelow(True)
    own = found.own[np.ix_(clients, columns)]
    # A few large values on a linear scale would leave all others white.
    top, most = (max(float(np.quantile(own, q)), 1e-6) if own.size else 1.0 for q in (1.0, 0.97))
    image = below.imshow(
        np.maximum(own, 0), aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, most), interpolation="nearest"
    )
    for i, j in np.argwhere(found.clear[np.ix_(clients, columns)]):
        more = differing(found)[clients[i], columns[j]] > 0
        colour = "white" if own[i, j] > 0.35 * most else "black"
        below.plot(j, i, marker="^" if more else "v", markersize=3.2, color=colour, linestyle="")
    below.set_xticks(place, [_short(found.columns[j]) for j in columns], fontsize=8.5, rotation=90)
    below.set_yticks(range(len(clients)), [_short(federation.name(int(found.who[i]))) for i in clients])
    below.tick_params(axis="y", labelsize=8.5, length=0)
    below.set_title("each client's own model", fontsize=9.5)
    bar = figure.colorbar(
        image, ax=below, location="bottom", aspect=40, shrink=0.9, pad=0.12 / max(height, 0.6),
        extend="max" if top > most else "neither",
    )  # fmt: skip
    ticks = most * np.array([0, 1, 4, 9, 16]) / 16  # at equal distances
    bar.set_ticks(ticks.tolist(), labels=[_number(tick) for tick in ticks])
    bar.set_label("rise of loss" + (f" (up to {_number(top)})" if top > most else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return png(figure)


def _whose(found: Importance) -> str:
    return "shared model" if found.shared is not None else "mean over the clients' models"


def _short(name: str) -> str:
    """A name that fits, with dollar signs that are not mathematics."""
    cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return cut.replace("$", r"\$")


def caption(found: Importance, federation: Federation, columns: np.ndarray, clients: np.ndarray) -> str:
    """What the picture shows, and what it does not."""
    what = "log loss" if federation.classes else "half the squared error, in standard deviations"
    count = (federation.n_val + federation.n_train)[found.who]
    limit = f", at most {found.rows.max():,} of each client" if (found.rows < count).any() else ""
    where = "the client's rows for its own model"
    if found.shared is not None:
        where = f"all clients' rows for the shared model, and over {where}"
    told = [
        f"By how much the loss ({what}) rises if a column's values are shuffled: over {where}. Measured on "
        f"training rows{limit}; test rows are not used."
    ]
    if found.clear[np.ix_(clients, columns)].any():
        told.append("Triangles: clearly more (▲) or less (▼) than for the shared model.")
    if found.shared is not None:
        told.append("The clients whose models differ most clearly from the shared one come first.")
    hidden = [
        f"{n:,} more {word}{'s' if n > 1 else ''}"
        for n, word in (
            (len(found.columns) - len(columns), "column"),
            (federation.clients - len(clients), "client"),
        )
        if n
    ]
    return " ".join([*told, *([f"And {' and '.join(hidden)}."] if hidden else [])])


def sentences(found: Importance, apart: list[Shift], federation: Federation) -> list[str]:
    """At most six: the columns that matter most, clients whose models differ from the shared one, and clients
    whose rows differ from the others'."""
    models = list(_about_models(found, federation))[:TOLD]
    rows = list(_about_rows(apart, federation))[: TOLD - 1]
    told = [_about_shared(found), *models]
    if found.shared is not None and not models:
        told.append("No client's own model clearly relies on other columns than the shared model.")
    if federation.clients > 1 and not rows:
        told.append("No column is clearly distributed differently at a single client.")
    return [*told, *rows]


def _about_shared(found: Importance) -> str:
    order = [int(j) for j in np.argsort(-found.overall, kind="stable")[:3] if found.overall[j] > 0]
    for_whom = "for the shared model" if found.shared is not None else "for the clients' models"
    if not order:
        return f"No column matters {for_whom}."
    *first, last = [f"{found.columns[j]} ({_number(float(found.overall[j]))})" for j in order]
    if not first:
        return f"The column that matters most {for_whom} is {last}."
    return f"The columns that matter most {for_whom} are {', '.join(first)} and {last}."


def _about_models(found: Importance, federation: Federation) -> Iterator[str]:
    """The clients whose model relies more, or less, on a column than the shared one, one column each."""
    if found.shared is None:
        return
    away = differing(found)
    column = np.abs(away).argmax(axis=1)
    size = np.abs(away).max(axis=1)
    for i in map(int, np.argsort(-size, kind="stable")):
        if size[i] < LEAST:
            return
        j = int(column[i])
        own, other = float(found.own[i, j]), float(found.shared[j])
        how, where = "more" if own > other else "less", _place(federation, int(found.who[i]))
        yield (
            f"At {where}, {found.columns[j]} matters {how} than for the shared model ("
            f"{_number(own)} against {_number(other)}, on {found.rows[i]:,} rows)"
            f"{_turned(found, i, j, federation)}."
        )


def _place(federation: Federation, client: int) -> str:
    """A client's name, as in "at Dayton" or "at client 7"."""
    name = federation.name(client)
    return f"client {name}" if is_number(name) else name


def _turned(found: Importance, i: int, j: int, federation: Federation) -> str:
    """Which way the column works at the client, if it is not the shared model's way."""
    own, other = found.direction[i, j], found.shared_direction[j]
    if np.isnan(own) or np.isnan(other) or own * other >= 0:
        return ""
    what = f"'{federation.label_name(federation.positive)}' is" if federation.classes else "the prediction is"
    way = ("more likely", "less likely") if federation.classes else ("higher", "lower")
    here, there = way if own > 0 else way[::-1]
    return f"; if it is high, {what} {here} there, and {there} for the shared model"


def _about_rows(apart: list[Shift], federation: Federation) -> Iterator[str]:
    """The clients where a column is distributed differently, one column each."""
    told = set()
    for shift in apart:
        if shift.client in told or shift.distance < LEAST_DISTANCE:
            continue
        told.add(shift.client)
        where, name = _place(federation, shift.client), shift.column.name
        if shift.category:
            here, elsewhere = (f"{100 * share:.0f} %" for share in (shift.here, shift.elsewhere))
            yield f"At {where}, {name} is '{shift.category}' in {here} of the rows, elsewhere in {elsewhere}."
            continue
        here, elsewhere = _means(shift)
        date = bool(shift.column.form.date)
        way = ("later" if date else "higher") if shift.apart > 0 else ("earlier" if date else "lower")
        yield (
            f"At {where}, {name} is {way} than elsewhere ({here} against {elsewhere} on average, "
            f"{abs(shift.apart):.1f} standard deviations)."
        )


def _means(shift: Shift) -> tuple[str, str]:
    """Two means with as many digits as tell them apart."""
    if shift.column.form.date and shift.column.form.date != "time":
        days = (str(np.datetime64(round(day), "D")) for day in (shift.here, shift.elsewhere))
        return next(days), next(days)
    size = np.floor(np.log10(max(abs(shift.here - shift.elsewhere), 1e-12)))
    digits = int(np.clip(1 - size, 0, 6))
    return f"{shift.here:,.{digits}f}", f"{shift.elsewhere:,.{digits}f}"


def _number(value: float) -> str:
    """An importance, with two digits or more.

    >>> _number(0.1234), _number(0.00123), _number(2.0), _number(12.3)
    ('0.12', '0.0012', '2.0', '12')
    """
    if abs(value) < 0.0001:
        return "0"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:#.2g}"
