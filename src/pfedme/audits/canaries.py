"""Canaries: rows that the honest data lacks, each included by a fair coin, in one training of the run.

The auditor sees what a server sees of the client in every round, w and the upload Δ, and scores canary j by
how far the upload moves against the gradient of its loss,

    score_j = −Σ_t ⟨Δ_t, ∇ℓ_j(w_t)⟩ / ‖∇ℓ_j(w_t)‖,

which is larger if the canary was among the client's rows. If the uploads are not changes of the whole shared
model, the score is the negative loss of the client's final model instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedme.audits.onerun import LEVEL, Bound, bound
from pfedme.core.models import Model
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation, State
from pfedme.errors import InputError

DEFAULT = 500
"""Canaries, if the client has at least twice as many training rows; else half of its rows."""
FEWEST = 10
Watch = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """Rows to plant, and the coins that decide."""

    x: np.ndarray
    y: np.ndarray
    included: np.ndarray

    @classmethod
    def draw(
        cls, federation: Federation, client: int, count: int | None, rng: np.random.Generator
    ) -> Canaries:
        """Random inputs as long as the client's rows, orthogonal to each other if there are no more of them
        than features, with random labels."""
        start, n = (int(a[client]) for a in federation.rows("train"))
        count = min(DEFAULT, n // 2) if count is None else count
        if not FEWEST <= count <= n:
            raise InputError(
                f"Client {federation.name(client)} has {n} training rows, too few for {count} canaries; "
                f"choose --canaries between {FEWEST} and {n}, or another --client."
            )
        own = federation.x[start : start + n].reshape(n, -1)
        d = own.shape[1]
        x = rng.normal(size=(count, d))
        if count <= d:
            x = np.linalg.qr(x.T)[0].T
        x *= np.median(np.linalg.norm(own, axis=1)) / np.linalg.norm(x, axis=1, keepdims=True)
        if federation.classes:
            y = rng.integers(federation.classes, size=count).astype(federation.y.dtype)
        else:
            y = rng.choice([-3.0, 3.0], size=count).astype(federation.y.dtype)
        x = x.reshape(count, *federation.x.shape[1:]).astype(federation.x.dtype)
        return cls(x, y, rng.random(count) < 0.5)

    def planted(self, federation: Federation, client: int) -> Federation:
        """The federation with the included canaries among the client's training rows.

        Half as many honest rows as there are canaries are left out, so that the expected number of rows is
        what it was.
        """
        start, n = (int(a[client]) for a in federation.rows("train"))
        out = len(self.y) // 2
        before, after = slice(0, start), slice(start + out, None)
        x, y = (
            np.concatenate([own[before], new[self.included], own[after]])
            for own, new in ((federation.x, self.x), (federation.y, self.y))
        )
        n_train = federation.n_train.copy()
        n_train[client] = n - out + int(self.included.sum())
        return dataclasses.replace(federation, x=x, y=y, n_train=n_train, origin=None, files=())


@dataclasses.dataclass(frozen=True, eq=False)
class Audited:
    """The scores of canaries, and what they show."""

    client: int
    scores: np.ndarray
    included: np.ndarray
    white_box: bool
    """Whether scores come from every round's upload; if not, from the final model's losses."""
    bound: Bound

    def to_json(self, federation: Federation) -> dict[str, Any]:
        """The numbers of the document."""
        return {
            "client": federation.name(self.client),
            "canaries": len(self.scores),
            "included": int(self.included.sum()),
            "score": "movement of the uploads" if self.white_box else "loss of the final model",
            "scores": {
                "included": self.scores[self.included].tolist(),
                "excluded": self.scores[~self.included].tolist(),
            },
            **self.bound._asdict(),
        }


def train(
    simulation: Simulation, client: int, canaries: Canaries, rounds: int, delta: float,
    level: float = LEVEL, watch: Watch = lambda _done, _of: None,
) -> Audited:  # fmt: skip
    """One training with the canaries planted; `simulation` already holds them among its rows."""
    state, model = simulation.start(), simulation.model
    who = np.array([client])
    scores, white_box = np.zeros(len(canaries.y)), _visible(simulation, state, client)
    x, y = canaries.x, canaries.y
    while state.t < rounds:
        if white_box:
            if client in simulation.cohort_of(state.t):
                w = simulation.shared(state)
                moved = _moved(simulation.update(state, who).upload)
                assert w is not None
                assert moved is not None
                scores -= np.asarray(_along(model, w, moved[0], x, y), np.float64)
            step = 1
        else:
            step = min(50, rounds - state.t)
        state, finite = simulation.advance(state, step)
        if not finite:
            raise InputError(f"Training with canaries diverged in round {state.t + 1}; use fewer --canaries.")
        watch(state.t, rounds)
    if not white_box:
        models, _ = simulation.answer(state, who)
        theta = models.personal if models.personal is not None else models.local
        last = theta[0] if theta is not None else simulation.shared(state)
        assert last is not None
        scores = -np.asarray(model.losses(model.scores(last, jnp.asarray(x)), jnp.asarray(y)), np.float64)
    scores = np.nan_to_num(scores)
    found = bound(scores, canaries.included, delta, level)
    return Audited(client, scores, canaries.included, white_box, found)


def _moved(upload: Any) -> Params | None:
    """The change of a model in an upload, if it has one."""
    parts = jax.tree.leaves(upload, is_leaf=lambda leaf: isinstance(leaf, Params))
    return next((part for part in parts if isinstance(part, Params)), None)


def _visible(simulation: Simulation, state: State, client: int) -> bool:
    """Whether the client's uploads are changes of the whole shared model."""
    w = simulation.shared(state)
    if not simulation.algorithm.federated or w is None:
        return False
    moved = _moved(simulation.update(state, np.array([client])).upload)
    return moved is not None and jax.tree.structure(moved) == jax.tree.structure(w)


@jax.jit
def _along(model: Model, w: Params, moved: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """⟨Δ, ∇ℓ_j(w)⟩ / ‖∇ℓ_j(w)‖ for each row j."""

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = row
        g = jax.grad(lambda w: model.losses(model.scores(w, x[None]), y[None])[0])(w)
        return (moved @ g) / jnp.sqrt(jnp.maximum(g @ g, 1e-30))

    return lax.map(of_row, (jnp.asarray(x), jnp.asarray(y)), batch_size=16)
