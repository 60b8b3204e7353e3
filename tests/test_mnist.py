"""MNIST and Fashion-MNIST in their partitions, from the cache or from the user's own files."""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pfedme.cli import main
from pfedme.core.spec import field_types
from pfedme.data import parse_data
from pfedme.data.fashion import FashionMnist, idx
from pfedme.data.federation import Federation
from pfedme.data.mnist import FILES, VIEWS, Mnist, decoded, from_folder, permuted, scaled, standardised
from pfedme.errors import InputError
from pfedme.files import cache_folder


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, read here from the files that the product has fetched."""
    try:
        Mnist().fetched()
    except InputError as reason:
        pytest.skip(str(reason))
    raw = {name: (cache_folder() / "mnist" / name).read_bytes() for name in FILES}
    parts = ("train", "t10k")
    images = np.concatenate(
        [np.frombuffer(raw[f"{p}-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 784) for p in parts]
    )
    labels = np.concatenate([np.frombuffer(raw[f"{p}-labels-idx1-ubyte"], np.uint8, offset=8) for p in parts])
    return images, labels


@pytest.fixture(scope="module")
def disjoint(digits: tuple[np.ndarray, np.ndarray]) -> Federation:
    """MNIST as the paper's text has it."""
    return Mnist().load()


@pytest.fixture(scope="module")
def released(digits: tuple[np.ndarray, np.ndarray]) -> Federation:
    """MNIST as the released code has it."""
    return Mnist(partition="released").load()


