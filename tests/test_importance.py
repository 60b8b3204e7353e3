"""Which columns matter: closed forms, brute force and laws; where clients differ; what a run writes."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pfedme.cli import main
from pfedme.core.models import Network
from pfedme.core.tree import Params
from pfedme.data.federation import Federation
from pfedme.data.forms import Form
from pfedme.data.schema import Column, Schema
from pfedme.engine import importance as measured
from pfedme.engine.choices import row_score
from pfedme.engine.importance import SHUFFLES, Importance, importance, level
from pfedme.engine.metrics import Blocks, outcomes
from pfedme.report.columns import MOST_CLIENTS, MOST_COLUMNS, ColumnReport, columns_of
from pfedme.report.html.document import document
from pfedme.report.html.read import read
from pfedme.report.spread import shifts

WHOLE = SHUFFLES + 1
"""With so many rows, every row gets its values from every other one."""
NUMBERS = tuple(Column(name, "number") for name in ("age", "dose", "weight"))
WARD = Column("ward", "category", categories=("a", "b", "c"))


def made(
    sizes: tuple[int, ...] = (WHOLE, WHOLE, WHOLE), *, columns: tuple[Column, ...] = NUMBERS,
    classes: int = 0, tests: int = 3, seed: int = 0,
) -> Federation:  # fmt: skip
    """A table of clients with so many training rows, whose columns are independent."""
    rng, counts = np.random.default_rng(seed), np.array(sizes) + tests
    n, parts = int(counts.sum()), []
    for column in columns:
        one_hot = np.eye(column.features)[rng.integers(0, column.features, n)]
        parts.append(rng.normal(size=(n, 1)) if column.kind == "number" else one_hot)
    y = rng.integers(0, classes, n).astype(np.int32) if classes else rng.normal(size=n).astype(np.float32)
    task = "classification" if classes else "regression"
    schema = Schema(columns, "outcome", "clinic", task, labels=tuple(f"grade {k}" for k in range(classes)))
    names = ("Dayton", "Seattle", "Provo", *(str(k) for k in range(3, len(sizes))))[: len(sizes)]
    return Federation(
        x=np.concatenate(parts, axis=1).astype(np.float32), y=y, n_train=np.array(sizes), classes=classes,
        n_test=np.full(len(sizes), tests), ids=np.arange(len(sizes), dtype=np.uint32) + 5, schema=schema,
        names=names,
    )  # fmt: skip


def own(fed: Federation, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's training rows, in double precision."""
    at = slice(fed.start[client], fed.start[client] + fed.n_train[client])
    return fed.x[at].astype(np.float64), fed.y[at].astype(np.float64)


def linear(W: np.ndarray, b: np.ndarray | None = None) -> Params:
    """A linear model, or a stack of them."""
    b = np.zeros(W.shape[:-1]) if b is None else b
    return Params([(jnp.asarray(W, jnp.float32), jnp.asarray(b, jnp.float32))])


def drawn(fed: Federation, outputs: int = 1, seed: int = 1) -> tuple[Params, Params]:
    """A shared linear model, and one for each client."""
    rng = np.random.default_rng(seed)
    W = 0.5 * rng.normal(size=(1 + fed.clients, outputs, fed.features))
    return linear(W[0]), linear(W[1:])


def found(fed: Federation, shared: Params | None, theta: Params, hidden: tuple[int, ...] = ()) -> Importance:
    model = Network(features=fed.features, classes=fed.classes, hidden=hidden)
    told = importance(model, fed, shared, theta)
    assert told is not None
    return told


# --- importance


def test_a_column_with_zero_weights_has_exactly_no_importance():
    fed = made((30, 8, 2), columns=(*NUMBERS, WARD), classes=3)
    shared, theta = drawn(fed, 3)
    unused = [1, 3, 4, 5]
    shared, theta = (p.map(lambda a: a.at[..., jnp.array(unused)].set(0) if a.shape[-1] > 3 else a)
                     for p in (shared, theta))  # fmt: skip
    told = found(fed, shared, theta)
    assert told.columns == ("age", "dose", "weight", "ward")
    assert told.shared is not None
    assert told.at_client is not None
    for values in (told.own, told.at_client, told.shared[None]):
        assert (values[:, [1, 3]] == 0).all()
    assert (told.own[:, [0, 2]] != 0).all()


