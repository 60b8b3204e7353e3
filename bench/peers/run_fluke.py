"""fluke-fl: seconds per round of its FedAvg and its pFedMe, written as JSON.

It has no option for a number of local steps: a client's loader has R B of its rows, and an epoch is R steps.
Its pFedMe compares a model with itself in the proximal term, so λ changes nothing: only its time is used.
"""

from __future__ import annotations

import importlib
import math
import sys
import time

import torch

try:
    importlib.import_module("torchvision")
except RuntimeError:
    # fluke imports torchvision, whose compiled part may not load beside a CPU build of torch. What its import
    # then misses are two operators, which nothing here calls: they get a name and no content.
    for operator in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{operator}", signature)

from common import ETA, B, R, Task, per_round, read_task, write_seconds
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.pfedme import PFedMe
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver
from torch_common import Steps, tensors
from torch_loop import network

K, LAM = 5, 15.0


class Splitter:
    """Gives fluke the clients as they are, in place of a split of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def loader(self, x: torch.Tensor, y: torch.Tensor) -> FastDataLoader:
        """R batches of B rows a round; a client with fewer rows has them several times."""
        times = math.ceil(R * B / len(y))
        x, y = x.repeat(times, 1), y.repeat(times)
        share = min(1.0, (R * B + 0.5) / len(y))
        classes = self.task.sizes[-1]
        return FastDataLoader(x, y, num_labels=classes, batch_size=B, shuffle=True, percentage=share)

    def assign(self, n_clients: int, batch_size: int):
        """Training rows and no test rows of each client, and none of the server."""
        train = [self.loader(x, y) for x, y in tensors(self.task)]
        return (train, [None] * n_clients), None


class Clock(FederationObserver):
    """When each round ended, and how many steps the first one had."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.steps = Steps()

    def end_round(self, round: int) -> None:
        """Called by fluke."""
        if not self.ends:
            self.steps.stop()
        self.ends.append(time.perf_counter())


def measure(task: Task, algorithm: type[CentralizedFL], who: str, inner: int, **options) -> float:
    """Seconds per round; `inner` gradient steps make a local step."""
    optimizer = DDict(lr=ETA, **options.pop("optimizer", {}))
    client = DDict(
        batch_size=B,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=optimizer,
        scheduler=DDict(step_size=1, gamma=1),
        **options,
    )
    first, *hidden, last = task.sizes
    model = network(first, tuple(hidden), last)
    hyper = DDict(model=model, client=client, server=DDict(weighted=False))
    federated = algorithm(task.clients, Splitter(task), hyper)
    federated.set_callbacks(clock := Clock())
    federated.run(1 + task.rounds[who], task.trains[who] / task.clients)
    assert clock.steps.count == task.trains[who] * R * inner, f"{clock.steps.count} steps"
    return per_round(clock.ends)


def main() -> None:
    """Measures FedAvg and pFedMe, with everyone training and with the cohort."""
    task = read_task(sys.argv[1])
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    write_seconds(
        {
            "FedAvg": {who: measure(task, FedAVG, who, 1) for who in task.trains},
            "pFedMe": {
                who: measure(task, PFedMe, who, K, k=K, optimizer={"lamda": LAM}) for who in task.trains
            },
        }
    )


if __name__ == "__main__":
    main()
