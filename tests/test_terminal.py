"""What a person sees on a terminal of 80 columns: whole numbers, a bar that is a bar, a sane time left."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pfedme.cli import main
from pfedme.cli.screen import bars, runs
from pfedme.cli.screen.layout import print_table
from pfedme.engine.measure import MEASURES, MetricName
from pfedme.livebar import BAR, Live, Pace, in_words
from pfedme.training.compare import Comparison
from pfedme.training.execution import Progress

few = settings(derandomize=True, deadline=None, max_examples=60)


def screen(width: int = 80) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=False, _environ={})


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@few
@given(
    st.lists(st.text("abcd ", min_size=1, max_size=20), min_size=2, max_size=9, unique=True),
    st.lists(st.floats(-1e5, 1e5), min_size=9, max_size=9),
    st.integers(40, 120),
)
def test_a_table_is_as_wide_as_the_screen_allows_and_cuts_no_number(header, values, width):
    header = [name.strip() or f"x{k}" for k, name in enumerate(header)]
    cells = [f"{value:.4f} ± {abs(value) / 7:.4f}" for value in values]
    console = screen(width)
    print_table(console, "a title", header, [["name", *cells[1 : len(header)]]])
    text = shown(console)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert cells[1] in text  # at least one number stays
    pieces = set(re.findall(r"-?\d+\.\d+ ± \d+\.\d+", text))
    assert pieces <= set(cells)


def test_columns_are_spared_in_the_order_that_was_given_and_named():
    header = ["model", *(f"column {k}" for k in range(8))]
    console = screen(50)
    print_table(console, "", header, [["global", *["0.1234 ± 0.0123"] * 8]], spare=["column 0", "column 2"])
    text = shown(console)
    told = re.search(r"A wider terminal also shows: (.*)\.", " ".join(text.split()))
    assert told
    assert told[1].split(", ") == [f"column {k}" for k in (0, 2, 4, 5, 6, 7)]
    wide = screen(300)
    print_table(wide, "", header, [["global", *["0.1234 ± 0.0123"] * 8]], spare=["column 0"])
    assert shown(wide).count("0.1234") == 8
    assert "wider" not in shown(wide)


def test_a_name_that_is_longer_than_the_screen_is_broken_and_not_cut():
    console = screen(40)
    name = "x" * 70
    print_table(console, "", ["client", "accuracy %", "loss"], [[name, "81.23", "0.1"]])
    text = shown(console)
    assert text.count("x") == 70
    assert "81.23" in text


def entry(key: str, value: float, half: float = 0.0123) -> dict[str, Any]:
    """A model's entry with everything that a finished run has."""
    own = {"mean": value, "std": half, "worst_decile": value, "min": value, "max": value, "half_width": half}
    return {
        "accuracy": 0.95, "rmse": 12345.6, "loss": 0.1234, "train_loss": 0.1234, "clients": own,
        "by_client": {key: own}, "half_width": {key: half}, key: value,
    }  # fmt: skip


@pytest.mark.parametrize("metric", list(MEASURES))
def test_a_run_and_a_comparison_fit_80_columns_whatever_they_are_judged_by(
    metric: MetricName, monkeypatch: pytest.MonkeyPatch
):
    kinds = ("global", "local", "personal")
    value = 12345.678 if metric in ("rmse", "mae") else 0.98765
    final = {"round": 100, "metric": metric} | {kind: entry(metric, value) for kind in kinds}
    final["baseline"] = {"label": "no outcome at all"} | entry(metric, value)
    config = {
        "algorithm": {"name": "per-fedavg"}, "model": {"name": "mlr"}, "rounds": 100, "seed": 0,
        "data": {"name": "table", "path": "/a/table/with/a/long/name_of_a_file.csv", "label": "outcome"},
    }  # fmt: skip
    record = {
        "final": final, "config": config, "timing": {"train_s": 1.0, "eval_s": 1.0, "compile_s": 1.0},
        "metric": {"key": metric, "why": "Only 4.5 % of the rows have 'yes', so accuracy says little."},
    }  # fmt: skip
    what = MEASURES[metric]
    number = what.text(what.scale * value)
    for show in (
        lambda: runs.print_run(record, Path("out"), None),
        lambda: runs.print_comparison(
            Comparison({"per-fedavg": [record] * 3, "fedavg": [record] * 3}), Path("nowhere")
        ),
    ):
        console = screen(80)
        monkeypatch.setattr(runs, "standard_output", lambda console=console: console)
        show()
        text = shown(console)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert text.count(number) >= 4
        assert "± is the half-width of a 95 % interval" in text


