"""Exported models: a client's model, or the shared one, with everything that predicting new rows needs.

Its folder has `model.json` (layers, columns, categories, scaling, labels, origin) and `model.safetensors`
(the parameters). It contains no rows and does not need the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.core.models import Model, model_from_json
from pfedme.core.tree import Params
from pfedme.data.frames import as_frame
from pfedme.data.gaps import Gaps
from pfedme.data.reading import Part, Types, open_parts, without_blank_end
from pfedme.data.schema import Schema
from pfedme.data.text import SchemaChanged
from pfedme.errors import InputError, unknown
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.runs.folder import OWN, Folder, read_models

FORMAT = 1
"""Format of the folder; a version reads its own format and earlier ones."""
BLOCK = 256
"""Default number of rows that are predicted at once."""

Which = Literal["recommended", "personal", "global"]


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Of two classes, `label` is predicted if its probability is at least `value`, the other one if not."""

    label: str
    value: float

    @classmethod
    def from_json(cls, document: Any, labels: Sequence[str]) -> Threshold | None:
        """The threshold in a model.json or a record: `{"class": ..., "value": ...}`, or None."""
        if document is None:
            return None
        label, value = str(document["class"]), float(document["value"])
        if len(labels) != 2 or label not in labels or not 0 <= value <= 1:
            raise ValueError(f"a threshold of {value} for '{label}' does not fit the labels {list(labels)}")
        return cls(label, value)

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {"class": self.label, "value": self.value}


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model that is ready to predict.

    It takes a data frame with the columns that the model was trained on (of polars or pandas, or a dictionary
    of columns), or an array with a row of numbers, or an image, for each prediction. A missing number is
    replaced by the mean of the training rows, and a missing or unknown category is encoded as zeros, with a
    warning that counts such rows; `strict` makes this an error.

    >>> import tempfile
    >>> from pfedme.core.models import Network
    >>> from pfedme.data.schema import Column
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
    matrix product can depend on it."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the model comes from, as far as known: `client`, `which` model, its `round`, the `command`."""
    threshold: Threshold | None = None
    """The probability from which one of two classes is predicted; if None, the more probable class is."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; none if the model predicts a quantity."""
        return self.schema.labels if self.schema else tuple(map(str, range(self.model.classes or 0)))

    @property
    def outputs(self) -> int:
        """Number of outputs of the model for a row."""
        return max(1, len(self.labels))

    def predict(self, rows: Any, *, strict: bool = False) -> np.ndarray:
        """The most probable class of each row, as a string, or the class that the model's threshold gives;
        for a quantity, the number in its own unit."""
        return self.named(self._warned_scores(rows, strict))

    def probabilities(self, rows: Any, *, strict: bool = False) -> np.ndarray:
        """The probability of each class (column) for each row; only for models that predict classes."""
        if not self.labels:
            raise InputError("This model predicts a quantity, which has no probabilities; use 'predict'.")
        return _softmax(self._warned_scores(rows, strict))

    def with_threshold(self, document: Any) -> Predictor:
        """This model with the threshold that `Threshold.from_json` reads."""
        return dataclasses.replace(self, threshold=Threshold.from_json(document, self.labels))

    def _warned_scores(self, rows: Any, strict: bool) -> np.ndarray:
        gaps = None if strict else Gaps()
        scores = self.scores(rows, gaps=gaps)
        if gaps and (found := gaps.sentence("the data")):
            warnings.warn(f"{found} strict=True makes this an error.", stacklevel=3)
        return scores

    def scores(
        self, rows: Any, where: str = "the rows", first_row: int = 1, gaps: Gaps | None = None
    ) -> np.ndarray:
        """The model's float32 outputs, one row per row; errors name the source `where` and the row number.

        Missing values and unknown categories are errors, unless there are `gaps` to count them.
        """
        x = self.encoded(rows, where, first_row, gaps)
        blocks = [
            np.asarray(_scores(self.model, self.theta, _padded(part, self.block)))[:, : len(part)]
            for part in (x[k : k + self.block] for k in range(0, len(x), self.block))
        ]
        return np.concatenate([np.zeros((self.outputs, 0), np.float32), *blocks], axis=1).T

    def named(self, scores: np.ndarray) -> np.ndarray:
        """The predictions that correspond to the model's outputs."""
        if self.labels and self.threshold:
            place = self.labels.index(self.threshold.label)
            above = _softmax(scores)[:, place] >= self.threshold.value
            return np.array(self.labels)[np.where(above, place, 1 - place)]
        if self.labels:
            return np.array(self.labels)[np.argmax(scores, axis=1)]
        mean, scale = (self.schema.label_mean, self.schema.label_scale) if self.schema else (0.0, 1.0)
        return mean + scale * scores[:, 0].astype(np.float64)

    def encoded(self, rows: Any, where: str, first_row: int = 1, gaps: Gaps | None = None) -> np.ndarray:
        """The rows as the numbers that the model takes; `gaps` as in `scores`."""
        frame = rows if isinstance(rows, np.ndarray) else as_frame(rows)
        if self.schema is not None:
            if isinstance(frame, np.ndarray) and len(self.schema.numbers) < len(self.schema.columns):
                raise InputError("The rows must be a data frame, because the model has categorical columns.")
            if gaps is not None:
                return gaps.encode(self.schema, frame, where, first_row)
            return self.schema.encode(frame, where, first_row=first_row)
        features = self.model.to_json()["features"]
        x = np.asarray(frame)
        x = x.reshape(len(x), -1)
        if x.shape[1] != features:
            raise InputError(f"The rows of {where} have {x.shape[1]} numbers, but should have {features}.")
        if x.dtype.kind not in "fiub":
            raise InputError(f"The rows of {where} must contain only numbers.")
        x = x.astype(np.float32)
        if not (finite := np.isfinite(x).all(axis=1)).all():
            row = first_row + int(np.argmin(finite))
            raise InputError(f"Row {row} of {where} has a number that is missing or infinite; correct it.")
        return x

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Writes the model to a folder, from which `load` reads it."""
        path = Path(path)
        refuse_file(path)
        if path.exists() and any(path.iterdir()) and not force:
            raise InputError(f"{path} is not empty; choose another folder, or --force to write into it.")
        document = {
            "format": FORMAT,
            "version": __version__,
            **self.origin,
            "model": self.model.to_json(),
            "labels": list(self.labels),
            "schema": self.schema.to_json() if self.schema else None,
            "block": self.block,
            **({"threshold": self.threshold.to_json()} if self.threshold else {}),
        }
        # The origin is in both files, because they are replaced one after the other.
        where = {"origin": json.dumps(self.origin)}
        parameters = safetensors.numpy.save({"theta": np.asarray(self.theta.ravel())}, metadata=where)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            atomic_write(path / "model.safetensors", parameters)
            atomic_write(path / "model.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def predict_file(
        self, path: Path, keep: Sequence[str] = (), gaps: Gaps | None = None
    ) -> Iterator[pl.DataFrame]:
        """The predictions for a table, or for a folder of tables, one group of rows at a time.

        The columns are those of the table to `keep`, `prediction` and, for each label, `probability_LABEL`;
        `gaps` is as in `scores`.
        """
        keep = list(dict.fromkeys(keep))
        nothing = self._frame_of(np.zeros((0, self.outputs), np.float32))
        if taken := [name for name in keep if name in nothing.columns]:
            raise InputError(f"--keep {taken[0]}: the predictions have a column of that name; rename yours.")
        names = list(self.schema.sources) if self.schema else None
        used = None if names is None else [*names, *keep]
        for k, part in enumerate(open_parts(path, used)):
            if self.schema:
                self.schema.require(list(part.types), part.where)
            _refuse_to_keep(part, keep)
            if k == 0:
                kept = pl.DataFrame(schema=dict.fromkeys(keep, pl.String))
                yield pl.concat([kept, nothing], how="horizontal")
            row = 1
            while True:
                try:
                    for kept, piece in _pieces(part, self.schema, keep):
                        own = self._frame_of(self.scores(piece, part.where, row, gaps))
                        yield pl.concat([kept, own], how="horizontal")
                        row += len(piece)
                    break
                except SchemaChanged:
                    if row > 1:
                        raise InputError(
                            f"A column of {part.where} changes its type after row {row}; check that its "
                            "numbers are numbers."
                        ) from None
                    part = open_parts(path, used, whole=True)[k]

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
    """`x` padded with zeros to so many rows, so that one compiled program serves all blocks."""
    return np.pad(x, [(0, rows - len(x)), (0, 0)])


def _softmax(scores: np.ndarray) -> np.ndarray:
    odds = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True, initial=-np.inf))
    return odds / odds.sum(axis=1, keepdims=True)


def _refuse_to_keep(part: Part, keep: Sequence[str]) -> None:
    """Raises an error if a column to keep is not in a file."""
    for name in keep:
        if name not in part.types:
            raise unknown("column", name, part.types)


def _pieces(
    part: Part, schema: Schema | None, keep: Sequence[str]
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame | np.ndarray]]:
    """Rows, except empty lines at the end: the columns to keep, as strings, and the model's columns."""
    types: Types = {name: kind for name, kind in part.types.items() if schema or name[:1] == "x"}
    if schema:
        # A number that is read as a string is checked row by row; one that is kept stays as it was written.
        number = {
            name: pl.Float64() if kind.is_numeric() and name not in keep else pl.String()
            for name, kind in types.items()
        }
        types = {
            c.source: number[c.source] if c.kind == "number" else pl.Categorical() for c in schema.columns
        }
    arrays = part.path.suffix.lower() == ".npz"
    kept = part.frame({name: pl.String() for name in keep}) if arrays else pl.DataFrame()
    blank, row = None, 0
    others: Types = {name: pl.String() for name in keep if name not in types}
    for content in part.pieces(types if arrays else types | others):
        if isinstance(content, pl.DataFrame):
            whole = content if blank is None else pl.concat([blank, content])
            content = without_blank_end(whole)
            blank = whole[content.height :]
            if content.height:
                yield content.select(pl.col(keep).cast(pl.String)), content.select(*types)
        elif len(content):
            yield kept[row : row + len(content)], content
            row += len(content)


