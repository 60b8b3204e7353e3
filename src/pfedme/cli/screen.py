"""What a person sees: a live bar on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pfedme.data.schema import is_number
from pfedme.engine.measure import ACCURACY, R2, Measure, measure_of
from pfedme.livebar import Live
from pfedme.report import tables, trials

if TYPE_CHECKING:
    from pfedme.data.federation import Federation
    from pfedme.engine.choices import Personalized
    from pfedme.engine.verdict import Verdict
    from pfedme.experiments.finding import Finding
    from pfedme.experiments.gain import Row
    from pfedme.experiments.verdicts import Summary
    from pfedme.personalization.finished import Level
    from pfedme.training.compare import Comparison
    from pfedme.training.execute import Progress as Step
    from pfedme.tuning.tune import Step as SearchStep
    from pfedme.tuning.tune import Tuning


PATIENCE_S = 2.0
"""Seconds without a word."""
MOST_NOTES = 8
"""Notes on a table that are printed after a run."""
LINE_EVERY_S = 2.0
"""Seconds between two lines where there is no terminal."""


class TrainingBar(Live):
    """Progress of something that trains, on standard error."""

    def __init__(self, what: str, total: int | None = None) -> None:
        super().__init__(what, total, Console(stderr=True))
        self.said = time.monotonic()

    def pilot(self, name: str, round: int) -> None:
        """Shows that it is being found out how long `name` takes."""
        self.show(f"{name:<8}", round, None, ["finding out how long to train"])
        if not self.live and time.monotonic() - self.said >= LINE_EVERY_S:
            self.said = time.monotonic()
            print(f"{name}: finding out how long to train, round {round}", file=sys.stderr, flush=True)


class Bar(TrainingBar):
    """Progress over all rounds of one or several runs; `total` is None if they train until they have
    converged."""

    def __init__(self, total: int | None) -> None:
        super().__init__("", total)
        self.total, self.entry = total, {}
        self.rounds: dict[int, int] = {}  # of each run, now
        self.before: dict[int, int] = {}  # and when it was first heard of, as when it is resumed

    def __call__(self, name: str, place: int, step: Step) -> None:
        """Shows that run number `place`, called `name`, has come to `step`."""
        if step.pilot:
            self.pilot(name, step.round)
            return
        self.rounds[place] = step.round
        self.before.setdefault(place, step.round)
        done = sum(self.rounds.values())
        if step.entry:
            self.entry = step.entry
        found = [accuracies(self.entry, kinds) for kinds in (tables.KINDS, ("global", "personal"))]
        found += [accuracies(self.entry, (kind,)) for kind in reversed(tables.KINDS)]
        total = self.total or (step.rounds if len(self.rounds) == 1 else None)
        left = self.show(f"{name:<8}", done, total, list(filter(None, found)), sum(self.before.values()))
        ended = step.round in (0, step.rounds)
        if not self.live and step.entry and (ended or time.monotonic() - self.said >= LINE_EVERY_S):
            self.said = time.monotonic()
            of_all = f"/{step.rounds}" if step.rounds else ""
            after = f", {left}" if left else ""
            print(f"{name} round {step.round}{of_all}: {found[0]}{after}", file=sys.stderr, flush=True)


class SearchBar(TrainingBar):
    """Progress over the trials of a search, with the best score so far."""

    def __init__(self) -> None:
        super().__init__("trials")
        self.before: int | None = None  # trials that had finished when the search was taken up again

    def __call__(self, step: SearchStep) -> None:
        """Shows how far the search has come."""
        what = step.measure
        best = ""
        if step.best is not None:
            best = "best " + what.pattern.format(what.text(what.scale * step.best))
        done = step.finished + step.round / step.rounds
        if self.before is None:
            self.before = step.finished
        left = self.show("trials", done, step.trials, [best], self.before)
        if not self.live and time.monotonic() - self.said >= LINE_EVERY_S:
            self.said = time.monotonic()
            said = [f"trial {step.finished + 1}/{step.trials} round {step.round}/{step.rounds}", best, left]
            print(", ".join(filter(None, said)), file=sys.stderr, flush=True)


def print_tuning(tuning: Tuning, out: Path) -> None:
    """The best trials of a search, how the others ended, and how to train with the best settings."""
    run = tuning.search.run
    data = tables.data_name(run.to_json()["data"])
    title = f"{run.algorithm.name} on {data}: the best trials, judged on validation rows"
    console = _console()
    best = [trials.row(trial, tuning) for trial in tuning.best[:5]]
    print_table(console, title, trials.header(tuning), best, spare=("state", "rounds", "trial"))
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
        super().__init__("", 1, Console(stderr=True))

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` steps are done and that `what` comes next."""
        self.show(what, done, total)
        if not self.live and done < total:
            print(f"{what}: step {done + 1} of {total}", file=sys.stderr, flush=True)


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
    from pfedme.personalization.finished import methods

    labels = {"given": "pfedme (given λ)", "own-lambda": "own λ, joined"}
    rows = []
    what, usual = found.measure, [found.usual] if found.metric else []
    for name, entry in methods(found).items():
        values = [_text(what, entry[k]) for k in (what.key, "mean", "worst_decile")]
        values += [_text(other, entry[other.key]) for other in usual]
        rows.append([labels.get(name, name), *values, _percent(entry["harmed"])])
    console = _console()
    heads = [f"{head} {what.sign}" for head in ("over all rows", "client mean", "worst tenth")]
    heads += [other.title for other in usual]
    print_table(
        console, f"{found.clients} clients: test {what.name} of a model for each",
        ["model", *heads, "harmed %"], rows, spare=[other.title for other in usual],
    )  # fmt: skip
    print_verdict(found.verdict(), console)
    for sentence in tables.offer_sentences(found):
        console.print(sentence, highlight=False)
    console.print(
        f"Each client's choice: {out}/personalized.csv   Picture: {out}/personalized.png   "
        f"Models: {out}/personalized.safetensors",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def print_verdict(verdict: Verdict | None, console: Console) -> None:
    """Whether joining pays, in colour where there is a terminal."""
    if verdict:
        style = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}[verdict.verdict]
        console.print(verdict.sentence, style=style, highlight=False)


