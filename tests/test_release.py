"""What a release consists of agrees on the version, and asks for nothing that the tests do not use."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import pfedme

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_version():
    assert "version" not in PROJECT
    bundle = tomllib.loads((ROOT / "src/pfedme/deploy/bundle/pyproject.toml").read_text())
    assert bundle["project"]["version"] == pfedme.__version__
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == pfedme.__version__
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest
    assert latest[1] == pfedme.__version__


def test_documents_name_the_wheel_of_this_version():
    wheels = [
        name for path in ROOT.glob("docs/*.md") for name in re.findall(r"pfedme-([\d.]+)-", path.read_text())
    ]
    assert wheels
    assert set(wheels) == {pfedme.__version__}


def test_what_is_pinned_is_what_the_package_asks_for():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    optional = PROJECT["optional-dependencies"]
    asked = [
        *PROJECT["dependencies"],
        *(r for name in ("dev", "tune", "xlsx", "flower") for r in optional[name]),
    ]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_the_version_is_known_without_loading_jax():
    code = "import sys, pfedme; print(pfedme.__version__, 'jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [pfedme.__version__, "False", "False"]
