"""Every algorithm by its name on the command line: it ends, and, killed and resumed, it ends the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from laws import PAPERS
from test_killed import assert_resumed_alike, steady

from pfedme.algorithms import ALGORITHMS
from pfedme.cli import main

__all__ = ["steady"]

TINY = (
    "--data synthetic:clients=5,rows=40,features=5,classes=3 --rounds 6 --cohort 3 --R 2 --B 5 --eval-every 2"
)
OPTIONS = {
    **dict.fromkeys(("fedper", "fedrep", "lg-fedavg"), "--model dnn:hidden=4"),
    "fedbabu": "--model dnn:hidden=4 --F 3",
    "fedbn": "--model dnn-bn:hidden=4",
    **dict.fromkeys(("ifca", "hypcluster"), "--clusters 2 --warmup 1"),
    **dict.fromkeys(("reptile", "aruba"), "--F 3"),
}
QUICK = ("scaffold", "ifca")
OTHERS = [name for name in ALGORITHMS if name not in PAPERS]


def command(name: str) -> list[str]:
    """A short run of an algorithm."""
    return ["run", name, *shlex.split(TINY), *shlex.split(OPTIONS.get(name, ""))]


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in OTHERS]
)
def test_killed_and_resumed_it_ends_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = assert_resumed_alike(command(name), tmp_path, monkeypatch, [5])
    final, cls = left["record.json"]["final"], ALGORITHMS[name]
    assert ("global" in final) == cls.has_global
    assert ("personal" in final) == bool(cls.personal)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["--combine rfa", "--codec fedpaq", "--codec fedpaq:levels=8 --combine rfa:M=8"]
)
@pytest.mark.parametrize("name", ["pfedme", "scaffold", "ifca"])
def test_parts_go_with_any_algorithm(name: str, part: str, tmp_path: Path):
    assert main([*command(name), *part.split(), "--out", str(tmp_path / "run"), "--json"]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"
