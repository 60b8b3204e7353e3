"""What a person sees: a live bar on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pfedme.report import tables, trials
from pfedme.report.measure import R2, measure_of
from pfedme.schema import is_number

if TYPE_CHECKING:
    from pfedme.compare import Comparison
    from pfedme.execute import Progress as Step
    from pfedme.experiments.finding import Finding
    from pfedme.experiments.gain import Row
    from pfedme.federation import Federation
    from pfedme.offer import Level
    from pfedme.personalize import Personalized
    from pfedme.tune import Step as SearchStep
    from pfedme.tune import Tuning


PATIENCE_S = 2.0
"""Seconds without a word."""
LINE_EVERY_S = 2.0
"""Seconds between two lines where there is no terminal."""


class Live:
    """Something that is on the screen as long as a block lasts, if there is a terminal."""

    live: Progress | None = None

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()


class Bar(Live):
    """Progress over all rounds of one or several runs, on standard error."""

    def __init__(self, total: int) -> None:
        self.total, self.latest = total, ""
        self.rounds: dict[int, int] = {}  # of each run, now
        self.before: dict[int, int] = {}  # and when it was first heard of, as when it is resumed
        self.began = self.said = time.monotonic()
        if sys.stderr.isatty():
            self.live = Progress(
                TextColumn("{task.fields[name]:<12}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[latest]}"), TextColumn("time left"), TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self.task = self.live.add_task("", total=total, name="", latest="")

    def __call__(self, name: str, place: int, step: Step) -> None:
        """Shows that run number `place`, called `name`, has come to `step`."""
        self.rounds[place] = step.round
        self.before.setdefault(place, step.round)
        done = sum(self.rounds.values())
        new = done - sum(self.before.values())
        if step.entry:
            self.latest = accuracies(step.entry)
        if self.live:
            self.live.update(self.task, completed=done, name=name, latest=self.latest)
        elif step.entry and (step.round in (0, step.rounds) or time.monotonic() - self.said >= LINE_EVERY_S):
            self.said = time.monotonic()
            spent = self.said - self.began
            left = ""
            if new > 0 and done < self.total:
                left = f", {spent / new * (self.total - done):.0f} s left"
            print(
                f"{name} round {step.round}/{step.rounds}: {self.latest}{left}", file=sys.stderr, flush=True
            )


class SearchBar(Live):
    """Progress over the trials of a search, with the best accuracy so far, on standard error."""

    def __init__(self) -> None:
        self.began = self.said = time.monotonic()
        self.before: int | None = None  # trials that had finished when the search was taken up again
        if sys.stderr.isatty():
            self.live = Progress(
                TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"),
                TextColumn("time left"), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self.task = self.live.add_task("", total=None, best="")

    def __call__(self, step: SearchStep) -> None:
        """Shows how far the search has come."""
        what = step.measure
        best = ""
        if step.best is not None:
            best = "best " + what.pattern.format(what.text(what.scale * step.best))
        done = step.finished + step.round / step.rounds
        if self.before is None:
            self.before = step.finished
        if self.live:
            self.live.update(self.task, completed=done, total=step.trials, best=best)
        elif time.monotonic() - self.said >= LINE_EVERY_S:
            self.said = time.monotonic()
            said = [f"trial {step.finished + 1}/{step.trials} round {step.round}/{step.rounds}", best]
            if step.finished > self.before:
                pace = (self.said - self.began) / (done - self.before)
                said.append(f"{pace * (step.trials - done):.0f} s left")
            print(", ".join(filter(None, said)), file=sys.stderr, flush=True)


def print_tuning(tuning: Tuning, out: Path) -> None:
    """The best trials of a search, how the others ended, and how to train with the best settings."""
    run = tuning.search.run
    data = tables.data_name(run.to_json()["data"])
    title = f"{run.algorithm.name} on {data}: the best trials, judged on validation rows"
    table = _table(title, trials.header(tuning))
    for trial in tuning.best[:5]:
        table.add_row(*trials.row(trial, tuning))
    console = _console()
    console.print(table)
    console.print(trials.counts(tuning), highlight=False)
    if tuning.mattered:
        console.print(trials.what_mattered(tuning), highlight=False)
    console.print(
        f"The {tuning.measure.name} is the {tuning.best[0].model} model's. To train with the best settings:"
    )
    console.print(f"  {tuning.run.command()}", highlight=False, soft_wrap=True)
    console.print(f"All trials: {out}/tune.md, {out}/trials.csv", highlight=False, soft_wrap=True)


class Steps(Live):
    """Progress over a few long steps, on standard error."""

    def __init__(self) -> None:
        if sys.stderr.isatty():
            self.live = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("time left"),
                TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self.task = self.live.add_task("", total=1)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` steps are done and that `what` comes next."""
        if self.live:
            self.live.update(self.task, description=what, completed=done, total=total)
        elif done < total:
            print(f"{what}: step {done + 1} of {total}", file=sys.stderr, flush=True)


