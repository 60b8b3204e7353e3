"""From the shared model to a client's own: the path over λ.

A client's personal model θ(λ) = argmin f(θ) + λ/2 ‖θ − w‖² moves from w, at a large λ, to the client's own
model, at λ = 0. Here client 0 follows the path step by step, using gradient descent.
"""

import jax

from pfedme import FedAvg, Network, Simulation, Synthetic

federation = Synthetic(clients=6, rows=60, features=5, classes=3).load()
model = Network(features=5, classes=3)
simulation = Simulation(FedAvg(R=5), model, federation, cohort=6)
state, _ = simulation.advance(simulation.start(), 10)
w = simulation.shared(state)
assert w is not None
loss = simulation.store.problem(model, 0).sample(jax.random.key(0), 0)  # 0 stands for all rows


@jax.jit
def personal(theta, lam):
    """θ after 200 steps of gradient descent on f(θ) + λ/2 ‖θ − w‖²."""
    eta = 1 / (5 + lam)
    return jax.lax.fori_loop(0, 200, lambda _, p: p - eta * (loss.grad(p) + lam * (p - w)), theta)


theta = w
for lam in (100.0, 10.0, 1.0, 0.1, 0.0):
    theta = personal(theta, lam)
    away = float((theta - w) @ (theta - w)) ** 0.5
    print(f"λ = {lam:5g}   loss {float(loss(theta)):.4f}   distance from w {away:.3f}")
