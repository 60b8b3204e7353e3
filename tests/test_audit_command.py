"""`pfedme audit`: its exit status, its folder, its page, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import attack
import numpy as np
import pytest

from pfedme.audits import mechanism
from pfedme.audits.audit import FILES
from pfedme.cli import main
from pfedme.core.private import Private
from pfedme.privacy.rows import RowPlan

TABLE = "patients.csv"
DP = ["--dp", "rows", "--epsilon", "8", "--B", "0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished runs on a table of three hospitals: `plain`, and `private` at ε = 8."""
    folder = tmp_path_factory.mktemp("audits")
    rng = np.random.default_rng(0)
    lines = [f"{'abc'[k % 3]},{rng.normal():.4f},{rng.normal():.4f},{rng.integers(2)}" for k in range(180)]
    (folder / TABLE).write_text("\n".join(["hospital,age,<b>dose</b>,outcome", *lines]))
    common = ["--data", str(folder / TABLE), "--client", "hospital", "--label", "outcome", "--rounds", "4"]
    for name, options in (("plain", ["--B", "5"]), ("private", DP)):
        asked = ["run", "fedavg", *common, "--eta", "0.1", "--R", "3", *options]
        assert main([*asked, "--out", str(folder / name)]) == 0
    return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "NUMBERS", 2000)
    monkeypatch.setattr(mechanism, "CANARIES", 60)


def document(folder: Path) -> dict:
    return json.loads((folder / "audit.json").read_text())


def test_a_run_that_claims_nothing_is_measured(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["audit", str(runs / "plain"), "--canaries", "30"]) == 0
    said, out = capsys.readouterr().out, runs / "plain" / "audit"
    assert "Claimed: nothing." in said
    assert {path.name for path in out.iterdir()} == set(FILES)
    found = document(out)
    assert found["claim"] is None
    assert found["worst_case"] is None
    assert found["checks"] == []
    assert found["canaries"]["canaries"] == 30
    assert found["columns"] == ["age", "<b>dose</b>"]
    assert found["membership"].keys() == {"global"}
    page = (out / "audit.html").read_text()
    assert page.count("<img ") == 4
    # Whatever the names of columns and clients are, nothing else is loaded or run.
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<b>dose" not in page


def test_a_correct_private_run_holds(runs: Path, capsys: pytest.CaptureFixture[str]):
    out = runs / "second"
    assert main(["audit", str(runs / "private"), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["out"] == str(out)
    assert said["claim"] == {"unit": "rows", "epsilon": 8.0, "delta": 1e-5}
    assert not said["exceeded"]
    assert 0 <= said["measured"] < 8
    assert len(said["checks"]) == 6
    assert all(check["passed"] for check in said["checks"])
    assert document(out)["sentence"] == said["sentence"]
    levels = [said["canaries"]["level"], said["worst_case"]["level"], *(c["level"] for c in said["checks"])]
    assert sum(levels) == pytest.approx(0.05)


def test_a_run_whose_noise_is_too_small_has_exit_status_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    correct = RowPlan.private

    def halved(plan: RowPlan) -> Private:
        made = correct(plan)
        return dataclasses.replace(made, noise=made.noise / 2)

    monkeypatch.setattr(RowPlan, "private", halved)
    assert main(["audit", str(runs / "private")]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAILS: The noise is as large as claimed \(0\.(4[6-9]|5[0-4])", said)
    assert "does not do what its claim of ε = 8 rests on" in said
    page = (runs / "private" / "audit" / "audit.html").read_text()
    assert "Exceeds its claim" in page


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["audit", *argv]) == 2
    return capsys.readouterr().err


def changed(runs: Path, to: Path, **fields: object) -> Path:
    """A copy of a run with other fields in its record."""
    shutil.copytree(runs / "plain", to, ignore=shutil.ignore_patterns("audit"))
    record = json.loads((to / "record.json").read_text()) | fields
    (to / "record.json").write_text(json.dumps(record))
    return to


def test_what_cannot_be_audited_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "There is no run in" in refused([str(tmp_path)], capsys)
    other = changed(runs, tmp_path / "other", version="0.0.1")
    assert "was trained with pfedme 0.0.1" in refused([str(other)], capsys)
    unfinished = changed(runs, tmp_path / "unfinished", status="running")
    assert "has not finished (running)" in refused([str(unfinished)], capsys)
    deployed = changed(runs, tmp_path / "deployed", deployed={"clients": []})
    assert "whose rows are not here" in refused([str(deployed)], capsys)
    damaged = changed(runs, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in refused([str(damaged)], capsys)
    plain = str(runs / "plain")
    assert "no client with this name" in refused([plain, "--client", "z"], capsys)
    assert "choose --canaries between 10 and" in refused([plain, "--canaries", "500"], capsys)
    assert "canaries" in refused([plain, "--canaries", "-3"], capsys)
    assert "seed" in refused([plain, "--seed", "x"], capsys)
    assert "holds a run; choose another --out" in refused([plain, "--out", plain], capsys)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    assert "holds no audit" in refused([plain, "--out", str(tmp_path / "full")], capsys)


def test_a_run_on_rows_that_are_gone_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    moved = tmp_path / TABLE
    (runs / TABLE).rename(moved)
    try:
        assert TABLE in refused([str(runs / "plain")], capsys)
        (runs / TABLE).write_text(moved.read_text() + "\na,0,0,1")
        assert TABLE in refused([str(runs / "plain")], capsys)
    finally:
        (runs / TABLE).unlink(missing_ok=True)
        moved.rename(runs / TABLE)


@pytest.mark.slow
def test_noise_keeps_the_best_attack_within_the_default_limits_from_every_row():
    """At ε = 8 its guesses are no better than guesses from means and spreads."""
    open_, noisy, chance = (
        attack.rare_class_against(None, secrets=1),
        attack.rare_class_against(attack.EIGHT, secrets=2),
        attack.guesses_against(),
    )
    assert open_.error < 1e-3
    assert open_.near >= 6
    assert noisy.near == 0
    assert noisy.error > 0.5 * chance.error
