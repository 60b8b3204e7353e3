"""The paper's theorems, measured on federations whose constants are known.

Client i has f_i(θ) = Σ_j a_ij φ(θ_j − c_ij): strongly convex with φ(u) = u²/2, where everything in the
theorems has a closed form, or nonconvex and smooth with φ(u) = 1 − cos u. A row of data is noise ξ on the
gradient with E ‖ξ‖² = γ_f², so that a mini-batch has variance γ_f²/|D|. Rounds are those of
`PFedMe.client_update` and `server_update`. The clients are copies of four kinds, so that federations of
4, 8 and 16 clients have the same F, w*, σ_F1 and drift, and differ only in N.
"""

from __future__ import annotations

import jax

from pfedme.experiments.theory.convex import (
    corollary_1,
    lemma_1,
    lemma_2,
    proposition_1,
    theorem_1a,
    theorem_1b,
)
from pfedme.experiments.theory.measured import FULL, QUICK, Measured, Row
from pfedme.experiments.theory.nonconvex import corollary_2, theorem_2
from pfedme.experiments.theory.picture import figure

__all__ = ["Measured", "Row", "figure", "measure"]

CLAIMS = (proposition_1, lemma_1, lemma_2, theorem_1a, theorem_1b, corollary_1, theorem_2, corollary_2)


def measure(quick: bool, seed: int = 0) -> list[Measured]:
    """The findings on each claim, measured in float64."""
    with jax.enable_x64(True):
        return [claim(QUICK if quick else FULL, seed) for claim in CLAIMS]
