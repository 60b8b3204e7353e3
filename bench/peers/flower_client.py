"""The client of Flower's benchmark, in a separate module so that a worker process keeps its rows."""

from __future__ import annotations

import os
from functools import cache

import torch
from common import ETA, B, R, read_task
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy
from torch_common import tensors
from torch_loop import network

TASK = "PEERS_TASK"
"""The environment variable that names the file of the task."""

app = ClientApp()


@cache
def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Features and labels of each client."""
    return tensors(read_task(os.environ[TASK]))


@cache
def model() -> torch.nn.Module:
    """The model that this process trains."""
    first, *hidden, last = read_task(os.environ[TASK]).sizes
    return network(first, tuple(hidden), last)


@app.train()
def train(message: Message, context: Context) -> Message:
    """R local steps from the shared model; replies with the local model."""
    x, y = rows()[int(context.node_config["partition-id"])]
    local = model()
    local.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(local.parameters(), lr=ETA)
    steps = 0
    for _ in range(R):
        at = torch.randint(len(y), (B,))
        optimizer.zero_grad()
        cross_entropy(local(x[at]), y[at]).backward()
        optimizer.step()
        steps += 1
    content = RecordDict(
        {
            "arrays": ArrayRecord(local.state_dict()),
            "metrics": MetricRecord({"num-examples": 1, "steps": steps}),
        }
    )
    return Message(content=content, reply_to=message)
