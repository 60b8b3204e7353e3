"""Models to use: the model of one client, or the shared one, with all that predicting from new rows needs.

In a folder it is `model.json` (layers, columns, categories, scaling, labels, where it comes from) and
`model.safetensors` (the parameters). It holds no rows and needs no run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.data.reading import Part, Types, open_parts, without_blank_end
from pfedme.data.text import Late
from pfedme.errors import InputError, unknown
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.folder import Folder, read_models
from pfedme.models import Model, from_about
from pfedme.schema import Schema
from pfedme.tree import Params

FORMAT = 1
"""Of the folder; a version reads its own and the earlier ones."""
BLOCK = 256
"""Rows that are predicted at once, if nothing else is known."""

Which = Literal["recommended", "personal", "global"]


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model that is ready to predict.

    It takes a frame with the columns that the model was trained on (of polars or pandas, or a dictionary of
    columns), or an array with a row of numbers, or an image, for each prediction.

    >>> import tempfile
    >>> from pfedme.models import Network
    >>> from pfedme.schema import Column
    >>> schema = Schema(
    ...     columns=(Column("age", "number", mean=50.0, scale=10.0),), label="outcome", client="hospital",
    ...     task="classification", labels=("no", "yes"),
    ... )
    >>> model = Network(features=1, classes=2)
    >>> theta = model.init(jax.random.key(0)).like(jnp.array([-1.0, 1.0, 0.0, 0.0]))
    >>> predictor = Predictor(model, theta, schema)
    >>> predictor.predict({"age": [40, 60]})
    array(['no', 'yes'], dtype='<U3')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     predictor.save(folder)
    ...     load(folder).probabilities({"age": [50, 60]}).round(3)
    array([[0.5  , 0.5  ],
           [0.119, 0.881]])
    """

    model: Model
    theta: Params
    schema: Schema | None = None
    """The columns; None for a model that was trained on rows of numbers."""
    block: int = BLOCK
    """Rows that are predicted at once: as many as when the run was evaluated, because the last bits of a
    product of matrices can depend on it."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where it comes from, as far as known: `client`, `which` model it is, its `round`, the `command`."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; none if the model predicts a quantity."""
        return self.schema.labels if self.schema else tuple(map(str, range(self.model.classes or 0)))

    @property
    def outputs(self) -> int:
        """Numbers that the model makes of a row."""
        return max(1, len(self.labels))

    def predict(self, rows: Any) -> np.ndarray:
        """The most probable class of each row, as text; of a quantity, the number in its own unit."""
        return self.named(self.scores(rows))

    def probabilities(self, rows: Any) -> np.ndarray:
        """The probability of each class (column) in each row; only of a model of classes."""
        if not self.labels:
            raise InputError("This model predicts a quantity, which has no probabilities; use 'predict'.")
        return _softmax(self.scores(rows))

    def scores(self, rows: Any, where: str = "the rows", first_row: int = 1) -> np.ndarray:
        """The model's outputs, float32, a row for each row; errors call the rows `where` and count them."""
        x = self.encoded(rows, where, first_row)
        blocks = [
            np.asarray(_scores(self.model, self.theta, _padded(part, self.block)))[:, : len(part)]
            for part in (x[k : k + self.block] for k in range(0, len(x), self.block))
        ]
        return np.concatenate([np.zeros((self.outputs, 0), np.float32), *blocks], axis=1).T

    def named(self, scores: np.ndarray) -> np.ndarray:
        """What `predict` makes of the model's outputs."""
        if self.labels:
            return np.array(self.labels)[np.argmax(scores, axis=1)]
        mean, scale = (self.schema.label_mean, self.schema.label_scale) if self.schema else (0.0, 1.0)
        return mean + scale * scores[:, 0].astype(np.float64)

    def encoded(self, rows: Any, where: str, first_row: int = 1) -> np.ndarray:
        """The rows as the numbers that the model takes."""
        frame = rows if isinstance(rows, np.ndarray) else _frame(rows)
        if self.schema is not None:
            if isinstance(frame, np.ndarray) and len(self.schema.numbers) < len(self.schema.columns):
                raise InputError("The rows must be a frame, because the model has columns of categories.")
            return self.schema.encode(frame, where, first_row=first_row)
        features = self.model.about()["features"]
        x = np.asarray(frame)
        x = x.reshape(len(x), -1)
        if x.shape[1] != features:
            raise InputError(f"The rows of {where} have {x.shape[1]} numbers, and should have {features}.")
        if x.dtype.kind not in "fiub":
            raise InputError(f"The rows of {where} must hold nothing but numbers.")
        x = x.astype(np.float32)
        if not (finite := np.isfinite(x).all(axis=1)).all():
            row = first_row + int(np.argmin(finite))
            raise InputError(f"Row {row} of {where} has a number that is missing or infinite; correct it.")
        return x

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Writes the model into a folder, from which `load` reads it."""
        path = Path(path)
        refuse_file(path)
        if path.exists() and any(path.iterdir()) and not force:
            raise InputError(f"{path} is not empty; choose another folder, or --force to write into it.")
        document = {
            "format": FORMAT,
            "version": __version__,
            **self.origin,
            "model": self.model.about(),
            "labels": list(self.labels),
            "schema": self.schema.to_json() if self.schema else None,
            "block": self.block,
        }
        # Where the model comes from is in both files: one is replaced after the other.
        where = {"origin": json.dumps(self.origin)}
        parameters = safetensors.numpy.save({"theta": np.asarray(self.theta.ravel())}, metadata=where)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            atomic_write(path / "model.safetensors", parameters)
            atomic_write(path / "model.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def predict_file(self, path: Path) -> Iterator[pl.DataFrame]:
        """The predictions for a table, or a folder of tables, a group of rows after the other.

        Their columns are `prediction` and, for each label, `probability_LABEL`.
        """
        yield self._frame_of(np.zeros((0, self.outputs), np.float32))
        names = [column.name for column in self.schema.columns] if self.schema else None
        for k, part in enumerate(open_parts(path, names)):
            if self.schema:
                self.schema.require(list(part.types), part.where)
            row = 1
            while True:
                try:
                    for piece in _pieces(part, self.schema):
                        yield self._frame_of(self.scores(piece, part.where, row))
                        row += len(piece)
                    break
                except Late:
                    if row > 1:
                        raise InputError(
                            f"A column of {part.where} holds something else after row {row} than before; see "
                            "that its numbers are numbers."
                        ) from None
                    part = open_parts(path, names, whole=True)[k]

    def _frame_of(self, scores: np.ndarray) -> pl.DataFrame:
        columns: dict[str, np.ndarray] = {"prediction": self.named(scores)}
        if self.labels:
            chances = _softmax(scores)
            columns |= {f"probability_{name}": chances[:, k] for k, name in enumerate(self.labels)}
        return pl.DataFrame(columns)


@jax.jit
def _scores(model: Model, theta: Params, x: jax.Array) -> jax.Array:
    return model.scores(theta, x)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    """`x` with rows of zeros until it has so many, so that one compiled program does for all."""
    return np.pad(x, [(0, rows - len(x)), (0, 0)])


def _softmax(scores: np.ndarray) -> np.ndarray:
    odds = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return odds / odds.sum(axis=1, keepdims=True)


def _frame(rows: Any) -> pl.DataFrame:
    """A polars frame of whatever maps names to columns."""
    if isinstance(rows, pl.DataFrame):
        return rows
    try:
        if hasattr(rows, "isna"):  # pandas, which is no dependency
            rows = {
                str(name): [
                    None if gone else value for value, gone in zip(rows[name], rows[name].isna(), strict=True)
                ]
                for name in rows.columns
            }
        return pl.DataFrame(rows, strict=False)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(f"The rows are no frame: {str(error).splitlines()[0]}") from None


def _pieces(part: Part, schema: Schema | None) -> Iterator[pl.DataFrame | np.ndarray]:
    """Rows of the columns that matter, but for empty lines at the end."""
    types: Types = {name: kind for name, kind in part.types.items() if schema or name[:1] == "x"}
    if schema:
        # A number that is read as text is checked row by row.
        number = {name: pl.Float64() if kind.is_numeric() else pl.String() for name, kind in types.items()}
        types = {c.name: number[c.name] if c.kind == "number" else pl.Categorical() for c in schema.columns}
    blank = None
    for content in part.pieces(types):
        if isinstance(content, pl.DataFrame):
            whole = content if blank is None else pl.concat([blank, content])
            content = without_blank_end(whole)
            blank = whole[content.height :]
        if len(content):
            yield content


def load(path: Path | str) -> Predictor:
    """The model that `pfedme export` or `Predictor.save` wrote into a folder."""
    path = Path(path)
    file = path / "model.json"
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"There is no exported model in {path}: it has no model.json. 'pfedme export RUN' makes one."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); export the model again.") from None
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise InputError(f"{file} does not describe an exported model; export it again.")
    if about["format"] > FORMAT:
        raise InputError(
            f"{path} was exported by pfedme {about.get('version')} in a format that this version, "
            f"{__version__}, does not know; install that version or a later one."
        )
    try:
        model = from_about(about["model"])
        schema = Schema.from_json(about["schema"]) if about["schema"] is not None else None
        with safetensors.safe_open(path / "model.safetensors", "numpy") as file:
            flat, origin = file.get_tensor("theta"), json.loads((file.metadata() or {}).get("origin", "{}"))
        if not origin:  # as before it was kept there
            origin = {key: about[key] for key in ("client", "which", "round", "command") if key in about}
        return Predictor(model, _in_layers(model, flat), schema, int(about["block"]), origin)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"The model in {path} is damaged ({error}); export it again.") from None


def _in_layers(model: Model, flat: np.ndarray) -> Params:
    """The parameters of a model from their coordinates."""
    like = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    if flat.shape != (size,):
        raise ValueError(f"the model has {size} numbers and the file {flat.size}")
    return like.like(jnp.asarray(flat))


def model_of(run: Path | str, client: str | None = None, which: Which | None = None) -> Predictor:
    """The model of a client of a finished run, or the shared one if no client is given.

    If not told `which`, a client gets the model that it was recommended (by `--personalize auto` or
    `pfedme personalize`), else its personal one, else the shared one.
    """
    folder = Folder(Path(run))
    has: dict[Which, bool] = {"recommended": folder.offered.exists(), "personal": False, "global": False}
    tensors, about = {}, {}
    if folder.model.exists():
        tensors, about = read_models(folder.model)
        has |= {"personal": "theta" in tensors, "global": "w" in tensors}
    elif not has["recommended"]:
        folder.read()
        raise InputError(f"The run in {run} has not finished; 'pfedme resume {run}' goes on with it.")
    choices: list[Which] = ["recommended", "personal", "global"] if client is not None else ["global"]
    there: list[Which] = [which] if which else [kind for kind in choices if has[kind]]
    which = there[0] if there else "global"
    if not has[which]:
        others = ", ".join(kind for kind in has if has[kind])
        raise InputError(f"{run} has no {which} model, only: {others}; clients' own need --client.")
    if which == "recommended":
        tensors, about = read_models(folder.offered)
    flat = tensors.get("w") if which == "global" else tensors["theta"]
    if which != "global":
        names = about.get("names") or [str(i) for i in about["clients"]]
        if client is None:
            raise InputError(f"Whose {which} model? Give --client, one of {', '.join(names[:5])}, ...")
        if client not in names:
            raise unknown("client", client, names)
        flat = tensors["theta"][names.index(client)]
    origin = {"client": client if which != "global" else None, "which": which}
    if folder.record.exists():
        origin["command"] = folder.read().get("command")
    try:
        model = from_about(about["model"])
        schema = Schema.from_json(about["schema"]) if "schema" in about else None
        theta = _in_layers(model, np.asarray(flat))
        return Predictor(model, theta, schema, int(about.get("block", BLOCK)), origin)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"The models in {run} are damaged ({error}); make the run again.") from None
