"""The time that work takes, separate from compilation time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """The seconds that the enclosed work takes: `compile_s` for compilation, and `work_s` for the rest."""
    took: dict[str, float] = {}
    begin = time.perf_counter()
    with compilation() as compiled:
        yield took
    took["compile_s"] = sum(compiled)
    took["work_s"] = max(0.0, time.perf_counter() - begin - took["compile_s"])


@contextmanager
def compilation() -> Iterator[list[float]]:
    """Collects the seconds that JAX spends on tracing and compiling."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
