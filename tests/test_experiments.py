"""The paper's experiments in miniature: every path runs, survives an interruption, and says what it must."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pfedme.algorithms import FedAvg, PerFedAvg, PFedMe
from pfedme.cli import main
from pfedme.errors import InputError, Interrupted
from pfedme.experiments import paper, table1
from pfedme.experiments.effects import BASE, EFFECTS
from pfedme.experiments.finding import Finding, judge
from pfedme.experiments.paper import CELLS, FULL, PRINTED, QUICK, TINY, Data, Kind, Scale
from pfedme.experiments.reproduce import EXPERIMENTS, KNOWN, expand, reproduce
from pfedme.experiments.study import Estimate, PlannedRun, Study, best, last
from pfedme.runs.folder import Folder
from pfedme.training.compare import Watch
from pfedme.training.execution import Progress

VERDICTS = {"holds", "holds in part", "does not hold", "not visible"}


@dataclasses.dataclass(frozen=True)
class OneCell(Scale):
    """One of the table's cells alone."""

    @property
    def cells(self) -> tuple[tuple[Data, Kind], ...]:
        return (CELLS[3],)


ONE_CELL = OneCell(**dataclasses.asdict(TINY))


class Reproduced(NamedTuple):
    """What was carried out, and what it found."""

    out: Path
    findings: list[Finding]
    names: list[str]
    scale: Scale

    @property
    def complete(self) -> bool:
        """Whether all experiments were carried out."""
        return self.names == ["all"]


@pytest.fixture(scope="module", params=["a part", pytest.param("everything", marks=pytest.mark.slow)])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """Table 1 and a figure, or all experiments, with a few rounds on a few rows."""
    names, scale = (["table1", "figure7"], ONE_CELL) if request.param == "a part" else (["all"], TINY)
    out = tmp_path_factory.mktemp("reproduction")
    return Reproduced(out, reproduce(names, scale, out, f"pfedme reproduce {' '.join(names)}"), names, scale)


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


# --- what is run


def test_full_settings_are_the_papers():
    wish = table1.cell_wishes(FULL, "synthetic", "mlr", "written")["pfedme"]
    algorithm = wish.run.algorithm
    assert isinstance(algorithm, PFedMe)
    assert (algorithm.lam, algorithm.eta, algorithm.alpha, algorithm.beta) == (20, 0.01, 0.01, 2)
    assert (algorithm.R, algorithm.K, algorithm.B) == (20, 5, 20)
    assert (wish.run.rounds, wish.run.cohort, wish.seeds) == (600, 10, 10)
    assert FULL.rounds("mnist") == 800
    assert (BASE.eta, BASE.alpha, BASE.lam, BASE.beta) == (0.005, 0.09, 15, 1)


def test_released_is_a_set_of_fields():
    released = table1.cell_wishes(FULL, "mnist", "dnn", "released")
    written = table1.cell_wishes(FULL, "mnist", "dnn", "written")
    for name in ("pfedme", "fedavg", "per-fedavg"):
        assert (released[name].run.algorithm.aggregation, released[name].run.algorithm.batches) == (
            "samples", "cycled",
        )  # fmt: skip
        assert (written[name].run.algorithm.aggregation, written[name].run.algorithm.batches) == (
            "uniform", "random",
        )  # fmt: skip
        strengths = [getattr(one[name].run.model, "l2", None) for one in (released, written)]
        assert strengths == [0.001 if name == "pfedme" else 0, 0]
        assert str(released[name].run.data) != str(written[name].run.data)
    old, new = released["per-fedavg"].run.algorithm, written["per-fedavg"].run.algorithm
    assert isinstance(old, PerFedAvg)
    assert isinstance(new, PerFedAvg)
    assert (old.hessian, old.adapt_on, new.hessian, new.adapt_on) == ("first-order", "test", "exact", "train")


