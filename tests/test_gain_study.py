"""The study of what joining is worth: its federations, its page, and its work in pieces."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pfedme.cli import main
from pfedme.data import parse_data
from pfedme.engine import simulate
from pfedme.errors import InputError
from pfedme.experiments import gain
from pfedme.experiments.gain_federations import SETTINGS, TINY, Setting, named
from pfedme.experiments.gain_page import Row, by_kind, choosing, main_table, naming
from pfedme.experiments.study import Study

SOME = named("mnist-0.3-few,mnist-0.3-many,contraception-network")


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of three federations."""
    monkeypatch.setattr(gain, "SETTINGS", SOME)


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path: Path, some: None):
    study = Study(tmp_path, "pfedme study gain")
    rows, missing = gain.study_gain(study, TINY, SOME)
    assert missing == []
    programs: tuple[Any, ...] = (*simulate._advance.programs, *simulate._answer.programs)
    assert [program._cache_size() for program in programs] == [0] * 4  # hundreds of them end a process
    units = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()}
    again, _ = gain.study_gain(study, TINY, SOME)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()} == units
    assert [r.mean for r in again] == [r.mean for r in rows]
    table = list(csv.DictReader(io.StringIO((tmp_path / "results" / "gain.csv").read_text())))
    assert list(table[0]) == ["federation", "method", "seed", "mean", "worst_decile", "harmed"]
    least = {"alone", "global", "label-prior", "fine-tuned", "own-lambda", "recommended"}
    for setting in SOME:
        own = [r for r in table if r["federation"] == setting.name]
        methods = {r["method"] for r in own}
        assert methods >= least
        assert len(own) == len(methods) * TINY.seeds
        assert ("pfedme" in methods) == bool(setting.rounds)
    assert all(0 <= float(r[k]) <= 1 for r in table for k in ("mean", "worst_decile", "harmed"))
    page = (tmp_path / "gain.md").read_text()
    assert "When does joining pay?" in page
    assert "pfedme study gain" in page
    for name in ("gain.png", "newcomers.png"):
        assert (tmp_path / "results" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_pieces_give_the_page_of_the_whole(tmp_path: Path, some: None, monkeypatch: pytest.MonkeyPatch):
    def measured(setting: Setting, seed: int, scale: object) -> dict[str, Any]:
        newcomers = {"newcomers": LEVELS} if setting.newcomers else {}
        return unit(alone=0.5, **{"global": 0.6 + 0.01 * seed}, recommended=0.7) | newcomers

    monkeypatch.setattr(gain, "measure", measured)
    monkeypatch.setattr(gain, "named", lambda run: "label skew")
    whole, pieces = (Study(tmp_path / name, "pfedme study gain") for name in ("whole", "pieces"))
    gain.study_gain(whole, TINY, SOME)
    rows, missing = gain.study_gain(pieces, TINY, SOME[1:])
    assert [row.setting for row in rows] == list(SOME[1:])
    assert missing == [SOME[0].name]
    assert not (pieces.out / "gain.md").exists()
    damaged = next(pieces.runs.glob("gain-*.json"))
    damaged.write_text("{")
    gain.study_gain(pieces, TINY, SOME[:1])
    assert not (pieces.out / "gain.md").exists()  # the damaged unit is another federation's
    gain.study_gain(pieces, TINY, SOME)
    assert (pieces.out / "gain.md").read_text() == (whole.out / "gain.md").read_text()
    assert (pieces.results / "gain.csv").read_text() == (whole.results / "gain.csv").read_text()


def test_another_menu_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study = Study(tmp_path, "pfedme study gain")
    units, kind = gain.jobs(study, SOME[0], TINY)
    monkeypatch.setattr(gain, "MENU", gain.MENU + 1)
    others, same = gain.jobs(study, SOME[0], TINY)
    assert not {job.path for job in units} & {job.path for job in others}
    assert kind
    assert same
    assert kind.path == same.path


def test_the_study_covers_the_range():
    assert len({s.name for s in SETTINGS}) == len(SETTINGS)
    assert sum(s.known for s in SETTINGS) >= 24
    assert {s.kind for s in SETTINGS} == {
        "none", "label skew", "feature shift", "a few kinds", "unlike tasks", "unknown",
    }  # fmt: skip
    assert len({s.data for s in SETTINGS if s.kind == "unknown"}) >= 6
    assert sum(s.model != Setting.model for s in SETTINGS) >= 4
    assert sum(s.newcomers for s in SETTINGS) >= 4
    assert {"mnist", "synthetic"} <= {s.data for s in SETTINGS}  # the paper's own
    for setting in SETTINGS:
        parse_data(setting.data.format(seed=1))


def test_a_federation_that_the_study_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InputError, match="medpar"):
        named("medpra")
    assert main(["study", "gain", "--federations", "medpra"]) == 2
    assert "medpar" in capsys.readouterr().err
    assert main(["study", "verdict", "--federations", "medpar"]) == 2
    assert "--federations" in capsys.readouterr().err