def label_shares(labels: np.ndarray) -> list[list[int]]:
    """The four shares of each digit."""
    draw = np.random.RandomState(1)
    shares = []
    for digit in range(10):
        total, size, own = int((labels == digit).sum()), 4, []
        for _ in range(size - 1):
            own.append(draw.randint(total // (size + 1), total // 2))
            total -= own[-1]
        shares.append([*own, total])
    return shares


def fingerprints(x: np.ndarray) -> list[int]:
    """A number for each row, the same for the same row; sorted."""
    return sorted(hash(row.tobytes()) for row in x)


def rows_of(f: Federation, client: int) -> np.ndarray:
    """A client's features."""
    return f.x[f.start[client] : f.start[client] + f.count[client]]


def test_mnist_has_70000_images(digits: tuple[np.ndarray, np.ndarray]):
    images, labels = decoded(Mnist().fetched())
    assert images.shape == (70_000, 784)
    assert (images == digits[0]).all()
    assert (labels == digits[1]).all()


def test_pixels_are_standardised_over_all_images_in_0_to_255(digits: tuple[np.ndarray, np.ndarray]):
    images = digits[0]
    x = standardised(images)
    assert images.max() == 255
    for pixel in (0, 150, 350, 406, 500, 783):  # the first and the last are 0 in every image
        raw = images[:, pixel].astype(np.float64)
        want = (raw - raw.mean()) / (raw.std() + 0.001)
        np.testing.assert_allclose(x[:, pixel], want, rtol=2e-4, atol=1e-4)


def test_the_papers_clients_have_two_labels_each(disjoint: Federation, released: Federation):
    for f in (disjoint, released):
        assert f.clients == 20
        for u, counts in enumerate(f.label_counts()):
            assert set(np.flatnonzero(counts)) == {u % 10, (u + 1) % 10}


def test_disjoint_clients_share_no_image_and_leave_none_out(
    disjoint: Federation, digits: tuple[np.ndarray, np.ndarray]
):
    assert disjoint.count.sum() == 70_000
    assert fingerprints(disjoint.x) == fingerprints(standardised(digits[0]))
    assert (disjoint.n_train.min(), disjoint.n_train.max()) == (1_905, 3_834)
    assert "none twice" in disjoint.note


def test_the_ith_owner_of_a_digit_takes_its_ith_share(
    disjoint: Federation, digits: tuple[np.ndarray, np.ndarray]
):
    counts, shares = disjoint.label_counts(), label_shares(digits[1])
    for digit in range(10):
        owners = np.flatnonzero(counts[:, digit])
        assert counts[owners, digit].tolist() == shares[digit]


def test_released_clients_have_the_released_sizes(
    released: Federation, digits: tuple[np.ndarray, np.ndarray]
):
    counts, shares = released.label_counts(), label_shares(digits[1])
    for u in range(20):
        for j in range(2):
            c = 2 * u + j
            assert counts[u, (u + j) % 10] == shares[c % 10][c // 10]
    assert (released.n_train.min(), released.n_train.max()) == (1_167, 3_834)
    assert "held by more than one client" in released.note


def test_released_shares_are_the_first_images_of_the_label(
    released: Federation, digits: tuple[np.ndarray, np.ndarray]
):
    images, labels = digits
    x, counts = standardised(images), released.label_counts()
    for u in range(20):
        first = [np.flatnonzero(labels == d)[: counts[u, d]] for d in (u % 10, (u + 1) % 10)]
        assert fingerprints(rows_of(released, u)) == fingerprints(x[np.concatenate(first)])


def test_released_test_images_are_in_other_clients_training_parts(released: Federation):
    # Clients 0 and 10 both have zeros; both hold the first ones.
    test = rows_of(released, 0)[released.n_train[0] :]
    train = rows_of(released, 10)[: released.n_train[10]]
    assert set(fingerprints(test)) & set(fingerprints(train))


@pytest.mark.parametrize(
    ("clients", "alpha", "cap"),
    [(7, 0.3, 0), (50, 0.05, 100), pytest.param(3000, 0.1, 0, marks=pytest.mark.slow)],
)
def test_dirichlet_clients_share_no_image_and_none_is_empty(
    digits: tuple[np.ndarray, np.ndarray], clients: int, alpha: float, cap: int
):
    f = Mnist(partition="dirichlet", clients=clients, alpha=alpha, cap=cap).load()
    assert f.clients == clients
    assert f.n_train.min() >= 1
    assert "none twice" in f.note
    if cap:
        assert f.count.max() == cap
    else:
        assert f.count.sum() == 70_000
        assert fingerprints(f.x) == fingerprints(standardised(digits[0]))


def test_a_small_dirichlet_parameter_makes_clients_unlike(digits: tuple[np.ndarray, np.ndarray]):
    def most_common(alpha: float) -> float:
        counts = Mnist(partition="dirichlet", clients=20, alpha=alpha).load().label_counts()
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert most_common(0.05) > 0.5
    assert most_common(1000.0) < 0.15


# --- MNIST files of the user's own -------------------------------------------------------------------


def packed_images(images: np.ndarray) -> bytes:
    """An idx3 file."""
    return struct.pack(">IIII", 2051, len(images), 28, 28) + images.tobytes()


def packed_labels(labels: np.ndarray) -> bytes:
    """An idx1 file."""
    return struct.pack(">II", 2049, len(labels)) + labels.astype(np.uint8).tobytes()


def write_digits(folder: Path, each: int, *, gz: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Four idx files with `each` images of each digit, a fifth of them in the test files."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(10, dtype=np.uint8), each)
    images = rng.integers(0, 256, (len(labels), 784), np.uint8)
    cut = len(labels) * 4 // 5
    content = [
        packed_images(images[:cut]), packed_labels(labels[:cut]),
        packed_images(images[cut:]), packed_labels(labels[cut:]),
    ]  # fmt: skip
    folder.mkdir()
    for name, raw in zip(FILES, content, strict=True):
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw, mtime=0))
        else:
            (folder / name).write_bytes(raw)
    return images, labels


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("partition", ["disjoint", "dirichlet"])
def test_a_folder_of_idx_files_is_used_as_it_is(tmp_path: Path, gz: bool, partition: str, name: str):
    images, labels = write_digits(tmp_path / "idx", 30, gz=gz)
    f = parse_data(f"{name}:path={tmp_path / 'idx'},partition={partition}").load()
    raw = images.astype(np.float64)
    want = (raw - raw.mean(axis=0)) / (raw.std(axis=0) + 0.001)
    assert f.count.sum() == 300
    got = f.x[np.lexsort(f.x.T)]
    np.testing.assert_allclose(got, want[np.lexsort(want.astype(np.float32).T)], atol=1e-4)
    assert np.bincount(f.y).tolist() == np.bincount(labels).tolist()


def test_plain_and_packed_files_give_the_same_federation(tmp_path: Path):
    for gz in (False, True):
        write_digits(tmp_path / str(gz), 30, gz=gz)
    plain, packed = (Mnist(path=str(tmp_path / str(gz))).load() for gz in (False, True))
    assert (plain.x == packed.x).all()
    assert (plain.y == packed.y).all()


def test_fashion_mnist_has_the_options_of_mnist(tmp_path: Path):
    assert field_types(FashionMnist) == field_types(Mnist)
    write_digits(tmp_path / "idx", 30)
    same = f"path={tmp_path / 'idx'},partition=rotated,clients=5,cap=20,seed=3"
    one, other = (parse_data(f"{name}:{same}").load() for name in ("mnist", "fashion-mnist"))
    assert (one.x == other.x).all()
    assert (one.y == other.y).all()
    with pytest.raises(InputError, match="use fashion-mnist:partition=dirichlet,clients=7"):
        FashionMnist(clients=7).load()


def test_idx_files_are_decoded_as_they_were_encoded():
    images = np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)
    labels = np.arange(7, dtype=np.uint8)
    assert idx(images) == packed_images(images)
    assert idx(labels) == packed_labels(labels)
    x, y = decoded({"images": idx(images), "labels": idx(labels)})
    assert (x == images.reshape(7, 784)).all()
    assert (y == labels).all()


@pytest.mark.slow
def test_fashion_mnist_has_7000_images_of_each_class():
    try:
        images, labels = decoded(FashionMnist().fetched())
    except InputError as reason:
        pytest.skip(str(reason))
    assert images.shape == (70_000, 784)
    assert np.bincount(labels).tolist() == [7_000] * 10
    assert (images.min(), images.max()) == (0, 255)
    # The copies that were reported for the first release: in the training set, the test set, and both.
    assert len(images) - len(np.unique(images, axis=0)) == 43 + 1 + 10
    # The first training image of the original, as its authors show it: row 5 of an ankle boot.
    boot = [6, 0, 102, 204, 176, 134, 144, 123, 23, 0, 0, 0, 0, 12, 10, 0]
    assert (images[labels == 9].reshape(-1, 28, 28)[:, 5, 12:] == boot).all(axis=1).sum() == 1
    f = FashionMnist().load()
    assert (f.clients, f.count.sum()) == (20, 70_000)
    for u, counts in enumerate(f.label_counts()):
        assert set(np.flatnonzero(counts)) == {u % 10, (u + 1) % 10}


def describe(capsys: pytest.CaptureFixture[str], data: str) -> str:
    """What `pfedme data describe` says on standard error, once it has ended with status 2."""
    status = main(["data", "describe", "--data", data])
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.count("\n") == 1
    return err


def test_a_folder_without_a_file_is_told_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_digits(tmp_path / "idx", 30)
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte").unlink()
    assert "has no t10k-labels-idx1-ubyte" in describe(capsys, f"mnist:path={tmp_path / 'idx'}")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert str(tmp_path / "nowhere") in describe(capsys, f"mnist:path={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 3, 20, -1])
def test_a_truncated_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, size: int):
    write_digits(tmp_path / "idx", 30)
    path = tmp_path / "idx" / name
    path.write_bytes(path.read_bytes()[:size])
    err = describe(capsys, f"mnist:path={tmp_path / 'idx'}")
    assert name in err
    assert "truncated" in err


def test_a_file_of_another_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_digits(tmp_path / "idx", 30)
    (tmp_path / "idx" / "train-images-idx3-ubyte").write_bytes(b"\x89PNG" + bytes(100))
    assert "train-images-idx3-ubyte is not the MNIST file" in describe(
        capsys, f"mnist:path={tmp_path / 'idx'}"
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_gz_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str):
    write_digits(tmp_path / "idx", 30, gz=True)
    path = tmp_path / "idx" / "train-labels-idx1-ubyte.gz"
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    elif damage == "flipped":
        raw[12] ^= 0xFF
    else:
        raw = bytearray(b"<html>not found</html>")
    path.write_bytes(raw)
    err = describe(capsys, f"mnist:path={tmp_path / 'idx'}")
    assert "train-labels-idx1-ubyte.gz" in err
    assert "download it again" in err


def test_whatever_byte_of_a_gz_file_is_flipped_it_is_used_whole_or_refused(tmp_path: Path):
    images, labels = write_digits(tmp_path / "idx", 30, gz=True)
    path = tmp_path / "idx" / "train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            got = decoded(from_folder(tmp_path / "idx"))
        except InputError:
            continue
        assert (got[0] == images).all()
        assert (got[1] == labels).all()


def test_images_without_labels_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, labels = write_digits(tmp_path / "idx", 30)
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte").write_bytes(packed_labels(labels[:7]))
    err = describe(capsys, f"mnist:path={tmp_path / 'idx'}")
    assert "300" in err
    assert "247" in err


def test_a_label_above_nine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, labels = write_digits(tmp_path / "idx", 30)
    wrong = labels[240:].copy()
    wrong[5] = 11
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte").write_bytes(packed_labels(wrong))
    err = describe(capsys, f"mnist:path={tmp_path / 'idx'},partition=dirichlet,clients=3")
    assert "Labels must be 0 to 9" in err
    assert "11" in err


@pytest.mark.parametrize("partition", ["disjoint", "released"])
@pytest.mark.parametrize("each", [1, 2])
def test_too_few_images_for_the_papers_partition_are_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], partition: str, each: int
):
    write_digits(tmp_path / "idx", each)
    describe(capsys, f"mnist:path={tmp_path / 'idx'},partition={partition}")


