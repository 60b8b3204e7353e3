"""Models to use: the model of one client, with all that is needed to predict from new rows.

An export is a folder with `model.json` (layers, columns, categories, scaling, labels, where it comes from) and
`model.safetensors` (the parameters). It holds no rows and depends on no run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.data.reading import open_parts, shown
from pfedme.errors import InputError, unknown
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.folder import Folder
from pfedme.models import Model, from_about
from pfedme.schema import Schema
from pfedme.tree import Params

FORMAT = 1
"""Of the files; a reader knows its own and the earlier ones."""
BLOCK = 256
"""Rows that are predicted at once."""

Which = Literal["recommended", "personal", "global"]


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model of one client, ready to predict.

    `predict` takes a frame with the columns that the model was trained on (polars, pandas, or anything that
    maps names to columns), or an array with a row of numbers, or an image, for each prediction.
    """

    model: Model
    theta: Params
    labels: tuple[str, ...]
    """The classes; none in a regression."""
    schema: Schema | None
    """The columns; None for a model that was trained on rows of numbers."""
    about: dict[str, Any]
    """model.json."""

    def predict(self, rows: Any, where: str = "the rows") -> np.ndarray:
        """The most probable label of each row as text; in a regression the number."""
        scores = self.scores(rows, where)
        if not self.labels:
            mean, scale = (self.schema.label_mean, self.schema.label_scale) if self.schema else (0.0, 1.0)
            return mean + scale * scores[:, 0].astype(np.float64)
        return np.array(self.labels)[np.argmax(scores, axis=1)]

    def probabilities(self, rows: Any, where: str = "the rows") -> np.ndarray:
        """The probability of each label (column) of each row; only of a classifier."""
        if not self.labels:
            raise InputError("This model predicts a number, and numbers have no probabilities.")
        scores = self.scores(rows, where).astype(np.float64)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def scores(self, rows: Any, where: str = "the rows") -> np.ndarray:
        """The model's output, a row for each row."""
        x = self.encode(rows, where)
        blocks = [
            np.asarray(_scores(self.model, self.theta, _padded(x[k : k + BLOCK])))[:, : len(x) - k]
            for k in range(0, len(x), BLOCK)
        ]
        outputs = max(1, len(self.labels))
        return np.concatenate(blocks, axis=1).T if blocks else np.zeros((0, outputs), np.float32)

    def encode(self, rows: Any, where: str) -> np.ndarray:
        """The rows as the numbers that the model takes."""
        if not isinstance(rows, np.ndarray) and self.schema is not None:
            return self.schema.encode(_frame(rows), where)
        if not isinstance(rows, np.ndarray):
            rows = _frame(rows).to_numpy()
        features = self.about["features"]
        x = np.asarray(rows).reshape(len(rows), -1)
        if x.shape[1] != features:
            raise InputError(f"The rows of {where} have {x.shape[1]} numbers, and should have {features}.")
        if self.schema is not None:
            return self.schema.encode(x, where)
        try:
            x = x.astype(np.float32)
        except (TypeError, ValueError):
            raise InputError(f"{where} must hold nothing but numbers.") from None
        if not np.isfinite(x).all():
            row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
            raise InputError(f"Row {row + 1} of {where} has a value that is missing or infinite.")
        return x


@jax.jit
def _scores(model: Model, theta: Params, x: jax.Array) -> jax.Array:
    return model.scores(theta, x)


def _padded(x: np.ndarray) -> np.ndarray:
    """`x` with rows of zeros until it has BLOCK of them, so that one compiled program does for all."""
    return np.pad(x, [(0, BLOCK - len(x)), *[(0, 0)] * (x.ndim - 1)])


def _frame(rows: Any) -> pl.DataFrame:
    """A polars frame of whatever maps names to columns."""
    if isinstance(rows, pl.DataFrame):
        return rows
    if hasattr(rows, "columns") and hasattr(rows, "__getitem__"):  # pandas, without a dependency on it
        return pl.DataFrame({str(name): np.asarray(rows[name]) for name in rows.columns})
    return pl.DataFrame(rows)


