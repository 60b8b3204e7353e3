"""How often the kind of difference between clients is named rightly, on federations whose kind is known.

python bench/differences.py            a table of all federations, with MNIST
python bench/differences.py NAME...    of those whose names contain a NAME
python bench/differences.py --null 50  how often alike clients are called alike, in 50 draws
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from pfedme.data.federation import Federation
from pfedme.data.mnist import Mnist
from pfedme.data.synthetic import Synthetic
from pfedme.engine.differences import differences

CLASSES, FEATURES = 4, 20


def made(change: str, clients: int = 40, rows: int = 100, seed: int = 0) -> Federation:
    """Clients whose labels are drawn by a logistic model of normal features, with a change to each client."""
    rng = np.random.default_rng(seed)
    W = 1.5 * rng.standard_normal((FEATURES, CLASSES))
    orders = [rng.permutation(FEATURES) for _ in range(3)]

    def labelled(x: np.ndarray, W: np.ndarray) -> np.ndarray:
        return np.argmax(x @ W + rng.gumbel(size=(len(x), CLASSES)), axis=1)

    parts = []
    for i in range(clients):
        x = rng.standard_normal((rows, FEATURES))
        if change == "other inputs":
            x += 1.5 * rng.standard_normal(FEATURES)
        y = labelled(x, 1.5 * rng.standard_normal(W.shape) if change == "own rule" else W)
        if change == "label frequencies":
            share = rng.dirichlet(np.full(CLASSES, 0.3))
            many = rng.standard_normal((20 * rows, FEATURES))
            label = labelled(many, W)
            chosen = rng.choice(len(many), rows, replace=False, p=share[label] / share[label].sum())
            x, y = many[chosen], label[chosen]
        elif change == "labels reversed" and i % 2:
            y = CLASSES - 1 - y
        elif change == "columns permuted":
            x = x[:, orders[i % 3]]
        elif change == "columns scaled":
            x = x * np.exp(rng.standard_normal(FEATURES))
        elif change == "columns offset":
            x = x + 2 * rng.standard_normal(FEATURES)
        parts.append((x, y))
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Federation.split([rows] * clients, x.astype(np.float32), y.astype(np.int32), classes=CLASSES)


def known() -> Iterator[tuple[str, str, Callable[[], Federation]]]:
    """Federations: a name, the kind of difference, and a function that makes it."""
    for change, kind in {
        "nothing": "none", "label frequencies": "label skew", "other inputs": "feature shift",
        "columns offset": "feature shift", "columns scaled": "feature shift",
        "labels reversed": "a few kinds", "columns permuted": "a few kinds", "own rule": "unlike tasks",
    }.items():  # fmt: skip
        yield f"made: {change}", kind, lambda change=change: made(change)
    yield "synthetic:iid=true,rows=200", "none", Synthetic(iid=True, rows=200).load
    for alpha, beta in ((0, 1), (1, 0), (2, 0), (0.5, 0.5)):
        name = f"synthetic:alpha={alpha},beta={beta},rows=200"
        yield name, "unlike tasks", Synthetic(alpha=alpha, beta=beta, rows=200).load
    for cap in (50, 400):
        for alpha in (100.0, 1.0, 0.3, 0.1):
            name = f"mnist:partition=dirichlet,alpha={alpha:g},clients=50,cap={cap}"
            kind = "none" if alpha == 100 else "label skew"
            yield name, kind, Mnist(partition="dirichlet", alpha=alpha, clients=50, cap=cap).load
        name = f"mnist:partition=rotated,clients=50,cap={cap}"
        yield name, "a few kinds", Mnist(partition="rotated", clients=50, cap=cap).load
    yield "mnist", "label skew", Mnist().load


def table(names: list[str]) -> None:
    """Prints a line for each federation, and how many are named rightly."""
    right = total = 0
    print(
        "| federation | kind | named | also | shared | label prior | own scale | groups | own model | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, kind, load in known():
        if names and not any(part in name for part in names):
            continue
        federation, start = load(), time.process_time()
        found = differences(federation)
        assert found is not None
        seconds = time.process_time() - start
        losses = " | ".join(f"{way.loss:.3f}{'*' if way.clear else ''}" for way in found.ways)
        also = ", ".join(found.also)
        line = f"| {name} | {kind} | {found.kind} | {also} | {found.loss:.3f} | {losses} | {seconds:.1f} |"
        print(line, flush=True)
        right, total = right + (found.kind == kind), total + 1
    print(
        f"\n{right} of {total} are named rightly; * marks a way that is clearly better than the shared model."
    )


def null(draws: int) -> None:
    """Prints how often clients that are alike are called so, with few and with many rows and clients."""
    for clients, rows in ((40, 100), (10, 40), (60, 30)):
        named = [differences(made("nothing", clients, rows, 1 + seed)) for seed in range(draws)]
        none = sum(found is not None and found.kind == "none" for found in named)
        print(f"{clients} clients of {rows} rows: none in {none} of {draws}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--null"]:
        null(int(sys.argv[2]))
    else:
        table(sys.argv[1:])
