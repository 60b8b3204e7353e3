"""Whether joining pays: yes, no, or cannot tell, from the scores of the same clients joined and alone.

With g_is the gain of client i by joining in the run with seed s, and ḡ_i its mean over seeds, the estimate is
the mean ḡ of ḡ_1, …, ḡ_N. Seeds share data, so they do not count as further clients: they only add the
variance of their own means. The interval is the wider of two,

    ḡ ± t √(V(ḡ_i)/N + V(ḡ_s)/S)    over clients and seeds, with Student's t,
    ḡ ± z √(Σ_i e_i²)/N             over test rows, with e_i the standard error of ḡ_i from i's own rows.

The second one guards against a few clients that happen to be similar. The answer is yes if the interval lies
above zero and no if it lies below, and neither if anything in the comparison was still improving.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from pfedme.engine.measure import ACCURACY, Measure

LEVEL = 0.98
"""How often the interval contains the true gain. If there is no difference, at most 2 % of the answers are a
yes or a no. With 95 % it would be 5 %, and nearly every second series of 200 would have more than 5 %."""
MARGIN = 0.001
"""A smaller gain is called no difference: a tenth of a point, or 0.1 % of an error."""
SHARES = ("accuracy", "balanced_accuracy", "auc", "recall", "precision", "f1")
"""Scores from 0 to 1 whose noise on n rows is at least about that of a proportion of n rows."""
ERRORS = ("loss", "log_loss", "brier", "rmse", "mae")
"""Scores for which lower is better."""
IMPROVING = "losses were still falling when training ended; increase --budget, or leave out --rounds"

PERCENT = f"{100 * LEVEL:g} %"

Answer = Literal["yes", "no", "cannot tell"]


class Interval(NamedTuple):
    """A mean with its interval."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the interval lies above zero, −1 if it lies below, else 0."""
        return int(self.low > 0) - int(self.high < 0)


class Gains(NamedTuple):
    """What each client gains; NaN where that is undefined."""

    each: np.ndarray
    noise: np.ndarray | None = None
    """The standard errors from the clients' own rows, if there are any."""
    least: np.ndarray | None = None
    """Lower bounds on these, if they are not paired over rows. The mean is judged by them."""

    def known(self) -> Gains:
        """The gains of the clients that have one."""
        there = ~np.isnan(self.each)
        noise, least = (None if values is None else values[there] for values in self[1:])
        return Gains(self.each[there], noise, least)

    def ends(self, measure: Measure) -> tuple[np.ndarray, np.ndarray]:
        """The ends of each client's 95 % interval, as far as the metric goes; NaN without noise.

        >>> Gains(np.array([0.5]), np.array([0.3])).ends(ACCURACY)
        (array([-0.088]), array([1.]))
        """
        half = np.full(len(self.each), np.nan) if self.noise is None else 1.96 * self.noise
        most = 1.0 if measure.key in SHARES else np.inf
        return np.maximum(self.each - half, -most), np.minimum(self.each + half, most)

    def mean(self, level: float = LEVEL) -> Interval | None:
        """The mean with its interval; None if too few are known (one is enough if it is paired)."""
        gains, noise, least = self.known()
        paired = noise is not None and least is None
        return interval(gains, noise if paired else least, level) if len(gains) >= 2 - paired else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether joining pays, and the evidence; gains are in the metric's units, positive if it does."""

    verdict: Answer
    gain: float | None
    low: float | None
    high: float | None
    metric: str
    joined: str
    """The model that was compared with alone, by its name in a sentence."""
    clients: int
    seeds: int
    level: float = LEVEL
    gaining: int | None
    """Clients that gain beyond the 95 % interval of their own test rows; None if that is not known."""
    losing: int | None
    why: str
    """Why it is neither yes nor no; empty if it is."""
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """This verdict as JSON values."""
        return dataclasses.asdict(self)


