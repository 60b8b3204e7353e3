"""Reads runs from their folders."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import safetensors

from pfedme.data.deployed import Deployed
from pfedme.engine.measure import ACCURACY, MEASURES
from pfedme.errors import InputError
from pfedme.report.tables import KINDS, privacy_sentences
from pfedme.runs.folder import Folder
from pfedme.runs.ledger import COLUMNS, Outcome, text_of
from pfedme.runs.plan import PLAN, read_plan
from pfedme.runs.run import Run

Columns = dict[str, np.ndarray]
"""The columns of a table: strings, or numbers with NaN for an empty cell."""
TEXTS = ("client", "choice", "method", "metric", "outcome", "reason")
"""The columns that hold strings."""
VERDICTS = ("yes", "no", "cannot tell")
GAINS = ("gain_over_alone", "gain_over_alone_ci95", "gain_over_global", "gain_over_global_ci95")


@dataclasses.dataclass(frozen=True)
class Compared:
    """A comparison, and its verdict once it has finished."""

    path: Path
    verdict: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """A run as read from its folder; None for anything that the folder does not have."""

    path: Path
    run: Run
    record: dict[str, Any]
    clients: Columns | None
    """clients.csv: one row per client."""
    offered: Columns | None
    """personalized.csv: what each client chose, and what that gains."""
    methods: dict[str, Any] | None
    """personalized.json: the results of each method."""
    columns: dict[str, Any] | None = None
    """columns.json and columns.png: which columns matter, as `sentences`, `picture` and `caption`."""
    newcomers: Columns | None
    """newcomers.csv: how newcomers fare, by the number of their rows."""
    size: int | None
    """Numbers in the shared model."""
    ledger: Columns | None = None
    """ledger.csv of a deployed run: a row for each client's contribution to each attempt at a round."""
    verdict: dict[str, Any] | None = None
    """personalized.json: whether joining pays with the models that clients chose."""
    compared: Compared | None = None
    """The comparison that the run belongs to."""

    @property
    def finished(self) -> bool:
        """Whether there is a result."""
        return self.record["status"] == "finished"

    @property
    def deployed(self) -> bool:
        """Whether its clients were on other machines."""
        return isinstance(self.run.data, Deployed)

    @property
    def deployment(self) -> dict[str, Any]:
        """The part of the record that only a deployed run has."""
        return self.record.get("deployment", {})


def read(folders: Sequence[Path]) -> list[Told]:
    """The runs in the folders of runs and of comparisons, each folder once."""
    runs: dict[Path, Told] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"There is no folder {folder}.")
        if (folder / PLAN).exists():
            compared = Compared(folder, read_verdict(folder / PLAN))
            for job in read_plan(folder):
                path = folder / job["folder"]
                told = runs.get(path.resolve()) or read_run(path, planned=job["config"])
                runs[path.resolve()] = dataclasses.replace(told, compared=compared)
        elif (folder / "record.json").exists():
            runs.setdefault(folder.resolve(), read_run(folder))
        else:
            raise InputError(
                f"There is no run in {folder}: it has neither record.json nor {PLAN}; give the folder "
                "that was given to --out."
            )
    return list(runs.values())


def read_run(path: Path, planned: dict[str, Any] | None = None) -> Told:
    """The run in a folder; `planned` is the configuration of one that may not have begun."""
    folder = Folder(path)
    if planned is not None and not folder.record.exists():
        record: dict[str, Any] = {"status": "not begun", "config": planned, "history": []}
    else:
        record = folder.read()
    try:
        run = Run.from_json(record["config"])
        _check(record)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{folder.record} is damaged ({_why(error)}); start the run again.") from None
    ledger = read_ledger(path / "ledger.csv") if isinstance(run.data, Deployed) else None
    if record["status"] != "finished":
        return Told(
            path=path, run=run, record=record,
            clients=None, offered=None, methods=None, newcomers=None, size=None, ledger=ledger,
        )  # fmt: skip
    return Told(
        path=path,
        run=run,
        record=record,
        clients=read_table(folder.clients, ("client", "n_train", "n_test")),
        offered=read_offered(path),
        methods=read_methods(path),
        columns=read_columns(path),
        verdict=read_verdict(path / "personalized.json"),
        newcomers=read_newcomers(path / "newcomers.csv"),
        size=_size(folder.model),
        ledger=ledger,
    )  # fmt: skip


