"""The right model for every client.

After training, each client chooses between training alone, the shared model, and personal models with its own
λ, on rows that none of them has seen. Fewer steps and folds than the defaults keep the example short.
"""

import pfedme

data = "synthetic:clients=6,rows=60,features=5,classes=3"
result = pfedme.train("fedavg:R=5", data, rounds=5, personalize="auto:steps=20,folds=2", budget=20)

offer = result.offer
assert offer is not None
assert offer.found is not None
for client, place in enumerate(offer.found.choice):
    print(f"client {client} takes {offer.found.candidates[place].label}")
print(offer.to_json()["personalized"]["chosen"])  # how many clients chose what