@pytest.mark.parametrize("name", ["pfedme", "fedavg", "per-fedavg"])
@pytest.mark.parametrize("cell", CELLS)
def test_each_step_between_the_versions_changes_one_thing(cell: tuple[str, str], name: str):
    steps = table1.ladder(FULL, *cell, name)
    assert steps[0][1].run == table1.cell_wishes(FULL, *cell, "released")[name].run
    assert steps[-1][1].run == table1.cell_wishes(FULL, *cell, "written")[name].run

    def settings(step: table1.Step) -> dict[str, object]:
        _, wish, model, pick = step
        run = wish.run.to_json()
        algorithm = run.pop("algorithm")
        del run["eval_every"]  # how often it is looked at changes no result
        return {**algorithm, **run, "evaluated": model, "pick": pick}

    for before, after in itertools.pairwise(steps):
        a, b = settings(before), settings(after)
        assert len([key for key in a if a[key] != b[key]]) == 1


def test_the_printed_table_is_complete():
    assert len(PRINTED) == 16
    assert PRINTED["mnist", "dnn", "pfedme", "personal"] == 99.46
    assert table1.printed("released", "mnist", "dnn", "pfedme", "local") == 99.46
    assert table1.printed("written", "mnist", "dnn", "pfedme", "local") is None


def test_quick_needs_a_tenth_of_the_rounds():
    for name, experiment in EXPERIMENTS.items():
        full, quick = (
            sum(w.run.rounds * w.seeds for w in experiment.wishes(scale)) for scale in (FULL, QUICK)
        )
        assert quick <= full / 10, name


def test_gradients_of_a_round():
    assert PFedMe(R=20, K=5).gradients == 100
    assert FedAvg(R=20).gradients == 20
    assert PerFedAvg(R=20).gradients == 80
    assert PerFedAvg(R=20, hessian="first-order").gradients == 40


def test_names_stand_for_experiments():
    assert expand(["figure2", "table1"]) == ["table1", "figure2"]
    assert expand(["audit"]) == expand(["all"]) == list(EXPERIMENTS)
    with pytest.raises(InputError, match="did you mean 'table1'"):
        expand(["table2"])
    assert {f"figure{k}" for k in range(1, 8)} | {"table1", "audit", "all"} <= set(KNOWN)


# --- numbers


def test_an_estimate_is_students_interval():
    values = np.random.default_rng(0).normal(50, 2, 10)
    estimate = Estimate.of(list(values))
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.ci95 == pytest.approx(2.262157 * values.std(ddof=1) / math.sqrt(10), rel=1e-6)
    assert math.isnan(Estimate.of([3.0]).ci95)
    assert str(Estimate.of([])) == "diverged"


def test_the_last_and_the_best_round():
    assert (last([0.3, 0.9, 0.5]), best([0.3, 0.9, 0.5])) == (0.5, 0.9)


def test_verdicts():
    assert judge({"a": True, "b": True}) == "holds"
    assert judge({"a": True, "b": False}) == "holds in part"
    assert judge({"a": False}) == "does not hold"


def test_an_effect_is_judged_by_its_numbers():
    labels = list(EFFECTS["figure1"].values)
    speeds = {
        (model, kind, label): 50.0 + place
        for model in ("mlr", "dnn")
        for kind in ("global", "personal")
        for place, label in enumerate(labels)
    }
    assert judge(EFFECTS["figure1"].checks(speeds)) == "holds"
    assert judge(EFFECTS["figure1"].checks({k: -v for k, v in speeds.items()})) == "does not hold"


def test_a_value_that_diverges_is_no_better_than_another():
    nan = float("nan")
    values = {"K = 1": 90.0, "K = 3": 91.0, "K = 5": 91.0, "K = 7": 91.0, "K = 20": nan}
    speeds = {
        (m, k, label): v
        for m in ("mlr", "dnn")
        for k in ("global", "personal")
        for label, v in values.items()
    }
    assert judge(EFFECTS["figure2"].checks(speeds)) == "holds"
    batches = {"|D| = 5": 90.0, "|D| = 20": 91.0, "|D| = 50": 91.0, "|D| = 100": nan}
    speeds = {
        (m, k, label): v for m in ("mlr",) for k in ("global", "personal") for label, v in batches.items()
    }
    assert judge(EFFECTS["figure3"].checks(speeds)) == "holds"


