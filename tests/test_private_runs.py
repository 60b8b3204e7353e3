"""Runs with differential privacy of rows: laws, budgets, records and refusals."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pfedme
from pfedme.algorithms import MRMTL, Algorithm, Alone, Ditto, FedAvg, FedAvgFT, PerFedAvg, PFedMe
from pfedme.cli import main
from pfedme.core.models import MLR, Network
from pfedme.data.synthetic import Synthetic
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.privacy.rows import RowPlan, plan_rows, rate, room, supported
from pfedme.privacy.units import Privacy, Rows
from pfedme.report.html.document import document
from pfedme.report.html.read import read
from pfedme.runs.run import Run, load

DATA = Synthetic(clients=3, rows=60)
STEP = {"eta": 0.1, "R": 3}
EVERY_KIND: list[Algorithm] = [
    FedAvg(**STEP, B=8), PFedMe(**STEP, alpha=0.05, B=8, K=2), MRMTL(**STEP, B=8), Ditto(**STEP, B=8),
    Alone(**STEP, B=8, l2="model"), FedAvgFT(**STEP, B=8, F=5),
]  # fmt: skip


def planned(algorithm: Algorithm, clip: float = 1.0, noise: float = 1.0) -> RowPlan:
    """A plan with the same noise for all clients, whatever it is worth."""
    n = load(DATA).n_train
    rates = np.array([rate(algorithm.B, int(k)) for k in n])
    most = max(room(algorithm.B, int(k), 100, 1.0, 1e-5) for k in n)
    some = np.ones(len(n))
    spec = Rows(epsilon=1.0, clip=clip)
    return RowPlan(spec, algorithm.B, 1, n, some, rates, noise * some, some, most)


def simulation(
    algorithm: Algorithm, privacy: RowPlan | None, seed: int = 0, quarter_at: tuple[int, ...] = ()
) -> Simulation:
    federation = load(DATA)
    model = Network(features=federation.features, classes=federation.classes, l2=0.01)
    return Simulation(
        algorithm, model, federation, cohort=3, seed=seed, quarter_at=quarter_at, privacy=privacy
    )


def same(a: object, b: object) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("algorithm", EVERY_KIND, ids=lambda a: a.name)
def test_without_noise_and_clipping_a_run_on_all_rows_is_the_plain_run(algorithm):
    algorithm = dataclasses.replace(algorithm, B=0)
    plain = simulation(algorithm, None)
    private = simulation(algorithm, planned(algorithm, clip=np.inf, noise=0.0))
    states = [s.advance(s.start(), 3)[0] for s in (plain, private)]
    same(*((state.server, state.clients) for state in states))
    same(*(s.answer(state)[0] for s, state in zip((plain, private), states, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERY_KIND[:2], ids=lambda a: a.name)
@pytest.mark.parametrize("quarter_at", [(), (1,)])
def test_an_answer_repeats_the_round_and_its_noise(algorithm, quarter_at):
    s = simulation(algorithm, planned(algorithm), quarter_at=quarter_at)
    state = s.advance(s.start(), 2)[0]
    same(s.answer(state)[0], s.update(state, np.arange(3)).models)


def test_noise_differs_between_clients_rounds_and_seeds():
    algorithm = FedAvg(eta=1.0, R=1, B=8)
    noises = []
    for seed in (0, 1):
        s = simulation(algorithm, planned(algorithm, clip=1e-6, noise=1e6), seed=seed)
        for t in (0, 1):
            state = s.start()._replace(t=t)
            noises += [np.asarray(u) for u in s.update(state, np.arange(3)).upload.ravel(1)]
    assert np.abs(np.corrcoef(noises) - np.eye(len(noises))).max() < 0.3
    assert np.std(noises) == pytest.approx(1 / 8, rel=0.05)


def test_the_info_of_a_private_pfedme_reveals_nothing():
    s = simulation(EVERY_KIND[1], planned(EVERY_KIND[1]))
    assert s.answer(s.start())[1] == {}


@pytest.mark.parametrize(
    ("algorithm", "batches", "K"),
    [
        (EVERY_KIND[0], 3 * 11, 1), (EVERY_KIND[1], 3 * 11, 2), (EVERY_KIND[2], 3 * 10, 1),
        (EVERY_KIND[3], 2 * 3 * 10, 1), (EVERY_KIND[4], 3 * 10, 1), (EVERY_KIND[5], 3 * 11 + 2 * 5, 1),
    ],
    ids=lambda v: getattr(v, "name", None),
)  # fmt: skip
def test_a_plan_counts_every_use_of_rows(algorithm, batches, K):
    """Ten rounds with everyone, evaluated after five and ten: what repeats a round costs nothing, but the
    models after the last round are those of an eleventh."""
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    run = Run(
        algorithm=algorithm, data=DATA, model=MLR(), rounds=10, eval_every=5, privacy=Rows(epsilon=50.0)
    )
    _, s = run.prepare()
    assert isinstance(s.privacy, RowPlan)
    assert s.privacy.batches.tolist() == [batches] * 3
    assert s.privacy.gradients == K
    assert (s.privacy.epsilon <= 50).all()
    assert len(set(s.privacy.noise)) == len(set(s.privacy.rows))


def test_clients_that_take_part_more_often_need_more_noise():
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    rows = np.array([100, 100, 50])
    plan = plan_rows(Rows(epsilon=5.0), FedAvg(B=10), rows, np.array([2, 8, 2]), np.zeros(3, int))
    assert plan.noise[0] < plan.noise[1]
    assert plan.noise[0] < plan.noise[2]


def test_a_run_its_record_its_command_and_its_repetition(tmp_path: Path, capsys):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    words = "--data synthetic:clients=3,rows=60 --rounds 4 --eta 0.1 --R 2 --B 8"
    dp = "--dp rows --epsilon 20 --delta 1e-4 --dp-clip 0.5"
    assert main(["run", "fedavg", *shlex.split(words), *shlex.split(dp), "--out", str(tmp_path / "a")]) == 0
    record = json.loads((tmp_path / "a" / "record.json").read_text())
    told = record["privacy"]
    assert (told["unit"], told["relation"], told["simulated"]) == ("rows", "add or remove one row", True)
    assert (told["epsilon"], told["delta"], told["clip"]) == (20.0, 1e-4, 0.5)
    assert 0 < told["noise"]["min"] <= told["noise"]["median"] <= told["noise"]["max"]
    assert told["spent"]["max"] <= 20
    assert len(told["clients"]["epsilon"]) == 3
    assert any("number of rows" in line for line in told["not_covered"])
    (shown,) = document(read([tmp_path / "a"]))["privacy"]
    assert "one row of one client: ε is at most 20 at δ = 0.0001" in shown["claim"]
    assert "which is known" in shown["claim"]
    assert ["neighbours", "add or remove one row"] in shown["facts"]
    assert shown["not_covered"] == told["not_covered"]
    assert record["history"][0]["round"] == 1  # nothing is spent before the first round
    assert record["final"]["global"].get("train_loss") is None
    again = shlex.split(record["command"])[1:]
    assert main([*again, "--out", str(tmp_path / "b")]) == 0
    other = json.loads((tmp_path / "b" / "record.json").read_text())
    assert other["config"] == record["config"]
    assert other["final"] == record["final"]
    assert Run.from_json(record["config"]).privacy == Rows(epsilon=20.0, delta=1e-4, clip=0.5)


REFUSED = {
    "fedavg --rounds 3 --dp rows": "needs the largest privacy loss",
    "fedavg --rounds 3 --epsilon 3": "--epsilon needs a unit of privacy",
    "fedavg --rounds 3 --dp rows --epsilon 0": "epsilon of --dp rows must be positive",
    "fedavg --rounds 3 --dp rows --epsilon -1": "epsilon of --dp rows must be positive",
    "fedavg --rounds 3 --dp rows --epsilon nan": "epsilon of --dp rows must be a finite number",
    "fedavg --rounds 3 --dp rows --epsilon inf": "epsilon of --dp rows must be a finite number",
    "fedavg --rounds 3 --dp rows --epsilon 3 --dp-clip 0": "clip of --dp rows must be positive",
    "fedavg --rounds 3 --dp rows --epsilon 3 --dp-clip inf": "clip of --dp rows must be a finite number",
    "fedavg --rounds 3 --dp rows --epsilon 3 --dp-clip nan": "clip of --dp rows must be a finite number",
    "fedavg --rounds 3 --dp rows --epsilon 3 --delta 0": "delta of --dp rows must be positive",
    "fedavg --rounds 3 --dp rows --epsilon 3 --delta 1": "delta of --dp rows must be below 1",
    "fedavg --rounds 3 --dp rows --epsilon 3 --delta nan": "delta of --dp rows must be a finite number",
    "fedavg --rounds 3 --dp rows --epsilon 3 --delta 0.1": "choose --delta below",
    "fedavg --rounds 3 --dp rows --epsilon 3 --B 500": "fewer than the 500 of a mini-batch",
    "fedavg --dp rows --epsilon 3": "give --rounds",
    "fedavg --rounds 3 --dp rows --epsilon 3 --cohort 4": "choose --cohort between 1 and 3",
    "scaffold --rounds 3 --dp rows --epsilon 3": "does not cover scaffold; choose one of",
    "fedavg --rounds 3 --dp rows --epsilon 3 --model dnn-bn": "mixes the rows of a batch",
    "fedavg --rounds 3 --dp rows --epsilon 3 --class-weights balanced": "computed from the rows",
    "fedavg --rounds 3 --dp rows --epsilon 3 --batches cycled": "no random mini-batches",
    "fedavg --rounds 3 --dp rows --epsilon 3 --personalize auto": "outside of the budget",
    "fedavg --rounds 3 --dp rows --epsilon 3 --holdout-clients 0.3": "outside of the budget",
    "pfedme --rounds 3 --dp rows --epsilon 3 --nu 0.1": "needs a fixed number",
    "pfedme --rounds 3 --dp rows --epsilon 3 --rechoose 2": "chooses λ on rows",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_private_is_refused(words, tmp_path: Path, capsys):
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    argv = ["run", *shlex.split(words), "--data", "synthetic:clients=3,rows=60", "--out", str(tmp_path / "r")]
    assert main(argv) == 2
    assert REFUSED[words] in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


IMPOSSIBLE = (
    "epsilon=0", "epsilon=-1", "epsilon=nan", "epsilon=inf", "epsilon=3,delta=0", "epsilon=3,delta=nan",
    "epsilon=3,delta=1", "epsilon=3,delta=0.1", "epsilon=3,clip=nan", "epsilon=3,clip=inf", "",
)  # fmt: skip


@pytest.mark.parametrize("given", IMPOSSIBLE)
def test_impossible_privacy_is_refused_in_python_and_in_records(given: str):
    """As a text, as an object, and in the configuration of a record that is continued."""
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    text = f"rows:{given}" if given else "rows"
    own = {
        name: float(value) for name, _, value in (part.partition("=") for part in given.split(",") if part)
    }
    for privacy in (text, Rows(**own)):
        with pytest.raises(InputError, match=r"epsilon|delta|clip"):
            pfedme.train("fedavg", DATA, rounds=3, privacy=privacy)
    config = Run(algorithm=FedAvg(B=8), data=DATA, model=MLR(), rounds=3).to_json()
    with pytest.raises(InputError, match=r"epsilon|delta|clip"):
        Run.from_json({**config, "privacy": text}).prepare()


def test_tune_is_refused(capsys, tmp_path: Path):
    pytest.importorskip("optuna", reason="pfedme[tune] is not installed")
    argv = "tune fedavg --data synthetic:clients=3,rows=60 --rounds 3 --dp rows --epsilon 3 --out"
    assert main([*argv.split(), str(tmp_path / "t")]) == 2
    assert "every trial uses rows again" in capsys.readouterr().err


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    run = Run(algorithm=FedAvg(B=8), data=DATA, model=MLR(), rounds=7, privacy=Rows(epsilon=1.23))
    with pytest.raises(InputError, match=r"pip install 'pfedme\[privacy\]'"):
        run.prepare()


def test_delta_is_still_a_hyperparameter_of_per_fedavg():
    from pfedme.cli.run import parser
    from pfedme.cli.training import runs

    args = parser().parse_args(["per-fedavg", "--delta", "0.01", "--data", "synthetic", "--rounds", "3"])
    (run,) = runs(args, [args.algorithm])
    assert isinstance(run.algorithm, PerFedAvg)
    assert (run.algorithm.delta, run.privacy) == (0.01, None)


def test_what_is_supported():
    assert set(supported()) == {"fedavg", "pfedme", "mr-mtl", "ditto", "alone", "fedavg-ft"}


def test_a_subclass_is_not_covered_by_its_parent():
    class Mine(FedAvg):
        """It may use rows in other ways."""

    assert Mine.accesses is None


def test_privacy_as_a_text():
    asked = Rows(epsilon=3.0, delta=1e-6, clip=2.0)
    assert Privacy.from_text(str(asked), "privacy") == asked


def test_a_private_run_that_diverges_is_not_repeated(tmp_path: Path, capsys):
    """Another training with smaller steps would use the rows a second time."""
    pytest.importorskip("dp_accounting", reason="pfedme[privacy] is not installed")
    words = "run fedavg --data synthetic:clients=3,rows=60 --model mlr:l2=1e6 --rounds 12"
    words += " --dp rows --epsilon 5"
    assert main([*words.split(), "--out", str(tmp_path / "r")]) == 1
    record = json.loads((tmp_path / "r" / "record.json").read_text())
    assert (record["status"], record["privacy"]["epsilon"]) == ("diverged", 5.0)
    assert "lower --eta" in capsys.readouterr().err
