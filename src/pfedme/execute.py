"""A run carried out: rounds, evaluations, checkpoints, and a folder with the results."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.algorithms import Algorithm
from pfedme.algorithms.base import Models
from pfedme.devices import cores
from pfedme.errors import InputError, Interrupted, RunError
from pfedme.federation import Federation
from pfedme.files import atomic_write, refuse_file, writing
from pfedme.models import Network
from pfedme.run import Run
from pfedme.simulate import MOST_ROUNDS, Evaluation, Simulation, State
from pfedme.spec import to_json

CHECKPOINT_EVERY_S = 5.0
"""Seconds between checkpoints: what a killed run loses at most, plus the rounds of one call."""
CALL_S = 0.5
"""Seconds that one call of the compiled program should take, so that progress is seen."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a watcher of a run is told after every few rounds."""

    round: int
    rounds: int
    entry: dict[str, Any] | None
    """The newest evaluation, right after it was made; else None."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run, in memory."""

    run: Run
    record: dict[str, Any]
    evaluation: Evaluation
    w: jax.Array | None
    """The global model's coordinates, if there is one."""
    theta: jax.Array | None
    """The personal models' coordinates, a row a client, if there are any."""
    federation: Federation
    model: Network


class Folder:
    """A run's folder: record.json, and while it is unfinished checkpoint.safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "record.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"
        self.clients = path / "clients.csv"
        self.curves = path / "curves.png"

    def refuse(self, *, force: bool) -> None:
        """Raises an error if the folder cannot be one, or holds something that would be lost."""
        refuse_file(self.path)
        if self.record.exists() and not force:
            if (status := self.status()) == "running":
                raise InputError(
                    f"{self.path} holds an unfinished run; 'pfedme resume {self.path}' continues it, "
                    "--force starts over."
                )
            raise InputError(
                f"{self.path} holds a {status} run; choose another --out, or --force to overwrite it."
            )
        if not self.record.exists() and self.path.exists() and any(self.path.iterdir()) and not force:
            raise InputError(f"{self.path} is not empty and holds no run; choose another --out, or --force.")

    def claim(self) -> None:
        """Makes the folder, without what an earlier run left in it."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for old in (self.record, self.checkpoint, self.model, self.clients, self.curves):
                old.unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        """The record."""
        try:
            record = json.loads(self.record.read_text())
        except FileNotFoundError:
            raise InputError(f"There is no run in {self.path}: it has no record.json.") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.record} cannot be read ({error}); start the run again.") from None
        if not (isinstance(record, dict) and isinstance(record.get("config"), dict)):
            raise InputError(f"{self.record} is not the record of a run; start the run again.")
        return record

    def status(self) -> str:
        """`running`, `finished` or `diverged`."""
        return self.read().get("status", "")


