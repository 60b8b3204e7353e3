"""The verdict: its laws, how often it is wrong, and where it is written."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pfedme.cli import main
from pfedme.engine.measure import ACCURACY, MEASURES, Measure
from pfedme.engine.personalized import paired
from pfedme.engine.verdict import LEVEL, PERCENT, Verdict, interval, judge, least_noise, row_noise
from pfedme.experiments import verdicts
from pfedme.runs.folder import Folder
from pfedme.runs.plan import read_plan
from pfedme.runs.scores import Ran, Scored, preferred, verdict_of
from pfedme.training.compare import resume_comparison

NUMBERS = ("gain", "low", "high")
TINY = "--data synthetic:clients=6,rows=40,features=5,classes=3 --rounds 3 --budget 6 --cohort 2 --R 2 --B 5"


def drawn(seed: int, seeds: int = 2, clients: int = 7, gain: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Scores joined and alone."""
    rng = np.random.default_rng(seed)
    alone = rng.uniform(0.4, 0.6, (seeds, clients))
    return alone + gain + 0.1 * rng.standard_normal((seeds, clients)), alone


def numbers(verdict: Verdict) -> list[float]:
    """The gain and the ends of its interval."""
    found = [getattr(verdict, name) for name in NUMBERS]
    assert None not in found
    return found


# --- Laws --------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(-0.3, 0.3), st.booleans())
def test_swapping_the_sides_turns_yes_into_no(seed: int, gain: float, with_rows: bool):
    joined, alone = drawn(seed, gain=gain)
    rows = np.full(7, 50) if with_rows else None
    one, other = judge(joined, alone, rows=rows), judge(alone, joined, rows=rows)
    assert other.verdict == {"yes": "no", "no": "yes"}.get(one.verdict, one.verdict)
    mean, low, high = numbers(one)
    assert numbers(other) == pytest.approx([-mean, -high, -low])
    assert (other.gaining, other.losing) == (one.losing, one.gaining)


@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_order_of_clients_and_seeds_does_not_matter(seed: int, random: Any):
    joined, alone = drawn(seed, seeds=3)
    rows = np.arange(20, 27)
    clients, seeds = random.sample(range(7), 7), random.sample(range(3), 3)
    one = judge(joined, alone, rows=rows)
    other = judge(joined[seeds][:, clients], alone[seeds][:, clients], rows=rows[clients])
    assert numbers(other) == pytest.approx(numbers(one))
    assert (other.verdict, other.gaining, other.losing) == (one.verdict, one.gaining, one.losing)


@given(st.integers(0, 10**6), st.floats(-1, 1), st.floats(0.1, 100))
def test_a_shift_of_both_changes_nothing_and_a_unit_only_the_unit(seed: int, shift: float, unit: float):
    joined, alone = drawn(seed)
    assert numbers(judge(joined + shift, alone + shift)) == pytest.approx(numbers(judge(joined, alone)))
    rmse = MEASURES["rmse"]
    one, other = judge(joined, alone, measure=rmse), judge(unit * joined, unit * alone, measure=rmse)
    assert numbers(other) == pytest.approx([unit * x for x in numbers(one)])
    assert other.verdict == one.verdict


def test_less_of_an_error_is_better():
    joined, alone = drawn(0)
    assert judge(joined, alone).verdict == "yes"
    for key in ("log_loss", "rmse", "mae", "brier"):
        found = judge(joined, alone, measure=MEASURES[key])
        assert found.verdict == "no"
        assert "higher by" in found.sentence


def test_the_interval_is_students_over_clients():
    joined, alone = drawn(1, seeds=1)
    found = stats.ttest_rel(joined[0], alone[0]).confidence_interval(LEVEL)
    assert numbers(judge(joined[0], alone[0])) == pytest.approx(
        [np.mean(joined - alone), found.low, found.high]
    )


def test_copies_of_a_seed_add_nothing_and_seeds_that_disagree_widen_the_interval():
    joined, alone = drawn(2, seeds=1)
    one = numbers(judge(joined, alone))
    assert numbers(judge(np.repeat(joined, 9, axis=0), np.repeat(alone, 9, axis=0))) == pytest.approx(one)
    apart = np.concatenate([joined - 0.1, joined, joined + 0.1])
    mean, low, high = numbers(judge(apart, np.repeat(alone, 3, axis=0)))
    assert mean == pytest.approx(one[0])
    assert low < one[1]
    assert high > one[2]


