"""Fixtures that several test files share."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from browser import Page, browser, chromium
from laws import QUICKLY_COMPILED, double_precision

from pfedme.algorithms import ALGORITHMS
from pfedme.core.models import MODELS
from pfedme.data import DATA

INSTALLED = Path(__file__).parent / "installed"
"""The folder of what is installed for some tests."""


@pytest.fixture(scope="module")
def double_precision_throughout() -> Iterator[None]:
    """float64 in all tests of a file."""
    with double_precision():
        yield


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """What the metadata in these folders register is known, and nothing else that other packages register."""

    def forget() -> None:
        for known in (ALGORITHMS, MODELS, DATA):
            vars(known).pop("others", None)

    before = list(sys.path)
    sys.path[:] = [*map(str, folders), *(path for path in before if path != str(INSTALLED))]
    forget()
    try:
        yield
    finally:
        sys.path[:] = before
        forget()


@pytest.fixture(scope="module")
def outside_installed() -> Iterator[None]:
    """The package `outside` is installed in all tests of a file."""
    with installed(INSTALLED):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Programs are compiled fast rather than to be fast, and kept for other files and for the next time; in
    the processes that tests start, too."""
    os.environ.update(QUICKLY_COMPILED)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    assert config.cache is not None
    folder = str(config.cache.mkdir("xla"))
    os.environ.update(JAX_COMPILATION_CACHE_DIR=folder, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


LONGEST = (
    "test_live.py", "test_deploy.py", "test_api.py", "test_contract.py", "test_stopped.py",
    "test_tutorial.py", "test_personalize.py", "test_door.py", "test_track.py", "test_together.py",
    "test_html_report.py", "test_regression.py", "test_auto.py", "test_experiments.py", "test_compare.py",
    "test_trust.py",
)  # fmt: skip
"""Files to begin with, in this order, lest one of them is left to a single worker in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    place = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="module", autouse=True)
def programs_of_its_own() -> Iterator[None]:
    """Compiled programs do not outlive a file: another may want them optimised, and memory is short."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """A page of a browser."""
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with browser(program) as page:
        yield page
