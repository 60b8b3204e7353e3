"""Fixtures that several test files share."""

from collections.abc import Iterator

import jax
import pytest
from laws import double_precision


@pytest.fixture(scope="module")
def double_precision_throughout() -> Iterator[None]:
    """float64 in all tests of a file."""
    with double_precision():
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_its_own() -> Iterator[None]:
    """Compiled programs do not outlive a file: another may want them optimised, and memory is short."""
    yield
    jax.clear_caches()
