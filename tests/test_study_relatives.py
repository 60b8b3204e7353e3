"""The study of all algorithms: equal budgets, choices by validation rows, and a page of recorded numbers."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pfedme.algorithms import Alone, Ditto, FedAvg, FedPer, Pooled
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.core.tree import record
from pfedme.data.fashion import FILES, idx
from pfedme.data.federation import Federation, Part
from pfedme.data.mnist import Mnist
from pfedme.data.synthetic import Synthetic
from pfedme.engine import simulate
from pfedme.engine.baseline import baseline
from pfedme.experiments import relatives, tuned
from pfedme.experiments.published import CLAIMS, Claim, TurnedMnist, UnevenSynthetic
from pfedme.experiments.study import Estimate, PlannedRun, Study
from pfedme.experiments.tuned import FULL, METHODS, QUICK, SETTINGS, TRIALS, Entry, Found, Scale, Setting
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run

TINY = Setting(
    "tiny", "synthetic:clients=6,rows=40,features=4,classes=3,train=0.5,seed={seed}", "six clients", rounds=4
)
SCALE = Scale(
    seeds=2, settings=(TINY,), methods=(FedAvg, Alone, Pooled, Ditto, FedPer), published=False
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """The study in miniature."""
    out = tmp_path_factory.mktemp("relatives")
    return out, relatives.study_relatives(Study(out, "pfedme study relatives"), SCALE)


def lines(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / "results" / "relatives.csv").read_text())))


# --- what is run


def test_every_algorithm_has_the_same_number_of_trials():
    assert {len(tuned.grid(cls)) for cls in METHODS} == {TRIALS}
    for cls in METHODS:
        settings = tuned.candidates(tuned.given(cls, 60, 20), 100.0)
        assert len({json.dumps(one) for one in settings}) == TRIALS
        assert all(set(one) == {*cls.tuned, *cls.steps} for one in settings)
        assert all(all(one.values()) for one in settings)


def test_step_sizes_are_those_of_a_flatter_loss():
    for settings, (values, flatter) in zip(tuned.candidates(Ditto(), 100.0), tuned.grid(Ditto), strict=True):
        assert settings["lam"] == values["lam"]
        assert settings["eta"] == pytest.approx(1 / (100 / flatter + values["lam"]), rel=0.01)


def test_the_study_covers_algorithms_and_federations():
    assert len(SETTINGS) >= 6
    assert {"mnist", "synthetic"} <= {setting.data for setting in SETTINGS}  # the paper's own
    assert {"alone", "pooled", "pfedme"} <= {cls.name for cls in METHODS}
    assert set(relatives.GOOD_FOR) == {cls.name for cls in METHODS}
    assert set(QUICK.settings) < set(FULL.settings)
    assert set(QUICK.methods) < set(FULL.methods)


def test_the_best_trial_is_the_most_accurate_one_and_then_the_one_with_the_least_loss():
    def trial(eta: float, accuracy: float | None, loss: float | None) -> tuned.Trial:
        return tuned.Trial({"eta": eta}, accuracy, loss)

    trials = [trial(1, None, None), trial(2, 0.5, 0.1), trial(3, 0.75, 2.0), trial(4, 0.75, 1.0)]
    assert tuned.best(trials) == {"eta": 4}
    assert tuned.best(trials[:1]) is None


# --- only validation rows decide


@record
class Relabelled:
    """A federation in which all labels of a part are the same; `validation` is what trials hold out."""

    name: ClassVar[str] = "relabelled"
    part: Part | None = None
    label: int = 0

    def load(self) -> Federation:
        f = Synthetic(clients=5, rows=40, features=4, classes=3, train=0.5).load()
        if self.part is None:
            return f
        start, count = f.hold_out(0, 5).rows(self.part)
        y = f.y.copy()
        for first, n in zip(start, count, strict=True):
            y[first : first + n] = self.label
        return dataclasses.replace(f, y=y)


def trials(part: Part | None = None, label: int = 0) -> list[tuned.Trial]:
    data = Relabelled(part=part, label=label)
    return tuned.tried(Run(algorithm=Ditto(), data=data, model=MLR(), rounds=3))


def test_changing_test_labels_changes_no_choice():
    assert trials("test") == trials()


def test_a_trial_is_judged_by_the_rows_that_it_holds_out_and_is_not_trained_on_them():
    """Each held-out row is predicted to have exactly one of the labels, whatever its own label is."""
    accuracies = [[trial.accuracy for trial in trials("validation", label)] for label in range(3)]
    assert np.sum(np.array(accuracies, float), axis=0) == pytest.approx(np.ones(TRIALS))


# --- what is written


def test_the_table_has_the_promised_columns_and_lines(done: tuple[Path, Found]):
    out, _ = done
    table = lines(out)
    assert list(table[0]) == [
        "federation", "method", "evaluated", "seed", "accuracy", "worst_decile", "gradients", "bytes",
    ]  # fmt: skip
    assert {(r["method"], r["evaluated"]) for r in table} == {
        ("fedavg", "global"), ("fedavg", "local"), ("alone", "personal"), ("pooled", "global"),
        ("ditto", "global"), ("ditto", "personal"), ("majority", "global"),
    }  # fmt: skip
    assert len(table) == 7 * SCALE.seeds
    assert all(0 <= float(r[k]) <= 1 for r in table for k in ("accuracy", "worst_decile"))


def test_the_numbers_are_those_of_the_records(done: tuple[Path, Found]):
    out, found = done
    for method, kind in (("fedavg", "global"), ("ditto", "personal"), ("alone", "personal")):
        rows = [r for r in lines(out) if (r["method"], r["evaluated"]) == (method, kind)]
        finals = {}
        for folder in (out / "runs").glob(f"{method}-*"):
            record = Folder(folder).read()
            assert record["config"]["algorithm"]["eta"] == found.chosen["tiny", method].eta
            finals[record["config"]["seed"]] = record["final"][kind]
        for row in rows:
            final = finals[int(row["seed"])]
            assert float(row["accuracy"]) == pytest.approx(final["accuracy"], abs=1e-6)
            assert float(row["worst_decile"]) == pytest.approx(final["clients"]["worst_decile"], abs=1e-6)
        shown = Estimate.of([100 * finals[seed]["accuracy"] for seed in range(SCALE.seeds)])
        line = re.search(rf"^\| {method} \|.*", (out / "relatives.md").read_text(), re.MULTILINE)
        assert line is not None
        assert str(shown) in line.group()


def test_the_majority_is_the_baseline_of_each_seed(done: tuple[Path, Found]):
    _, found = done
    for seed in range(SCALE.seeds):
        f = Synthetic(clients=6, rows=40, features=4, classes=3, train=0.5, seed=seed).load()
        values = found.values("tiny", "majority", "global")
        assert values[seed] == pytest.approx(100 * baseline(f)["accuracy"])


def test_cost_is_that_of_a_client_in_the_whole_run(done: tuple[Path, Found]):
    found = done[1].models
    size = 4 * (4 + 1) * 3  # bytes of a model with 4 features and 3 classes

    def cost(method: str, kind: str) -> tuple[int, int]:
        entry = found["tiny", method][kind][0]
        return entry.gradients, entry.bytes

    assert cost("fedavg", "global") == (4 * 20, 4 * 2 * size)
    assert cost("ditto", "personal") == (4 * 40, 4 * 2 * size)
    assert cost("alone", "personal") == (4 * 20, 0)
    assert cost("pooled", "global") == (4 * 20, 0)  # as many steps as all six clients, divided among them


def test_a_method_that_does_not_fit_is_left_out_with_the_reason(done: tuple[Path, Found]):
    out, found = done
    assert "this model has 1 layer" in found.left_out["tiny", "fedper"]
    assert "Left out: fedper (it keeps 1 of a model's layers private" in (out / "relatives.md").read_text()


def test_the_page_has_a_sentence_for_each_method_and_its_figures(done: tuple[Path, Found]):
    out, _ = done
    page = (out / "relatives.md").read_text()
    for cls in SCALE.methods:
        assert f"- `{cls.name}`" in page
    for name in re.findall(r"\]\((results/[^)]+)\)", page):
        assert (out / name).exists()
    assert (out / "results" / "relatives.png").read_bytes().startswith(b"\x89PNG")
    assert "6 trials" in page


def test_what_is_recorded_is_not_run_again(done: tuple[Path, Found]):
    out, found = done
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    table = lines(out)
    again = relatives.study_relatives(Study(out, "pfedme study relatives"), SCALE)
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()} == before
    assert again.entries == found.entries
    assert lines(out) == table


def test_compiled_programs_do_not_accumulate(done: tuple[Path, Found]):
    """Hundreds of a federation's programs would otherwise outlive it, until memory mappings run out."""
    relatives.study_relatives(Study(done[0], ""), SCALE)
    programs: tuple[Any, ...] = (*simulate._advance.programs, *simulate._answer.programs)
    assert [program._cache_size() for program in programs] == [0] * 4