def load(path: Path | str) -> Predictor:
    """The model in an export's folder."""
    path = Path(path)
    file = path / "model.json"
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"There is no exported model in {path}: it has no model.json. 'pfedme export RUN -o {path}' makes one."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); export the model again.") from None
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise InputError(f"{file} does not describe an exported model; export it again.")
    if about["format"] > FORMAT:
        raise InputError(
            f"{path} was exported by pfedme {about.get('pfedme')} in a format that this version, {__version__}, "
            "does not know; install that one or a later one."
        )
    try:
        model = from_about(about["model"])
        schema = Schema.from_json(about["schema"]) if about["schema"] else None
        flat = safetensors.numpy.load_file(path / "model.safetensors")["theta"]
        like = model.init(jax.random.key(0))
        if flat.shape != like.ravel().shape:
            raise ValueError(f"the model has {like.ravel().size} numbers, the file {flat.size}")
        return Predictor(model, like.like(jnp.asarray(flat)), tuple(about["labels"]), schema, about)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise InputError(f"The export in {path} is damaged ({error}); export the model again.") from None


def export(
    run: Path, out: Path, *, client: str | None = None, which: Which | None = None, force: bool = False
) -> dict[str, Any]:
    """Writes the model of a client, or the shared one, into a folder of its own; returns model.json.

    Without `which`: what the client was recommended, else its personal model, else the shared one.
    """
    refuse_file(out)
    if out.exists() and any(out.iterdir()) and not force:
        raise InputError(f"{out} is not empty; choose another folder, or --force to write into it.")
    folder = Folder(run)
    record = folder.read()
    if record.get("status") != "finished":
        raise InputError(f"The run in {run} has not finished; 'pfedme resume {run}' goes on with it.")
    tensors, about = read_models(folder.model)
    names = about.get("names") or [str(i) for i in about["clients"]]
    which = which or _best(run, client, tensors)
    if which == "global":
        if "w" not in tensors:
            raise InputError(f"{run} has no shared model; choose one of its clients by --client.")
        theta = tensors["w"]
    else:
        if client is None:
            raise InputError(f"Whose {which} model? Give --client, one of {', '.join(names[:5])}, ...")
        if client not in names:
            raise unknown("client", client, names)
        rows = (
            tensors["theta"]
            if which == "personal"
            else read_models(run / "personalized.safetensors")[0]["theta"]
        )
        theta = rows[names.index(client)]
    schema = about.get("schema")
    document = {
        "format": FORMAT,
        "pfedme": __version__,
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "client": client if which != "global" else None,
        "which": which,
        "model": about["model"],
        "features": about["model"]["features"],
        "labels": schema["labels"] if schema else [str(k) for k in range(about["model"]["classes"])],
        "schema": schema,
        "command": record.get("command"),
    }
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(
            out / "model.safetensors", safetensors.numpy.save({"theta": np.ascontiguousarray(theta)})
        )
        atomic_write(out / "model.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return document


def read_models(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The parameters in a run's file of models, and what it tells about them."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["pfedme"])
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({error}); make the run again.") from None


def _best(run: Path, client: str | None, tensors: dict[str, np.ndarray]) -> Which:
    if client is None:
        return "global"
    if (run / "personalized.safetensors").exists():
        return "recommended"
    return "personal" if "theta" in tensors else "global"


def predict_file(model: Predictor, data: Path) -> pl.DataFrame:
    """The predictions for a table's rows: `prediction`, and for a classifier `probability of LABEL`."""
    names = [column.name for column in model.schema.columns] if model.schema else None
    scores: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for part in open_parts(data, names):
        rows: Any
        if data.suffix.lower() == ".npz":
            rows = np.load(data)["x"]
        else:
            wanted = [n for n in (names or part.types) if n in part.types]
            if model.schema is not None:
                model.schema.require(list(part.types), shown(part.path))
            rows = part.frame({name: part.types[name] for name in wanted})
        labels.append(model.predict(rows, shown(part.path)))
        if model.labels:
            scores.append(model.probabilities(rows, shown(part.path)))
    frame = pl.DataFrame({"prediction": np.concatenate(labels)})
    if model.labels:
        table = np.concatenate(scores)
        columns = {f"probability of {name}": table[:, k] for k, name in enumerate(model.labels)}
        frame = frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
    return frame
