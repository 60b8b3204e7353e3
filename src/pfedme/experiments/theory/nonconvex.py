"""Theorem 2 and Corollary 2: smooth clients that are not convex."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pfedme.experiments.finding import failing, judge
from pfedme.experiments.theory.clients import (
    BLOCKS,
    COUNTS,
    DIMENSION,
    LAM_2,
    MOST,
    NONCONVEX,
    START,
    Federation,
    Setting,
    envelopes,
    federation,
    lowest,
    setting,
    simulate,
)
from pfedme.experiments.theory.convex import diversity
from pfedme.experiments.theory.measured import Measured, Scan, Size


def tiny_step(fed: Federation) -> float:
    """η̂_2 = 1/(75 L_F λ²), the largest η̃ = ηβR that Theorem 2 allows."""
    return 1 / (75 * fed.L_F * fed.lam**2)


class Nonconvex(NamedTuple):
    """The nonconvex federation with the constants of Theorem 2's proof; without noise, so that δ = 0."""

    fed: Federation
    gap: float
    """Δ_F = F(w_0) − F*."""
    runs: int
    seed: int

    @property
    def C_4(self) -> float:
        """48 σ_F2²."""
        return 48 * self.fed.sigma_F2

    def C_5(self, N: int, S: int) -> float:
        """3/2 L_F σ_F2² (N/S − 1)/(N − 1)."""
        return 1.5 * self.fed.L_F * self.fed.sigma_F2 * (N / S - 1) / (N - 1)

    def run(self, T: int, beta: float = 1.0, N: int = MOST, S: int | None = None, R: int = 4) -> Setting:
        """A run with the proof's η̃ = min((β²Δ_F/TC_4)^(1/3), (Δ_F/TC_5)^(1/2)), without the cap η̂_2."""
        step = (beta**2 * self.gap / (T * self.C_4)) ** (1 / 3)
        if S is not None:
            step = min(step, math.sqrt(self.gap / (T * self.C_5(N, S))))
        return setting(self.fed, step, T, beta=beta, N=N, S=S, R=R)

    def bound(self, at: Setting) -> float:
        """2 (Δ_F/(η̃T) + (η̃/β)² C_4 + η̃ C_5), with the factor L_F² in C_4 that the proof drops."""
        drift = (at.step / at.algorithm.beta) ** 2 * self.fed.L_F**2 * self.C_4
        return 2 * (self.gap / (at.step * at.rounds) + drift + at.step * self.C_5(at.N, at.S))

    def scan(self, name: str, x: Sequence[float], settings: Sequence[Setting], rate: float) -> Scan:
        """The mean of ‖∇F(w_t)‖² over each run."""
        traces = [simulate(at, self.runs, self.seed, gradients=True) for at in settings]
        means = [trace.squares[:, -1] / at.rounds for trace, at in zip(traces, settings, strict=True)]
        return Scan(name, x, np.array(means), [self.bound(at) for at in settings], rate)

    def constant(self, T: int) -> Scan:
        """The mean of ‖∇F(w_t)‖² over the first quarter, half and whole of T rounds with η̃ = η̂_2."""
        at, parts = setting(self.fed, tiny_step(self.fed), T), np.array([4, 2, 1])
        times = T // parts
        means = simulate(at, 1, self.seed, gradients=True).squares[0, BLOCKS // parts - 1] / times
        bounds = [self.bound(at._replace(rounds=int(t))) for t in times]
        return Scan("‖∇F‖² against T, η̃ = η̂_2", times.tolist(), means[:, None], bounds, -1)


def nonconvex(size: Size, seed: int) -> Nonconvex:
    """The nonconvex federation with the smallest λ that Theorem 2 allows."""
    fed = federation(NONCONVEX, LAM_2, seed)
    gap = float(envelopes(fed, START[None]).terms.mean(axis=1).sum()) - lowest(fed)
    return Nonconvex(fed, gap, size.repetitions // 2, seed)


def theorem_2(size: Size, seed: int) -> Measured:
    """The mean of ‖∇F(w_t)‖² against T with the theorem's step and with larger ones."""
    claim, non, T = "Theorem 2", nonconvex(size, seed), size.rounds
    fed = non.fed
    scans = [
        non.constant(size.long[-1] // 4),
        non.scan("‖∇F‖² against T, S = N", T, [non.run(t) for t in T], -2 / 3),
        non.scan("‖∇F‖² against T, S = 1", T, [non.run(t, 8.0, S=1) for t in T], -1 / 2),
    ]
    worst = max(float(np.max(scan.samples.mean(axis=1) / scan.bounds)) for scan in scans)
    worst_b = personal_spread(fed, size, seed)
    checks = {scan.name: scan.holds for scan in scans}
    checks |= {"the bound of (a)": worst <= 1, "the bound of (b)": worst_b <= 1}
    needed = non.gap / (non.C_4 * tiny_step(fed) ** 3)
    return Measured(
        claim,
        "For nonconvex f_i the mean of ‖∇F(w_t)‖² over t < T is of order Δ_F/(η̂_2 T) + T^(−2/3) + λ²δ², "
        "plus T^(−1/2) for S < N; and the personal models stay within O(‖∇F‖² + σ_F2²/λ² + δ²) of w.",
        f"λ² = 8L² + 1, R = 4, β = 1 (8 for S = 1), no noise: a run with η̃ = η̂_2 = {tiny_step(fed):.4f}, and "
        "runs with the proof's other steps, (Δ_F/(TC_4))^(1/3) and (Δ_F/(TC_5))^(1/2), without the cap η̂_2.",
        f"Exponents: {'; '.join(map(str, scans))}. All are at most {worst:.2f} of the bound with the "
        f"proof's constants; in (b) the left side is at most {worst_b:.2f} of the right at {size.pairs} "
        "random points.",
        judge(checks),
        f"{failing(checks)} η̂_2 hides T^(−2/3): the step would leave this cap only at T ≈ {needed:.0e}, "
        "and until then Δ_F/(η̂_2 T) is the only visible term. With larger steps the exponents are those of "
        "1/(η̃T), since Δ_F/(η̃T) is the largest term even then.",
        tuple(row for scan in scans for row in scan.rows(claim)),
    )


def personal_spread(fed: Federation, size: Size, seed: int) -> float:
    """The maximum of mean ‖θ̂_i(w) − w‖² / (2 σ_F2²/λ² + 2/(λ² − 8L²) ‖∇F(w)‖²) at random points w."""
    spread, square = diversity(fed, np.random.default_rng(seed).uniform(-4, 4, (size.pairs, DIMENSION)))
    bound = 2 * fed.sigma_F2 / fed.lam**2 + 2 / fed.margin * square
    return float(np.max((spread + square) / fed.lam**2 / bound))


def corollary_2(size: Size, seed: int) -> Measured:
    """The mean of ‖∇F(w_t)‖² against β, and against T, N and R with the corollary's β."""
    claim, non, T, local = "Corollary 2", nonconvex(size, seed), size.rounds, size.local[:3]
    betas = (1.0, 2.0, 4.0, 8.0)

    def run(T: int = T[-1], N: int = MOST, R: int = 4) -> Setting:
        return non.run(T, math.sqrt(N) * R**0.25, N=N, R=R)

    scans = [
        non.scan("‖∇F‖² against T, β = √N R^¼", T, [run(T=t) for t in T], -2 / 3),
        non.scan("‖∇F‖² against N, β = √N R^¼", COUNTS, [run(N=N) for N in COUNTS], -2 / 3),
        non.scan("‖∇F‖² against R, β = √N R^¼", local, [run(R=R) for R in local], -2 / 3),
        non.scan("‖∇F‖² against β", betas, [non.run(T[-1], beta) for beta in betas], -4 / 3),
    ]
    checks = {scan.name: scan.holds for scan in scans}
    return Measured(
        claim,
        "Without client sampling and with β = Θ(√N R^¼) the mean of ‖∇F(w_t)‖² is of order 1/(TRN)^(2/3).",
        "As for Theorem 2 with S = N and η̃ = (β²Δ_F/(TC_4))^(1/3), without the cap η̂_2; "
        f"T = {T[-1]} where it does not vary.",
        f"Exponents: {'; '.join(map(str, scans))}.",
        judge(checks),
        f"{failing(checks)} With the proof's step the bound is Δ_F^(2/3) C_4^(1/3)/(βT)^(2/3); the paper "
        "writes (β²T)^(2/3), and so has β^(−4/3) in Theorem 2. With the corollary's β, β^(−2/3) becomes "
        "N^(−1/3) and R^(−1/6). Under the cap η̂_2, where the step does not depend on β, N and R would not "
        "matter at all.",
        tuple(row for scan in scans for row in scan.rows(claim)),
    )
