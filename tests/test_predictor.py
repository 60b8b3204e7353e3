"""Models to use: what an exported model predicts is what the simulation saw, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from test_table import patients, saved

import pfedme
from pfedme.cli import main
from pfedme.data.schema import Schema
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.errors import InputError
from pfedme.training.execution import Result

QUICK = pfedme.PFedMe(lam=5.0, eta=0.05, R=3, K=2, B=8)


def trained(data: str | pfedme.Table, out: Path, model: str = "mlr") -> Result:
    """A short run in a folder."""
    return pfedme.train(QUICK, data, model=model, rounds=3, out=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with patients.csv, its run and a model of 'Süd'."""
    path = tmp_path_factory.mktemp("predictor")
    table = saved(patients(200), path / "patients.csv")
    trained(pfedme.Table(path=str(table), client="hospital", label="outcome"), path / "run")
    assert main(["export", str(path / "run"), "--client", "Süd", "-o", str(path / "model")]) == 0
    return path


def images(path: Path) -> str:
    """Rows of 300 numbers, enough for products that are cut into blocks."""
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(400, 15, 20)), rng.integers(0, 3, 400)
    y = (x[:, :3, :4].sum((1, 2)) > 0).astype(int)
    np.savez(path, x=x, y=y, client=np.array(["a", "b", "c"])[client])
    return str(path)


@pytest.mark.parametrize(
    "model",
    [
        "mlr",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("dnn:hidden=30-20", "cnn:channels=3,hidden=5")),
    ],
)
def test_predictions_are_the_simulations_to_the_bit(model: str, tmp_path: Path):
    data = images(tmp_path / "images.npz")
    run = tmp_path / "run"
    result = trained(data, run, model)
    f, blocks = result.federation, Blocks.cut(*result.federation.rows("test"))
    assert result.theta is not None
    assert result.w is not None
    like = pfedme.model_of(run).theta
    seen = outcomes(result.model, like.like(result.theta), jnp.asarray(f.x), jnp.asarray(f.y), blocks)
    rows, owner = blocks.rows(), blocks.owner()
    # The rows as the file has them, found again by their standardised numbers.
    table = np.load(data)["x"].reshape(400, -1)
    assert f.schema is not None
    place = {row.tobytes(): k for k, row in enumerate(f.schema.encode(table, "the file"))}
    for i, name in enumerate(f.names or ()):
        out = tmp_path / name
        assert main(["export", str(run), "--client", name, "-o", str(out)]) == 0
        predictor = pfedme.load(out)
        own = rows[owner == i]
        raw = table[[place[row.tobytes()] for row in f.x[own]]]
        scores = predictor.scores(raw)
        losses = np.asarray(predictor.model.losses(jnp.asarray(scores.T), jnp.asarray(f.y[own])))
        np.testing.assert_array_equal(np.exp(-losses.astype(np.float64)), seen.likely[owner == i])
        labels = np.array(predictor.labels)[f.y[own]]
        np.testing.assert_array_equal(predictor.predict(raw) == labels, seen.right[owner == i])
        np.testing.assert_array_equal(predictor.theta.ravel(), result.theta[i])
    np.testing.assert_array_equal(pfedme.model_of(run).theta.ravel(), result.w)


def test_a_file_is_predicted_as_its_frame_is(folder: Path, tmp_path: Path):
    frame = patients(300, seed=1)
    model = pfedme.load(folder / "model")
    want = pl.DataFrame({
        "prediction": model.predict(frame),
        "probability_no": model.probabilities(frame)[:, 0],
        "probability_yes": model.probabilities(frame)[:, 1],
    })  # fmt: skip
    frame.write_parquet(tmp_path / "new.parquet")
    saved(frame.select(sorted(frame.columns)).drop("hospital", "outcome"), tmp_path / "new.csv", ";")
    (tmp_path / "blank.csv").write_text(frame.write_csv() + "\n\n")
    for name in ("new.parquet", "new.csv", "blank.csv"):
        out = tmp_path / f"{name}.predicted.csv"
        assert main(["predict", str(folder / "model"), "--data", str(tmp_path / name), "-o", str(out)]) == 0
        got = pl.read_csv(out)
        assert got.columns == want.columns
        assert got["prediction"].to_list() == want["prediction"].to_list()
        np.testing.assert_array_equal(got[:, 1:].to_numpy(), want[:, 1:].to_numpy())


def test_probabilities_are_the_softmax_of_the_scores(folder: Path):
    model = pfedme.load(folder / "model")
    frame = patients(20, seed=2)
    scores = model.scores(frame).astype(np.float64)
    want = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.probabilities(frame), want, rtol=1e-12)
    assert model.predict(frame).tolist() == [("no", "yes")[k] for k in scores.argmax(axis=1)]


