"""Runs that belong together: the seeds of one method, and the methods that can be compared."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtrit

from pfedme.engine.measure import ACCURACY, MEASURES, R2, Measure
from pfedme.report.html.read import Told
from pfedme.report.tables import KINDS, data_name

SAID = {"running": "unfinished"}
"""The page's word for a status, if it differs from the record's."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    where: str
    """What distinguishes its problem from others on the page: ` on mnist`; empty if they are the same."""
    runs: list[Told]

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.runs[0].run.algorithm.name

    @cached_property
    def problem(self) -> str:
        """The data and the model, which methods must share to be compared."""
        return problem(self.runs[0])

    @cached_property
    def finished(self) -> list[Told]:
        """The runs with a result."""
        return [told for told in self.runs if told.finished]

    @cached_property
    def finals(self) -> list[dict[str, Any]]:
        """Their last evaluations; a deployed run has none if its clients did not share their scores."""
        return [told.record["final"] for told in self.finished if set(KINDS) & set(told.record["final"])]

    @cached_property
    def histories(self) -> list[list[dict[str, Any]]]:
        """The evaluations of the finished runs or, if there are none, of the others."""
        runs = self.finished or self.runs
        return [told.record["history"] for told in runs if told.record["history"]]

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The last evaluation of each of these runs."""
        return self.finals or [history[-1] for history in self.histories]

    @property
    def deployed(self) -> bool:
        """Whether the clients of these runs were on other machines."""
        return self.runs[0].deployed

    @property
    def kinds(self) -> list[str]:
        """The models that exist, the most personal one last."""
        return [kind for kind in KINDS if self.entries and kind in self.entries[0]]

    @property
    def usual(self) -> Measure:
        """The default metric: accuracy, or R² for quantities."""
        models = [entry[kind] for entry in self.entries for kind in self.kinds]
        return R2 if any(R2.key in model for model in models) else ACCURACY

    @property
    def about_metric(self) -> dict[str, str]:
        """What the record says about its metric: `key`, `why` it was chosen, and the `positive` class."""
        return self.runs[0].record.get("metric") or {}

    @cached_property
    def measure(self) -> Measure:
        """The metric by which models are judged: the one that the record names, if its entries have it."""
        chosen = MEASURES.get(self.about_metric.get("key", ""), self.usual)
        models = [entry[kind] for entry in self.entries for kind in self.kinds]
        there = all(chosen.key in model for model in models)
        known = any(model.get(chosen.key) is not None for model in models)
        return chosen if there and known else self.usual

    @cached_property
    def of_client(self) -> str:
        """The metric by which single clients are judged, depending on clients.csv: the measure, the usual
        one, or `rmse`."""
        tables = [told.clients for told in self.finished if told.clients]
        for key in (self.measure.key, self.usual.key):
            columns = [table.get(f"{kind}_{key}") for table in tables for kind in self.kinds]
            if all(c is not None and not np.isnan(c).all() for c in columns):
                return key
        return self.usual.key if self.usual is ACCURACY else "rmse"

    def one(self, told: Told) -> str:
        """The label of a single run of the group."""
        return self.label if len(self.runs) == 1 else f"{self.label}, seed {told.run.seed}"


def option(told: Told, name: str) -> str:
    """The value of an option in the command of a run."""
    words = shlex.split(told.run.command())
    return words[words.index(name) + 1] if name in words else ""


def problem(told: Told) -> str:
    """The data and the model of a run, and which clients take part."""
    config, clients = told.record["config"], told.deployment.get("clients")
    parts = [config["data"], config["model"], config.get("holdout_clients"), clients]
    return json.dumps(parts, sort_keys=True)


def data_text(told: Told) -> str:
    """A run's data with its options, such as `synthetic:rows=60`; for a table, a readable name."""
    named = told.run.data.name in ("table", "mapped", "deployed")
    return data_name(told.record["config"]["data"]) if named else option(told, "--data")


def place(told: Told) -> tuple[str, str, str]:
    """The parts of the problem in words."""
    later = told.run.holdout_clients
    without = f" without {told.run.held_out}" if later else ""
    return f" on {data_text(told)}", f" with {option(told, '--model')}", without


def asked(told: Told) -> dict[str, Any]:
    """The settings of a run without its seed, with `auto` for those that came from the data and so differ
    between seeds."""
    config = {k: v for k, v in told.record["config"].items() if k != "seed"}
    auto = told.record.get("auto") or {}
    algorithm = config["algorithm"]
    found = auto.get("found") or [name for name in ("eta", "alpha") if algorithm.get(name) == 0]
    config["algorithm"] = algorithm | dict.fromkeys(found, "auto")
    if not config.get("rounds") or auto.get("stopped", "given") != "given":
        config |= {"rounds": "auto", "budget": auto.get("budget", config.get("budget"))}
        config = {k: v for k, v in config.items() if k not in ("quarter_at", "eval_every")}
    return config


