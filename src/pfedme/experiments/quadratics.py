"""The best λ on quadratics: λ* = s²/τ².

Client i has a true optimum μ_i ~ N(μ, τ²I) and an own estimate x_i = μ_i + N(0, s²I), where s² is the
variance of sampling and of the noise for privacy together. With f_i(v) = ½ ‖v − x_i‖², mean regularisation

    min Σ_i f_i(v_i) + λ/2 ‖v_i − w‖²,   w = (1/N) Σ v_i,

gives v_i = (x_i + λ x̄)/(1 + λ). Its error E(v_i − μ_i)² in a coordinate is

    (1 − 1/N) (s² + λ²τ²)/(1 + λ)² + s²/N,

which is least at λ = s²/τ². Stronger privacy is more noise, hence a larger λ.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pfedme.privacy.accounting import noise_for


@dataclasses.dataclass(frozen=True)
class Means:
    """Clients that estimate their own means, with one noisy mean of their rows each."""

    clients: int = 20
    rows: int = 100
    sigma: float = 1.0
    """The standard deviation of a client's rows in a coordinate."""
    tau: float = 0.2
    """The standard deviation between the clients' true means in a coordinate."""
    clip: float = 4.0
    """c: rows are at most this long, so that the noise of the mean has standard deviation zc/n."""
    delta: float = 1e-5

    def variance(self, epsilon: float) -> float:
        """s² = σ²/n + (zc/n)²: sampling and noise of a client's own estimate."""
        z = 0.0 if math.isinf(epsilon) else noise_for(epsilon, self.delta, 1.0, 1)
        return self.sigma**2 / self.rows + (z * self.clip / self.rows) ** 2

    def best_lam(self, epsilon: float) -> float:
        """λ* = s²/τ².

        >>> round(Means(rows=25, tau=0.2).best_lam(math.inf), 6)
        1.0
        """
        return self.variance(epsilon) / self.tau**2

    def error(self, lam: float, epsilon: float) -> float:
        """E(v_i − μ_i)² in a coordinate."""
        own, share = self.variance(epsilon), 1 / self.clients
        return (1 - share) * (own + lam**2 * self.tau**2) / (1 + lam) ** 2 + share * own

    def drawn(self, epsilon: float, coordinates: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """True means and own estimates, one row per client."""
        rng = np.random.default_rng(seed)
        true = self.tau * rng.standard_normal((self.clients, coordinates))
        own = true + math.sqrt(self.variance(epsilon)) * rng.standard_normal(true.shape)
        return true, own

    def best_lam_drawn(self, epsilon: float, coordinates: int = 20_000, seed: int = 0) -> float:
        """The λ with the least error on clients that are drawn: with a = 1/(1 + λ), the error of
        v_i = x̄ + a (x_i − x̄) is a quadratic function of a, whose minimum is that of least squares."""
        true, own = self.drawn(epsilon, coordinates, seed)
        mean = own.mean(axis=0)
        a = np.sum((own - mean) * (true - mean)) / np.sum((own - mean) ** 2)
        return float(1 / a - 1)
