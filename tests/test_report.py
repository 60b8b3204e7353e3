"""Reports: words that follow from the numbers, tables, figures, descriptions."""

from __future__ import annotations

import csv
import io
import struct
from typing import Any

import numpy as np
import pytest

from pfedme.cli.screen.bars import Bar
from pfedme.data.federation import Federation
from pfedme.engine.measure import MEASURES
from pfedme.engine.verdict import Gains, Interval
from pfedme.personalization.finished import Level
from pfedme.report.describe import describe
from pfedme.report.figures import curves
from pfedme.report.tables import (
    choice_sentences,
    comparison_csv,
    mean_std,
    newcomer_sentence,
    rows,
    sentences,
)
from pfedme.training.execution import Progress


def entry(round: int = 10, **accuracy: float | None) -> dict[str, Any]:
    """An evaluation whose models have these accuracies."""
    made: dict[str, Any] = {"round": round}
    for kind, value in accuracy.items():
        own = (
            {"mean": value, "std": 0.1, "worst_decile": value / 2, "min": 0.0} if value is not None else None
        )
        loss = None if value is None else 1 - value
        made[kind.rstrip("_")] = {"accuracy": value, "loss": loss, "train_loss": 0.5, "clients": own}
    return made


def full(shared: float, local: float, personal: float) -> dict[str, Any]:
    """An evaluation of all three models."""
    return entry(global_=shared, local=local, personal=personal)


# --- Sentences ---------------------------------------------------------------------------------------


def test_the_words_give_the_numbers_and_leave_the_verdict_to_its_interval():
    said = " ".join(sentences({"pfedme": [full(0.70, 0.80, 0.81)], "alone": [entry(personal=0.93)]}))
    assert "alone reaches 93.0 %" in said
    assert "pfedme's personal model, reaches 81.0 %" in said
    for claim in ("pays", "better off", "above", "below", "changes nothing"):
        assert claim not in said


def test_the_best_federated_model_is_meant_whosever_it_is():
    results = {
        "pfedme": [full(0.70, 0.80, 0.81)],
        "fedavg": [entry(global_=0.75, local=0.90)],
        "pooled": [entry(global_=0.99)],
        "alone": [entry(personal=0.85)],
    }
    assert "fedavg's local model, reaches 90.0 %" in sentences(results)[0]


def test_scores_in_words_are_means_over_seeds():
    alone = [entry(personal=v) for v in (0.90, 0.70)]
    joined = [entry(global_=v, local=v) for v in (0.85, 0.75)]
    said = sentences({"alone": alone, "fedavg": joined})[0]
    assert said.count("80.0 %") == 2


def test_pfedme_is_set_beside_its_like():
    results = {"pfedme": [full(0.7, 0.5, 0.80)], "fedavg": [entry(global_=0.6, local=0.75)]}
    said = " ".join(sentences(results))
    for part in (
        "personal models reach 80.0 %",
        "its global model 70.0 %",
        "FedAvg's local models",
        "75.0 %",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([(0.1, 0.3), (0.2, 0.4)], ["joining pays for newcomers with 5, 20 rows"]),
        (
            [(0.1, 0.3), (-0.1, 0.4)],
            ["joining pays for newcomers with 5 rows", "undecided with 20 rows"],
        ),
        ([(-0.3, 0.3), (-0.4, -0.1)], ["undecided with 5 rows", "alone is better with 20 rows"]),
    ],
)
def test_what_is_said_of_newcomers_follows_from_their_interval(
    ends: list[tuple[float, float]], words: list[str]
):
    levels = [
        Level(rows, 9, {}, Interval((low + high) / 2, low, high)._asdict())
        for rows, (low, high) in zip((5, 20), ends, strict=True)
    ]
    said = newcomer_sentence(levels)
    assert [word for word in words if word not in said] == []
    assert ("pays" in said) == any(low > 0 for low, _ in ends)


def test_what_is_said_of_the_chosen_models_follows_from_their_interval():
    noise = np.full(8, 0.01)
    gain = 0.1 + 0.01 * np.arange(8)
    for sign, words in ((1, "are 13.5 points above alone"), (-1, "are 13.5 points below alone")):
        said = choice_sentences(["global"] * 8, {"alone": Gains(sign * gain, noise)})[1]
        assert words in said
        assert f"{8 if sign > 0 else 0} of 8 clients gain" in said
    gain = gain * np.tile([1, -1], 4)
    said = choice_sentences(["global"] * 8, {"alone": Gains(gain, noise)})[1]
    assert "cannot be distinguished from alone" in said
    assert "above" not in said
    assert "below" not in said
    assert choice_sentences(["global"] * 8, {"alone": Gains(np.zeros(0))})[1:] == []  # no client has an AUC