def test_many_rows_are_one_by_one(folder: Path):
    model = pfedme.load(folder / "model")
    frame = patients(600, seed=3)
    one_by_one = np.concatenate([model.scores(frame[k]) for k in (0, 255, 256, 511, 599)])
    np.testing.assert_array_equal(model.scores(frame)[[0, 255, 256, 511, 599]], one_by_one)
    assert model.scores(frame[:0]).shape == (0, 2)


class Pandas(dict[str, list[object]]):
    """As much of a pandas frame as is used."""

    @property
    def columns(self) -> list[str]:
        return list(self)

    def isna(self) -> None: ...

    def __getitem__(self, name: str) -> PandasColumn:
        return PandasColumn(super().__getitem__(name))


class PandasColumn(list[object]):
    """A column of it."""

    def isna(self) -> list[bool]:
        return [value is None or value != value for value in self]


def test_frames_of_other_kinds_are_understood(folder: Path):
    model, frame = pfedme.load(folder / "model"), patients(5, seed=4)
    want = model.predict(frame).tolist()
    assert model.predict(frame.to_dict(as_series=False)).tolist() == want
    assert model.predict(frame.to_dict()).tolist() == want
    assert model.predict(Pandas(frame.to_dict(as_series=False))).tolist() == want
    missing = Pandas({**frame.to_dict(as_series=False), "age": [1.0, float("nan"), 2.0, 3.0, 4.0]})
    with pytest.raises(InputError, match="Column 'age' of row 2 of the rows is empty"):
        model.predict(missing, strict=True)
    with pytest.raises(InputError, match="must be a data frame"):
        model.predict(np.zeros((2, 9)))
    with pytest.raises(InputError, match="not a frame"):
        model.predict(3)


def test_a_quantity_is_predicted_in_its_own_unit(tmp_path: Path):
    rng = np.random.default_rng(0)
    frame = patients(300).drop("outcome")
    frame = frame.with_columns(stay=100 + 50 * frame["age"] + pl.Series(rng.normal(size=300)))
    table = pfedme.Table(path=str(saved(frame, tmp_path / "p.csv")), client="hospital", label="stay")
    pfedme.train(pfedme.FedAvg(eta=0.05), table, rounds=60, out=tmp_path / "run")
    model = pfedme.model_of(tmp_path / "run", client="Süd")
    assert model.origin["which"] == "global"
    error = model.predict(frame) - frame["stay"].to_numpy()
    assert np.sqrt((error**2).mean()) < 0.2 * frame["stay"].to_numpy().std()
    with pytest.raises(InputError, match="no probabilities"):
        model.probabilities(frame)
    model.save(tmp_path / "model")
    new = saved(frame.drop("stay"), tmp_path / "new.csv")
    out = tmp_path / "out.csv"
    assert main(["predict", str(tmp_path / "model"), "--data", str(new), "-o", str(out)]) == 0
    got = pl.read_csv(out)
    assert got.columns == ["prediction"]
    np.testing.assert_array_equal(got["prediction"].to_numpy(), model.predict(frame))


