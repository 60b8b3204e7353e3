"""The client's side: its own table, its part of a round, and the models that stay with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedme.algorithms import ALGORITHMS
from pfedme.algorithms.base import Models
from pfedme.data.table import Table
from pfedme.deploy.agreement import to_words
from pfedme.deploy.server import Content
from pfedme.errors import InputError
from pfedme.federation import Federation, Part
from pfedme.files import atomic_write, writing
from pfedme.metrics import Scores
from pfedme.models import MODELS
from pfedme.predictor import Predictor
from pfedme.schema import Schema
from pfedme.simulate import Evaluation, Simulation
from pfedme.spec import build

MODEL = "model"
"""The folder, in the client's state folder, of the model that it uses."""
DONE, REFUSED = "done", "refused.txt"
"""The files there by which a server's last word is known: that the run is over, or why the client cannot take
part."""


@dataclasses.dataclass(frozen=True)
class Client:
    """A data owner that takes part in a federation."""

    table: Table
    """Its rows, all of which are its own."""
    state: Path
    """The folder that keeps its models."""
    share_metrics: bool = False
    """Whether the server may know how many test rows its models are right about."""

    def agree(self) -> Content:
        """What the federation must know of the table to agree on columns, classes and scaling."""
        return Content(to_words(self.table.tell()), {})

    def train(self, asked: Content) -> Content:
        """The client's part of a round; the personal model stays here."""
        task = Task(self, asked)
        update = task.simulation.update(task.now, np.zeros(1, int))
        upload = np.asarray(update.upload.ravel(1)[0])
        self.keep(task, update.models)
        weighted = task.simulation.algorithm.aggregation == "samples"
        rows = {"rows": int(task.federation.n_train[0])} if weighted else {}
        return Content(rows, {"w": upload})

    def finish(self, asked: Content) -> Content:
        """The models in answer to w; they stay here, and their scores too unless they may be shared."""
        task = Task(self, asked)
        evaluation, models = task.simulation.evaluate(task.now)
        if asked.words.get("last"):
            self.keep(task, models)
            atomic_write(self.state / DONE, f"{task.now.t}\n")
        return Content({"scores": scores_told(evaluation, task.federation)} if self.share_metrics else {}, {})

    def keep(self, task: Task, models: Models) -> None:
        """Writes the personal model (or else the local one) into the state folder, with its round."""
        which = "personal" if models.personal is not None else "local"
        theta = models.personal if models.personal is not None else models.local
        assert theta is not None
        origin = {"client": self.table.owner, "which": which, "round": task.now.t}
        predictor = Predictor(task.simulation.model, theta[0], task.schema, origin=origin)
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
        predictor.save(self.state / MODEL, force=True)

    def refused(self, asked: Content) -> Content:
        """Notes why the client cannot take part; whoever started it reads that."""
        with writing(self.state):
            self.state.mkdir(parents=True, exist_ok=True)
            atomic_write(self.state / REFUSED, str(asked.words.get("reason", "")) + "\n")
        return Content({}, {})


class Task:
    """What a message asks a client for."""

    def __init__(self, client: Client, asked: Content) -> None:
        words = asked.words
        self.schema = Schema.from_json(words["schema"])
        refuse_columns(client.table, [column.name for column in self.schema.columns])
        federation = client.table.load(self.schema)
        self.federation: Federation = dataclasses.replace(federation, ids=np.array([words["id"]], np.uint32))
        algorithm = _part(words["algorithm"], ALGORITHMS, "algorithm")
        described = _part(words["model"], MODELS, "model")
        features, classes = self.federation.features, len(self.schema.labels)
        model = described.settled(features, self.federation.shape).build(features, classes)
        self.simulation = Simulation(algorithm, model, self.federation, cohort=1, seed=words["seed"])
        like = jax.eval_shape(model.init, self.simulation.key)
        start = self.simulation.start(jax.jit(like.like)(asked.arrays["w"]))
        self.now = start._replace(t=int(words["round"]))


def refuse_columns(table: Table, names: Sequence[str]) -> None:
    """Raises an error if a server asks for a column that the owner of a table does not let it use."""
    kept = {*table.drop, table.label}
    if asked := [name for name in names if name in kept or (table.features and name not in table.features)]:
        raise InputError(f"The server asks for the column '{asked[0]}', which is not to be used.")


def _part(words: dict[str, Any], known: dict[str, Any], what: str) -> Any:
    fields = dict(words)
    name = fields.pop("name")
    if name not in known:
        raise InputError(
            f"The server asks for the {what} '{name}', which this version does not know; update it."
        )
    return build(known[name], fields, f"{what} '{name}'")


def scores_told(evaluation: Evaluation, federation: Federation) -> dict[str, Any]:
    """Counts and sums over a client's rows, from which the server makes the record.

    For each model and part: `loss`, `rows` and how many are `right`; in a regression `mean` and `spread` of
    the labels instead.
    """
    parts: dict[Part, dict[str, Scores]] = {"test": evaluation.test, "train": evaluation.train}
    return {
        "n_train": int(federation.n_train[0]),
        "n_test": int(federation.n_test[0]),
        "info": {name: float(values[0]) for name, values in evaluation.info.items()},
        **{
            part: {kind: _sums(scores, federation, part) for kind, scores in of.items()}
            for part, of in parts.items()
        },
    }  # fmt: skip


def _sums(scores: Scores, federation: Federation, part: Part) -> dict[str, Any]:
    told: dict[str, Any] = {"loss": float(scores.loss[0]), "rows": int(scores.count[0])}
    if scores.spread is None:
        return told | {"right": int(scores.correct[0])}
    start, count = (values[0] for values in federation.rows(part))
    labels = federation.y[start : start + count]
    return told | {"spread": float(scores.spread.own[0]), "mean": float(labels.mean()) if count else 0.0}
