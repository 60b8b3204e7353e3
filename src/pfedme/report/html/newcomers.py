"""The page about newcomers: what each chose, and what it gains from a run that it took no part in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pfedme.core.spec import to_json
from pfedme.data import Source
from pfedme.engine.measure import ACCURACY, R2
from pfedme.files import atomic_write, writing
from pfedme.report.html.document import document
from pfedme.report.html.page import NAME, page
from pfedme.report.html.read import Told, read_columns, read_methods, read_offered, read_run, read_verdict
from pfedme.report.tables import data_name

MODELS = {"global": "global", "recommended": "personal"}
"""The names of newcomers' models among those of a run."""


def newcomers_report(run: Path, folder: Path, newcomers: Source) -> None:
    """Writes the page about newcomers whose models are in `folder` and come from the run in `run`."""
    told = as_run(read_run(run), folder)
    content = document([told])
    assert told.clients is not None
    rows, test = (int(told.clients[name].sum()) for name in ("n_train", "n_test"))
    data = data_name({"name": newcomers.name, **to_json(newcomers)})
    trained, name = data_name(told.record["config"]["data"]), told.run.algorithm.name
    content["title"] = f"Newcomers from {data}"
    content["about"] = [
        f"{len(told.clients['client']):,} clients of {data}, which took no part in training, start from the "
        f"shared model of {name} on {trained}. They have {rows:,} training rows in total, and are judged on "
        f"{test:,} test rows. Global is the unchanged shared model, personal the model each client chose."
    ]
    for group in content["groups"]:
        group["cost"] = None  # it would be that of the run
    with writing(folder):
        atomic_write(folder / NAME, page(content))


def as_run(told: Told, folder: Path) -> Told:
    """Presents the newcomers as if they were the clients of a run."""
    offered, methods = read_offered(folder), read_methods(folder)
    verdict = read_verdict(folder / "personalized.json")
    assert offered is not None
    assert methods is not None
    assert verdict is not None
    key = verdict["metric"]
    final: dict[str, Any] = {"round": told.record["final"]["round"]}
    for method, kind in MODELS.items():
        own = methods[method]
        over = {what: own[what] for what in ("mean", "worst_decile")}
        usual = key in (ACCURACY.key, R2.key)
        final[kind] = {**own, **({"clients": over} if usual else {"by_client": {key: over}})}
    clients = {name: offered[name] for name in ("client", "n_train", "n_test")}
    for method, kind in MODELS.items():
        for column, values in offered.items():
            if column.startswith(f"{method}_"):
                clients[f"{kind}_{column.removeprefix(f'{method}_')}"] = values
    record = {**told.record, "history": [], "final": final}
    return dataclasses.replace(
        told,
        path=folder,
        record=record,
        clients=clients,
        offered=offered,
        methods=methods,
        columns=read_columns(folder),
        newcomers=None,
        verdict=verdict,
        compared=None,
    )
