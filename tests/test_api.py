"""The Python interface: it gives what the command line gives, takes one's own code, and explains mistakes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

import pfedme
from pfedme.cli import main
from pfedme.core.problem import Problem
from pfedme.core.spec import Positive
from pfedme.errors import InputError
from pfedme.personalization.finished import FinishedRun
from pfedme.runs.run import Run

DATA = "synthetic:clients=4,rows=40,features=5,classes=3"
HOW = "auto:steps=3,folds=2"


@pfedme.record
class Halves(pfedme.Algorithm):
    """A client sends what gradient descent makes of w, taken `share` of the way."""

    name: ClassVar[str] = "halves"

    share: Positive = 0.5

    def client_update(self, key: jax.Array, problem: Problem, w: pfedme.Params, state: Any) -> pfedme.Update:
        after = w - (self.share * self.eta) * problem.sample(key, self.B).grad(w)
        return pfedme.Update(after - w, state, pfedme.Models(local=after), {})


def linear() -> pfedme.Model:
    """A model made of functions that nobody can import."""
    return pfedme.Model(
        init_fn=lambda key: {"W": jax.random.normal(key, (5, 3))}, apply_fn=lambda tree, x: x @ tree["W"]
    )


def inside() -> pfedme.Algorithm:
    """An algorithm whose class nobody can import, and which does not say its name."""

    @pfedme.record
    class Hidden(Halves):
        pass

    return Hidden(share=0.25)


def embedded(page: Path) -> dict[str, Any]:
    """The document of a page."""
    return json.loads(page.read_text().split('id="document">')[1].split("</script>")[0])


# --- the same as the command line


@pytest.mark.slow
def test_train_is_the_command_to_the_bit(tmp_path: Path):
    data = "synthetic:clients=4,rows=10,features=5,classes=3"
    command = (
        f"run fedavg --data {data} --rounds 3 --budget 6 --R 2 --eval-every 1 --holdout-clients 1 "
        f"--personalize {HOW}"
    )
    assert main([*command.split(), "--out", str(tmp_path / "command"), "--json"]) == 0
    result = pfedme.train(
        "fedavg:R=2",
        data,
        rounds=3,
        budget=6,
        eval_every=1,
        holdout_clients=["1"],
        personalize=HOW,
        out=tmp_path / "python",
    )
    names = {path.name for path in (tmp_path / "command").iterdir()}
    assert names == {path.name for path in (tmp_path / "python").iterdir()}
    for name in names - {"record.json", "report.html"}:
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    assert [entry["round"] for entry in result.record["history"]] == [0, 1, 2, 3]
    assert result.offer is not None
    assert result.offer.to_json()["personalized"] == json.loads(
        (tmp_path / "python" / "personalized.json").read_text()
    )
    # What is found without a folder is the same, and so it is from the folder.
    held_out = pfedme.train(
        "fedavg:R=2", data, rounds=3, budget=6, eval_every=1, holdout_clients="1", personalize=HOW
    )
    assert held_out.offer is not None
    assert held_out.offer.to_json() == result.offer.to_json()
    again = pfedme.personalize(tmp_path / "python", how=HOW)
    assert again.to_json() == result.offer.to_json()


@pytest.mark.slow
def test_newcomers_from_python(tmp_path: Path):
    result = pfedme.train("fedavg:eta=0.1", DATA, rounds=2, budget=6, out=tmp_path / "run")
    new = pfedme.personalize(result, f"{DATA},seed=1", how=HOW)
    assert new.found is not None
    assert new.found.clients == 4
    pfedme.personalize(tmp_path / "run", f"{DATA},seed=1", how=HOW, out=tmp_path / "new")
    told = json.loads((tmp_path / "new" / "personalized.json").read_text())
    assert told == new.to_json()["personalized"]
    assert embedded(tmp_path / "new" / "report.html")["title"] == "Newcomers from synthetic"
    assert pfedme.model_of(tmp_path / "new", client="2").origin["which"] == "recommended"


@pytest.mark.slow
def test_compare_has_the_records_of_its_runs(tmp_path: Path):
    alone = pfedme.Alone(R=2, eta=0.1, l2="model")
    found = pfedme.compare(["fedavg:R=2,eta=0.1", alone], DATA, rounds=2, seeds=2, out=tmp_path / "c")
    assert {name: len(records) for name, records in found.records.items()} == {"fedavg": 2, "alone": 2}
    for name, records in found.records.items():
        for seed, record in enumerate(records):
            folder = tmp_path / "c" / name / f"seed-{seed}"
            assert record == json.loads((folder / "record.json").read_text())
    assert str(found).splitlines()[1].startswith("fedavg")
    assert (tmp_path / "c" / "report.html").exists()
    plan = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert found.verdict == (plan.get("verdict") if isinstance(plan, dict) else None)
    assert found.failures == []
    mine = pfedme.compare([Halves(R=2), inside()], DATA, rounds=2)
    assert list(mine.records) == ["halves", "Hidden"]


@pytest.mark.slow
def test_tune_gives_the_best_settings(tmp_path: Path):
    found = pfedme.tune(pfedme.FedAvg(R=2, B=5), DATA, rounds=2, trials=2, out=tmp_path / "t")
    assert set(found.best[0].settings) == {"eta", "beta", "aggregation"}
    best = max(trial.accuracy or 0 for trial in found.trials)
    assert found.best[0].accuracy == best
    assert found.run.algorithm == pfedme.FedAvg(R=2, B=5, **found.best[0].settings)
    fixed = pfedme.tune("fedavg", DATA, rounds=2, trials=1, fixed=["R", "beta", "aggregation"])
    assert set(fixed.best[0].settings) == {"eta"}


def test_no_module_hides_a_function_of_its_name():
    for name in ("compare", "tune", "personalize", "train"):
        assert importlib.util.find_spec(f"pfedme.{name}") is None
        assert getattr(pfedme, name) is getattr(pfedme.api, name)


# --- code of the user's own


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_recorded_and_read_back(tmp_path: Path):
    mine = Halves(share=0.25, eta=0.1, B=0)
    result = pfedme.train(mine, DATA, rounds=2, seed=3, out=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "record.json").read_text())["config"]
    assert config["algorithm"]["name"] == f"{__name__}:Halves"
    assert config["algorithm"]["share"] == 0.25
    assert Run.from_json(config).algorithm == mine
    assert FinishedRun.open(tmp_path / "run").run == result.run
    page = embedded(tmp_path / "run" / "report.html")
    assert page["groups"][0]["label"] == "halves"
    # Two rounds by hand.
    w = result.model.init(jax.random.fold_in(jax.random.key(3), 2**32 - 1))
    f = result.federation
    start, count = f.rows("train")
    for _ in range(2):
        steps = []
        for s, n in zip(start, count, strict=True):
            x, y = jnp.asarray(f.x[s : s + n]), jnp.asarray(f.y[s : s + n])

            def loss(w: pfedme.Params, x: jax.Array = x, y: jax.Array = y) -> jax.Array:
                z = result.model.scores(w, x)
                return jnp.mean(result.model.losses(z, y)) + result.model.regulariser(w)

            steps.append((w - 0.025 * jax.grad(loss)(w)).ravel())
        w = w.like(jnp.mean(jnp.stack(steps), axis=0))
    assert result.w is not None
    np.testing.assert_allclose(result.w, w.ravel(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_imported_is_shown_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    result = pfedme.train(inside(), DATA, model=linear(), rounds=2, budget=6, out=out)
    assert result.record["final"]["global"]["accuracy"] is not None
    run = Run.from_json(result.record["config"])
    assert run.to_json() == result.record["config"]
    page = embedded(out / "report.html")
    assert page["groups"][0]["label"] == "Hidden"
    assert main(["report", str(out), "-o", str(tmp_path / "again.html")]) == 0
    capsys.readouterr()
    for argv in (["personalize", str(out)], ["export", str(out), "-o", str(tmp_path / "m")]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "cannot be imported here" in said or "your own Python code" in said
    record = json.loads((out / "record.json").read_text()) | {"status": "running"}
    (out / "record.json").write_text(json.dumps(record))
    assert main(["resume", str(out)]) == 2
    assert "cannot be imported here" in capsys.readouterr().err
    # In the process that has it, clients can still choose.
    offer = pfedme.personalize(result, how=HOW)
    assert offer.found is not None
    assert offer.found.clients == 4


def test_a_model_of_ones_own_is_recorded_and_read_back(tmp_path: Path):
    network = pfedme.Network(features=5, classes=3, hidden=(4,))
    result = pfedme.train("fedavg:R=2", DATA, model=network, rounds=2, out=tmp_path / "run")
    assert Run.from_json(result.record["config"]) == result.run
    same = pfedme.train("fedavg:R=2", DATA, model="dnn:hidden=4", rounds=2)
    np.testing.assert_array_equal(result.w, same.w)
    assert pfedme.model_of(tmp_path / "run").predict(np.zeros((2, 5))).shape == (2,)


# --- the document


@pytest.mark.slow
def test_the_examples_of_the_document_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    hospital, age = rng.choice(["Dayton", "Seattle", "Miami"], 90), rng.integers(20, 90, 90)
    ward, outcome = rng.choice(["a", "b"], 90), np.where(age + rng.normal(0, 20, 90) > 55, "yes", "no")
    table = {"hospital": hospital, "age": age, "ward": ward, "outcome": outcome}
    pl.DataFrame(table).write_csv("patients.csv")
    text = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    known: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(block, known)
    assert json.loads(Path("runs/momentum/record.json").read_text())["config"]["algorithm"]["mu"] == 0.3


# --- mistakes


loose: Any = pfedme
"""Without types, as most callers have none."""


class Undecorated(Halves):
    """An algorithm without the decorator."""


NUMBER = "must be a whole number, not"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loose.train("fedavg", None), "data must be a string such as 'synthetic'.*not None"),
        (lambda: loose.train("fedavg", pl.DataFrame({"a": [1]})), "data is a DataFrame; write it to a file"),
        (lambda: loose.train("fedavg", pfedme.Table), "data is the class Table; give an instance"),
        (lambda: loose.train("fedavg", 3), "data must be .* not 3"),
        (lambda: loose.train("fedavg", "sinthetic"), "did you mean 'synthetic'"),
        (lambda: loose.train("fedavg", loose.Synthetic(clients="x")), "clients of the data must be"),
        (lambda: loose.train(["fedavg"], DATA), "algorithm must be a string .* not a list"),
        (lambda: loose.train(None, DATA), "algorithm must be .* not None"),
        (lambda: loose.train(pfedme.PFedMe, DATA), r"the class PFedMe; give an instance, PFedMe\(\)"),
        (lambda: loose.train(loose.PFedMe(lam="x"), DATA), "lam of algorithm 'pfedme' must be"),
        (lambda: loose.train(Undecorated(), DATA), "Undecorated, which needs the decorator @pfedme.record"),
        (lambda: loose.train("fedavg", DATA, rounds="ten"), f"rounds of the run {NUMBER} ten"),
        (lambda: loose.train("fedavg", DATA, rounds=2.5), f"rounds of the run {NUMBER} 2.5"),
        (lambda: loose.train("fedavg", DATA, cohort=[2]), f"cohort of the run {NUMBER}"),
        (lambda: loose.train("fedavg", DATA, seed=-1), "seed of the run must be at least 0"),
        (lambda: loose.train("fedavg", DATA, eval_every=0), "eval_every of the run must be at least 1"),
        (lambda: loose.train("fedavg", DATA, model=3), "model must be .* not 3"),
        (lambda: loose.train("fedavg", DATA, model=pfedme.MLR), "model is the class MLR; give an instance"),
        (lambda: loose.train("fedavg", DATA, model=loose.MLR(l2="a")), "l2 of model 'MLR' must be"),
        (
            lambda: loose.train("fedavg", DATA, model=pfedme.Network(features=5, classes=2)),
            r"returns scores of shape \(2, 2\).* the data has 3 classes",
        ),
        (
            lambda: loose.train("fedavg", DATA, model=pfedme.Network(features=6, classes=3)),
            "Network cannot be applied to rows of 5 numbers",
        ),
        (lambda: loose.train("fedavg", DATA, personalize=3), "personalize must be 'auto'.* not 3"),
        (lambda: loose.train("fedavg", DATA, personalize="auto:setps=3"), "did you mean 'steps'"),
        (lambda: loose.train("fedavg", DATA, holdout_clients=["7"]), "There is no client '7'"),
        (lambda: loose.train("fedavg", DATA, holdout_clients=2.0), "must be below 1"),
        (lambda: loose.train("fedavg", DATA, holdout_clients=max), "holdout_clients of the run must be"),
        (lambda: loose.train("fedavg", DATA, out=3), "out must be the path of a folder, not 3"),
        (lambda: loose.train("fedavg", DATA, out=__file__), "cannot be a folder, because .* is a file"),
        (lambda: loose.train("fedavg", DATA, watch=3), "watch must be a function, not 3"),
        (lambda: loose.train("alone", DATA, personalize="auto"), "trains no shared model"),
        (lambda: loose.compare("fedavg", DATA), "algorithms must be a list of algorithms, not 'fedavg'"),
        (lambda: loose.compare([], DATA), "algorithms must be a list"),
        (lambda: loose.compare(["fedavg"], DATA, seeds=0), "seeds must be a positive whole number, not 0"),
        (lambda: loose.compare([pfedme.FedAvg], DATA), "the class FedAvg"),
        (lambda: loose.compare(["fedavg"], DATA, out=__file__), "is a file"),
        (lambda: loose.tune("fedavg", DATA, trials="many"), "trials must be .* not 'many'"),
        (lambda: loose.tune("fedavg", DATA, search="random"), "search must be .* not 'random'"),
        (lambda: loose.tune("fedavg", DATA, fixed=["etta"]), "did you mean 'eta'"),
        (lambda: loose.tune("fedavg", DATA, fixed=3), "fixed must be a list of names, not 3"),
        (lambda: loose.personalize(None), "run must be a run's folder"),
        (lambda: loose.personalize(3), "run must be the path of a folder, not 3"),
        (lambda: loose.personalize("/nowhere"), "There is no run in /nowhere"),
    ],
)  # fmt: skip
def test_a_wrong_argument_gets_a_sentence(call: Any, message: str):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert str(error.value).endswith((".", "?"))


def test_numbers_of_numpy_are_numbers():
    result = loose.train("fedavg:R=2", DATA, rounds=np.int64(2), cohort=np.int32(2), seed=np.uint8(1))
    assert result.record["config"]["rounds"] == 2
