"""Carrying out a run: rounds, evaluations, checkpoints, and a folder with the results."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pfedme import __version__
from pfedme.engine.devices import agreed, from_first, is_first
from pfedme.engine.simulate import MOST_ROUNDS, State, advance
from pfedme.errors import Diverged, InputError, Interrupted, RunError
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run
from pfedme.training.execution import EVERYTHING, Execution, Result, Wanted, Watch
from pfedme.training.timing import timed
from pfedme.training.track import Tracking
from pfedme.training.trackers import Tracker

CALL_S = 0.5
"""Seconds that one call of the compiled program should take, so that progress is visible."""


def execute(
    run: Run,
    out: Path | None = None,
    *,
    force: bool = False,
    watch: Watch = lambda _: None,
    track: Sequence[Tracker] = (),
) -> Result:
    """Carries out a run from the beginning; with `out`, it is saved in that folder."""
    return _alone(begin(run, out, force=force, watch=watch, track=track))


def resume(out: Path, *, watch: Watch = lambda _: None) -> Result:
    """Resumes an interrupted run; the result is bit-identical to that of an uninterrupted run."""
    return _alone(reopen(out, watch=watch))


def _alone(execution: Execution) -> Result:
    (outcome,) = carry_out([execution])
    if isinstance(outcome, RunError):
        raise outcome
    return outcome


def begin(
    run: Run,
    out: Path | None = None,
    *,
    force: bool = False,
    watch: Watch = lambda _: None,
    wanted: Wanted = EVERYTHING,
    track: Sequence[Tracker] = (),
) -> Execution:
    """A run before its first round; with `out`, it is saved in that folder of the first host, which trackers
    need."""
    folder = Folder(out) if out and is_first() else None
    if track and not out:
        raise InputError("A run without a folder cannot be tracked; give it a folder.")
    if out:
        from_first(lambda: Folder(out).check_writable(force=force))
    run, simulation = run.prepare()
    check_same(run)
    tracking = Tracking()
    if folder:
        tracking = Tracking.begin(track, folder.path, force=force)
        folder.claim()
    return Execution(run, simulation, folder, watch, wanted, tracking)


def reopen(out: Path, *, watch: Watch = lambda _: None, wanted: Wanted = EVERYTHING) -> Execution:
    """An interrupted run, restored from its checkpoint."""
    folder = Folder(out)
    record = folder.read_by_all()
    if record.get("status") == "finished":
        raise InputError(f"The run in {out} is finished; there is nothing to resume.")
    if record.get("status") == "diverged":
        raise InputError(f"The run in {out} diverged, and would again; start a new one with other settings.")
    if record.get("version") != __version__:
        raise InputError(
            f"{out} was started with pfedme {record.get('version')}, but this is {__version__}; "
            "finish it with the version that started it."
        )
    try:
        run = Run.from_json(record["config"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder.record} is damaged: {error}; start the run again.") from None
    try:
        tracking = Tracking.reopen(record, out) if is_first() else Tracking()
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder.record} is damaged: {error}; start the run again.") from None
    kept = folder if is_first() else None
    return Execution(*run.prepare(), kept, watch, wanted, tracking, record.get("auto"))


def check_same(run: Run) -> None:
    """Raises an error if this host has been given another run, or other data, than the first."""
    own = zlib.crc32(json.dumps(run.to_json()).encode()) >> 1
    if agreed(own) != own:
        raise InputError(
            "This host was given another run, or other data, than the first one; start all hosts with the "
            "same command, and with the same files under the same names."
        )


def carry_out(executions: Sequence[Execution], lanes: int = 1) -> list[Result | RunError]:
    """The results of runs that differ only in seeds and floats, with their rounds in one compiled program.

    If a run diverges, its result is the error, and the others continue. The program always has `lanes` lanes,
    and spare ones repeat the first run, because the last bits of a result depend on their number.
    """
    outcomes: dict[Execution, Result | RunError] = {}
    courses = {execution: execution.course() for execution in executions}
    limits: dict[Execution, int] = {}
    pace = 1  # rounds in the next call

    def proceed(execution: Execution, news: tuple[State, bool] | None) -> None:
        limits.pop(execution, None)
        try:
            limits[execution] = courses[execution].send(news)
        except StopIteration as end:
            outcomes[execution] = end.value
        except Diverged as error:
            outcomes[execution] = error

    try:
        for execution in executions:
            proceed(execution, None)
        while under_way := list(limits):
            rounds = min(agreed(pace), *limits.values())
            ride = under_way + under_way[:1] * (lanes - len(under_way))
            with timed() as took:
                after = advance([e.simulation for e in ride], [e.state for e in ride], rounds)
            if took["compile_s"] == 0:
                pace = int(np.clip(CALL_S * rounds / max(took["work_s"], 1e-6), 1, MOST_ROUNDS))
            for execution, news in zip(under_way, after, strict=False):
                execution.spent("train_s", took, 1 / len(under_way))
                execution.state = news[0]
            for execution, news in zip(under_way, after, strict=False):
                proceed(execution, news)
    except KeyboardInterrupt:
        for execution in executions:
            if execution not in outcomes:
                execution.save(now=True)
                execution.tracking.end("interrupted", execution.state.t)
        folder = executions[0].folder
        raise Interrupted(folder.path if folder else None) from None
    except Exception:
        for execution in executions:
            if execution not in outcomes:
                execution.tracking.end("failed", execution.state.t)
        raise
    return [outcomes[execution] for execution in executions]
