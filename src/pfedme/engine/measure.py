"""The main metric and how it is shown: accuracy in percent, AUC, R², ..."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pfedme.engine.metrics import LOWER_IS_BETTER
from pfedme.errors import InputError

if TYPE_CHECKING:
    from pfedme.data.federation import Federation

MetricName = Literal[
    "accuracy", "balanced_accuracy", "auc", "f1", "recall", "precision", "log_loss", "brier",
    "r2", "rmse", "mae",
]  # fmt: skip
"""The metrics to choose from; the last three are for quantities, the others for classes."""

RARE = 0.1
"""If the rarer of two classes has a smaller share of the training rows, AUC is the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric, as reports show it.

    >>> ACCURACY.text(81.234), ACCURACY.told(81.234), ACCURACY.apart(-1.26)
    ('81.23', '81.2 %', '1.3 points')
    >>> R2.text(0.81234), R2.told(0.81234), R2.apart(-0.0126)
    ('0.8123', 'R² 0.812', '0.013')
    >>> MEASURES["mae"].text(1234.5), MEASURES["mae"].text(0.012346), MEASURES["mae"].gain(0.3, 0.4)
    ('1,234', '0.01235', 0.1...)
    """

    key: str
    """Its name in an entry of a record."""
    name: str
    """Its name in a sentence."""
    title: str
    """The heading of its column in a table."""
    sign: str
    """The suffix for headings of other columns with such numbers, as in `client mean %`."""
    axis: str
    """Its name in a figure."""
    pattern: str
    """The format of its value in running text."""
    points: str
    """The format of a difference in running text."""
    scale: float
    """The factor by which reports multiply the record's number."""
    digits: int | None
    """Digits after the decimal point in a table, one more than in a sentence; None for a number in the units
    of the data, which has four significant digits."""

    @property
    def lower(self) -> bool:
        """Whether lower is better."""
        return self.key in LOWER_IS_BETTER

    @property
    def orientation(self) -> int:
        """1 if higher is better, else −1: multiplied by this, higher is always better."""
        return -1 if self.lower else 1

    @property
    def task(self) -> str:
        """The task that it is for: `classification` or `regression`."""
        return "regression" if self.key in ("r2", "rmse", "mae") else "classification"

    def gain(self, mine: float, other: float) -> float:
        """How much better `mine` is than `other`; negative if it is worse."""
        return self.orientation * (mine - other)

    def of(self, entry: Mapping[str, Any]) -> float | None:
        """The value in a model's entry; None if it has none."""
        value = entry.get(self.key)
        return None if value is None else self.scale * value

    def of_clients(self, entry: Mapping[str, Any], what: str) -> float | None:
        """A statistic over the clients' values in a model's entry (`mean`, `std`, `worst_decile`, `worst`);
        None if it has none."""
        usual = self.key in ("accuracy", "r2")
        clients = entry.get("clients") if usual else entry.get("by_client", {}).get(self.key)
        if not clients:
            return None
        return self.scale * clients[("max" if self.lower else "min") if what == "worst" else what]

    def text(self, value: float | None) -> str:
        """The number in a table; a dash for nothing."""
        return "–" if value is None else self._written(value, 0)

    def told(self, value: float) -> str:
        """The number in a sentence."""
        return self.pattern.format(self._written(value, 1))

    def apart(self, difference: float) -> str:
        """A difference of two of these numbers, in a sentence."""
        return self.points.format(self._written(abs(difference), 1))

    def level(self, difference: float) -> bool:
        """Whether two numbers with this difference would be shown as equal."""
        return difference == 0 if self.digits is None else abs(difference) < 0.5 * 0.1 ** (self.digits - 1)

    def _written(self, value: float, fewer: int) -> str:
        if self.digits is not None:
            return f"{value:.{self.digits - fewer}f}"
        return f"{value:.{4 - fewer}g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(key: str, name: str) -> Measure:
    return Measure(
        key=key, name=name, title=f"{name} %", sign="%", axis=f"test {name} (%)", pattern="{} %",
        points="{} points", scale=100, digits=2,
    )  # fmt: skip


def _number(key: str, name: str, digits: int | None = 4) -> Measure:
    return Measure(
        key=key, name=name, title=name, sign=name, axis=f"test {name}", pattern=name + " {}",
        points="{}", scale=1, digits=digits,
    )  # fmt: skip


ACCURACY = _percent("accuracy", "accuracy")
AUC = _number("auc", "AUC")
R2 = _number("r2", "R²")
MEASURES: dict[str, Measure] = {
    what.key: what
    for what in (
        ACCURACY, _percent("balanced_accuracy", "balanced accuracy"), AUC, _number("f1", "F1"),
        _percent("recall", "recall"), _percent("precision", "precision"), _number("log_loss", "log loss"),
        _number("brier", "Brier score"), R2, _number("rmse", "RMSE", None), _number("mae", "MAE", None),
    )
}  # fmt: skip


def measure_of(entry: Mapping[str, Any]) -> Measure:
    """The main metric of an entry of a record's history."""
    if entry.get("metric") in MEASURES:
        return MEASURES[entry["metric"]]
    parts = (part for part in entry.values() if isinstance(part, Mapping))
    return R2 if any(R2.key in part for part in parts) else ACCURACY


def metric_for(federation: Federation, wanted: str | None = None) -> tuple[Measure, str]:
    """The main metric for a federation, and a sentence that explains the choice if needed.

    It is the `wanted` one, if given; else R² for a quantity, AUC if one of two classes is rare, and otherwise
    accuracy.
    """
    task = "classification" if federation.classes else "regression"
    if wanted is not None:
        if wanted not in MEASURES or MEASURES[wanted].task != task:
            fitting = ", ".join(key for key, what in MEASURES.items() if what.task == task)
            label = "a class" if federation.classes else "a quantity"
            raise InputError(
                f"--metric {wanted} does not fit a label that is {label}; choose one of {fitting}."
            )
        return MEASURES[wanted], ""
    if task == "regression":
        return R2, ""
    share = federation.train_labels / federation.train_labels.sum()
    if federation.classes != 2 or share.min() >= RARE:
        return ACCURACY, ""
    rare = federation.label_name(federation.positive)
    return AUC, (
        f"Only {_share(share.min())} of the rows have '{rare}', so accuracy says little "
        f"({_share(share.max())} without learning anything); models are judged by AUC."
    )


def _share(share: float) -> str:
    """A share in percent, with enough digits to distinguish it from 0 % and 100 %."""
    digits = 1 if 0.001 <= share <= 0.999 else 3
    return f"{100 * share:.{digits}f} %"
