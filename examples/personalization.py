"""The right model for every client.

After the training each client chooses among training alone, the shared model, and personal models at a λ of
its own, by rows that none of them has seen. Fewer steps and folds than by default keep the example short.
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