def grouped(runs: Iterable[Told]) -> tuple[list[Group], list[dict[str, str]]]:
    """The groups, in order of first appearance, and notices on runs that are in none of them or have no
    result."""
    members: dict[str, dict[int, Told]] = {}
    notices = []
    for told in runs:
        key = json.dumps([asked(told), told.deployment.get("clients")], sort_keys=True)
        status, seed = told.record["status"], told.run.seed
        about = {"run": f"{told.run.algorithm.name}, seed {seed}", "path": str(told.path)}
        if status != "not begun":
            twin = members.setdefault(key, {}).setdefault(seed, told)
            if twin is not told:
                if not twin.finished and told.finished:
                    members[key][seed], twin = told, twin
                    about["path"] = str(twin.path)
                same = str(members[key][seed].path)
                notices.append({**about, "status": "repeated", "reason": f"The same run is in {same}."})
                continue
        if status == "diverged":
            notices.append({**about, "status": status, "reason": told.record.get("reason") or ""})
        elif told.deployed and status != "finished":
            notices.append({**about, "status": SAID.get(status, status), "reason": goes_on(told)})
        elif status != "finished":
            done = told.record["history"][-1]["round"] if told.record["history"] else 0
            how = f"It was last evaluated in round {done} of {told.run.rounds}. " if done else ""
            cure = f"{how}'pfedme resume' continues it."
            notices.append({**about, "status": SAID.get(status, status), "reason": cure})
    lists = [list(by_seed.values()) for by_seed in members.values()]
    return [Group(*label, runs) for label, runs in zip(labels(lists), lists, strict=True)], notices


def goes_on(told: Told) -> str:
    """Why a deployed run has no result, how far it has come, and how to resume it."""
    counted = {t for t, o in zip(*_outcomes(told), strict=True) if o == "counted"}
    why = told.record.get("reason") or ""
    reached = f"{len(counted)} of {told.run.rounds} rounds are done" if counted else "No round is done"
    first = "Once the cause is fixed, " if told.record["status"] == "failed" else ""
    cure = f"{first}'pfedme server --resume {shlex.quote(str(told.path))}' continues it."
    return " ".join(filter(None, [why, f"{reached}.", cure]))


def _outcomes(told: Told) -> tuple[Iterable[Any], Iterable[Any]]:
    return (told.ledger["round"], told.ledger["outcome"]) if told.ledger else ((), ())


def labels(groups: Sequence[Sequence[Told]]) -> list[tuple[str, str]]:
    """A name for each group, and where it ran: the algorithm's name with what distinguishes it from others of
    that name on the same problem, and what distinguishes the problem."""
    settings = [_settings(runs[0]) for runs in groups]
    kinds = [(runs[0].run.algorithm.name, problem(runs[0])) for runs in groups]
    places = [place(runs[0]) for runs in groups]
    varied = [len(set(parts)) > 1 for parts in zip(*places, strict=True)]
    said = []
    for own, kind, parts in zip(settings, kinds, places, strict=True):
        name = kind[0]
        like = [other for other, k in zip(settings, kinds, strict=True) if k == kind]
        told = ", ".join(f"{k} {own[k]}" for k in own if any(own[k] != other.get(k) for other in like))
        where = "".join(part for part, shown in zip(parts, varied, strict=True) if shown)
        said.append((f"{name}{f' ({told})' if told else ''}{where}", where))
    # Deployed federations with the same number of clients differ only in their folders.
    names = [name for name, _ in said]
    return [
        (f"{name}, {runs[0].path.name}" if names.count(name) > 1 else name, where)
        for (name, where), runs in zip(said, groups, strict=True)
    ]


def _settings(told: Told) -> dict[str, Any]:
    """Everything that can distinguish two runs of an algorithm on the same problem."""
    config = asked(told)
    rest = {k: v for k, v in config.items() if k not in ("algorithm", "data", "model", "eval_every")}
    rest["personalize"] = option(told, "--personalize") or "no"
    return {k: v for k, v in config["algorithm"].items() if k != "name"} | rest


def estimate(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The mean of one value per seed, and the half-width of its 95 % interval (Student's t) if there are two.

    >>> estimate([1.0, 2.0, 3.0])
    (2.0, 2.484...)
    >>> estimate([1.0]), estimate([1.0, None]), estimate([])
    ((1.0, None), (None, None), (None, None))
    """
    known = [v for v in values if v is not None and math.isfinite(v)]
    if len(known) < len(values) or not known:
        return None, None
    if len(known) == 1:
        return float(known[0]), None
    n = len(known)
    return float(np.mean(known)), float(stdtrit(n - 1, 0.975) * np.std(known, ddof=1) / math.sqrt(n))


def number_of(entry: Mapping[str, Any], key: str) -> float | None:
    """A finite number in an entry; None if there is none."""
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def number(value: float | None) -> float | int | None:
    """A number for the page, with six digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short


def numbers(values: Iterable[float | None]) -> list[float | int | None]:
    """A list of such numbers."""
    return [number(value) for value in values]
