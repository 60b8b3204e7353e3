"""Tables of the user's own: a file with a column that names the client, or a folder with a file for each."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from pfedme.data.arrays import has_test, open_arrays
from pfedme.data.fitting import Told, fit, fit_label, tell, understand_label
from pfedme.data.layout import Layout, Strata, lay_out
from pfedme.data.reading import Late, Part, files_of, open_parts, shown
from pfedme.data.rows import Rows, read_rows
from pfedme.errors import InputError
from pfedme.federation import Federation
from pfedme.hashing import fingerprint, ids_of_names
from pfedme.schema import Schema, listed
from pfedme.spec import Seed, Share
from pfedme.tree import record

OPTIONS = {
    "client": "--client", "label": "--label", "features": "--features", "drop": "--drop", "task": "--task",
    "test": "--test", "impute": "--impute", "train": "--train", "seed": "--split-seed",
}  # fmt: skip
"""The fields of a table that are options of the command line."""


@record
class Table:
    """A table of the user's own: CSV, TSV, Parquet or NPZ, or a folder of such files."""

    name: ClassVar[str] = "table"

    path: str = ""
    """The file or folder."""
    client: str | None = None
    """Column that tells whose row it is; without it, each file of a folder is a client's."""
    label: str | None = None
    """Column to predict."""
    features: tuple[str, ...] = ()
    """Columns to predict from, joined by commas; all others if not given."""
    drop: tuple[str, ...] = ()
    """Columns to leave out, joined by commas."""
    task: Literal["classification", "regression"] | None = None
    """What the label is: a class, or a quantity; a quantity if it has fractions and more than 20 values."""
    test: str | None = None
    """A table of test rows; without it, each client's rows are split."""
    impute: Literal["mean"] | None = None
    """mean: a missing number becomes the mean, a missing category one of its own; refused if not given."""
    train: Share = 0.75
    """Share of a client's rows to train on, where there is no table of test rows."""
    seed: Seed = 0
    """Seed of that split."""
    owner: str = ""
    """The client that all rows belong to, where it is one of several with tables of their own."""
    fingerprint: str = ""
    """Of the files' content: what makes sure that a run goes on with the data that it began with."""

    def words(self) -> list[str]:
        """The command line that describes this table."""
        words = ["--data", self.path]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONS and value != field.default:
                words += [OPTIONS[field.name], joined(value) if isinstance(value, tuple) else str(value)]
        return words

    def pinned(self) -> Table:
        """This table with its whole path and the fingerprint of its files, which must be the one that was
        given, if one was."""
        path, test = (str(Path(p).absolute()) if p else p for p in (self.path, self.test))
        files = [file for p in (path, test) if p for file in files_of(Path(p))]
        try:
            now = fingerprint(files)
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {error.strerror}.") from None
        if self.fingerprint not in ("", now):
            raise InputError(
                f"The data of this run, {shown(Path(self.path))}, has changed since it began; put back what "
                "it was, or start a new run."
            )
        return dataclasses.replace(self, path=path, test=test, fingerprint=now)

    def load(self, schema: Schema | None = None) -> Federation:
        """The federation, encoded as a schema says, or as one that is made from its training rows."""
        try:
            return self._load(schema, whole=False)
        except Late:
            return self._load(schema, whole=True)

    def _load(self, schema: Schema | None, *, whole: bool) -> Federation:
        """The federation; `whole` as in `open_parts`."""
        tables = self._read(schema, whole=whole)
        rows = tables[0]
        plan, y, layout = self._laid_out(tables, schema)
        if schema is None:
            x, plan = fit(tables, layout, plan)
            plan = fit_label(rows, layout, plan)
        else:
            # An owner tells the categories of its training rows; its test rows may have others.
            x = layout.filled(tables, schema, strict=not self.owner)
        y = layout.placed(y or [table.labels(plan) for table in tables])
        return Federation(
            x=x, y=y, n_train=layout.n_train, n_test=layout.n_test, classes=len(plan.labels), ids=layout.ids,
            names=rows.client.names, schema=plan, shape=rows.parts[0].shape,
        ).checked()  # fmt: skip

    def _laid_out(self, tables: list[Rows], schema: Schema | None) -> tuple[Schema, list[np.ndarray], Layout]:
        """The schema as far as it is known, the labels of a classification, and where rows belong."""
        rows, plan = tables[0], schema
        if plan is None:
            task, labels = understand_label(rows, self.task, among_others=bool(self.owner))
            plan = Schema((), rows.label.name, rows.client_column, task, labels, impute=bool(self.impute))
        y, strata = list[np.ndarray](), None
        if plan.task == "classification":
            y = [table.labels(plan) for table in tables]
            strata = Strata(y[0], ids_of_names(plan.labels))
        return plan, y, lay_out(tables, strata, self.train, self.seed)

    def tell(self, least: int = 1) -> Told:
        """What the owner of all rows tells of them, so that a federation can agree on a schema; of a text
        that fewer than `least` training rows have, nothing."""
        for whole in (False, True):
            try:
                tables = self._read(None, whole=whole)
                plan, _, layout = self._laid_out(tables, None)
                return tell(tables, layout, plan, least)
            except Late:
                if whole:
                    raise
        raise AssertionError

    def _read(self, schema: Schema | None, *, whole: bool) -> list[Rows]:
        """The table, and the one of test rows if there is one."""
        path = Path(self.path)
        named = [column.name for column in schema.columns] if schema else list(self.features)
        used = [*named, *filter(None, (self.client, self.label))] if named else None
        parts = open_parts(path, used, whole=whole, quick=not whole)
        client, label = self._client_and_label(path, parts)
        columns = named if schema else self._columns(parts, client, label)
        tables = [read_rows(path, parts, client, label, columns, schema, self.owner)]
        known = schema or tables[0].plan
        test = self.test and Path(self.test)
        arrays = path.suffix.lower() == ".npz" and has_test(path)
        if test and arrays:
            raise InputError(f"{shown(path)} has test rows of its own, x_test; leave out --test or them.")
        if arrays:
            tables.append(
                read_rows(path, [open_arrays(path, "_test")], client, label, columns, known, self.owner)
            )
        elif test:
            names = [*columns, *filter(None, (client, label))]
            held = open_parts(test, names, whole=whole, quick=not whole)
            if client is None and not test.is_dir() and not self.owner:
                raise InputError(
                    f"--test {shown(test)} must be a folder with a file for each client, as --data is."
                )
            tables.append(read_rows(test, held, client, label, columns, known, self.owner))
        return tables

    def _client_and_label(self, path: Path, parts: Sequence[Part]) -> tuple[str | None, str]:
        """The columns of the client, None if each file is a client's, and of the label."""
        names, where = list(parts[0].types), parts[0].where
        arrays = parts[0].path.suffix.lower() == ".npz"
        if arrays and (self.features or self.drop):
            raise InputError(
                f"{where} holds arrays, so that --features and --drop mean nothing; leave them out."
            )
        client = self.client or ("client" if arrays and not path.is_dir() and not self.owner else None)
        label = self.label or ("y" if arrays else None)
        columns = listed(names, quote=False)
        if label is None:
            raise InputError(
                f"What is to be predicted in {where}? Give --label, one of its columns {columns}."
            )
        if client is None and not path.is_dir() and not self.owner:
            raise InputError(
                f"Whose are the rows of {where}? Give --client, one of its columns {columns}, or a folder "
                "with a file for each client."
            )
        for option, name in (("--client", client), ("--label", label)):
            if name is not None and name not in names:
                raise _no_column(option, name, names, where)
        if client == label:
            raise InputError(f"--client and --label are both '{client}'; they must be different columns.")
        stems = [part.stem for part in parts]
        if client is None and not self.owner and (twice := {stem for stem in stems if stems.count(stem) > 1}):
            raise InputError(f"The folder {shown(path)} has two files for the client '{min(twice)}'.")
        return client, label

    def _columns(self, parts: Sequence[Part], client: str | None, label: str) -> list[str]:
        """The columns of features."""
        names, where = list(parts[0].types), parts[0].where
        anywhere = list(dict.fromkeys(name for part in parts for name in part.types))
        for option, given in (("--features", self.features), ("--drop", self.drop)):
            for name in given:
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
                if odd := sorted(own ^ set(columns)):
                    has, lacks = (part, parts[0]) if odd[0] in own else (parts[0], part)
                    raise InputError(
                        f"{has.where} has a column '{odd[0]}' and {lacks.where} has none; leave it out with "
                        "--drop, or name the columns to use by --features."
                    )
        if not columns:
            raise InputError(f"No column of {where} is left to predict '{label}' from.")
        return columns


def joined(names: Sequence[str]) -> str:
    """Names as one text, `a,b`, with quotation marks around a name that has a comma in it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


def _no_column(option: str, name: str, names: Sequence[str], where: str) -> InputError:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return InputError(
        f"{where} has no column '{name}' for {option}{hint} Its columns: {listed(names, quote=False)}."
    )
