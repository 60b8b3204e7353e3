"""clients.csv: a row for each client."""

from __future__ import annotations

import csv
import io

import numpy as np

from pfedme.data.federation import Federation
from pfedme.engine.evaluation import Evaluation


def clients_csv(evaluation: Evaluation, federation: Federation, metric: str = "") -> str:
    """One row per client, with the accuracy of each model that exists, in a regression its RMSE, and then its
    other metrics if rows were kept, the chosen one first."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    kinds = ("global", "local", "personal")
    always = ("accuracy", "rmse") if federation.classes == 0 else ("accuracy",)
    others = (
        ("r2", "mae")
        if federation.classes == 0
        else ("auc", "log_loss", "balanced_accuracy", "recall", "brier")
    )
    kept = any(test.rows is not None for test in evaluation.test.values())
    measures = dict.fromkeys((*always, *(filter(None, (metric, *others)) if kept else ())))
    names = [(kind, measure) for measure in measures for kind in kinds]
    table.writerow(["client", "n_train", "n_test", *(f"{kind}_{measure}" for kind, measure in names)])
    columns = [
        evaluation.test[kind].of(measure) if kind in evaluation.test else None for kind, measure in names
    ]
    for k, i in enumerate(evaluation.clients):
        cells = ["" if c is None or np.isnan(c[k]) else float(c[k]) for c in columns]
        table.writerow([federation.name(i), int(federation.n_train[i]), int(federation.n_test[i]), *cells])
    return text.getvalue()