def _check(record: dict[str, Any]) -> None:
    """Raises an error if a record lacks what every record has."""
    if record["status"] not in ("finished", "running", "diverged", "not begun", "stopped", "failed"):
        raise ValueError(f"its status is {record['status']!r}")
    entries = [*record["history"], *([record["final"]] if record["status"] == "finished" else [])]
    for entry in entries:
        if not isinstance(entry["round"], int):
            raise TypeError("a round is not a whole number")
        for kind in (*KINDS, "baseline"):
            own = entry.get(kind) or {}
            for key in (*MEASURES, "loss", "train_loss"):
                if not _is_number(own.get(key)):
                    raise TypeError(f"{key} of the {kind} model is not a number")
            for bin in own.get("calibration") or ():
                if not all(_is_number(bin[key]) for key in ("predicted", "observed", "rows")):
                    raise TypeError(f"the calibration of the {kind} model is not numeric")
    if not all(isinstance(text, str) for text in (record.get("auto") or {}).get("sentences", ())):
        raise TypeError("a sentence about the training is not a string")
    if not all(isinstance(value, str | None) for value in (record.get("metric") or {}).values()):
        raise TypeError("its metric is not described by strings")
    deployment = record.get("deployment", {})
    for privacy in filter(None, (record.get("privacy"), deployment.get("privacy"))):
        privacy_sentences(privacy)  # raises an error if a part is missing
    lists = [deployment.get("clients", []), deployment.get("members", [])]
    texts = [text for names in (*lists, deployment.get("refused", {}).values()) for text in names]
    if not (all(isinstance(n, list) for n in lists) and all(isinstance(text, str) for text in texts)):
        raise TypeError("a client of the deployment is not a string")
    if record["status"] == "finished":
        for key in ("compile_s", "train_s", "eval_s"):
            float(record["timing"][key])


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def read_verdict(path: Path) -> dict[str, Any] | None:
    """The verdict in a comparison's plan or in personalized.json; None if there is none yet, or if the file
    is from an older version."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found.get("verdict") if isinstance(found, dict) else None
        if found is None:
            return None
        if found["verdict"] not in VERDICTS:
            raise ValueError(f"there is no verdict {found['verdict']!r}")
        if (metric := found.get("metric") or ACCURACY.key) not in MEASURES:
            raise ValueError(f"there is no metric {metric!r}")
        for key in ("gain", "low", "high", "clients", "gaining", "losing"):
            if not _is_number(found.get(key)):
                raise TypeError(f"{key} of its verdict is not a number")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read ({_why(error)}); regenerate it.") from None


def read_table(path: Path, needed: Sequence[str], *, appended: bool = False) -> Columns | None:
    """The columns of a CSV file; None if it does not exist. If lines are `appended` to the file, a last one
    that was not written to its end is left out."""
    if not path.exists():
        return None
    try:
        content = path.read_bytes()
        if appended:
            content = content[: content.rfind(b"\n") + 1]
        header, *rows = csv.reader(io.StringIO(content.decode(), newline=""), strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({_why(error)}); regenerate it.") from None
    for name in needed:
        if name not in header:
            raise InputError(f"{path} has no column '{name}'; regenerate it.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise InputError(
                f"Row {number} of {path} has {len(row)} cells, not {len(header)}; regenerate it."
            )
    columns: Columns = {}
    for place, name in enumerate(header):
        cells = [row[place] for row in rows]
        try:
            columns[name] = (
                np.array(cells, object) if name in TEXTS else np.array([float(c or "nan") for c in cells])
            )
        except ValueError as error:
            raise InputError(f"Column '{name}' of {path} is damaged ({error}); regenerate it.") from None
    return columns


def read_ledger(path: Path) -> Columns | None:
    """The ledger of a deployed run; None if it does not exist."""
    found = read_table(path, COLUMNS, appended=True)
    if found is not None:
        whole = all(
            (found[name] >= 1).all() and (found[name] % 1 == 0).all() for name in ("round", "attempt")
        )
        unknown = set(found["outcome"]) - set(get_args(Outcome))
        if not whole or unknown:
            why = f"there is no outcome '{unknown.pop()}'" if unknown else "a round is not a whole number"
            raise InputError(f"{path} is damaged ({why}); restore it, or start the run again.")
        for name in ("client", "reason"):
            found[name] = np.array([text_of(text) for text in found[name]], object)
    return found


def read_offered(folder: Path) -> Columns | None:
    """What each client chose, from personalized.csv; None if it does not exist."""
    return read_table(folder / "personalized.csv", ("client", "n_train", "n_test", "choice", "lam", *GAINS))


def read_newcomers(path: Path) -> Columns | None:
    """How newcomers fare, from newcomers.csv; None if it does not exist."""
    found = read_table(path, ("rows", "clients", "method", "mean"))
    if found and (unknown := set(found.get("metric", ())) - set(MEASURES)):
        raise InputError(f"{path} is damaged (there is no metric '{unknown.pop()}'); regenerate it.")
    return found


def read_columns(folder: Path) -> dict[str, Any] | None:
    """Which columns matter, from columns.json and columns.png; None if they do not exist."""
    path = folder / "columns.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        told = {"sentences": list(found["sentences"]), "caption": found["caption"]}
        if not all(isinstance(text, str) for text in (*told["sentences"], told["caption"])):
            raise TypeError("a sentence is not a string")
        path = folder / "columns.png"
        picture = path.read_bytes()
        if not picture.startswith(b"\x89PNG"):
            raise ValueError("it is not a PNG")
        return {**told, "picture": base64.b64encode(picture).decode()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read ({_why(error)}); 'pfedme personalize' regenerates it."
        ) from None


def read_methods(folder: Path) -> dict[str, Any] | None:
    """The results of each method, from personalized.json; None if it does not exist."""
    path = folder / "personalized.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["methods"]
        return {
            name: {key: value for key, value in values.items() if _is_number(value)}
            for name, values in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} cannot be read ({_why(error)}); 'pfedme personalize' regenerates it."
        ) from None


def _size(path: Path) -> int | None:
    """How many numbers the shared model in a file has."""
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = file.keys()
            return int(np.prod(file.get_slice("w").get_shape())) if "w" in names else None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({_why(error)}); start the run again.") from None


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
