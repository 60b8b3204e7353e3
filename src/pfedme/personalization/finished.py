"""What a finished run offers: a model for each of its clients, and for clients that join later."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from pfedme import __version__
from pfedme.algorithms import IFCA
from pfedme.core.models import Model
from pfedme.core.spec import to_json
from pfedme.core.tree import Params
from pfedme.data import Source
from pfedme.data.federation import Federation
from pfedme.data.natural import Natural
from pfedme.data.table import Table
from pfedme.engine.choices import Line, Personalize, Start, for_all, personalize
from pfedme.engine.chunks import Stacked
from pfedme.engine.devices import agreed, from_first, is_first, read
from pfedme.engine.differences import differences
from pfedme.engine.exchange import first_model
from pfedme.engine.label_shift import prior
from pfedme.engine.measure import ACCURACY, MEASURES, Measure, metric_for
from pfedme.engine.metrics import over_clients
from pfedme.engine.personalized import Personalized
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.files import atomic_write, writing
from pfedme.personalization.lines import (
    ON_THE_MENU,
    Clusters,
    Recipe,
    alone_recipe,
    cluster_line,
    clusters_in,
    global_line,
    personal_line,
    trained_under,
)
from pfedme.runs.folder import Folder, write_models
from pfedme.runs.run import Run, load, of_this_host

NEWCOMER_ROWS = (5, 10, 20, 50, 100, 200, 400)
"""Numbers of training rows that newcomers are given, to see from how many on, and up to how many, joining
pays."""
METHODS = (
    "alone", "global", "label-prior", "cluster", "cluster-label-prior", "fine-tuned", "given", "own-lambda",
    "recommended",
)  # fmt: skip
"""The methods that are compared, if they exist; personal models of other algorithms come before own λ."""

Watch = Callable[[str, int, int], None]
Entry = dict[str, Any]
"""The numbers of a method; None for undefined ones."""


def _unwatched(_what: str, _done: int, _of: int) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run and its shared model."""

    run: Run
    simulation: Simulation
    w: Params
    """The global model; if the algorithm has none, that of FedAvg."""
    improving: bool = False
    """Whether its loss was still falling when it ended."""
    trained_alone: tuple[Recipe, bool] | None = None
    """How its clients train alone, and whether their losses are still falling then; if None, they find
    out."""

    @classmethod
    def open(cls, path: Path) -> FinishedRun:
        """The run in a folder of the first host."""
        folder = Folder(path)
        record = folder.read_by_all()
        if (status := record.get("status")) != "finished":
            cure = f"'pfedme resume {path}' continues it" if status == "running" else "start another"
            raise InputError(f"The run in {path} has not finished ({status}); {cure}.")
        try:
            run = Run.from_json(record["config"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder.record} is damaged: {error}; start the run again.") from None
        run.refuse_to_offer()
        run, simulation = run.prepare()
        size = first_model(simulation.model, simulation.seed).ravel().size

        def kept() -> bytes:
            try:
                w = safetensors.numpy.load_file(folder.model)["w"]
                if w.shape != (size,):
                    raise ValueError(f"it has {w.size} numbers, not {size}")
            except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
                raise InputError(f"{folder.model} cannot be read ({error}); start the run again.") from None
            return safetensors.numpy.save({"w": w})

        w = safetensors.numpy.load(from_first(kept))["w"] if simulation.algorithm.has_global else None
        return cls.of(run, simulation, w, improving=bool(record.get("auto", {}).get("improving")))

    @classmethod
    def of(
        cls, run: Run, simulation: Simulation, w: np.ndarray | jax.Array | None, *, improving: bool = False
    ) -> FinishedRun:
        """A run with its global model as a vector; without one, FedAvg's is trained."""
        start = cls(run, simulation, first_model(simulation.model, simulation.seed), improving)
        found = start.again(simulation.federation) if w is None else start.w.like(jnp.asarray(w))
        return dataclasses.replace(start, w=found)

    @classmethod
    def trained(cls, run: Run) -> FinishedRun:
        """Carries out the run in memory, without a folder."""
        return cls.of(*run.prepare(), None)

    @property
    def given(self) -> float | None:
        """The run's λ, if its algorithm is pFedMe."""
        return getattr(self.run.algorithm, "lam", None) if self.run.algorithm.name == "pfedme" else None

    @property
    def recipe(self) -> Recipe:
        """How the run was trained."""
        s = self.simulation
        return Recipe(s.algorithm, s.model, s.cohort, s.seed, self.run.rounds, s.quarter_at)

    @property
    def shared_recipe(self) -> Recipe:
        """How the global model is trained: as in the run, or by FedAvg if the algorithm has none."""
        return self.recipe if self.simulation.algorithm.has_global else self.recipe.fedavg()

    def again(self, federation: Federation) -> Params:
        """The shared model of the same run on another federation."""
        return self.shared_recipe.shared(federation)

    @cached_property
    def cluster_recipe(self) -> Recipe | None:
        """How several shared models are trained: as in the run, or by IFCA if clients clearly fall into
        clusters by their rows, a part of which is left out; None if they do not."""
        if isinstance(self.simulation.algorithm, IFCA):
            return self.recipe
        federation = self.simulation.federation
        clusters = agreed(clusters_in(differences(federation.hold_out(0, Personalize.folds))))
        return self.recipe.ifca(clusters) if clusters else None

    def alone(self, federation: Federation) -> tuple[Callable[[Federation], Stacked], bool]:
        """A function that trains each client of a federation alone, with the number of rounds and the l2 that
        are best on validation rows; and whether the losses were still falling then."""
        s = self.simulation
        known = self.trained_alone if federation is s.federation else None
        recipe, improving = known or alone_recipe(s.model, federation, s.seed, self.run.budget)
        return recipe.models, improving

    def encoded(self, source: Source) -> Federation:
        """The federation of a source; a table's rows are encoded in the same way as the run's own table."""
        schema = self.simulation.federation.schema
        if isinstance(source, Table | Natural) and schema:
            return of_this_host(source.load(schema))
        return load(source)

    def to_members(self, how: Personalize, watch: Watch = _unwatched) -> Personalized:
        """Finds a model for each client that took part."""
        own = self.simulation.federation

        def shared(federation: Federation) -> Params:
            return self.w if federation is own else self.again(federation)

        lines = [global_line(shared, self.shared_recipe)]
        if self.cluster_recipe:
            lines.append(cluster_line(self.cluster_recipe))
        algorithm = self.simulation.algorithm
        if algorithm.personal and algorithm.name not in ON_THE_MENU:
            lines.append(personal_line(self.recipe))
        return self._offer(own, lines, how, watch)

    def to_newcomers(
        self, newcomers: Federation, how: Personalize, watch: Watch = _unwatched
    ) -> Personalized:
        """Finds a model for each client that did not; w has seen none of its rows, so any can judge it."""
        own = self.simulation.federation
        if newcomers.features != own.features:
            raise InputError(
                f"The newcomers' rows have {newcomers.features} features, those of the run {own.features}; "
                "both must have the same features."
            )
        if own.classes and len(unseen := np.setdiff1d(newcomers.y, own.y)):
            raise InputError(
                f"The newcomers' rows have label {unseen[0]}, which no client of the run has: a "
                "label that the federation has never seen needs a new run."
            )
        algorithm, pi = self.shared_recipe.algorithm, None
        if own.classes:
            pi = trained_under(algorithm, prior(own, algorithm.aggregation))
        lines = [Line("global", lambda part: Start(for_all(self.w, part.clients), pi))]
        if self._clusters:
            lines.append(Line("cluster", self._clusters.start))
        # A newcomer has only itself to ask.
        return self._offer(newcomers, lines, dataclasses.replace(how, pooled=0.0), watch)

    @cached_property
    def _clusters(self) -> Clusters | None:
        """The models of clusters, for newcomers."""
        own = self.simulation.federation
        return Clusters.of(self.cluster_recipe, own) if self.cluster_recipe else None

    def _offer(
        self, federation: Federation, lines: Sequence[Line], how: Personalize, watch: Watch
    ) -> Personalized:
        watch("alone", 0, 1)
        alone, improving = self.alone(federation)
        own = self.simulation.federation
        measure, _ = metric_for(own, self.run.metric)
        found = personalize(
            how, self.simulation.model, federation, lines, alone, seed=self.simulation.seed,
            given=self.given, measure=measure, positive=own.positive, watch=watch,
        )  # fmt: skip
        return dataclasses.replace(found, improving=improving or self.improving)


@dataclasses.dataclass(frozen=True)
class Level:
    """How newcomers with so many training rows fare."""

    rows: int
    clients: int
    methods: dict[str, Entry]
    gain: dict[str, float] | None = None
    """Gain of the recommended models over training alone: the mean over newcomers, and the `low` and `high`
    ends of its interval; None if it is undefined for every newcomer."""
    metric: str = ACCURACY.key

    @property
    def measure(self) -> Measure:
        """The metric by which models are judged."""
        return MEASURES[self.metric]


def newcomer_curve(
    finished: FinishedRun,
    newcomers: Federation,
    how: Personalize,
    watch: Watch = _unwatched,
    rows: Sequence[int] = NEWCOMER_ROWS,
) -> list[Level]:
    """How newcomers fare, by the number of their training rows."""
    sizes = [n for n in rows if (newcomers.n_train >= n).any()]
    levels = []
    for k, size in enumerate(sizes):
        watch(f"newcomers with {size} rows", k, len(sizes))
        some = newcomers.limit(size)
        found = finished.to_newcomers(some, how)
        gain = found.gains("alone").mean()
        levels.append(Level(size, some.clients, methods(found), gain and gain._asdict(), found.measure.key))
    return levels


def names(found: Personalized) -> list[str]:
    """The methods that are compared."""
    known = {c.name for c in found.candidates if not c.on_path} | {"own-lambda", "recommended"}
    usual = [name for name in METHODS if name in known]
    return [*usual[:-2], *sorted(known - {*METHODS}), *usual[-2:]]


def summary(found: Personalized, right: np.ndarray) -> Entry:
    """The accuracy (or R²) of a method, `right` on each test row: over all rows, over clients and in the
    worst tenth of the clients.

    `harmed` is the share of clients that it leaves more than one point below alone, beyond their interval.
    """
    own = over_clients(found.accuracy(right))
    if own is None:
        raise InputError("No client has test rows, so no model can be judged.")
    return {
        found.usual.key: float(right.mean()),
        "mean": own["mean"],
        "worst_decile": own["worst_decile"],
        "harmed": float(found.harmed(right)[found.tested].mean()),
    }


def methods(found: Personalized) -> dict[str, Entry]:
    """The `summary` of each method, by accuracy (or R²); if models are judged by another metric, by that one,
    with accuracy (or R²) over all rows last."""
    entries = {}
    for name in names(found):
        usual = summary(found, found.of(name))
        if found.metric is None:
            entries[name] = usual
            continue
        value = found.values[name]
        own = over_clients(value.own, lower=found.metric.lower) or {}
        entries[name] = {
            found.metric.key: value.overall,
            "mean": own.get("mean"),
            "worst_decile": own.get("worst_decile"),
            "harmed": usual["harmed"],
            found.usual.key: usual[found.usual.key],
        }
    return entries


def clients_csv(found: Personalized, federation: Federation) -> str:
    """One row per client: its choice, and what that gains over training alone and over the global model, by
    accuracy (or R²); if models are judged by another metric, columns for that one come last."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    models, others = ("recommended", "alone", "global"), ("alone", "global")
    columns = {f"{name}_{found.usual.key}": found.accuracy(found.of(name)) for name in models}
    for name in others:
        columns[f"gain_over_{name}"], columns[f"gain_over_{name}_ci95"] = found.gain(found.of(name))
    if found.metric:
        key = found.metric.key
        columns |= {f"{name}_{key}": found.own(name) for name in models}
        columns |= {f"gain_over_{name}_{key}": found.gains(name).each for name in others}
    table.writerow(["client", "n_train", "n_test", "choice", "lam", *columns])
    for i in range(found.clients):
        tested = federation.n_test[i] > 0
        numbers = [f"{c[i]:.6f}" if tested and not np.isnan(c[i]) else "" for c in columns.values()]
        chosen = found.candidates[found.choice[i]]
        table.writerow(
            [federation.name(i), int(federation.n_train[i]), int(federation.n_test[i]),
             chosen.name, f"{chosen.lam:g}" if chosen.steps or chosen.lam else "", *numbers]
        )  # fmt: skip
    return text.getvalue()


def document(found: Personalized, how: Personalize) -> dict[str, Any]:
    """The content of personalized.json: the results of each method, and how many clients chose which."""
    chosen = [found.candidates[k] for k in found.choice]
    labels = [c.label for c in found.candidates]
    return {
        "version": __version__,
        "personalize": to_json(how),
        "methods": methods(found),
        "gain": {
            name: gain and {"mean": gain.mean, "ci95": gain.high - gain.mean}
            for name in ("alone", "global")
            for gain in [found.gains(name).mean(0.95)]
        },
        "verdict": found.verdict().to_json(),
        "chosen": {label: sum(c.label == label for c in chosen) for label in labels},
    }


def write(path: Path, found: Personalized, model: Model, federation: Federation, how: Personalize) -> None:
    """Writes personalized.csv, .json, .png and .safetensors to a folder of the first host."""
    from pfedme.report.gain import gain_figure

    theta = {"theta": read(found.theta.ravel(1))}
    if not is_first():
        return
    summed_up = json.dumps(document(found, how), indent=1) + "\n"
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        atomic_write(path / "personalized.csv", clients_csv(found, federation))
        atomic_write(path / "personalized.png", gain_figure(found, federation))
        write_models(Folder(path).offered, theta, model, federation, range(federation.clients))
        atomic_write(path / "personalized.json", summed_up)


def write_newcomers(path: Path, levels: Sequence[Level]) -> None:
    """Writes newcomers.csv and .png to a folder."""
    from pfedme.report.gain import newcomer_figure

    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["rows", "clients", "method", "mean", "worst_decile", "metric"])
    for level in levels:
        for name, values in level.methods.items():
            numbers = ["" if (v := values[k]) is None else f"{v:.6f}" for k in ("mean", "worst_decile")]
            table.writerow([level.rows, level.clients, name, *numbers, level.metric])
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        atomic_write(path / "newcomers.csv", text.getvalue())
        atomic_write(path / "newcomers.png", newcomer_figure({"": levels}))
