"""The HTML report: its numbers are those of the folders, and a browser shows them and nothing else."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from browser import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pfedme.algorithms import FedAvg
from pfedme.cli import main
from pfedme.core.models import parse_model
from pfedme.data import parse_data
from pfedme.engine.personalized import Candidate
from pfedme.report import html
from pfedme.report.figures import COLOURS
from pfedme.report.html.document import document
from pfedme.report.html.page import embedded
from pfedme.report.html.page import page as rendered
from pfedme.report.html.read import read
from pfedme.runs.run import Run
from pfedme.training.compare import carry_out_plan
from pfedme.training.execution import Wanted

ASSETS = Path(str(html.__file__)).parent
DATA = "synthetic:clients=14,features=5,classes=3,rows=24,alpha=1,beta=1"
TINY = shlex.split("--rounds 4 --budget 6 --cohort 3 --R 2 --B 5 --eval-every 1")
HOSTILE = '</script><img src=x onerror="window.broken=1"><b>&amp;'
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison in `compared`, and a run with personal models and newcomers in `personal`."""
    out = tmp_path_factory.mktemp("report")
    names = ["pfedme", "fedavg", "alone"]
    compare = ["compare", *names, "--data", DATA, *TINY, "--seeds", "3", "--out", str(out / "compared")]
    how = "auto:steps=3,folds=2,B=4"
    run = ["run", "fedavg", "--data", DATA, *TINY, "--personalize", how, "--holdout-clients", "0.2"]
    assert main(compare) == 0
    assert main([*run, "--out", str(out / "personal")]) == 0
    return out


def record(path: Path) -> dict[str, Any]:
    """A run's record."""
    return json.loads((path / "record.json").read_text())


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(io.StringIO(path.read_text())))


def shown(*folders: Path) -> dict[str, Any]:
    """The document of a page, as the page has it."""
    reader = Reader()
    reader.feed(rendered(document(read(folders))))
    return json.loads(reader.data)


def close(value: float) -> Any:
    """A number that the page shows with six digits."""
    return pytest.approx(value, rel=1e-5, abs=1e-9)


