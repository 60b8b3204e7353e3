"""A model from Equinox.

A model is any pair of functions, so modules of Equinox and Flax need no adapter: `init_fn` returns the arrays
of a new module, and `apply_fn` puts arrays and the rest of the module together.
"""

import equinox as eqx
import jax

import pfedme


def build(features, classes):
    """A multilayer perceptron with GELU between its layers."""

    def module(key):
        return eqx.nn.MLP(features, classes, width_size=16, depth=2, activation=jax.nn.gelu, key=key)

    rest = eqx.partition(module(jax.random.key(0)), eqx.is_inexact_array)[1]
    return pfedme.Model(
        init_fn=lambda key: eqx.filter(module(key), eqx.is_inexact_array),
        apply_fn=lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x),
    )


data = pfedme.Synthetic(clients=6, rows=60, features=5, classes=3)
result = pfedme.train("pfedme:R=5", data, model=build(5, 3), rounds=10)
for kind in ("global", "personal"):
    print(f"{kind}: {result.record['final'][kind]['accuracy']:.3f}")