# --- the page from made-up numbers

LEVELS = [
    {"rows": 5, "clients": 3, "gain": {"mean": 0.1, "low": 0.0, "high": 0.2}, "metric": "accuracy",
     "methods": {m: {"mean": 0.5, "worst_decile": 0.4} for m in ("alone", "global", "recommended")}}
]  # fmt: skip


def unit(harmed: float = 0.0, worst: float = 0.1, **means: float) -> dict[str, Any]:
    """A unit whose methods have these means, and a worst tenth that is lower by `worst`."""
    methods = {
        name: {"mean": mean, "worst_decile": mean - worst, "harmed": harmed} for name, mean in means.items()
    }
    gains = {name: [methods["recommended"]["mean"] - methods[name]["mean"]] for name in ("alone", "global")}
    return {"methods": methods, "rows": [10], "lam": [None], "chosen": ["global"], "gain": gains}


def row(name: str, means: dict[str, float], named_as: str | None = None, harmed: float = 0.0) -> Row:
    """A row of the setting of that name with one seed."""
    (setting,) = named(name)
    return Row.of(setting, [unit(harmed, **means)], named_as)


def made_up() -> list[Row]:
    """Three federations: near the best, far below it, and above it."""
    near = {"alone": 0.80, "global": 0.85, "label-prior": 0.92, "recommended": 0.918}
    far = {"alone": 0.60, "global": 0.65, "cluster": 0.84, "recommended": 0.81}
    above = {"alone": 0.70, "global": 0.80, "recommended": 0.815}
    return [
        row("mnist-0.3-few", near, "label skew"),
        row("mnist-rotated-few", far, "feature shift", harmed=0.013),
        row("ames", above),
    ]


def test_the_sentences_about_choosing_follow_from_the_numbers():
    near, far, above = made_up()
    assert (near.best, far.best, above.best) == ("label-prior", "cluster", "global")
    text = choosing([near, far, above])
    assert "within 0.5 points of the best single method in hindsight, or above it, on 2 of 3" in text
    assert f"{far.setting.about} (-3.0, cluster is best)" in text
    assert f"At most 1.3 % of clients are harmed ({far.setting.about})" in text
    assert "farther" not in choosing([near, above])
    assert "No client is harmed" in choosing([near, above])
    assert [r.pays for r in (near, far, above)] == [True, True, False]


def test_a_method_that_does_not_exist_has_a_dash():
    lines = main_table(made_up()).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]
    assert [c[2:4] for c in cells] == [["92.0", "–"], ["–", "84.0"], ["–", "–"]]
    assert [c[5] for c in cells] == ["92.0 (label-prior)", "84.0 (cluster)", "80.0 (global)"]


def test_gains_by_kind_are_means_over_the_federations_that_have_the_method():
    means = {"alone": 0.90, "global": 0.80, "label-prior": 0.94, "recommended": 0.94}
    more = row("mnist-0.1-few", means)
    lines = by_kind([*made_up(), more]).splitlines()
    head, *rest = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    found = {cells[0]: dict(zip(head, cells, strict=True)) for cells in rest}
    skew = found["label skew (2)"]
    assert skew["label-prior"] == "+8.0 / +10.5"  # means of 12 and 4, and of 7 and 14
    assert skew["recommended"] == "+7.9 / +10.4"  # of 11.8 and 4, and of 6.8 and 14
    assert skew["cluster"] == "–"
    assert found["a few kinds (1)"]["cluster"] == "+24.0 / +19.0"
    assert found["real clients (1)"]["global"] == "+10.0 / +0.0"
    assert "- label skew: the best single method is label-prior on 2 of 2." in lines


def test_kinds_are_counted_where_they_are_known():
    text = naming(made_up())
    assert "named rightly on 1 of 2 federations" in text
    assert "| a few kinds | feature shift |" in text
    assert made_up()[2].setting.about not in text


def test_kept_results_are_json(tmp_path: Path):
    job = gain.Job("", tmp_path / "runs" / "gain-1.json", lambda: {"a": 1})
    assert job.kept() is None
    job.carry_out()
    assert json.loads(job.path.read_text()) == job.kept() == {"a": 1}
