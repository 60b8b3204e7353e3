"""Describes a federation in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedme.data.federation import Federation
from pfedme.engine.metrics import Blocks, Spread, deviations
from pfedme.report.spread import cautions, columns, unlike


def describe(federation: Federation) -> dict[str, Any]:
    """Sizes, labels, columns, how different clients are, and warnings."""
    f, counts = federation, federation.count
    told = {
        "clients": f.clients,
        "rows": int(counts.sum()),
        "train_rows": int(f.n_train.sum()),
        "test_rows": int(f.n_test.sum()),
        "rows_per_client": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "max": int(counts.max()),
        },
        "train_rows_per_client": {"min": int(f.n_train.min()), "max": int(f.n_train.max())},
        "features": f.features,
        "classes": f.classes,
        **(numbers(f) if f.classes == 0 else classes(f)),
        "note": f.note,
    }
    told["warnings"] += [*f.notes, *cautions(f)]
    target = {"name": f.schema.label, "labels": list(f.schema.labels)} if f.schema else None
    return {**told, "target": target, "columns": columns(f), "unlike": unlike(f)}


def classes(federation: Federation) -> dict[str, Any]:
    """How the labels of a classification are distributed over clients."""
    labels = federation.label_counts()
    own = (labels > 0).sum(axis=1)
    return {
        "labels_per_client": {"min": int(own.min()), "max": int(own.max())},
        "rows_per_label": labels.sum(axis=0).tolist(),
        "warnings": warnings(federation, own),
    }


def numbers(federation: Federation) -> dict[str, Any]:
    """How the labels of a regression are distributed over clients, in their original units."""
    f, said = federation, []
    y = f.labels_in_units()
    mean, std = label_mean_std(f)
    alike = Spread.of(f.y, Blocks.cut(*f.rows("test")), f.clients).own == 0
    if untested := int((f.n_test == 0).sum()):
        said.append(f"{_clients(untested)} no test rows and will not count in R² and RMSE.")
    if constant := int((alike & (f.n_test > 0)).sum()):
        said.append(f"{_clients(constant)} only one label in the test rows, where R² is meaningless.")
    whole = {"mean": y.mean(), "std": y.std(), "min": y.min(), "max": y.max()}
    return {
        "label": {name: float(value) for name, value in whole.items()},
        "label_mean_per_client": {"min": float(mean.min()), "max": float(mean.max())},
        "label_std_per_client": {"min": float(std.min()), "max": float(std.max())},
        "warnings": said,
    }


def label_mean_std(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each client's labels in a regression, in their original units."""
    f, y = federation, federation.labels_in_units()
    owner = np.repeat(np.arange(f.clients), f.count)
    return np.bincount(owner, y, f.clients) / f.count, np.sqrt(deviations(y, owner, f.clients) / f.count)


def warnings(federation: Federation, labels_of_client: np.ndarray) -> list[str]:
    """Warnings about clients that are hard to train for or to judge."""
    f, said = federation, []
    if untested := int((f.n_test == 0).sum()):
        said.append(f"{_clients(untested)} no test rows and will not count in the accuracies.")
    if single := int((labels_of_client == 1).sum()):
        said.append(
            f"{_clients(single)} rows of only one class: a model that always predicts it is perfect there."
        )
    owner = np.repeat(np.arange(f.clients), f.count)
    in_train = (np.arange(len(f.y)) - f.start[owner]) < f.n_train[owner]
    seen = np.zeros((f.clients, f.classes), bool)
    seen[owner[in_train], f.y[in_train]] = True
    if unseen := len(np.unique(owner[~in_train][~seen[owner[~in_train], f.y[~in_train]]])):
        said.append(f"{_clients(unseen)} a label in the test rows that is missing from the training rows.")
    return said


def _clients(n: int) -> str:
    return f"{n:,} client{' has' if n == 1 else 's have'}"
