"""The command line: help, versions, descriptions, and that what it prints can be typed."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import pfedme.cli
import pfedme.training.execute
from pfedme import __version__
from pfedme.algorithms import ALGORITHMS
from pfedme.cli import ALGORITHM_NAMES, main
from pfedme.cli.registry import COMMANDS
from pfedme.cli.screen.bars import Bar
from pfedme.core.models import MODELS, parse_model
from pfedme.core.spec import field_types, parse
from pfedme.data import BUILT_IN
from pfedme.data.synthetic import Synthetic
from pfedme.errors import InputError
from pfedme.runs.run import Run
from pfedme.training.execution import Progress


def run_python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=300, check=False
    )


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command's help prints."""
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code
    assert status == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"], []])
def test_help_and_version_load_nothing_heavy(argv: list[str]):
    code = (
        "import sys; from pfedme.cli import main; status = main(sys.argv[1:])\n"
        "from pfedme.cli.registry import COMMANDS\n"
        "heavy = {'argparse', 'jax', 'matplotlib', 'numpy', 'polars', 'pooch', 'rich'}\n"
        "loaded = (heavy | {command.module for command in COMMANDS.values()}) & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else status)"
    )
    done = run_python(code, *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pfedme " if argv == ["--version"] else "usage: pfedme")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]):
    assert helped(capsys, "--version") == f"pfedme {__version__}\n"


def test_the_installed_program_runs():
    program = Path(sys.executable).with_name("pfedme")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"pfedme {__version__}\n"


def test_help_names_every_command_algorithm_data_and_model(capsys: pytest.CaptureFixture[str]):
    text = helped(capsys, "--help")
    for name in (*COMMANDS, *ALGORITHMS, *BUILT_IN, *MODELS):
        assert re.search(rf"\b{re.escape(name)}\b", text), name
    assert re.split(r",\s+", ALGORITHM_NAMES.partition(";")[0]) == list(ALGORITHMS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_parser_whose_help_it_prints(capsys: pytest.CaptureFixture[str], name: str):
    command = COMMANDS[name]
    parser = import_module(command.module).parser()
    assert command.name == name
    assert parser.prog.startswith(f"pfedme {name}")
    assert re.search(rf"examples:\n  pfedme {name} ", parser.format_help())
    for flag in ("--help", "-h"):
        assert helped(capsys, name, flag) == parser.format_help()


def test_what_a_command_is_followed_by_has_help(capsys: pytest.CaptureFixture[str]):
    assert helped(capsys, "data", "describe", "--help").startswith("usage: pfedme data describe ")
    assert helped(capsys, "study", "verdict", "--help") == helped(capsys, "study", "--help")


def test_every_module_with_a_parser_is_a_commands():
    modules = [
        import_module(found.name) for found in walk_packages(pfedme.cli.__path__, f"{pfedme.cli.__name__}.")
    ]
    registered = {command.module for command in COMMANDS.values()}
    assert {module.__name__ for module in modules if hasattr(module, "parser")} == registered
    assert {module.__name__ for module in modules if hasattr(module, "carry_out")} == registered


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_explains_every_hyperparameter(capsys: pytest.CaptureFixture[str], command: str):
    text = " ".join(helped(capsys, command, "--help").split())
    for cls in ALGORITHMS.values():
        for name in field_types(cls):
            assert re.search(rf"--{name.replace('_', '-')} (X|N|{{[^ ]+}}(\[:\.\.\.\])?) \S", text), name


def test_help_tells_defaults(capsys: pytest.CaptureFixture[str]):
    text = " ".join(helped(capsys, "run", "--help").split())
    assert "(15.0)" in text
    assert "(1.0; fedadam, fedyogi, fedadagrad: 0.01; reptile: 0.5)" in text
    assert "[mocha] λ: how strongly the relations between clients count. (0.1)" in text
    assert "--rounds N T: communication rounds; auto trains until" in text


class Parsed(Exception):
    """Raised in place of a run, with the run."""


def assert_read_back(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run's command, and its JSON, describe this very run."""

    def stop(read: Run, *_: object, **__: object) -> None:
        raise Parsed(read)

    monkeypatch.setattr(pfedme.training.execute, "execute", stop)
    with pytest.raises(Parsed) as caught:
        main([*shlex.split(run.command())[1:], "--out", str(tmp_path / "run")])
    assert caught.value.args == (run,)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


@pytest.mark.parametrize(
    "run",
    [
        Run(
            algorithm=parse(algorithm, ALGORITHMS, "algorithm"),
            data=data,
            model=parse_model(model),
            **options,
        )
        for algorithm, data, model, options in [
            ("pfedme", Synthetic(), "mlr", {}),
            ("pfedme:nu=1e-4,solver=nesterov,theta_start=w,lam=0.1", Synthetic(iid=True), "mlr:l2=0", {}),
            ("per-fedavg:hessian=first-order,delta=1e-05", Synthetic(alpha=1 / 3), "dnn", {"cohort": 7}),
            ("fedavg-ft:F=3,B=0", Synthetic(rows=8, seed=4), "dnn:hidden=100-50", {"eval_every": 9}),
            ("alone:aggregation=samples", Synthetic(), "dnn:hidden=", {"rounds": 1, "seed": 2**32 - 1}),
            ("pooled:l2=model", Synthetic(), "mlr", {"budget": 90}),
            ("fedavg:eta=0.1", Synthetic(), "mlr", {"rounds": 9, "quarter_at": (3, 6)}),
        ]
    ],
    ids=["defaults", "nu", "per-fedavg", "full-batch", "alone", "budget", "quarters"],
)
def test_a_runs_command_is_read_back_as_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run):
    assert_read_back(run, monkeypatch, tmp_path)


def test_data_describe_tells_the_papers_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "describe"]) == 0
    printed = capsys.readouterr().out
    for number in ("100", "205,795", "250 to 25,810", "60", "10"):
        assert number in printed


