"""The user's tables: a file with a column that names the client, a folder with a file for each client, or a
frame in memory."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from pfedme.core.spec import Seed, Share
from pfedme.data.arrays import has_test, open_arrays
from pfedme.data.disk import Disk
from pfedme.data.federation import Federation
from pfedme.data.fitting import Told, fit, fit_label, tell
from pfedme.data.frames import Held, as_frame
from pfedme.data.hashing import fingerprint, ids_of_names
from pfedme.data.layout import Layout, Strata, lay_out
from pfedme.data.notes import notes
from pfedme.data.reading import Part, Reading, SchemaChanged, files_of, open_frame, open_parts, shown
from pfedme.data.rows import Rows, read_rows
from pfedme.data.schema import Column, Schema, listed
from pfedme.data.understanding import Texts, columns_of_text, refuse_forms, understand_label
from pfedme.errors import InputError, Problems

OPTIONS = {
    "client": "--client", "label": "--label", "features": "--features", "drop": "--drop", "task": "--task",
    "test": "--test", "impute": "--impute", "drop_missing_labels": "--drop-missing-labels", "na": "--na",
    "decimal": "--decimal", "sheet": "--sheet", "train": "--train", "seed": "--split-seed",
}  # fmt: skip
"""The fields of a table that are command line options."""
FRAME, TEST_FRAME = "the frame", "the test frame"
"""Names of tables in memory, for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A user's table: a CSV, TSV, Parquet, Excel or NPZ file, a folder of such files, or, in Python, a polars
    or pandas frame.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"who": ["a", "b"] * 4, "age": range(8), "ill": ["yes", "no", "no", "yes"] * 2})
    >>> Table(frame=rows, client="who", label="ill").load().names
    ('a', 'b')
    """

    name: ClassVar[str] = "table"

    path: str = ""
    """The file or folder."""
    client: str | None = None
    """Column that names the client of each row; without it, each file of a folder is one client."""
    label: str | None = None
    """Column to predict."""
    features: tuple[str, ...] = ()
    """Columns to predict from, separated by commas; all others if not given."""
    drop: tuple[str, ...] = ()
    """Columns to leave out, separated by commas."""
    task: Literal["classification", "regression"] | None = None
    """Whether the label is a class or a quantity; if not given, it is a quantity if it has fractions and more
    than 20 distinct values."""
    test: str | None = None
    """A table of test rows; without it, each client's rows are split."""
    impute: Literal["mean"] | None = None
    """mean: a missing number becomes the mean, and a missing category a separate category; if not given,
    missing values are an error."""
    drop_missing_labels: bool = False
    """Leave out rows without a label, which are otherwise an error."""
    na: tuple[str, ...] = ()
    """Additional words, or numbers, that count as missing values, separated by commas."""
    decimal: Literal[".", ","] | None = None
    """Decimal sign of numbers in text files; detected if not given."""
    sheet: str | None = None
    """Sheet of an Excel file; the first if not given."""
    train: Share = 0.75
    """Share of each client's rows to train on, if there is no table of test rows."""
    seed: Seed = 0
    """Seed of that split."""
    owner: str = ""
    """The client that all rows belong to, if each client has its own table."""
    fingerprint: str = ""
    """Fingerprint of the files' content, which ensures that a run is resumed with the data that it started
    with."""
    frame: Any = dataclasses.field(default=None, metadata={"recorded": False})
    """In Python, the rows themselves in place of `path`."""
    test_frame: Any = dataclasses.field(default=None, metadata={"recorded": False})
    """The test rows in place of `test`."""

    def __post_init__(self) -> None:
        for name, path in (("frame", self.path), ("test_frame", self.test)):
            value = getattr(self, name)
            if value is not None and path:
                raise InputError(f"A table has either a file or a {name}, not both; leave one of them out.")
            if value is not None and not isinstance(value, Held):
                object.__setattr__(self, name, Held(as_frame(value, f"The rows of {name}")))
        if self.test_frame is not None and self.frame is None:
            raise InputError("A table with a test_frame needs a frame; give both, or files for both.")
        for name in ("features", "drop", "na"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    def words(self) -> list[str]:
        """The command line that describes this table."""
        words = ["--data", self.path]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONS and value is True:
                words.append(OPTIONS[field.name])
            elif field.name in OPTIONS and value != field.default:
                words += [OPTIONS[field.name], joined(value) if isinstance(value, tuple) else str(value)]
        return words

    def pinned(self) -> Table:
        """This table with its full path and the fingerprint of its files; if a fingerprint was given, they
        must match."""
        if self.frame is not None:
            now = hashlib.sha256(
                repr((self.frame.sha256, self.test_frame and self.test_frame.sha256)).encode()
            )
            return dataclasses.replace(self, fingerprint=now.hexdigest())
        if not self.path:
            raise InputError(
                "The rows of this run were a frame in Python and are in no file; train again with that frame."
                if self.fingerprint
                else "A table needs a path, or in Python a frame."
            )
        path, test = (str(Path(p).absolute()) if p else p for p in (self.path, self.test))
        files = [file for p in (path, test) if p for file in files_of(Path(p))]
        try:
            now = fingerprint(files)
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {error.strerror}.") from None
        if self.fingerprint not in ("", now):
            raise InputError(
                f"The data of this run, {shown(Path(self.path))}, has changed since the run began; restore "
                "it, or start a new run."
            )
        return dataclasses.replace(self, path=path, test=test, fingerprint=now)

    def load(self, schema: Schema | None = None, *, disk: Disk | None = None) -> Federation:
        """The federation, encoded by a schema; if none is given, it is fitted to the training rows. With a
        disk, the features are on it, so that they may be larger than memory."""
        try:
            return self._load(schema, disk, whole=False)
        except SchemaChanged:
            return self._load(schema, disk, whole=True)

    def _load(self, schema: Schema | None, disk: Disk | None, *, whole: bool) -> Federation:
        """The federation; `whole` as in `open_parts`."""
        tables = self._read(schema, disk, whole=whole)
        rows = tables[0]
        plan, texts = (schema, {}) if schema else self._understood(tables)
        if schema:
            self._refuse_problems(tables, Problems(), [])
        y, layout = self._laid_out(tables, plan)
        layout = dataclasses.replace(layout, disk=disk)
        if schema is None:
            x, plan = fit(tables, layout, plan, texts)
            plan = fit_label(rows, layout, plan)
        else:
            # An owner shares the categories of its training rows; its test rows may have others.
            x = layout.filled(tables, schema, strict=not self.owner)
        y = layout.placed(y or [table.labels(plan) for table in tables])
        federation = Federation(
            x=x, y=y, n_train=layout.n_train, n_test=layout.n_test, classes=len(plan.labels), ids=layout.ids,
            names=rows.client.names, schema=plan, shape=rows.parts[0].shape, origin=layout.origin(),
            files=tuple((p.where, h) for t in tables for p, h in zip(t.parts, t.heights, strict=True)),
        ).checked()  # fmt: skip
        said = [note for table in tables for note in table.notes]
        return dataclasses.replace(federation, notes=(*dict.fromkeys([*notes(federation, rows), *said]),))

    def _understood(self, tables: Sequence[Rows]) -> tuple[Schema, Texts]:
        """The schema as far as the label determines it, and what becomes of columns that were read as text;
        raises one error for everything that is wrong with the table."""
        rows, problems = tables[0], Problems()
        plan = Schema((), rows.label.name, rows.client_column, "classification", impute=bool(self.impute))
        if not rows.label.is_null().any():
            with problems:
                task, labels, form = understand_label(rows, self.task, among_others=bool(self.owner))
                plan = dataclasses.replace(plan, task=task, labels=labels, label_form=form, na=self.na)
        texts: Texts = {}
        for name in rows.texts:
            with problems:
                texts[name] = columns_of_text(rows, name)
        self._refuse_problems(tables, problems, [*rows.numbers, *texts])
        if self.owner:
            label = Column(plan.label, "number", form=plan.label_form)
            refuse_forms([label, *(column for own in texts.values() for column in own)], rows)
        return plan, texts

    def _refuse_problems(self, tables: Sequence[Rows], problems: Problems, columns: Sequence[str]) -> None:
        """Raises one error for all problems, if there are any, including missing values."""
        problems.found[:0] = [problem for table in tables for problem in table.problems]
        if problems.found and not self.impute and (missing := tables[0].missing(columns)):
            problems.found.append(missing)
        problems.raise_any(tables[0].where)

    def _laid_out(self, tables: list[Rows], plan: Schema) -> tuple[list[np.ndarray], Layout]:
        """The labels of a classification, and where rows belong."""
        y, strata = list[np.ndarray](), None
        if plan.task == "classification":
            y = [table.labels(plan) for table in tables]
            strata = Strata(y[0], ids_of_names(plan.labels))
        return y, lay_out(tables, strata, self.train, self.seed)

    def tell(self, least: int = 1, ranges: Mapping[str | None, tuple[float, float]] | None = None) -> Told:
        """What the owner of all rows shares about them, so that a federation can agree on a schema; texts
        that occur in fewer than `least` training rows are not revealed, and numbers of some columns (None:
        the label) are moved into a range."""
        for whole in (False, True):
            try:
                tables = self._read(None, None, whole=whole)
                plan, texts = self._understood(tables)
                _, layout = self._laid_out(tables, plan)
                return tell(tables, layout, plan, texts, least, ranges or {})
            except SchemaChanged:
                if whole:
                    raise
        raise AssertionError

    def _read(self, schema: Schema | None, disk: Disk | None, *, whole: bool) -> list[Rows]:
        """The table, and the table of test rows if there is one."""
        reading = Reading(self.na, self.decimal, self.sheet)
        named = list(schema.sources) if schema else list(self.features)
        used = [*named, *filter(None, (self.client, self.label))] if named else None
        if self.frame is not None:
            path = Path(FRAME)
            parts = [open_frame(FRAME, self.frame.frame, reading)]
        else:
            path = Path(self.path)
            parts = open_parts(path, used, whole=whole, quick=not whole, reading=reading)
        client, label = self._client_and_label(path, parts)
        columns = named if schema else self._columns(parts, client, label)

        def rows_of(path: Path, parts: list[Part], known: Schema | None) -> Rows:
            return read_rows(
                path, parts, client, label, columns, known, self.owner,
                drop_missing_labels=self.drop_missing_labels, disk=disk,
            )  # fmt: skip

        tables = [rows_of(path, parts, schema)]
        known = schema or tables[0].plan
        test = self.test and Path(self.test)
        arrays = path.suffix.lower() == ".npz" and has_test(path)
        if test and arrays:
            raise InputError(
                f"{shown(path)} already has test rows, x_test; leave out either --test or these rows."
            )
        if arrays:
            tables.append(rows_of(path, [open_arrays(path, "_test")], known))
        elif self.test_frame is not None:
            held = [open_frame(TEST_FRAME, self.test_frame.frame, reading)]
            tables.append(rows_of(Path(TEST_FRAME), held, known))
        elif test:
            names = [*columns, *filter(None, (client, label))]
            held = open_parts(test, names, whole=whole, quick=not whole, reading=reading)
            if client is None and not test.is_dir() and not self.owner:
                raise InputError(
                    f"--test {shown(test)} must be a folder with a file for each client, like --data."
                )
            tables.append(rows_of(test, held, known))
        return tables

    def _client_and_label(self, path: Path, parts: Sequence[Part]) -> tuple[str | None, str]:
        """The columns of the client (None if each file is one client) and of the label."""
        names, where = list(parts[0].types), parts[0].where
        arrays = parts[0].path.suffix.lower() == ".npz"
        if arrays and (self.features or self.drop):
            raise InputError(
                f"{where} contains arrays, which have no named columns; leave --features and --drop out."
            )
        client = self.client or ("client" if arrays and not path.is_dir() and not self.owner else None)
        label = self.label or ("y" if arrays else None)
        columns, problems = listed(names, quote=False), Problems()
        with problems:
            if label is None:
                raise InputError(
                    f"Which column of {where} is to be predicted? Give --label, one of its columns {columns}."
                )
        with problems:
            if client is None and not path.is_dir() and not self.owner:
                raise InputError(
                    f"Which client does each row of {where} belong to? Give --client, one of its columns "
                    f"{columns}, or a folder with a file for each client."
                )
        for option, name in (("--client", client), ("--label", label)):
            if name is not None and name not in names:
                problems.found.append(_no_column(option, name, names, where))
        problems.raise_any(where)
        assert label is not None
        if client == label:
            raise InputError(f"--client and --label are both '{client}'; they must be different columns.")
        stems = [part.stem for part in parts]
        if client is None and not self.owner and (twice := {stem for stem in stems if stems.count(stem) > 1}):
            raise InputError(f"The folder {shown(path)} has two files for the client '{min(twice)}'.")
        return client, label

    def _columns(self, parts: Sequence[Part], client: str | None, label: str) -> list[str]:
        """The feature columns."""
        names, where, problems = list(parts[0].types), parts[0].where, Problems()
        anywhere = list(dict.fromkeys(name for part in parts for name in part.types))
        for option, name in [("--features", n) for n in self.features] + [("--drop", n) for n in self.drop]:
            with problems:
                if name not in anywhere:
                    raise _no_column(option, name, anywhere, where)
                if name in (client, label):
                    what = "client" if name == client else "label"
                    raise InputError(f"{option} names '{name}', which is the {what}; leave it out there.")
        if self.features:
            columns = [name for name in dict.fromkeys(self.features) if name not in self.drop]
        else:
            columns = [name for name in names if name not in (client, label, *self.drop)]
            for part in parts[1:]:
                own = {name for name in part.types if name not in (client, label, *self.drop)}
                for odd in sorted(own ^ set(columns)):
                    has, lacks = (part, parts[0]) if odd in own else (parts[0], part)
                    problems.found.append(
                        InputError(
                            f"{has.where} has a column '{odd}' but {lacks.where} does not; leave it out with "
                            "--drop, or name the columns to use with --features."
                        )
                    )
        problems.raise_any(where if len(parts) == 1 else shown(parts[0].path.parent))
        if not columns:
            raise InputError(f"{where} has no column left to predict '{label}' from.")
        return columns


def joined(names: Sequence[str]) -> str:
    """Names as one text, `a,b`, with quotation marks around names that contain a comma."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def _no_column(option: str, name: str, names: Sequence[str], where: str) -> InputError:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return InputError(
        f"{where} has no column '{name}' for {option}{hint} Its columns: {listed(names, quote=False)}."
    )
