"""Every client's scores in finished runs, and whether they show that joining pays."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedme.algorithms import ALGORITHMS
from pfedme.engine.measure import MEASURES, Measure
from pfedme.engine.verdict import IMPROVING, Verdict, judge
from pfedme.errors import InputError
from pfedme.runs.folder import Folder

KINDS = ("personal", "global")
"""The models that a client can keep, in order of preference if there is no validation loss to decide."""
Ran = tuple[str, Path, dict[str, Any]]
"""The label of a run, its folder and its record."""
Scores = dict[str, tuple[float, int]]
"""The score of each client, by its name, and its number of test rows."""


SIDES = ("recommended", "alone")
"""The models in personalized.csv that the verdict compares."""


class Scored(NamedTuple):
    """A model of one of the methods, with every client's score, by seed."""

    method: str
    kind: str
    scores: dict[int, Scores]
    validation: float | None
    """Its loss on validation rows, the mean over seeds; None if that was not measured."""

    @property
    def name(self) -> str:
        """Its name in sentences."""
        return f"{self.method}'s {self.kind} model{'' if self.kind == 'global' else 's'}"


def _joins(name: str) -> bool:
    """Whether clients train together with an algorithm of this name; unknown algorithms count."""
    cls = ALGORITHMS.get(name)
    return cls is None or cls.federated


def verdict_of(runs: Sequence[Ran]) -> Verdict | None:
    """Whether joining pays; None if runs of `alone` and of a federated method did not both finish.

    Of several joined models, the one with the lowest loss on validation rows is compared; without such
    losses, that of the first method, its personal models if it has any. Test scores play no part in that
    choice. If clients have chosen their own models, these are compared with the ones that they would have
    trained alone, which were among those they chose from.
    """
    if chosen := recommended_of(runs):
        return chosen.verdict()
    finished = [run for run in runs if run[2]["final"]]
    sides = [
        [run for run in finished if run[2]["config"]["algorithm"]["name"] == "alone"],
        [run for run in finished if _joins(run[2]["config"]["algorithm"]["name"])],
    ]
    if not all(sides):
        return None
    for measure in _measures(finished[0][2]):
        found = [_scored(side, measure) for side in sides]
        if all(found):
            alone, joined = map(preferred, found)
            break
    else:
        return None
    improving = any(run[2].get("auto", {}).get("improving") for side in sides for run in side)
    return between(joined, alone, measure, improving=improving)


class Recommended(NamedTuple):
    """The models that clients have chosen for themselves after the runs of one of the methods."""

    method: str
    """The method whose shared model they chose from."""
    runs: list[Ran]
    documents: list[dict[str, Any]]
    """personalized.json of each run."""

    @property
    def measure(self) -> Measure:
        """The metric by which these models are judged."""
        return MEASURES[self.documents[0]["verdict"]["metric"]]

    def finals(self) -> list[dict[str, Any]]:
        """Their results as entries of a record's history, one for each seed."""
        key = self.measure.key
        return [
            {
                "round": record["final"]["round"],
                **({"metric": record["final"]["metric"]} if "metric" in record["final"] else {}),
                "personal": {key: own[key], "clients": own, "by_client": {key: own}},
            }
            for (_, _, record), document in zip(self.runs, self.documents, strict=True)
            for own in [document["methods"]["recommended"]]
        ]

    def of_clients(self, name: str = "recommended") -> dict[int, Scores]:
        """Every client's score with a method in personalized.csv, by seed."""
        column = f"{name}_{self.measure.key}"
        return {
            record["config"]["seed"]: _read(path / "personalized.csv", column)
            for _, path, record in self.runs
        }

    def verdict(self) -> Verdict:
        """Whether joining pays with these models."""
        verdicts = [Verdict(**document["verdict"]) for document in self.documents]
        if len(verdicts) == 1:
            return verdicts[0]
        mine, alone = (Scored(name, "personal", self.of_clients(name), None) for name in SIDES)
        improving = any(verdict.why == IMPROVING for verdict in verdicts)
        return between(mine, alone, self.measure, improving=improving, name=verdicts[0].joined)

    def to_json(self) -> dict[str, Any]:
        """The part of compare.json about these models, with a list over seeds."""
        return {
            "from": self.method,
            "metric": self.measure.key,
            "seeds": [
                {
                    "seed": record["config"]["seed"],
                    **document["methods"]["recommended"],
                    "gain": document["gain"],
                    "chosen": document["chosen"],
                }
                for (_, _, record), document in zip(self.runs, self.documents, strict=True)
            ],
        }