def test_linear_regression_has_the_closed_form():
    """w_j² Var(x_j) − w_j Cov(z − y, x_j), if values come from every other row."""
    fed = made((WHOLE, WHOLE))
    fed = dataclasses.replace(fed, y=fed.y / 4)
    shared, theta = drawn(fed)
    told = found(fed, shared, theta)
    assert told.at_client is not None
    stack = shared.map(lambda leaf: jnp.stack([leaf, leaf]))
    for models, values in ((theta, told.own), (stack, told.at_client)):
        for i in range(2):
            x, y = own(fed, i)
            w = np.asarray(models.tree[0][0], np.float64)[i, 0]
            # No loss reaches its limit, −log 0.01.
            assert np.abs(x @ w - y).max() + np.max(np.abs(w) * np.ptp(x, axis=0)) < 3
            cov = np.cov(np.column_stack([x, x @ w - y]).T)
            np.testing.assert_allclose(
                values[i], w**2 * np.diag(cov)[:3] - w * cov[:3, 3], rtol=1e-4, atol=1e-6
            )


def test_of_a_least_squares_fit_it_is_the_square_of_the_weight_times_the_variance():
    fed = made((WHOLE, WHOLE))
    weights, biases = [], []
    for i in range(2):
        x, y = own(fed, i)
        *w, b = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
        weights.append([w])
        biases.append([b])
    told = found(fed, None, linear(np.array(weights), np.array(biases)))
    for i in range(2):
        wanted = np.array(weights[i][0]) ** 2 * own(fed, i)[0].var(axis=0, ddof=1)
        np.testing.assert_allclose(told.own[i], wanted, rtol=1e-3, atol=1e-6)


def test_shuffled_over_all_rows_it_tends_to_the_variance():
    """20 clients, so that the mean over their rows is near its expectation."""
    fed = made((200,) * 20)
    w = np.array([0.6, -0.3, 0.0])
    x = fed.x.astype(np.float64)
    fed = dataclasses.replace(fed, y=(x @ w + 0.1 * fed.y).astype(np.float32))
    told = found(fed, linear(w[None]), linear(np.tile(w, (20, 1, 1))))
    assert told.shared is not None
    np.testing.assert_allclose(told.shared, w**2 * x.var(axis=0), rtol=0.05)
    np.testing.assert_allclose(told.mean, w**2 * x.var(axis=0), rtol=0.05)


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_every_row_with_the_column_of_every_other_row(hidden: tuple[int, ...]):
    """By brute force, for classes, ragged clients and a column of categories; the loss is −row_score."""
    fed = made((WHOLE, 6, 3), columns=(NUMBERS[0], WARD, NUMBERS[1]), classes=3)
    model = Network(features=fed.features, classes=3, hidden=hidden)
    keys = jax.random.split(jax.random.key(1), 3)
    theta = jax.vmap(model.init)(keys).map(lambda leaf: 4 * leaf)  # so large that some rows reach the limit
    told = found(fed, None, theta, hidden)
    assert told.rows.tolist() == [WHOLE, 6, 3]

    def losses(i: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        blocks = Blocks.cut(np.array([0]), np.array([len(x)]))
        rows = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)
        return -row_score(outcomes(model, theta[i], *rows, blocks))

    for i in range(3):
        x, y = own(fed, i)
        pairs = np.array(list(itertools.permutations(range(len(x)), 2)))
        for j, some in enumerate(([0], [1, 2, 3], [4])):
            mixed = x[pairs[:, 0]]
            mixed[:, some] = x[pairs[:, 1]][:, some]
            rise = losses(i, mixed, y[pairs[:, 0]]).mean() - losses(i, x, y).mean()
            assert told.own[i, j] == pytest.approx(rise, rel=1e-4, abs=1e-5)


