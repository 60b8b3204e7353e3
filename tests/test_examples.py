"""The examples: each runs from beginning to end, in a folder of its own."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SLOWER = (
    "compare",
    "equinox_model",
    "export_and_predict",
    "newcomer",
    "own_table",
    "personalization",
    "report",
    "tuning",
)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOWER))
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_an_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_is(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    head = lines[0] if path.suffix == ".py" else lines[1]
    assert head.startswith(('"""', "# "))
    assert head.endswith(".")


def test_the_script_for_several_machines_is_a_script():
    subprocess.run(["bash", "-n", EXAMPLES / "deploy.sh"], check=True)
