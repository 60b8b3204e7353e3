"""A run in progress: rounds, evaluations, checkpoints, and a folder with the results."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from pfedme import __version__
from pfedme.algorithms.base import Models
from pfedme.core.models import Model
from pfedme.core.tree import leaves, tree_of
from pfedme.data.federation import Federation
from pfedme.engine.baseline import baseline
from pfedme.engine.choices import rounds_to_choice, with_own_lambdas
from pfedme.engine.cost import gradients, traffic
from pfedme.engine.devices import agreed, read, replicate
from pfedme.engine.evaluation import Evaluation
from pfedme.engine.measure import metric_for
from pfedme.engine.simulate import Simulation, State
from pfedme.errors import Diverged, InputError
from pfedme.files import atomic_write, writing
from pfedme.runs.clients_file import clients_csv
from pfedme.runs.environment import environment, form
from pfedme.runs.folder import Folder, write_models
from pfedme.runs.rows_file import rows_file
from pfedme.runs.run import Run
from pfedme.training.notes import about_training, still_falling, weights
from pfedme.training.pilot import RETRIES, chooses_l2, pilot, slower, with_l2
from pfedme.training.timing import timed
from pfedme.training.track import FILES, Tracking

if TYPE_CHECKING:
    from pfedme.personalization.afterwards import Offer

CHECKPOINT_EVERY_S = 5.0
"""Seconds between checkpoints: the most that a killed run loses, apart from the rounds of one call."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress that a run reports after every few rounds."""

    round: int
    rounds: int
    entry: dict[str, Any] | None
    """The latest evaluation, if it has just been made; else None."""
    pilot: bool = False
    """Whether the number of rounds is still being determined; `rounds` is then the maximum."""
    warning: str = ""
    """What the user should know before the first round."""


Watch = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, in memory."""

    run: Run
    record: dict[str, Any]
    evaluation: Evaluation
    w: jax.Array | None
    """The global model's coordinates, if there is one."""
    theta: jax.Array | np.ndarray | None
    """The personal models' coordinates, one row per client, if there are any."""
    federation: Federation
    model: Model
    offer: Offer | None = None
    """What was found for its clients afterwards, if requested."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a run writes besides its record."""

    files: bool = True
    """The models, the table of clients and the curves."""
    train_loss: bool = True
    """The loss on training rows in every evaluation, which takes most of its time."""


EVERYTHING = Wanted()


