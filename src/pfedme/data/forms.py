"""How text represents numbers: units, thousands separators, decimal commas, dates and times of day."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import polars as pl

NEARLY_ALL = 0.9
"""The share of a column's values that must have a form for the others to count as mistakes."""
PERIODS = {"year": 365.2425, "week": 7.0, "day": 1.0}
"""Cycles of dates, in days."""
LONGEST = 20 * 365.2425
"""In dates that span more days, such as dates of birth, seasons and weekdays are ignored."""

_UNIT = r"[\p{L}%‰°$€£¥][\p{L}\p{N}%‰°/²³^*.\- ]{0,11}"
_NUMBER = (
    rf"^([+-]?)\s*([$€£¥]?)\s*([+-]?)(\d(?:[\d., '’\x{{a0}}\x{{202f}}]*\d)?(?:[eE][+-]?\d+)?)\s*({_UNIT})?$"
)
_DIGITS = {
    ".": r"^(?:\d+|\d{1,3}(?:[ '’\x{a0}\x{202f}]\d{3})+|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d+)?$",
    ",": r"^(?:\d+|\d{1,3}(?:[ '’\x{a0}\x{202f}]\d{3})+|[1-9]\d{0,2}(?:\.\d{3})+)(?:,\d+)?(?:[eE][+-]?\d+)?$",
}
"""Digits with a decimal point, and with a decimal comma."""
_CLOCK = r"(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,]\d+)?)?\s*([AaPp])?\.?(?:[Mm]\.?)?"
_ZONE = r"\s*(?:Z|UTC|[+-]\d{2}:?\d{2})?"
_DATES = {
    "ymd": r"^(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})",
    "dmy": r"^(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}|\d{2})",
    "mdy": r"^(\d{1,2})[-/](\d{1,2})[-/](\d{4}|\d{2})",
}
"""Orders of year, month and day. Dots only occur in the order day, month, year."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How the texts of a column are written, and which number each of them becomes.

    >>> Form(unit="mmHg", decimal=".").read(pl.Series(["120 mmHg", "1,080 mmHg", "80", "high"])).to_list()
    [120.0, 1080.0, 80.0, None]
    >>> Form(date="dmy").read(pl.Series(["2.1.1970", "31.02.1970"])).to_list()
    [1.0, None]
    """

    unit: str = ""
    """The unit before or after the numbers, such as $ or mmHg."""
    decimal: str = ""
    """The decimal point, or comma, of numbers that may have thousands separators (1,234.5); empty for numbers
    as programs write them."""
    date: str = ""
    """The order of a date, `ymd`, `dmy` or `mdy`; `time` for a time of day; empty for other numbers."""
    part: str = ""
    """For a date, `sine` or `cosine` of its position in the `year`, `week` or `day`, such as `week sine`; the
    number of days since 1970 if empty. A time of day is in hours."""

    def read(self, texts: pl.Series) -> pl.Series:
        """The texts as numbers; null for those that do not have this form."""
        texts = texts.cast(pl.String).str.strip_chars()
        if self == PLAIN:
            return texts.cast(pl.Float64, strict=False)
        if self.date == "time":
            return 24 * _clock(texts, f"^{_CLOCK}$", 1)
        if self.date:
            return self.of_days(_days(texts, self.date))
        return self._numbers(texts)

    def of_days(self, days: pl.Series) -> pl.Series:
        """The numbers that dates become; the dates are given in days."""
        if not self.part:
            return days
        period, function = self.part.split()
        turn = 2 * np.pi / PERIODS[period] * days
        return turn.sin() if function == "sine" else turn.cos()

    def _numbers(self, texts: pl.Series) -> pl.Series:
        parts = _number_parts(texts)
        digits, unit = parts["digits"], _plain_unit(parts["unit"])
        fine = digits.str.contains(_DIGITS[self.decimal]) & ((unit == "") | (unit == plain_unit(self.unit)))
        point = digits.str.replace_all(f"[^0-9eE+{self.decimal}-]", "").str.replace(",", ".", literal=True)
        value = point.cast(pl.Float64, strict=False)
        value = pl.select(pl.when(fine & parts["fine"]).then(value)).to_series()
        return value * pl.select(pl.when(parts["negative"]).then(-1.0).otherwise(1.0)).to_series()


PLAIN = Form()
"""Numbers as programs write them."""


class Found(NamedTuple):
    """A form that nearly all values of a column have."""

    form: Form
    values: np.ndarray
    """The texts as numbers."""
    odd: np.ndarray
    """Which texts do not have the form."""
    ambiguous: bool = False
    """Whether dates could have either the day or the month first."""
    bare: int = 0
    """How many values lack the unit that the others have."""