def test_a_smaller_error_is_a_gain():
    gain = 0.1 + 0.01 * np.arange(8)
    for sign, words in ((1, "are 0.135 better than alone"), (-1, "are 0.135 worse than alone")):
        said = choice_sentences(["global"] * 8, {"alone": Gains(sign * gain)}, MEASURES["rmse"])[1]
        assert words in said
        assert "beyond" not in said  # which takes intervals of single clients


def test_nothing_is_said_of_alone_where_it_was_not_run():
    said = " ".join(sentences({"pfedme": [full(0.7, 0.8, 0.8)], "fedavg": [entry(global_=0.7, local=0.8)]}))
    assert "trains alone" not in said


def test_one_seed_is_called_one_seed_and_several_are_not():
    one = [entry(personal=0.8)]
    assert "This is one seed" in sentences({"alone": one})[-1]
    assert not any("This is one seed" in s for s in sentences({"alone": one * 2}))


@pytest.mark.parametrize(
    "results",
    [
        {},
        {"pfedme": []},
        {"pfedme": [], "alone": [entry(personal=0.8)]},
        {"alone": [], "pfedme": [full(0.7, 0.8, 0.8)]},
        {"alone": [entry(personal=None)], "pfedme": [full(0.7, 0.8, 0.8)]},
        {"pfedme": [entry(global_=None, local=None, personal=None)], "alone": [entry(personal=None)]},
    ],
)
def test_no_verdict_without_both_sides(results: dict[str, Any]):
    assert not any("trains alone" in said for said in sentences(results))


# --- Tables ------------------------------------------------------------------------------------------


def test_mean_and_standard_deviation_are_the_samples_in_percent():
    finals = [entry(personal=v) for v in (0.2, 0.4, 0.9)]
    mean, std = mean_std(finals, "personal") or (None, None)
    assert mean == pytest.approx(50)
    assert std == pytest.approx(100 * np.std([0.2, 0.4, 0.9], ddof=1))
    assert mean_std(finals, "global") is None
    assert mean_std([], "personal") is None
    assert mean_std(finals[:1], "personal") == (pytest.approx(20), 0.0)


def test_a_row_has_three_models_and_the_worst_tenth_of_the_last():
    table = rows(
        {
            "pfedme": [full(0.7, 0.8, 0.9)],
            "fedavg": [entry(global_=0.6, local=0.7)],
            "alone": [entry(personal=0.5), entry(personal=0.6)],
            "per-fedavg": [],
        }
    )
    assert table[0] == ["pfedme", "70.00", "80.00", "90.00", "45.00"]
    assert table[1] == ["fedavg", "60.00", "70.00", "–", "35.00"]
    # t of one degree of freedom is 12.7062, and two seeds are 5 from their mean.
    assert table[2] == ["alone", "–", "–", f"55.00 ± {12.7062 * 5:.2f}", f"27.50 ± {12.7062 * 2.5:.2f}"]
    assert table[3] == ["per-fedavg", *["diverged"] * 4]


def test_the_csv_has_fractions():
    text = comparison_csv({"alone": [entry(personal=v) for v in (0.5, 0.6)], "fedavg": [], "pfedme": []})
    assert list(csv.DictReader(io.StringIO(text))) == [
        {
            "algorithm": "alone", "evaluated": "personal", "mean": "0.550000", "std": "0.070711",
            "worst_decile": "0.275000", "seeds": "2", "half_width": f"{12.7062 * 0.05:.6f}",
            "metric": "accuracy",
        }
    ]  # fmt: skip


# --- Figures -----------------------------------------------------------------------------------------


def history(*kinds: str, shift: float = 0.0, length: int = 5) -> list[dict[str, Any]]:
    """A history that rises."""
    return [entry(10 * t, **dict.fromkeys(kinds, 0.2 + 0.1 * t + shift)) for t in range(length)]


ALL = ("global_", "local", "personal")

