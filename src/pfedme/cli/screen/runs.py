"""The results of runs and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pfedme.cli.screen.layout import print_table, standard_output
from pfedme.cli.screen.numbers import decimal, measured, with_half_width
from pfedme.cli.screen.verdict import print_verdict
from pfedme.data.schema import is_number
from pfedme.engine.measure import ACCURACY, R2, Measure, measure_of
from pfedme.report import tables

if TYPE_CHECKING:
    from pfedme.data.federation import Federation
    from pfedme.training.compare import Comparison


def print_run(record: dict[str, Any], out: Path, federation: Federation | None) -> None:
    """Prints the result of one run; `federation` is None if its rows are elsewhere."""
    final, config = record["final"], record["config"]
    algorithm, model = config["algorithm"]["name"], config["model"]["name"]
    rows, header, spare = run_table(final, measure_of(final))
    console = standard_output()
    _print_choice_of_metric(record, console)
    title = f"{algorithm} on {tables.data_name(config['data'])} with {model}, after {final['round']} rounds"
    print_table(console, title, header, rows, spare)
    if any("±" in cell for row in rows for cell in row):
        console.print("± is the half-width of a 95 % interval: over test rows, and over clients.")
    if inner := final.get("inner"):
        console.print(_about_inner_problem(inner))
    for sentence in record.get("auto", {}).get("sentences", ()):
        console.print(sentence, highlight=False)
    for sentence in tables.privacy_sentences(record["privacy"])[:1] if record.get("privacy") else ():
        console.print(sentence, highlight=False)
    console.print(_about_time(record["timing"]))
    if federation:
        for sentence in (*_about_task(config, federation), *_about_alone(algorithm, federation.clients)):
            console.print(sentence, highlight=False)
    console.print(
        f"Results: {out}/ (curves.png, clients.csv, record.json, model.safetensors)", soft_wrap=True
    )
    console.print(f"Report: {out}/report.html", soft_wrap=True, highlight=False)


def _print_choice_of_metric(record: dict[str, Any], console: Console) -> None:
    """Prints why the metric was chosen, unless it was given."""
    if why := record.get("metric", {}).get("why"):
        console.print(why, highlight=False)


def _about_inner_problem(inner: dict[str, Any]) -> str:
    """Says how well the inner problem was solved."""
    return (
        f"Inner problem: {inner['steps']:.3g} steps to ‖∇h‖² = {inner['residual']:.2g} on average over "
        f"clients, {inner['residual_max']:.2g} at most."
    )


def _about_time(timing: dict[str, Any]) -> str:
    """Says where the time went."""
    return (
        f"Time: {timing['train_s']:.1f} s training, {timing['eval_s']:.1f} s evaluation, "
        f"{timing['compile_s']:.1f} s compilation."
    )


def _about_task(config: dict[str, Any], federation: Federation) -> list[str]:
    """Says how the label was interpreted, if it could have been interpreted differently."""
    schema = federation.schema
    given = config["data"].get("task", "by the data's name")
    if not schema or given is not None or not all(map(is_number, schema.labels)):
        return []
    other = {
        "regression": "a class, use --task classification",
        "classification": "a quantity, use --task regression",
    }
    return [f"'{schema.label}' was treated as a {schema.task} label; if it is {other[schema.task]}."]


def _about_alone(algorithm: str, clients: int) -> list[str]:
    """Suggests what to compare the run with."""
    if clients == 1:
        return ["There was only one client, so there was nothing to federate."]
    if algorithm == "alone":
        return []
    return [f"How would each client do alone? To find out: pfedme compare {algorithm} alone ..."]


def run_table(final: dict[str, Any], what: Measure) -> tuple[list[list[str]], list[str], list[str]]:
    """The models of a run: rows, header, and the columns that a narrow terminal can drop."""
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
            with_half_width(what, what.of(entry), half),
            *(ACCURACY.text(ACCURACY.of(entry)) for _ in accuracy),
            *(measured(entry["rmse"]) for _ in rmse),
            decimal(entry["loss"]),
            decimal(entry["train_loss"]),
            with_half_width(what, own[0], over_clients),
            *map(what.text, own[1:]),
        ])  # fmt: skip
    return rows, header, ["train loss", means[2], "loss", means[1], *rmse, means[0]]


def print_comparison(comparison: Comparison, out: Path) -> None:
    """Prints the results of several runs, and what they show."""
    finals = comparison.finals
    first = next(iter(comparison.records.values()))[0]
    seeds = max(map(len, finals.values()))
    best = comparison.best(out)
    console = standard_output()
    _print_choice_of_metric(first, console)
    header = tables.header(finals)
    title = _title(comparison, first["config"], seeds)
    print_table(console, title, header, tables.rows(finals, best), spare=[header[4], header[2]])
    if seeds > 1:
        console.print("± is the half-width of a 95 % interval over seeds.")
    if best:
        console.print("* marks what beats all others in its column beyond noise, paired over clients.")
    for sentence in _still_improving(comparison):
        console.print(sentence, highlight=False)
    if comparison.recommended:
        console.print(tables.recommended_sentence(comparison.recommended), highlight=False)
    print_verdict(comparison.verdict, console)
    for sentence in tables.sentences(finals, comparison.verdict):
        console.print(sentence, highlight=False)
    console.print(f"Figure: {out}/compare.png   Table: {out}/compare.csv   Runs: {out}/", soft_wrap=True)
    console.print(f"Report: {out}/report.html", soft_wrap=True, highlight=False)


def _title(comparison: Comparison, config: dict[str, Any], seeds: int) -> str:
    """Says what was compared, and by which metric."""
    where = f"{tables.data_name(config['data'])}, {config['model']['name']}, {_rounds(comparison)}"
    title = f"{where}: test {tables.measure(comparison.finals).name} over all clients' rows"
    return title + (f", mean of {seeds} seeds" if seeds > 1 else "")


def _still_improving(comparison: Comparison) -> list[str]:
    """A sentence for each algorithm whose budget ended before its loss had stopped falling."""
    found = []
    for name, records in comparison.records.items():
        auto = [record["auto"] for record in records if record.get("auto", {}).get("improving")]
        if auto:
            found.append(f"{name}: {auto[0]['sentences'][-1]}")
    return found


def _rounds(comparison: Comparison) -> str:
    """`100 rounds`, or `47 to 191 rounds`."""
    rounds = [record["config"]["rounds"] for records in comparison.records.values() for record in records]
    low, high = min(rounds), max(rounds)
    return f"{low} rounds" if low == high else f"{low} to {high} rounds"
