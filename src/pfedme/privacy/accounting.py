"""What a sequence of noisy sums reveals about one unit, a row or a client: its (ε, δ).

A private gradient is a sum in which every unit has length at most c, plus noise N(0, z²c²I), over a Poisson
sample: each unit takes part with probability q, independently of the others. Adding or removing one unit
changes it as a Poisson-sampled Gaussian mechanism of noise multiplier z changes. If K sums are taken over
one sample, each with noise of its own, the K together are one such mechanism of noise multiplier z/√K.

ε is computed from privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022) by the package
dp-accounting. All its estimates are rounded upwards, so ε is an upper bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from scipy.special import log_ndtr

from pfedme.errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

Relation = Literal["add-remove", "replace-one"]
"""Which two sets of units count as neighbours: one has a unit that the other lacks, or one unit differs."""
GRID = 5e-4
"""The step at which privacy losses are rounded for ε up to 2; larger for larger ε, and smaller below 1."""
PRECISION = 1e-3
"""How far above the least noise multiplier `noise_for` may stay, as a share of it."""
LARGEST_NOISE = 1e7
"""No noise multiplier above this is tried."""
ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of Rényi divergence for a first guess; `renyi_epsilon` tries fractions between them too."""


class Event(NamedTuple):
    """`steps` sums over Poisson samples of rate q, each with noise multiplier z."""

    q: float
    z: float
    steps: int

    @classmethod
    def of(cls, q: float, z: float, steps: int, K: int = 1) -> Event:
        """The event of `steps` samples with K sums over each of them, every sum with noise multiplier z.

        >>> Event.of(0.01, 2.0, 100, K=4)
        Event(q=0.01, z=1.0, steps=100)
        """
        return cls(q, z / math.sqrt(K), steps)


def epsilon(q: float, z: float, steps: int, delta: float, *, K: int = 1) -> float:
    """ε of `steps` samples of rate q with K sums over each, for adding or removing one unit.

    With q = 1, everyone every time, it is exact: see `gaussian_delta`.
    """
    return spent([Event.of(q, z, steps, K)], delta)


def spent(events: Iterable[Event], delta: float) -> float:
    """ε of several events together, such as all runs of a client: for adding or removing one unit.

    It is smaller than the sum of the events' own ε.
    """
    check_delta(delta)
    steps: Counter[tuple[float, float]] = Counter()
    for event in events:
        _check_event(event)
        if event.steps and event.q:
            steps[event.q, event.z] += event.steps
    if not steps:
        return 0.0
    if any(z == 0 for _, z in steps):
        return math.inf
    return _spent(tuple(sorted((q, z, n) for (q, z), n in steps.items())), delta)


@lru_cache(maxsize=4096)
def _spent(events: tuple[tuple[float, float, int], ...], delta: float) -> float:
    if all(q == 1 for q, _, _ in events):
        return gaussian_epsilon(1 / math.sqrt(sum(n / z**2 for _, z, n in events)), 1, delta)
    rough = _renyi(events, delta)
    grid = GRID * min(max(rough / 2, 1.0), 50.0) if rough > 1 else GRID * max(rough, 0.02)
    plds = [_distribution(q, z, n, grid) for q, z, n in events]
    whole = plds[0]
    for other in plds[1:]:
        whole = whole.compose(other)
    return max(0.0, float(whole.get_epsilon_for_delta(delta)))


def _distribution(q: float, z: float, steps: int, grid: float, relation: Relation = "add-remove") -> Any:
    """The privacy loss distribution of an event."""
    pld, relations = _library().pld.privacy_loss_distribution, _library().NeighboringRelation
    neighbours = {"add-remove": relations.ADD_OR_REMOVE_ONE, "replace-one": relations.REPLACE_ONE}[relation]
    if q == 1:
        return pld.from_gaussian_mechanism(
            z / math.sqrt(steps), value_discretization_interval=grid, neighboring_relation=neighbours
        )
    single = pld.from_gaussian_mechanism(
        z, sampling_prob=q, value_discretization_interval=grid, neighboring_relation=neighbours
    )
    return single if steps == 1 else single.self_compose(steps)


def replace_one_epsilon(
    q: float, z: float, steps: int, delta: float, *, sampling: Literal["poisson", "fixed"] = "poisson"
) -> float:
    """ε for replacing one unit by another, with Poisson samples or with samples of a fixed size.

    Replacing one unit changes a sum by up to 2c. A sample of fixed size, drawn without replacement, is as
    revealing as a Poisson sample of rate q whose sum changes by 2c when a unit is added or removed.
    """
    check_delta(delta)
    _check_event(Event(q, z, steps))
    if sampling == "fixed":
        return spent([Event(q, z / 2, steps)], delta)
    rough = _renyi(((q, z / 2, steps),), delta)
    grid = GRID * min(max(rough / 2, 1.0), 50.0)
    return float(_distribution(q, z, steps, grid, "replace-one").get_epsilon_for_delta(delta))


def renyi_epsilon(q: float, z: float, steps: int, delta: float, *, K: int = 1) -> float:
    """ε by Rényi differential privacy, an older and looser bound, for comparison."""
    check_delta(delta)
    event = Event.of(q, z, steps, K)
    _check_event(event)
    orders = sorted({*ORDERS, *(2 + k / 10 for k in range(100))})
    return _renyi((event,), delta, orders) if z else math.inf