def test_data_describe_prints_one_json_object(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "describe", "--data", "synthetic:clients=4,rows=40,classes=3", "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    description = json.loads(printed)
    assert description["clients"] == 4
    assert description["rows"] == 160
    assert (description["train_rows"], description["test_rows"]) == (120, 40)
    assert sum(description["rows_per_label"]) == 160


def test_data_describe_shows_each_clients_labels(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "describe", "--data", "synthetic:clients=4,rows=40,features=5,classes=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    counts = Synthetic(clients=4, rows=40, features=5, classes=3).load().label_counts()
    for i, row in enumerate(counts):
        cells = [str(i), "40", *(str(n) if n else "·" for n in row)]
        assert cells in [line.split()[: len(cells)] for line in lines]


def test_debug_shows_the_traceback():
    code = "import sys; from pfedme.cli import main; sys.exit(main(sys.argv[1:]))"
    plain, debug = run_python(code, "rum"), run_python(code, "rum", "--debug")
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "did you mean 'run'" in debug.stderr


@pytest.mark.parametrize(
    "argv", [["run", "nobody"], ["resume", "nowhere"], ["data", "describe", "--data", "x"]]
)
def test_debug_is_understood_by_every_command(argv: list[str]):
    with pytest.raises(InputError):
        main([*argv, "--debug"])


def test_a_reader_that_goes_away_is_no_traceback():
    code = "import sys; from pfedme.cli import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"], stdout=closed, stderr=subprocess.PIPE, text=True,
            env=buffered, timeout=300, check=False,
        )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr


def test_a_terminal_shows_a_live_bar(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        entry = {"round": 2, "global": {"accuracy": 0.7865}, "personal": {"accuracy": 0.832}}
        with Bar(total=6) as bar:
            bar("pfedme", 0, Progress(2, 3, entry))
            bar("fedavg", 1, Progress(1, 3, None))
        terminal.flush()
        shown = ""
        while "3/6" not in shown and select.select([ours], [], [], 10)[0]:  # it may come in pieces
            shown += os.read(ours, 100_000).decode()
    os.close(ours)
    assert "fedavg" in shown
    assert "3/6" in shown
    assert "global 78.65 %" in shown
    assert "personal 83.20 %" in shown


def test_elsewhere_lines_tell_the_first_and_the_last_round(capsys: pytest.CaptureFixture[str]):
    entry = {"round": 0, "global": {"accuracy": 0.5}, "personal": {"accuracy": None}}
    with Bar(total=3) as bar:
        for t in range(4):
            bar("pfedme", 0, Progress(t, 3, entry))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "pfedme round 0/3: global 50.00 %"
    assert err.splitlines()[-1] == "pfedme round 3/3: global 50.00 %"


CONTRACT_NAMES = {
    "pfedme", "fedavg", "per-fedavg", "alone", "fedavg-ft", "pooled",
    "fedprox", "scaffold", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "feddyn", "apfl", "ditto", "l2gd",
    "mr-mtl", "fedper", "fedrep", "fedbabu", "lg-fedavg", "fedbn", "ifca", "hypcluster", "mapper", "reptile",
    "aruba", "fedmeta", "mocha", "afl", "q-ffl", "one-shot", "gossip", "cooperative-sgd", "fedamp",
    "label-prior",
}  # fmt: skip
"""The names that others rely on."""


def test_algorithms_lists_every_algorithm_with_what_others_rely_on(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {fact["name"] for fact in listed} == CONTRACT_NAMES
    for fact in listed:
        cls = ALGORITHMS[fact["name"]]
        assert {"idea", "reference", "personal", "deployable"} <= fact.keys()
        assert (fact["why_not"] is None) == fact["deployable"]
        assert bool(cls.personal) == (fact["personal"] is not None)
        assert bool(fact["sends"]) == cls.federated
        assert fact["reference"] or fact["name"] in ("alone", "pooled", "fedavg-ft"), fact["name"]


def test_algorithms_describes_one_with_its_options(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "ditto"]) == 0
    text = capsys.readouterr().out
    for word in ("Li et al., 2021", "--lam", "personal model", "can be deployed"):
        assert word in text
    assert main(["algorithms"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in CONTRACT_NAMES)


def test_an_unknown_algorithm_has_no_description(capsys: pytest.CaptureFixture[str]):
    assert main(["algorithms", "dito"]) == 2
    assert "ditto" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["alone", "pooled", "one-shot", "l2gd", "gossip", "cooperative-sgd"])
def test_a_server_refuses_what_is_for_simulations(capsys: pytest.CaptureFixture[str], name: str):
    assert main(["server", "--algorithm", name, "--rounds", "1"]) == 2
    assert "cannot be deployed" in capsys.readouterr().err