# --- what is written


@pytest.mark.slow
def test_every_claim_gets_a_verdict(done: Reproduced):
    out, findings = done.out, done.findings
    page = (out / "audit.md").read_text() if done.complete else ""
    assert len({f.claim for f in findings}) == len(findings)
    for finding in findings:
        assert finding.verdict in VERDICTS
        assert finding.numbers
        assert f"## {finding.claim}" in page or not done.complete
    claims = " ".join(f.claim for f in findings)
    subjects = (
        "Table 1", *(f"Figure {k}" for k in range(1, 8)), "Proposition 1", "Lemma 1", "Theorem 1",
        "Corollary 1", "Theorem 2", "Corollary 2",
    ) if done.complete else ("Table 1", "Figure 7")  # fmt: skip
    for subject in subjects:
        assert subject in claims
    said = json.loads((out / "results" / "findings.json").read_text())
    assert [f["claim"] for f in said] == [f.claim for f in findings]


def test_table_1_has_its_columns_and_rows(done: Reproduced):
    out = done.out
    table = rows(out / "results" / "table1.csv")
    assert list(table[0]) == [
        "version", "data", "model", "algorithm", "evaluated", "paper", "mean", "ci95", "seeds",
    ]  # fmt: skip
    assert {(r["version"], r["data"], r["model"]) for r in table} == {
        (version, *cell) for version in ("released", "written") for cell in done.scale.cells
    }
    for name, kinds in {
        "pfedme": {"global", "local", "personal"}, "per-fedavg": {"global", "local", "personal"},
        "fedavg": {"global", "local"}, "alone": {"personal"}, "fedavg-ft": {"global", "local", "personal"},
    }.items():  # fmt: skip
        own = {r["evaluated"] for r in table if r["algorithm"] == name and r["version"] == "written"}
        assert own == kinds
    for row in table:
        assert 0 <= float(row["mean"]) <= 100
        assert row["seeds"] == "2"


def test_a_row_of_table_1_is_what_its_runs_recorded(done: Reproduced):
    out = done.out
    study = Study(out, "")
    wish = table1.cell_wishes(done.scale, "synthetic", "dnn", "written")["alone"]
    finals = [r["final"]["personal"]["accuracy"] for r in study.records(wish)]
    (row,) = [
        r
        for r in rows(out / "results" / "table1.csv")
        if (r["version"], r["data"], r["model"], r["algorithm"]) == ("written", "synthetic", "dnn", "alone")
    ]
    assert float(row["mean"]) == pytest.approx(100 * np.mean(finals), abs=1e-4)


def test_every_result_says_what_made_it(done: Reproduced):
    out = done.out
    files = {p.name for p in (out / "results").iterdir()} - {"provenance.json"}
    notes = json.loads((out / "results" / "provenance.json").read_text())
    assert set(notes) == files
    for k in range(1, 8) if done.complete else (7,):
        assert (out / "results" / f"figure{k}.png").read_bytes().startswith(b"\x89PNG")
    for note in notes.values():
        assert set(note) == {"command", "version", "seeds", "date"}
    for page in (out / "results").glob("*.md"):
        assert f"pfedme reproduce {' '.join(done.names)}" in page.read_text()


