"""What clipping updates to the usual length costs honest clients, and what it saves when some are malicious.

    python bench/clipping.py

Prints a Markdown table of the shared model's accuracy at the honest clients, in percent, after 60 rounds of
FedAvg with everyone in every round. Malicious clients send their own update in the opposite direction, three
times as long as the honest clients' median. Everything goes through the server's own `clipped`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pfedme.algorithms import FedAvg
from pfedme.core.models import MLR
from pfedme.core.tree import Params
from pfedme.data import parse_data
from pfedme.data.federation import Federation
from pfedme.deploy.judge import Upload, clipped
from pfedme.engine.simulate import Simulation
from pfedme.runs.ledger import Part

ROUNDS, SEEDS = 60, 3
FEDERATIONS = {
    "synthetic(0, 0)": "synthetic:alpha=0,beta=0,clients={},rows=400",
    "synthetic(1, 1)": "synthetic:alpha=1,beta=1,clients={},rows=400",
    "synthetic, alike": "synthetic:iid=true,clients={},rows=400",
    "MNIST, Dirichlet(0.3)": "mnist:partition=dirichlet,alpha=0.3,clients={},cap=600",
    "MNIST, Dirichlet(1)": "mnist:partition=dirichlet,alpha=1,clients={},cap=600",
}


def accuracy(
    federation: Federation, clip: float, seed: int, *, attackers: int = 0, malicious: bool = False,
    cohort: int | None = None, rounds: int = ROUNDS, eta: float = 0.1,
) -> float:  # fmt: skip
    """The shared model's accuracy, in percent, at all clients but the first `attackers`."""
    clients = federation.clients
    model = MLR(l2=0.001).build(federation.features, federation.classes)
    simulation = Simulation(
        FedAvg(eta=eta, aggregation="uniform"), model, federation, cohort=cohort or clients, seed=seed
    )
    like = jax.eval_shape(model.init, jax.random.key(0))
    state, before = simulation.start(), list[float]()
    for t in range(rounds):
        w = np.asarray(state.server.ravel())
        uploads = np.array(simulation.update(state, simulation.cohort_of(t)).upload.ravel(1))
        lengths = np.linalg.norm(uploads, axis=1)
        if malicious:
            uploads[:attackers] *= -3 * np.median(lengths[attackers:]) / lengths[:attackers, None]
        names = [str(k) for k in range(len(uploads))]
        norms = np.linalg.norm(uploads.astype(float), axis=1).tolist()
        parts = {n: Part(t + 1, 1, n, "counted", norm=norm) for n, norm in zip(names, norms, strict=True)}
        sent = {n: Upload(Params(upload), 1) for n, upload in zip(names, uploads, strict=True)}
        _, sent = clipped(parts, sent, before, clip=clip, max_norm_ratio=10.0)
        before += norms
        mean = w + np.mean([upload.tree.tree for upload in sent.values()], axis=0, dtype=float)
        state = state._replace(t=t + 1, server=like.like(jnp.asarray(mean, jnp.float32)))
    honest = np.arange(attackers, clients)
    return 100 * simulation.evaluate(state, honest)[0].entry()["global"]["accuracy"]


def main() -> None:
    """Measures and prints."""
    print(f"Means over {SEEDS} seeds.\n")
    print("| federation | malicious | all honest, no clipping | clipped | attacked, no clipping | clipped |")
    print("|---|---|---|---|---|---|")
    for name, text in FEDERATIONS.items():
        for clients, attackers in ((4, 1), (5, 2), (10, 3)):
            federation = parse_data(text.format(clients)).load()
            cells = [
                np.mean(
                    [accuracy(federation, clip, s, attackers=attackers, malicious=bad) for s in range(SEEDS)]
                )
                for bad in (False, True)
                for clip in (0.0, 1.0)
            ]
            numbers = " | ".join(f"{cell:.1f}" for cell in cells)
            print(f"| {name} | {attackers} of {clients} | {numbers} |", flush=True)
    print("\nCohorts of 10 of 100 unlike clients (the paper's Synthetic), 200 rounds, all honest:\n")
    print("| `--clip` | accuracy |\n|---|---|")
    federation = parse_data("synthetic").load()
    for clip in (0.0, 1.0, 2.0):
        options = {"cohort": 10, "rounds": 200, "eta": 0.02}
        mean = np.mean([accuracy(federation, clip, s, **options) for s in range(SEEDS)])
        print(f"| {clip:g} | {mean:.1f} |", flush=True)


if __name__ == "__main__":
    main()
