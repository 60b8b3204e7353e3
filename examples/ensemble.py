"""One exchange of models: their mean, or all of them together.

In one-shot federated learning clients train alone and send their models once. The mean of the models is one
shared model. An ensemble keeps all of them and averages their probabilities, which costs N times as much to
use but also works for networks, where the mean of independent models means nothing.
"""

import numpy as np

from pfedme import Ensemble, Network, Predictor, Simulation, Synthetic
from pfedme.algorithms import OneShot
from pfedme.engine.metrics import Blocks, score

federation = Synthetic(clients=6, rows=60, features=5, classes=3, iid=True).load()
model = Network(features=5, classes=3, hidden=(8,))
simulation = Simulation(OneShot(eta=0.1), model, federation, cohort=6)
state, _ = simulation.advance(simulation.start(), 50)

members = simulation.answer(state)[0].local
assert members is not None
ensemble = Ensemble(one=model, members=federation.clients, classes=3)

blocks = Blocks.cut(*federation.rows("test"))
for name, kind, theta in (("mean", model, simulation.shared(state)), ("ensemble", ensemble, members)):
    found = score(kind, theta, federation.x, federation.y, blocks, federation.clients)
    print(f"{name}: {np.sum(found.correct) / np.sum(found.count):.3f} of all test rows")

Predictor(ensemble, members, None).save("models/ensemble", force=True)
