"""Several algorithms, and several seeds of each, on the same data."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedme.core.spec import check
from pfedme.engine.choices import Personalize
from pfedme.engine.devices import from_first, is_first
from pfedme.engine.verdict import Verdict
from pfedme.errors import InputError, Interrupted
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.report.tables import KINDS, clearly_best, comparison_csv, mean_std, measure
from pfedme.runs.folder import Folder
from pfedme.runs.plan import PLAN, damaged, read_plan
from pfedme.runs.run import Run
from pfedme.runs.scores import Recommended, recommended_of, verdict_of
from pfedme.training.execute import begin, carry_out, reopen
from pfedme.training.execution import EVERYTHING, Progress, Wanted
from pfedme.training.track import Tracking, described, from_json
from pfedme.training.trackers import Tracker

RECOMMENDED = "recommended"
"""The name of the models that clients have chosen, in tables."""
Watch = Callable[[str, int, Progress], None]
"""Called with the label of a run, its index in the plan, and its progress."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Finished runs: the records by algorithm, one list entry per seed."""

    records: dict[str, list[dict[str, Any]]]
    verdict: Verdict | None = None
    """Whether joining pays, if both joining and alone were run."""
    recommended: Recommended | None = None
    """The models that clients have chosen, if they did."""

    @property
    def finals(self) -> dict[str, list[dict[str, Any]]]:
        """The last evaluations of the runs that did not diverge; and of the models that clients have
        chosen."""
        found = {name: [r["final"] for r in records if r["final"]] for name, records in self.records.items()}
        return found | ({RECOMMENDED: self.recommended.finals()} if self.recommended else {})

    @property
    def histories(self) -> dict[str, list[list[dict[str, Any]]]]:
        """All evaluations of the same runs."""
        return {name: [r["history"] for r in records if r["final"]] for name, records in self.records.items()}

    def best(self, out: Path) -> set[tuple[str, str]]:
        """(algorithm, model) of each kind of model that is better than all others of its kind beyond noise,
        paired over clients, and also over all rows. Clients' values come from their tables below `out`,
        averaged over seeds. The pooled model does not compete, nor do the models that clients have chosen,
        which are among those of the others."""
        what, found = measure(self.finals), set()
        values = {name: self._of_clients(out, name, what.key) for name in self.records if name != "pooled"}
        for kind in KINDS:
            rivals = {name: own[kind] for name, own in values.items() if kind in own}
            if len({len(own) for own in rivals.values()}) != 1:
                continue
            name = clearly_best(rivals, what.lower)
            over_all = {rival: mean_std(self.finals[rival], kind) for rival in rivals}
            shown = {rival: what.orientation * value[0] for rival, value in over_all.items() if value}
            if name and shown.get(name) == max(shown.values()):
                found.add((name, kind))
        return found

    def _of_clients(self, out: Path, name: str, key: str) -> dict[str, np.ndarray]:
        """Each client's metric for an algorithm's models, averaged over seeds."""
        tables = []
        for record in self.records[name]:
            file = Folder(out / name / f"seed-{record['config']['seed']}").clients
            if not record["final"] or not file.exists():
                return {}
            with file.open(newline="", encoding="utf-8") as rows:
                tables.append([*csv.DictReader(rows)])
        columns = {}
        for kind in KINDS:
            cells = [[row.get(f"{kind}_{key}") for row in table] for table in tables]
            if cells and len({len(own) for own in cells}) == 1 and any(any(own) for own in cells):
                numbers = np.array([[float(v) if v else np.nan for v in own] for own in cells])
                columns[kind] = numbers.mean(axis=0)
        return columns

    @property
    def failures(self) -> list[str]:
        """Why the others diverged."""
        return [r["reason"] for records in self.records.values() for r in records if not r["final"]]


def with_choice(runs: Sequence[Run], how: Personalize | None) -> list[Run]:
    """The runs, of which the first with a global model, or else the first federated one, lets clients choose
    their own models when it has finished."""
    fit = [run for run in runs if run.algorithm.federated and not run.rechooses]
    if how is None:
        return list(runs)
    if not fit:
        names = ", ".join(run.algorithm.name for run in runs)
        raise InputError(f"--personalize needs an algorithm with a shared model besides {names}; add fedavg.")
    first = next((run for run in fit if run.algorithm.has_global), fit[0])
    return [dataclasses.replace(run, personalize=how) if run is first else run for run in runs]


def compare(
    runs: Sequence[Run],
    seeds: int,
    out: Path,
    *,
    force: bool = False,
    watch: Watch = lambda *_: None,
    track: Sequence[Tracker] = (),
) -> Comparison:
    """Carries out each run with `seeds` seeds, each in its own folder below `out` and tracked separately.

    Only the first of several hosts needs the folder and the trackers.
    """
    from_first(lambda: _check_writable(out, force=force))
    jobs = [
        (label, dataclasses.replace(run, seed=run.seed + k), f"{label}/seed-{run.seed + k}")
        for label, run in zip(_labels(runs), runs, strict=True)
        for k in range(seeds)
    ]
    for run in runs:  # anything wrong with a run shows up here, before any file is touched
        check(dataclasses.replace(run, seed=run.seed + seeds - 1), "the run")
        run.prepare()

    def start() -> None:
        tracked = {folder: [tracker.below(folder) for tracker in track] for _, _, folder in jobs}
        for folder, trackers in tracked.items():
            Tracking.begin(trackers, out / folder, force=force)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            document = [
                {
                    "label": label,
                    "folder": folder,
                    "config": run.to_json(),
                    **({"track": described(tracked[folder])} if track else {}),
                }
                for label, run, folder in jobs
            ]
            for _, _, folder in jobs:
                (out / folder / "record.json").unlink(missing_ok=True)
            atomic_write(out / PLAN, json.dumps({"runs": document}, indent=1))

    from_first(start)
    return resume_comparison(out, [run for _, run, _ in jobs], watch=watch)


