"""Fixtures that several test files share."""

from collections.abc import Iterator

import pytest
from laws import double_precision


@pytest.fixture(scope="module")
def double_precision_throughout() -> Iterator[None]:
    """float64 in all tests of a file."""
    with double_precision():
        yield
