"""Your own algorithm.

An algorithm defines what a client does with w in a round, and what it sends. Its fields are its
hyperparameters. It can be trained, compared, tuned, recorded and reported like the built-in ones.
"""

import pfedme
from pfedme import Algorithm, Models, Update, record, sgd


@record
class Cautious(Algorithm):
    """FedAvg whose clients go only a part of the way."""

    name = "cautious"

    share: float = 0.5
    """How much of its way a client goes."""

    def client_update(self, key, problem, w, state):
        w_i = sgd(key, problem, w, eta=self.eta, steps=self.R, B=self.B)
        step = self.share * (w_i - w)  # what is sent; the server adds the mean to w
        return Update(upload=step, state=state, models=Models(local=w + step), info={})


data = "synthetic:clients=6,rows=60,features=5,classes=3"
print(pfedme.compare([Cautious(share=0.3, R=5), "fedavg:R=5"], data, rounds=5))
