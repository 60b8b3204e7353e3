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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- the models that clients choose


CHOOSING = ("--personalize", "auto:steps=5,folds=2")


def personalized(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "personalized.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_models_that_clients_choose_are_a_row_of_the_table(
    seeds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", "alone:l2=model", "fedavg", "pfedme", *TINY, *GIVEN, *CHOOSING]
    assert main([*argv, "--seeds", str(seeds), "--out", str(tmp_path)]) == 0
    found = [personalized(tmp_path / "fedavg" / f"seed-{k}") for k in range(seeds)]
    assert not (tmp_path / "pfedme/seed-0/personalized.json").exists(), "the first shared model is enough"
    accuracy = [one["methods"]["recommended"]["accuracy"] for one in found]
    row = table(tmp_path)["recommended", "personal"]
    assert float(row["mean"]) == pytest.approx(np.mean(accuracy), abs=1e-6)
    assert int(row["seeds"]) == seeds
    document = json.loads((tmp_path / "compare.json").read_text())
    assert document["recommended"]["from"] == "fedavg"
    assert [one["accuracy"] for one in document["recommended"]["seeds"]] == accuracy
    assert [one["gain"] for one in document["recommended"]["seeds"]] == [one["gain"] for one in found]
    verdict = document["verdict"]
    assert (verdict["joined"], verdict["seeds"]) == ("the models that clients choose", seeds)
    gains = [one["gain"]["alone"]["mean"] for one in found]
    assert verdict["gain"] == pytest.approx(np.mean(gains), abs=1e-6)
    # Clients train alone as in the comparison's own run.
    alone = [record(tmp_path / "alone" / f"seed-{k}")["final"]["personal"] for k in range(seeds)]
    for one, run in zip(found, alone, strict=True):
        assert one["methods"]["alone"]["accuracy"] == pytest.approx(run["accuracy"])
    printed = capsys.readouterr().out
    assert "recommended: what each client chooses on validation rows, from fedavg's shared model" in " ".join(
        printed.split()
    )
    assert ("95 % interval" in printed.split("recommended: ")[1].split("Cannot")[0]) == (seeds == 1)


@pytest.mark.slow
def test_alone_has_the_l2_that_its_clients_chose(tmp_path: Path):
    argv = ["compare", "fedavg", "alone", *TINY, *GIVEN, *CHOOSING, "--out", str(tmp_path)]
    assert main(argv) == 0
    run = record(tmp_path / "alone/seed-0")
    assert len(run["auto"]["l2"]) == 4
    got = personalized(tmp_path / "fedavg/seed-0")["methods"]["alone"]["accuracy"]
    assert got == pytest.approx(run["final"]["personal"]["accuracy"])


@pytest.mark.slow
def test_a_choice_that_was_interrupted_is_made_when_the_comparison_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    argv = ["compare", "fedavg", "alone:l2=model", *TINY, *GIVEN, *CHOOSING]
    assert main([*argv, "--out", str(tmp_path / "calm")]) == 0

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with monkeypatch.context() as now:
        now.setattr("pfedme.personalization.afterwards.offer", stopped)
        assert main([*argv, "--out", str(out)]) == 130
    assert ("recommended", "personal") not in table(out)
    assert main(["resume", str(out)]) == 0
    assert (out / "compare.csv").read_text() == (tmp_path / "calm/compare.csv").read_text()


@pytest.mark.slow
def test_quantities_have_the_row_too(tmp_path: Path):
    rng = np.random.default_rng(0)
    x, who = rng.normal(size=60), np.repeat(["a", "b", "c"], 20)
    y = 2 * x + 0.1 * rng.normal(size=60)
    lines = [f"{c},{a:.4f},{b:.4f}" for c, a, b in zip(who, x, y, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["who,x,y", *lines]) + "\n")
    given = ["--data", str(tmp_path / "rows.csv"), "--client", "who", "--label", "y", "--rounds", "3"]
    argv = ["compare", "fedavg", "alone:l2=model", *given, "--R", "2", *GIVEN, *CHOOSING]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    row = table(tmp_path / "out")["recommended", "personal"]
    want = personalized(tmp_path / "out/fedavg/seed-0")["methods"]["recommended"]["r2"]
    assert (float(row["mean"]), row["rmse"], row["metric"]) == (pytest.approx(want, abs=1e-6), "", "r2")


def test_without_a_shared_model_there_is_nothing_to_choose_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["compare", "alone", "pooled", *TINY, *CHOOSING, "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "add fedavg" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
