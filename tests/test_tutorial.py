"""The tutorial: its commands, one after the other, as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

TUTORIAL = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"


@pytest.mark.slow
def test_the_tutorial_works(tmp_path: Path):
    blocks = re.findall(r"^```sh\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    scripts = [block for block in blocks if not block.startswith("pip install")]
    assert len(scripts) == len(blocks) - 1
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for script in scripts:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert {"described/labels.png", "visits.html", "countries.html", "models/rwanda/model.json"} <= made
    assert pl.read_csv(tmp_path / "predictions.csv").height == pl.read_csv(tmp_path / "visits.csv").height
    life = pl.read_csv(tmp_path / "countries.csv").with_columns(pl.read_csv(tmp_path / "rwanda.csv"))
    own = life.filter(pl.col("country") == "Rwanda")
    assert (own["prediction"] - own["lifeExp"]).abs().to_numpy().mean() < 20