def print_gain(rows: Sequence[Row], out: Path) -> None:
    """What joining is worth on each federation."""
    methods = ("alone", "global", "fine-tuned", "pfedme", "recommended")
    header = ["federation", *(f"{m} %" for m in methods), "harmed %"]
    cells = [
        [row.setting.name, *(f"{row.mean[m]:.2f}" for m in methods), f"{row.harmed:.1f}"] for row in rows
    ]
    console = _console()
    print_table(console, "client mean of test accuracy", header, cells)
    console.print(f"What it means: {out}/gain.md   Table: {out}/results/gain.csv", soft_wrap=True)


def print_verdicts(found: Sequence[Summary], out: Path) -> None:
    """How often the verdict was given, and was false, on each kind of federation."""
    header = ["federation", "true gain", "yes", "no", "false", "interval holds the truth", "of"]
    rows = [
        [s.setting.name, f"{s.gain:+.2f}", *map(str, (s.yes, s.no, s.false, s.covered, s.repetitions))]
        for s in found
    ]
    console = _console()
    print_table(console, "verdicts on federations whose truth is known", header, rows)
    console.print(f"What it means: {out}/results/verdict.md   All: {out}/results/verdict.csv", soft_wrap=True)


def print_newcomers(levels: Sequence[Level], out: Path) -> None:
    """How newcomers fare by the number of their rows."""
    methods, what = list(levels[0].methods), levels[0].measure
    names = ["pfedme (given λ)" if m == "given" else m for m in methods]
    header = ["rows", "clients", *(f"{name} {what.sign}" for name in names)]
    rows = [
        [str(level.rows), str(level.clients),
         *(_text(what, level.methods[m]["mean"]) for m in methods)]
        for level in levels
    ]  # fmt: skip
    console = _console()
    print_table(
        console, f"newcomers: client mean of test {what.name}, by their training rows", header, rows,
        spare=(f"own-lambda {what.sign}", "clients", f"fine-tuned {what.sign}"),
    )  # fmt: skip
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