class Reader(HTMLParser):
    """The tags of a page, with their attributes, and its embedded document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == ("script", {"type": "application/json", "id": "document"}):
            self.data += data.strip() and data


# --- numbers


def test_results_are_means_over_seeds_with_students_interval(folder: Path):
    found = shown(folder / "compared")
    assert [group["label"] for group in found["groups"]] == ["pfedme", "fedavg", "alone"]
    for group in found["groups"]:
        finals = [record(folder / "compared" / group["label"] / f"seed-{seed}")["final"] for seed in SEEDS]
        assert set(group["final"]) == set(group["kinds"]) == set(finals[0]) & {"global", "local", "personal"}
        for kind, told in group["final"].items():
            for key, values in (
                ("", [final[kind]["accuracy"] for final in finals]),
                ("worst", [final[kind]["clients"]["worst_decile"] for final in finals]),
            ):
                half = stats.t.interval(0.95, 2, scale=stats.sem(values))[1] if np.std(values) else 0.0
                assert told[key or "value"] == close(float(np.mean(values)))
                assert told[f"{key}_ci" if key else "ci"] == close(half)


def test_one_seed_has_the_interval_of_its_test_rows_and_the_curve_is_the_history(folder: Path):
    path = folder / "compared" / "pfedme" / "seed-1"
    (group,) = shown(path)["groups"]
    history = record(path)["history"]
    assert group["curves"]["rounds"] == [entry["round"] for entry in history]
    final = record(path)["final"]
    for kind in ("global", "local", "personal"):
        assert group["final"][kind]["ci"] == close(final[kind]["half_width"]["accuracy"])
        for key in ("accuracy", "train_loss"):
            assert group["curves"][kind][key] == [close(entry[kind][key]) for entry in history]
            assert f"{key}_ci" not in group["curves"][kind]


def test_curves_of_several_seeds_are_means(folder: Path):
    group = shown(folder / "compared")["groups"][1]
    histories = [record(folder / "compared" / "fedavg" / f"seed-{seed}")["history"] for seed in SEEDS]
    for kind in ("global", "local"):
        values = np.array([[entry[kind]["train_loss"] for entry in history] for history in histories])
        assert group["curves"][kind]["train_loss"] == [close(v) for v in values.mean(0)]
        assert group["curves"][kind]["train_loss_ci"] == [
            close(v) for v in stats.t.ppf(0.975, 2) * stats.sem(values)
        ]


def test_clients_and_their_gain_over_alone_are_those_of_clients_csv(folder: Path):
    found = shown(folder / "compared")
    tables = {
        name: [rows(folder / "compared" / name / f"seed-{seed}" / "clients.csv") for seed in SEEDS]
        for name in ("pfedme", "fedavg", "alone")
    }

    def mean(name: str, kind: str, client: str) -> float:
        return float(
            np.mean([float(r[f"{kind}_accuracy"]) for t in tables[name] for r in t if r["client"] == client])
        )

    for group in found["groups"]:
        told = group["clients"]
        assert told["of"] == 14
        assert told["client"] == [row["client"] for row in tables[group["label"]][0]]
        for kind in group["kinds"]:
            assert told[kind] == [close(mean(group["label"], kind, c)) for c in told["client"]]
    assert [gain["label"] for gain in found["gains"]] == ["pfedme: personal model", "fedavg: local model"]
    for gain, name, kind in zip(found["gains"], ("pfedme", "fedavg"), ("personal", "local"), strict=True):
        told = gain["clients"]
        assert sorted(told["client"]) == sorted(map(str, range(14)))
        assert told["gain"] == sorted(told["gain"])
        for k, client in enumerate(told["client"]):
            p, q, n = mean(name, kind, client), mean("alone", "personal", client), told["n_test"][k]
            shares = [(n * v + 1) / (n + 2) for v in (p, q)]  # a row right and a row wrong added
            assert (told["mine"][k], told["alone"][k], told["gain"][k]) == (close(p), close(q), close(p - q))
            assert told["ci"][k] == close(1.96 * math.sqrt(sum(v * (1 - v) for v in shares) / n))
        sure = [v - c > 0 for v, c in zip(told["gain"], told["ci"], strict=True)]
        assert gain["up"] == sum(sure)
        assert gain["mean"] == close(float(np.mean(told["gain"])))


def test_gain_choice_and_newcomers_are_those_of_the_personal_models(folder: Path):
    path = folder / "personal"
    found = shown(path)
    table = {row["client"]: row for row in rows(path / "personalized.csv")}
    (gain,) = found["gains"]
    told = gain["clients"]
    assert set(told["client"]) == set(table)
    for k, client in enumerate(told["client"]):
        row = table[client]
        assert told["gain"][k] == close(float(row["gain_over_alone"]))
        assert told["ci"][k] == close(float(row["gain_over_alone_ci95"]))
        assert told["mine"][k] == close(float(row["recommended_accuracy"]))
    (chosen,) = found["chosen"]
    counts = {count["label"]: count["clients"] for count in chosen["counts"]}
    assert sum(counts.values()) == len(table)
    for row in table.values():
        counts[Candidate(row["choice"], float(row["lam"] or 0)).label] -= 1
    assert not any(counts.values())
    (newcomers,) = found["newcomers"]
    for row in rows(path / "newcomers.csv"):
        place = newcomers["rows"].index(int(row["rows"]))
        assert newcomers["methods"][row["method"]][place] == close(float(row["mean"]))
        assert newcomers["clients"][place] == int(row["clients"])
    methods = json.loads((path / "personalized.json").read_text())["methods"]
    assert found["methods"][0]["methods"] == methods


def test_the_worst_clients_are_the_worst(folder: Path):
    found = shown(folder / "compared")
    for worst in found["worst"]:
        group = found["groups"][worst["group"]]
        values = dict(zip(group["clients"]["client"], group["clients"][group["kinds"][-1]], strict=True))
        told = [row["client"] for row in worst["clients"]]
        assert len(told) == 10
        assert max(values[client] for client in told) <= min(v for c, v in values.items() if c not in told)
        for row in worst["clients"]:
            for place, value in zip(worst["beside"], row["values"], strict=True):
                other = found["groups"][place]
                at = other["clients"]["client"].index(row["client"])
                assert value == other["clients"][other["kinds"][-1]][at]


def test_cost_is_bytes_and_gradients(folder: Path):
    groups = {group["label"]: group for group in shown(folder / "compared")["groups"]}
    for name, each in (("pfedme", 2 * 5), ("fedavg", 2), ("alone", 2)):
        cost = groups[name]["cost"]
        paths = [folder / "compared" / name / f"seed-{seed}" for seed in SEEDS]
        timing = [record(path)["timing"] for path in paths]
        for key in ("compile_s", "train_s", "eval_s"):
            assert cost[key] == close(float(np.mean([t[key] for t in timing])))
        tensors = safetensors.numpy.load_file(paths[0] / "model.safetensors")
        assert cost["bytes"] == (4 * 3 * 2 * tensors["w"].nbytes if "w" in tensors else 0)
        assert (cost["gradients"], cost["gradients_in_all"]) == (each, 4 * each)
        assert groups[name]["commands"] == [record(path)["command"] for path in paths]


def test_words_say_what_was_run(folder: Path):
    found = shown(folder / "compared")
    assert found["title"] == "Predicting the class of synthetic rows at 14 clients"
    (about,) = found["about"]
    for part in (
        "Softmax regression (mlr)", "pfedme, fedavg and alone", "4 rounds", "3 clients drawn",
        "seeds 0, 1 and 2", "14 clients",
    ):  # fmt: skip
        assert part in about
    (headline,) = shown(folder / "compared" / "fedavg" / "seed-0")["headline"]
    assert "'pfedme compare fedavg alone'" in headline["lead"]
    assert "fedavg's local models reach" in headline["rest"][0]


def test_runs_of_other_problems_and_settings_are_named_apart(folder: Path, tmp_path: Path):
    for name, change in (("eta", {"algorithm": {"eta": 0.5}}), ("data", {"data": {"iid": True}})):
        path = tmp_path / name
        shutil.copytree(folder / "compared" / "fedavg" / "seed-0", path)
        told = record(path)
        for part, fields in change.items():
            told["config"][part] |= fields
        if name == "eta":
            told["auto"]["found"] = []  # it is given
        (path / "record.json").write_text(json.dumps(told))
    found = shown(folder / "compared", tmp_path / "eta", tmp_path / "data")
    labels = [group["label"] for group in found["groups"]]
    assert sum("eta 0.5" in label for label in labels) == 1
    assert sum("iid=True" in label for label in labels) == 1
    assert len(found["headline"]) == 2
    # The run on other data has no `alone` beside it.
    assert len(labels) == 5
    assert {labels[gain["group"]] for gain in found["gains"]} == {
        label for label in labels if "iid" not in label and not label.startswith("alone")
    }


# --- runs without a result


def test_a_run_that_is_given_twice_is_counted_once(folder: Path, tmp_path: Path):
    path = folder / "compared" / "fedavg" / "seed-0"
    assert shown(folder / "compared", path, folder / "compared") == shown(folder / "compared")
    shutil.copytree(path, tmp_path / "again")
    found = shown(path, tmp_path / "again")
    assert found["groups"][0]["seeds"] == [0]
    (notice,) = found["notices"]
    assert (notice["status"], notice["path"]) == ("repeated", str(tmp_path / "again"))
    assert str(path) in notice["reason"]


def stopped(path: Path, out: Path) -> Path:
    """A copy of the comparison with runs that have not finished, have diverged, or have not begun."""
    shutil.copytree(path, out)
    half = record(out / "pfedme" / "seed-0") | {"status": "running", "final": None}
    half["history"] = half["history"][:3]
    (out / "pfedme" / "seed-0" / "record.json").write_text(json.dumps(half))
    for seed in SEEDS:
        lost = record(out / "fedavg" / f"seed-{seed}") | {"status": "diverged", "final": None}
        lost |= {"reason": "fedavg diverged: lower --eta.", "history": lost["history"][:1]}
        (out / "fedavg" / f"seed-{seed}" / "record.json").write_text(json.dumps(lost))
    (out / "alone" / "seed-2" / "record.json").unlink()
    return out


def test_unfinished_diverged_and_planned_runs_are_listed(folder: Path, tmp_path: Path):
    found = shown(stopped(folder / "compared", tmp_path / "compared"))
    notices = {notice["run"]: notice for notice in found["notices"]}
    assert notices["pfedme, seed 0"]["status"] == "unfinished"
    assert "round 2 of 4" in notices["pfedme, seed 0"]["reason"]
    assert notices["fedavg, seed 1"]["reason"] == "fedavg diverged: lower --eta."
    assert notices["alone, seed 2"]["status"] == "not begun"
    assert len(notices) == 5
    pfedme, fedavg, alone = found["groups"]
    assert [g["finished"] for g in (pfedme, fedavg, alone)] == [2, 0, 2]
    assert fedavg["final"] == {}
    assert fedavg["curves"]["rounds"] == [0]
    assert pfedme["curves"]["rounds"] == [0, 1, 2, 3, 4]


def planned(path: Path, out: Path) -> Path:
    """A comparison like another one that has not begun."""
    out.mkdir()
    shutil.copy(path / "compare.json", out)
    return out


def test_a_page_about_nothing_that_has_begun(folder: Path, tmp_path: Path):
    found = shown(planned(folder / "compared", tmp_path / "compared"))
    assert found["groups"] == []
    assert "none of these runs has finished" in found["headline"][0]["lead"]
    assert len(found["notices"]) == 9


def regression(path: Path, out: Path) -> Path:
    """A copy of the comparison as if its labels were quantities."""
    shutil.copytree(path, out)
    for place in out.glob("*/*/record.json"):
        told = json.loads(place.read_text())
        for entry in (*told["history"], told["final"]):
            for kind in {"global", "local", "personal"} & set(entry):
                r2 = entry[kind]["accuracy"] - 0.3
                entry[kind] |= {"accuracy": None, "r2": r2, "rmse": 50 * (1 - r2), "calibration": None}
        told["metric"] = {"key": "r2", "why": ""}
        told["final"].pop("baseline", None)
        place.write_text(json.dumps(told))
        clients = place.with_name("clients.csv")
        clients.write_text(clients.read_text().replace("_accuracy", "_rmse"))
    return out


def test_a_regression_shows_r2_and_its_errors(folder: Path, tmp_path: Path):
    out = regression(folder / "compared", tmp_path / "compared")
    found = shown(out)
    for group in found["groups"]:
        finals = [record(out / group["label"] / f"seed-{seed}")["final"] for seed in SEEDS]
        assert (group["measure"], group["of_client"]) == ("r2", "rmse")
        for kind in group["kinds"]:
            assert group["final"][kind]["value"] == close(float(np.mean([f[kind]["r2"] for f in finals])))
            rmse = float(np.mean([final[kind]["rmse"] for final in finals]))
            assert group["metrics"][kind]["rmse"][0] == close(rmse)
    assert len(found["gains"]) == 2
    for gain in found["gains"]:
        told = gain["clients"]
        for mine, alone, more in zip(told["mine"], told["alone"], told["gain"], strict=True):
            assert more == pytest.approx(alone - mine, abs=1e-5)
    worst = [row["values"][0] for row in found["worst"][0]["clients"]]
    assert worst == sorted(worst, reverse=True)


def renamed(path: Path, out: Path, names: list[str]) -> Path:
    """A copy of a run whose first clients have other names."""
    shutil.copytree(path, out)
    table = rows(out / "clients.csv")
    for row, name in zip(table, names, strict=False):
        row["client"] = name
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    (out / "clients.csv").write_text(text.getvalue())
    return out


def crowded(path: Path, out: Path, clients: int) -> Path:
    """A copy of a run with many clients."""
    shutil.copytree(path, out)
    rng = np.random.default_rng(0)
    lines = ["client,n_train,n_test,global_accuracy,local_accuracy,personal_accuracy"]
    for i in range(clients):
        accuracies = ",".join(map(str, rng.random(3)))
        lines.append(f"client number {i},{rng.integers(1, 9999)},{rng.integers(1, 99)},{accuracies}")
    (out / "clients.csv").write_text("\n".join(lines) + "\n")
    return out


@pytest.mark.slow
def test_of_many_clients_a_sample_is_shown_and_the_page_stays_small(folder: Path, tmp_path: Path):
    paths = [
        crowded(folder / "compared" / name / "seed-0", tmp_path / name, 30_000)
        for name in ("fedavg", "alone")
    ]
    found = shown(*paths)
    fedavg = found["groups"][0]["clients"]
    assert (len(fedavg["client"]), fedavg["of"]) == (2000, 30_000)
    assert len(set(fedavg["client"])) == 2000
    assert found["gains"][0]["clients"]["of"] == 30_000
    least = min(float(row["local_accuracy"]) for row in rows(paths[0] / "clients.csv"))
    assert found["worst"][0]["clients"][0]["values"][0] == close(least)
    assert len(rendered(found).encode()) < 2e6


@pytest.mark.slow
def test_of_many_evaluations_some_are_drawn_with_the_first_and_the_last(folder: Path, tmp_path: Path):
    path = tmp_path / "long"
    shutil.copytree(folder / "compared" / "fedavg" / "seed-0", path)
    told = record(path)
    told["history"] = [told["final"] | {"round": t} for t in range(5000)]
    (path / "record.json").write_text(json.dumps(told))
    at = shown(path)["groups"][0]["curves"]["rounds"]
    assert (at[0], at[-1]) == (0, 4999)
    assert len(at) == 200


# --- the page


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), st.text()))
def test_an_embedded_document_is_read_back_and_holds_no_markup(content: dict[str, str]):
    text = embedded(content)
    assert json.loads(text) == content
    assert not set(text) & set("<>&")


def test_names_cannot_break_out_of_the_page(folder: Path, tmp_path: Path):
    path = folder / "compared" / "fedavg" / "seed-0"
    names = [HOSTILE, "<!--<script>", "$title", "\u2028"]
    plain, hostile = Reader(), Reader()
    plain.feed(rendered(document(read([path]))))
    hostile.feed(rendered(document(read([renamed(path, tmp_path / "x", names)]))))
    assert hostile.tags[:5] == plain.tags[:5]
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert json.loads(hostile.data)["groups"][0]["clients"]["client"][:4] == names


def test_nothing_outside_the_page_is_named(folder: Path):
    text = rendered(document(read([folder / "compared", folder / "personal"])))
    reader = Reader()
    reader.feed(text)
    assert re.findall(r"[a-z]+://[^\s\"')]*", text) == ["http://www.w3.org/2000/svg"]  # a name, not a place
    for tag, attributes in reader.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "data:").startswith("data:"), tag
    assert not re.search(r"@import|url\(", text)


def test_colours_are_those_of_the_figures():
    text = (ASSETS / "page.css").read_text()
    light = text[: text.index("@media")]
    paper = text[text.index("@media print") :]
    for place, colour in enumerate(COLOURS):
        for part in (light, paper):
            assert f"--c{place}: {colour.lower()};" in part


def test_assets_are_installed_with_the_package():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["pfedme.report.html"]
    there = {path.name for pattern in patterns for path in ASSETS.glob(pattern)}
    assert there == {path.name for path in ASSETS.iterdir() if path.is_file() and path.suffix != ".py"}


# --- commands


@pytest.mark.slow
def test_commands_leave_a_report_in_their_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for path, groups in ((folder / "compared", 3), (folder / "personal", 1)):
        reader = Reader()
        reader.feed((path / "report.html").read_text())
        found = json.loads(reader.data)
        assert len(found["groups"]) == groups
        assert found == shown(path)
    assert not list((folder / "compared").glob("*/*/report.html"))
    out = tmp_path / "run"
    shutil.copytree(folder / "personal", out)
    for name in ("report.html", "personalized.csv", "newcomers.csv"):
        (out / name).unlink()
    assert main(["personalize", str(out)]) == 0
    assert (out / "report.html").read_text() == (folder / "personal" / "report.html").read_text()
    capsys.readouterr()
    # What was true of the run that is overwritten is not of the next one.
    assert main(["run", "fedavg", "--data", DATA, *TINY, "--out", str(out), "--force"]) == 0
    assert f"Report: {out / 'report.html'}" in capsys.readouterr().out
    found = shown(out)
    assert found["gains"] == found["newcomers"] == found["chosen"] == []


def test_runs_of_an_experiment_leave_no_report(tmp_path: Path):
    run = Run(algorithm=FedAvg(R=2, B=5), data=parse_data(DATA), model=parse_model("mlr"), rounds=1, cohort=2)
    carry_out_plan([("fedavg", run, tmp_path / "run")], wanted=Wanted(files=False))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"record.json"}
    # Without the files there is less to tell, and that much is told.
    found = shown(tmp_path / "run")
    assert found["groups"][0]["clients"] is None
    size = run.prepare()[1].start().server.ravel().size
    assert found["groups"][0]["cost"]["bytes"] == 1 * 2 * 2 * 4 * size
    assert found["worst"] == found["gains"] == []


def test_report_writes_one_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "page.html"
    argv = ["report", str(folder / "compared"), str(folder / "personal"), "-o", str(out)]
    assert main(argv) == 0
    assert capsys.readouterr().out == f"Report: {out}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    before = out.read_bytes()
    assert main([*argv, "--force"]) == 0
    assert out.read_bytes() == before


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command complains of; it ends with status 2 and no traceback."""
    assert main(["report", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pfedme: ")
    assert said.err.count("\n") == 1
    return said.err


def test_what_is_no_run_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = str(tmp_path / "page.html")
    (tmp_path / "empty").mkdir()
    assert f"There is no folder {tmp_path / 'none'}." in refused(capsys, str(tmp_path / "none"), "-o", page)
    assert "record.json nor compare.json" in refused(capsys, str(tmp_path / "empty"), "-o", page)
    assert "DIR" in refused(capsys, "-o", page)
    run = str(folder / "personal")
    assert "no folder" in refused(capsys, run, "-o", str(tmp_path / "none" / "page.html"))
    assert "ends in .html" in refused(capsys, run, "-o", str(tmp_path / "page.txt"))
    (tmp_path / "dir.html").mkdir()
    assert "is a folder" in refused(capsys, run, "-o", str(tmp_path / "dir.html"), "--force")
    assert "--forced" in refused(capsys, run, "--forced")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "dir.html"}


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("record.json", lambda text: text[: len(text) // 2], "record.json cannot be read"),
        ("record.json", lambda _: "[]", "is not the record of a run"),
        ("record.json", lambda text: text.replace('"status"', '"state"'), "'status' is missing"),
        ("record.json", lambda text: text.replace("finished", "dancing"), "its status is 'dancing'"),
        ("record.json", lambda text: text.replace('"round": 2', '"round": "two"'), "not a whole number"),
        ("record.json", lambda text: re.sub(r'"accuracy": [\d.]+', '"accuracy": "x"', text), "not a number"),
        ("record.json", lambda text: text.replace("train_s", "trained"), "'train_s' is missing"),
        ("clients.csv", lambda text: text.replace("n_train", "rows"), "no column 'n_train'"),
        ("clients.csv", lambda text: text + "3,4\n", "has 2 cells, not"),
        ("clients.csv", lambda text: re.sub(r"\n(\d+),\d+", r"\n\1,many", text), "Column 'n_train'"),
        ("personalized.csv", lambda text: text.replace("gain_over_alone,", "gain,"), "'gain_over_alone'"),
        ("personalized.json", lambda _: "{}", "'methods' is missing"),
        ("newcomers.csv", lambda text: text.replace("mean", "average"), "no column 'mean'"),
        ("model.safetensors", lambda _: "nothing", "model.safetensors cannot be read"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, told: str
):
    shutil.copytree(folder / "personal", tmp_path / "run")
    path = tmp_path / "run" / name
    text = path.read_text(errors="ignore")
    assert change(text) != text
    path.write_text(change(text))
    said = refused(capsys, str(tmp_path / "run"), "-o", str(tmp_path / "page.html"))
    assert told in said
    assert str(path) in said
    assert not (tmp_path / "page.html").exists()


# --- in a browser

PAGES = {
    "single": {"results", "curves", "sizes"},
    "compared": {"results", "curves", "gain", "sizes"},
    "personal": {"results", "curves", "gain", "sizes", "lambda", "newcomers"},
    "stopped": {"results", "curves", "gain", "sizes"},
    "planned": set(),
    "regression": {"curves", "gain", "sizes"},
    "hostile": {"results", "curves", "sizes"},
    "crowded": {"results", "curves", "sizes"},
}
"""Reports, and the sections in which they have charts."""


@pytest.fixture(scope="module")
def pages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports."""
    out = tmp_path_factory.mktemp("pages")
    single = folder / "compared" / "pfedme" / "seed-0"
    folders = {
        "single": single,
        "compared": folder / "compared",
        "personal": folder / "personal",
        "stopped": stopped(folder / "compared", out / "stopped"),
        "planned": planned(folder / "compared", out / "planned"),
        "regression": regression(folder / "compared", out / "regression"),
        "hostile": renamed(single, out / "hostile", [HOSTILE] * 1 + [f"{HOSTILE} {i}" for i in range(13)]),
        "crowded": crowded(folder / "compared" / "fedavg" / "seed-0", out / "crowded", 5000),
    }
    for name, path in folders.items():
        assert main(["report", str(path), "-o", str(out / f"{name}.html")]) == 0
    return {name: out / f"{name}.html" for name in folders}


CHARTS = """[...document.querySelectorAll("svg.chart")].map((svg) => {
  const view = svg.viewBox.baseVal;
  const shapes = [...svg.querySelectorAll("path, circle, rect.block")].map((shape) => shape.getBBox());
  return {
    section: svg.closest("section").id,
    label: svg.getAttribute("aria-label"),
    shapes: shapes.length,
    inside: shapes.every((b) =>
      b.x >= -1 && b.y >= -1 && b.x + b.width <= view.width + 1 && b.y + b.height <= view.height + 1),
    broken: svg.outerHTML.includes("NaN") || svg.outerHTML.includes("undefined"),
  };
})"""


def assert_drawn(tab: Page, page: Path, sections: set[str], width: int, dark: bool) -> None:
    """A page has charts in these sections, whole ones, within its width, and asks for nothing."""
    tab.open(page, width=width, dark=dark)
    charts = tab.evaluate(CHARTS)
    assert {chart["section"] for chart in charts} == sections
    for chart in charts:
        assert chart["shapes"] > 0, chart
        assert chart["inside"], chart
        assert not chart["broken"], chart
        assert chart["label"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    assert tab.errors == []
    assert tab.requests in ([page.as_uri()], [page.as_uri(), "data:,"])


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (400, True)])
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_draws_every_chart_and_asks_for_nothing(
    tab: Page, pages: dict[str, Path], name: str, width: int, dark: bool
):
    assert_drawn(tab, pages[name], PAGES[name], width, dark)


POINT = """(() => {
  const svg = document.querySelector("#SECTION svg.chart");
  svg.scrollIntoView({ block: "center" });
  const box = svg.querySelectorAll(".point, .gain-bar .block")[NUMBER].getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
})()"""
TIP = """(() => {
  const tip = document.querySelector("#SECTION .tip");
  return tip.hidden ? null : tip.innerText;
})()"""


def hovered(tab: Page, section: str, number: int) -> str:
    """What the tooltip says when the mouse is over a point."""
    tab.move(*tab.evaluate(POINT.replace("SECTION", section).replace("NUMBER", str(number))))
    return tab.evaluate(TIP.replace("SECTION", section))


PRIVACY = {
    "unit": "rows", "relation": "add or remove one row", "sampling": "Poisson", "accountant": "PLD",
    "simulated": True, "epsilon": 3.0, "delta": 1e-5, "clip": 0.5, "noise": {"min": 1.25, "max": 2.5},
    "spent": {"min": 2.5, "median": 2.7, "max": 2.99}, "not_covered": ["the number of rows", HOSTILE],
}  # fmt: skip


@pytest.mark.parametrize("width", [1440, 400])
def test_a_claim_of_privacy_is_shown_with_what_it_does_not_cover(
    tab: Page, folder: Path, tmp_path: Path, width: int
):
    """One run has a claim, as simulations have it, and one has none."""
    other = folder / "compared" / "alone" / "seed-0"
    assert shown(other)["privacy"] == []
    path = tmp_path / "private"
    shutil.copytree(folder / "compared" / "fedavg" / "seed-0", path)
    (path / "record.json").write_text(json.dumps({**record(path), "privacy": PRIVACY}))
    page = tmp_path / "page.html"
    assert main(["report", str(path), str(other), "-o", str(page)]) == 0
    tab.open(page, width=width)
    text = tab.evaluate("document.querySelector('#privacy').innerText")
    assert "one row of one client: ε is at most 3 at δ = 1e-05" in text
    assert "comes from its seed, which is known" in text
    for name, value in (
        ("noise multiplier", "1.25 to 2.5"),
        ("ε spent", "2.5 to 2.99"),
        ("accountant", "PLD"),
    ):
        assert re.search(rf"{name}\s+{re.escape(value)}\n", text, re.IGNORECASE)
    assert tab.evaluate("[...document.querySelectorAll('#privacy li')].map((l) => l.innerText)") == [
        "the number of rows", HOSTILE,
    ]  # fmt: skip
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.errors == []


@pytest.mark.parametrize("width", [1440, 400])
def test_hovering_a_client_tells_about_it(tab: Page, pages: dict[str, Path], folder: Path, width: int):
    tab.open(pages["personal"], width=width)
    assert tab.evaluate(TIP.replace("SECTION", "gain")) is None
    told = shown(folder / "personal")["gains"][0]["clients"]
    for number in (0, len(told["client"]) - 1):
        text = hovered(tab, "gain", len(told["client"]) - 1 - number)  # the largest gain is at the top
        assert f"Client {told['client'][number]}\n" in text
        assert told["choice"][number] in text
        assert f"{100 * told['mine'][number]:.2f} %" in text
        assert f"{100 * told['alone'][number]:.2f} %" in text
        assert f"± {100 * told['ci'][number]:.1f} points" in text
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.move(1, 1)
    assert tab.evaluate(TIP.replace("SECTION", "gain")) is None


def test_hovering_a_curve_tells_the_round_and_all_values(tab: Page, pages: dict[str, Path], folder: Path):
    tab.open(pages["compared"])
    tab.move(
        *tab.evaluate("""(() => {
      const svg = document.querySelector("#curves svg.chart");
      svg.scrollIntoView({ block: "center" });
      const box = svg.getBoundingClientRect();
      return [box.right - 16, box.top + box.height / 2];
    })()""")
    )
    text = tab.evaluate(TIP.replace("SECTION", "curves"))
    assert text.startswith("round 4\n")
    for group in shown(folder / "compared")["groups"]:
        for kind in group["kinds"]:
            final = group["final"][kind]
            assert f"{group['label']}, {kind}" in text
            assert f"{100 * final['value']:.2f} ± {100 * final['ci']:.2f} %" in text


LINES = (
    """[...document.querySelectorAll("#curves figure:first-child [data-line]")].map((l) => l.dataset.line)"""
)


def test_toggles_hide_lines_and_bring_them_back(tab: Page, pages: dict[str, Path]):
    tab.open(pages["compared"])
    everything = tab.evaluate(LINES)
    assert len(everything) == 3 + 2 + 1
    press = "document.querySelector('#curves [data-toggle=\"KEY\"]').click()"
    tab.evaluate(press.replace("KEY", "0"))
    assert tab.evaluate(LINES) == [line for line in everything if not line.startswith("pfedme")]
    tab.evaluate(press.replace("KEY", "global"))
    assert tab.evaluate(LINES) == ["fedavg, local", "alone, personal"]
    pressed = "document.querySelector('#curves [data-toggle=global]').getAttribute('aria-pressed')"
    assert tab.evaluate(pressed) == "false"
    for key in ("0", "global"):
        tab.evaluate(press.replace("KEY", key))
    assert tab.evaluate(LINES) == everything
    for key in ("0", "1", "2"):
        tab.evaluate(press.replace("KEY", key))
    assert tab.evaluate(LINES) == []
    assert tab.errors == []


def test_names_are_shown_as_they_are(tab: Page, pages: dict[str, Path]):
    tab.open(pages["hostile"])
    assert HOSTILE in tab.evaluate("document.querySelector('#worst').innerText")
    assert HOSTILE in hovered(tab, "sizes", 0)
    assert tab.evaluate("window.broken") is None
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.errors == []


def test_charts_have_tables_with_their_numbers(tab: Page, pages: dict[str, Path], folder: Path):
    tab.open(pages["compared"])
    found = shown(folder / "compared")
    lengths = tab.evaluate("""(async () => {
      for (const box of document.querySelectorAll("details")) box.open = true;
      await new Promise((done) => setTimeout(done, 100));
      const figures = document.querySelectorAll("section:not(#results) figure");
      return [...figures].map((f) => f.querySelectorAll("tbody tr").length);
    })()""")
    assert lengths == [5, 5, *(len(gain["clients"]["client"]) for gain in found["gains"]), 3 * 14]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1440


def test_colours_follow_the_toggle_and_paper_is_white(tab: Page, pages: dict[str, Path]):
    background = "getComputedStyle(document.body).backgroundColor"
    tab.open(pages["single"], dark=True)
    dark = tab.evaluate(background)
    tab.evaluate("document.querySelector('.theme').click()")
    light = tab.evaluate(background)
    assert light != dark
    tab.evaluate("document.querySelector('.theme').click()")
    assert tab.evaluate(background) == dark
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert tab.evaluate(background) == "rgb(255, 255, 255)"
        assert tab.evaluate("getComputedStyle(document.querySelector('header.top')).display") == "none"
        assert tab.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
    assert tab.pdf().startswith(b"%PDF")
    assert tab.errors == []


def test_the_command_can_be_copied(tab: Page, pages: dict[str, Path], folder: Path):
    tab.open(pages["single"])
    button = "document.querySelector('#again .copy')"
    told = tab.evaluate(f"""(async () => {{
      let copied = null;
      document.addEventListener("copy", (event) => (copied = document.activeElement.value ?? ""));
      navigator.clipboard.writeText = async (text) => {{ copied = text; }};
      {button}.click();
      await new Promise((done) => setTimeout(done, 20));
      return [copied, {button}.textContent];
    }})()""")
    assert told == [record(folder / "compared" / "pfedme" / "seed-0")["command"], "Copied"]
