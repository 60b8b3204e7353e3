"""A federation's rows on the devices."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from pfedme.core.models import Model
from pfedme.core.private import Private
from pfedme.core.problem import Order, Problem
from pfedme.data.federation import Federation
from pfedme.engine.devices import from_hosts, own_rows, replicate


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "start", "n_train", "n_test", "ids"],
    meta_fields=["longest"],
)
@dataclasses.dataclass(frozen=True)
class Store:
    """A federation's rows as the compiled program sees them."""

    x: jax.Array
    y: jax.Array
    start: jax.Array
    n_train: jax.Array
    n_test: jax.Array
    ids: jax.Array
    longest: int

    @classmethod
    def of(cls, federation: Federation) -> Store:
        """The rows of a federation."""
        f = federation
        before = 0 if f.home is None else f.local_start - f.start
        where = (f.rows("train")[0] + before, f.rows("train")[1], f.n_test)
        y = f.y
        if f.home is not None:
            own = y[np.repeat(f.home == f.host, f.count)]
            y = np.pad(own, (0, len(f.x) - len(own)))
        columns = (*(a.astype(np.int32) for a in where), f.ids)
        columns = tuple(replicate(column) for column in columns)
        return cls(own_rows(f.x), own_rows(y), *columns, longest=cls.most_rows(f))

    @staticmethod
    def most_rows(federation: Federation) -> int:
        """The largest number of training rows of a client. Includes validation rows, so that the folds of a
        federation share compiled programs."""
        return int((federation.n_val + federation.n_train).max())

    def of_clients(self, who: np.ndarray) -> Store:
        """The same rows, of which only those of clients `who` are in use."""
        names = ("start", "n_train", "n_test", "ids")
        return dataclasses.replace(self, **{k: replicate(np.asarray(getattr(self, k))[who]) for k in names})

    def without_rows(self) -> Store:
        """Everything but the rows, which `over_devices` passes on their own."""
        return dataclasses.replace(self, x=None, y=None)

    def with_rows(self, x: jax.Array, y: jax.Array) -> Store:
        """The same with these rows."""
        return dataclasses.replace(self, x=x, y=y)

    def problem(
        self, model: Model, i: Any, t: Any = 0, order: Order = "random", private: Private | None = None
    ) -> Problem:
        """The learning problem of client i in round t."""
        own = self.start[i], self.n_train[i], self.n_test[i]
        return Problem(model, self.x, self.y, *own, t, self.longest, order, private)


def features_of(federation: Federation, rows: np.ndarray) -> np.ndarray:
    """The features of the rows with these indices, each as a vector, from the hosts that have them. All hosts
    must ask for the same ones."""
    f, x = federation, federation.x.reshape(len(federation.x), -1)
    if f.home is None:
        return x[rows]
    at = rows.ravel()
    owner = np.searchsorted(f.start, at, side="right") - 1
    home, local = f.home[owner], at - f.start[owner] + f.local_start[owner]
    return from_hosts(x[local[home == f.host]], home).reshape(*rows.shape, -1)


def whole(federation: Federation) -> Federation:
    """The federation with the features of all clients, from the hosts that have them."""
    f = federation
    if f.home is None:
        return f
    x = features_of(f, np.arange(len(f.y))).reshape(len(f.y), *f.x.shape[1:])
    return dataclasses.replace(f, x=x, home=None, host=0)
