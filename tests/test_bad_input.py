"""Wrong input: status 2, a sentence that names what is wrong and the cure, and nothing written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from pfedme.algorithms import Alone, FedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import Network
from pfedme.data.federation import Federation
from pfedme.engine.simulate import Simulation, State
from pfedme.errors import InputError
from pfedme.report.describe import describe

TINY = "--data synthetic:clients=4,rows=40,features=5,classes=3 --rounds 3 --cohort 2 --R 2 --B 5"
RUN = f"run pfedme {TINY} --out out"


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """What a command line gets to hear that is refused; nothing in the working folder may change."""
    before = contents(Path())
    status = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert status == 2, err
    assert out == ""
    assert err.startswith("pfedme: ")
    assert err.endswith(".\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert 1 <= len(re.findall(r"[.?](?=\s)", err)) <= 2
    assert contents(Path()) == before
    return err


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of every test here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps() -> list[tuple[str, list[str]]]:
    """Every step size and λ with every kind of wrong number."""
    cases = []
    positive, finite = "must be positive", "must be a finite number"
    for name in ("eta", "alpha", "beta", "lam"):
        cases += [(f"{RUN} --{name}={v}", [name, finite, v]) for v in ("nan", "inf", "-inf", "fast")]
        cases += [(f"{RUN} --{name} 1e400", [name, finite]), (f"{RUN} --{name} ''", [name, finite])]
    for name in ("beta", "lam"):
        cases += [(f"{RUN} --{name}={v}", [name, positive, v]) for v in ("0", "-0.5")]
        cases += [(f"{RUN} --{name} 1e-400", [name, positive])]
    for name in ("eta", "alpha"):  # of which 0 stands for a size from the data
        cases += [(f"{RUN} --{name}={v}", [name, "must be at least 0", v]) for v in ("-0.5", "-3")]
    return cases


CASES: list[tuple[str, list[str]]] = [
    # names
    ("nonsense", ["command 'nonsense'", "Known: run, compare"]),
    ("rum pfedme", ["command 'rum'", "did you mean 'run'?"]),
    ("data describ", ["data command 'describ'", "did you mean 'describe'?"]),
    ("data", ["data command", "describe"]),
    ("run pfedmee", ["algorithm 'pfedmee'", "did you mean 'pfedme'?"]),
    ("run nothing", ["algorithm 'nothing'", "pfedme, fedavg, per-fedavg, alone, fedavg-ft"]),
    ("run ''", ["algorithm ''", "pfedme, fedavg"]),
    ("compare pfedme fedavgg", ["algorithm 'fedavgg'", "did you mean 'fedavg'?"]),
    ("run pfedme --data synthetc", ["data 'synthetc'", "did you mean 'synthetic'?"]),
    ("run pfedme --data ''", ["data ''", "synthetic, mnist"]),
    ("data describe --data mnits", ["data 'mnits'", "did you mean 'mnist'?"]),
    ("run pfedme --model dn", ["model 'dn'", "did you mean 'dnn'?"]),
    ("run pfedme --model resnet", ["model 'resnet'", "mlr, dnn"]),
    # options
    ("run pfedme --lamb 3", ["option '--lamb'", "did you mean '--lam'?"]),
    ("run pfedme --lamb=3", ["option '--lamb'", "did you mean '--lam'?"]),
    ("run pfedme --roundss 3", ["option '--roundss'", "did you mean '--rounds'?"]),
    ("run pfedme --seeds 3", ["option '--seeds'", "did you mean '--seed'?"]),
    ("run pfedme -R 3", ["option '-R'"]),
    ("data describe --rounds 3", ["option '--rounds'"]),
    ("resume somewhere --force", ["option '--force'"]),
    ("run pfedme fedavg", ["'fedavg' was not expected", "pfedme run --help"]),
    ("run pfedme --rounds", ["--rounds", "expected one argument", "pfedme run --help"]),
    ("run pfedme --lam", ["--lam", "expected one argument", "pfedme run --help"]),
    ("run", ["ALGORITHM", "pfedme run --help"]),
    ("compare", ["ALGORITHM", "pfedme compare --help"]),
    ("resume", ["DIR", "pfedme resume --help"]),
    # hyperparameters that are not there
    ("run pfedme:lamb=3", ["'lamb'", "did you mean 'lam'?"]),
    ("run fedavg --lam 3", ["--lam", "not an option of fedavg", "eta, R, B, beta, aggregation"]),
    ("run fedavg:lam=3", ["'lam'", "fedavg", "eta, R, B, beta, aggregation"]),
    ("run alone --K 2", ["--K", "not an option of alone"]),
    ("run pfedme --F 3", ["--F", "not an option of pfedme"]),
    ("compare fedavg alone --lam 3", ["--lam", "not an option of fedavg, alone"]),
    # choices
    (f"{RUN} --solver newton", ["solver", "'newton'", "gradient, nesterov"]),
    (f"{RUN} --aggregation unifrom", ["aggregation", "'unifrom'", "did you mean 'uniform'?"]),
    (f"{RUN} --theta-start zero", ["theta_start", "'zero'", "carry, w"]),
    ("run per-fedavg --hessian none", ["hessian", "'none'", "exact, first-order, difference"]),
    # numbers
    *steps(),
    (f"{RUN} --nu 0", ["nu", "must be positive", "0"]),
    (f"{RUN} --nu -1", ["nu", "must be positive", "-1"]),
    (f"{RUN} --nu nan", ["nu", "must be a finite number", "nan"]),
    (f"{RUN} --cohort 5", ["cohort of 5", "4 clients", "--cohort between 1 and 4"]),
    (f"compare pfedme alone {TINY} --cohort 5 --out out", ["cohort of 5", "--cohort between 1 and 4"]),
    (f"run alone {TINY} --cohort 5 --out out", ["cohort of 5", "--cohort between 1 and 4"]),
    (f"{RUN} --cohort 0", ["cohort", "at least 1", "0"]),
    (f"{RUN} --cohort -2", ["cohort", "at least 1", "-2"]),
    (f"{RUN} --cohort 1.5", ["--cohort", "1.5"]),
    *[
        (f"{RUN} --rounds {wrong}", ["--rounds", "must be auto or a positive whole number", f"'{wrong}'"])
        for wrong in ("0", "-3", "many", "2.5", "AUTO")
    ],
    (f"{RUN} --budget 0", ["budget", "at least 1", "0"]),
    (f"{RUN} --budget -5", ["budget", "at least 1", "-5"]),
    (f"{RUN} --budget all", ["--budget", "all"]),
    *[
        (f"{RUN} --quarter-at={wrong}", ["--quarter-at", "joined by '-', such as 100-150", f"'{wrong}'"])
        for wrong in ("x", "100-x", "100--150", "-3", "1.5", "")
    ],
    (f"{RUN} --quarter-at 0", ["quarter_at", "at least 1"]),
    (f"{RUN} --rounds auto --quarter-at 5", ["--quarter-at 5", "give --rounds too"]),
    (f"run alone {TINY} --l2 0.1 --out out", ["l2", "'0.1'", "own, model"]),
    (f"{RUN} --eval-every 0", ["eval_every", "at least 1", "0"]),
    (f"{RUN} --seed -1", ["seed", "at least 0", "-1"]),
    (f"{RUN} --seed 4294967296", ["seed", "below 4294967296", "not 4294967296"]),
    (f"compare pfedme {TINY} --out out --seeds 0", ["--seeds", "at least 1", "0"]),
    (f"compare pfedme {TINY} --out out --seeds -1", ["--seeds", "at least 1", "-1"]),
    (f"compare pfedme {TINY} --out out --seed 4294967295 --seeds 2", ["seed", "4294967296"]),
    (f"{RUN} --K 0", ["K", "at least 1", "0"]),
    (f"{RUN} --R 0", ["R", "at least 1", "0"]),
    (f"{RUN} --R 2.5", ["R", "whole number", "2.5"]),
    (f"{RUN} --B -1", ["B", "at least 0", "-1"]),
    (f"{RUN} --B few", ["B", "whole number", "few"]),
    (f"run fedavg-ft {TINY} --F 0 --out out", ["F", "at least 1", "0"]),
    # specifications
    ("run pfedme:lam", ["'lam' in 'pfedme:lam'", "field=value"]),
    ("run pfedme:lam=", ["lam", "must be a finite number"]),
    ("run pfedme:=3", ["''", "eta, R, B"]),
    ("run pfedme:lam=3;K=2", ["lam", "must be a finite number", "3;K=2"]),
    (f"run pfedme:lam=1,lam=2 {TINY} --out out", ["lam"]),
    ("run pfedme --data synthetic:clients", ["'clients'", "field=value"]),
    ("run pfedme --data synthetic:clients=", ["clients", "whole number"]),
    ("run pfedme --data synthetic:clients=0", ["clients", "at least 1", "0"]),
    ("run pfedme --data synthetic:clients=2.5", ["clients", "whole number", "2.5"]),
    ("run pfedme --data synthetic:rows=-1", ["rows", "at least 0", "-1"]),
    ("run pfedme --data synthetic:clinets=3", ["'clinets'", "did you mean 'clients'?"]),
    ("run pfedme --data synthetic:alpha=-1", ["alpha", "at least 0", "-1"]),
    ("run pfedme --data synthetic:train=1", ["train", "below 1", "1"]),
    ("run pfedme --data synthetic:train=0", ["train", "positive", "0"]),
    ("run pfedme --data synthetic:iid=maybe", ["iid", "true or false", "maybe"]),
    ("run pfedme --data :clients=3", ["data ''", "synthetic, mnist"]),
    ("run pfedme --model dnn:hidden=a", ["hidden", "100-50", "'a'"]),
    ("run pfedme --model dnn:hidden=0", ["hidden", "at least 1"]),
    (f"{RUN} --model dnn:hidden=-5", ["hidden", "-5"]),
    ("run pfedme --model mlr:l2=-1", ["l2", "at least 0", "-1"]),
    ("run pfedme --model mlr:hidden=5", ["'hidden'", "mlr", "l2"]),
    # MNIST
    ("run pfedme --out out --data mnist:clients=7", ["disjoint", "20 clients", "7", "dirichlet,clients=7"]),
    ("run pfedme --data mnist:clients=7,partition=released", ["released", "7", "dirichlet,clients=7"]),
    ("compare pfedme --data mnist:clients=7 --out out", ["disjoint", "7", "dirichlet,clients=7"]),
    ("data describe --data mnist:clients=7", ["disjoint", "7", "dirichlet,clients=7"]),
    ("run pfedme --data mnist:partition=disjiont", ["partition", "'disjiont'", "did you mean 'disjoint'?"]),
    ("data describe --data mnist:partition=dirichlet,alpha=0", ["alpha", "positive", "0"]),
    ("run pfedme --out out --data mnist:path=nowhere", ["nowhere", "four MNIST idx files"]),
    # folders
    ("resume nowhere", ["no folder nowhere"]),
]


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line.replace(TINY, "...") for line, _ in CASES])
def test_wrong_input_is_refused_with_a_sentence_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], line: str, words: list[str]
):
    err = refused(capsys, line)
    assert [word for word in words if word not in err] == []


# --- Folders that are taken --------------------------------------------------------------------------


@pytest.mark.parametrize("line", [RUN, f"compare fedavg alone {TINY} --out out"], ids=["run", "compare"])
def test_a_file_is_no_folder_for_results(capsys: pytest.CaptureFixture[str], line: str):
    Path("out").write_text("mine")
    err = refused(capsys, line)
    assert "because out is a file" in err
    assert "--out" in err
    assert "is a file" in refused(capsys, f"{line} --force")


@pytest.mark.parametrize("line", [RUN, f"compare fedavg alone {TINY} --out out"], ids=["run", "compare"])
def test_a_folder_below_a_file_cannot_be_made(capsys: pytest.CaptureFixture[str], line: str):
    Path("file").write_text("mine")
    err = refused(capsys, line.replace("--out out", "--out file/out"))
    assert "file/out" in err
    assert "file is a file" in err


@pytest.mark.slow
@pytest.mark.parametrize("line", [RUN, f"compare fedavg alone {TINY} --out out"], ids=["run", "compare"])
def test_a_folder_with_files_of_others_is_not_used(capsys: pytest.CaptureFixture[str], line: str):
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("mine")
    err = refused(capsys, line)
    assert "out is not empty" in err
    assert "choose another --out" in err
    assert main(shlex.split(f"{line} --force")) == 0
    assert Path("out/thesis.tex").read_text() == "mine"


def test_a_finished_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(RUN)) == 0
    capsys.readouterr()
    err = refused(capsys, RUN)
    assert "out holds a finished run" in err
    assert "--force" in err


def test_an_unfinished_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(RUN)) == 0
    record = Path("out/record.json")
    record.write_text(record.read_text().replace('"status": "finished"', '"status": "running"'))
    capsys.readouterr()
    err = refused(capsys, RUN)
    assert "out holds an unfinished run" in err
    assert "'pfedme resume out'" in err
    assert "--force" in err


def test_a_diverged_run_is_not_overwritten_and_not_said_to_be_resumable(capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(f"{RUN} --alpha 1e10")) == 1
    capsys.readouterr()
    err = refused(capsys, RUN)
    assert "--force" in err
    assert "diverged" in err
    assert "resume" not in err


@pytest.mark.slow
def test_a_comparison_is_not_overwritten_by_a_run(capsys: pytest.CaptureFixture[str]):
    assert main(shlex.split(f"compare fedavg alone {TINY} --out out")) == 0
    capsys.readouterr()
    assert "out is not empty" in refused(capsys, RUN)


@pytest.mark.parametrize("wrong", ["--cohort 9", "--data mnist:clients=7", "--data mnist:path=nowhere"])
def test_force_with_wrong_input_spares_the_results_that_are_there(
    capsys: pytest.CaptureFixture[str], wrong: str
):
    assert main(shlex.split(RUN)) == 0
    capsys.readouterr()
    refused(capsys, f"{RUN} --force {wrong}")


@pytest.mark.slow
def test_force_with_wrong_input_spares_the_comparison_that_is_there(capsys: pytest.CaptureFixture[str]):
    line = f"compare fedavg alone {TINY} --out out"
    assert main(shlex.split(line)) == 0
    capsys.readouterr()
    refused(capsys, f"{line} --force --cohort 9")


@pytest.mark.parametrize(
    "options", ["--R 10000000000", "--B 10000000000", "--data synthetic:clients=1000000000000"]
)
def test_what_the_machine_cannot_hold_ends_in_a_sentence(capsys: pytest.CaptureFixture[str], options: str):
    status = main(shlex.split(f"{RUN} {options}"))
    out, err = capsys.readouterr()
    assert status in (1, 2)
    assert out == ""
    assert err.startswith("pfedme: ")


# --- Unusual, and defined ----------------------------------------------------------------------------


def random_rows(n: int) -> np.ndarray:
    """n rows of two features."""
    return np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)


def odd_federation() -> Federation:
    """A client with one row, one with one class, and one with a label in its test rows only."""
    labels = [0] + [1] * 8 + [0, 1, 0, 1, 0, 1, 2, 2]
    return Federation.split([1, 8, 8], random_rows(17), np.array(labels), classes=3)


@pytest.mark.slow
def test_a_batch_may_be_larger_than_a_clients_data():
    assert main(shlex.split(f"run alone {TINY} --out out --B 500")) == 0


@pytest.mark.parametrize("algorithm", [PFedMe(R=2, B=5), Alone(R=2, B=5)], ids=["pfedme", "alone"])
def test_odd_clients_train_and_those_without_test_rows_are_left_out_of_the_accuracies(
    algorithm: PFedMe | Alone,
):
    model = Network(features=2, classes=3)
    simulation = Simulation(algorithm, model, odd_federation(), cohort=3)
    state, finite = simulation.advance(simulation.start(), 3)
    evaluation, models = simulation.evaluate(state)
    assert finite
    assert evaluation.finite
    for stacked in models:
        assert stacked is None or np.isfinite(np.asarray(stacked.ravel(1))).all()
    entry = evaluation.entry()
    for kind, scores in evaluation.test.items():
        assert scores.count.tolist() == [0, 2, 2]
        own = scores.accuracy
        assert np.isnan(own[0])
        assert entry[kind]["accuracy"] == (own[1] + own[2]) / 2
        assert entry[kind]["clients"]["mean"] == (own[1] + own[2]) / 2
        assert entry[kind]["clients"]["min"] == min(own[1:])
        assert evaluation.train[kind].count.tolist() == [1, 6, 6]


def test_a_client_with_one_class_is_perfect_alone_and_a_label_never_seen_is_never_said():
    model = Network(features=2, classes=3)
    simulation = Simulation(Alone(R=20, B=5, eta=1.0), model, odd_federation(), cohort=3)
    state, _ = simulation.advance(simulation.start(), 30)
    accuracy = simulation.evaluate(state)[0].test["personal"].accuracy
    assert accuracy[1] == 1.0
    assert accuracy[2] == 0.0


def test_odd_clients_are_told_of():
    said = " ".join(describe(odd_federation())["warnings"])
    assert "1 client has no test rows" in said
    assert "2 clients have rows of only one class" in said  # the one with a single row, too
    assert "1 client has a label in the test rows that is missing from the training rows" in said


def test_a_step_on_a_client_with_one_row_is_a_step_on_that_row():
    federation = odd_federation()
    model = Network(features=2, classes=3)
    simulation = Simulation(FedAvg(R=1, B=7, eta=0.5), model, federation, cohort=2)
    state = simulation.start()
    local = simulation.answer(state)[0].local
    assert local is not None
    np.testing.assert_allclose(local.ravel(1)[0], one_step(state, federation, 0), rtol=1e-5, atol=1e-6)


def test_a_full_batch_counts_each_row_once_whatever_the_clients_size():
    federation = odd_federation()
    model = Network(features=2, classes=3)
    simulation = Simulation(FedAvg(R=1, B=0, eta=0.5), model, federation, cohort=2)
    state = simulation.start()
    local = simulation.answer(state)[0].local
    assert local is not None
    for i in range(3):
        np.testing.assert_allclose(local.ravel(1)[i], one_step(state, federation, i), rtol=1e-5, atol=1e-6)


def one_step(state: State, federation: Federation, i: int) -> np.ndarray:
    """Softmax regression after one step of size 0.5 on all training rows of client i, in NumPy."""
    rows = slice(federation.start[i], federation.start[i] + federation.n_train[i])
    x, y = federation.x[rows].astype(np.float64), federation.y[rows]
    W, b = (np.asarray(part, np.float64) for part in state.server.tree[0])
    p = np.exp(x @ W.T + b) / np.exp(x @ W.T + b).sum(axis=1, keepdims=True)
    slope = (p - np.eye(3)[y]) / len(y)
    return np.concatenate([(W - 0.5 * slope.T @ x).ravel(), b - 0.5 * slope.sum(axis=0)])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run alone --json", "compare alone alone:eta=0.1 --seeds 2"])
def test_runs_where_nobody_has_test_rows_end_well(capsys: pytest.CaptureFixture[str], command: str):
    options = "--data synthetic:clients=4,rows=1,features=5,classes=3 --rounds 3 --cohort 2 --R 2 --B 5"
    assert main(shlex.split(f"{command} {options} --out out")) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_federation_of_one_class_is_refused(capsys: pytest.CaptureFixture[str]):
    options = "--data synthetic:clients=4,rows=40,features=5,classes=1 --rounds 3 --cohort 2 --R 2 --B 5"
    assert "classes of data 'synthetic' must be at least 2" in refused(
        capsys, f"run alone {options} --out out"
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_missing_value_is_refused_before_anything_runs(value: float):
    x = random_rows(9)
    x[5, 1] = value
    with pytest.raises(InputError, match=rf"Feature 1 of row 1 of client 1 is {value}"):
        Federation.split([4, 5], x, np.arange(9) % 2, classes=2)


@pytest.mark.parametrize("cohort", [-1, 0, 4])
def test_a_simulation_checks_its_cohort_too(cohort: int):
    federation = Federation.split([3, 3, 3], random_rows(9), np.arange(9) % 2, classes=2)
    with pytest.raises(InputError, match=rf"cohort of {cohort} .* 3 clients"):
        Simulation(PFedMe(), Network(features=2, classes=2), federation, cohort=cohort)