def accuracies(entry: dict[str, Any], kinds: Sequence[str] = tables.KINDS) -> str:
    """`global 78.65 %  personal 83.20 %`, or `global R² 0.7865  personal R² 0.8320`."""
    what = measure_of(entry)
    shown = [
        f"{kind} {what.pattern.format(what.text(value))}"
        for kind in kinds
        if kind in entry and (value := what.of(entry[kind])) is not None
    ]
    return "  ".join(shown)


def print_run(record: dict[str, Any], out: Path, federation: Federation | None) -> None:
    """The result of one run; `federation` is None if its rows are elsewhere."""
    final, config, timing = record["final"], record["config"], record["timing"]
    algorithm, model = config["algorithm"]["name"], config["model"]["name"]
    data = tables.data_name(config["data"])
    what = measure_of(final)
    rows, header, spare = run_table(final, what)
    console = _console()
    if why := record.get("metric", {}).get("why"):
        console.print(why, highlight=False)
    title = f"{algorithm} on {data} with {model}, after {final['round']} rounds"
    print_table(console, title, header, rows, spare)
    if any("±" in cell for row in rows for cell in row):
        console.print("± is the half-width of a 95 % interval: over test rows, and over clients.")
    if inner := final.get("inner"):
        console.print(
            f"Inner problem: {inner['steps']:.3g} steps to ‖∇h‖² = {inner['residual']:.2g} on average over "
            f"clients, {inner['residual_max']:.2g} at most."
        )
    for sentence in record.get("auto", {}).get("sentences", ()):
        console.print(sentence, highlight=False)
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


def run_table(final: dict[str, Any], what: Measure) -> tuple[list[list[str]], list[str], list[str]]:
    """The models of a run: rows, header, and the columns that can be spared on a narrow terminal."""
    rmse = ["RMSE"] if what is R2 else []
    accuracy = ["accuracy %"] if what.task == "classification" and what is not ACCURACY else []
    means = [f"{title} {what.sign}" for title in ("client mean", "worst tenth", "worst")]
    header = ["model", what.title, *accuracy, *rmse, "loss", "train loss", *means]
    rows = []
    for kind in (*tables.KINDS, "baseline"):
        if kind not in final:
            continue
        entry = final[kind]
        own = [what.of_clients(entry, k) for k in ("mean", "worst_decile", "worst")]
        half = entry.get("half_width", {}).get(what.key)
        over_clients = (entry.get("by_client", {}).get(what.key) or {}).get("half_width")
        rows.append([
            tables.baseline_name(final) if kind == "baseline" else kind,
            _with_half(what, what.of(entry), half),
            *(ACCURACY.text(ACCURACY.of(entry)) for _ in accuracy),
            *(_measured(entry["rmse"]) for _ in rmse),
            _number(entry["loss"]),
            _number(entry["train_loss"]),
            _with_half(what, own[0], over_clients),
            *map(what.text, own[1:]),
        ])  # fmt: skip
    return rows, header, ["train loss", means[2], "loss", means[1], *rmse, means[0]]


def _with_half(what: Measure, value: float | None, half: float | None) -> str:
    """`83.21 ± 0.40`, from a number as it is shown and a half-width as it is recorded."""
    if value is None or half is None:
        return what.text(value)
    return f"{what.text(value)} ± {what.text(what.scale * half)}"