def test_damaged_trials_are_repeated(done: tuple[Path, Found], tmp_path: Path):
    (source,) = (done[0] / "runs").glob("trials-fedavg-*.json")
    base = tuned.Ground.of(TINY, SCALE).base(FedAvg)
    study = Study(tmp_path, "")
    study.runs.mkdir(parents=True)
    (study.runs / source.name).write_text("[{")
    trials = tuned.recorded(study, base)
    assert (study.runs / source.name).read_text() == source.read_text()
    assert tuned.recorded(study, base) == trials


def test_leaders_are_paired_over_seeds():
    def entries(method: str, *values: float) -> list[Entry]:
        return [Entry("x", method, "global", seed, value, value, 1, 1) for seed, value in enumerate(values)]

    found = Found(
        Scale(seeds=3, settings=(dataclasses.replace(TINY, name="x"),)),
        (*entries("a", 0.5, 0.6, 0.7), *entries("b", 0.49, 0.61, 0.69), *entries("c", 0.48, 0.58, 0.68),
         *entries("pooled", 0.9, 0.9, 0.9)),
        {}, {},
    )  # fmt: skip
    # a − b is 1, −1 and 1 points; a − c is 2, 2 and 2.
    assert relatives.leaders(found, "x", "global") == ["a", "b"]
    assert relatives.ranked(found, "x") == ["pooled", "a", "b", "c"]


