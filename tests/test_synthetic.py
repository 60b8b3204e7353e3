"""The paper's synthetic clients, draw for draw, and the laws of the others."""

from __future__ import annotations

import numpy as np
import pytest

from pfedme.data.federation import Federation
from pfedme.data.synthetic import Synthetic


@pytest.fixture(scope="module")
def paper() -> Federation:
    """The paper's synthetic federation."""
    return Synthetic().load()


def test_the_papers_synthetic_federation_has_the_papers_sizes(paper: Federation):
    assert paper.clients == 100
    assert (paper.count.min(), paper.count.max(), paper.count.sum()) == (250, 25_810, 205_795)
    assert (paper.features, paper.classes) == (60, 10)
    assert (paper.n_train == paper.count * 3 // 4).all()


def released_generator(
    clients: int, alpha: float, beta: float, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sizes, features and labels, by the released code's draws in their order."""
    draw = np.random.RandomState(seed)
    sizes = (draw.lognormal(4, 2, clients).astype(int) + 50) * 5
    mean_W = draw.normal(0, alpha, clients)
    B = draw.normal(0, beta, clients)
    covariance = np.diag([float(j) ** -1.2 for j in range(1, 61)])
    mean_x = [draw.normal(B[i], 1, 60) for i in range(clients)]
    features, labels = [], []
    for i in range(clients):
        W = draw.normal(mean_W[i], 1, (60, 10))
        b = draw.normal(mean_W[i], 1, 10)
        x = draw.multivariate_normal(mean_x[i], covariance, sizes[i])
        features.append(x)
        labels.append(np.argmax(x @ W + b, axis=1))
    return sizes, np.concatenate(features), np.concatenate(labels)


@pytest.mark.parametrize(
    ("clients", "alpha", "beta", "seed"), [(4, 0.5, 0.5, 0), (3, 1.0, 1.0, 0), (2, 0.0, 2.0, 7)]
)
def test_the_power_law_federation_is_the_released_generators_draw_for_draw(
    clients: int, alpha: float, beta: float, seed: int
):
    sizes, x, y = released_generator(clients, alpha, beta, seed)
    f = Synthetic(clients=clients, alpha=alpha, beta=beta, seed=seed).load()
    assert f.count.tolist() == sizes.tolist()
    np.testing.assert_allclose(f.x, x, atol=2e-6)
    assert (f.y == y).all()


def test_equal_clients_have_the_shapes_that_were_asked_for():
    f = Synthetic(clients=7, rows=40, features=5, classes=3, train=0.5).load()
    assert f.x.shape == (280, 5)
    assert f.x.dtype == np.float32
    assert f.count.tolist() == [40] * 7
    assert f.n_train.tolist() == [20] * 7
    assert set(f.y) <= {0, 1, 2}


@pytest.mark.parametrize("rows", [0, 50])
def test_the_seed_of_the_data_decides_the_data(rows: int):
    one, same, other = (Synthetic(clients=3, rows=rows, seed=s).load() for s in (5, 5, 6))
    assert (one.x == same.x).all()
    assert (one.y == same.y).all()
    assert one.x.shape != other.x.shape or (one.x != other.x).any()


def test_features_vary_within_a_client_as_the_law_says():
    n = 20_000
    f = Synthetic(clients=3, rows=n, features=8, seed=1).load()
    want = np.arange(1, 9) ** -1.2
    for x in f.x.astype(np.float64).reshape(3, n, 8):
        # A variance from n normal numbers is off by a factor 1 ± √(2/n).
        np.testing.assert_allclose(x.var(axis=0), want, rtol=6 * np.sqrt(2 / n))
        correlation = np.corrcoef(x.T) - np.eye(8)
        assert np.abs(correlation).max() < 6 / np.sqrt(n)


def test_feature_means_vary_between_clients_as_the_law_says():
    beta, d, n, rows = 3.0, 4, 4000, 16
    f = Synthetic(clients=n, rows=rows, features=d, beta=beta, seed=2).load()
    means = f.x.astype(np.float64).reshape(n, rows, d).mean(axis=1)
    noise = (np.arange(1, d + 1) ** -1.2).mean() / rows
    # Every client: v_ij = B_i + e_ij with B_i ~ N(0, β̄), e_ij ~ N(0, 1).
    np.testing.assert_allclose(means.var(axis=1, ddof=1).mean(), 1 + noise, rtol=6 * np.sqrt(2 / (3 * n)))
    np.testing.assert_allclose(means.mean(axis=1).var(), beta**2 + (1 + noise) / d, rtol=6 * np.sqrt(2 / n))


def test_the_mean_of_a_clients_weights_moves_no_label():
    # u_i is added to every column of W_i and b_i, so to every logit: their argmax stays.
    one, other = (Synthetic(clients=5, rows=2000, alpha=alpha).load() for alpha in (0.0, 2.0))
    assert (one.x == other.x).all()
    assert (one.y == other.y).mean() > 0.999


def chi_square(counts: np.ndarray) -> tuple[float, float]:
    """How many deviations Pearson's statistic against equal label distributions is off, and its freedom."""
    counts = counts[:, counts.sum(axis=0) > 100 * len(counts)]
    want = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    freedom = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    return float((((counts - want) ** 2 / want).sum() - freedom) / np.sqrt(2 * freedom)), freedom


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_iid_clients_have_one_label_distribution_and_others_do_not(seed: int):
    def statistic(iid: bool) -> float:
        f = Synthetic(clients=20, rows=4000, alpha=1, beta=1, classes=5, iid=iid, seed=seed).load()
        away, freedom = chi_square(f.label_counts())
        assert freedom > 0
        return away

    assert abs(statistic(iid=True)) < 5
    assert statistic(iid=False) > 100


def test_iid_clients_of_the_power_law_have_one_label_distribution():
    f = Synthetic(clients=12, iid=True, seed=3).load()
    assert abs(chi_square(f.label_counts())[0]) < 5


def test_a_large_federation_is_made_in_groups_that_leave_no_client_out():
    # 2¹⁴ // 100 = 163 clients are made at once: the last group is smaller.
    f = Synthetic(clients=400, rows=100, features=3, classes=2).load()
    assert f.count.tolist() == [100] * 400
    assert (np.abs(f.x).sum(axis=1) > 0).all()
    assert len({row.tobytes() for row in f.x}) == 40_000


def agreement(federation: Federation, i: int, j: int) -> float:
    """How often a linear model of client i's rows, fitted by least squares to one-hot labels, gives the label
    on client j's rows."""
    rows = federation.x.reshape(federation.clients, -1, federation.features).astype(np.float64)
    y = federation.y.reshape(federation.clients, -1)
    design = np.concatenate([rows, np.ones((*rows.shape[:2], 1))], axis=2)
    W = np.linalg.lstsq(design[i], np.eye(federation.classes)[y[i]], rcond=None)[0]
    return float((np.argmax(design[j] @ W, axis=1) == y[j]).mean())


def test_clients_of_a_kind_have_one_true_model_and_others_another():
    f = Synthetic(clients=7, rows=3000, features=4, classes=3, iid=True, kinds=3, seed=1).load()
    for i in range(7):
        alike = [agreement(f, i, j) for j in range(7) if j % 3 == i % 3]
        unlike = [agreement(f, i, j) for j in range(7) if j % 3 != i % 3]
        assert min(alike) > 0.8
        assert max(unlike) < min(alike) - 0.1


@pytest.mark.parametrize("rows", [0, 60])
def test_one_kind_of_identically_distributed_clients_is_no_difference(rows: int):
    one, same = (Synthetic(clients=4, rows=rows, iid=True, kinds=kinds).load() for kinds in (0, 1))
    assert (one.x == same.x).all()
    assert (one.y == same.y).all()


def test_inputs_differ_with_one_true_model_unless_clients_are_identically_distributed():
    own, same = (Synthetic(clients=8, rows=2000, iid=iid, kinds=1).load() for iid in (False, True))

    def spread(f: Federation) -> float:
        return float(f.x.reshape(8, 2000, -1).mean(axis=1).var(axis=0).mean())

    assert spread(own) > 0.5  # v_i ~ N(B_i, 1)
    assert spread(same) < 0.01
