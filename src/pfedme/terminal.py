"""What a person sees: a live bar on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.compare import Comparison
    from pfedme.execute import Progress as Step
    from pfedme.experiments.finding import Finding
    from pfedme.federation import Federation


LINE_EVERY_S = 2.0
"""Seconds between two lines where there is no terminal."""


class Bar:
    """Progress over all rounds of one or several runs, on standard error."""

    def __init__(self, total: int) -> None:
        self.total, self.latest = total, ""
        self.rounds: dict[int, int] = {}  # of each run, now
        self.before: dict[int, int] = {}  # and when it was first heard of, as when it is resumed
        self.began = self.said = time.monotonic()
        self.live: Progress | None = None
        if sys.stderr.isatty():
            self.live = Progress(
                TextColumn("{task.fields[name]:<12}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[latest]}"), TextColumn("time left"), TimeRemainingColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self.task = self.live.add_task("", total=total, name="", latest="")

    def __enter__(self) -> Bar:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

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
    """`global 78.65 %  personal 83.20 %`."""
    shown = [
        f"{kind} {100 * entry[kind]['accuracy']:.2f} %"
        for kind in tables.KINDS
        if kind in entry and entry[kind]["accuracy"] is not None
    ]
    return "  ".join(shown)


def print_run(record: dict[str, Any], out: Path) -> None:
    """The result of one run."""
    final, config, timing = record["final"], record["config"], record["timing"]
    algorithm, data, model = (config[k]["name"] for k in ("algorithm", "data", "model"))
    table = _table(
        f"{algorithm} on {data} with {model}, after {final['round']} rounds",
        ["model", "accuracy %", "loss", "train loss", "client mean %", "worst tenth %", "worst %"],
    )
    for kind in tables.KINDS:
        if kind not in final:
            continue
        entry = final[kind]
        own = entry["clients"] or {}
        numbers = [own.get(k) for k in ("mean", "worst_decile", "min")]
        table.add_row(
            kind, _percent(entry["accuracy"]), _number(entry["loss"]), _number(entry["train_loss"]),
            *(_percent(v) for v in numbers),
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
    if algorithm != "alone":
        console.print(
            f"What would each client reach alone? pfedme compare {algorithm} alone ...", highlight=False
        )
    console.print(
        f"Results: {out}/ (curves.png, clients.csv, record.json, model.safetensors)", soft_wrap=True
    )


def print_comparison(comparison: Comparison, out: Path) -> None:
    """The results of several runs, and what they say."""
    finals = comparison.finals
    first = next(iter(comparison.records.values()))[0]["config"]
    seeds = max(map(len, finals.values()))
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    what = f"{first['data']['name']}, {first['model']['name']}, {first['rounds']} rounds"
    title = f"{what}: test accuracy over all clients' rows{spread}"
    table = _table(title, tables.HEADER)
    for row in tables.rows(finals):
        table.add_row(*row)
    console = _console()
    console.print(table)
    for sentence in tables.sentences(finals):
        console.print(sentence, highlight=False)
    console.print(f"Figure: {out}/compare.png   Table: {out}/compare.csv   Runs: {out}/", soft_wrap=True)


def print_description(name: str, description: dict[str, Any], federation: Federation) -> None:
    """What a federation looks like."""
    d, console = description, _console()
    sizes, labels = d["rows_per_client"], d["labels_per_client"]
    per_label = (
        f"{labels['min']}" if labels["min"] == labels["max"] else f"{labels['min']} to {labels['max']}"
    )
    lines = [
        ("clients", f"{d['clients']:,}"),
        ("rows", f"{d['rows']:,} ({d['train_rows']:,} to train on, {d['test_rows']:,} to test on)"),
        ("rows per client", f"{sizes['min']:,} to {sizes['max']:,}, median {sizes['median']:,.0f}"),
        ("features", f"{d['features']:,}"),
        ("classes", f"{d['classes']}"),
        ("labels per client", per_label),
    ]
    if d["note"]:
        lines.append(("rows are", d["note"]))
    table = _table(name, ["", ""])
    table.show_header = False
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if d["clients"] <= 40:
        shares = _table("rows of each label, by client", ["client", "rows", *map(str, range(d["classes"]))])
        for i, counts in enumerate(federation.label_counts()):
            cells = (f"{c:,}" if c else "·" for c in counts)
            shares.add_row(str(federation.ids[i]), f"{federation.count[i]:,}", *cells)
        console.print(shares)
    for warning in d["warnings"]:
        console.print(f"Note: {warning}", highlight=False)


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