class Execution:
    """A run in progress."""

    def __init__(
        self,
        run: Run,
        simulation: Simulation,
        folder: Folder | None,
        watch: Watch,
        wanted: Wanted,
        tracking: Tracking,
        auto: dict[str, Any] | None = None,
    ) -> None:
        """`auto` is the part of a resumed run's record about settings that were not given."""
        self.run, self.simulation, self.folder, self.watch = run, simulation, folder, watch
        self.wanted, self.tracking = wanted, tracking
        self.history: list[dict[str, Any]] = []
        self.timing = {"compile_s": 0.0, "train_s": 0.0, "eval_s": 0.0}
        self.reason: str | None = None
        self.retries = (auto or {}).get("retries", 0)
        self.metric, self.why = metric_for(simulation.federation, run.metric)
        self.evaluated = simulation.evaluated(run.eval_clients or simulation.federation.clients)
        self.saved = time.monotonic()
        down, up = traffic(simulation)
        self.form = form(simulation)
        self.cost = {"gradients": gradients(simulation.algorithm), "down": down, "up": up}
        asked = run.algorithm
        if auto is not None:  # its step sizes are in the record
            asked = dataclasses.replace(asked, **dict.fromkeys(auto["found"], 0.0))
        self.asked, self.auto = asked, auto
        # Of several hosts, only the first has a folder.
        self.keeps = bool(agreed(folder is not None)) and wanted.files
        begun = bool(agreed(folder is not None and folder.checkpoint.exists()))
        self.piloted = bool(begun or (run.rounds and not chooses_l2(asked)))
        if self.piloted:
            self.run = dataclasses.replace(run, algorithm=simulation.algorithm)
        self.state = self.restore() if begun else simulation.start()
        tracking.start(self.record("running"))
        if tracking.trackers or not begun:
            self.write_record("running")

    def course(self) -> Generator[int, tuple[State, bool] | None, Result]:
        """Rounds and evaluations to the end, and then the results.

        Yields the number of rounds until the next evaluation, and is sent the state after some of them.
        """
        if not self.piloted:
            self.pilot()
        every, rounds = self.run.eval_every or 1, self.run.rounds
        if (privacy := self.simulation.privacy) and privacy.warning:
            self.watch(Progress(self.state.t, rounds, None, warning=privacy.warning))
        while True:
            t = self.state.t
            evaluated = bool(self.history) and self.history[-1]["round"] == t
            # Before the first round, answers with private gradients would spend budget on nothing.
            due = t % every == 0 and (t > 0 or self.simulation.private is None)
            if (due and not evaluated) or t == rounds:
                found = self.evaluate(self.state, keep=not evaluated)
                if found is None:
                    continue
                if t == rounds:
                    return self.results(self.state, *found)
                del found  # training needs the models' memory
            self.state = with_own_lambdas(self.simulation, self.state)
            self.save()
            news = yield min(every - t % every, rounds - t, rounds_to_choice(self.run.algorithm, t))
            assert news is not None
            self.state, finite = news
            if not finite and not self.slower():
                self.diverged("the shared model" if self.run.algorithm.has_global else "a client's model")
            self.watch(Progress(self.state.t, rounds, None))

    def pilot(self) -> None:
        """Determines the settings that were not given, and puts them into the run."""
        run, s = self.run, self.simulation
        most = run.rounds or run.budget

        def watch(t: int) -> None:
            self.watch(Progress(t, most, None, pilot=True))

        with timed() as took:
            try:
                found = pilot(
                    self.asked, s, budget=run.budget, rounds=run.rounds, quarter_at=run.quarter_at,
                    who=self.evaluated, watch=watch,
                )  # fmt: skip
            except Diverged:
                self.diverged("a model")
        self.spent("train_s", took)
        given = bool(run.rounds)
        self.retries = found.retries
        self.run = dataclasses.replace(run, algorithm=found.algorithm, quarter_at=found.quarter_at).lasting(
            found.rounds
        )
        self.simulation = Simulation(
            found.algorithm, s.model, s.federation, cohort=run.cohort or s.cohort, seed=run.seed,
            quarter_at=found.quarter_at,
        )  # fmt: skip
        self.state = self.simulation.start()
        if found.l2 is not None:
            self.state = with_l2(self.state, found.l2)
        self.auto = self.auto or self.about_auto() | {
            "stopped": "given" if given else "converged" if found.converged else "budget",
            "budget": run.budget,
            "improving": not found.converged,
            "validation": found.validation,
            "threshold": found.thresholds,
            **({} if found.l2 is None else {"l2": found.l2.tolist()}),
            **({} if found.l2_without is None else {"l2_without": found.l2_without.tolist()}),
        }
        self.piloted = True
        self.write_record("running")
        self.save(now=True)

    def about_auto(self) -> dict[str, Any]:
        """What the record says about settings that were not given."""
        steps = self.simulation.algorithm
        found = [name for name in steps.steps if not getattr(self.asked, name)]
        return {
            "rounds": self.run.rounds,
            "stopped": "given",
            "improving": False,
            "found": found,
            "steps": {name: getattr(steps, name) for name in steps.steps},
            "L": float(f"{self.simulation.smoothness():.3g}") if found else None,
            "retries": self.retries,
            "weights": weights(steps, self.simulation.federation) if self.simulation.mean is None else None,
        }

    def slower(self) -> bool:
        """Starts again with a quarter of the step sizes that were not given; False if that cannot help, or if
        the run is private: its budget is for training once."""
        steps = slower(self.asked, self.simulation.algorithm)
        if steps is None or self.retries >= RETRIES or chooses_l2(self.asked) or self.run.privacy:
            return False
        s, self.retries, self.history = self.simulation, self.retries + 1, []
        self.run = dataclasses.replace(self.run, algorithm=steps)
        self.simulation = Simulation(
            steps, s.model, s.federation, cohort=s.cohort, seed=s.seed, quarter_at=s.quarter_at
        )
        self.state = self.simulation.start()
        if self.auto is not None:
            self.auto |= {key: self.about_auto()[key] for key in ("steps", "retries")}
        if self.folder:  # so that it is not found next to a record with other steps
            self.folder.checkpoint.unlink(missing_ok=True)
        self.write_record("running")
        self.save(now=True)
        return True

    def evaluate(self, state: State, *, keep: bool) -> tuple[Evaluation, Models] | None:
        """The evaluation of `state`, added to the history; None if training starts again with smaller steps,
        because a client's model is not finite."""
        with timed() as took:
            evaluation, models = self.simulation.evaluate(
                state,
                self.evaluated,
                train=self.wanted.train_loss and self.simulation.private is None,
                rows=self.wanted.files,
            )
        self.spent("eval_s", took)
        if not evaluation.finite:
            if self.slower():
                return None
            self.diverged("a client's model")
        if keep:
            self.history.append(self.entry(evaluation))
            self.tracking.entry(self.history[-1], self.timing)
        self.watch(Progress(state.t, self.run.rounds, self.history[-1]))
        return evaluation, models

    def entry(self, evaluation: Evaluation) -> dict[str, Any]:
        """An evaluation as an entry of the history; the last one is complete and includes a baseline."""
        full = evaluation.round == self.run.rounds and self.wanted.files
        entry = evaluation.entry(self.metric.key, full=full, thresholds=self.thresholds())
        return entry | ({"baseline": baseline(self.simulation.federation, self.evaluated)} if full else {})

    def thresholds(self) -> dict[str, float]:
        """The threshold of each kind of model, if accuracy is not the main metric."""
        return (self.auto or {}).get("threshold", {}) if self.metric.key != "accuracy" else {}

    def spent(self, what: str, took: dict[str, float], share: float = 1.0) -> None:
        """Records a share of the time that something took."""
        self.timing[what] += share * took["work_s"]
        self.timing["compile_s"] += share * took["compile_s"]

    def diverged(self, what: str) -> NoReturn:
        """Saves the last finite state and reports the likely cause."""
        self.save(now=True)
        cause = self.simulation.algorithm.advice(self.simulation.smoothness())
        path = self.folder.checkpoint if self.folder else None
        where = f" The last finite state is in {path}." if path and path.exists() else ""
        name = self.run.algorithm.name
        self.reason = f"{name} diverged in round {self.state.t}: {what} is no longer finite. {cause}{where}"
        self.write_record("diverged")
        self.tracking.end("diverged", self.state.t, self.files())
        raise Diverged(self.reason)

    def results(self, state: State, evaluation: Evaluation, models: Models) -> Result:
        """The finished run; its folder is complete once record.json says so."""
        shared = self.simulation.shared(state)
        w = shared.ravel() if shared is not None else None
        theta = models.personal.ravel(1) if models.personal is not None else None
        if self.keeps:
            kept = {k: read(v) for k, v in (("w", w), ("theta", theta)) if v is not None}
            rows = rows_file(self.simulation, self.evaluated, {"global": shared, **models._asdict()})
            if self.folder:
                self.write_results(self.folder, evaluation, kept, rows)
        record = self.write_record("finished")
        if self.folder:
            self.folder.checkpoint.unlink(missing_ok=True)
        self.tracking.end("finished", state.t, self.files())
        simulation = self.simulation
        return Result(self.run, record, evaluation, w, theta, simulation.federation, simulation.model)

    def write_results(
        self, folder: Folder, evaluation: Evaluation, kept: dict[str, np.ndarray], rows: dict[str, bytes]
    ) -> None:
        """Writes the table of clients, the models, the file of test rows and the curves."""
        from pfedme.report.figures import curves

        s, who = self.simulation, self.evaluated if "theta" in kept else ()
        with writing(folder.path, self.rescue()):
            atomic_write(folder.clients, clients_csv(evaluation, s.federation, self.metric.key))
            write_models(folder.model, kept, s.model, s.federation, who)
            for name, content in rows.items():
                atomic_write(folder.path / name, content)
            atomic_write(folder.curves, curves({self.run.algorithm.name: [self.history]}))

    def files(self) -> list[Path]:
        """The files that trackers receive."""
        return [self.folder.path / name for name in FILES] if self.folder else []

    def record(self, status: str) -> dict[str, Any]:
        """The record of the run so far."""
        return {
            "status": status,
            "reason": self.reason,
            "version": __version__,
            "command": self.run.command(),
            "config": self.run.to_json(),
            "metric": self.metric_told(),
            "environment": environment() | self.form,
            "timing": {**self.timing, "rounds": self.run.rounds},
            "cost": self.cost,
            **self.told_privacy(),
            **self.told_auto(status),
            "history": self.history,
            "final": self.history[-1] if status == "finished" else None,
            **({"track": self.tracking.to_json()} if self.tracking.trackers else {}),
        }

    def told_privacy(self) -> dict[str, Any]:
        """`privacy`, if the run has any."""
        if self.simulation.privacy is None:
            return {}
        mean = self.simulation.mean
        last = {"last_clip": float(self.state.clip)} if mean is not None and mean.adapts else {}
        return {"privacy": self.simulation.privacy.to_json() | last}

    def told_auto(self, status: str) -> dict[str, Any]:
        """`auto` and `threshold`, if there is something to report."""
        if self.auto is None and self.piloted:
            self.auto = self.about_auto()
        if self.auto is None:
            return {}
        auto = dict(self.auto)
        if status == "finished" and auto["stopped"] == "given":
            auto["improving"] = still_falling(self.history, self.simulation.federation)
        f = self.simulation.federation
        thresholds = {
            kind: {"class": f.label_name(f.positive), "value": value}
            for kind, value in self.thresholds().items()
        }
        auto["sentences"] = about_training(auto)
        return {"auto": auto, **({"threshold": thresholds} if thresholds else {})}

    def metric_told(self) -> dict[str, Any]:
        """The main metric, why it was chosen, and, of two classes, the one that recall and similar metrics
        refer to."""
        f = self.simulation.federation
        told = {"key": self.metric.key, "why": self.why}
        return told | ({"positive": f.label_name(f.positive)} if f.classes == 2 else {})

    def write_record(self, status: str) -> dict[str, Any]:
        """Writes record.json with this status."""
        record = self.record(status)
        if self.folder:
            with writing(self.folder.record, self.rescue()):
                atomic_write(self.folder.record, json.dumps(record, indent=1, allow_nan=False))
        return record

    def rescue(self) -> str:
        """What to do after a failed write."""
        if self.folder and self.folder.checkpoint.exists():
            return (
                f" The last checkpoint is intact: free disk space, then 'pfedme resume {self.folder.path}'."
            )
        if self.folder and self.folder.record.exists():
            return f" Free disk space, then 'pfedme resume {self.folder.path}' starts it again."
        return ""

    def save(self, *, now: bool = False) -> None:
        """Writes a checkpoint if it is time for one; a pilot that is stopped starts again."""
        state = self.state
        due = now or time.monotonic() - self.saved >= CHECKPOINT_EVERY_S
        if not (self.folder and self.piloted and due):
            return
        parts = {"server": state.server, "clients": state.clients, "clip": state.clip}
        tensors = {key: a for name, part in parts.items() for key, a in leaves(name, part).items()}
        about = {
            "round": state.t,
            "history": self.history,
            "timing": self.timing,
            "config": self.run.to_json(),
        }
        with writing(self.folder.checkpoint, self.rescue()):
            self.folder.write_checkpoint(tensors, about)
        self.saved = time.monotonic()

    def restore(self) -> State:
        """The state in the checkpoint, after a check that it is intact and belongs to this run."""
        folder = self.folder or Folder(Path())
        tensors, about = folder.read_checkpoint()
        if about["config"] != self.run.to_json():
            raise InputError(folder.bad_checkpoint("belongs to another run"))
        self.history, self.timing = about["history"], about["timing"]
        start = self.simulation.start()
        try:
            parts = {"server": start.server, "clients": start.clients, "clip": start.clip}
            kept = [tree_of(name, tensors, part) for name, part in parts.items()]
        except (KeyError, ValueError) as error:
            raise InputError(folder.bad_checkpoint(f"does not fit ({error})")) from None
        return State(about["round"], *replicate(tuple(kept)))