def _renyi(
    events: Iterable[tuple[float, float, int]], delta: float, orders: Iterable[float] = ORDERS
) -> float:
    library = _library()
    accountant = library.rdp.RdpAccountant(orders=list(orders))
    for q, z, steps in events:
        accountant.compose(library.PoissonSampledDpEvent(q, library.GaussianDpEvent(z)), steps)
    return float(accountant.get_epsilon(delta))


def gaussian_delta(z: float, steps: int, epsilon: float) -> float:
    """δ(ε) = Φ(−ε/μ + μ/2) − e^ε Φ(−ε/μ − μ/2) with μ = √steps/z: everyone takes part every time.

    >>> round(gaussian_delta(1.0, 1, 1.0), 4)
    0.1269
    """
    mu = math.sqrt(steps) / z
    first = float(log_ndtr(-epsilon / mu + mu / 2))
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(z: float, steps: int, delta: float) -> float:
    """The inverse of `gaussian_delta` in ε, and 0 if δ(0) is below δ.

    >>> round(gaussian_epsilon(1.0, 100, 1e-5), 1)
    91.8
    """
    if gaussian_delta(z, steps, 0.0) <= delta:
        return 0.0
    most = 1.0
    while gaussian_delta(z, steps, most) > delta:
        most *= 2
    least = most / 2 if most > 1 else 0.0
    while most - least > 1e-13 * most:
        middle = (least + most) / 2
        if not least < middle < most:
            break
        least, most = (middle, most) if gaussian_delta(z, steps, middle) > delta else (least, middle)
    return most


def noise_for(epsilon: float, delta: float, q: float, steps: int, K: int = 1) -> float:
    """The least noise multiplier z, up to `PRECISION`, with which `steps` samples cost at most ε at δ."""
    check_epsilon(epsilon)
    check_delta(delta)
    if not steps:
        return 0.0
    return math.sqrt(K) * _noise_for(float(epsilon), float(delta), float(q), int(steps))


@lru_cache(maxsize=4096)
def _noise_for(epsilon: float, delta: float, q: float, steps: int) -> float:
    """By secant steps in (log z, log ε) within a bracket: ε falls as z grows."""

    def excess(z: float) -> float:
        found = spent([Event(q, z, steps)], delta)
        return math.log(max(found, 1e-12) / epsilon)

    low, high = 0.0, 0.0
    at_low, at_high = 0.0, 0.0
    z = max(0.3, min(50.0, 1.5 * q * math.sqrt(steps) * math.sqrt(2 * math.log(1 / delta)) / epsilon))
    for _ in range(200):
        value = excess(z)
        if value > 0:
            low, at_low = z, value
        else:
            high, at_high = z, value
        if not high:
            z *= min(2.0, max(1.1, math.exp(at_low)))
        elif not low:
            z /= min(2.0, max(1.1, math.exp(-at_high)))
        elif high <= low * (1 + PRECISION):
            return high
        else:
            share = at_low / (at_low - at_high)
            middle = math.log(low) + share * (math.log(high) - math.log(low))
            edge = PRECISION / 3
            least, most = math.log(low) + edge, math.log(high) - edge
            # Aim a little above the root, and then a little below the best so far, to close the bracket.
            aimed = middle + edge if math.log(high) - middle > 3 * edge else math.log(high) - 2.5 * edge
            z = math.exp(min(max(aimed, least), most))
        if not 1e-4 < z < LARGEST_NOISE:
            break
    raise InputError(
        f"No amount of noise gives epsilon {epsilon:g} at delta {delta:g} with {steps:,} steps at a sampling "
        f"rate of {q:.3g}; choose a larger epsilon, or fewer rounds."
    )


def check_epsilon(epsilon: float) -> None:
    """Raises an error unless ε is a positive finite number."""
    if not (isinstance(epsilon, int | float) and math.isfinite(epsilon) and epsilon > 0):
        raise InputError(
            f"epsilon must be a positive finite number, such as 3, not {epsilon}; smaller values are more "
            "private."
        )


def check_delta(delta: float, n: int | None = None, owner: str = "a client") -> None:
    """Raises an error unless 0 < δ < 1, and δ < 1/n if a number of units is given."""
    if not (isinstance(delta, int | float) and 0 < delta < 1):
        raise InputError(f"delta must be above 0 and below 1, such as 1e-5, not {delta}.")
    if n is not None and delta >= 1 / max(n, 1):
        raise InputError(
            f"delta is {delta:g}, but {owner} has {n:,} units, and at 1/{n:,} or more, publishing one of "
            f"them outright would count as private; choose --delta below {1 / max(n, 1):.1g}."
        )


def _check_event(event: Event) -> None:
    """Raises an error for a rate, a noise multiplier or a number of steps that cannot be."""
    q, z, steps = event
    if not 0 <= q <= 1:
        raise InputError(f"A sampling rate must be between 0 and 1, not {q}.")
    if not (z >= 0 and math.isfinite(z)):
        raise InputError(f"A noise multiplier must be a finite number of at least 0, not {z}.")
    if not (isinstance(steps, int) and steps >= 0):
        raise InputError(f"A number of steps must be a whole number of at least 0, not {steps}.")


def _library() -> ModuleType:
    """The package dp-accounting."""
    try:
        import dp_accounting
        import dp_accounting.pld.privacy_loss_distribution
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "dp_accounting":
            raise
        raise InputError(
            "Differential privacy needs the package dp-accounting: pip install 'pfedme[privacy]'."
        ) from None
    return dp_accounting
