"""Your own model.

A model is a pair of functions: one creates the initial parameters, any pytree of arrays, and the other
returns a score for each class (or, with `classes=0`, one number) for each row.
"""

import jax
import jax.numpy as jnp

import pfedme


def init(key):
    """Prototypes, one for each class, and how much each feature counts."""
    return {"prototypes": jax.random.normal(key, (3, 5)), "weight": jnp.zeros(5)}


def apply(tree, x):
    """The nearer a prototype, the higher the score of its class."""
    difference = x[:, None, :] - tree["prototypes"]
    return -jnp.sum(jnp.exp(tree["weight"]) * difference**2, axis=-1)


data = "synthetic:clients=6,rows=60,features=5,classes=3"
model = pfedme.Model(init_fn=init, apply_fn=apply)
result = pfedme.train("pfedme:R=5,K=2", data, model=model, rounds=10)
print(result.record["final"]["personal"]["accuracy"])