@few
@given(
    st.integers(40, 200), st.text("abcdef", max_size=40), st.integers(0, 10**6),
    st.lists(st.text("xyz ", max_size=60), max_size=3),
)  # fmt: skip
def test_a_bar_keeps_its_width_and_texts_give_way(width, name, total, latest):
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        _environ={"TERM": "xterm"},
    )
    bar = Live("", total, console)
    bar.show(name, total / 2, total, latest)
    assert bar.live is not None
    console.print(bar.live.get_renderable())
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(console))
    (line,) = plain.rstrip("\n").splitlines()
    assert sum(line.count(part) for part in "━╸╺") == BAR
    assert f"{total // 2}/{total}" in line
    assert "…" not in line


def test_without_a_known_total_the_bar_counts(capsys: pytest.CaptureFixture[str]):
    console = Console(width=80, file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    bar = Live("", None, console)
    assert bar.show("fedavg", 40, None) == ""
    assert bar.live is not None
    plain = screen()
    plain.print(bar.live.get_renderable())
    assert "40/?" in shown(plain)
    lines = bars.Bar(total=None)
    lines("fedavg", 0, Progress(0, 0, {"round": 0}))
    assert capsys.readouterr().err.startswith("fedavg round 0: ")


def test_rounds_of_a_pilot_do_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.0)
    bar = bars.Bar(total=None)
    for t in (4, 12, 6):
        bar("fedavg", 0, Progress(t, 1500, None, pilot=True))
    assert bar.rounds == {}
    said = capsys.readouterr().err.splitlines()
    assert said == [f"fedavg: finding out how long to train, round {t}" for t in (4, 12, 6)]
    bar("fedavg", 0, Progress(0, 48, {"round": 0}))
    assert capsys.readouterr().err.startswith("fedavg round 0/48")


@few
@given(st.floats(0.01, 50), st.floats(0, 200), st.integers(5, 60))
def test_the_time_left_at_a_steady_pace_is_what_is_left_whatever_the_first_step_took(pace, compiling, total):
    times = [0.0, *(compiling + pace * k for k in range(1, total + 1))]
    clock = Pace(clock=iter(times).__next__)
    told = [clock.left(done, total) for done in range(total + 1)]
    assert told[:2] == [None, None]
    for done, left in enumerate(told):
        assert left is None or left == pytest.approx(pace * (total - done))
    assert told[-1] in (None, 0)
    assert all(left is None for left in told) == (pace * (total - 1) < 1)


def test_time_in_words_is_never_wild():
    assert in_words(0) == "0 s left"
    for seconds in (1, 59, 61, 3599, 3601, 86400, 1e7):
        assert re.fullmatch(r"\d+ (s|min|days|h \d+ min) left", in_words(seconds))


def test_resumed_runs_do_not_count_for_the_pace(capsys: pytest.CaptureFixture[str]):
    bar = bars.Bar(total=2000)
    bar("first", 0, Progress(1000, 1000, None))  # was finished before
    bar.pace.clock = iter([0.0, 5.0, 15.0]).__next__
    bar.pace.at = None
    for done in (0, 10, 20):
        bar("second", 1, Progress(done, 1000, {"round": done}))
    assert bar.pace.seconds / bar.pace.steps == pytest.approx(1.0)


@pytest.mark.parametrize("command", ["run", "tune", "personalize", "export"])
def test_help_lists_the_values_of_every_choice(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    wanted = {
        "run": [
            "{uniform,samples}",
            "{random,cycled}",
            "{exact,first-order,difference}",
            "balanced_accuracy, auc",
        ],
        "tune": ["{tpe,grid}", "{balanced}"],
        "personalize": ["{classification,regression}"],
        "export": ["{recommended,personal,global}"],
    }
    assert all(choice in text for choice in wanted[command])