def execute(
    run: Run,
    out: Path | None = None,
    *,
    force: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Carries out a run from its beginning; with `out`, in a folder that keeps it."""
    folder = Folder(out) if out else None
    if folder:
        folder.refuse(force=force)
    run, simulation = run.prepare()
    if folder:
        folder.claim()
    return _Execution(run, simulation, folder, watch).finish(simulation.start())


def resume(out: Path, *, watch: Callable[[Progress], None] = lambda _: None) -> Result:
    """Goes on with an interrupted run; the result is the uninterrupted one's to the bit."""
    folder = Folder(out)
    record = folder.read()
    if record.get("status") == "finished":
        raise InputError(f"The run in {out} is finished; there is nothing to resume.")
    if record.get("status") == "diverged":
        raise InputError(f"The run in {out} diverged, and would again; start one with other settings.")
    if record.get("version") != __version__:
        raise InputError(
            f"{out} was begun with pfedme {record.get('version')}, this is {__version__}; "
            "finish it with the version that began it."
        )
    try:
        run = Run.from_json(record["config"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder.record} is damaged: {error}; start the run again.") from None
    run, simulation = run.prepare()
    execution = _Execution(run, simulation, folder, watch)
    return execution.finish(execution.restore() if folder.checkpoint.exists() else simulation.start())


class _Execution:
    """A run under way."""

    def __init__(
        self, run: Run, simulation: Simulation, folder: Folder | None, watch: Callable[[Progress], None]
    ) -> None:
        self.run, self.simulation, self.folder, self.watch = run, simulation, folder, watch
        self.history: list[dict[str, Any]] = []
        self.timing = {"compile_s": 0.0, "train_s": 0.0, "eval_s": 0.0}
        self.reason: str | None = None
        self.evaluated = simulation.evaluated(run.eval_clients or simulation.federation.clients)
        self.pace = 1  # rounds in the next call
        self.saved = time.monotonic()
        if folder and not folder.checkpoint.exists():
            self.write_record("running")

    def finish(self, state: State) -> Result:
        """Rounds and evaluations from `state` to the end, and then the results."""
        try:
            while True:
                evaluated = bool(self.history) and self.history[-1]["round"] == state.t
                due = state.t % (self.run.eval_every or 1) == 0 or state.t == self.run.rounds
                if due and (not evaluated or state.t == self.run.rounds):
                    evaluation, models = self.evaluate(state, keep=not evaluated)
                    if state.t == self.run.rounds:
                        return self.results(state, evaluation, models)
                self.save(state)
                state = self.advance(state)
                self.watch(Progress(state.t, self.run.rounds, None))
        except KeyboardInterrupt:
            self.save(state, now=True)
            raise Interrupted(self.folder.path if self.folder else None) from None

    def advance(self, state: State) -> State:
        """A few rounds, as many as take about CALL_S, up to the next evaluation."""
        every = self.run.eval_every or 1
        rounds = min(self.pace, every - state.t % every, self.run.rounds - state.t)
        with self.timed("train_s") as took:
            after, finite = self.simulation.advance(state, rounds)
        if not finite:
            self.diverged(after, "the shared model" if self.run.algorithm.has_global else "a client's model")
        if took["compile_s"] == 0:
            self.pace = int(np.clip(CALL_S * rounds / max(took["train_s"], 1e-6), 1, MOST_ROUNDS))
        return after

    def evaluate(self, state: State, *, keep: bool) -> tuple[Evaluation, Models]:
        """The evaluation of `state`, put into the history."""
        with self.timed("eval_s"):
            evaluation, models = self.simulation.evaluate(state, self.evaluated)
        if not evaluation.finite:
            self.diverged(state, "a client's model")
        if keep:
            self.history.append(evaluation.entry())
        self.watch(Progress(state.t, self.run.rounds, self.history[-1]))
        return evaluation, models

    def diverged(self, state: State, what: str) -> NoReturn:
        """Saves the last finite state and says why it may have come to this."""
        self.save(state, now=True)
        cause = advice(self.run.algorithm, self.simulation.smoothness())
        where = f" The last finite state is in {self.folder.checkpoint}." if self.folder else ""
        name = self.run.algorithm.name
        self.reason = f"{name} diverged in round {state.t}: {what} is no longer finite. {cause}{where}"
        self.write_record("diverged")
        raise RunError(self.reason)

    def results(self, state: State, evaluation: Evaluation, models: Models) -> Result:
        """The finished run; its folder is complete once record.json says so."""
        w = state.w.ravel() if self.simulation.algorithm.has_global else None
        theta = models.personal.ravel(1) if models.personal is not None else None
        if self.folder:
            from pfedme.report.figures import curves

            with writing(self.folder.path, self.rescue()):
                atomic_write(self.folder.clients, clients_csv(evaluation, self.simulation.federation))
                atomic_write(self.folder.model, self.model_file(w, theta))
                atomic_write(self.folder.curves, curves({self.run.algorithm.name: [self.history]}))
        record = self.write_record("finished")
        if self.folder:
            self.folder.checkpoint.unlink(missing_ok=True)
        model = self.simulation.model
        assert isinstance(model, Network)
        return Result(self.run, record, evaluation, w, theta, self.simulation.federation, model)

    def model_file(self, w: jax.Array | None, theta: jax.Array | None) -> bytes:
        """`w` and `theta` with what is needed to use them."""
        model = self.simulation.model
        assert isinstance(model, Network)
        about = {
            "version": __version__,
            "model": {"features": model.features, "classes": model.classes, "hidden": list(model.hidden)},
            "clients": self.simulation.federation.ids[self.evaluated].tolist() if theta is not None else [],
        }
        tensors = {k: np.asarray(v) for k, v in (("w", w), ("theta", theta)) if v is not None}
        # One key, because safetensors does not keep the order of several.
        return safetensors.numpy.save(tensors, {"pfedme": json.dumps(about)})

    def write_record(self, status: str) -> dict[str, Any]:
        """record.json, which says how far the run has come."""
        record = {
            "status": status,
            "reason": self.reason,
            "version": __version__,
            "command": self.run.command(),
            "config": self.run.to_json(),
            "environment": environment(),
            "timing": {**self.timing, "rounds": self.run.rounds},
            "history": self.history,
            "final": self.history[-1] if status == "finished" else None,
        }
        if self.folder:
            with writing(self.folder.record, self.rescue()):
                atomic_write(self.folder.record, json.dumps(record, indent=1, allow_nan=False))
        return record

    def rescue(self) -> str:
        """What to do after a failed write."""
        if self.folder and self.folder.checkpoint.exists():
            return f" The last checkpoint is whole: make room, then 'pfedme resume {self.folder.path}'."
        if self.folder and self.folder.record.exists():
            return f" Make room, then 'pfedme resume {self.folder.path}' starts it again."
        return ""

    def save(self, state: State, *, now: bool = False) -> None:
        """A checkpoint, if it is time for one."""
        if not self.folder or not (now or time.monotonic() - self.saved >= CHECKPOINT_EVERY_S):
            return
        tensors = {"w": np.asarray(state.w.ravel())}
        tensors |= {f"clients.{k}": np.asarray(a) for k, a in enumerate(jax.tree.leaves(state.clients))}
        about = {
            "round": state.t,
            "history": self.history,
            "timing": self.timing,
            "config": self.run.to_json(),
        }
        about["sha256"] = _digest(tensors, about)
        with writing(self.folder.checkpoint, self.rescue()):
            atomic_write(
                self.folder.checkpoint, safetensors.numpy.save(tensors, {"pfedme": json.dumps(about)})
            )
        self.saved = time.monotonic()

    def restore(self) -> State:
        """The state in the checkpoint, once it is known to be whole and of this run."""
        assert self.folder is not None
        path = self.folder.checkpoint
        cure = f"delete {path.name} to start from round 0 by 'pfedme resume {self.folder.path}'"
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                about = json.loads(file.metadata()["pfedme"])
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
            whole = about.pop("sha256") == _digest(tensors, about)
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise InputError(f"The checkpoint {path} cannot be read ({error}); {cure}.") from None
        if not whole:
            raise InputError(f"The checkpoint {path} is damaged: its checksum does not match; {cure}.")
        if about["config"] != self.run.to_json():
            raise InputError(f"The checkpoint {path} belongs to another run; {cure}.")
        self.history, self.timing = about["history"], about["timing"]
        start = self.simulation.start()
        leaves, structure = jax.tree.flatten(start.clients)
        kept = [jnp.asarray(tensors[f"clients.{k}"]) for k in range(len(leaves))]
        return State(
            about["round"], start.w.like(jnp.asarray(tensors["w"])), jax.tree.unflatten(structure, kept)
        )

    @contextmanager
    def timed(self, what: str) -> Iterator[dict[str, float]]:
        """Adds the time inside to `what`, and its share of compilation to compile_s."""
        took: dict[str, float] = {}
        begin = time.perf_counter()
        with compilation() as compiled:
            yield took
        took["compile_s"] = sum(compiled)
        took[what] = max(0.0, time.perf_counter() - begin - took["compile_s"])
        for key, value in took.items():
            self.timing[key] += value


@contextmanager
def compilation() -> Iterator[list[float]]:
    """Collects the seconds that JAX spends on tracing and compiling."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def advice(algorithm: Algorithm, L: float) -> str:
    """Which step size to lower, from an estimate of the clients' smoothness L."""
    settings = to_json(algorithm)
    if "lam" in settings:
        lam, alpha, limit = settings["lam"], settings["alpha"], 2 / (L + settings["lam"])
        stable = f"Inner steps are stable for alpha below 2/(L + λ) = {limit:.2g} (λ = {lam:g}, L ≈ {L:.3g})"
        if alpha >= limit:
            return f"{stable}, and alpha is {alpha:g}: lower --alpha or --lam."
        return f"{stable} and alpha is {alpha:g}, so it is the outer step: lower --eta or --beta."
    eta = settings["eta"]
    return f"Steps are stable for eta below 2/L = {2 / L:.2g} (L ≈ {L:.3g}), and eta is {eta:g}: lower --eta."


def clients_csv(evaluation: Evaluation, federation: Federation) -> str:
    """A row per client, with the accuracy of each model that exists."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    kinds = ("global", "local", "personal")
    table.writerow(["client", "n_train", "n_test", *(f"{kind}_accuracy" for kind in kinds)])
    columns = [evaluation.test[kind].accuracy if kind in evaluation.test else None for kind in kinds]
    for k, i in enumerate(evaluation.clients):
        cells = ["" if c is None or np.isnan(c[k]) else float(c[k]) for c in columns]
        table.writerow(
            [int(federation.ids[i]), int(federation.n_train[i]), int(federation.n_test[i]), *cells]
        )
    return text.getvalue()


def environment() -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "devices": [str(d.device_kind) for d in jax.devices()],
    }


def _digest(tensors: dict[str, np.ndarray], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()