def print_comparison(comparison: Comparison, out: Path) -> None:
    """The results of several runs, and what they say."""
    finals = comparison.finals
    first = next(iter(comparison.records.values()))[0]
    seeds = max(map(len, finals.values()))
    config = first["config"]
    where = f"{tables.data_name(config['data'])}, {config['model']['name']}, {_rounds(comparison)}"
    title = f"{where}: test {tables.measure(finals).name} over all clients' rows"
    title += f", mean of {seeds} seeds" if seeds > 1 else ""
    best = comparison.best(out)
    console = _console()
    if why := first.get("metric", {}).get("why"):
        console.print(why, highlight=False)
    header = tables.header(finals)
    print_table(console, title, header, tables.rows(finals, best), spare=[header[4], header[2]])
    if seeds > 1:
        console.print("± is the half-width of a 95 % interval over seeds.")
    if best:
        console.print("* is better than all others of its column beyond noise, paired over clients.")
    for name, records in comparison.records.items():
        auto = [record["auto"] for record in records if record.get("auto", {}).get("improving")]
        if auto:
            console.print(f"{name}: {auto[0]['sentences'][-1]}", highlight=False)
    print_verdict(comparison.verdict, console)
    for sentence in tables.sentences(finals, comparison.verdict):
        console.print(sentence, highlight=False)
    console.print(f"Figure: {out}/compare.png   Table: {out}/compare.csv   Runs: {out}/", soft_wrap=True)
    console.print(f"Report: {out}/report.html", soft_wrap=True, highlight=False)


def _rounds(comparison: Comparison) -> str:
    """`100 rounds`, or `47 to 191 rounds`."""
    rounds = [record["config"]["rounds"] for records in comparison.records.values() for record in records]
    low, high = min(rounds), max(rounds)
    return f"{low} rounds" if low == high else f"{low} to {high} rounds"


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
    table = _table(name, ["", ""], lines)
    table.show_header, table.columns[-1].no_wrap = False, False
    console.print(table)
    for title, header, rows in words.tables(d, federation):
        safe = [[escape(cell) for cell in row] for row in rows]
        print_table(console, title, [escape(name) for name in header], safe, header[3:-1], wrap_last=True)
    for warning in d["warnings"]:
        console.print(f"Note: {warning}", highlight=False, markup=False)


def print_notes(notes: Sequence[str]) -> None:
    """The first notes on how a table was read and what looks wrong in it."""
    console = _console()
    for note in notes[:MOST_NOTES]:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)
    if len(notes) > MOST_NOTES:
        console.print(
            f"And {len(notes) - MOST_NOTES} more notes: see 'pfedme data describe'.", soft_wrap=True
        )


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


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    spare: Sequence[str] = (),
    *,
    wrap_last: bool = False,
) -> None:
    """Prints a table that fits: heads are broken first, and then the columns `spare`, and others from the
    right, are left out. No number is ever cut. The last column of a listing may take several lines."""
    header, kept = list(header), list(range(len(header)))
    order = [header.index(name) for name in spare if name in header]
    order += [k for k in range(len(header) - 1, 1, -1) if k not in order]
    wide = console.options.update(max_width=10_000)

    def made(broken: bool) -> Table:
        heads = [textwrap.fill(header[k], 9, break_long_words=False) if broken else header[k] for k in kept]
        table = _table(title, heads, [[row[k] for k in kept] for row in rows])
        if wrap_last:
            table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
        return table

    def fits(table: Table) -> bool:
        size = console.measure(table, options=wide)
        return (size.minimum if wrap_last else size.maximum) <= console.width

    table = made(broken=False)
    if not fits(table):
        table = made(broken=True)
    for k in order:
        if fits(table):
            break
        kept.remove(k)
        table = made(broken=True)
    if not fits(table):  # a name that is very long
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    console.print(table)
    if left_out := [header[k] for k in range(len(header)) if k not in kept]:
        console.print(f"A wider terminal also shows: {', '.join(left_out)}.", highlight=False)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for k, name in enumerate(header):
        table.add_column(name, justify="left" if k == 0 or not name else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _text(what: Measure, value: float | None) -> str:
    """A number of a record in a table."""
    return what.text(None if value is None else what.scale * value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _measured(value: float | None) -> str:
    """A number in the units of the data, of whatever size."""
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
