"""fedjax: seconds per round of its FedAvg, written as JSON."""

from __future__ import annotations

import sys
import time

import fedjax
import haiku as hk
import jax
import numpy as np
from common import ETA, B, R, Task, per_round, read_task, write_seconds
from fedjax.algorithms import fed_avg

BATCHES = fedjax.ShuffleRepeatBatchHParams(batch_size=B, num_epochs=None, num_steps=R)


def model(task: Task) -> fedjax.Model:
    """Linear layers with ReLU between them, and cross-entropy."""
    forward = hk.transform(lambda batch: hk.nets.MLP(task.sizes[1:])(batch["x"]))
    sample = {"x": np.zeros((1, task.sizes[0]), np.float32), "y": np.zeros(1, np.int32)}
    return fedjax.create_model_from_haiku(
        forward, sample, lambda batch, z: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], z)
    )


def measure(task: Task, data: fedjax.FederatedData, who: str) -> float:
    """Seconds per round."""
    network = model(task)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(network), fedjax.optimizers.sgd(ETA), fedjax.optimizers.sgd(1.0), BATCHES
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, task.trains[who], seed=0)
    state = algorithm.init(network.init(jax.random.PRNGKey(0)))
    ends = []
    for _ in range(1 + task.rounds[who]):
        state, diagnostics = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        assert len(diagnostics) == task.trains[who], f"{len(diagnostics)} clients"
        ends.append(time.perf_counter())
    return per_round(ends)


def main() -> None:
    """Measures FedAvg, with everyone training and with the cohort."""
    task = read_task(sys.argv[1])
    rows = {b"%04d" % i: {"x": x, "y": y} for i, (x, y) in enumerate(task.rows())}
    data = fedjax.InMemoryFederatedData(rows)
    for _, client in data.clients():
        batches = [len(batch["y"]) for batch in client.shuffle_repeat_batch(BATCHES)]
        assert batches == [B] * R, f"batches of {batches} rows"
    write_seconds({"FedAvg": {who: measure(task, data, who) for who in task.trains}})


if __name__ == "__main__":
    main()
