"""FedAvg as in a Flower quickstart: Flower's strategy, and a client with a model in JAX."""

from __future__ import annotations

import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


def loss(w: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """Softmax regression."""
    logits = x @ w["W"] + w["b"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


@partial(jax.jit, static_argnames=("steps", "batch"))
def train(w, x, y, key, eta, steps, batch):
    """Steps of SGD."""

    def step(w, key):
        rows = jax.random.randint(key, (batch,), 0, len(x))
        slope = jax.grad(loss)(w, x[rows], y[rows])
        return jax.tree.map(lambda a, g: a - eta * g, w, slope), None

    return jax.lax.scan(step, w, jax.random.split(key, steps))[0]


@client.train()
def on_train(message: Message, context: Context) -> Message:
    """A client's part of a round."""
    table = np.loadtxt(str(context.node_config["data"]), delimiter=",", skiprows=1, dtype=np.float32)
    x, y = table[:, :-1], table[:, -1].astype(int)
    W, b = message.content["arrays"].to_numpy_ndarrays()
    w = train({"W": W, "b": b}, x, y, jax.random.key(0), 0.05, 20, 20)
    content = RecordDict({
        "arrays": ArrayRecord([np.asarray(w["W"]), np.asarray(w["b"])]),
        "metrics": MetricRecord({"num-examples": len(x)}),
    })  # fmt: skip
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds of Flower's FedAvg, and the time that they took."""
    config = context.run_config
    rounds, features, classes = (int(config[key]) for key in ("num-server-rounds", "features", "classes"))
    first = ArrayRecord([np.zeros((features, classes), np.float32), np.zeros(classes, np.float32)])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    ends: list[float] = [time.time()]
    aggregate = strategy.aggregate_train

    def timed(*args, **kwargs):
        ends.append(time.time())
        return aggregate(*args, **kwargs)

    strategy.aggregate_train = timed
    strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds)
    with open(str(config["times"]), "w") as file:
        json.dump(np.diff(ends).tolist(), file)