def test_the_features_of_a_column_move_together():
    """Equal weights for all categories: each row has one of them, so the column says nothing."""
    fed = made((40, 20), columns=(NUMBERS[0], WARD))
    theta = linear(np.tile([0.4, 2.0, 2.0, 2.0], (2, 1, 1)))
    assert np.abs(found(fed, theta[0], theta).own[:, 1]).max() < 1e-6
    date = (Column("day", "number", form=Form(date="ymd")), Column("day (week sine)", "number", of="day"))
    assert measured.features(made((5,), columns=(*date, WARD))) == {"day": [0, 1], "ward": [2, 3, 4]}


def test_permuted_clients_have_permuted_importance():
    fed = made((40, 7, 250, 1, 12), columns=(*NUMBERS, WARD), classes=2)
    shared, theta = drawn(fed, 2)
    order = np.array([3, 0, 4, 2, 1])
    told, other = found(fed, shared, theta), found(fed.take(order), shared, theta[order])
    assert told.shared is not None
    assert other.shared is not None
    np.testing.assert_allclose(other.shared, told.shared, rtol=1e-5, atol=1e-7)
    for name in ("own", "at_client", "p", "direction"):
        a, b = getattr(told, name), getattr(other, name)
        np.testing.assert_allclose(b, a[order], rtol=1e-4, atol=1e-6)
    assert other.rows.tolist() == told.rows[order].tolist()


def test_of_many_clients_the_same_ones_are_used_in_any_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "MOST_CLIENTS", 3)
    fed = made((4,) * 8)
    order = np.random.default_rng(0).permutation(8)
    some = measured.some_clients(fed)
    assert len(some) == 3
    assert set(fed.take(order).ids[measured.some_clients(fed.take(order))]) == set(fed.ids[some])


def test_a_wide_table_uses_fewer_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "MOST_WORK", 3 * 2 * 20)
    fed = made((50, 9))
    assert found(fed, *drawn(fed)).rows.tolist() == [20, 9]


def test_test_rows_are_not_used():
    fed = made((12, 30), tests=20)
    start, count = fed.rows("test")
    x, y = fed.x.copy(), fed.y.copy()
    for at, n in zip(start, count, strict=True):
        x[at : at + n], y[at : at + n] = 1e6, -1e6
    other = dataclasses.replace(fed, x=x, y=y)
    models = drawn(fed)
    a, b = (columns_of(Network(features=3), f, *models) for f in (fed, other))
    assert a is not None
    assert b is not None
    assert (a.table, a.sentences, a.picture) == (b.table, b.sentences, b.picture)


def test_a_model_that_equals_the_shared_one_does_not_differ():
    fed = made((20, 40))
    shared, _ = drawn(fed)
    told = found(fed, shared, shared.map(lambda leaf: jnp.stack([leaf, leaf])))
    assert told.at_client is not None
    np.testing.assert_array_equal(told.own, told.at_client)
    assert not told.clear.any()


def test_a_single_row_tells_nothing():
    fed = made((1, 20))
    told = found(fed, *drawn(fed))
    assert np.isnan(told.own[0]).all()
    assert not np.isnan(told.own[1]).any()
    assert not told.clear[0].any()


def test_what_is_no_table_has_no_columns():
    fed = made()
    shared, theta = drawn(fed)
    for other in (dataclasses.replace(fed, schema=None), dataclasses.replace(fed, shape=(1, 3))):
        assert importance(Network(features=3), other, shared, theta) is None
        assert columns_of(Network(features=3), other, shared, theta) is None
        assert shifts(other, np.arange(3)) == []


def fitted(fed: Federation) -> tuple[Params, Params]:
    """The least-squares fit to all clients' training rows, and to each client's."""
    rows = [own(fed, i) for i in range(fed.clients)]
    rows.append((np.concatenate([x for x, _ in rows]), np.concatenate([y for _, y in rows])))
    fits = np.array([np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y)[0] for x, y in rows])
    theta = linear(fits[:, None, :-1], fits[:, -1:])
    return theta[-1], theta[:-1]


