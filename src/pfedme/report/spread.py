"""How rows are distributed over clients: how different clients are, duplicate rows, a picture of labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtr, stdtr
from scipy.stats import hypergeom

from pfedme.data.federation import Federation
from pfedme.data.fitting import told_by_clients
from pfedme.data.hashing import hash_rows
from pfedme.data.schema import Column, is_number
from pfedme.engine.importance import level
from pfedme.report.figures import png

TINY = 10
"""With fewer training rows than this, little can be learned from a client or said about it."""
BINS = 12
"""Bins of a picture of numeric labels."""
BLOCKS = " ▁▂▃▄▅▆▇█"
MANY_CLASSES = 20
"""With more classes than this, numeric classes may be meant as a quantity."""


def label_shares(federation: Federation) -> tuple[np.ndarray, list[str]]:
    """The share of each class, or range of numbers, in each client's rows, and their names."""
    f = federation
    if f.classes:
        counts = f.label_counts()
        names = list(f.schema.labels) if f.schema else [str(k) for k in range(f.classes)]
    else:
        y = f.labels_in_units()
        edges = np.linspace(np.quantile(y, 0.01), np.quantile(y, 0.99), BINS + 1)
        place = np.clip(np.searchsorted(edges, y, "right") - 1, 0, BINS - 1)
        owner = np.repeat(np.arange(f.clients), f.count)
        counts = np.bincount(owner * BINS + place, minlength=f.clients * BINS).reshape(f.clients, BINS)
        names = [f"{edge:.4g}" for edge in edges[:-1]]
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), names


def bars(shares: np.ndarray, most: float) -> str:
    """Shares as a string of blocks, with a full block for `most`.

    >>> bars(np.array([0.5, 0.0, 0.25, 0.01]), 0.5)
    '█·▄▁'
    """
    height = np.ceil(np.clip(shares / most, 0, 1) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[h] if h else "·" for h in height)


def unlike(federation: Federation) -> dict[str, dict[str, float]]:
    """How different clients are in their labels and features, and how different they would be by chance.

    For classes it is the total variation distance ½ Σ |p_i − p| between a client's shares p_i and those of
    all rows, p: 0 if they are equal, 1 if they have nothing in common. For numbers it is the distance between
    a client's mean and that of all rows, in standard deviations. Both are means over clients, the second also
    over features. `by_chance` is the expected distance if the same rows were assigned to clients at random.
    """
    f = federation
    if f.classes:
        dealt = np.random.default_rng(0).permutation(f.y)
        owner = np.repeat(np.arange(f.clients), f.count)
        random = np.bincount(owner * f.classes + dealt, minlength=f.clients * f.classes)
        labels = {
            "distance": _total_variation(f.label_counts()),
            "by_chance": _total_variation(random.reshape(f.clients, f.classes)),
        }
    else:
        labels = _mean_distance(f, f.y[:, None])
    return {"labels": labels, "features": _mean_distance(f, f.x.reshape(len(f.x), -1))}