def load(path: Path | str) -> Predictor:
    """The model that `pfedme export` or `Predictor.save` wrote to a folder."""
    path = Path(path)
    file = path / "model.json"
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"There is no exported model in {path}: it has no model.json. 'pfedme export RUN' creates one."
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
        model = model_from_json(about["model"])
        schema = Schema.from_json(about["schema"]) if about["schema"] is not None else None
        with safetensors.safe_open(path / "model.safetensors", "numpy") as file:
            flat, origin = file.get_tensor("theta"), json.loads((file.metadata() or {}).get("origin", "{}"))
        if not origin:  # older exports have it in model.json only
            origin = {key: about[key] for key in ("client", "which", "round", "command") if key in about}
        made = Predictor(model, _in_layers(model, flat), schema, int(about["block"]), origin)
        return made.with_threshold(about.get("threshold"))
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"The model in {path} is damaged ({error}); export it again.") from None


def _in_layers(model: Model, flat: np.ndarray) -> Params:
    """The parameters of a model from their flat vector."""
    like = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    if flat.shape != (size,):
        raise ValueError(f"the model has {size} numbers and the file {flat.size}")
    return like.like(jnp.asarray(flat))


def _refuse_stranger(folder: Folder, client: str) -> None:
    """Raises an error for a client that is unknown to a run without personal models."""
    from pfedme.runs.run import Run

    record = folder.read()
    names = [*folder.client_names(), *record.get("deployment", {}).get("clients", ())]
    if client in names:
        return
    with contextlib.suppress(InputError):
        # Clients that were held out, or were not evaluated, are only in the data.
        parties = Run.from_json(record["config"]).parties()
        names = [f.name(i) for f in parties if f is not None for i in range(f.clients)]
    if client not in names:
        raise unknown("client", client, names)