def _check_writable(out: Path, *, force: bool) -> None:
    """Raises an error if a comparison cannot be written to `out`."""
    refuse_file(out)
    if out.exists() and any(out.iterdir()) and not force:
        raise InputError(
            f"{out} holds a comparison; 'pfedme resume {out}' finishes it if it is unfinished; "
            "choose another --out, or --force to overwrite it."
            if (out / PLAN).exists()
            else f"{out} is not empty and holds no comparison; choose another --out, or --force."
        )


def resume_comparison(
    out: Path, runs: Sequence[Run] | None = None, *, watch: Watch = lambda *_: None
) -> Comparison:
    """Resumes a comparison: finished runs are read, unfinished ones are resumed, the others are run.

    `runs` are those of the plan, if available.
    """
    jobs = plan_of(out)
    try:
        tracked = [from_json(job.get("track", ())) for job in jobs]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(out, error) from None
    runs = runs or [Run.from_json(job["config"]) for job in jobs]
    try:
        carry_out_plan(
            [(job["label"], run, out / job["folder"]) for job, run in zip(jobs, runs, strict=True)], watch,
            track=tracked,
        )  # fmt: skip
    except Interrupted:
        raise Interrupted(out) from None
    return summed_up(out)


def plan_of(out: Path) -> list[dict[str, Any]]:
    """The plan in a folder of the first host."""
    return json.loads(from_first(lambda: json.dumps(read_plan(out)).encode()))


def records_of(out: Path) -> dict[Path, dict[str, Any]]:
    """The folder and the record of each run of a comparison in a folder of the first host."""
    folders = [Folder(out / job["folder"]) for job in plan_of(out)]
    records = json.loads(from_first(lambda: json.dumps([folder.read() for folder in folders]).encode()))
    return {folder.path: record for folder, record in zip(folders, records, strict=True)}


def summed_up(out: Path) -> Comparison:
    """The results of the finished runs of a comparison, after writing its table, figure and verdict. Of
    several hosts, only the first writes them, and only it has a verdict."""
    jobs, found = plan_of(out), records_of(out)
    ran = [(job["label"], out / job["folder"], found[out / job["folder"]]) for job in jobs]
    records: dict[str, list[dict[str, Any]]] = {}
    for label, _, record in ran:
        records.setdefault(label, []).append(record)
    if not is_first():
        return Comparison(records)
    verdict = verdict_of(ran)
    comparison = Comparison(records, verdict, recommended_of(ran))
    from pfedme.report.figures import curves

    with writing(out):
        document = {"runs": jobs, **({"verdict": verdict.to_json()} if verdict else {})}
        if comparison.recommended:
            document["recommended"] = comparison.recommended.to_json()
        atomic_write(out / PLAN, json.dumps(document, indent=1, allow_nan=False))
        atomic_write(out / "compare.csv", comparison_csv(comparison.finals))
        atomic_write(out / "compare.png", curves(comparison.histories))
    return comparison


def carry_out_plan(
    plan: Sequence[tuple[str, Run, Path]],
    watch: Watch = lambda *_: None,
    wanted: Wanted = EVERYTHING,
    track: Sequence[Sequence[Tracker]] = (),
) -> None:
    """Completes the run of each (label, run, folder); runs that can share a program are run together.

    `track` has the trackers of each run, if any.

    What a folder already contains is kept. A run that diverges says so in its record, and the others
    continue.
    """
    for places in _groups([run for _, run, _ in plan]):
        executions = []
        for place in places:
            label, run, path = plan[place]
            folder = Folder(path)

            def tell(progress: Progress, label: str = label, place: int = place) -> None:
                watch(label, place, progress)

            status = _status(folder)
            if not status:
                trackers = track[place] if track else ()
                executions.append(begin(run, path, force=True, watch=tell, wanted=wanted, track=trackers))
            elif status == "running":
                executions.append(reopen(path, watch=tell, wanted=wanted))
            else:
                if status == "finished" and is_first():  # and possibly killed right afterwards
                    folder.checkpoint.unlink(missing_ok=True)
                tell(Progress(run.rounds, run.rounds, None))
        carry_out(executions, lanes=len(places))


def _status(folder: Folder) -> str:
    """The status of the run in a folder of the first host; empty if there is none."""
    return from_first(lambda: folder.status().encode() if folder.record.exists() else None).decode()


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """The indices of runs that differ only in seeds and floats, in groups of a size that is fast."""
    alike: dict[Any, list[int]] = {}
    for place, run in enumerate(runs):
        alike.setdefault(run.program(), []).append(place)
    groups = []
    for places in alike.values():
        most = runs[places[0]].prepare()[1].at_once
        groups += [places[k : k + most] for k in range(0, len(places), most)]
    return groups


def _labels(runs: Sequence[Run]) -> list[str]:
    """The algorithms' names, numbered if one occurs twice."""
    names = [run.algorithm.name for run in runs]
    return [n if names.count(n) == 1 else f"{n}-{names[: k + 1].count(n)}" for k, n in enumerate(names)]