@pytest.mark.slow
def test_what_was_recommended_goes_before_what_was_trained(tmp_path: Path):
    run = ["run", "fedavg", "--data", "synthetic:clients=4,rows=40", "--rounds", "3", "--eta", "0.02"]
    run += ["--budget", "6", "--personalize", "auto:steps=20,folds=2"]
    run += ["--out", str(tmp_path / "run"), "--json"]
    assert main(run) == 0
    given = pfedme.model_of(tmp_path / "run", client="2")
    assert given.origin["which"] == "recommended"
    assert pfedme.model_of(tmp_path / "run").origin["which"] == "global"
    assert given.predict(np.zeros((2, 60))).shape == (2,)
    newcomers = ["personalize", str(tmp_path / "run"), "--data", "synthetic:clients=4,rows=40"]
    assert main([*newcomers, "--out", str(tmp_path / "new"), "--json"]) == 0
    assert pfedme.model_of(tmp_path / "new", client="0").origin["which"] == "recommended"
    with pytest.raises(InputError, match="has no global model, only: recommended"):
        pfedme.model_of(tmp_path / "new")
    with pytest.raises(InputError, match="3 numbers, but should have 60"):
        given.predict(np.zeros((2, 3)))
    with pytest.raises(InputError, match="Row 2 of the rows has a number that is missing or infinite"):
        given.predict(np.array([np.zeros(60), np.full(60, np.nan)]))
    with pytest.raises(InputError, match="only numbers"):
        given.predict(np.full((1, 60), "a"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.drop("age"), "new.csv has no column 'age'; its columns are"),
        (
            lambda d: d.with_columns(ward=pl.lit("z")),
            "Column 'ward' of row 1 of .*new.csv is 'z', a category",
        ),
        (
            lambda d: d.with_columns(age=pl.lit("old")),
            "Column 'age' of row 1 of .*new.csv is 'old', .*not a number",
        ),
        (lambda d: d.with_columns(age=pl.lit(None)), "Column 'age' of row 1 of .*new.csv is empty"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    change: Callable[[pl.DataFrame], pl.DataFrame],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    new = saved(change(patients(5)), tmp_path / "new.csv")
    out = tmp_path / "out.csv"
    assert main(["predict", str(folder / "model"), "--data", str(new), "-o", str(out), "--strict"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.csv"]


def test_values_that_were_not_trained_on_are_zeros_and_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    frame = patients(40, seed=1)
    model = pfedme.load(folder / "model")
    assert model.schema is not None
    mean = next(c.mean for c in model.schema.columns if c.name == "age")
    ward = [None, "z", *frame["ward"][2:]]
    odd = frame.with_columns(age=pl.Series([*frame["age"][:-1], None]), ward=pl.Series(ward))
    with pytest.warns(UserWarning, match="not trained on") as warned:
        got = model.probabilities(odd)
    said = str(warned[0].message)
    assert said.startswith("3 of 40 rows of the data have values that the model was not trained on")
    for part in ("missing in 'age' (1 row)", "missing in 'ward' (1 row)", "'ward' (1 row, such as 'z')"):
        assert part in said
    # The mean, and no ward at all, by the formula.
    x = model.schema.encode(frame.with_columns(age=pl.Series([*frame["age"][:-1], mean])), "the oracle")
    at = model.schema.starts["ward"]
    x[:2, at : at + 3] = 0
    ((W, b),) = model.theta.tree
    odds = np.exp(x.astype(float) @ np.asarray(W, float).T + np.asarray(b, float))
    np.testing.assert_allclose(got, odds / odds.sum(axis=1, keepdims=True), rtol=1e-5)
    for strict in (model.predict, model.probabilities):
        with pytest.raises(InputError, match="Column 'age' of row 40 of the rows is empty"):
            strict(odd, strict=True)

    new, out = saved(odd, tmp_path / "new.csv"), tmp_path / "out.csv"
    capsys.readouterr()
    assert main(["predict", str(folder / "model"), "--data", str(new), "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "3 of 40 rows of" in told.err
    assert "such as 'z'" in told.err
    np.testing.assert_array_equal(pl.read_csv(out)["probability_yes"].to_numpy(), got[:, 1])


def test_columns_are_kept_as_they_were_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    frame = patients(30, seed=2)
    ids = [f"00{k}" for k in range(30)]
    table = frame.with_columns(id=pl.Series(ids), visits=pl.Series([f"{v}.0" for v in frame["visits"]]))
    new, out = saved(table, tmp_path / "new.csv"), tmp_path / "out.csv"
    command = ["predict", str(folder / "model"), "--data", str(new), "-o", str(out)]
    assert main([*command, "--keep", "id,visits,ward,hospital"]) == 0
    got = pl.read_csv(out, infer_schema=False)
    assert got.columns == [
        "id",
        "visits",
        "ward",
        "hospital",
        "prediction",
        "probability_no",
        "probability_yes",
    ]
    for name in ("id", "visits", "ward", "hospital"):
        assert got[name].to_list() == table[name].to_list()
    assert got["prediction"].to_list() == pfedme.load(folder / "model").predict(frame).tolist()
    capsys.readouterr()
    for keep, message in (("idd", "did you mean 'id'?"), ("prediction", "have a column of that name")):
        saved(table.with_columns(prediction=pl.lit("x")), new)
        assert main([*command, "--keep", keep, "--force"]) == 2
        assert message in capsys.readouterr().err


def test_an_array_keeps_its_other_arrays(tmp_path: Path):
    trained(images(tmp_path / "images.npz"), tmp_path / "run")
    pfedme.model_of(tmp_path / "run").save(tmp_path / "model")
    out = tmp_path / "out.csv"
    command = ["predict", str(tmp_path / "model"), "--data", str(tmp_path / "images.npz"), "-o", str(out)]
    assert main([*command, "--keep", "client,y"]) == 0
    got, want = pl.read_csv(out), np.load(tmp_path / "images.npz")
    assert got["client"].to_list() == want["client"].tolist()
    assert got["y"].to_list() == want["y"].tolist()
    assert got.height == 400


@pytest.mark.parametrize("link", ["the same path", "symbolic", "hard", "data is a link", "in the folder"])
def test_the_table_is_never_overwritten(
    link: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = out = saved(patients(5), tmp_path / "new.csv")
    content = data.read_bytes()
    if link == "symbolic":
        out = tmp_path / "out.csv"
        out.symlink_to(data)
    elif link == "hard":
        out = tmp_path / "out.csv"
        out.hardlink_to(data)
    elif link == "data is a link":
        data = tmp_path / "link.csv"
        data.symlink_to(out)
    elif link == "in the folder":
        data = tmp_path
    command = ["predict", str(folder / "model"), "--data", str(data), "-o", str(out), "--force"]
    assert main(command) == 2
    assert "is never overwritten" in capsys.readouterr().err
    assert (tmp_path / "new.csv").read_bytes() == content


@pytest.mark.slow
def test_a_run_with_a_shared_model_alone_knows_its_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    table = saved(patients(30), tmp_path / "patients.csv")
    command = ["run", "fedavg", "--data", str(table), "--client", "hospital", "--label", "outcome"]
    command += ["--rounds", "2", "--eta", "0.1", "--budget", "6", "--holdout-clients", "Nord", "--json"]
    command += ["--out", str(tmp_path / "run")]
    assert main(command) == 0
    export = ["export", str(tmp_path / "run"), "-o", str(tmp_path / "model"), "--force", "--client"]
    assert main([*export, "Süd"]) == 0
    assert main([*export, "Nord"]) == 0  # held out, and so no stranger
    capsys.readouterr()
    assert main([*export, "Norf"]) == 2
    assert (
        "There is no client 'Norf'; did you mean 'Nord'? Known: Süd, west / 3, Nord"
        in capsys.readouterr().err
    )
    table.unlink()
    assert main([*export, "Sud"]) == 2
    assert "There is no client 'Sud'; did you mean 'Süd'" in capsys.readouterr().err


def test_a_mistake_far_down_the_file_is_found(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    frame = patients(20_000)
    ages = frame["age"].cast(pl.String).to_list()
    ages[15_000] = "unknown"
    new = saved(frame.with_columns(age=pl.Series(ages)), tmp_path / "new.csv")
    out = str(tmp_path / "out.csv")
    assert main(["predict", str(folder / "model"), "--data", str(new), "-o", out]) == 2
    assert "Column 'age' of row 15001" in capsys.readouterr().err


def test_exports_are_refused_with_the_cure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, model = str(folder / "run"), str(folder / "model")
    new = str(saved(patients(5), tmp_path / "new.csv"))
    (tmp_path / "there.csv").touch()
    for argv, message in (
        (["export", run, "--client", "Sud", "-o", str(tmp_path / "m")], "There is no client 'Sud'"),
        (["export", run, "--client", "Süd", "-o", model], "is not empty"),
        (["export", run, "--which", "personal", "-o", str(tmp_path / "m")], "Whose personal model"),
        (["export", run, "--client", "Süd", "--which", "recommended", "-o", "m"], "no recommended model"),
        (["export", str(tmp_path), "-o", str(tmp_path / "m")], "no run in"),
        (["predict", run, "--data", new, "-o", str(tmp_path / "out.csv")], "no exported model in"),
        (["predict", model, "--data", str(tmp_path / "no.csv"), "-o", str(tmp_path / "o.csv")], "no file"),
        (["predict", model, "--data", new, "-o", str(tmp_path / "there.csv")], "exists"),
        (["predict", model, "--data", new, "-o", str(tmp_path)], "is a folder"),
    ):
        assert main(argv) == 2, argv
        assert message in capsys.readouterr().err, argv
    assert main(["export", run, "--client", "Süd", "-o", model, "--force"]) == 0


def test_a_later_format_is_told_from_a_damaged_one(folder: Path, tmp_path: Path):
    pfedme.load(folder / "model").save(tmp_path / "m")
    file = tmp_path / "m" / "model.json"
    document = json.loads(file.read_text())
    for change, message in (
        (
            {"format": 2, "version": "9.0"},
            "exported by pfedme 9.0 in a format that this version, .* not know",
        ),
        (
            {"model": {"kind": "transformer", "features": 1, "classes": 2}},
            "Unknown kind of model",
        ),
        ({"model": {**document["model"], "features": 3}}, "is damaged .the model has 8 numbers"),
        ({"schema": {}}, "not the description of a table's columns"),
        ({"format": None}, "does not describe an exported model"),
    ):
        file.write_text(json.dumps({**document, **change}))
        with pytest.raises(InputError, match=message):
            pfedme.load(tmp_path / "m")
    file.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        pfedme.load(tmp_path / "m")
    file.write_text(json.dumps(document))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="is damaged"):
        pfedme.load(tmp_path / "m")


def test_the_document_says_what_the_model_is(folder: Path):
    document = json.loads((folder / "model" / "model.json").read_text())
    assert document["client"] == "Süd"
    assert document["which"] == "personal"
    assert document["labels"] == ["no", "yes"]
    columns = {c.name: c.kind for c in Schema.from_json(document["schema"]).columns}
    assert columns == {"age": "number", "visits": "number", "ward": "category", "smoker": "category"}


def test_what_the_package_offers_is_there():
    assert all(hasattr(pfedme, name) for name in pfedme.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vars(pfedme)["__getattr__"]("nothing")
