"""What another installed package registers is used like our own, and harms nothing if it cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from conftest import INSTALLED, installed
from outside import OUTSIDE, Momentum, Narrow, Opposed, build
from test_api import embedded
from test_killed import assert_resumed_alike, steady

import pfedme
from pfedme.algorithms import ALGORITHMS, FedAvg
from pfedme.cli import main
from pfedme.cli.run import parser
from pfedme.core.models import MODELS, MadeModel, parse_model
from pfedme.data import DATA, parse_data
from pfedme.errors import InputError
from pfedme.runs.run import Run

pytestmark = pytest.mark.usefixtures("outside_installed")
__all__ = ["steady"]  # a fixture

TINY = ("--data", "opposed", "--model", "dnn:hidden=4", "--R", "2", "--B", "5", "--eta", "0.05")


def said_by(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that is refused says."""
    capsys.readouterr()
    assert main(argv) == 2
    return capsys.readouterr().err


# --- registration


def test_what_is_registered_is_known_by_its_name():
    assert {name: ALGORITHMS[name] for name in ALGORITHMS.others} == OUTSIDE
    assert (MODELS.others, DATA.others) == ({"narrow": Narrow}, {"opposed": Opposed})
    assert len(ALGORITHMS) == len([*ALGORITHMS]) == len(ALGORITHMS.own) + 4
    assert parse_model("narrow:width=2") == Narrow(width=2)
    assert parse_data("opposed:clients=4") == Opposed(clients=4)
    with installed():
        assert not {**ALGORITHMS.others, **MODELS.others, **DATA.others}
        with pytest.raises(InputError, match="There is no data 'opposed'"):
            parse_data("opposed")


def test_help_names_what_is_registered(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert "algorithms from other packages: clusters, control, head, momentum\n" in page
    assert "models from other packages: narrow\n" in page
    text = " ".join(parser().format_help().split())
    assert "[momentum] μ: the weight of the previous step. (0.5)" in text
    assert "q-ffl, clusters, control, head, momentum" in text


FILES = {
    "fedavg": ("FedAvg", "the name is already taken"),
    "gone": ("NoSuchClass", "has no attribute 'NoSuchClass'"),
    "number": ("number", "is not a class with the decorator @pfedme.record"),
    "plain": ("Plain", "is not a class with the decorator @pfedme.record"),
    "narrow": ("Narrow", "is not a valid Algorithm"),
    "needy": ("Needy", "missing 1 required"),
    "other-name": ("Renamed", "has the name 'renamed'"),
    "a name": ("FedAvg", "a name may only contain letters, digits"),
    "absent": ("absent_module:Thing", "No module named 'absent_module'"),
    "raising": ("raising_module:Thing", "as it was written"),
    "good": ("Good", ""),
}


def broken_package(folder: Path) -> Path:
    """A folder with a package of whose algorithms one is good."""
    (folder / "broken_package.py").write_text(
        "from typing import ClassVar\n"
        "from outside import Narrow\n"
        "from pfedme import FedAvg, record\n"
        "number = 3\n"
        "class Plain(FedAvg): pass\n"
        "@record\n"
        "class Needy(FedAvg):\n    name: ClassVar[str] = 'needy'\n    x: float\n"
        "@record\n"
        "class Renamed(FedAvg):\n    name: ClassVar[str] = 'renamed'\n"
        "@record\n"
        "class Good(FedAvg):\n    name: ClassVar[str] = 'good'\n    seed: int = 3\n    shift: float = 0.0\n"
    )
    (folder / "raising_module.py").write_text("raise SyntaxError('as it was\\nwritten')\n")
    about = folder / "broken_package-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 2.0\n")
    lines = ["[pfedme.algorithms]"]
    for name, (value, _) in FILES.items():
        lines.append(f"{name} = {value if ':' in value else f'broken_package:{value}'}")
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_what_cannot_be_used_is_left_out_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with installed(broken_package(tmp_path)):
        assert [*ALGORITHMS.others] == ["good"]
        said = capsys.readouterr().err.splitlines()
        for name, (_, why) in FILES.items():
            whose = f"pfedme: '{name}' of the package broken-package is left out of pfedme.algorithms: "
            lines = [line for line in said if line.startswith(whose)]
            assert [why in line for line in lines] == [True] * bool(why), (name, said)
        assert len(said) == len(FILES) - 1
        assert ALGORITHMS["fedavg"] is FedAvg
        # An option of its own that is called like another one is given after its name.
        args = parser().parse_args(["good:seed=5", "--shift", "0.5", "--seed", "4"])
        assert (args.seed, args.shift) == (4, "0.5")
        assert "seed" not in args.hyperparameters


