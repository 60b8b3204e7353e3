"""Larger networks: 20 clients train an Equinox network, beside a PyTorch loop with the same one.

python bench/larger.py                  five million parameters; needs .[bench] and equinox
python bench/larger.py --width 500      a smaller one
"""

from __future__ import annotations

import argparse
import resource

import equinox as eqx
import jax
import torch
from cells import interleaved, median
from run import timed
from torch_loop import Loop

from pfedme import FedAvg, Model, PFedMe, Simulation, Synthetic
from pfedme.engine.devices import cores

R, K, B = 5, 5, 20


def network(features: int, classes: int, width: int) -> Model:
    """An Equinox network with two hidden layers."""

    def module(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(features, classes, width, 2, key=key)

    rest = eqx.partition(module(jax.random.key(0)), eqx.is_inexact_array)[1]
    return Model(
        init_fn=lambda key: eqx.filter(module(key), eqx.is_inexact_array),
        apply_fn=lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x),
        classes=classes,
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2200, help="units of both hidden layers")
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    federation = Synthetic(clients=20, rows=300).load()
    model = network(federation.features, federation.classes, asked.width)
    columns = "algorithm", "parameters", "PyTorch loop", "ours", "times faster", "loss", "peak memory"
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for name, algorithm in {
        "fedavg": FedAvg(R=R, B=B, eta=0.05, aggregation="uniform"),
        "pfedme": PFedMe(R=R, K=K, B=B, eta=0.05, alpha=0.01, lam=15.0),
    }.items():
        simulation = Simulation(algorithm, model, federation, cohort=20)
        start = simulation.start()
        before, _ = simulation.evaluate(start, train=True)
        state, finite = simulation.advance(start, 1)
        kind = "personal" if name == "pfedme" else "global"

        def ours(simulation=simulation, state=state) -> float:
            return timed(lambda: jax.block_until_ready(simulation.advance(state, 1)[0].server))

        ours()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        loop = Loop(federation, (asked.width, asked.width), R=R, B=B)
        torch.set_num_threads(cores())
        work = getattr(loop, name)
        work(range(1))
        measures = {"torch": lambda work=work: timed(lambda: work(range(20))), "ours": ours}
        times = {k: median(v) for k, v in interleaved(measures, asked.repetitions).items()}
        state, finite = simulation.advance(state, 4)
        assert finite
        after, _ = simulation.evaluate(state)
        losses = [float(e.train[kind].loss.sum() / e.train[kind].count.sum()) for e in (before, after)]
        size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        cells = (
            name, f"{size:,}", f"{times['torch']:.2f} s", f"{times['ours']:.2f} s",
            f"{times['torch'] / times['ours']:.1f}", f"{losses[0]:.2f} to {losses[1]:.2f}", f"{peak:.1f} GiB",
        )  # fmt: skip
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