class Rounds(Live):
    """Progress over the rounds of a deployed run, and what is said of it, on standard error."""

    def __init__(self, total: int) -> None:
        if sys.stderr.isatty():
            self.live = Progress(
                TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TextColumn("time left"),
                TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self.task = self.live.add_task("", total=total)

    def __call__(self, line: str, done: int | None) -> None:
        """Shows a line, and how many rounds are done if it says so; where there is a bar, the bar says it."""
        if self.live and done is not None:
            self.live.update(self.task, completed=done)
        elif self.live:
            self.live.console.print(escape(line), highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A sign of life on standard error after two seconds; what it yields changes the text on a terminal."""
    # A copy of it, because what polars says there is held back while a table is read.
    with os.fdopen(os.dup(2), "w") as said:
        status = Console(file=said).status(what) if said.isatty() else None
        start = status.start if status else lambda: print(f"{what} ...", file=said, flush=True)
        timer = threading.Timer(PATIENCE_S, start)
        timer.start()
        try:
            yield status.update if status else lambda _: None
        finally:
            timer.cancel()
            timer.join()
            if status:
                status.stop()


def print_offer(found: Personalized, federation: Federation, out: Path) -> None:
    """What each method gives the clients, what they chose, and what they gain."""
    from pfedme.offer import names, summary

    labels = {"given": "pfedme (given λ)", "own-lambda": "own λ, joined"}
    table = _table(
        f"{found.clients} clients: test accuracy of a model for each",
        ["model", "over all rows %", "client mean %", "worst tenth %", "harmed %"],
    )
    for name in names(found):
        s = summary(found, found.of(name))
        values = [s[k] for k in ("accuracy", "mean", "worst_decile", "harmed")]
        table.add_row(labels.get(name, name), *(_percent(v) for v in values))
    console = _console()
    console.print(table)
    for sentence in tables.offer_sentences(found):
        console.print(sentence, highlight=False)
    console.print(
        f"Each client's choice: {out}/personalized.csv   Picture: {out}/personalized.png   "
        f"Models: {out}/personalized.safetensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def print_gain(rows: Sequence[Row], out: Path) -> None:
    """What joining is worth on each federation."""
    methods = ("alone", "global", "fine-tuned", "pfedme", "recommended")
    table = _table("client mean of test accuracy", ["federation", *(f"{m} %" for m in methods), "harmed %"])
    for row in rows:
        values = [f"{row.mean[m]:.2f}" for m in methods]
        table.add_row(row.setting.name, *values, f"{row.harmed:.1f}")
    console = _console()
    console.print(table)
    console.print(f"What it means: {out}/gain.md   Table: {out}/results/gain.csv", soft_wrap=True)


def print_newcomers(levels: Sequence[Level], out: Path) -> None:
    """How newcomers fare by the number of their rows."""
    methods = list(levels[0].methods)
    table = _table(
        "newcomers: client mean of test accuracy, by their training rows",
        ["rows", "clients", *(f"{'pfedme (given λ)' if m == 'given' else m} %" for m in methods)],
    )
    for level in levels:
        table.add_row(
            str(level.rows), str(level.clients), *(_percent(level.methods[m]["mean"]) for m in methods)
        )
    console = _console()
    console.print(table)
    console.print(tables.newcomer_sentence(levels), highlight=False)
    console.print(f"Results: {out}/newcomers.csv, {out}/newcomers.png", soft_wrap=True, highlight=False)


def print_findings(findings: Sequence[Finding], out: Path) -> None:
    """Each claim with its verdict, and where the results are."""
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("claim")
    table.add_column("verdict")
    for finding in findings:
        table.add_row(finding.claim, finding.verdict)
    console.print(table)
    page = out / "audit.md"
    console.print(f"Results in {out / 'results'}" + (f", every number in {page}." if page.exists() else "."))


def accuracies(entry: dict[str, Any]) -> str:
    """`global 78.65 %  personal 83.20 %`, or `global R² 0.7865  personal R² 0.8320`."""
    what = measure_of(entry)
    shown = [
        f"{kind} {what.pattern.format(what.text(value))}"
        for kind in tables.KINDS
        if kind in entry and (value := what.of(entry[kind])) is not None
    ]
    return "  ".join(shown)


def print_run(record: dict[str, Any], out: Path, federation: Federation | None) -> None:
    """The result of one run; `federation` is None if its rows are elsewhere."""
    final, config, timing = record["final"], record["config"], record["timing"]
    algorithm, model = config["algorithm"]["name"], config["model"]["name"]
    data = tables.data_name(config["data"])
    what = measure_of(final)
    over_clients = (f"{title} {what.sign}" for title in ("client mean", "worst tenth", "worst"))
    rmse = ["RMSE"] if what is R2 else []
    table = _table(
        f"{algorithm} on {data} with {model}, after {final['round']} rounds",
        ["model", what.title, *rmse, "loss", "train loss", *over_clients],
    )
    for kind in tables.KINDS:
        if kind not in final:
            continue
        entry = final[kind]
        own = entry["clients"] or {}
        numbers = [what.scale * own[k] if own else None for k in ("mean", "worst_decile", "min")]
        error = [_measured(entry["rmse"]) for _ in rmse]
        table.add_row(
            kind, what.text(what.of(entry)), *error, _number(entry["loss"]), _number(entry["train_loss"]),
            *(what.text(v) for v in numbers),
        )  # fmt: skip
    console = _console()
    console.print(table)
    if inner := final.get("inner"):
        console.print(
            f"Inner problem: {inner['steps']:.3g} steps to ‖∇h‖² = {inner['residual']:.2g} on average over "
            f"clients, {inner['residual_max']:.2g} at most."
        )
    console.print(
        f"Time: {timing['train_s']:.1f} s training, {timing['eval_s']:.1f} s evaluation, "
        f"{timing['compile_s']:.1f} s compilation."
    )
    schema = federation.schema if federation else None
    if schema and config["data"].get("task") is None and all(map(is_number, schema.labels)):
        other = {
            "regression": "a class, --task classification",
            "classification": "a quantity, --task regression",
        }
        console.print(
            f"This was a {schema.task} of '{schema.label}'; if that is {other[schema.task]}.", highlight=False
        )
    if federation and federation.clients == 1:
        console.print("There was one client only, so that there was nothing to federate.")
    elif federation and algorithm != "alone":
        console.print(
            f"What would each client reach alone? pfedme compare {algorithm} alone ...", highlight=False
        )
    console.print(
        f"Results: {out}/ (curves.png, clients.csv, record.json, model.safetensors)", soft_wrap=True
    )
    console.print(f"Report: {out}/report.html", soft_wrap=True, highlight=False)


def print_comparison(comparison: Comparison, out: Path) -> None:
    """The results of several runs, and what they say."""
    finals = comparison.finals
    first = next(iter(comparison.records.values()))[0]["config"]
    seeds = max(map(len, finals.values()))
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    where = f"{tables.data_name(first['data'])}, {first['model']['name']}, {first['rounds']} rounds"
    title = f"{where}: test {tables.measure(finals).name} over all clients' rows{spread}"
    table = _table(title, tables.header(finals))
    for row in tables.rows(finals):
        table.add_row(*row)
    console = _console()
    console.print(table)
    for sentence in tables.sentences(finals):
        console.print(sentence, highlight=False)
    console.print(f"Figure: {out}/compare.png   Table: {out}/compare.csv   Runs: {out}/", soft_wrap=True)
    console.print(f"Report: {out}/report.html", soft_wrap=True, highlight=False)


def print_description(name: str, description: dict[str, Any], federation: Federation) -> None:
    """What a federation looks like."""
    from pfedme.report import description as words

    d, console = description, _console()
    sizes = d["rows_per_client"]
    lines = [
        ("clients", f"{d['clients']:,}"),
        ("rows", f"{d['rows']:,} ({d['train_rows']:,} to train on, {d['test_rows']:,} to test on)"),
        ("rows per client", f"{sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}"),
        ("features", f"{d['features']:,}"),
        *words.about_task(d),
        *_about_labels(d),
    ]
    if d["note"]:
        lines.append(("rows are", d["note"]))
    lines += words.about_clients(d)
    table = _table(name, ["", ""])
    table.show_header = False
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for title, header, rows in words.tables(d, federation):
        listing = _table(title, [escape(name) for name in header])
        listing.columns[-1].justify, listing.columns[-1].no_wrap = "left", False
        for row in rows:
            listing.add_row(*(escape(cell) for cell in row))
        console.print(listing)
    for warning in d["warnings"]:
        console.print(f"Note: {warning}", highlight=False)


def _about_labels(d: dict[str, Any]) -> list[tuple[str, str]]:
    """What labels there are, and how they are spread over clients."""
    if d["classes"]:
        own = d["labels_per_client"]
        spread = f"{own['min']}" if own["min"] == own["max"] else f"{own['min']} to {own['max']}"
        return [("classes", f"{d['classes']}"), ("labels per client", spread)]
    label, mean, std = d["label"], d["label_mean_per_client"], d["label_std_per_client"]
    ranges = (f"{_measured(v['min'])} to {_measured(v['max'])}" for v in (label, mean, std))
    whole = f"mean {_measured(label['mean'])}, standard deviation {_measured(label['std'])}"
    names = ("label (a number)", "its mean in a client", "its deviation in a client")
    return [(name, told) for name, told in zip(names, ranges, strict=True)] + [("over all rows", whole)]


def _console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _table(title: str, header: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k == 0 or not name else "right", no_wrap=True)
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _measured(value: float | None) -> str:
    """A number in the units of the data, of whatever size."""
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