def test_more_dirichlet_clients_than_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_digits(tmp_path / "idx", 3)
    err = describe(capsys, f"mnist:path={tmp_path / 'idx'},partition=dirichlet,clients=31")
    assert "31 clients cannot share 30 images" in err


def test_as_many_dirichlet_clients_as_images_get_one_each(tmp_path: Path):
    write_digits(tmp_path / "idx", 3)
    f = parse_data(f"mnist:path={tmp_path / 'idx'},partition=dirichlet,clients=30").load()
    assert f.count.tolist() == [1] * 30


# --- The cache of fetched files ----------------------------------------------------------------------


DESCRIBE = """
import sys
from pfedme.cli import main
sys.exit(main(["data", "describe", "--data", "mnist", "--json"]))
"""


def offline(cache: Path, code: str = DESCRIBE) -> subprocess.CompletedProcess[str]:
    """A program where nothing can be fetched, by default `pfedme data describe --data mnist --json`."""
    nobody = "http://127.0.0.1:9"
    environment = {
        "PFEDME_CACHE": str(cache), "PATH": str(cache), "HOME": str(cache), "JAX_PLATFORMS": "cpu",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nobody),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def linked_cache(folder: Path) -> Path:
    """A cache whose files are links to the fetched ones."""
    (folder / "mnist").mkdir(parents=True)
    for name in FILES:
        (folder / "mnist" / name).symlink_to(cache_folder() / "mnist" / name)
    return folder


