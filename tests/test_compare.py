"""Comparisons: which options go where, what the table says, and that nobody spoils the others."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedme.cli import main
from pfedme.training.compare import Comparison

TINY = shlex.split(
    "--data synthetic:clients=4,rows=40,features=5,classes=3 --rounds 3 --cohort 2 --R 2 --B 5"
)
GIVEN = ("--eta", "0.02")
"""A step size, where it is not the point how one is found."""


def record(folder: Path) -> dict[str, Any]:
    """A run's record."""
    return json.loads((folder / "record.json").read_text())


def settings(folder: Path) -> dict[str, Any]:
    """A run's hyperparameters."""
    return record(folder)["config"]["algorithm"]


def table(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of compare.csv by algorithm and model."""
    rows = csv.DictReader(io.StringIO((folder / "compare.csv").read_text()))
    return {(row["algorithm"], row["evaluated"]): row for row in rows}


def test_an_option_applies_to_those_that_have_it(tmp_path: Path):
    assert (
        main(["compare", "pfedme", "fedavg", *TINY, "--lam", "7", "--eta", "0.02", "--out", str(tmp_path)])
        == 0
    )
    pfedme, fedavg = (settings(tmp_path / name / "seed-0") for name in ("pfedme", "fedavg"))
    assert (pfedme["lam"], pfedme["eta"], pfedme["R"]) == (7.0, 0.02, 2)
    assert (fedavg["eta"], fedavg["R"], fedavg["B"]) == (0.02, 2, 5)
    assert "lam" not in fedavg


def test_an_option_of_one_algorithm_wins_over_the_common_one(tmp_path: Path):
    argv = ["compare", "fedavg:eta=0.5,beta=2", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]
    assert main(argv) == 0
    fedavg, alone = (settings(tmp_path / name / "seed-0") for name in ("fedavg", "alone"))
    assert (fedavg["eta"], fedavg["beta"]) == (0.5, 2.0)
    assert alone["eta"] == 0.02


def test_blanks_in_an_option_of_one_algorithm_do_not_lose_it(tmp_path: Path):
    argv = ["compare", "fedavg: eta = 0.5", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]
    assert main(argv) == 0
    assert settings(tmp_path / "fedavg" / "seed-0")["eta"] == 0.5


def test_the_same_algorithm_twice_gets_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = ["fedavg:eta=0.5", "alone:l2=model", "fedavg:eta=0.01"]
    argv = ["compare", *names, *TINY, *GIVEN, "--out", str(tmp_path)]
    assert main(argv) == 0
    assert settings(tmp_path / "fedavg-1" / "seed-0")["eta"] == 0.5
    assert settings(tmp_path / "fedavg-2" / "seed-0")["eta"] == 0.01
    names = [name for name, _ in table(tmp_path)]
    assert list(dict.fromkeys(names)) == ["fedavg-1", "alone", "fedavg-2"]
    printed = capsys.readouterr().out
    assert "fedavg-1" in printed
    assert "fedavg-2" in printed


def test_seeds_give_means_standard_deviations_and_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "three"
    assert main(["compare", "pfedme", "alone", *TINY, "--seeds", "3", "--seed", "5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = table(out)
    assert set(rows) == {
        ("pfedme", "global"), ("pfedme", "local"), ("pfedme", "personal"), ("alone", "personal"),
    }  # fmt: skip
    for (name, kind), row in rows.items():
        finals = [record(out / name / f"seed-{seed}")["final"][kind] for seed in (5, 6, 7)]
        accuracies = [final["accuracy"] for final in finals]
        assert float(row["mean"]) == pytest.approx(np.mean(accuracies), abs=1e-6)
        assert float(row["std"]) == pytest.approx(np.std(accuracies, ddof=1), abs=1e-6)
        worst = [final["clients"]["worst_decile"] for final in finals]
        assert float(row["worst_decile"]) == pytest.approx(np.mean(worst), abs=1e-6)
        assert row["seeds"] == "3"
        half = 4.302653 * np.std(accuracies, ddof=1) / 3**0.5  # t of two degrees of freedom
        assert float(row["half_width"]) == pytest.approx(half, abs=1e-6)
        assert f"{100 * np.mean(accuracies):.2f} ± {100 * half:.2f}" in printed
    assert "mean of 3 seeds" in " ".join(printed.split())


def test_a_run_of_a_comparison_is_the_run_by_itself(tmp_path: Path):
    assert main(["compare", "fedavg", "pfedme", *TINY, "--seed", "3", "--out", str(tmp_path / "both")]) == 0
    for name in ("pfedme", "fedavg"):
        assert main(["run", name, *TINY, "--seed", "3", "--out", str(tmp_path / name)]) == 0
        one, other = record(tmp_path / name), record(tmp_path / "both" / name / "seed-3")
        assert one["final"] == other["final"]
        assert one["config"] == other["config"]


def test_algorithms_start_from_the_same_model(tmp_path: Path):
    assert main(["compare", "fedavg", "pfedme", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]) == 0
    first = {name: record(tmp_path / name / "seed-0")["history"][0] for name in ("pfedme", "fedavg", "alone")}
    assert first["pfedme"]["global"] == first["fedavg"]["global"]
    # What each client has alone before its first step is the shared model; sums differ in their order.
    assert first["alone"]["personal"]["accuracy"] == first["fedavg"]["global"]["accuracy"]
    assert first["alone"]["personal"]["loss"] == pytest.approx(first["fedavg"]["global"]["loss"], rel=1e-5)


def test_json_prints_one_object_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["compare", "fedavg", "alone", *TINY, "--seeds", "2", "--json", "--out", str(tmp_path)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    results = json.loads(printed)["results"]
    for name in ("fedavg", "alone"):
        assert results[name] == [record(tmp_path / name / f"seed-{seed}")["final"] for seed in (0, 1)]


def test_a_comparison_leaves_a_table_and_a_figure(tmp_path: Path):
    assert main(["compare", "fedavg", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"compare.json", "compare.csv", "compare.png", "report.html", "fedavg", "alone"}
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("as_json", [False, True])
def test_one_that_diverges_does_not_spoil_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
):
    argv = ["compare", "fedavg:eta=1e38", "alone", *TINY, "--out", str(tmp_path)]
    assert main([*argv, "--json"] if as_json else argv) == 1
    printed, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "fedavg diverged in round 0" in err
    assert record(tmp_path / "fedavg" / "seed-0")["status"] == "diverged"
    assert record(tmp_path / "alone" / "seed-0")["status"] == "finished"
    assert set(table(tmp_path)) == {("alone", "personal")}
    assert (tmp_path / "compare.png").exists()
    if as_json:
        assert json.loads(printed)["results"]["fedavg"] == []
        assert len(json.loads(printed)["results"]["alone"]) == 1
    else:
        (line,) = [line for line in printed.splitlines() if line.split()[:1] == ["fedavg"]]
        assert "diverged" in line


def test_a_comparison_of_which_all_diverge_still_ends_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", "fedavg", "alone", *TINY, "--eta", "1e38", "--out", str(tmp_path)]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "fedavg diverged" in err
    assert "alone diverged" in err


def test_a_seed_that_diverges_is_left_out_of_the_mean_and_reported():
    entry = {"round": 3, "personal": {"accuracy": 0.5}}
    good = {"final": entry, "history": [entry], "reason": None}
    bad = {"final": None, "history": [], "reason": "It diverged."}
    comparison = Comparison({"alone": [good, bad], "pfedme": [good, good]})
    assert comparison.finals == {"alone": [entry], "pfedme": [entry, entry]}
    assert comparison.histories == {"alone": [[entry]], "pfedme": [[entry], [entry]]}
    assert comparison.failures == ["It diverged."]


def test_a_comparison_is_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["compare", "fedavg", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]
    assert main(argv) == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path} holds a comparison" in err
    assert "--force" in err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert main([*argv, "--eta", "0.02", "--force"]) == 0
    assert settings(tmp_path / "fedavg" / "seed-0")["eta"] == 0.02


def test_a_finished_comparison_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "fedavg", "alone:l2=model", *TINY, *GIVEN, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert main(["resume", str(tmp_path)]) == 0
    assert capsys.readouterr().out == first
