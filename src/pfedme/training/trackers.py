"""TensorBoard and MLflow: where they store a run, and how it is logged.

Their packages are imported on request, and are not needed otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from pfedme.errors import InputError
from pfedme.runs.folder import EVENTS

MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    # A server that is gone delays a run for half a minute, not for hours.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""MLflow's settings unless the user has set them: no telemetry, and nothing on standard output."""
MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "diverged": "FAILED", "failed": "FAILED"}


class Log(Protocol):
    """A tracker's log of one run."""

    run: str | None
    """The name by which the tracker finds it again, if it needs one."""

    def start(self, record: Mapping[str, Any]) -> None:
        """Starts or resumes, with the configuration and the environment in a run's record."""
        ...

    def logged(self) -> set[tuple[str, int]]:
        """The names of numbers that are already logged, each with its round."""
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a round; they are visible when this returns."""
        ...

    def end(self, status: str, step: int) -> None:
        """Logs that the run has ended in a round: `finished`, `diverged`, `interrupted` or `failed`."""
        ...

    def keep(self, file: Path) -> None:
        """Adds a file to the log, if the tracker accepts files."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensorboard:
    """Event files that TensorBoard reads."""

    name: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboardX"

    dir: str | None = None
    """Folder of the event files; `tensorboard` in the run's folder if not given."""

    def with_defaults(self) -> Tensorboard:
        """The same with an absolute path, so that a run can be resumed from any folder."""
        return dataclasses.replace(self, dir=self.dir and os.path.abspath(self.dir))

    def below(self, folder: str) -> Tensorboard:
        """The tracker of one run of several."""
        return dataclasses.replace(self, dir=self.dir and os.path.join(self.dir, folder))

    def open(self, folder: Path, run: str | None, *, force: bool) -> Log:
        """The log of a run; `force` replaces another run's."""
        place = Path(self.dir) if self.dir else folder / "tensorboard"
        if run is None and not force and any(place.glob(EVENTS)):
            raise InputError(f"{place} contains events of another run; choose another dir, or --force.")
        return _Events(place, run)


class _Events:
    """Event files: one for each time that the run was started or resumed."""

    def __init__(self, place: Path, run: str | None) -> None:
        self.place, self.run = place, run
        self.summary = importlib.import_module("tensorboardX.summary")
        self.event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self.writer: Any = None

    def start(self, record: Mapping[str, Any]) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        if self.run is None:
            for old in self.place.glob(EVENTS):
                old.unlink()
        files = len(list(self.place.glob(EVENTS)))
        path = self.place / EVENTS.replace("*", f"{int(time.time()):010}.pfedme.{files}")
        self.writer = importlib.import_module("tensorboardX").RecordWriter(str(path))
        self.write(0, file_version="brain.Event:2")
        if not files:
            params = {key: value for key, value in parameters(record["config"]).items() if value is not None}
            self.write(0, summary=self.summary.hparams(params, {})[1])
            about = {**params, **tags(record)}
            rows = "\n".join(f"| {key} | {value} |" for key, value in about.items())
            self.write(0, summary=self.summary.text("run", f"| | |\n|---|---|\n{rows}"))
        self.run = "begun"

    def logged(self) -> set[tuple[str, int]]:
        events = (event for file in self.place.glob(EVENTS) for event in self.read(file))
        return {(value.tag, event.step) for event in events for value in event.summary.value}

    def read(self, file: Path) -> Iterator[Any]:
        """The events of a file, up to one that is truncated."""
        data, at = file.read_bytes(), 0
        while at + 12 <= len(data):  # a length, its checksum, the event, its checksum
            end = at + 12 + struct.unpack_from("<Q", data, at)[0]
            if end + 4 > len(data):
                return
            yield self.event.FromString(data[at + 12 : end])
            at = end + 4

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        summary = self.summary.Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.write(step, summary=summary(value=values))

    def write(self, step: int, **what: Any) -> None:
        """Writes an event to disk."""
        try:
            self.writer.write(self.event(wall_time=time.time(), step=step, **what).SerializeToString())
            self.writer.flush()
        except OSError:
            with contextlib.suppress(OSError):  # from what it has not written yet
                self.writer.close()
            raise

    def end(self, status: str, step: int) -> None:
        if status == "finished":
            self.write(step, summary=self.summary.hparams({}, {})[2])
        self.write(step, summary=self.summary.text("status", status))
        self.writer.close()

    def keep(self, file: Path) -> None:
        """Does nothing: event files contain no files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlflow:
    """A run in MLflow."""

    name: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    uri: str | None = None
    """MLflow's tracking URI; $MLFLOW_TRACKING_URI, or mlflow.db in the current folder, if not given."""
    experiment: str | None = None
    """Name of the experiment; $MLFLOW_EXPERIMENT_NAME, or pfedme, if not given."""

    def with_defaults(self) -> Mlflow:
        """The same with an absolute path, so that a run can be resumed from any folder; an address with a
        password is not stored."""
        if self.uri and urlsplit(self.uri).password:
            raise InputError("--track must not contain a password; set MLFLOW_TRACKING_URI instead.")
        uri = _absolute(self.uri or importlib.import_module("mlflow").get_tracking_uri())
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "pfedme"
        return Mlflow(uri=None if urlsplit(uri).password else uri, experiment=experiment)

    def below(self, folder: str) -> Mlflow:
        """The tracker of one run of several."""
        return self

    def open(self, folder: Path, run: str | None, *, force: bool) -> Log:
        """The log of a run, in an experiment that is created if it does not exist."""
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is not None and found.lifecycle_stage == "deleted":
            raise InputError(
                f"MLflow's experiment '{self.experiment}' has been deleted; restore it, or name another."
            )
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        return _MlflowRun(client, experiment, str(folder), run)