@pytest.mark.parametrize("rows", [4, 15, 40, 150])
def test_models_of_alike_clients_are_not_clearly_different(rows: int):
    """Their weights differ, by the noise of the fit; a level that differs is no difference in a column."""
    clear = 0
    for seed in range(5):
        fed, level = made((rows,) * 20, seed=seed), np.random.default_rng(seed).normal(size=20)
        y = fed.x @ np.array([0.6, -0.3, 0.0]) + 0.7 * fed.y + np.repeat(level, fed.count)
        fed = dataclasses.replace(fed, y=y.astype(np.float32))
        clear += int(found(fed, *fitted(fed)).clear.sum())
    assert clear <= 1


@pytest.mark.parametrize(("weight", "more"), [(0.8, True), (0.0, False)])
def test_a_client_with_another_rule_differs_clearly(weight: float, more: bool):
    """Its weight has the other sign and is larger, or the column does not matter there at all."""
    fed = made((150,) * 20)
    w = np.tile([0.6, -0.4, 0.0], (len(fed.x), 1))
    w[fed.start[7] : fed.start[8]] = [0.6, weight, 0.0]
    fed = dataclasses.replace(fed, y=((fed.x * w).sum(axis=1) + 0.5 * fed.y).astype(np.float32))
    told = found(fed, *fitted(fed))
    assert np.argwhere(told.clear).tolist() == [[7, 1]]
    assert told.shared is not None
    assert (told.own[7, 1] > told.shared[1]) == more


def test_residuals_that_depend_on_a_column_are_tested_by_students_t():
    """For a quantity the residual is z − y; the products of deviations from the means are tested."""
    fed = made((25, 9), columns=NUMBERS[:1])
    shared, _ = drawn(fed)
    sample = measured.sampled(fed, np.arange(2), 1, 0)
    stack = shared.map(lambda leaf: jnp.stack([leaf, leaf]))
    got = measured.contradiction(Network(features=1), stack, sample, [[0]])
    for i in range(2):
        x, y = own(fed, i)
        r = x[:, 0] * float(shared.tree[0][0][0, 0]) - y
        products = (r - r.mean()) * (x[:, 0] - x.mean())
        assert got[i, 0] == pytest.approx(stats.ttest_1samp(products, 0.0)[1], rel=1e-4)


# --- distributions


def at_clients(x: list[np.ndarray], columns: tuple[Column, ...]) -> Federation:
    """Clients with these training rows, and no others."""
    fed = made(tuple(map(len, x)), columns=columns, tests=0)
    return dataclasses.replace(fed, x=np.concatenate(x).astype(np.float32))


def test_a_shift_of_a_number_is_the_difference_of_means():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(n, 1)) + shift for n, shift in ((60, 1.5), (200, 0), (90, 0))]
    fed = at_clients(x, (Column("age", "number", mean=50.0, scale=10.0),))
    first = shifts(fed, np.arange(3))[0]
    here, there = x[0].mean(), np.concatenate(x[1:]).mean()
    assert (first.client, first.column.name, first.category) == (0, "age", "")
    assert first.here == pytest.approx(50 + 10 * here, rel=1e-5)
    assert first.elsewhere == pytest.approx(50 + 10 * there, rel=1e-5)
    assert first.apart == pytest.approx(here - there, rel=1e-5)
    grid = np.linspace(-10, 10, 20001)
    density = np.abs(stats.norm.pdf(grid) - stats.norm.pdf(grid, loc=here - there)).sum() * 0.001
    assert first.distance == pytest.approx(density / 2, abs=1e-3)


