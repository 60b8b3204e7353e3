"""`pfedme predict`: predicts labels for the rows of a table with an exported model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pfedme.cli.options import add_debug, new_parser, parsed
from pfedme.core.spec import parse_names
from pfedme.errors import InputError

if TYPE_CHECKING:
    import polars as pl

EXAMPLES = """\
examples:
  pfedme predict models/dayton --data new.csv -o predictions.csv
  pfedme predict models/dayton --data new.csv --keep id,age -o predictions.csv"""


def parser() -> argparse.ArgumentParser:
    """The options of `pfedme predict`."""
    about = "Predicts the rows of a table, in their order, with an exported model."
    made = new_parser("predict", about, EXAMPLES)
    made.add_argument("model", metavar="DIR", type=Path, help="the folder of an exported model")
    made.add_argument(
        "--data", type=Path, required=True, metavar="TABLE", help="CSV, TSV, Excel, Parquet or NPZ"
    )
    made.add_argument(
        "-o", "--out", type=Path, default=Path("predictions.csv"), metavar="FILE",
        help="CSV file for the predictions (predictions.csv)",
    )  # fmt: skip
    made.add_argument(
        "--keep", metavar="COLUMNS", default="",
        help="columns of the table to copy into the predictions, separated by commas",
    )  # fmt: skip
    made.add_argument(
        "--strict", action="store_true",
        help="refuse missing values and unknown categories; without it, a missing number becomes the mean of "
        "the training rows, and a missing or unknown category is encoded as zeros, with a warning",
    )  # fmt: skip
    made.add_argument("--force", action="store_true", help="overwrite the file, but never the table itself")
    add_debug(made)
    return made


def carry_out(argv: list[str]) -> int:
    """Predicts, and warns about anything in the table that the model was not trained on."""
    args = parsed(parser(), argv)

    from pfedme.data.gaps import Gaps
    from pfedme.export import load

    _refuse_out(args.out, args.data, force=args.force)
    gaps = None if args.strict else Gaps()
    rows = _write(load(args.model).predict_file(args.data, parse_names(args.keep), gaps), args.out)
    if not rows:
        print(f"pfedme: {args.data} has no rows; {args.out} contains only a header.", file=sys.stderr)
    if gaps and (found := gaps.sentence(str(args.data))):
        print(f"pfedme: {found} --strict makes this an error.", file=sys.stderr)
    print(f"{rows:,} predictions: {args.out}")
    return 0


def _refuse_out(out: Path, table: Path, *, force: bool) -> None:
    """Raises an error if the predictions must not be written there."""
    from pfedme.data.reading import files_of
    from pfedme.files import refuse_file

    refuse_file(out.parent)
    if out.exists() and any(os.path.samefile(out, file) for file in files_of(table)):
        raise InputError(f"-o {out} is the table to predict, which is never overwritten; choose another -o.")
    if out.is_dir():
        raise InputError(f"{out} is a folder; choose another -o.")
    if out.exists() and not force:
        raise InputError(f"{out} exists; choose another -o, or --force to overwrite it.")


def _write(frames: Iterable[pl.DataFrame], out: Path) -> int:
    """Writes the predictions as they arrive, and returns how many there are."""
    from pfedme.cli.screen.bars import waiting
    from pfedme.files import atomic_file, writing

    rows = 0
    with writing(out), waiting("predicting") as told:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as file:
            for k, frame in enumerate(frames):
                frame.write_csv(file, include_header=k == 0)
                rows += frame.height
                told(f"{rows:,} rows predicted")
    return rows
