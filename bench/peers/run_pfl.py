"""pfl: seconds per round of its FedAvg, written as JSON. torchrun starts a process for each core."""

from __future__ import annotations

import sys
import time

import torch
from common import ETA, B, R, Task, per_round, read_task, write_seconds
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy
from torch_common import Steps, tensors
from torch_loop import network

NEVER = 10**9


class Model(torch.nn.Module):
    """Linear layers with ReLU between them, with the loss as pfl wants it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = network(sizes[0], sizes[1:-1], sizes[-1])

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        return cross_entropy(self.layers(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """What an evaluation would give; pfl evaluates in the first round, which is not counted."""
        return {"loss": Weighted(0.0, len(y))}


class Clock(TrainingProcessCallback):
    """When each round ended, and how many steps the first one had."""

    def __init__(self, steps: Steps) -> None:
        self.ends: list[float] = []
        self.steps = steps

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration: int):
        """Called by pfl."""
        if not self.ends:
            self.steps.stop()
        self.ends.append(time.perf_counter())
        return False, Metrics()


def dataset(task: Task) -> FederatedDataset:
    """The clients; each time, a client gives R B of its rows, drawn at random, in order of drawing."""
    rows = tensors(task)

    def draw(client: int) -> Dataset:
        x, y = rows[client]
        at = torch.randint(len(y), (R * B,))
        return Dataset((x[at], y[at]), user_id=str(client))

    return FederatedDataset(draw, get_user_sampler("minimize_reuse", list(range(task.clients))))


def measure(task: Task, who: str) -> float:
    """Seconds per round."""
    module = Model(task.sizes)
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, central)
    data = dataset(task)
    backend = SimulatedBackend(data, data, postprocessors=[WeightByUser()])
    clock = Clock(Steps(central))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1 + task.rounds[who],
            evaluation_frequency=NEVER,
            train_cohort_size=task.trains[who],
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=B, local_num_epochs=None, local_learning_rate=ETA, local_num_steps=R
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    (steps,) = pytorch_ops.distributed.all_reduce([torch.tensor([float(clock.steps.count)])])
    assert steps.item() == task.trains[who] * R, f"{steps.item():.0f} steps"
    return per_round(clock.ends)


def main() -> None:
    """Measures FedAvg, with everyone training and with the cohort."""
    torch.manual_seed(0)
    task = read_task(sys.argv[1])
    seconds = {"FedAvg": {who: measure(task, who) for who in task.trains}}
    if pytorch_ops.distributed.global_rank == 0:
        write_seconds(seconds)


if __name__ == "__main__":
    main()