@pytest.mark.parametrize("most", [3, 8, 11, 12, 13, 14, 20])
def test_a_shift_of_categories_is_clear_by_fishers_test(most: int):
    """With two categories; twice the smaller tail, as in an exact test, times the number of categories."""
    sex = Column("sex", "category", categories=("f", "m"))
    x = [np.eye(2)[(np.arange(n) >= k).astype(int)] for n, k in ((20, most), (200, 50))]
    told = [s for s in shifts(at_clients(x, (sex,)), np.array([0])) if s.client == 0]
    table = [[most, 20 - most], [50, 150]]
    tails = [float(np.asarray(stats.fisher_exact(table, side))[1]) for side in ("less", "greater")]
    assert bool(told) == (2 * 2 * min(tails) < level(1))
    if told:
        assert told[0].distance == pytest.approx(most / 20 - 0.25)
        assert (told[0].category, told[0].here, told[0].elsewhere) == ("f", pytest.approx(most / 20), 0.25)


def test_alike_clients_are_not_told_apart():
    """In 40 tables with 12 clients and 4 columns, tiny clients and a rare category among them."""
    clear = 0
    for seed in range(40):
        fed = made((2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300), columns=(*NUMBERS, WARD), seed=seed)
        rare = (np.random.default_rng(seed).random(len(fed.x)) < 0.01).astype(np.float32)
        clear += len(shifts(dataclasses.replace(fed, x=np.column_stack([fed.x[:, :2], rare, fed.x[:, 3:]])),
                            np.arange(12)))  # fmt: skip
    assert clear <= 2


# --- in words and as a picture


def told_of(
    shared: list[float] | None,
    theta: list[list[float]],
    *,
    classes: int = 0,
    columns: tuple[Column, ...] = NUMBERS,
) -> ColumnReport:
    """What is said about linear models of a large federation, for a quantity or two classes."""
    fed = made((150,) * len(theta), classes=classes, columns=columns, seed=3)
    rows = fed.x.astype(np.float64) @ np.array(theta).T
    z = rows[np.arange(len(fed.x)), np.repeat(np.arange(len(theta)), fed.count)]
    fed = dataclasses.replace(fed, y=(z > 0).astype(np.int32) if classes else z.astype(np.float32))

    def outputs(w: np.ndarray) -> Params:
        w = np.asarray(w)[..., None, :]
        return linear(np.concatenate([-w, w], axis=-2) / 2 if classes else w)

    model = Network(features=fed.features, classes=classes)
    told = columns_of(
        model, fed, None if shared is None else outputs(np.array(shared)), outputs(np.array(theta))
    )
    assert told is not None
    return told


def test_a_client_with_another_model_is_named():
    told = told_of([0.5, 0.2, 0.0], [[0.5, 0.2, 0.9], [0.5, 0.2, 0.0], [0.5, 0.2, 0.0]])
    assert told.importance.at_client is not None
    at_client = told.importance.own[0, 2]
    assert told.sentences[0].startswith("The columns that matter most for the shared model are age (0.")
    assert told.sentences[1] == (
        f"At Dayton, weight matters more than for the shared model ({at_client:.2f} against 0, on 150 rows)."
    )
    assert told.sentences[2:] == ["No column is clearly distributed differently at a single client."]
    assert told.picture.startswith(b"\x89PNG")
    assert "▲" in told.caption


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (0, "if it is high, the prediction is lower there, and higher for the shared model"),
        (2, "if it is high, '{}' is {} likely there, and {} likely for the shared model"),
    ],
)
def test_an_opposite_direction_is_named(classes: int, words: str):
    told = told_of([0.4, 2.0, 0.0], [[-3.0, 2.0, 0.0], [0.4, 2.0, 0.0]], classes=classes)
    assert "At Dayton, age matters more" in told.sentences[1]
    fits = [words.format("grade 1", "less", "more"), words.format("grade 0", "more", "less")]
    assert any(told.sentences[1].endswith(f"; {text}.") for text in fits)


def test_without_a_shared_model_only_clients_models_are_told():
    told = told_of(None, [[0.5, 0.2, 0.9], [0.5, 0.2, 0.0]])
    assert told.sentences[0].startswith("The columns that matter most for the clients' models are ")
    assert not any("shared" in text for text in (*told.sentences, told.caption))
    rows = list(csv.DictReader(io.StringIO(told.table)))
    assert {row["shared_importance"] for row in rows} == {""}
    assert not any(told.importance.clear.ravel())


