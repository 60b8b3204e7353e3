"""The test rows of a run with its models' predictions: the file from which any metric can be computed.

It has a row for each test row of each client that was evaluated. Its columns are

- `file` and `row`: the file of the table and the number of the row in it, from 1, as in messages; for data
  that does not come from a file, `file` is empty and `row` counts the rows of the client,
- `client` and `label`,
- for each model MODEL in the record (`global`, `local`, `personal`): `MODEL_prediction` and, for
  classes, `MODEL_probability_CLASS`.

It is test_rows.csv, or test_rows.parquet if the CSV file would be large; see `CSV_CELLS` and `MOST_CELLS`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from pfedme.core.tree import Params
from pfedme.engine.metrics import Blocks, logits
from pfedme.engine.simulate import Simulation

NAMES = ("test_rows.csv", "test_rows.parquet")
CSV_CELLS = 1_000_000
"""With at most this many cells, the file is CSV."""
MOST_CELLS = 100_000_000
"""With more cells than this, the file is not written."""


def rows_file(
    simulation: Simulation, who: np.ndarray, models: Mapping[str, Params | None]
) -> dict[str, bytes]:
    """The file's name and content, unless it is too large; `models` are shared by all, or stacked, one for
    each client of `who`."""
    f = simulation.federation
    kinds = {kind: theta for kind, theta in models.items() if theta is not None}
    cells = int(f.n_test[who].sum()) * (4 + len(kinds) * (1 + f.classes))
    if cells > MOST_CELLS:
        return {}
    table = rows_table(simulation, who, kinds)
    if cells <= CSV_CELLS:
        return {NAMES[0]: table.write_csv().encode()}
    content = io.BytesIO()
    table.write_parquet(content)
    return {NAMES[1]: content.getvalue()}


def rows_table(simulation: Simulation, who: np.ndarray, kinds: Mapping[str, Params]) -> pl.DataFrame:
    """The table of clients `who`; see the top of this file."""
    f = simulation.federation
    blocks = Blocks.of(f, "test", who)
    place, owner = blocks.rows(), who[blocks.owner()]
    if f.origin is None:
        file, row = pl.Series([None] * len(place), dtype=pl.String), place - f.start[owner] + 1
    else:
        heights = [height for _, height in f.files]
        starts = np.cumsum([0, *heights])[:-1]
        which = np.searchsorted(starts, f.origin[place], side="right") - 1
        names = pl.Series([name for name, _ in f.files], dtype=pl.String)
        file, row = names[which], f.origin[place] - starts[which] + 1
    clients = pl.Series([f.name(int(i)) for i in who], dtype=pl.String)
    labels = np.array(f.schema.labels if f.schema else [str(k) for k in range(f.classes)])
    columns: dict[str, Any] = {
        "file": file,
        "row": row.astype(np.int64),
        "client": clients[blocks.owner()],
        "label": labels[f.y[place]] if f.classes else f.labels_in_units()[place],
    }
    for kind, scores in _scores(simulation, kinds, blocks).items():
        if not f.classes:
            mean = f.schema.label_mean if f.schema else 0.0
            columns[f"{kind}_prediction"] = mean + f.label_unit * scores[:, 0].astype(np.float64)
            continue
        columns[f"{kind}_prediction"] = labels[np.argmax(scores, axis=1)]
        odds = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True, initial=-np.inf))
        odds /= odds.sum(axis=1, keepdims=True)
        for k, label in enumerate(labels):
            columns[f"{kind}_probability_{label}"] = odds[:, k].astype(np.float32)
    return pl.DataFrame(columns)


def _scores(simulation: Simulation, kinds: Mapping[str, Params], blocks: Blocks) -> dict[str, np.ndarray]:
    """Each model's scores for the rows in `blocks`, one row each."""
    if not len(blocks.client):
        outputs = max(1, simulation.federation.classes)
        return {kind: np.zeros((0, outputs), np.float32) for kind in kinds}
    store = simulation.judged
    return {kind: logits(simulation.model, theta, store.x, store.y, blocks) for kind, theta in kinds.items()}
