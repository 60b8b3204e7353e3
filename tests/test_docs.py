"""The documents: every command in them is one that the program understands."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import pfedme.runs.run
import pfedme.training.execute
from pfedme.cli import help_page, main
from pfedme.cli.registry import COMMANDS
from pfedme.data.mapped import convert
from pfedme.data.mnist import Images
from pfedme.data.natural import Natural
from pfedme.data.synthetic import Synthetic
from pfedme.data.table import Table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.is_file()]


def commands(text: str) -> list[list[str]]:
    """The words after `pfedme` of each command in the text's shell blocks."""
    blocks = re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [words for block in blocks for line in joined(block) for words in pfedme_in(line)]


def joined(block: str) -> list[str]:
    """Lines, with those that end in a backslash joined to the next."""
    return block.replace("\\\n", " ").splitlines()


def pfedme_in(line: str) -> list[list[str]]:
    """The words after `pfedme` of each pfedme command in a line of shell."""
    reader = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    reader.whitespace_split = True
    found: list[list[str]] = []
    words: list[str] = []
    for word in [*reader, ";"]:
        if set(word) <= set("|&;<>"):
            if words and Path(words[0]).name == "pfedme":
                found.append(words[1:])
            words = []
        else:
            words.append(word)
    return found


def test_commands_are_found_in_shell_blocks_only():
    text = """
pfedme run not-this
```sh
# pfedme run nor-this
.venv/bin/pfedme run pfedme --rounds 3 \\
    --json > result.json   # a comment
cd x && pfedme data describe | head
```
```console
$ pfedme resume runs/a
pfedme-like output
```
```python
pfedme run nor-that
```
"""
    assert commands(text) == [
        ["run", "pfedme", "--rounds", "3", "--json"], ["data", "describe"], ["resume", "runs/a"],
    ]  # fmt: skip


class Understood(Exception):
    """Raised in place of the work."""


@pytest.fixture
def understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[list[str]], bool]:
    """Whether a command is parsed and checked without complaint; it is not carried out."""

    def stop(*_: object, **__: object) -> None:
        raise Understood

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pfedme.training.execute, "execute", stop)
    monkeypatch.setattr(import_module("pfedme.training.compare"), "compare", stop)
    monkeypatch.setattr(import_module("pfedme.tuning.tune"), "tune", stop)
    monkeypatch.setattr(import_module("pfedme.experiments.verdicts"), "study_verdicts", stop)
    monkeypatch.setattr(pfedme.runs.run, "_load", stop)  # other tests may have loaded the rows already
    convert(Synthetic(clients=2, rows=4, features=1, classes=2), tmp_path / "patients")
    monkeypatch.setattr("pfedme.data.mapped.convert", stop)
    together = import_module("pfedme.cli.hosts").together  # which would wait for other hosts
    monkeypatch.setattr(
        "pfedme.cli.run.together", lambda where, out: (stop if where else together)(where, out)
    )
    for source in (Table, Natural, Images, Synthetic):
        monkeypatch.setattr(source, "load", stop)
    if importlib.util.find_spec("flwr"):
        from pfedme.deploy import create_keys, serve, supervise_client

        monkeypatch.setattr(serve, "check", stop)
        monkeypatch.setattr(supervise_client, "supervise", stop)
        create_keys.make(tmp_path / "keys", ["localhost"], ["north"])
        shutil.copytree(tmp_path / "keys/clients/north", tmp_path / "north")
        shutil.copy(tmp_path / "north/key.pub", tmp_path / "north.pub")
        create_keys.make_own(tmp_path / "own", "south")
        shutil.copy(tmp_path / "own/key.pub", tmp_path / "south.pub")
        (tmp_path / "my.csv").touch()
    # The tables that documents speak of.
    (tmp_path / "hospitals").mkdir()
    for name in ("patients.csv", "patients.parquet", "held-out.csv", "new-patients.csv", "images.npz",
                 "hospitals/north.csv", "visits.csv", "countries.csv", "new.csv"):  # fmt: skip
        (tmp_path / name).touch()

    def understood(argv: list[str]) -> bool:
        try:
            status = main(argv)
        except Understood:
            return True
        except SystemExit as end:
            status = end.code
        # The folder that a document goes on with is the reader's, so it is missing here.
        continuing = ("resume", "personalize", "report", "export", "predict", "log", "budget", "audit")
        goes_on = argv[0] in continuing
        goes_on |= argv[:2] == ["server", "--resume"]
        said = capsys.readouterr().err
        missing = goes_on and re.search("There is no (folder|run|exported model|log)", said) is not None
        return status == 0 or missing

    return understood


def test_what_the_program_does_not_know_is_not_understood(understood: Callable[[list[str]], bool]):
    assert understood(["run", "pfedme", "--rounds", "3"])
    assert understood(["resume", "runs/a"])
    assert not understood(["resume", "runs/a", "--rounds", "3"])
    assert not understood(["run", "pfedme", "--lamb", "3"])
    assert not understood(["reproduced"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_command_in_a_document_is_understood(path: Path, understood: Callable[[list[str]], bool]):
    for argv in commands(path.read_text()):
        assert understood(argv), " ".join(argv)


def test_every_command_in_the_makefile_is_understood(understood: Callable[[list[str]], bool]):
    text = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    for line in joined(text):
        for argv in pfedme_in(line.strip()) if line.startswith("\tpfedme") else []:
            assert understood(argv), " ".join(argv)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_example_in_the_help_is_understood(command: str, understood: Callable[[list[str]], bool]):
    text = import_module(COMMANDS[command].module).parser().epilog if command else help_page()
    _, examples = text.split("examples:\n")
    lines = [re.split(r"\s{3,}", line.strip())[0] for line in examples.splitlines() if line[:2] == "  "]
    found = [argv for line in lines for argv in pfedme_in(line)]
    assert found
    for argv in found:
        assert understood(argv), " ".join(argv)


def tracked() -> list[Path]:
    """The files of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_file_mentions_a_path_of_the_machine_that_it_was_written_on():
    private = re.compile("|".join(rf"(?<![\w.]){re.escape(f'/{top}/')}" for top in ("work", "root", "tmp/v")))
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if private.search(line)
        ]
    assert found == []


def test_links_within_the_repository_lead_somewhere():
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists()
    ]
    assert broken == []