FIGURES: dict[str, dict[str, list[list[dict[str, Any]]]]] = {
    "one run": {"pfedme": [history(*ALL)]},
    "one run of one model": {"alone": [history("personal")]},
    "one run with seeds": {"pfedme": [history(*ALL), history(*ALL, shift=0.1)]},
    "several runs": {"pfedme": [history(*ALL)], "fedavg": [history("global_", "local")]},
    "with alone": {"fedavg": [history("global_", "local")], "alone": [history("personal")]},
    "alone first": {"alone": [history("personal")], "fedavg": [history("global_", "local")]},
    "several runs with seeds": {
        "pfedme": [history(*ALL), history(*ALL, shift=0.1)],
        "alone": [history("personal"), history("personal", shift=0.05)],
    },
    "unequal numbers of seeds": {
        "pfedme": [history(*ALL), history(*ALL, shift=0.1)],
        "alone": [history("personal")],
    },
    "a diverged one": {"pfedme": [], "fedavg": [history("global_", "local")]},
    "nothing": {"pfedme": [], "fedavg": []},
    "a single evaluation": {"pfedme": [history(*ALL, length=1)]},
    "eight": {f"fedavg-{k}": [history("global_", "local", shift=k / 50)] for k in range(8)},
    "without accuracies": {"alone": [[entry(t, personal=None) for t in range(3)]]},
}


@pytest.mark.parametrize("runs", FIGURES.values(), ids=FIGURES)
def test_a_figure_is_a_png_of_sensible_size(runs: dict[str, list[list[dict[str, Any]]]]):
    image = curves(runs)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert 800 <= width <= 4000
    assert 400 <= height <= 3000
    assert 5_000 < len(image) < 1_000_000


def test_the_same_histories_make_the_same_bytes():
    runs = FIGURES["several runs"]
    assert curves(runs) == curves(runs)


def test_the_numbers_are_in_the_figure():
    assert curves({"alone": [history("personal")]}) != curves({"alone": [history("personal", shift=0.1)]})


# --- Descriptions ------------------------------------------------------------------------------------


def federation(counts: list[int], labels: list[int], classes: int = 3, train: float = 0.5) -> Federation:
    """Clients with these labels."""
    x = np.random.default_rng(0).normal(size=(len(labels), 4)).astype(np.float32)
    return Federation.split(counts, x, np.array(labels), classes=classes, train=train)


def test_a_description_counts():
    told = describe(federation([4, 2], [0, 1, 0, 1, 2, 2]))
    assert (told["clients"], told["rows"], told["train_rows"], told["test_rows"]) == (2, 6, 3, 3)
    assert told["rows_per_client"] == {"min": 2, "median": 3.0, "max": 4}
    assert told["train_rows_per_client"] == {"min": 1, "max": 2}
    assert told["labels_per_client"] == {"min": 1, "max": 2}
    assert told["rows_per_label"] == [2, 2, 2]
    assert (told["features"], told["classes"]) == (4, 3)


def test_an_ordinary_federation_needs_no_warning():
    assert describe(federation([40, 40], [0, 1, 0, 1] * 10 + [2, 1, 2, 1] * 10))["warnings"] == []


@pytest.mark.parametrize(
    ("counts", "labels", "warnings"),
    [
        ([4, 4], [0, 1, 0, 1, 2, 2, 2, 2], ["1 client has rows of only one class"]),
        ([2, 2], [1, 1, 2, 2], ["2 clients have rows of only one class"]),
        ([4, 4], [0, 1, 0, 1, 2, 1, 2, 0], ["1 client has a label in the test rows"]),
        ([1, 4], [0, 1, 2, 1, 2], ["1 client has no test rows", "1 client has rows of only one class"]),
    ],
)
def test_what_makes_a_client_hard_is_said(counts: list[int], labels: list[int], warnings: list[str]):
    *said, tiny = describe(federation(counts, labels))["warnings"]
    assert tiny == "2 clients have fewer than 10 training rows."
    assert len(said) == len(warnings)
    for warning, start in zip(said, warnings, strict=True):
        assert warning.startswith(start)


def test_a_resumed_plan_counts_the_runs_that_are_done(capsys: pytest.CaptureFixture[str]):
    with Bar(total=9) as bar:  # three runs of three rounds, of which two were finished before
        for place in range(2):
            bar("done", place, Progress(3, 3, None))
        for t in range(4):
            bar("third", 2, Progress(t, 3, {"round": t}))
    lines = capsys.readouterr().err.splitlines()
    assert "round 0/3" in lines[0]
    assert "round 3/3" in lines[-1]
    assert not [line for line in (lines[0], lines[-1]) if "left" in line]
