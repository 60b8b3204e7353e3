"""A search's folder: tune.json describes the search, and trials.journal has the trials so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

from pfedme.errors import InputError
from pfedme.files import alone, atomic_write, refuse_file
from pfedme.tuning.search import Search


def check_same_search(out: Path, search: Search) -> None:
    """Raises an error if the path cannot be a folder, or if the folder holds anything but this search."""
    refuse_file(out)
    plan = out / "tune.json"
    if not plan.exists():
        if out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
            raise InputError(f"{out} is not empty and holds no search; choose another --out.")
        return
    try:
        there = _flat(json.loads(plan.read_text()))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{plan} cannot be read ({error}); delete {out}, or choose another --out.") from None
    here = _flat(search.to_json())
    if other := [name for name in {**here, **there} if there.get(name) != here.get(name)]:
        said = ", ".join(f"{name.removeprefix('algorithm.')} is {_said(there.get(name))}" for name in other)
        raise InputError(f"{out} holds a different search, in which {said}; choose another --out.")


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan with a name for each of its values: `rounds`, `algorithm.lam`."""
    flat: dict[str, Any] = {}
    for name, value in plan.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _said(value: Any) -> str:
    return "searched" if isinstance(value, dict) else "not given" if value is None else str(value)


@contextmanager
def opened(out: Path, search: Search) -> Iterator[optuna.Study]:
    """The study in a folder, locked for this process; trials that an earlier process left running fail."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "tune.json", json.dumps(search.to_json(), indent=1) + "\n")
    journal = out / "trials.journal"
    with alone(journal) as file:
        for stale in out.glob(f"{journal.name}.lock*"):  # Optuna's own locks, which survive a killed process
            stale.unlink()
        lines = journal.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # cut short when the process ended
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        try:
            for line in lines:
                json.loads(line)
            study = _study(journal, search)
            for trial in study.get_trials(states=(TrialState.RUNNING,)):
                study.tell(trial.number, state=TrialState.FAIL)
            for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
                if trial.distributions != search.space:
                    raise ValueError(f"trial {trial.number} does not belong to this search")
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise InputError(
                f"{journal} is damaged ({error}); delete {out}, or choose another --out."
            ) from None
        yield study


def _study(journal: Path, search: Search) -> optuna.Study:
    # The median rule rather than successive halving: it needs no choice of a budget and compares a trial only
    # with complete ones; with a few dozen trials, halving would decide most of them by their first rounds.
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=search.spared, n_warmup_steps=int(search.patience * search.run.rounds)
    )
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(journal))), study_name="tune", load_if_exists=True,
        direction="maximize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0),
    )  # fmt: skip
