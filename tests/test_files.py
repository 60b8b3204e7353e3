"""Files are written atomically."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stops import files_of_at_most

from pfedme.errors import RunError
from pfedme.files import atomic_write, cache_folder, writing


@pytest.mark.parametrize(("content", "stored"), [(b"\x00\xff", b"\x00\xff"), ("λ = 15", "λ = 15".encode())])
def test_bytes_and_text_are_stored(tmp_path: Path, content: bytes | str, stored: bytes):
    atomic_write(tmp_path / "f", content)
    assert (tmp_path / "f").read_bytes() == stored
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_a_file_is_replaced_by_a_shorter_one(tmp_path: Path):
    atomic_write(tmp_path / "f", "a long text")
    atomic_write(tmp_path / "f", "short")
    assert (tmp_path / "f").read_text() == "short"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "f"
    atomic_write(path, "old")
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        atomic_write(path, b"x" * 100_000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_of_a_new_file_leaves_nothing(tmp_path: Path):
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        atomic_write(tmp_path / "f", b"x" * 100_000)
    assert not list(tmp_path.iterdir())


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path):
    path, versions = tmp_path / "f", {b"a" * 200_000, b"b" * 300_000}
    atomic_write(path, b"a" * 200_000)
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for version in versions:
            atomic_write(path, version)
    stop.set()
    reader.join()
    assert seen <= versions


def test_a_failure_to_write_becomes_a_sentence_with_the_place_and_the_reason(tmp_path: Path):
    with pytest.raises(RunError) as caught, writing(tmp_path / "no", " Do this."):
        atomic_write(tmp_path / "no" / "f", "x")
    assert str(caught.value) == f"{tmp_path / 'no'} could not be written: No such file or directory. Do this."


def test_other_errors_pass_through_writing_as_they_are(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        raise ZeroDivisionError


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PFEDME_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.parametrize("value", [None, ""])
def test_the_cache_is_in_the_users_cache_folder_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("PFEDME_CACHE", raising=False)
    else:
        monkeypatch.setenv("PFEDME_CACHE", value)
    assert cache_folder().name == "pfedme"
    assert cache_folder().is_absolute()