def judge(
    joined: np.ndarray,
    alone: np.ndarray,
    *,
    rows: np.ndarray | None = None,
    noise: np.ndarray | None = None,
    improving: bool = False,
    measure: Measure = ACCURACY,
    name: str = "the joined model",
) -> Verdict:
    """Whether joining pays, from each client's score joined and alone: arrays seeds × clients, or clients.

    A client without a score is NaN. `rows` has the clients' numbers of test rows; `noise` the standard errors
    of their gains from these rows, if it is known on which rows the models differ. The models that are
    compared must have been chosen without their test scores.

    >>> judge(np.array([0.8, 0.7, 0.9, 0.8]), np.array([0.7, 0.6, 0.7, 0.7]), name="w").sentence
    'Joining pays: +12.5 points for w over alone, 98 % interval +1.1 to +23.9 (4 clients, 1 seed).'
    """
    joined, alone = (np.atleast_2d(np.asarray(a, float)) for a in (joined, alone))
    gains = (alone - joined) if measure.key in ERRORS else (joined - alone)
    known = ~np.isnan(gains).all(axis=0)
    gains, joined, alone = gains[:, known], joined[:, known], alone[:, known]
    least = noise = None if noise is None else noise[known]
    if noise is None and rows is not None and measure.key in SHARES:
        least = least_noise(np.nanmean(gains, axis=0), rows[known])
        noise = row_noise(np.nanmean(joined, axis=0), np.nanmean(alone, axis=0), rows[known])
    clients, seeds = gains.shape[1], gains.shape[0]
    common: dict[str, Any] = {"metric": measure.key, "joined": name, "clients": clients, "seeds": seeds}
    if clients < 2:
        why = "it takes at least two clients with test rows" if clients else "no client has a score for both"
        return Verdict(
            verdict="cannot tell", gain=None, low=None, high=None, gaining=None, losing=None, why=why,
            sentence=f"Cannot tell whether joining pays: {why}.", **common,
        )  # fmt: skip
    found = interval(gains, least)
    margin = MARGIN * (abs(float(np.nanmean(alone))) if measure.key in ERRORS else 1)
    why = ""
    if improving:
        why = IMPROVING
    elif not np.nan_to_num(gains).any():
        why = "there is no difference for any client"
    elif found.sign == 0:
        why = "the interval contains zero"
    elif abs(found.mean) < margin:
        why = f"the difference is below {_size(measure, margin)}, too small to matter"
    answer: Answer = "cannot tell" if why else "yes" if found.sign > 0 else "no"
    gaining = losing = None
    if noise is not None:
        own, reach = np.nanmean(gains, axis=0), ndtri(0.975) * noise
        gaining, losing = int((own > reach).sum()), int((own < -reach).sum())
    text = told(found, measure, name)
    many = f"{clients} clients, {seeds} seed{'' if seeds == 1 else 's'}"
    sentence = {
        "yes": f"Joining pays: {text} ({many}).",
        "no": f"Clients are better off alone: {text} ({many}).",
        "cannot tell": f"Cannot tell whether joining pays: {text} ({many}).",
    }[answer]
    if why and why != "the interval contains zero":
        sentence += f" {why[0].upper()}{why[1:]}."
    return Verdict(
        verdict=answer, gain=found.mean, low=found.low, high=found.high, gaining=gaining, losing=losing,
        why=why, sentence=sentence, **common,
    )  # fmt: skip


def interval(gains: np.ndarray, noise: np.ndarray | None = None, level: float = LEVEL) -> Interval:
    """The mean gain over clients with its interval, from gains of seeds × clients, or of clients.

    Every client must have a gain with at least one seed; `noise` has the standard errors of the clients'
    gains from their own rows. A single client's interval is that of its rows, or infinite.

    >>> interval(np.array([1.0, 2.0, 3.0]), level=0.95)
    Interval(mean=2.0, low=-0.48..., high=4.48...)
    """
    gains = np.atleast_2d(gains)
    own, by_seed = np.nanmean(gains, axis=0), np.nanmean(gains, axis=1)
    parts = [(float(v.var(ddof=1)) / len(v), len(v) - 1) for v in (own, by_seed) if len(v) > 1]
    mean, variance = float(own.mean()), sum(v for v, _ in parts)
    # Welch–Satterthwaite degrees of freedom of a sum of variances.
    freedom = variance**2 / sum(v**2 / df for v, df in parts) if variance > 0 else 1
    tail = (1 + level) / 2
    half = float(stdtrit(freedom, tail)) * math.sqrt(variance)
    if len(own) == 1:
        half = 0.0 if noise is not None else math.inf
    if noise is not None:
        half = max(half, float(ndtri(tail) * np.sqrt(np.sum(noise**2)) / len(own)))
    return Interval(mean, mean - half, mean + half)


def least_noise(gains: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The smallest standard error that each client's gain can have.

    McNemar's √(b + c + 1)/n if its models differ on no more rows than the |g| n that the gain requires.
    """
    n = np.maximum(rows, 1)
    return np.sqrt(np.abs(gains) * n + 1) / n


def row_noise(joined: np.ndarray, alone: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The standard error of each client's gain, as if its two models erred on its rows independently.

    √((p(1 − p) + q(1 − q))/n) with shares p and q to which one right and one wrong row are added, so that a
    few rows which are all right do not count as certain. Models of one client mostly err on the same rows,
    which makes this wider than necessary.
    """
    n = np.maximum(rows, 1)
    shares = [(n * np.clip(p, 0, 1) + 1) / (n + 2) for p in (joined, alone)]
    return np.sqrt(sum(p * (1 - p) for p in shares) / n)


def told(found: Interval, measure: Measure, name: str) -> str:
    """`+1.2 points for `name` over alone, 98 % interval −0.3 to +2.7`; for an error, how much lower it is."""
    if measure.key in ERRORS:
        down = found.mean >= 0
        mean, low, high = found if down else (-found.mean, -found.high, -found.low)
        reach = f"{signed(low, measure)} to {signed(high, measure)}"
        by = signed(mean, measure).removeprefix("+")
        way = "lower" if down else "higher"
        return f"{measure.name} {way} by {by} with {name} than alone, {PERCENT} interval {reach}"
    mean, low, high = (signed(value, measure) for value in found)
    unit = measure.points.format("").strip() or f"in {measure.name}"
    return f"{mean} {unit} for {name} over alone, {PERCENT} interval {low} to {high}"


def signed(value: float, measure: Measure) -> str:
    """A difference with its sign, as in a sentence."""
    digits = "+.3g" if measure.digits is None else f"+.{measure.digits - 1}f"
    text = f"{measure.scale * value:{digits}}"
    return text.replace("-", "−") if float(text) else text[1:]


def _size(measure: Measure, size: float) -> str:
    return measure.points.format(f"{measure.scale * size:.2g}")