def test_a_client_without_a_score_is_left_out():
    joined, alone = drawn(3)
    more = [np.insert(a, 2, np.nan, axis=1) for a in (joined, alone)]
    rows = np.full(7, 30)
    assert judge(*more, rows=np.insert(rows, 2, 0)) == judge(joined, alone, rows=rows)


# --- Cannot tell -------------------------------------------------------------------------------------


def test_nothing_is_said_while_losses_were_still_falling():
    joined, alone = drawn(0)
    found = judge(joined, alone, improving=True)
    assert judge(joined, alone).verdict == "yes"
    assert found.verdict == "cannot tell"
    assert "increase --budget" in found.why
    assert "still falling" in found.sentence


@pytest.mark.parametrize("rows", [None, np.full(5, 10)])
def test_no_difference_is_no_verdict(rows: np.ndarray | None):
    score = np.linspace(0.5, 0.9, 5)
    found = judge(score, score, rows=rows)
    assert (found.verdict, found.gain) == ("cannot tell", 0)
    assert "no difference" in found.why


@pytest.mark.parametrize("clients", [0, 1])
def test_fewer_than_two_clients_show_nothing(clients: int):
    found = judge(np.full(clients, 0.9), np.full(clients, 0.5))
    assert (found.verdict, found.gain, found.clients) == ("cannot tell", None, clients)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_few_clients_that_happen_to_be_alike_are_not_certain():
    assert judge(np.full(3, 0.5), np.full(3, 0.0), rows=np.full(3, 2)).verdict == "cannot tell"
    assert judge(np.full(3, 1.0), np.full(3, 0.5), rows=np.full(3, 2)).verdict == "cannot tell"
    assert judge(np.full(3, 1.0), np.full(3, 0.5), rows=np.full(3, 200)).verdict == "yes"


def test_a_difference_too_small_to_matter_is_no_verdict():
    alone = np.linspace(0.5, 0.9, 50)
    found = judge(alone + 0.0005, alone)
    assert found.verdict == "cannot tell"
    assert "0.1 points, too small to matter" in found.why
    assert judge(alone + 0.0015, alone).verdict == "yes"


# --- Words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "start"),
    [
        (0.1, "Joining pays: +"),
        (-0.1, "Clients are better off alone: −"),
        (0.0, "Cannot tell whether joining pays: "),
    ],
)
def test_the_sentence_carries_the_interval(gain: float, start: str):
    alone = np.linspace(0.5, 0.9, 8)
    found = judge(alone + gain + 0.01 * np.tile([1, -1], 4), alone, name="fedavg's global model")
    assert found.sentence.startswith(start)
    _, low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in numbers(found))
    assert (
        f"fedavg's global model over alone, {PERCENT} interval {low} to {high} (8 clients, 1 seed)"
        in found.sentence
    )


@pytest.mark.parametrize("measure", [ACCURACY, *(MEASURES[key] for key in ("auc", "r2", "log_loss", "rmse"))])
def test_every_metric_has_a_sentence(measure: Measure):
    joined, alone = drawn(5)
    found = judge(joined, alone, measure=measure)
    assert found.metric == measure.key
    assert (measure.name if measure is not ACCURACY else "points") in found.sentence


# --- How often it is wrong ---------------------------------------------------------------------------


