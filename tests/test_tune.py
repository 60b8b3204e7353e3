"""The search for hyperparameters: what it scores by and never reads, and that stopping changes nothing."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from laws import with_test_rows
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState
from stops import DATA, files_of_at_most, tiny

import pfedme.cli.screen.bars
import pfedme.runs.run
from pfedme.algorithms import ALGORITHMS, Algorithm
from pfedme.cli import main
from pfedme.core.models import parse_model
from pfedme.core.spec import build, to_json
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError, RunError
from pfedme.training.pilot import pilot
from pfedme.tuning.search import How, Search, axes
from pfedme.tuning.study_storage import opened
from pfedme.tuning.tune import Bench, Step, Tried, Tuning, tune

COUNTS = {"R", "K", "F", "B", "aggregation"}
"""Fields that would need a compiled program for each value."""


def search(name: str = "pfedme", how: How = "tpe", *, fixed: set[str] = COUNTS, **options: Any) -> Search:
    """A search on a few rows; TPE and pruning begin early."""
    given = {"rounds": 8, "eval_every": None, **options}
    return dataclasses.replace(Search.over(tiny(name, **given), fixed, how), drawn=3, spared=2)


def told(tuning: Tuning) -> list[Any]:
    """What must not depend on interruptions."""
    return [(t.state, t.settings, t.accuracy, t.rounds) for t in tuning.trials if t.state != "interrupted"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    """A search that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "search"
    return out, tune(search(), 12, out)


# --- The score ---------------------------------------------------------------------------------------