def _absolute(uri: str) -> str:
    """The address, with an absolute path if it is a local file."""
    scheme, slashes, path = uri.rpartition("sqlite:///")
    if slashes or not (":" in uri or uri == "databricks"):
        return f"{scheme}{slashes}{os.path.abspath(path)}"
    return uri


class _MlflowRun:
    """A run in MLflow."""

    def __init__(self, client: Any, experiment: str, title: str, run: str | None) -> None:
        self.client, self.experiment, self.title, self.run = client, experiment, title, run
        self.entities = importlib.import_module("mlflow.entities")

    def start(self, record: Mapping[str, Any]) -> None:
        if self.run is None:
            made = self.client.create_run(self.experiment, tags=tags(record), run_name=self.title)
            self.run = made.info.run_id
        else:
            self.client.update_run(self.run, status="RUNNING")
        self.client.set_tag(self.run, "pfedme.status", "running")
        params = [
            self.entities.Param(key, "none" if value is None else str(value))
            for key, value in parameters(record["config"]).items()
        ]
        self.client.log_batch(self.run, params=params)

    def logged(self) -> set[tuple[str, int]]:
        names = self.client.get_run(self.run).data.metrics
        history = self.client.get_metric_history
        return {(name, metric.step) for name in names for metric in history(self.run, name)}

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def end(self, status: str, step: int) -> None:
        self.client.set_tag(self.run, "pfedme.status", status)
        self.client.set_terminated(self.run, MLFLOW_STATUS[status])

    def keep(self, file: Path) -> None:
        self.client.log_artifact(self.run, str(file))


Tracker = Tensorboard | Mlflow
TRACKERS: dict[str, type[Tracker]] = {Tensorboard.name: Tensorboard, Mlflow.name: Mlflow}


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration as one level of names, such as `algorithm.lam`.

    >>> parameters({"model": {"name": "dnn", "hidden": [20, 10]}, "rounds": 3})
    {'model.name': 'dnn', 'model.hidden': '[20, 10]', 'rounds': 3}
    """
    return {
        key: json.dumps(value) if isinstance(value, list) else value
        for key, value in _flat(config, ".").items()
    }


def tags(record: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with, and the command to repeat it."""
    about = {"pfedme": {"version": record["version"], "command": record["command"]}}
    return {
        key: str(value) for key, value in _flat({**about, "environment": record["environment"]}, ".").items()
    }


def numbers(entry: Mapping[str, Any], timing: Mapping[str, float]) -> dict[str, float]:
    """The numbers in an entry of a record's history, and the seconds spent until then.

    >>> numbers({"round": 5, "global": {"accuracy": 0.5, "clients": {"mean": 0.4}}}, {"train_s": 2.0})
    {'global/accuracy': 0.5, 'global/clients/mean': 0.4, 'time/train_s': 2.0}
    """
    told = {key: value for key, value in {**entry, "time": timing}.items() if key != "round"}
    return {key: value for key, value in _flat(told, "/").items() if isinstance(value, int | float)}


def _flat(tree: Mapping[str, Any], joint: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}{joint}{below}": leaf for below, leaf in _flat(value, joint).items()}
        else:
            flat[key] = value
    return flat
