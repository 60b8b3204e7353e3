"""What a client's rows have cost in differential privacy, over all runs in its state folder.

The log has a line `spent` for each reply that used rows: a Poisson-sampled Gaussian with rate q and noise
multiplier z, `steps` times. Its line is on the disk before the reply leaves, so that no reply is left out
whenever the client is killed. The ε of all lines together is that of their composition.

A plan's δ covers the rare mini-batch that is too large for its place (`CUT` of it) besides that. The ε of k
runs at δ is that of their events at δ − CUT (δ_1 + ... + δ_k).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pfedme.deploy.audit_log import Chain, check_log
from pfedme.deploy.messages import Refusal, Words
from pfedme.deploy.policy import Policy
from pfedme.privacy.accounting import Event, spent
from pfedme.privacy.rows import CUT

SLACK = 1e-9
"""Rounding of ε that does not count, relative to it."""


class Exhausted(Refusal):
    """A message that would cost more than is left of the client's budget."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a reply would cost."""

    run: str
    """The agreement that it belongs to."""
    event: Event
    delta: float
    """The plan's δ."""
    most: float
    """ε of the whole run, for which the noise was calibrated."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The lines of a log about what was spent."""

    lines: tuple[Words, ...]

    @classmethod
    def of(cls, chain: Chain) -> Budget:
        """The budget in a log."""
        return cls(tuple(line for line in chain.lines if line["what"] == "spent"))

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs in which something was spent, in order."""
        return tuple(dict.fromkeys(line["run"] for line in self.lines))

    def of_run(self, run: str) -> Budget:
        """The part of one run."""
        return Budget(tuple(line for line in self.lines if line["run"] == run))

    def found(self, run: str, kind: str, number: int) -> Words | None:
        """The line about a reply of some kind in a round (the first is 1) of a run."""
        mine = (
            line for line in self.lines if (line["run"], line["kind"], line["round"]) == (run, kind, number)
        )
        return next(mine, None)

    def epsilon(self, delta: float, more: Sequence[Cost] = ()) -> float:
        """ε of all lines, and of further replies, at δ."""
        deltas = {line["run"]: line["delta"] for line in self.lines} | {cost.run: cost.delta for cost in more}
        rest = delta - CUT * sum(deltas.values())
        events = [Event(line["q"], line["z"], line["steps"]) for line in self.lines]
        events += [cost.event for cost in more]
        if not any(event.steps for event in events):
            return 0.0
        return spent(events, rest) if rest > 0 else float("inf")

    def charge(self, cost: Cost, policy: Policy) -> Words:
        """The words of a line about a reply; raises `Exhausted` if that would be too much."""
        own = self.of_run(cost.run).epsilon(cost.delta, [cost])
        if own > cost.most * (1 + SLACK):
            raise Exhausted(
                f"its budget for this run is spent: this would bring epsilon to {own:.4g}, above the "
                f"{cost.most:g} that its noise is for"
            )
        before, total = self._total(policy.max_delta), self.epsilon(policy.max_delta, [cost])
        if policy.max_epsilon is not None and total > policy.max_epsilon * (1 + SLACK):
            raise Exhausted(
                f"its budget is spent: this would bring epsilon over all its runs to {total:.4g}, above its "
                f"limit of {policy.max_epsilon:g} (--max-epsilon)"
            )
        return {
            "run": cost.run, "q": cost.event.q, "z": cost.event.z, "steps": cost.event.steps,
            "delta": cost.delta, "epsilon": max(0.0, total - before), "total": total,
            "max_epsilon": policy.max_epsilon, "max_delta": policy.max_delta,
        }  # fmt: skip

    def _total(self, delta: float) -> float:
        """ε of all lines at δ, which the last of them may already have."""
        last = self.lines[-1] if self.lines else None
        return last["total"] if last and last["max_delta"] == delta else self.epsilon(delta)

    def lasts(self, cost: Cost, times: int, policy: Policy) -> int:
        """How many of `times` such replies the budget allows, by bisection."""

        def fits(k: int) -> bool:
            q, z, steps = cost.event
            try:
                self.charge(dataclasses.replace(cost, event=Event(q, z, k * steps)), policy)
            except Exhausted:
                return False
            return True

        if fits(times):
            return times
        low, high = 0, times
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def report(state: Path) -> Words:
    """What a client has spent, by run and in total, and what is left of its limit."""
    chain = check_log(state)
    budget = Budget.of(chain)
    limits = [line.get("policy", line) for line in chain.lines if line["what"] in ("started", "spent")]
    last: Words = limits[-1] if limits else {}
    limit, delta = last.get("max_epsilon"), last.get("max_delta", Policy.max_delta)
    runs = []
    for run in budget.runs:
        own = budget.of_run(run)
        rounds = [line["round"] for line in own.lines if line["kind"] == "train"]
        at = max(line["delta"] for line in own.lines)
        runs.append({
            "run": run, "began": own.lines[0]["time"], "rounds": len(rounds),
            "models": sum(line["kind"] == "finish" for line in own.lines),
            "noise": own.lines[-1]["z"], "delta": at, "epsilon": own.epsilon(at),
        })  # fmt: skip
    total = budget.epsilon(delta)
    left = None if limit is None else max(0.0, limit - total)
    return {"runs": runs, "epsilon": total, "delta": delta, "max_epsilon": limit, "left": left}


def report_lines(found: Words) -> list[str]:
    """`report`, in readable form."""
    lines = ["run               began                     rounds  models  noise    delta    epsilon"]
    lines += [
        f"{run['run']:<16}  {run['began'][:19]}Z  {run['rounds']:>11}  {run['models']:>6}  "
        f"{run['noise']:<7.4g}  {run['delta']:<7.2g}  {run['epsilon']:.4g}"
        for run in found["runs"]
    ]
    if not found["runs"]:
        lines = ["Nothing was spent."]
    lines.append(f"all together: epsilon {found['epsilon']:.4g} at delta {found['delta']:g}")
    if found["max_epsilon"] is None:
        return [*lines, "There is no limit over all runs (--max-epsilon)."]
    return [*lines, f"limit {found['max_epsilon']:g}, left {found['left']:.4g}"]
