"""A client that joins later.

A finished run offers its shared model to clients that took no part. Each newcomer chooses what suits it: the
shared model unchanged, a personal model near it, or training alone.
"""

import pfedme

data = "synthetic:clients=6,rows=60,features=5,classes=3"
result = pfedme.train("fedavg:R=5", data, rounds=5, budget=20, out="runs/members")

newcomers = "synthetic:clients=2,rows=40,features=5,classes=3,seed=1"
offer = pfedme.personalize("runs/members", newcomers, how="auto:steps=20,folds=2", out="runs/newcomers")
print(offer.to_json()["personalized"]["chosen"])

model = pfedme.model_of("runs/newcomers", client="0")
print(model.origin["client"], model.origin["which"])
