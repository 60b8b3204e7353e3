"""Round by round.

The commands are built on `Simulation`. It keeps no state: given a state and a number of rounds it returns the
next state, so you can look at the models in between, go back, or branch.
"""

from pfedme import Network, PFedMe, Simulation, Synthetic

federation = Synthetic(clients=6, rows=60, features=5, classes=3).load()
model = Network(features=5, classes=3)
simulation = Simulation(PFedMe(lam=5.0, R=5), model, federation, cohort=3)

state = simulation.start()
for _ in range(3):
    state, finite = simulation.advance(state, 5)
    assert finite
    evaluation, models = simulation.evaluate(state)
    scores = evaluation.entry()
    print(state.t, scores["global"]["accuracy"], scores["personal"]["accuracy"])

assert models.personal is not None
print("θ of client 0:", models.personal[0].ravel())
