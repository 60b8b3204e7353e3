"""What a federation looks like, in numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedme.federation import Federation


def describe(federation: Federation) -> dict[str, Any]:
    """Sizes, labels, and what deserves a warning."""
    f, counts = federation, federation.count
    labels = f.label_counts()
    own = (labels > 0).sum(axis=1)
    return {
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
        "labels_per_client": {"min": int(own.min()), "max": int(own.max())},
        "rows_per_label": labels.sum(axis=0).tolist(),
        "note": f.note,
        "warnings": warnings(f, own),
    }


def warnings(federation: Federation, labels_of_client: np.ndarray) -> list[str]:
    """What makes a client hard to train for or to judge."""
    f, said = federation, []
    if untested := int((f.n_test == 0).sum()):
        said.append(f"{_clients(untested)} no test rows and will not be in the accuracies.")
    if single := int((labels_of_client == 1).sum()):
        said.append(
            f"{_clients(single)} rows of one class only: any model that always says it is perfect there."
        )
    owner = np.repeat(np.arange(f.clients), f.count)
    in_train = (np.arange(len(f.y)) - f.start[owner]) < f.n_train[owner]
    seen = np.zeros((f.clients, f.classes), bool)
    seen[owner[in_train], f.y[in_train]] = True
    if unseen := len(np.unique(owner[~in_train][~seen[owner[~in_train], f.y[~in_train]]])):
        said.append(f"{_clients(unseen)} a label in the test rows that its training rows lack.")
    return said


def _clients(n: int) -> str:
    return f"{n:,} client{' has' if n == 1 else 's have'}"