def _total_variation(counts: np.ndarray) -> float:
    own = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(0.5 * np.abs(own - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean())


def _mean_distance(federation: Federation, x: np.ndarray) -> dict[str, float]:
    f, n = federation, len(x)
    total = np.add.reduceat(x, f.start, axis=0, dtype=np.float64)
    mean = total.sum(axis=0) / n
    spread = np.sqrt(sum(_squares(x[at : at + 2**16], mean) for at in range(0, n, 2**16)) / n)
    varies = spread > 1e-6 * np.maximum(np.abs(mean), 1e-6)
    away = np.abs(total[:, varies] / f.count[:, None] - mean[varies]) / spread[varies]
    # The mean of n_i of n rows, drawn at random, is about normal; the mean of |z| is √(2/π).
    chance = np.sqrt(2 / np.pi * np.maximum(1 / f.count - 1 / n, 0)).mean()
    return {"distance": float(away.mean()) if varies.any() else 0.0, "by_chance": float(chance)}


def _squares(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return ((rows - mean) ** 2).sum(axis=0)


class Shift(NamedTuple):
    """A column whose distribution at a client differs from that in all other clients' rows."""

    client: int
    """The client's index in the federation."""
    column: Column
    distance: float
    """The total variation distance of categories; for numbers, that of two normal distributions whose means
    are as far apart."""
    category: str
    """The category that is most overrepresented; empty for a number."""
    here: float
    """The share of that category at the client, or the mean of the number in its own units."""
    elsewhere: float
    apart: float
    """The difference of these shares, or of these means in standard deviations."""


def shifts(federation: Federation, who: np.ndarray) -> list[Shift]:
    """The columns that are clearly distributed differently at a client of `who`, most different first.

    Training and validation rows are compared. Categories are compared by Fisher's exact test, numbers by
    Student's test with the larger of two estimates of the variance and as many degrees of freedom as the
    client has; both at the `level` that is corrected for all columns and clients.
    """
    f = federation
    if f.schema is None or f.shape or f.clients < 2:
        return []
    columns = [column for column in f.schema.columns if not column.of]
    count, x = f.n_val + f.n_train, f.x.reshape(len(f.x), -1)
    total, squares = np.zeros((2, f.features))
    for part in told_by_clients(x, f.start, count):
        total, squares = total + part.total.sum(axis=0), squares + part.squares.sum(axis=0)
    rows, all_rows, found = count[who], int(count.sum()), []
    own = [x[at : at + n].astype(np.float64) for at, n in zip(f.start[who], rows, strict=True)]
    mine, spread = (np.stack([a.sum(axis=0) for a in each]) for each in (own, [a**2 for a in own]))
    n, m = rows[:, None], all_rows - rows[:, None]  # at the client, and elsewhere
    theirs = total - mine
    here, there = mine / n, theirs / m
    # Var(x) elsewhere, and at the client if that is larger.
    variance = np.maximum((squares - spread) / m - there**2, spread / n - here**2)
    error = np.sqrt(np.maximum(variance, 1e-12) * (1 / n + 1 / m))
    by_chance = 2 * stdtr(np.maximum(n - 1, 1), -np.abs(here - there) / error)
    least = level(len(columns) * len(who))
    for column in columns:
        at = slice(f.schema.starts[column.name], f.schema.starts[column.name] + column.features)
        apart = here[:, at] - there[:, at]
        if column.kind == "number":
            p, distance, most = by_chance[:, at.start], 2 * ndtr(np.abs(apart[:, 0]) / 2) - 1, 0 * rows
        else:
            some = np.rint(mine[:, at]), all_rows, np.rint(total[at]), n
            tails = hypergeom.sf(some[0] - 1, *some[1:]), hypergeom.cdf(*some)
            p = 2 * column.features * np.minimum(*tails).min(axis=1)
            distance, most = np.abs(apart).sum(axis=1) / 2, apart.argmax(axis=1)
        for i in np.flatnonzero(p < least):
            k = int(most[i])
            means = float(here[i, at][k]), float(there[i, at][k])
            if column.kind == "number":
                means = column.mean + column.scale * means[0], column.mean + column.scale * means[1]
            category = column.categories[k] if column.kind == "category" else ""
            away = float(apart[i, k])
            found.append(Shift(int(who[i]), column, float(distance[i]), category, *means, away))
    return sorted(found, key=lambda shift: -shift.distance)


def cautions(federation: Federation) -> list[str]:
    """Warnings to read before trusting results on these rows."""
    f, said = federation, []
    if f.clients == 1:
        said.append("There is only one client, so there is nothing to federate.")
    if tiny := int((f.n_train < TINY).sum()):
        said.append(f"{tiny:,} client{' has' if tiny == 1 else 's have'} fewer than {TINY} training rows.")
    shared, seen = held_twice(f, hash_rows(f.x, f.y))
    if shared or seen:
        times = int(np.clip(2**21 // f.x.size, 1, 20))
        by_chance = np.mean([held_twice(f, hash_rows(_shuffled(f, k), f.y)) for k in range(times)], axis=0)
        n, tests = int(f.count.sum()), max(1, int(f.n_test.sum()))
        if more_than_chance(shared, by_chance[0]):
            said.append(
                f"{shared:,} rows ({shared / n:.1%}) are the same as a row of another client, features and "
                f"label; by chance there would be {_about(by_chance[0])}."
            )
        if more_than_chance(seen, by_chance[1]):
            said.append(
                f"{seen:,} test rows ({seen / tests:.1%}) are the same as a training row: results on them "
                f"say nothing about new rows; by chance there would be {_about(by_chance[1])}."
            )
    for column in f.schema.columns if f.schema else ():
        at = f.schema.starts[column.name] if f.schema else 0
        own = f.x[:, at : at + column.features]
        if column.kind == "category" and (strange := int((~own.any(axis=1)).sum())):
            said.append(
                f"{strange:,} test row{' has' if strange == 1 else 's have'} a '{column.name}' that no "
                "training row has, and none of its features."
            )
    labels = f.schema.labels if f.schema else ()
    if len(labels) > MANY_CLASSES and all(map(is_number, labels)):
        said.append(f"The label has {len(labels)} classes; if it is a quantity, give --task regression.")
    return said


def held_twice(f: Federation, hashes: np.ndarray) -> tuple[int, int]:
    """How many rows equal a row of another client, and how many test rows equal a training row; equal rows
    have equal hashes."""
    owner = np.repeat(np.arange(f.clients), f.count)
    order = np.argsort(hashes, kind="stable")
    new = np.append(True, hashes[order][1:] != hashes[order][:-1])
    group = np.empty(len(owner), np.int64)
    group[order] = np.cumsum(new) - 1
    groups = int(new.sum())
    if groups == len(owner):
        return 0, 0
    first = np.full(groups, -1, np.int64)
    first[group[::-1]] = owner[::-1]
    several = np.zeros(groups, bool)
    several[group[owner != first[group]]] = True
    held = np.broadcast_to(f.n_val, f.clients)[owner]
    testing = np.arange(len(owner)) - f.start[owner] >= held + f.n_train[owner]
    training = np.zeros(groups, bool)
    training[group[~testing]] = True
    return int(several[group].sum()), int((testing & training[group]).sum())


def _shuffled(f: Federation, seed: int) -> np.ndarray:
    """Features of rows that are equal only by chance: each column's values are shuffled among the rows of a
    client that have the same label."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(f.clients), f.count)
    label = f.y if f.classes else np.zeros(len(f.y), np.int64)
    x = f.x.reshape(len(f.x), -1)
    widths = [column.features for column in f.schema.columns] if f.schema else [1] * x.shape[1]
    order, out, at = np.lexsort((label, owner)), np.empty_like(x), 0
    for width in widths:
        dealt = np.lexsort((rng.random(len(x)), label, owner))
        out[order, at : at + width] = x[dealt, at : at + width]
        at += width
    return out


def more_than_chance(found: int, by_chance: float) -> bool:
    """Whether so many equal rows are clearly more than by chance, which the shuffled rows estimate roughly.

    >>> more_than_chance(7, 0), more_than_chance(120, 90), more_than_chance(0, 0)
    (True, False, False)
    """
    return found > 2 * by_chance + 3 * by_chance**0.5


def _about(n: float) -> str:
    return f"about {n:,.0f}" if n >= 0.5 else "none"


def columns(federation: Federation) -> list[dict[str, Any]]:
    """Describes each column of a table: numbers by mean, deviation and range, categories by their counts."""
    f = federation
    return [_column(f, column) for column in f.schema.columns if not column.of] if f.schema else []


def _column(federation: Federation, column: Column) -> dict[str, Any]:
    assert federation.schema is not None
    at = federation.schema.starts[column.name]
    own = federation.x[:, at : at + column.features]
    if column.kind == "category":
        counts = own.sum(axis=0, dtype=np.float64).astype(int).tolist()
        return {
            "name": column.name,
            "kind": "category",
            "categories": dict(zip(column.categories, counts, strict=True)),
        }
    if column.form.date and column.form.date != "time":
        days = [column.mean, *(column.mean + column.scale * float(value) for value in (own.min(), own.max()))]
        mean, low, high = (str(np.datetime64(round(day), "D")) for day in days)
        return {"name": column.name, "kind": "date", "mean": mean, "min": low, "max": high}
    ends = [column.mean + column.scale * float(value) for value in (own.min(), own.max())]
    # After standardising and back, a zero is only approximately zero.
    low, high = (0.0 if abs(end) < 1e-6 * column.scale else end for end in ends)
    scale = column.scale if high > low else 0.0
    return {"name": column.name, "kind": "number", "mean": column.mean, "std": scale, "min": low, "max": high}


def labels_figure(federation: Federation) -> bytes:
    """A PNG of each client's labels: one row per client, one column per class or range; darker means more."""
    f = federation
    shares, names = label_shares(f)
    order = np.argsort(-(shares @ np.arange(shares.shape[1])), kind="stable")
    height = float(np.clip(0.16 * f.clients, 2.0, 9.0))
    figure = Figure(figsize=(5.6, height + 0.9), layout="constrained", dpi=200)
    at = figure.subplots()
    image = at.imshow(100 * shares[order], aspect="auto", cmap="Greys", vmin=0, interpolation="nearest")
    what = f.schema.label if f.schema else "label"
    at.set_xlabel(what if f.classes else f"{what}, in {BINS} ranges starting at", fontsize=9)
    step = max(1, len(names) // 20)
    at.set_xticks(
        range(0, len(names), step), names[::step], fontsize=7, rotation=45 if step > 1 or not f.classes else 0
    )
    if f.clients <= 60:
        at.set_yticks(range(f.clients), [f.name(i)[:24] for i in order], fontsize=6)
    at.set_ylabel(f"{f.clients:,} clients, sorted by label", fontsize=9)
    bar = figure.colorbar(image, ax=at)
    bar.set_label("% of the client's rows", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return png(figure)