def model_of(run: Path | str, client: str | None = None, which: Which | None = None) -> Predictor:
    """The model of a client of a finished run, or the shared one if no client is given.

    Without `which`, a client gets the model that was recommended to it (by `--personalize auto` or
    `pfedme personalize`), or else its personal model, or else the shared one.
    """
    folder, client = Folder(Path(run)), None if client is None else str(client)
    has: dict[Which, bool] = {"recommended": folder.offered.exists(), "personal": False, "global": False}
    tensors, about = {}, {}
    if folder.model.exists():
        tensors, about = read_models(folder.model)
        has |= {"personal": "theta" in tensors, "global": "w" in tensors}
    elif not has["recommended"]:
        folder.read()
        raise InputError(f"The run in {run} has not finished; 'pfedme resume {run}' continues it.")
    choices: list[Which] = ["recommended", "personal", "global"] if client is not None else ["global"]
    there: list[Which] = [which] if which else [kind for kind in choices if has[kind]]
    which = there[0] if there else "global"
    if not has[which]:
        others = ", ".join(kind for kind in has if has[kind])
        only = f", only: {others}; clients' models need --client." if others else "; clients have their own."
        raise InputError(f"{run} has no {which} model{only}")
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
    elif client is not None:
        _refuse_stranger(folder, client)
    origin = {"client": client if which != "global" else None, "which": which}
    threshold, name = None, about["model"].get("class")
    if folder.record.exists():
        record = folder.read()
        origin["command"] = record.get("command")
        name = record["config"]["model"]["name"]
        threshold = record.get("threshold", {}).get(which)
    if about["model"].get("kind") == OWN:
        raise InputError(
            f"The model of this run is your own Python code, {name}, which cannot be exported; use the "
            "parameters in model.safetensors, or train one of mlr, dnn, dnn-bn and cnn."
        )
    try:
        model = model_from_json(about["model"])
        schema = Schema.from_json(about["schema"]) if "schema" in about else None
        theta = _in_layers(model, np.asarray(flat))
        made = Predictor(model, theta, schema, int(about.get("block", BLOCK)), origin)
        return made.with_threshold(threshold)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"The models in {run} are damaged ({error}); start the run again.") from None