def find(texts: pl.Series, count: np.ndarray, decimal: str | None = None) -> Found | None:
    """The form that nearly all values have, if there is one; each text occurs `count` times.

    Unless the decimal sign is given, it is the one that fits most values.

    >>> found = find(pl.Series(["12,5 %", "13,5 %", "9 %"]), np.ones(3))
    >>> found.form.unit, found.form.decimal, found.values.tolist()
    ('%', ',', [12.5, 13.5, 9.0])
    """
    total = max(1.0, float(count.sum()))
    forms = [PLAIN] if decimal != "," else []
    digit = texts.str.contains(r"\d").fill_null(False).to_numpy()
    if float(count[digit].sum()) / total >= NEARLY_ALL:  # all other forms need a digit
        unit = _commonest_unit(texts, count)
        forms += [Form(unit=unit, decimal=sign) for sign in ([decimal] if decimal else [".", ","])]
        forms += [Form(date=date) for date in (*_DATES, "time")]
    best, most = None, 0.0
    for form in forms:
        values = form.read(texts)
        odd = values.is_null().to_numpy()
        share = float(count[~odd].sum()) / total
        if share > most:
            best, most = Found(form, values.to_numpy(), odd), share
        if share == 1:
            break
    if best is None or most < NEARLY_ALL:
        return None
    if best.form.date == "dmy":
        other = Form(date="mdy").read(texts).to_numpy()
        either = ~np.isnan(other) & ~best.odd
        ambiguous = count[either].sum() >= most * total and (other != best.values)[either].any()
        best = best._replace(ambiguous=bool(ambiguous))
    if best.form.unit:
        bare = (_plain_unit(_number_parts(texts)["unit"]) == "").fill_null(False).to_numpy() & ~best.odd
        best = best._replace(bare=int(count[bare].sum()))
    return best


def cycles(days: np.ndarray) -> list[str]:
    """The parts of dates that can matter besides their order: sine and cosine of each cycle they cover.

    >>> cycles(np.arange(30.0)), cycles(np.array([0.0, 0.5, 1.25])), cycles(np.array([-9000.0, 12000.0]))
    (['week sine', 'week cosine'], ['day sine', 'day cosine'], [])
    """
    days = days[np.isfinite(days)]
    span = float(np.ptp(days)) if len(days) else 0.0
    there = [name for name in ("year", "week") if PERIODS[name] - 1 <= span <= LONGEST]
    there += ["day"] if len(days) and np.ptp(days % 1) > 0 else []
    return [f"{name} {function}" for name in there for function in ("sine", "cosine")]


def plain_unit(unit: str) -> str:
    """A unit without irrelevant differences: capitals, blanks, a plural s."""
    return _plain_unit(pl.Series([unit]))[0]


def _plain_unit(units: pl.Series) -> pl.Series:
    return units.fill_null("").str.strip_chars(" .").str.to_lowercase().str.replace(r"(\p{L}{2,})s$", "$1")


def _number_parts(texts: pl.Series) -> pl.DataFrame:
    """The digits of numbers, their units, and whether they are negative."""
    found = texts.str.replace("−", "-", literal=True).str.extract_groups(_NUMBER).struct.unnest()
    sign, before, inner, digits, behind = found.get_columns()
    unit = pl.select(pl.when(before != "").then(before).otherwise(behind.fill_null(""))).to_series()
    return pl.DataFrame({
        "digits": digits,
        "unit": unit.str.strip_chars(),
        "negative": (sign == "-") | (inner == "-"),
        "fine": ((sign == "") | (inner == "")) & ((before == "") | behind.is_null()),
    })  # fmt: skip


def _commonest_unit(texts: pl.Series, count: np.ndarray) -> str:
    """The unit that most values have, in its most frequent spelling."""
    parts = _number_parts(texts.str.strip_chars()).with_columns(count=pl.Series(count))
    there = parts.filter(
        pl.col("digits").is_not_null() & pl.col("unit").is_not_null() & (pl.col("unit") != "")
    )
    if not there.height:
        return ""
    there = there.with_columns(plain=_plain_unit(there["unit"]))
    most = there.group_by("plain").agg(pl.col("count").sum()).sort("count", "plain", descending=[True, False])
    spellings = there.filter(pl.col("plain") == most["plain"][0]).group_by("unit").agg(pl.col("count").sum())
    return str(spellings.sort("count", "unit", descending=[True, False])["unit"][0])


def _days(texts: pl.Series, order: str) -> pl.Series:
    """Dates, possibly with a time of day, as days since 1970; null for other texts and impossible dates."""
    pattern = f"{_DATES[order]}(?:(?:T|,?\\s+){_CLOCK}{_ZONE})?$"
    found = texts.str.extract_groups(pattern).struct.unnest().get_columns()
    year, month, day = (found[order.index(what)] for what in "ymd")
    # Two-digit years from 69 to 99 are in the last century, as in POSIX.
    short, late = year.str.len_chars() == 2, year.cast(pl.Int32, strict=False) >= 69
    century = pl.when(late).then(pl.lit("19")).otherwise(pl.lit("20"))
    whole = pl.select(pl.when(short).then(pl.concat_str(century, pl.lit(year))).otherwise(pl.lit(year)))
    written = whole.to_series() + "-" + month.str.zfill(2) + "-" + day.str.zfill(2)
    date = written.str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32).cast(pl.Float64)
    clock = _clock(texts, pattern, 4)
    without = found[3].is_null()
    return date + pl.select(pl.when(without).then(0.0).otherwise(clock)).to_series()


def _clock(texts: pl.Series, pattern: str, first: int) -> pl.Series:
    """Times of day as fractions of a day, from four groups of a pattern; null if there is no time."""
    groups = texts.str.extract_groups(pattern).struct.unnest().get_columns()[first - 1 : first + 3]
    hour, minute, second = (group.cast(pl.Float64, strict=False) for group in groups[:3])
    half = groups[3].str.to_lowercase()
    hour = pl.select(
        pl.when(half == "p").then(hour % 12 + 12).when(half == "a").then(hour % 12).otherwise(hour)
    ).to_series()
    second = second.fill_null(0.0)
    fine = (hour < 24) & (minute < 60) & (second < 61)
    return pl.select(pl.when(fine).then((hour * 3600 + minute * 60 + second) / 86400)).to_series()