def apart(whole: Federation) -> Federation:
    """The federation whose test rows are the first fifth of each client's training rows, cut by hand."""
    rows, n_train, n_test = [], [], []
    for start, n in zip(whole.start, whole.n_train, strict=True):
        rows += [*range(start + n // 5, start + n), *range(start, start + n // 5)]
        n_train.append(n - n // 5)
        n_test.append(n // 5)
    return Federation(
        x=whole.x[rows], y=whole.y[rows], n_train=np.array(n_train), n_test=np.array(n_test),
        classes=whole.classes, ids=whole.ids,
    ).checked()  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [("pfedme", "personal"), ("fedavg", "global")])
def test_the_score_is_the_accuracy_on_rows_that_were_not_trained_on(name: str, kind: str, tmp_path: Path):
    sought = search(name)
    tuning = tune(sought, 3, tmp_path / "search")
    federation = apart(DATA.load())
    for trial in tuning.best:
        algorithm = sought.run_with(trial.settings).algorithm
        model = sought.run.model.build(federation.features, federation.classes)
        simulation = Simulation(algorithm, model, federation, cohort=2, seed=sought.run.seed)
        state, finite = simulation.advance(simulation.start(), 8)
        assert finite
        assert trial.model == kind
        assert trial.rounds == 8
        assert trial.accuracy == simulation.evaluate(state)[0].entry()[kind]["accuracy"]


@pytest.mark.parametrize("name", ["pfedme", "per-fedavg"])
def test_test_rows_are_never_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    federation = DATA.load()
    tunings = []
    for label in (0, 1):
        other = with_test_rows(federation, value=1e6 * (-1) ** label, label=label)
        monkeypatch.setattr(pfedme.runs.run, "load", lambda _, other=other: other)
        tunings.append(tune(search(name), 3, tmp_path / str(label)))
    assert told(tunings[0]) == told(tunings[1])
    assert tunings[0].best


def test_a_search_refuses_to_adapt_on_test_rows():
    run = tiny("per-fedavg")
    leaky = dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, adapt_on="test"))
    with pytest.raises(InputError, match="test rows"):
        Search.over(leaky, set(), "tpe")


@pytest.mark.parametrize("rounds", [*range(1, 20), 200, 601])
def test_a_trial_is_judged_at_most_eight_times_and_at_its_end(rounds: int):
    stops = search(rounds=rounds).stops()
    assert stops == sorted(set(stops))
    assert stops[0] >= 1
    assert stops[-1] == rounds
    assert len(stops) == min(8, rounds)
    assert max(np.diff([0, *stops])) <= -(-rounds // 8) + 1


# --- What is searched --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_all_that_is_searched(name: str):
    cls = ALGORITHMS[name]
    for field, axis in axes(cls()).items():
        ranged = axis.range
        if isinstance(ranged, CategoricalDistribution):
            ends = ranged.choices
            assert set(axis.grid) <= set(ends)
        else:
            ends = (ranged.low, ranged.high)
            assert all(ranged.low <= float(value) <= ranged.high for value in axis.grid)
        for value in (*ends, *axis.grid):
            assert getattr(build(cls, {field: value}, name), field) == value


def test_steps_are_searched_around_the_stable_ones():
    _, simulation = tiny("pfedme").prepare()
    stable, space = simulation.algorithm, search().space
    for name in ("eta", "alpha"):
        ranged, step = space[name], getattr(stable, name)
        assert isinstance(ranged, FloatDistribution)
        assert (ranged.low, ranged.high) == pytest.approx((step / 30, 3 * step), rel=0.005)
        assert ranged.log
        grid = {point[name] for point in search(how="grid").grid()}
        assert sorted(grid) == pytest.approx([0.1 * step, 0.3 * step, step], rel=0.005)


def test_the_grid_of_pfedme_has_every_combination_once():
    points = search(how="grid", fixed={"B", "R"}).grid()
    values = {name: {point[name] for point in points} for name in points[0]}
    steps = {name: values.pop(name) for name in ("eta", "alpha")}
    assert [len(tried) for tried in steps.values()] == [3, 3]
    assert values == {
        "lam": {5, 10, 15, 20, 30}, "beta": {1, 2}, "K": {3, 5, 7}, "aggregation": {"uniform", "samples"},
    }  # fmt: skip
    assert len({tuple(point.items()) for point in points}) == len(points) == 5 * 3 * 3 * 2 * 3 * 2


def test_weights_by_rows_are_tried_where_there_is_a_server():
    for name in ("fedavg", "per-fedavg", "fedavg-ft"):
        assert search(name, fixed=set()).space["aggregation"] == CategoricalDistribution(
            ("uniform", "samples")
        )
    assert "aggregation" not in search("alone", fixed=set()).space


def test_rounds_that_are_not_given_are_found_before_the_search():
    run = tiny("fedavg", rounds=0, budget=12, eval_every=None)
    sought = Search.over(run, COUNTS, "tpe")
    found = pilot(run.algorithm, run.prepare()[1], budget=12)
    assert (sought.run.rounds, sought.run.quarter_at) == (found.rounds, found.quarter_at)
    assert 0 < sought.run.rounds <= 12
    assert sought.stops()[-1] == sought.run.rounds
    assert sought.run.algorithm == run.algorithm  # its steps are searched


def test_the_seed_orders_the_grid():
    fixed = COUNTS | {"eta", "alpha"}  # whose values are from the mini-batches, which the seed draws too
    one, same, other = (search(how="grid", fixed=fixed, seed=seed).grid() for seed in (0, 0, 1))
    assert one == same
    assert one != other
    assert sorted(map(str, one)) == sorted(map(str, other))


def test_a_grid_is_tried_in_its_order_and_each_point_once(tmp_path: Path):
    sought = search("fedavg", "grid")
    part = tune(sought, 4, tmp_path / "search")
    assert [t.settings for t in part.trials] == sought.grid()[:4]
    everything = tune(sought, None, tmp_path / "search")
    assert [t.settings for t in everything.trials] == sought.grid()
    assert told(everything)[:4] == told(part)


def test_what_is_fixed_is_in_every_trial_and_not_searched(whole: tuple[Path, Tuning]):
    sought = whole[1].search
    own = sought.run.algorithm
    for trial in whole[1].trials:
        assert set(trial.settings) == {"lam", "eta", "alpha", "beta"}
        tried = to_json(sought.run_with(trial.settings).algorithm)
        assert tried == to_json(own) | trial.settings


def test_trials_are_carried_out_with_the_settings_that_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    used: list[Algorithm] = []

    def simulation(algorithm: Algorithm, *given: Any, **options: Any) -> Simulation:
        used.append(algorithm)
        return Simulation(algorithm, *given, **options)

    monkeypatch.setattr(sys.modules[Bench.__module__], "Simulation", simulation)
    tuning = tune(search("fedavg"), 3, tmp_path / "search")
    assert used == [tuning.search.run_with(trial.settings).algorithm for trial in tuning.trials]


def test_settings_have_three_digits_and_are_in_the_range(whole: tuple[Path, Tuning]):
    space = whole[1].search.space
    for trial in whole[1].trials:
        for name, value in trial.settings.items():
            assert space[name]._contains(value)
            assert value == float(f"{value:.2e}")


# --- How trials end ----------------------------------------------------------------------------------


def test_a_trial_that_diverges_is_recorded_and_the_search_goes_on(tmp_path: Path):
    sought = search("fedavg", "grid", model=parse_model("mlr:l2=0.001"))
    sought = dataclasses.replace(sought, space={"eta": CategoricalDistribution((0.05, 1e30, 0.1))})
    tuning = tune(sought, None, tmp_path / "search")
    states = {trial.settings["eta"]: trial.state for trial in tuning.trials}
    assert states.pop(1e30) == "diverged"
    assert len(states) == 2
    assert "diverged" not in states.values()
    (bad,) = (trial for trial in tuning.trials if trial.state == "diverged")
    assert bad.accuracy is None
    assert bad.rounds < 8
    assert tuning.best[0].settings["eta"] != 1e30
    again = tune(sought, None, tmp_path / "search")
    assert told(again) == told(tuning)


def test_a_search_in_which_everything_diverges_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = f"tune fedavg {TINY} --model mlr:l2=0.001 --eta 1e30 --trials 2 --out {tmp_path / 'search'}"
    assert main(shlex.split(line)) == 1
    assert "All 2 trials diverged" in capsys.readouterr().err


def stored(out: Path, sought: Search) -> list[optuna.trial.FrozenTrial]:
    """The trials in a folder, with the accuracies on their way."""
    with opened(out, sought) as study:
        return study.get_trials()


def test_a_trial_is_stopped_where_it_is_worse_than_the_median_of_the_complete_ones(
    whole: tuple[Path, Tuning],
):
    out, tuning = whole
    complete: list[dict[int, float]] = []
    stopped = 0
    for trial in stored(out, tuning.search):
        way = trial.intermediate_values
        worse = [
            t
            for t in way
            if 2 <= t < 8
            and len(complete) >= 2
            and max(v for s, v in way.items() if s <= t) < np.median([other[t] for other in complete])
        ]
        if trial.state == TrialState.COMPLETE:
            assert worse == []
            complete.append(way)
        elif "diverged" not in trial.user_attrs:
            assert worse == [max(way)]
            stopped += 1
    assert stopped > 0


def test_a_trial_that_has_come_to_its_end_is_complete_however_bad(tmp_path: Path):
    sought = dataclasses.replace(search("fedavg", "grid"), evaluations=1)
    tuning = tune(sought, None, tmp_path / "search")
    assert {trial.state for trial in tuning.trials} == {"complete"}
    assert len({trial.accuracy for trial in tuning.trials}) > 1


# --- Stopped and continued ---------------------------------------------------------------------------


def stop_after(calls: int) -> Callable[[Step], None]:
    """A watcher that interrupts at the n-th evaluation."""
    seen = iter(range(calls))

    def watch(_: Step) -> None:
        if next(seen, None) is None:
            raise KeyboardInterrupt

    return watch


def test_a_search_that_is_interrupted_again_and_again_ends_as_if_it_had_not_been(
    whole: tuple[Path, Tuning], tmp_path: Path
):
    out = tmp_path / "search"
    for calls in (0, 5, 19, 33):
        with pytest.raises(KeyboardInterrupt):
            tune(search(), 12, out, watch=stop_after(calls))
    tuning = tune(search(), 12, out)
    assert told(tuning) == told(whole[1])
    assert tuning.finished == 12
    assert [t.state for t in tuning.trials].count("interrupted") == 4


def test_more_trials_go_on_from_fewer(whole: tuple[Path, Tuning], tmp_path: Path):
    for trials in (1, 4, 12, 3):
        tuning = tune(search(), trials, tmp_path / "search")
    assert told(tuning) == told(whole[1])


@pytest.mark.slow
def test_a_journal_that_ends_anywhere_is_continued(whole: tuple[Path, Tuning], tmp_path: Path):
    content = (whole[0] / "trials.journal").read_bytes()
    for place, share in enumerate((0.0, 0.013, 0.3, 0.77, 0.9)):
        out = tmp_path / str(place)
        shutil.copytree(whole[0], out)
        (out / "trials.journal").write_bytes(content[: int(share * len(content))])
        (out / "trials.journal.lock").symlink_to(out / "trials.journal")
        assert told(tune(search(), 12, out)) == told(whole[1])


def test_a_search_that_fills_the_disk_goes_on_when_there_is_room(whole: tuple[Path, Tuning], tmp_path: Path):
    half = (whole[0] / "trials.journal").stat().st_size // 2
    with (
        files_of_at_most(half),
        pytest.raises(RunError, match=r"could not be written.*run the same command to resume"),
    ):
        tune(search(), 12, tmp_path / "search")
    assert told(tune(search(), 12, tmp_path / "search")) == told(whole[1])


def test_a_grid_that_is_interrupted_leaves_no_point_out(tmp_path: Path):
    sought, out = search("fedavg", "grid"), tmp_path / "search"
    for calls in (3, 10):
        with pytest.raises(KeyboardInterrupt):
            tune(sought, None, out, watch=stop_after(calls))
    with opened(out, sought) as study:  # killed after a point was put in line and before it was begun
        finished = sum(t.state in (TrialState.COMPLETE, TrialState.PRUNED) for t in study.trials)
        study.enqueue_trial(sought.grid()[finished])
    tuning = tune(sought, None, out)
    assert [t.settings for t in tuning.trials if t.state != "interrupted"] == sought.grid()


@pytest.mark.slow
def test_a_killed_search_is_continued(tmp_path: Path):
    out = tmp_path / "search"
    argv = shlex.split(f"tune fedavg {TINY} --rounds 5000 --trials 4 --out {out}")
    code = "import sys; from pfedme.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not (out / "trials.csv").exists() or '"step"' not in (out / "trials.journal").read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    assert main(argv) == 0
    with (out / "trials.csv").open() as file:
        states = [row["state"] for row in csv.DictReader(file)]
    assert states.count("interrupted") == 1
    assert len(states) == 5


def test_an_interrupted_command_names_the_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    attempt = Bench.attempt

    def stop(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "attempt", stop)
    assert main(shlex.split(f"tune fedavg {TINY} --trials 2")) == 130
    said = capsys.readouterr().err
    assert "Traceback" not in said
    _, again = said.rstrip().split(": pfedme ")
    monkeypatch.setattr(Bench, "attempt", attempt)
    assert main(shlex.split(again)) == 0
    assert "2 trials" in capsys.readouterr().out


# --- What is left behind, and said -------------------------------------------------------------------


def test_the_table_has_every_trial(whole: tuple[Path, Tuning]):
    out, tuning = whole
    with (out / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    read = [
        Tried(
            number=int(row["trial"]),
            state=trial.state,
            settings={name: float(row[name]) for name in tuning.search.space},
            accuracy=float(row["validation_accuracy"]) if row["validation_accuracy"] else None,
            rounds=int(row["rounds"]),
            model=trial.model,
        )
        for row, trial in zip(rows, tuning.trials, strict=True)
    ]
    assert read == list(tuning.trials)
    assert [row["state"] for row in rows] == [trial.state for trial in tuning.trials]


def test_the_page_has_the_command_and_every_trial(whole: tuple[Path, Tuning]):
    page = (whole[0] / "tune.md").read_text()
    assert whole[1].run.command() in page
    assert len(re.findall(r"^\| \d+ \|", page, re.MULTILINE)) == 12


def test_the_best_trials_come_first_and_the_earlier_of_two_alike(whole: tuple[Path, Tuning]):
    best = whole[1].best
    assert [(-(t.accuracy or 0), t.number) for t in best] == sorted(
        (-(t.accuracy or 0), t.number) for t in best
    )
    assert best[0].accuracy == max(
        t.accuracy for t in whole[1].trials if t.state == "complete" and t.accuracy
    )


def test_what_mattered_is_told_once_enough_trials_are_complete(
    whole: tuple[Path, Tuning], monkeypatch: pytest.MonkeyPatch
):
    out, tuning = whole
    assert tuning.mattered == {}
    monkeypatch.setattr(sys.modules[Bench.__module__], "ENOUGH", 5)
    again = tune(tuning.search, 12, out)
    assert set(again.mattered) == set(tuning.search.space)
    assert sum(again.mattered.values()) == pytest.approx(1)
    assert "What set the best trials apart" in (out / "tune.md").read_text()


def test_json_tells_the_best_settings_and_a_command_that_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = shlex.quote(str(tmp_path / "a b"))
    line = f"tune pfedme:beta=2,K=2 {TINY} --lam 15 --aggregation samples --trials 3 --out {out} --json"
    assert main(shlex.split(line)) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["best"]) == {"eta", "alpha"}
    assert len(said["trials"]) == 3
    assert said["model"] == "personal"
    complete = [trial for trial in said["trials"] if trial["state"] == "complete"]
    assert said["validation_accuracy"] == max(trial["accuracy"] for trial in complete)
    words = shlex.split(said["command"])
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given.items() >= {"--lam": "15.0", "--beta": "2.0", "--rounds": "3", "--R": "2"}.items()
    assert all(given[f"--{name}"] == str(value) for name, value in said["best"].items())


def test_a_person_sees_progress_the_best_trials_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pfedme.cli.screen.bars, "LINE_EVERY_S", 0.0)
    assert main(shlex.split(f"tune fedavg {TINY} --trials 7 --out {tmp_path / 'search'}")) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^trial 1/7 round 1/3$", err, re.MULTILINE)
    assert re.search(r"^trial 7/7 round 1/3, best \d+\.\d\d %(, \d+ s left)?$", err, re.MULTILINE)
    assert 1 <= len(re.findall(r"^ +\d+ +complete", out, re.MULTILINE)) <= 5
    assert "7 trials" in out
    assert "pfedme run fedavg --data synthetic:clients=4" in out


# --- Refused -----------------------------------------------------------------------------------------

TINY = "--data synthetic:clients=4,rows=40,features=5,classes=3 --rounds 3 --cohort 2 --R 2 --B 5"
TUNE = f"tune fedavg {TINY} --trials 2 --out out"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a command line gets to hear that is refused; nothing in the working folder may change."""
    before = contents(Path())
    status = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert (status, out, contents(Path())) == (2, "", before), err
    assert re.fullmatch(r"pfedme: [^\n]+\.\n", err), err
    return err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (f"{TUNE} --trials 0", ["--trials must be at least 1, not 0"]),
        (f"{TUNE} --trials -3", ["--trials", "-3"]),
        (f"{TUNE} --trials many", ["--trials", "many"]),
        (f"{TUNE} --search tpee", ["--search", "'tpee'", "tpe", "grid"]),
        (f"{TUNE} --eval-every 3", ["option '--eval-every'"]),
        (f"{TUNE} --force", ["option '--force'"]),
        (f"{TUNE} --lam 3", ["--lam is not an option of fedavg"]),
        (f"{TUNE} --eta -1", ["eta", "must be at least 0", "-1"]),
        (f"{TUNE} --cohort 5", ["cohort of 5", "--cohort between 1 and 4"]),
        (
            f"{TUNE} --eta 0.1 --beta 2 --aggregation samples",
            ["nothing to search", "eta, beta, R, aggregation", "leave an option out"],
        ),
        (f"{TUNE} --search grid --eta 0.1 --beta 2 --aggregation samples", ["nothing to search"]),
        ("tune fedavgg", ["algorithm 'fedavgg'", "did you mean 'fedavg'?"]),
        ("tune", ["ALGORITHM", "pfedme tune --help"]),
        ("tune fedavg alone", ["'alone' was not expected"]),
        ("tune alone:eta=1,R=3", ["nothing to search"]),
        ("tune per-fedavg --adapt-on test", ["--adapt-on test reads test rows"]),
        ("tune pfedme --rechoose 2", ["--rechoose chooses λ on the rows that a search judges by"]),
        ("tune fedavg --data synthetic:clients=4,rows=5", ["No client has 5 training rows", "more rows"]),
    ],
)
def test_wrong_input_is_refused_with_a_sentence(
    line: str,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, line)
    for part in parts:
        assert part in said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder `out` with a search of two trials, in the working folder."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(TUNE)) == 0
    capsys.readouterr()
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--rounds 4", "rounds is 3"),
        ("--seed 1", "seed is 0"),
        ("--eta 0.1", "eta is searched"),
        ("--search grid", "search is tpe"),
        ("--model mlr:l2=0.1", "model.l2 is 0.0"),
        ("--cohort 3", "cohort is 2"),
    ],
)
def test_another_search_in_the_same_folder_is_refused(
    folder: Path, options: str, part: str, capsys: pytest.CaptureFixture[str]
):
    said = refused(capsys, f"{TUNE} {options}")
    assert "out holds a different search" in said
    assert part in said
    assert "choose another --out" in said


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'"tune"', b"\xff\xfe", b"3"])
def test_a_damaged_plan_is_refused(folder: Path, content: bytes, capsys: pytest.CaptureFixture[str]):
    (folder / "tune.json").write_bytes(content)
    said = refused(capsys, TUNE)
    assert re.search(r"tune\.json cannot be read .*; delete out, or choose another --out", said)


def damaged(lines: list[bytes]) -> list[list[bytes]]:
    """Journals that no process has written."""
    return [
        [*lines[:3], b"garbage\n", *lines[3:]],
        [*lines, b"\xff\x00\n"],
        [b"{}\n"],
        [b"[]\n", *lines],
        [*lines[:2], b"3\n"],
        [re.sub(rb"FloatDistribution", b"NoDistribution", line) for line in lines],
        [line for line in lines if b"param_name" not in line],
    ]


@pytest.mark.parametrize("place", range(7))
def test_a_damaged_journal_is_refused(folder: Path, place: int, capsys: pytest.CaptureFixture[str]):
    journal = folder / "trials.journal"
    journal.write_bytes(b"".join(damaged(journal.read_bytes().splitlines(keepends=True))[place]))
    assert main(shlex.split(f"{TUNE} --trials 3")) == 2
    said = capsys.readouterr().err
    assert re.search(r"trials\.journal is damaged .*; delete out, or choose another --out", said)


def test_a_folder_that_cannot_be_a_searchs_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "tune.json").unlink()
    assert "not empty and holds no search" in refused(capsys, TUNE)
    assert "is a file" in refused(capsys, f"{TUNE} --out out/trials.csv")
    assert "is a file" in refused(capsys, f"{TUNE} --out out/trials.csv/more")


def test_two_processes_do_not_share_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]):
    sought = Search.over(tiny("fedavg", rounds=3, eval_every=None), {"R", "B"}, "tpe")
    with opened(folder, sought):
        assert "Another process is using out" in refused(capsys, TUNE)
    assert main(shlex.split(TUNE)) == 0


def test_without_optuna_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("pfedme.tuning.tune", "pfedme.tuning.search", "pfedme.tuning.study_storage"):
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["tune", "pfedme"]) == 2
    assert capsys.readouterr().err == "pfedme: pfedme tune needs Optuna: pip install 'pfedme[tune]'.\n"