# --- published numbers


def test_claims_have_a_source_and_either_runs_or_a_reason():
    assert len({(c.about, c.source) for c in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.source
        assert claim.wishes or claim.note.startswith("Not reproduced: ")
        assert 0 < claim.value < 100


def test_a_claim_is_compared_with_the_records(tmp_path: Path):
    source = Synthetic(clients=4, rows=20, features=3, classes=2)
    wishes = tuple(
        PlannedRun(Run(algorithm=FedAvg(eta=0.1), data=source, model=MLR(), rounds=2), 1, first=seed)
        for seed in (3, 5)
    )
    study = Study(tmp_path, "")
    study.carry_out(wishes)
    records = [study.records(wish)[0] for wish in wishes]
    assert [r["config"]["seed"] for r in records] == [3, 5]
    worst = [100 * r["final"]["global"]["clients"]["worst_decile"] for r in records]
    claim = Claim("it", "them", 50.0, "", wishes, measure="worst_decile")
    ours = claim.ours(study)
    assert ours.mean == pytest.approx(np.mean(worst))
    assert Claim("it", "them", ours.mean + 0.9, "").verdict(ours) == "yes"
    assert Claim("it", "them", ours.mean - 1.5, "").verdict(ours) == "no, +1.5"


def test_turned_images_are_the_images_turned(monkeypatch: pytest.MonkeyPatch):
    """Every image occurs once at each angle, and test rows come from the test images."""
    images = np.zeros((70_000, 784), np.uint8)
    images[:, 1] = 255  # the second pixel of the first line
    images[:, 300:304] = np.arange(70_000, dtype=np.uint32).view(np.uint8).reshape(-1, 4)  # which it is
    labels = (np.arange(70_000) % 10).astype(np.uint8)
    files = dict(zip(FILES, map(idx, (images.reshape(-1, 28, 28), labels)), strict=True))
    monkeypatch.setattr(Mnist, "fetched", lambda _: files)
    f = TurnedMnist(clients=8, rows=30, tests=10).load()
    assert (f.clients, set(f.n_train), set(f.n_test)) == (8, {30}, {10})
    seen: dict[int, list[int]] = {}
    for client in range(8):
        turn = client // 2
        rows = f.x[f.start[client] : f.start[client] + 40].reshape(-1, 28, 28)
        back = np.rot90(rows, -turn, axes=(1, 2)).reshape(40, 784)
        assert np.all(back[:, 1] == 1)
        which = np.round(255 * back[:, 300:304]).astype(np.uint8).copy().view(np.uint32)[:, 0]
        assert np.all(which[:30] < 60_000)
        assert np.all(which[30:] >= 60_000)
        assert np.all(f.y[f.start[client] : f.start[client] + 40] == which % 10)
        seen.setdefault(turn, []).extend(which.tolist())
    assert all(len(set(own)) == 80 for own in seen.values())


def test_uneven_sizes_are_a_fifth_of_ours():
    ours, f = Synthetic(alpha=1.0, beta=1.0, seed=1).load(), UnevenSynthetic(seed=1).load()
    assert np.array_equal(5 * f.count, ours.count)
    assert f.count.min() >= 50
    assert np.array_equal(f.x[f.start[7]], ours.x[ours.start[7]])
    assert np.all(np.abs(f.n_train - 0.8 * f.count) <= 2)
    assert np.all(np.abs(f.n_test - 0.1 * f.count) <= 1)


# --- the command


def test_the_command_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    scale = dataclasses.replace(SCALE, seeds=1, methods=(FedAvg,))
    monkeypatch.setattr(tuned, "QUICK", scale)
    assert main(["study", "relatives", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "fedavg" in printed
    assert "majority" in printed
    assert "relatives.csv" in printed
    assert main(["study", "relatives", "--quick", "--out", str(tmp_path), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert {entry["method"] for entry in entries} == {"fedavg", "majority"}


def test_an_interrupted_study_is_resumed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    scale = dataclasses.replace(SCALE, seeds=1, methods=(FedAvg, Ditto))
    monkeypatch.setattr(tuned, "QUICK", scale)
    train = tuned.Ground.train

    def stopped(ground: tuned.Ground, study: Study, algorithm: FedAvg, seed: int) -> list[Entry]:
        if algorithm.name == "ditto":
            raise KeyboardInterrupt
        return train(ground, study, algorithm, seed)

    command = ["study", "relatives", "--quick", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(tuned.Ground, "train", stopped)
        assert main(command) == 130
    assert f"run: pfedme {' '.join(command)}" in capsys.readouterr().err
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert main(command) == 0
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert before.items() < after.items()