def recommended_of(runs: Sequence[Ran]) -> Recommended | None:
    """The models that clients have chosen, of the first method for which they did in all its runs."""
    for label in dict.fromkeys(label for label, _, _ in runs):
        own = [run for run in runs if run[0] == label and run[2]["final"]]
        files = [path / "personalized.json" for _, path, _ in own]
        wanted = own and all(record["config"].get("personalize") for _, _, record in own)
        if wanted and all(file.exists() for file in files):
            return Recommended(label, own, [_document(file) for file in files])
    return None


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        Verdict(**found["verdict"])
        return {name: found[name] for name in ("methods", "verdict", "gain", "chosen")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); 'pfedme personalize' regenerates it.") from None


def between(
    joined: Scored, alone: Scored, measure: Measure, *, improving: bool = False, name: str = ""
) -> Verdict:
    """Whether joining pays, from two models of the same clients and seeds; the first may have a `name`."""
    seeds = [seed for seed in joined.scores if seed in alone.scores]
    rows = {client: n for seed in seeds for client, (_, n) in joined.scores[seed].items()}
    nothing = (np.nan, 0)
    mine, own = (
        np.array([[side.scores[seed].get(client, nothing)[0] for client in rows] for seed in seeds])
        for side in (joined, alone)
    )
    return judge(
        mine, own, rows=np.array(list(rows.values())), improving=improving, measure=measure,
        name=name or joined.name,
    )  # fmt: skip


def preferred(models: Sequence[Scored]) -> Scored:
    """The model with the lowest validation loss, or the first one if none was measured."""
    judged = [(model.validation, place) for place, model in enumerate(models) if model.validation is not None]
    return models[min(judged)[1]] if judged else models[0]


def _measures(record: dict[str, Any]) -> list[Measure]:
    """The metrics by which clients can be judged, the metric of the run first.

    For quantities it is RMSE rather than R², which becomes arbitrarily negative for a client whose few labels
    are nearly the same.
    """
    keys = [record["metric"]["key"]] if record.get("metric") else []
    keys = ["rmse" if key == "r2" else key for key in keys]
    return [MEASURES[key] for key in dict.fromkeys([*keys, "accuracy", "rmse"])]


def _scored(runs: Sequence[Ran], measure: Measure) -> list[Scored]:
    """The models of some runs for which clients have a score in this metric."""
    found = []
    for label in dict.fromkeys(label for label, _, _ in runs):
        own = [(path, record) for name, path, record in runs if name == label]
        for kind in KINDS:
            scores = {
                record["config"]["seed"]: _read(Folder(path).clients, f"{kind}_{measure.key}")
                for path, record in own
            }
            losses = [record.get("auto", {}).get("validation", {}).get(kind) for _, record in own]
            if all(scores.values()):
                known = [loss for loss in losses if loss is not None]
                mean = float(np.mean(known)) if len(known) == len(losses) else None
                found.append(Scored(label, kind, scores, mean))
    return found


def _read(file: Path, column: str) -> Scores:
    """The scores in a column of a table of clients; empty if there are none."""
    if not file.exists():
        return {}
    try:
        with file.open(newline="", encoding="utf-8") as text:
            return {
                row["client"]: (float(row[column]), int(row["n_test"]))
                for row in csv.DictReader(text)
                if row.get(column)
            }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}); start the run again.") from None