def test_many_columns_and_clients_are_counted_and_at_most_six_sentences_said():
    columns = tuple(Column(f"a rather long name of column ${k}$", "number") for k in range(15))
    rng = np.random.default_rng(0)
    told = told_of(rng.normal(size=15).tolist(), rng.normal(size=(33, 15)).tolist(), columns=columns)
    assert told.importance.own.shape == (33, 15)
    assert told.caption.endswith(
        f"And {15 - MOST_COLUMNS} more columns and {33 - MOST_CLIENTS} more clients."
    )
    assert len(told.sentences) <= 6
    assert len({text.split(",")[0] for text in told.sentences[1:]}) == len(told.sentences) - 1


def test_the_table_has_the_importance():
    told = told_of([0.5, 0.2, 0.0], [[0.5, 0.2, 0.9], [0.5, 0.2, 0.0]])
    rows = list(csv.DictReader(io.StringIO(told.table)))
    assert [(row["client"], row["column"]) for row in rows] == list(
        itertools.product(("", "Dayton", "Seattle"), ("age", "dose", "weight"))
    )
    it = told.importance
    assert it.shared is not None
    assert it.at_client is not None
    for key, values in (
        ("importance", [it.own.mean(axis=0), *it.own]),
        ("shared_importance", [it.shared, *it.at_client]),
    ):
        np.testing.assert_allclose([float(row[key]) for row in rows], np.ravel(values), atol=1e-6)


# --- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a small table, next to the table."""
    home = tmp_path_factory.mktemp("columns")
    rng = np.random.default_rng(0)
    lines = ["clinic,age,sex,outcome"]
    for clinic in ("Dayton", "Seattle", "Provo"):
        for age, sex in zip(rng.integers(20, 90, 40), rng.integers(0, 2, 40), strict=True):
            lines.append(f"{clinic},{age},{'fm'[sex]},{'yes' if age > 50 + 10 * sex else 'no'}")
    (home / "patients.csv").write_text("\n".join(lines) + "\n")
    words = shlex.split(
        f"run fedavg --data {home / 'patients.csv'} --client clinic --label outcome --rounds 4 --budget 6 "
        "--R 2 --B 5 --personalize auto:steps=3,folds=2,B=4"
    )
    assert main([*words, "--out", str(home / "run")]) == 0
    return home / "run"


def test_a_run_writes_columns_and_the_report_shows_them(run: Path, tmp_path: Path):
    with (run / "columns.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["client"], row["column"]) for row in rows} == set(
        itertools.product(("", "Dayton", "Seattle", "Provo"), ("age", "sex"))
    )
    told = json.loads((run / "columns.json").read_text())
    (shown,) = document(read([run]))["columns"]
    assert (shown["sentences"], shown["caption"]) == (told["sentences"], told["caption"])
    assert "Which columns matter" in (run / "report.html").read_text()
    before = {path.name: path.read_bytes() for path in run.glob("columns.*")}
    assert set(before) == {"columns.csv", "columns.json", "columns.png"}
    shutil.copytree(run, tmp_path / "run")
    assert main(["personalize", str(tmp_path / "run"), "--personalize", "auto:steps=3,folds=2,B=4"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("columns.*")} == before


def test_another_run_in_the_folder_does_not_keep_them(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    words = (
        "run fedavg --data synthetic:clients=3,rows=12,features=3,classes=2 --rounds 1 --eta 0.1 --R 1 --B 4"
    )
    assert main([*words.split(), "--force", "--out", str(tmp_path / "run")]) == 0
    assert not list((tmp_path / "run").glob("columns.*"))
    assert document(read([tmp_path / "run"]))["columns"] == []


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [("columns.json", "{}", "'sentences' is missing"), ("columns.png", "no picture", "it is not a PNG")],
)
def test_damaged_files_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, why: str
):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert why in said