def test_differences_end_where_the_written_table_stands(done: Reproduced):
    out = done.out
    steps = rows(out / "results" / "differences.csv")
    assert {(r["data"], r["model"], r["algorithm"]) for r in steps} == {
        (*cell, name) for cell in done.scale.cells for name in ("pfedme", "fedavg", "per-fedavg")
    }
    table = {
        (r["data"], r["model"], r["algorithm"], r["evaluated"]): float(r["mean"])
        for r in rows(out / "results" / "table1.csv")
        if r["version"] == "written"
    }
    for cell in done.scale.cells:
        for name, kind in (("pfedme", "personal"), ("fedavg", "global"), ("per-fedavg", "personal")):
            own = [r for r in steps if (r["data"], r["model"], r["algorithm"]) == (*cell, name)]
            assert float(own[-1]["mean"]) == pytest.approx(table[*cell, name, kind], abs=1e-3)
            total = sum(float(r["change"]) for r in own[1:])
            assert total == pytest.approx(float(own[-1]["mean"]) - float(own[0]["mean"]), abs=1e-2)


def test_what_is_recorded_is_not_run_again(done: Reproduced):
    out, findings = done.out, done.findings
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    again = reproduce(["table1", "figure7"], done.scale, out, "pfedme reproduce table1 figure7")
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()} == before
    verdicts = {f.claim: f for f in findings}
    assert all(verdicts[f.claim].numbers == f.numbers for f in again)


@pytest.mark.slow
def test_what_is_recorded_is_told_before_the_first_run(tmp_path: Path):
    cell = [
        dataclasses.replace(w, seeds=1, train_loss=name == "fedavg")
        for name, w in table1.cell_wishes(TINY, "synthetic", "mlr", "released").items()
        if name != "per-fedavg"
    ]
    told: list[tuple[str, int]] = []
    study = Study(tmp_path, "")
    study.carry_out(cell[:1])  # pfedme, which the plan has after fedavg, whose training loss is wanted
    study.carry_out(cell, lambda name, _, step: told.append((name, step.round)))
    assert told[0] == ("pfedme", cell[0].run.rounds)
    assert told[1] == ("fedavg", 0)


def test_a_damaged_ledger_is_named(tmp_path: Path):
    (tmp_path / "results").mkdir()
    for damaged in ("{", "[]"):
        (tmp_path / "results" / "provenance.json").write_text(damaged)
        with pytest.raises(InputError, match=r"provenance.json cannot be read .* delete it"):
            Study(tmp_path, "").write("table1.md", "", 1)


@pytest.mark.slow
def test_an_interrupted_reproduction_goes_on(tmp_path: Path):
    def stop(_: str, place: int, progress: Progress) -> None:
        if place == 2 and progress.round >= 2:
            raise KeyboardInterrupt

    wishes = [
        PlannedRun(dataclasses.replace(w.run, rounds=4), 2)
        for w in table1.cell_wishes(TINY, "synthetic", "mlr", "released").values()
    ]

    def results(out: Path, watch: Watch = lambda *_: None) -> list[list[float]]:
        study = Study(out, "")
        study.carry_out(wishes, watch)
        return [study.values(wish, "global", last) for wish in wishes]

    whole = results(tmp_path / "whole")
    with pytest.raises(Interrupted):
        results(tmp_path / "parts", stop)
    states = [Folder(p).status() for p in sorted((tmp_path / "parts" / "runs").iterdir())]
    assert "running" in states
    assert results(tmp_path / "parts") == whole


def test_a_run_that_diverges_is_shown_as_such(tmp_path: Path):
    wish = table1.cell_wishes(TINY, "synthetic", "mlr", "written")["fedavg"]
    broken = dataclasses.replace(wish.run, algorithm=dataclasses.replace(wish.run.algorithm, eta=1e38))
    study = Study(tmp_path, "")
    study.carry_out([PlannedRun(broken, 2)])
    assert str(study.accuracy(PlannedRun(broken, 2), "global", last)) == "diverged"


# --- the command


def test_the_command_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "figure9"]) == 2
    assert "There is no experiment 'figure9'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(paper, "QUICK", ONE_CELL)
    assert main(["reproduce", "figure7", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Figure 7" in printed
    assert str(tmp_path / "results") in printed
    assert main(["reproduce", "figure7", "--quick", "--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["findings"][0]["verdict"] in VERDICTS