@pytest.mark.slow
def test_without_network_and_cache_the_error_says_what_to_do(tmp_path: Path):
    done = offline(tmp_path / "cache")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(r"could not be downloaded .* --data mnist:path=FOLDER\.$", done.stderr.strip())
    assert all(name in done.stderr for name in FILES)


@pytest.mark.usefixtures("digits")
def test_fetched_files_are_used_without_network(tmp_path: Path):
    code = "from pfedme.data import parse_data; print(len(parse_data('mnist').load().y))"
    done = offline(linked_cache(tmp_path / "cache"), code)
    assert (done.returncode, done.stdout.strip()) == (0, "70000"), done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_a_damaged_fetched_file_is_never_used(tmp_path: Path):
    cache = linked_cache(tmp_path / "cache")
    path = cache / "mnist" / "t10k-labels-idx1-ubyte"
    raw = bytearray(path.read_bytes())
    raw[1234] ^= 1
    os.unlink(path)
    path.write_bytes(raw)
    done = offline(cache)
    assert done.returncode == 2
    assert "could not be downloaded" in done.stderr
    assert "Traceback" not in done.stderr


def pictures(n: int) -> np.ndarray:
    """n images of random pixels."""
    return np.random.default_rng(n).integers(0, 256, (n, 784), np.uint8)


def test_permuted_images_are_the_images_again_if_they_are_permuted_back():
    images = pictures(5)
    marked = np.arange(784)[None]
    orders = [permuted(marked, i, seed=3)[0] for i in range(4)]
    assert (orders[0] == np.arange(784)).all()
    assert len({order.tobytes() for order in orders}) == 4
    for i in range(9):
        back = np.argsort(orders[i % 4])
        assert (permuted(images, i, seed=3)[:, back] == images).all()
    assert (permuted(images, 1, seed=3) != permuted(images, 1, seed=4)).any()


def test_scaled_images_are_affine_in_the_images_with_numbers_of_the_clients_own():
    black, grey, white = (
        scaled(np.full((1, 784), v, np.uint8), 2, seed=0)[0].astype(float) for v in (0, 100, 255)
    )
    s, images = (white - black) / 255, pictures(50)
    assert (s >= 0.25 - 1 / 255).all()
    assert (s <= 1 + 1 / 255).all()
    np.testing.assert_allclose(grey, black + 100 * s, atol=1.5)  # all three are rounded
    np.testing.assert_allclose(scaled(images, 2, seed=0), black + s * images, atol=1.5)
    assert (scaled(images, 2, seed=0) != scaled(images, 3, seed=0)).any()


def test_views_change_images_only(tmp_path: Path):
    write_digits(tmp_path / "idx", 30)
    made = {
        name: parse_data(f"mnist:path={tmp_path / 'idx'},partition={name},clients=6,cap=20,seed=3").load()
        for name in VIEWS
    }
    for fed in made.values():
        assert (fed.y == made["rotated"].y).all()
        assert (fed.count == made["rotated"].count).all()
    plain = {
        name: parse_data(f"mnist:path={tmp_path / 'idx'},partition={name},clients=1").load() for name in made
    }
    assert (plain["permuted"].x == plain["rotated"].x).all()  # client 0 sees the originals with both
    assert (plain["scaled"].x != plain["rotated"].x).any()