def rows_right(
    rng: np.random.Generator, clients: int, rows: int, differ: float, gain: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies of two models of which one alone is right on a share `differ` of the rows."""
    shares = [(differ + gain) / 2, (differ - gain) / 2, (1 - differ) * 0.8, (1 - differ) * 0.2]
    mine, theirs, both, _ = rng.multinomial(rows, shares, clients).T
    return (mine + both) / rows, (theirs + both) / rows


@pytest.mark.parametrize("clients", [2, 3, 8, 16])
@pytest.mark.parametrize(("rows", "differ"), [(3, 0.5), (10, 0.2), (100, 0.05), (100, 0.5)])
def test_a_verdict_without_a_true_difference_is_rare(clients: int, rows: int, differ: float):
    rng = np.random.default_rng([clients, rows])
    counts = np.full(clients, rows)
    said = [judge(*rows_right(rng, clients, rows, differ), rows=counts).verdict for _ in range(600)]
    assert 600 - said.count("cannot tell") <= 24  # 2 % would be 12


def test_the_interval_holds_the_true_gain_of_clients_that_differ():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(1000):
        true = 0.1 * (rng.exponential(size=10) - 1)  # skewed: a few gain much
        gains = true + 0.03 * rng.standard_normal(10)
        found = interval(gains)
        held.append(found.low <= true.mean() <= found.high)
    assert np.mean(held) > 0.99  # of these clients; of others like them it would be about 90 %


def test_a_true_gain_is_seen():
    rng = np.random.default_rng(1)
    counts = np.full(16, 400)
    said = [judge(*rows_right(rng, 16, 400, 0.1, gain=0.03), rows=counts).verdict for _ in range(200)]
    assert said.count("yes") >= 190


@given(st.integers(1, 500), st.floats(0, 1), st.floats(0, 1))
def test_the_noise_of_rows_is_that_of_independent_errors(n: int, p: float, q: float):
    (found,) = row_noise(np.array([p]), np.array([q]), np.array([n]))
    want = np.sqrt((p * (1 - p) + q * (1 - q)) / n)
    assert want - 2 / n <= found <= want + 2 / n
    assert found > 0


@given(st.integers(1, 500), st.data())
def test_the_least_noise_is_mcnemars_with_as_few_differing_rows_as_there_can_be(n: int, data: Any):
    b = data.draw(st.integers(0, n))
    c = data.draw(st.integers(0, n - b))
    _, half = paired(np.arange(n) < b, (np.arange(n) >= b) & (np.arange(n) < b + c), np.zeros(n, int), 1)
    (found,) = least_noise(np.array([(b - c) / n]), np.array([n]))
    assert found <= half[0] / 1.96 + 1e-9
    if min(b, c) == 0:
        assert found == pytest.approx(half[0] / 1.96)


# --- Which model is compared -------------------------------------------------------------------------


def test_the_joined_model_is_chosen_by_validation_and_never_by_test_scores():
    first = Scored("pfedme", "personal", {0: {"a": (0.1, 9)}}, None)
    others = [first._replace(kind=kind, scores={0: {"a": (0.9, 9)}}) for kind in ("global", "local")]
    assert preferred([first, *others]) is first
    judged = [model._replace(validation=loss) for model, loss in zip(others, (0.7, 0.6), strict=True)]
    assert preferred([first, *judged]) is judged[1]


# --- Where it is written -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two methods and alone, with two seeds."""
    out = tmp_path_factory.mktemp("verdict") / "compared"
    assert (
        main(["compare", "fedavg", "pfedme", "alone", *TINY.split(), "--seeds", "2", "--out", str(out)]) == 0
    )
    return out


def column(folder: Path, name: str) -> np.ndarray:
    """A column of the clients' table of a run."""
    with (folder / "clients.csv").open() as file:
        return np.array([float(row[name]) for row in csv.DictReader(file)])


def scores(compared: Path, method: str, kind: str) -> np.ndarray:
    """Every client's accuracy by seed."""
    return np.stack([column(compared / method / f"seed-{s}", f"{kind}_accuracy") for s in (0, 1)])


def test_a_comparison_ends_with_a_verdict(compared: Path, capsys: pytest.CaptureFixture[str]):
    document = json.loads((compared / "compare.json").read_text())
    assert len(document["runs"]) == 6
    rows = column(compared / "alone" / "seed-0", "n_test")
    want = judge(
        scores(compared, "fedavg", "global"), scores(compared, "alone", "personal"), rows=rows,
        name="fedavg's global model", improving=any(run[2]["auto"]["improving"] for run in ran(compared)),
    )  # fmt: skip
    assert document["verdict"] == want.to_json()
    capsys.readouterr()
    assert main(["resume", str(compared)]) == 0
    assert want.sentence in " ".join(capsys.readouterr().out.split())
    assert main(["resume", str(compared), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == want.to_json()


def ran(compared: Path, auto: dict[str, dict[str, Any]] | None = None) -> list[Ran]:
    """The runs of a comparison, with something about the training of some methods put into their records."""
    return [
        (label, path, Folder(path).read() | ({"auto": auto[label]} if auto and label in auto else {}))
        for label in ("fedavg", "pfedme", "alone")
        for path in sorted((compared / label).iterdir())
    ]


def test_validation_loss_chooses_what_is_compared(compared: Path):
    auto = {name: {"validation": {"global": 0.9, "personal": 0.8}} for name in ("fedavg", "pfedme")}
    found = verdict_of(ran(compared, auto))
    assert found is not None
    assert found.joined == "pfedme's personal models"
    gain = scores(compared, "pfedme", "personal") - scores(compared, "alone", "personal")
    assert found.gain == pytest.approx(gain.mean())


@pytest.mark.parametrize("method", ["pfedme", "alone"])
def test_no_verdict_while_anything_compared_was_improving(compared: Path, method: str):
    found = verdict_of(ran(compared, {method: {"improving": True}}))
    assert found is not None
    assert found.verdict == "cannot tell"
    assert "still falling" in found.sentence


@pytest.mark.parametrize("methods", [("fedavg", "pfedme"), ("alone",)])
def test_without_both_sides_there_is_no_verdict(compared: Path, methods: tuple[str, ...]):
    assert verdict_of([run for run in ran(compared) if run[0] in methods]) is None


def test_a_comparison_from_before_there_were_verdicts_is_read(compared: Path, tmp_path: Path):
    shutil.copytree(compared, tmp_path / "old")
    plan = tmp_path / "old" / "compare.json"
    new = plan.read_bytes()
    plan.write_text(json.dumps(json.loads(new)["runs"]))
    assert read_plan(tmp_path / "old") == json.loads(new)["runs"]
    assert resume_comparison(tmp_path / "old").verdict is not None
    assert plan.read_bytes() == new


@pytest.mark.slow
def test_personal_models_get_a_verdict_too(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(compared / "fedavg" / "seed-0", tmp_path / "run")
    argv = ["personalize", str(tmp_path / "run"), "--personalize", "auto:steps=2,folds=2"]
    assert main(argv) == 0
    found = json.loads((tmp_path / "run" / "personalized.json").read_text())["verdict"]
    with (tmp_path / "run" / "personalized.csv").open() as file:
        table = list(csv.DictReader(file))
    gain = np.array([float(row["gain_over_alone"]) for row in table])
    half = np.array([float(row["gain_over_alone_ci95"]) for row in table])
    want = interval(gain, half / 1.96)
    assert [found[name] for name in NUMBERS] == pytest.approx(list(want), abs=1e-5)
    assert (found["gaining"], found["losing"]) == ((gain > half).sum(), (gain < -half).sum())
    assert found["sentence"] in " ".join(capsys.readouterr().out.split())


# --- The study ---------------------------------------------------------------------------------------


def tiny(law: Any) -> verdicts.Setting:
    """A small federation of the study."""
    return verdicts.Setting(law, "", verdicts.Drawn(law=law, clients=4, train=16, test=8, features=3))


def test_the_truth_of_the_study_is_that_of_its_law():
    data = tiny("pool").data
    x, p = data.draw(50_000, 3)
    weights = np.linalg.lstsq(x[0], np.log(p[0] / (1 - p[0])), rcond=None)[0]
    assert np.linalg.norm(weights) == pytest.approx(3, rel=1e-5)
    federation = dataclasses.replace(data, train=5_000, test=5_000).load()
    assert federation.n_train.tolist() == [5_000] * 4
    assert np.mean(federation.y) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("gain", "truth", "false"),
    [(0.1, 0.1, 0), (0.1, -0.01, 1), (-0.1, 0.0, 1), (-0.1, -0.2, 0), (0.0, 0.3, 0)],
)
def test_a_verdict_is_false_if_its_sign_is_not_that_of_the_truth(gain: float, truth: float, false: int):
    alone = np.linspace(0.5, 0.9, 8)
    said = judge(alone + gain + 0.01 * np.tile([1, -1], 4), alone)
    done = [verdicts.Repetition("pool", 0, said, truth)]
    found = verdicts.Summary.of(verdicts.SETTINGS[0], done)
    assert found.false == false
    assert found.yes + found.no == (gain != 0)
    assert found.covered == (abs(gain - truth) < 0.005)
    assert f"| {100.0 * false:.1f} % |" in verdicts.page([found])


@pytest.mark.slow
def test_a_repetition_of_the_study_compares_and_knows_the_truth():
    shuffled = verdicts.repeat(tiny("shuffled"), 0)
    assert shuffled.truth == 0
    again = verdicts.repeat(tiny("shuffled"), 0)
    assert again == shuffled
    assert shuffled.false == (shuffled.verdict.verdict != "cannot tell")
