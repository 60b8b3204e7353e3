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
"""Canaries, if clients have enough rows."""
FEWEST = 10
Watch = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Canaries:
    """Rows to plant, and the coins that decide."""

    x: np.ndarray
    y: np.ndarray
    included: np.ndarray
    owner: np.ndarray
    """The client of each, in ascending order."""

    @classmethod
    def draw(
        cls, federation: Federation, clients: np.ndarray, count: int | None, rng: np.random.Generator
    ) -> Canaries:
        """Random inputs as long as the clients' rows, orthogonal to each other if there are no more of them
        than features, with random labels.

        Of these clients, those with the most training rows get canaries, at most half as many as rows each.
        """
        start, rows = federation.rows("train")
        order = clients[np.argsort(-rows[clients], kind="stable")]
        room = np.cumsum(rows[order] // 2)
        wanted = min(DEFAULT, int(room[-1])) if count is None else count
        if not FEWEST <= wanted <= room[-1]:
            who = f"Client {federation.name(int(clients[0]))} has" if len(clients) == 1 else "Clients have"
            raise InputError(
                f"{who} room for {room[-1]} canaries, half as many as training rows, so {wanted} cannot be "
                f"planted; choose --canaries between {FEWEST} and {room[-1]}, or other clients."
            )
        own = np.diff(np.minimum(room, wanted), prepend=0)
        owner = np.sort(np.repeat(order, own))
        d = federation.features
        x = rng.normal(size=(wanted, d))
        if wanted <= d:
            x = np.linalg.qr(x.T)[0].T
        for i in np.unique(owner):
            mine = federation.x[start[i] : start[i] + rows[i]].reshape(rows[i], -1)
            length = np.median(np.linalg.norm(mine, axis=1))
            x[owner == i] *= length / np.linalg.norm(x[owner == i], axis=1, keepdims=True)
        if federation.classes:
            y = rng.integers(federation.classes, size=wanted)
        else:
            y = rng.choice([-3.0, 3.0], size=wanted)
        x = x.reshape(wanted, *federation.x.shape[1:]).astype(federation.x.dtype)
        return cls(x, y.astype(federation.y.dtype), rng.random(wanted) < 0.5, owner)

    def planted(self, federation: Federation) -> Federation:
        """The federation with the included canaries among their clients' training rows.

        Each client leaves out half as many honest rows as it has canaries, so that the expected number of
        its rows is what it was.
        """
        start, rows = federation.rows("train")
        n_train, at, xs, ys = federation.n_train.copy(), 0, [], []
        for i in np.unique(self.owner):
            mine = self.owner == i
            out, chosen = int(mine.sum()) // 2, mine & self.included
            xs += [federation.x[at : start[i]], self.x[chosen]]
            ys += [federation.y[at : start[i]], self.y[chosen]]
            at = start[i] + out
            n_train[i] = rows[i] - out + int(chosen.sum())
        x, y = np.concatenate([*xs, federation.x[at:]]), np.concatenate([*ys, federation.y[at:]])
        return dataclasses.replace(federation, x=x, y=y, n_train=n_train, origin=None, files=())


@dataclasses.dataclass(frozen=True, eq=False)
class Audited:
    """The scores of canaries, and what they show."""

    canaries: Canaries
    scores: np.ndarray
    white_box: bool
    """Whether scores come from every round's upload; if not, from the final model's losses."""
    bound: Bound

    def to_json(self, federation: Federation) -> dict[str, Any]:
        """The numbers of the document."""
        included = self.canaries.included
        return {
            "clients": [federation.name(int(i)) for i in np.unique(self.canaries.owner)],
            "included": int(included.sum()),
            "score": "movement of the uploads" if self.white_box else "loss of the final model",
            "scores": {
                "included": self.scores[included].tolist(),
                "excluded": self.scores[~included].tolist(),
            },
            **self.bound._asdict(),
        }


def train(
    simulation: Simulation, canaries: Canaries, rounds: int, delta: float, level: float = LEVEL,
    watch: Watch = lambda _done, _of: None,
) -> Audited:  # fmt: skip
    """One training with the canaries planted; `simulation` already holds them among its rows."""
    state, model, owner = simulation.start(), simulation.model, canaries.owner
    who = np.unique(owner)
    scores, white_box = np.zeros(len(owner)), _visible(simulation, state)
    while state.t < rounds:
        if white_box:
            # All of them, and not just those of this round's cohort, so that shapes stay the same.
            moved = _moved(simulation.update(state, who).upload)
            w = simulation.shared(state)
            assert w is not None
            assert moved is not None
            place = np.searchsorted(who, owner)
            along = np.asarray(_along(model, w, moved, canaries.x, canaries.y, place), np.float64)
            scores -= np.where(np.isin(owner, simulation.cohort_of(state.t)), along, 0)
        state, finite = simulation.advance(state, 1 if white_box else min(50, rounds - state.t))
        if not finite:
            raise InputError(f"Training with canaries diverged in round {state.t + 1}; use fewer --canaries.")
        watch(state.t, rounds)
    if not white_box:
        models, _ = simulation.answer(state, who)
        theta = models.personal if models.personal is not None else models.local
        for k, i in enumerate(who):
            last = theta[k] if theta is not None else simulation.shared(state)
            assert last is not None
            x, y = (jnp.asarray(a[owner == i]) for a in (canaries.x, canaries.y))
            scores[owner == i] = -np.asarray(model.losses(model.scores(last, x), y), np.float64)
    scores = np.nan_to_num(scores)
    return Audited(canaries, scores, white_box, bound(scores, canaries.included, delta, level))


def _moved(upload: Any) -> Params | None:
    """The change of a model in an upload, if it has one."""
    parts = jax.tree.leaves(upload, is_leaf=lambda leaf: isinstance(leaf, Params))
    return next((part for part in parts if isinstance(part, Params)), None)


def _visible(simulation: Simulation, state: State) -> bool:
    """Whether uploads are changes of the whole shared model."""
    w = simulation.shared(state)
    if not simulation.algorithm.federated or w is None:
        return False
    moved = _moved(simulation.update(state, np.zeros(1, int)).upload)
    return moved is not None and jax.tree.structure(moved) == jax.tree.structure(w)


@jax.jit
def _along(model: Model, w: Params, moved: Params, x: jax.Array, y: jax.Array, place: jax.Array) -> jax.Array:
    """⟨Δ, ∇ℓ_j(w)⟩ / ‖∇ℓ_j(w)‖ for each row j, with the upload Δ at its place."""

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, y, k = row
        g = jax.grad(lambda w: model.losses(model.scores(w, x[None]), y[None])[0])(w)
        return (moved[k] @ g) / jnp.sqrt(jnp.maximum(g @ g, 1e-30))

    return lax.map(of_row, (jnp.asarray(x), jnp.asarray(y), jnp.asarray(place)), batch_size=16)