def test_a_package_may_be_imported_before_anything_is_known(tmp_path: Path):
    """Its module imports ours, which look it up."""
    paths = [INSTALLED, Path(__file__).parent, broken_package(tmp_path), Path(pfedme.__file__).parents[1]]
    code = (
        "import outside\n"
        "from pfedme.algorithms import ALGORITHMS\n"
        "assert ALGORITHMS['momentum'] is outside.Momentum\n"
        "import sys\n"
        "from pfedme.cli import main\n"
        "assert {'clusters', 'control', 'good', 'head', 'momentum'} <= set(ALGORITHMS)\n"
        "sys.exit(main(['run', 'nope']))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    *left_out, last = done.stderr.splitlines()
    assert len(left_out) == len(FILES) - 1
    assert last.startswith("pfedme: There is no algorithm 'nope'. Known: pfedme, ")


# --- runs


MOMENTS = {"momentum": [5], "control": [4], "clusters": [6], "head": [7]}
"""After which of its writes a run is killed."""


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("momentum", "clusters"))) for name in OUTSIDE],
)
@pytest.mark.parametrize("moments", ["one", pytest.param("all", marks=pytest.mark.slow)])
def test_killed_and_resumed_to_the_bit(
    name: str, moments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    line = ["run", name, *TINY, "--rounds", "5", "--cohort", "4", "--eval-every", "2"]
    numbers: Sequence[int] = MOMENTS[name] if moments == "one" else ()
    left = assert_resumed_alike(line, tmp_path, monkeypatch, numbers)
    config = left["record.json"]["config"]
    assert config["algorithm"]["name"] == name
    assert config["data"] == {"name": "opposed", "clients": 6, "rows": 32, "seed": 0}
    assert Run.from_json(config).to_json() == config
    stored = safetensors.numpy.load(left["model.safetensors"])
    assert set(stored) == ({"w"} if OUTSIDE[name].has_global else {"theta"})


def test_the_command_in_a_record_makes_the_same_run(monkeypatch: pytest.MonkeyPatch):
    from pfedme.cli import training

    run = Run(algorithm=Momentum(mu=0.25, eta=0.1), data=Opposed(seed=1), model=Narrow(width=2), rounds=3)
    words = run.command().split()
    assert words[:3] == ["pfedme", "run", "momentum"]
    args = parser().parse_args(words[2:])
    assert training.runs(args, [args.algorithm]) == [run]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them beside ours, with several seeds in one program."""
    out = tmp_path_factory.mktemp("compared") / "out"
    names = [*OUTSIDE, "fedavg", "alone:l2=model"]
    assert main(["compare", *names, *TINY, "--rounds", "4", "--seeds", "2", "--out", str(out)]) == 0
    return out


def test_compared_with_ours(compared: Path):
    for name, cls in OUTSIDE.items():
        for seed in (0, 1):
            record = json.loads((compared / name / f"seed-{seed}" / "record.json").read_text())
            assert record["status"] == "finished"
            assert ("global" in record["final"]) == cls.has_global
            assert ("personal" in record["final"]) == (not cls.has_global)
    page = embedded(compared / "report.html")
    assert {group["label"] for group in page["groups"]} == {*OUTSIDE, "fedavg", "alone"}
    assert json.loads((compared / "compare.json").read_text())["verdict"]


def test_the_record_of_a_package_that_is_gone_is_shown_and_not_run(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = compared / "momentum" / "seed-0"
    with installed():
        assert main(["report", str(compared), "-o", str(tmp_path / "page.html")]) == 0
        labels = {group["label"] for group in embedded(tmp_path / "page.html")["groups"]}
        assert labels == {*OUTSIDE, "fedavg", "alone"}
        config = json.loads((run / "record.json").read_text())["config"]
        assert Run.from_json(config).to_json() == config
        said = said_by(capsys, "personalize", str(run))
        assert "momentum, which this run uses, cannot be imported here" in said
        assert "where its package is installed" in said
        unfinished = tmp_path / "unfinished"
        unfinished.mkdir()
        record = json.loads((run / "record.json").read_text()) | {"status": "running"}
        (unfinished / "record.json").write_text(json.dumps(record))
        assert "cannot be imported here" in said_by(capsys, "resume", str(unfinished))


def test_models_of_clients_are_exported_where_there_is_no_shared_one(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = compared / "head" / "seed-0"
    said = said_by(capsys, "export", str(run), "-o", str(tmp_path / "a"))
    assert "has no global model, only: personal" in said
    assert main(["export", str(run), "--client", "2", "-o", str(tmp_path / "b")]) == 0
    model = pfedme.load(tmp_path / "b")
    assert model.origin["which"] == "personal"
    assert model.predict(np.zeros((2, 3))).shape == (2,)


@pytest.mark.slow
def test_a_search_tries_what_is_known_of_the_hyperparameters():
    found = pfedme.tune("clusters:R=2,B=5", "opposed", model="narrow", rounds=2, trials=2)
    assert set(found.best[0].settings) == {"eta", "beta", "aggregation"}
    assert found.best[0].model == "personal"


@pytest.mark.slow
def test_clients_choose_after_a_run_whose_server_keeps_more_than_a_model():
    result = pfedme.train(
        "momentum:R=2,eta=0.05", "opposed", rounds=2, budget=4, personalize="auto:steps=3,folds=2"
    )
    assert result.offer is not None
    assert result.offer.found is not None
    assert result.offer.found.clients == 6


# --- a function that makes a model


@pytest.mark.slow
def test_a_function_makes_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    line = ["run", "fedavg", "--data", "opposed", "--model", "outside:build", "--R", "2", "--rounds", "2"]
    assert main([*line, "--out", str(out)]) == 0
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["model"] == {"name": "outside:build"}
    assert "--model outside:build " in record["command"]
    assert Run.from_json(record["config"]).model == MadeModel(path="outside:build")
    assert embedded(out / "report.html")["groups"]
    same = pfedme.train("fedavg:R=2", "opposed", model="outside:build", rounds=2)
    object_ = pfedme.train("fedavg:R=2", "opposed", model=build(3, 2), rounds=2)
    np.testing.assert_array_equal(same.w, safetensors.numpy.load_file(out / "model.safetensors")["w"])
    np.testing.assert_array_equal(same.w, object_.w)
    said = said_by(capsys, "export", str(out), "-o", str(tmp_path / "m"))
    assert "your own Python code, outside:build, which cannot be exported" in said
    (out / "record.json").write_text(json.dumps(record | {"status": "running"}))
    assert main(["resume", str(out)]) == 0


def test_a_model_that_a_function_makes_is_exported_if_it_can_be_written_down(tmp_path: Path):
    out = tmp_path / "out"
    pfedme.compare(["fedavg:R=2,eta=0.1"], "opposed", model="outside:network", rounds=1, out=out)
    assert pfedme.model_of(out / "fedavg" / "seed-0").predict(np.zeros((2, 3))).shape == (2,)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("outside:nowhere", "cannot be imported (module 'outside' has no attribute 'nowhere')"),
        ("absent_module:build", "cannot be imported (No module named 'absent_module')"),
        ("outside:OUTSIDE", "is not a function build(features, classes)"),
        ("outside:broken", "failed for 3 features and 2 classes: nothing works."),
        ("outside:nothing", "must return a pfedme.Model, not None"),
        ("outside:Network", "failed for 3 features"),
        ("outside:", "There is no model 'outside'"),
        ("narow", "did you mean 'narrow'"),
    ],
)
def test_a_function_that_makes_no_model_is_told_of(
    model: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = ["run", "fedavg", "--data", "opposed", "--model", model, "--rounds", "1"]
    assert why in said_by(capsys, *line, "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_record_of_a_function_that_is_gone_is_shown_and_not_run():
    config: dict[str, Any] = Run(
        algorithm=FedAvg(), data=Opposed(), model=MadeModel(path="outside:build"), rounds=1
    ).to_json()
    config["model"]["name"] = "absent_module:build"
    run = Run.from_json(config)
    assert run.to_json() == config
    with pytest.raises(InputError, match="absent_module:build, which this run uses, cannot be"):
        run.prepare()
